"""What ends with a `with`, and the thread that renews leases."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any, TypeVar

import grpc

from kvtier.connection import Connection
from kvtier.v1 import session_pb2

_NAMES_PER_RENEWAL = 1024

Self = TypeVar("Self", bound="Closing")


class Closing:
    """Closed at the end of a `with`."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class LeaseKeeper:
    """Renews the leases of sessions as long as their objects live."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._sessions: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._interval = 20.0
        self._renewal: Any = None
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="kvtier-leases", daemon=True)
        self._thread.start()

    def add(self, session: Any, name: str, ttl: float) -> None:
        with self._changed:
            self._sessions[name] = session
            if ttl / 3 < self._interval:
                self._interval = ttl / 3
                self._changed.notify()

    def remove(self, name: str) -> None:
        with self._changed:
            self._sessions.pop(name, None)

    def close(self) -> None:
        with self._changed:
            self._ending = True
            if self._renewal is not None:
                self._renewal.cancel()
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._ending:
                if self._changed.wait(self._interval):
                    continue  # the interval has become shorter, or this is the end
                names = sorted(self._sessions.keys())
                if not names:
                    continue
                requests = [
                    session_pb2.KeepAliveRequest(names=names[first : first + _NAMES_PER_RENEWAL])
                    for first in range(0, len(names), _NAMES_PER_RENEWAL)
                ]
                connection = self._connection
                try:
                    self._renewal = connection.sessions.KeepAlive(
                        iter(requests),
                        timeout=connection.options.timeout,
                        metadata=connection.metadata,
                    )
                except ValueError:  # the channel has been closed
                    return
                self._changed.release()
                try:
                    for _ in self._renewal:
                        pass
                except grpc.RpcError:
                    pass  # tried again with the next; what is lost, the next call says
                finally:
                    self._changed.acquire()
                    self._renewal = None
