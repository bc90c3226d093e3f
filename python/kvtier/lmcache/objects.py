"""Objects of any size, by key, as chunks of a server."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Callable, Iterator, Sequence

import numpy as np

from kvtier.buffers import Bytes
from kvtier.chunk_options import ChunkOptions
from kvtier.chunks import ChunkGroup, ChunkStatistics, ChunkStore
from kvtier.identity import make_identity
from kvtier.lease import Closing

_SIZE_BYTES = 8

_Move = Callable[[ChunkGroup, Sequence[int]], "Future[list[bool]]"]


class ObjectStore(Closing):
    """Chunks whose size the reader does not know: beside each object its size is stored, under the
    same key, written last. Blocks its caller, within the deadlines of the options; what does not
    come in time is False. Thread-safe."""

    def __init__(self, engine: str, options: ChunkOptions) -> None:
        """Raises InvalidArgumentError for options that are no use, and what the server has against
        the connection; a server that cannot be reached is logged."""
        self._store = ChunkStore(options)
        self._identity = make_identity(engine, {"kind": "objects"})
        self._changing = threading.Lock()
        self._groups: dict[int, ChunkGroup] = {}
        self._locked: dict[bytes, list[int]] = {}  # sizes, one for each lock
        try:
            self._sizes = self._store.group(
                make_identity(engine, {"kind": "sizes"}), _SIZE_BYTES
            )
        except BaseException:
            self._store.close()
            raise

    def statistics(self) -> ChunkStatistics:
        return self._store.statistics()

    def put(self, keys: Sequence[bytes], objects: Sequence[memoryview]) -> list[bool]:
        """Stores objects; returns which are stored, now or before."""
        stored = self._move(
            [each.nbytes for each in objects], lambda group, at: group.put(*_pick(at, keys, objects))
        )
        good = [i for i, each in enumerate(stored) if each]
        sizes = [np.int64(objects[i].nbytes).tobytes() for i in good]
        known = self._sizes.put([keys[i] for i in good], sizes).result()
        results = [False] * len(keys)
        for i, each in zip(good, known):
            results[i] = each
        return results

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Reads objects to writable buffers of their sizes; returns which were read. What was not
        read may hold anything."""
        return self._move(
            [each.nbytes for each in into], lambda group, at: group.get(*_pick(at, keys, into))
        )

    def lock(self, keys: Sequence[bytes]) -> list[bool]:
        """Keeps stored objects from eviction until as many `unlock`; returns which are stored."""
        sizes = np.zeros(len(keys), np.int64)
        known = self._sizes.get(keys, [sizes[i : i + 1] for i in range(len(keys))]).result()
        wanted = [int(size) if each and size > 0 else 0 for size, each in zip(sizes, known)]
        locked = self._move(wanted, lambda group, at: group.lock([keys[i] for i in at]))
        with self._changing:
            for key, size, each in zip(keys, wanted, locked):
                if each:
                    self._locked.setdefault(key, []).append(size)
        return locked

    def unlock(self, keys: Sequence[bytes]) -> None:
        """Ends a lock of each key; nothing, for one that has none. When the server does not answer,
        the locks end with the lease."""
        by_size: dict[int, list[bytes]] = {}
        with self._changing:
            for key in keys:
                sizes = self._locked.get(key)
                if sizes:
                    by_size.setdefault(sizes.pop(), []).append(key)
                    if not sizes:
                        del self._locked[key]
        for size, own in by_size.items():
            ended = self._group(size).unlock(own)
            if not ended.cancelled():
                ended.result()

    def count_locked(self) -> int:
        with self._changing:
            return len(self._locked)

    def close(self) -> None:
        """Ends threads and the connection; what is stored stays with the server."""
        self._store.close()

    def _group(self, size: int) -> ChunkGroup:
        with self._changing:
            group = self._groups.get(size)
            if group is None:
                group = self._groups[size] = ChunkGroup(self._store, self._identity, size)
            return group

    def _move(self, sizes: Sequence[int], move: _Move) -> list[bool]:
        """Moves objects size by size; one of 0 bytes is not there."""
        begun = [
            (at, move(self._group(size), at)) for size, at in _by_size(sizes) if size > 0
        ]
        results = [False] * len(sizes)
        for at, future in begun:
            if future.cancelled():
                continue
            for i, each in zip(at, future.result()):
                results[i] = each
        return results


def _by_size(sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    for size in sorted(set(sizes)):
        yield size, [i for i, each in enumerate(sizes) if each == size]


def _pick(
    at: Sequence[int], keys: Sequence[bytes], buffers: Sequence[memoryview]
) -> tuple[list[bytes], list[Bytes]]:
    return [keys[i] for i in at], [buffers[i] for i in at]
