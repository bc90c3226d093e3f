"""Pages that an engine leaves with the server and gets back, perhaps in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence, Union

import grpc
import numpy as np
from numpy.typing import NDArray

from kvtier import frames, page_plane
from kvtier.connection import translated
from kvtier.data_plane import Channel
from kvtier.errors import ClientError, Details, ErrorCode, error_of, invalid, make_error
from kvtier.lease import Leased
from kvtier.v1 import page_pb2, status_pb2, transfer_pb2

if TYPE_CHECKING:
    from kvtier.client import Client

_CHUNK_HEAD_BYTES = 256

#: Anything with the buffer protocol: bytes, or an array.
Bytes = Union[bytes, bytearray, memoryview, NDArray[Any]]


@dataclass(frozen=True)
class PagePut:
    """A page to store. `hash`, of the page's tokens and all before them, up to 64 bytes, finds it
    together with `layer`; `data` has the page size."""

    hash: bytes
    layer: int
    data: Bytes


@dataclass(frozen=True)
class FoundPage:
    """A committed page. `existed`: of `put`, it was there before, and not written again."""

    handle: str
    crc32c: int
    existed: bool = False


PutOutcome = Union[FoundPage, ClientError]
GetOutcome = Union[NDArray[np.uint8], ClientError]


class RemotePages(Leased):
    """As `kvtier::RemotePages`: a lease on the server's page cache, closed by `close` or at the end
    of a `with`. Thread-safe. A page that fails leaves the others alone: results are per page, an
    error among them where `NotFoundError` with reason PAGE_GONE is a miss."""

    def __init__(self, client: Client, response: page_pb2.OpenLeaseResponse) -> None:
        super().__init__(client, response.lease.name, response.lease.ttl)
        self._planes = client.planes
        self._page_bytes = response.lease.page_bytes
        self._limits = response.limits

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def lookup(
        self, hashes: Sequence[bytes], layers: Sequence[int], *, pin: bool = False
    ) -> list[FoundPage]:
        """Returns the pages of the leading hashes for which all `layers` are stored, by hash, then
        layer. With `pin` they stay until `unpin`."""
        request = page_pb2.LookupPrefixRequest(
            lease=self._name, hashes=hashes, layers=layers, pin=pin
        )
        if pin:
            request.request_id = self._client.make_request_id()
        response = self._connection.call(self._connection.pages.LookupPrefix, request)
        return [FoundPage(page.handle, page.crc32c) for page in response.pages]

    def put(self, pages: Sequence[PagePut]) -> list[PutOutcome]:
        """Stores pages, each hash and layer once."""
        data = [_bytes_of(page.data) for page in pages]
        for page, view in zip(pages, data):
            if view.nbytes != self._page_bytes:
                raise invalid(f"data: expected {self._page_bytes} bytes, found {view.nbytes}")
        request = page_pb2.BatchReservePagesRequest(
            lease=self._name, request_id=self._client.make_request_id()
        )
        for page in pages:
            request.keys.add(hash=page.hash, layer=page.layer)
        reserved = self._connection.call(self._connection.pages.BatchReservePages, request)
        outcomes = [_page_of(item) for item in reserved.items]
        fresh = [
            i
            for i, outcome in enumerate(outcomes)
            if isinstance(outcome, FoundPage) and not outcome.existed
        ]
        existed = self._put_shared(reserved, data, fresh, outcomes)
        if existed:
            found = self.put([pages[i] for i in existed])  # or put, if they have gone since
            for i, outcome in zip(existed, found):
                outcomes[i] = outcome
        if not fresh:
            return outcomes
        chunks = self._chunks([(reserved.items[i].page.handle, data[i]) for i in fresh])
        written = self._connection.call_once(self._connection.transfer.WritePages, chunks)
        for i, item in zip(fresh, written.items, strict=True):
            outcomes[i] = _page_of(item)
        return outcomes

    def get(self, handles: Sequence[str]) -> list[GetOutcome]:
        """Reads pages, whose checksums the server has compared; over gRPC by one stream, since
        messages are taken apart under the interpreter's lock."""
        found: list[NDArray[np.uint8] | None] = [None] * len(handles)
        stale: set[int] = set()
        self._planes.with_pages(
            lambda channel: page_plane.read(channel, handles, self._page_bytes, found, stale)
        )
        left = [i for i, page in enumerate(found) if page is None]
        asked: Iterator[GetOutcome] = iter(())
        if left:
            names = [handles[i] for i in left]
            asked = iter(self._connection.retry(lambda: self._get(names, len(stale))))
        return [next(asked) if page is None else page for page in found]

    def pin(self, handles: Sequence[str]) -> list[FoundPage | ClientError]:
        """Keeps pages from eviction until as many `unpin`, or the end of the lease; returns the
        page, or an error, for each."""
        request = page_pb2.BatchPinPagesRequest(
            lease=self._name, handles=handles, request_id=self._client.make_request_id()
        )
        response = self._connection.call(self._connection.pages.BatchPinPages, request)
        return [
            _failed(item.status)
            if item.status.code != 0
            else FoundPage(item.page.handle, item.page.crc32c)
            for item in response.items
        ]

    def unpin(self, handles: Sequence[str]) -> list[ClientError | None]:
        """Ends pins, one each; returns None, or an error, for each."""
        request = page_pb2.BatchUnpinPagesRequest(
            lease=self._name, handles=handles, request_id=self._client.make_request_id()
        )
        return self._statuses(self._connection.pages.BatchUnpinPages, request)

    def remove(self, handles: Sequence[str]) -> list[ClientError | None]:
        """Deletes pages; returns None, or an error, for each."""
        request = page_pb2.BatchDeletePagesRequest(
            lease=self._name, handles=handles, request_id=self._client.make_request_id()
        )
        return self._statuses(self._connection.pages.BatchDeletePages, request)

    def close(self) -> None:
        """Gives back what was pinned, waiting a second at most. Pages that were put stay until the
        server needs their room."""
        request = page_pb2.CloseLeaseRequest(name=self._name)
        self._end(self._connection.pages.CloseLease, request)

    def _put_shared(
        self,
        reserved: page_pb2.BatchReservePagesResponse,
        data: Sequence[memoryview],
        fresh: list[int],
        outcomes: list[PutOutcome],
    ) -> list[int]:
        """Writes pages through shared memory as far as that goes, and takes them out of `fresh`.
        Returns those of which somebody has committed another meanwhile."""
        handles = [reserved.items[i].page.handle for i in fresh]
        pages = [(handle, np.asarray(data[i])) for handle, i in zip(handles, fresh)]
        answered: list[frames.PageOutcome] = []
        self._planes.with_pages(
            lambda channel: answered.extend(page_plane.write(channel, self._name, pages))
        )
        existed: list[int] = []
        for handle, i, outcome in zip(handles, list(fresh), answered):
            if outcome.code == frames.PAGE_EXISTED:
                existed.append(i)
            elif outcome.code == 0:
                outcomes[i] = FoundPage(handle, outcome.crc32c)
            else:
                continue
            fresh.remove(i)
        return existed

    def _statuses(self, method: Callable[..., Any], request: Any) -> list[ClientError | None]:
        response = self._connection.call(method, request)
        return [_error_of(status) for status in response.statuses]

    def _chunks(self, pages: Sequence[tuple[str, memoryview]]) -> Iterator[Any]:
        size = self._limits.max_transfer_bytes - _CHUNK_HEAD_BYTES - len(self._name)
        for index, (handle, data) in enumerate(pages):
            for offset in range(0, data.nbytes, size):
                request = transfer_pb2.WritePagesRequest()
                if index == 0 and offset == 0:
                    request.lease = self._name
                end = min(offset + size, data.nbytes)
                request.chunks.add(
                    index=index,
                    handle=handle if offset == 0 else "",
                    offset=offset,
                    last=end == data.nbytes,
                    data=bytes(data[offset:end]),
                )
                yield request

    def _get(self, handles: Sequence[str], stale_reads: int) -> list[GetOutcome]:
        connection = self._connection
        missing = make_error(ErrorCode.UNAVAILABLE, "not answered", Details("NOT_ANSWERED"))
        outcomes: list[GetOutcome] = [missing] * len(handles)
        pages: dict[int, NDArray[np.uint8]] = {}
        request = transfer_pb2.ReadPagesRequest(
            lease=self._name, handles=handles, stale_reads=stale_reads
        )
        with translated():
            responses = connection.transfer.ReadPages(
                request, timeout=connection.options.timeout, metadata=connection.metadata
            )
        try:
            for response in responses:
                for chunk in response.chunks:
                    if chunk.status.code != 0:
                        outcomes[chunk.index] = _failed(chunk.status)
                        continue
                    page = pages.setdefault(chunk.index, np.empty(self._page_bytes, np.uint8))
                    end = chunk.offset + len(chunk.data)
                    page[chunk.offset : end] = np.frombuffer(chunk.data, np.uint8)
                    if chunk.last:
                        outcomes[chunk.index] = page
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        return outcomes


def _bytes_of(data: Bytes) -> memoryview:
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _failed(status: status_pb2.ItemStatus) -> ClientError:
    return make_error(status.code, status.message, Details(reason=status.reason))


def _error_of(status: status_pb2.ItemStatus) -> ClientError | None:
    return None if status.code == 0 else _failed(status)


def _page_of(item: page_pb2.PageResult) -> PutOutcome:
    if item.status.code != 0:
        return _failed(item.status)
    return FoundPage(item.page.handle, item.page.crc32c, item.page.existed)
