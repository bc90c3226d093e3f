"""A connection of a store of chunks."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Sequence

from kvtier.client import Client
from kvtier.pages import RemotePages

_END_SECONDS = 1.0


class ChunkLink:
    """A connection with its leases and pins, used until it fails."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._changing = threading.Lock()
        self._leases: dict[tuple[str, int], RemotePages] = {}
        self._pins: dict[tuple[str, bytes], list[list[str]]] = defaultdict(list)

    @property
    def has_leases(self) -> bool:
        return bool(self._leases)

    def pages(self, model: str, page_bytes: int) -> RemotePages:
        with self._changing:
            lease = self._leases.get((model, page_bytes))
        if lease is not None:
            return lease
        opened = self.client.open_pages(model, page_bytes)
        with self._changing:
            lease = self._leases.setdefault((model, page_bytes), opened)
        if lease is not opened:
            opened.close()  # another thread has opened one meanwhile
        return lease

    def pin(self, kind: str, hash: bytes, handles: list[str]) -> None:
        """Takes note of a pin. `kind`: which chunks have such hashes and handles."""
        with self._changing:
            self._pins[kind, hash].append(handles)

    def unpin(self, kind: str, hash: bytes) -> list[str]:
        """Returns the handles of one pin, which is not counted any more."""
        with self._changing:
            pins = self._pins.get((kind, hash))
            if pins is None:
                return []
            handles = pins.pop()
            if not pins:
                del self._pins[kind, hash]
            return handles

    def pinned(self, kind: str, hashes: Sequence[bytes]) -> list[list[str] | None]:
        """Returns of each hash the handles of a pin."""
        with self._changing:
            pins = [self._pins.get((kind, each)) for each in hashes]
            return [each[-1] if each else None for each in pins]

    def end(self) -> None:
        """Gives the leases back, waiting a second at most for all of them."""
        with self.client.connection.deadline(_END_SECONDS):
            for lease in list(self._leases.values()):
                lease.close()
        self.client.close()
