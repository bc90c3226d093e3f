"""Page calls that do not hold up who makes them: as futures, and for asyncio."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Callable, Sequence, TypeVar

from kvtier.buffers import Bytes
from kvtier.errors import ClientError, invalid
from kvtier.lease import Closing
from kvtier.pages import FoundPage, GetOutcome, PagePut, PutOutcome, RemotePages

T = TypeVar("T")


class PageFutures(Closing):
    """The calls of a `RemotePages` as futures, made by `threads` threads, 1 to 64. Calls may end in
    another order than they were made in. Each has the client's timeout, counted from when a thread
    begins it. Buffers that are given must not change, and those that are read to must not be used,
    until the future has its result. `Future.cancel` takes back a call that no thread has begun.
    Thread-safe."""

    def __init__(self, pages: RemotePages, threads: int = 4) -> None:
        """`pages` is not closed with this."""
        if not 1 <= threads <= 64:
            raise invalid(f"threads: expected 1 to 64, found {threads}")
        self._pages = pages
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvtier-pages")

    def lookup(
        self, hashes: Sequence[bytes], layers: Sequence[int], *, pin: bool = False
    ) -> Future[list[FoundPage]]:
        return self._start(self._pages.lookup, hashes, layers, pin=pin)

    def find(
        self, hashes: Sequence[bytes], layers: Sequence[int], *, pin: bool = False
    ) -> Future[list[list[FoundPage] | None]]:
        return self._start(self._pages.find, hashes, layers, pin=pin)

    def contains(self, hashes: Sequence[bytes], layers: Sequence[int]) -> Future[list[bool]]:
        return self._start(self._pages.contains, hashes, layers)

    def put(self, pages: Sequence[PagePut]) -> Future[list[PutOutcome]]:
        return self._start(self._pages.put, pages)

    def get(
        self, handles: Sequence[str], into: Sequence[Bytes] | None = None
    ) -> Future[list[GetOutcome]]:
        return self._start(self._pages.get, handles, into)

    def pin(self, handles: Sequence[str]) -> Future[list[FoundPage | ClientError]]:
        return self._start(self._pages.pin, handles)

    def unpin(self, handles: Sequence[str]) -> Future[list[ClientError | None]]:
        return self._start(self._pages.unpin, handles)

    def remove(self, handles: Sequence[str]) -> Future[list[ClientError | None]]:
        return self._start(self._pages.remove, handles)

    def _start(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        self._pages.check_process()  # a fork has none of the threads
        return self._threads.submit(call, *args, **kwargs)

    def close(self) -> None:
        """Takes back what no thread has begun, and waits for the rest."""
        self._threads.shutdown(wait=True, cancel_futures=True)


class AsyncPages:
    """The calls of a `RemotePages` as coroutines; the event loop goes on meanwhile. As `PageFutures`,
    which makes them: a call whose task is cancelled goes on to its end once a thread has begun it,
    and so do its reads into buffers."""

    def __init__(self, pages: RemotePages, threads: int = 4) -> None:
        self._calls = PageFutures(pages, threads)

    async def lookup(
        self, hashes: Sequence[bytes], layers: Sequence[int], *, pin: bool = False
    ) -> list[FoundPage]:
        return await asyncio.wrap_future(self._calls.lookup(hashes, layers, pin=pin))

    async def find(
        self, hashes: Sequence[bytes], layers: Sequence[int], *, pin: bool = False
    ) -> list[list[FoundPage] | None]:
        return await asyncio.wrap_future(self._calls.find(hashes, layers, pin=pin))

    async def contains(self, hashes: Sequence[bytes], layers: Sequence[int]) -> list[bool]:
        return await asyncio.wrap_future(self._calls.contains(hashes, layers))

    async def put(self, pages: Sequence[PagePut]) -> list[PutOutcome]:
        return await asyncio.wrap_future(self._calls.put(pages))

    async def get(
        self, handles: Sequence[str], into: Sequence[Bytes] | None = None
    ) -> list[GetOutcome]:
        return await asyncio.wrap_future(self._calls.get(handles, into))

    async def pin(self, handles: Sequence[str]) -> list[FoundPage | ClientError]:
        return await asyncio.wrap_future(self._calls.pin(handles))

    async def unpin(self, handles: Sequence[str]) -> list[ClientError | None]:
        return await asyncio.wrap_future(self._calls.unpin(handles))

    async def remove(self, handles: Sequence[str]) -> list[ClientError | None]:
        return await asyncio.wrap_future(self._calls.remove(handles))

    async def close(self) -> None:
        """As `PageFutures.close`; the event loop goes on meanwhile."""
        await asyncio.get_running_loop().run_in_executor(None, self._calls.close)

    async def __aenter__(self) -> AsyncPages:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
