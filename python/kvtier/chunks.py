"""Chunks of KV of any size, found by their keys in the page cache of a server.

What connectors to inference engines share. Nothing here raises, or waits longer than its deadline,
because the server is slow, full, paused, restarted or out of reach: what it does not give in time is a miss.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, Sequence, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.breaker import CircuitBreaker
from kvtier.buffers import Bytes, readable, writable
from kvtier.chunk_link import ChunkLink
from kvtier.chunk_options import ChunkOptions
from kvtier.errors import (
    ClientError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseExpiredError,
    NotFoundError,
    ResourceExhaustedError,
    ServerEpochError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    invalid,
)
from kvtier.lease import Closing
from kvtier.pages import FoundPage, PagePut, RemotePages

T = TypeVar("T")

#: What a page of the server may have.
MAX_PAGE_BYTES = 4 << 20
_MAX_HASH_BYTES = 64
_BATCH_PAGES = 1024

_logger = logging.getLogger("kvtier")

_Work = Callable[[Sequence[bytes], Sequence[NDArray[np.uint8]]], list[bool]]


@dataclass
class ChunkStatistics:
    """Counts since the start."""

    read_chunks: int = 0
    missed_chunks: int = 0  # asked for by `get`, and not read
    stored_chunks: int = 0  # now or before
    unstored_chunks: int = 0
    failed_calls: int = 0
    #: Not made, since the server did not answer shortly before.
    skipped_calls: int = 0


class ChunkStore(Closing):
    """A connection that is made, and made again, when it is needed, and the threads that move
    chunks. Thread-safe."""

    def __init__(self, options: ChunkOptions) -> None:
        """Raises InvalidArgumentError for options that are no use. The server may be out of reach."""
        self._options = options
        self._breaker = CircuitBreaker(options.retry_after)
        self._changing = threading.Lock()
        self._link: ChunkLink | None = ChunkLink(options.connect())
        self._open = True
        self._statistics = ChunkStatistics()
        self._threads = ThreadPoolExecutor(options.io_threads, "kvtier-chunks")
        self._process = os.getpid()

    @property
    def options(self) -> ChunkOptions:
        return self._options

    def group(self, identity: str, chunk_bytes: int, segments: int = 1) -> ChunkGroup:
        """Returns the chunks of an identity (`kvtier.identity`) and a size, each in `segments` of
        equal size. Raises what the server has against it, such as a token that it does not know; a
        server that cannot be reached is logged."""
        group = ChunkGroup(self, identity, chunk_bytes, segments)
        refusal = self.run(group.refusal, None)
        if refusal is not None:
            raise refusal
        return group

    def statistics(self) -> ChunkStatistics:
        with self._changing:
            return replace(self._statistics)

    def count(self, **amounts: int) -> None:
        """Adds to the statistics."""
        with self._changing:
            for name, amount in amounts.items():
                setattr(self._statistics, name, getattr(self._statistics, name) + amount)

    def look_up(self, work: Callable[[ChunkLink], T], otherwise: T, *, pins: bool = False) -> T:
        """As `run`, within the timeout of lookups."""
        return self.run(work, otherwise, pins=pins, timeout=self._options.lookup_timeout)

    def run(
        self,
        work: Callable[[ChunkLink], T],
        otherwise: T,
        *,
        pins: bool = False,
        timeout: float | None = None,
    ) -> T:
        """Returns what `work` returns; `otherwise`, when the server does not do it within the
        timeout. A server that has been started anew is asked once more. Work that `pins` and fails
        ends the connection, and so whatever it has pinned."""
        end = time.monotonic() + (self._options.timeout if timeout is None else timeout)
        for again in (True, False):
            link = None
            try:
                link = self._connected()
                if link is None:
                    self.count(skipped_calls=1)
                    return otherwise
                with link.client.connection.deadline(end - time.monotonic()):
                    result = work(link)
            except ClientError as error:
                self.count(failed_calls=1)
                if not self._failed(link, error, pins) or not again:
                    return otherwise
            else:
                if self._breaker.succeed():
                    _logger.warning("kvtier: the server answers again")
                return result
        return otherwise

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in a thread of the store. The future is cancelled once the store is closed, and in
        a fork of the process, which has none of the threads."""
        try:
            if os.getpid() != self._process:
                raise RuntimeError
            return self._threads.submit(work)
        except RuntimeError:
            ended: Future[T] = Future()
            ended.cancel()
            ended.set_running_or_notify_cancel()
            return ended

    def close(self) -> None:
        """Gives up what has not begun, waits for what has, which has a deadline, and gives the
        leases back."""
        with self._changing:
            self._open = False
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._changing:
            link, self._link = self._link, None
        if link is not None:
            link.end()

    def _connected(self) -> ChunkLink | None:
        with self._changing:
            if not self._open or not self._breaker.allow():
                return None
            if self._link is None:
                self._link = ChunkLink(self._options.connect())
            return self._link

    def _failed(self, link: ChunkLink | None, error: ClientError, pins: bool) -> bool:
        """Returns whether to try again, with another connection."""
        full = isinstance(error, ResourceExhaustedError)
        if full and not pins:
            return False
        opened = False
        with self._changing:
            if link is not None and link is not self._link:
                return True  # another thread has found out before
            self._link = None
            gone = isinstance(error, (LeaseExpiredError, ServerEpochError, NotFoundError))
            stale = link is not None and link.has_leases and isinstance(error, UnavailableError)
            again = gone or stale
            if not again and not full:
                opened = self._breaker.fail()
        if link is not None:
            link.client.close()
        if opened:
            _logger.warning(
                "kvtier: %s; misses for %g s, then a trial", error, self._options.retry_after
            )
        return again


class ChunkGroup:
    """Chunks of one identity and size. A chunk is one or several segments of equal size, which the
    caller has in different places. A segment of more than `MAX_PAGE_BYTES` is stored as parts of
    equal size; the last begins where it ends with the segment, and so may overlap the one before.
    Parts are in the layers 0, 1, ... of the chunk's hash, segment by segment. Keys are 1 to 64
    bytes, or taken by their SHA-256."""

    def __init__(
        self, store: ChunkStore, identity: str, chunk_bytes: int, segments: int = 1
    ) -> None:
        if chunk_bytes < 1:
            raise invalid(f"chunk_bytes: expected at least 1, found {chunk_bytes}")
        if segments < 1 or chunk_bytes % segments != 0:
            raise invalid(
                f"segments: expected a divisor of {chunk_bytes}, the bytes of a chunk, "
                f"found {segments}"
            )
        self._store = store
        self._model = f"{identity}/{chunk_bytes}" + (f"/{segments}" if segments > 1 else "")
        self._chunk_bytes = chunk_bytes
        self._segments = segments
        self._segment_bytes = chunk_bytes // segments
        parts = -(-self._segment_bytes // MAX_PAGE_BYTES)
        self._part_bytes = -(-self._segment_bytes // parts)
        last = self._segment_bytes - self._part_bytes
        self._begins = [min(part * self._part_bytes, last) for part in range(parts)]
        self._layers = range(segments * parts)
        self._batch = max(
            min(store.options.batch_bytes // chunk_bytes, _BATCH_PAGES // len(self._layers)), 1
        )

    @property
    def chunk_bytes(self) -> int:
        return self._chunk_bytes

    def segment(self, index: int) -> ChunkGroup:
        """Returns the chunks that consist of one segment of these, to be moved by themselves; it is
        the same memory of the server."""
        alone = copy.copy(self)
        parts = len(self._begins)
        alone._chunk_bytes = self._segment_bytes
        alone._segments = 1
        alone._layers = range(index * parts, (index + 1) * parts)
        alone._batch = max(
            min(self._store.options.batch_bytes // self._segment_bytes, _BATCH_PAGES // parts), 1
        )
        return alone

    def start_contains(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """As `contains`, by a thread of the store."""
        return self._store.start(lambda: self.contains(keys))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns of each key whether its chunk is stored; False for all without a server."""
        hashes = [_hash(key) for key in keys]
        return self._store.look_up(
            lambda link: self._pages(link).contains(hashes, self._layers), [False] * len(keys)
        )

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """Returns for how many leading keys chunks are stored."""
        found = self.contains(keys)
        return found.index(False) if False in found else len(found)

    def put(self, keys: Sequence[bytes], chunks: Sequence[Bytes]) -> Future[list[bool]]:
        """Stores chunks, given as the segments of each key, which must not change until the future
        has its result: whether each chunk is stored, now or before."""
        views = [readable(chunk, self._segment_bytes, "chunk") for chunk in chunks]
        return self._spread(self._put, keys, views)

    def get(self, keys: Sequence[bytes], into: Sequence[Bytes]) -> Future[list[bool]]:
        """Reads chunks to the segments of each key, writable contiguous buffers which must live
        until the future has its result: whether each chunk was read. The segments of one that was
        not may hold anything."""
        views = [writable(buffer, self._segment_bytes) for buffer in into]
        return self._spread(self._get, keys, views)

    def lock(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Keeps stored chunks from eviction until as many `unlock`, or the end of the connection.
        The future has which are stored."""
        hashes = [_hash(key) for key in keys]
        return self._store.start(
            lambda: self._store.look_up(
                lambda link: self._lock(link, hashes), [False] * len(hashes), pins=True
            )
        )

    def unlock(self, keys: Sequence[bytes]) -> Future[None]:
        """Ends a lock of each key; nothing, for one that has none."""
        hashes = [_hash(key) for key in keys]
        return self._store.start(
            lambda: self._store.look_up(lambda link: self._unlock(link, hashes), None, pins=True)
        )

    def refusal(self, link: ChunkLink) -> ClientError | None:
        """Returns what the server has against a lease of these chunks."""
        try:
            self._pages(link)
        except (InvalidArgumentError, UnauthenticatedError, UnimplementedError) as error:
            return error
        except FailedPreconditionError as error:
            if error.reason != "NO_PAGE_CACHE":
                raise
            return error
        return None

    @property
    def _locks(self) -> str:
        """Names what is locked: the parts of these chunks, which one segment alone has fewer of."""
        return f"{self._model}/{self._layers.start}-{self._layers.stop}"

    def _pages(self, link: ChunkLink) -> RemotePages:
        return link.pages(self._model, self._part_bytes)

    def _put(self, keys: Sequence[bytes], views: Sequence[NDArray[np.uint8]]) -> list[bool]:
        hashes = [_hash(key) for key in keys]
        chunks = dict(zip(hashes, self._parts(views)))  # each key once
        puts = [
            PagePut(each, layer, part)
            for each, parts in chunks.items()
            for layer, part in zip(self._layers, parts)
        ]
        stored: dict[bytes, bool] = dict.fromkeys(chunks, False)

        def work(link: ChunkLink) -> None:
            outcomes = self._pages(link).put(puts)
            kept = [isinstance(outcome, FoundPage) for outcome in outcomes]
            for each, good in zip(chunks, self._whole(kept)):
                stored[each] = good

        self._store.run(work, None)
        results = [stored[each] for each in hashes]
        good = sum(results)
        self._store.count(stored_chunks=good, unstored_chunks=len(results) - good)
        return results

    def _get(self, keys: Sequence[bytes], views: Sequence[NDArray[np.uint8]]) -> list[bool]:
        hashes = [_hash(key) for key in keys]
        results = self._store.run(
            lambda link: self._read(link, hashes, views), [False] * len(keys)
        )
        good = sum(results)
        self._store.count(read_chunks=good, missed_chunks=len(results) - good)
        return results

    def _read(
        self, link: ChunkLink, hashes: Sequence[bytes], views: Sequence[NDArray[np.uint8]]
    ) -> list[bool]:
        pages = self._pages(link)
        found = link.pinned(self._locks, hashes)
        unpinned = [i for i, handles in enumerate(found) if handles is None]
        for i, parts in zip(unpinned, pages.find([hashes[i] for i in unpinned], self._layers)):
            found[i] = None if parts is None else [part.handle for part in parts]
        wanted = [i for i, handles in enumerate(found) if handles is not None]
        handles = [handle for i in wanted for handle in found[i] or ()]
        chunks = self._parts(views)
        buffers = [part for i in wanted for part in chunks[i]]
        outcomes = pages.get(handles, into=buffers)
        read = self._whole([isinstance(outcome, np.ndarray) for outcome in outcomes])
        results = [False] * len(hashes)
        for i, good in zip(wanted, read):
            results[i] = good
        return results

    def _lock(self, link: ChunkLink, hashes: Sequence[bytes]) -> list[bool]:
        found = self._pages(link).find(hashes, self._layers, pin=True)
        for each, parts in zip(hashes, found):
            if parts is not None:
                link.pin(self._locks, each, [part.handle for part in parts])
        return [parts is not None for parts in found]

    def _unlock(self, link: ChunkLink, hashes: Sequence[bytes]) -> None:
        handles = [handle for each in hashes for handle in link.unpin(self._locks, each)]
        size = _BATCH_PAGES
        for first in range(0, len(handles), size):
            self._pages(link).unpin(handles[first : first + size])

    def _parts(self, segments: Sequence[NDArray[np.uint8]]) -> list[list[NDArray[np.uint8]]]:
        """Returns the parts of each chunk, by layer."""
        parts = [
            segment[begin : begin + self._part_bytes]
            for segment in segments
            for begin in self._begins
        ]
        count = len(self._layers)
        return [parts[first : first + count] for first in range(0, len(parts), count)]

    def _whole(self, parts: Sequence[bool]) -> list[bool]:
        """Returns of each chunk whether all its parts are good."""
        count = len(self._layers)
        return [all(parts[first : first + count]) for first in range(0, len(parts), count)]

    def _spread(
        self, work: _Work, keys: Sequence[bytes], views: Sequence[NDArray[np.uint8]]
    ) -> Future[list[bool]]:
        """Does `work` batch by batch, in the threads of the store."""
        if len(keys) * self._segments != len(views):
            raise invalid(
                f"buffers: expected {self._segments} for each of {len(keys)} keys, "
                f"found {len(views)}"
            )
        gathered = _Gathered(range(0, len(keys), self._batch), len(keys))
        for first in range(0, len(keys), self._batch):
            end = first + self._batch
            buffers = views[first * self._segments : end * self._segments]
            future = self._store.start(partial(work, keys[first:end], buffers))
            future.add_done_callback(partial(gathered.end, first))
        return gathered.whole


class _Gathered:
    """The results of batches, as one future. A batch that failed or was cancelled has none."""

    def __init__(self, begins: Sequence[int], count: int) -> None:
        self.whole: Future[list[bool]] = Future()
        self.whole.set_running_or_notify_cancel()  # it cannot be cancelled
        self._results = [False] * count
        self._changing = threading.Lock()
        self._left = len(begins)
        if not begins:
            self.whole.set_result([])

    def end(self, first: int, batch: Future[list[bool]]) -> None:
        results: list[bool] = []
        if not batch.cancelled():
            error = batch.exception()
            if error is None:
                results = batch.result()
            else:
                _logger.error("kvtier: a transfer failed", exc_info=error)
        with self._changing:
            self._results[first : first + len(results)] = results
            self._left -= 1
            ended = self._left == 0
        if ended:
            self.whole.set_result(self._results)


def _hash(key: bytes) -> bytes:
    return key if 0 < len(key) <= _MAX_HASH_BYTES else hashlib.sha256(key).digest()
