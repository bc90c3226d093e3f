"""Pages that an engine leaves with the server and gets back, perhaps in another process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Callable, Iterator, Sequence, Union

import grpc
import numpy as np
from numpy.typing import NDArray

from kvtier import frames, page_plane
from kvtier.buffers import Bytes, readable, writable
from kvtier.calls import Caller, Leased
from kvtier.data_plane import Channel, PlaneCall
from kvtier.errors import ClientError, Details, ErrorCode, invalid, make_error
from kvtier.v1 import page_pb2, status_pb2, transfer_pb2

_CHUNK_HEAD_BYTES = 256


@dataclass(frozen=True)
class PagePut:
    """A page to store. `hash`, of the page's tokens and all before them, up to 64 bytes, finds it
    together with `layer`; `data` has the page size."""

    hash: bytes
    layer: int
    data: Bytes


@dataclass(frozen=True)
class FoundPage:
    """A committed page. `existed`: of `put`, it was there before, and not written again. `durable`:
    the server's disk has it, synced, so that it is found after a restart, until it makes room for
    others."""

    handle: str
    crc32c: int
    existed: bool = False
    durable: bool = False


PutOutcome = Union[FoundPage, ClientError]
GetOutcome = Union[NDArray[np.uint8], ClientError]


class RemotePages(Leased):
    """As `kvtier::RemotePages`: a lease on the server's page cache, closed by `close` or at the end
    of a `with`. Thread-safe. A page that fails leaves the others alone: results are per page, an
    error among them where `NotFoundError` with reason PAGE_GONE is a miss."""

    def __init__(self, client: Caller, response: page_pb2.OpenLeaseResponse) -> None:
        super().__init__(client, "lease", response.lease.name, response.lease.ttl)
        self._planes = client.planes
        self._page_bytes = response.lease.page_bytes
        self._limits = response.limits

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def max_batch_pages(self) -> int:
        """Pages of one call; of `lookup`, hashes times layers."""
        return int(self._limits.max_batch_pages)

    def lookup(
        self, hashes: Sequence[bytes], layers: Sequence[int], *, pin: bool = False
    ) -> list[FoundPage]:
        """Returns the pages of the leading hashes for which all `layers` are stored, by hash, then
        layer. With `pin` they stay until `unpin`."""
        request = page_pb2.LookupPrefixRequest(
            lease=self.open_name(), hashes=hashes, layers=layers, pin=pin
        )
        if pin:
            request.request_id = self._client.make_request_id()
        response = self._connection.call(self._connection.pages.LookupPrefix, request)
        return [_found(page) for page in response.pages]

    def find(
        self, hashes: Sequence[bytes], layers: Sequence[int], *, pin: bool = False
    ) -> list[list[FoundPage] | None]:
        """As `lookup`, of each hash for itself: returns its pages by layer, or None unless all
        `layers`, 1 to `max_batch_pages`, are stored. More hashes than a batch has room for take
        several calls; when one raises, what was pinned stays pinned until the end of the lease."""
        found: list[list[FoundPage] | None] = []
        for response in self._look_up(hashes, layers, pin=pin):
            pages = iter(response.pages)
            for hit in response.hits:
                found.append(
                    [_found(page) for page in islice(pages, len(layers))]
                    if hit
                    else None
                )
        return found

    def contains(self, hashes: Sequence[bytes], layers: Sequence[int]) -> list[bool]:
        """Returns of each hash whether all `layers`, as of `find`, are stored. They may go before
        they are read."""
        responses = self._look_up(hashes, layers, hits_only=True)
        return [bool(hit) for response in responses for hit in response.hits]

    def put(self, pages: Sequence[PagePut]) -> list[PutOutcome]:
        """Stores pages, each hash and layer once."""
        data = [readable(page.data, self._page_bytes) for page in pages]
        request = page_pb2.BatchReservePagesRequest(
            lease=self.open_name(), request_id=self._client.make_request_id()
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

    def get(
        self, handles: Sequence[str], into: Sequence[Bytes] | None = None
    ) -> list[GetOutcome]:
        """Reads pages, whose checksums the server has compared; over gRPC by one stream, since
        messages are taken apart under the interpreter's lock. Page i goes to `into[i]`, a writable
        contiguous buffer of the page size, by one copy, and the outcome is uint8 [page_bytes] over
        that memory; without `into` it is a new array. Where the outcome is an error, its buffer may
        hold anything. No buffer is written to after the return."""
        room = self._room(len(handles), into)
        found: list[NDArray[np.uint8] | None] = [None] * len(handles)
        stale: set[int] = set()
        self._planes.with_pages(
            lambda channel: page_plane.read(channel, handles, self._page_bytes, room, found, stale)
        )
        left = [i for i, page in enumerate(found) if page is None]
        asked: Iterator[GetOutcome] = iter(())
        if left:
            names = [handles[i] for i in left]
            asked = iter(
                self._connection.retry(
                    lambda: self._get(names, len(stale), lambda index: room(left[index]))
                )
            )
        return [next(asked) if page is None else page for page in found]

    def pin(self, handles: Sequence[str]) -> list[FoundPage | ClientError]:
        """Keeps pages from eviction until as many `unpin`, or the end of the lease; returns the
        page, or an error, for each."""
        request = page_pb2.BatchPinPagesRequest(
            lease=self.open_name(), handles=handles, request_id=self._client.make_request_id()
        )
        response = self._connection.call(self._connection.pages.BatchPinPages, request)
        return [
            _failed(item.status)
            if item.status.code != 0
            else _found(item.page)
            for item in response.items
        ]

    def unpin(self, handles: Sequence[str]) -> list[ClientError | None]:
        """Ends pins, one each; returns None, or an error, for each."""
        request = page_pb2.BatchUnpinPagesRequest(
            lease=self.open_name(), handles=handles, request_id=self._client.make_request_id()
        )
        return self._statuses(self._connection.pages.BatchUnpinPages, request)

    def remove(self, handles: Sequence[str]) -> list[ClientError | None]:
        """Deletes pages; returns None, or an error, for each."""
        request = page_pb2.BatchDeletePagesRequest(
            lease=self.open_name(), handles=handles, request_id=self._client.make_request_id()
        )
        return self._statuses(self._connection.pages.BatchDeletePages, request)

    def close(self) -> None:
        """Gives back what was pinned, waiting a second at most. Pages that were put stay until the
        server needs their room."""
        request = page_pb2.CloseLeaseRequest(name=self._name)
        self._end(self._connection.pages.CloseLease, request)

    def _look_up(
        self,
        hashes: Sequence[bytes],
        layers: Sequence[int],
        *,
        pin: bool = False,
        hits_only: bool = False,
    ) -> Iterator[page_pb2.BatchLookupPagesResponse]:
        """Looks hashes up batch by batch, over the data plane where there is one."""
        if not 0 < len(layers) <= self.max_batch_pages:
            raise invalid(f"layers: expected 1 to {self.max_batch_pages}, found {len(layers)}")
        size = self.max_batch_pages // len(layers)
        for first in range(0, len(hashes), size):
            part = hashes[first : first + size]
            request = page_pb2.BatchLookupPagesRequest(
                lease=self.open_name(), hashes=part, layers=layers, pin=pin, hits_only=hits_only
            )
            if pin:
                request.request_id = self._client.make_request_id()
            call = PlaneCall(frames.BATCH_LOOKUP_PAGES, request)
            response = self._planes.repeatable(call, page_pb2.BatchLookupPagesResponse())
            if response is None:
                response = self._connection.call(self._connection.pages.BatchLookupPages, request)
            if len(response.hits) != len(part):
                raise make_error(
                    ErrorCode.INTERNAL, f"expected {len(part)} answers, found {len(response.hits)}"
                )
            yield response

    def _room(
        self, count: int, into: Sequence[Bytes] | None
    ) -> Callable[[int], NDArray[np.uint8]]:
        """Returns where page i goes."""
        if into is None:
            return lambda index: np.empty(self._page_bytes, np.uint8)
        if len(into) != count:
            raise invalid(f"into: expected {count} buffers, found {len(into)}")
        views = [writable(buffer, self._page_bytes) for buffer in into]
        return lambda index: views[index]

    def _put_shared(
        self,
        reserved: page_pb2.BatchReservePagesResponse,
        data: Sequence[NDArray[np.uint8]],
        fresh: list[int],
        outcomes: list[PutOutcome],
    ) -> list[int]:
        """Writes pages through shared memory as far as that goes, and takes them out of `fresh`.
        Returns those of which somebody has committed another meanwhile."""
        handles = [reserved.items[i].page.handle for i in fresh]
        pages = [(handle, data[i]) for handle, i in zip(handles, fresh)]
        answered: list[frames.PageOutcome] = []
        self._planes.with_pages(
            lambda channel: page_plane.write(channel, self._name, pages, answered)
        )
        existed: list[int] = []
        for handle, i, outcome in zip(handles, list(fresh), answered):
            if outcome.code == frames.PAGE_EXISTED:
                existed.append(i)
            elif outcome.code == 0:
                durable = outcome.offset == frames.DURABLE
                outcomes[i] = FoundPage(handle, outcome.crc32c, durable=durable)
            else:
                continue
            fresh.remove(i)
        return existed

    def _statuses(self, method: Callable[..., Any], request: Any) -> list[ClientError | None]:
        response = self._connection.call(method, request)
        return [_error_of(status) for status in response.statuses]

    def _chunks(self, pages: Sequence[tuple[str, NDArray[np.uint8]]]) -> Iterator[Any]:
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
                    data=data[offset:end].tobytes(),
                )
                yield request

    def _get(
        self,
        handles: Sequence[str],
        stale_reads: int,
        room: Callable[[int], NDArray[np.uint8]],
    ) -> list[GetOutcome]:
        connection = self._connection
        missing = make_error(ErrorCode.UNAVAILABLE, "not answered", Details("NOT_ANSWERED"))
        outcomes: list[GetOutcome] = [missing] * len(handles)
        pages: dict[int, NDArray[np.uint8]] = {}
        request = transfer_pb2.ReadPagesRequest(
            lease=self.open_name(), handles=handles, stale_reads=stale_reads
        )
        with connection.translated():
            responses = connection.transfer.ReadPages(
                request, timeout=connection.seconds_left(), metadata=connection.metadata
            )
        try:
            for response in responses:
                for chunk in response.chunks:
                    if chunk.status.code != 0:
                        outcomes[chunk.index] = _failed(chunk.status)
                        continue
                    page = pages.get(chunk.index)
                    if page is None:
                        page = pages[chunk.index] = room(chunk.index)
                    end = chunk.offset + len(chunk.data)
                    page[chunk.offset : end] = np.frombuffer(chunk.data, np.uint8)
                    if chunk.last:
                        outcomes[chunk.index] = page
        except grpc.RpcError as failure:
            raise connection.error_of(failure) from None
        return outcomes


def _found(page: page_pb2.Page) -> FoundPage:
    return FoundPage(page.handle, page.crc32c, page.existed, page.durable)


def _failed(status: status_pb2.ItemStatus) -> ClientError:
    return make_error(status.code, status.message, Details(reason=status.reason))


def _error_of(status: status_pb2.ItemStatus) -> ClientError | None:
    return None if status.code == 0 else _failed(status)


def _page_of(item: page_pb2.PageResult) -> PutOutcome:
    if item.status.code != 0:
        return _failed(item.status)
    return _found(item.page)
