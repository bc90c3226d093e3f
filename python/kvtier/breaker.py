"""When to stop asking a server that does not answer."""

from __future__ import annotations

import threading
import time
from typing import Callable


class CircuitBreaker:
    """Closed, every call passes. After a failure it is open: no call passes for `retry_after`
    seconds, then one does, as a trial, each `retry_after` seconds, until one succeeds. Thread-safe."""

    def __init__(
        self, retry_after: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._retry_after = retry_after
        self._clock = clock
        self._changing = threading.Lock()
        self._next_trial: float | None = None  # None: closed

    def allow(self) -> bool:
        """Returns whether a call may be made now."""
        with self._changing:
            now = self._clock()
            if self._next_trial is None:
                return True
            if now < self._next_trial:
                return False
            self._next_trial = now + self._retry_after
            return True

    def fail(self) -> bool:
        """Opens it. Returns whether it was closed."""
        with self._changing:
            was_closed = self._next_trial is None
            self._next_trial = self._clock() + self._retry_after
            return was_closed

    def succeed(self) -> bool:
        """Closes it. Returns whether it was open."""
        with self._changing:
            was_open = self._next_trial is not None
            self._next_trial = None
            return was_open
