"""A connection to a server, and calls for several sessions at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Sequence, TypeVar, Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier import frames, tensors
from kvtier.calls import Caller
from kvtier.config import AttendOptions, ModelConfig, RetrievalConfig, SessionMemory, SketchConfig
from kvtier.connection import ClientOptions, default_folder
from kvtier.data_plane import PlaneCall
from kvtier.device import HANDLE_BYTES, UUID_BYTES, SharedDeviceMemory
from kvtier.errors import ClientError, Details, ErrorCode, invalid, make_error
from kvtier.pages import RemotePages
from kvtier.session import (
    SELECTION_BYTES,
    AttendResult,
    FetchResult,
    Outputs,
    RemoteSession,
    SelectResult,
    TensorLike,
    add_optional,
    check_ids,
    check_outputs,
    check_tensor,
    fill_attend,
    fill_fetch,
    fill_select,
    output_bytes,
    take_attend,
    take_fetch,
    take_select,
)
from kvtier.v1 import attention_pb2, page_pb2, session_pb2, shared_memory_pb2, status_pb2

T = TypeVar("T")

_REPLY_BYTES = 4 << 20  # of a batch at most
_LIST_NAMES = 1000  # in one reply, at most
_STAGING_BYTES = 4096  # of an attachment over which no tensor goes


@dataclass(frozen=True)
class SelectItem:
    """Arguments of one `RemoteSession.select` of a batch."""

    session: RemoteSession
    layer: int
    query: TensorLike
    options: AttendOptions = AttendOptions()
    with_scores: bool = False
    with_bias: bool = False


@dataclass(frozen=True)
class AttendItem:
    """Arguments of one `RemoteSession.attend` of a batch."""

    session: RemoteSession
    layer: int
    query: TensorLike
    options: AttendOptions = AttendOptions()
    selected: ArrayLike | None = None
    bias: ArrayLike | None = None
    with_missed: bool = False
    outputs: Outputs = Outputs()


@dataclass(frozen=True)
class DecodeItem:
    """Arguments of one `RemoteSession.decode` of a batch."""

    session: RemoteSession
    layer: int
    query: TensorLike
    key: TensorLike
    value: TensorLike
    options: AttendOptions = AttendOptions()
    selected: ArrayLike | None = None
    bias: ArrayLike | None = None
    with_missed: bool = False
    outputs: Outputs = Outputs()


@dataclass(frozen=True)
class FetchItem:
    """Arguments of one `RemoteSession.fetch` of a batch."""

    session: RemoteSession
    layer: int
    tokens: ArrayLike


SelectOutcome = Union[SelectResult, ClientError]
FetchOutcome = Union[FetchResult, ClientError]
AttendOutcome = Union[AttendResult, ClientError]


def default_server() -> str:
    """Returns the address at which `kvtier serve` listens by default."""
    return f"unix:{default_folder()}/kvtier.sock"


@dataclass(frozen=True)
class SessionInfo:
    """A session as the server has it."""

    name: str
    #: Tokens stored per layer.
    layer_lengths: list[int]
    capacity_tokens: int
    #: Of keys and values, charged to the tenant.
    kv_bytes: int
    #: Seconds without a call after which it ends.
    lease_ttl: float
    #: Of `capacity_tokens`, on the server.
    memory: SessionMemory


class Client(Caller):
    """As `kvtier::Client`: a connection to a server, made by the first call. Thread-safe. A thread
    of it renews the leases of its sessions. `server` and the other arguments: `ClientOptions`."""

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str = "",
        tls_server_ca: str = "",
        tls_certificate: str = "",
        tls_key: str = "",
        insecure_tcp: bool = False,
        timeout: float = 30.0,
        attempts: int = 4,
        data_plane: bool = True,
    ) -> None:
        super().__init__(
            ClientOptions(
                server=default_server() if server is None else server,
                token=token,
                tls_server_ca=tls_server_ca,
                tls_certificate=tls_certificate,
                tls_key=tls_key,
                insecure_tcp=insecure_tcp,
                timeout=timeout,
                attempts=attempts,
                data_plane=data_plane,
            )
        )

    def open(
        self,
        model: ModelConfig,
        retrieval: RetrievalConfig = RetrievalConfig(),
        *,
        extra_sketches: Sequence[SketchConfig] = (),
        capacity_tokens: int = 0,
        token_ids: Sequence[int] | NDArray[np.int32] = (),
        model_fingerprint: str = "",
    ) -> RemoteSession:
        """Opens a session. `retrieval`: defaults of its calls. `extra_sketches`: what calls
        with other retrieval settings need. `capacity_tokens` 0: the server's limit.

        `token_ids`: ids of the first tokens. The session begins with the longest run of whole pages
        of them that was stored (`RemoteSession.publish`) under the same `model_fingerprint`, as
        `length` says, and the rest is appended as ever. The fingerprint names the weights and all
        else that keys and values depend on beside the ids, up to 128 bytes."""
        request = session_pb2.CreateSessionRequest(
            request_id=self.make_request_id(),
            geometry=model.message(),
            capacity_tokens=capacity_tokens,
            retrieval=retrieval.message(),
            extra_sketches=[sketch.message() for sketch in extra_sketches],
            token_ids=check_ids(token_ids),
            model_fingerprint=model_fingerprint,
        )
        response = self.connection.call(self.connection.sessions.CreateSession, request)
        return RemoteSession(self, response.session)

    def list_sessions(self) -> list[str]:
        """Returns the names of all sessions of the caller's tenant, in no order, whichever client
        has opened them."""
        names: list[str] = []
        token = ""
        while True:
            request = session_pb2.ListSessionsRequest(page_size=_LIST_NAMES, page_token=token)
            response = self.connection.call(self.connection.sessions.ListSessions, request)
            names += response.names
            token = response.next_page_token
            if not token:
                return names

    def session_info(self, name: str) -> SessionInfo:
        """Returns what the server has of a session of the caller's tenant, and renews its lease."""
        request = session_pb2.GetSessionRequest(name=name)
        found = self.connection.call(self.connection.sessions.GetSession, request).session
        return SessionInfo(
            name=found.name,
            layer_lengths=list(found.layer_lengths),
            capacity_tokens=found.capacity_tokens,
            kv_bytes=found.kv_bytes,
            lease_ttl=found.lease_ttl.seconds + found.lease_ttl.nanos * 1e-9,
            memory=SessionMemory(
                tokens=found.capacity_tokens,
                pages=found.memory.page_bytes,
                sketches=found.memory.sketch_bytes,
                tables=found.memory.table_bytes,
                row_cache=found.memory.row_cache_bytes,
            ),
        )

    def release(self, name: str) -> None:
        """Releases a session of the caller's tenant by its name, such as one that a process which
        has died left behind."""
        request = session_pb2.ReleaseSessionRequest(
            name=name, request_id=self.make_request_id()
        )
        self.connection.call(self.connection.sessions.ReleaseSession, request)

    def share_device_memory(
        self, cuda_ipc_handle: bytes, device_uuid: bytes, pointer: int, nbytes: int
    ) -> SharedDeviceMemory:
        """Lets keys, values, queries and outputs of calls lie in an allocation of `cudaMalloc`
        (`SharedDeviceMemory.tensor`), which a server of this machine reads and writes in place when
        its engines use the same GPU; raises its reason otherwise (`FailedPreconditionError`).
        `cuda_ipc_handle`: the 64 bytes of `cudaIpcGetMemHandle`. `device_uuid`: the 16 bytes of
        `cudaDeviceProp::uuid`. `pointer`, `nbytes`: where the allocation begins, and how long it
        is."""
        for name, value, size in (
            ("cuda_ipc_handle", cuda_ipc_handle, HANDLE_BYTES),
            ("device_uuid", device_uuid, UUID_BYTES),
        ):
            if len(value) != size:
                raise invalid(f"{name}: expected {size} bytes, found {len(value)}")
        if nbytes <= 0:
            raise invalid(f"nbytes: expected above 0, found {nbytes}")
        attached = self.planes.attach(_STAGING_BYTES)
        if attached is None:
            message = "expected a server with a data plane"
            raise make_error(ErrorCode.UNIMPLEMENTED, message, Details("NO_DATA_PLANE"))
        request = shared_memory_pb2.ShareDeviceMemoryRequest(
            attachment=attached.name,
            cuda_ipc_handle=cuda_ipc_handle,
            device_uuid=device_uuid,
            bytes=nbytes,
        )
        try:
            share = self.connection.shared_memory.ShareDeviceMemory
            region = self.connection.call_once(share, request).region
        except BaseException:
            self.planes.detach(attached)
            raise
        unshare = partial(self.planes.detach, attached)
        return SharedDeviceMemory(unshare, region, pointer, nbytes)

    def open_pages(self, model: str, page_bytes: int) -> RemotePages:
        """Opens a lease on the server's page cache. `model` names the model, the layout of its
        pages and whatever else must agree between those who exchange pages; up to 128 bytes."""
        request = page_pb2.OpenLeaseRequest(
            request_id=self.make_request_id(), model=model, page_bytes=page_bytes
        )
        response = self.connection.call(self.connection.pages.OpenLease, request)
        return RemotePages(self, response)

    def batch_select(self, items: Sequence[SelectItem]) -> list[SelectOutcome]:
        """Makes `select` calls of any sessions; returns a result or an error for each."""
        request = attention_pb2.BatchSelectRequest()
        room = min(len(items) * SELECTION_BYTES, _REPLY_BYTES)
        call = PlaneCall(frames.BATCH_SELECT, request, room)
        for item in items:
            query = check_tensor("query", item.query)
            message = request.items.add()
            fill_select(
                message, item.session, item.layer, item.options, item.with_scores, item.with_bias
            )
            call.add(message.query, query)
        reply = attention_pb2.BatchSelectResponse()
        response = self.run(call, reply, self.connection.attention.BatchSelect)
        return [
            _outcome(
                found.status, lambda: take_select(found.response, item.with_scores, item.with_bias)
            )
            for item, found in zip(items, response.items, strict=True)
        ]

    def batch_attend(self, items: Sequence[AttendItem]) -> list[AttendOutcome]:
        """Makes `attend` calls of any sessions; returns a result or an error for each."""
        request = attention_pb2.BatchAttendRequest()
        call = PlaneCall(frames.BATCH_ATTEND, request)
        queries = [check_tensor("query", item.query) for item in items]
        for item, query in zip(items, queries):
            message = request.items.add()
            outputs = check_outputs(query, item.outputs)
            fill_attend(message, item.session, item.layer, item.options, item.with_missed, outputs)
            call.output_bytes += output_bytes(query, item.with_missed)
            call.add(message.query, query)
            add_optional(call, message, item.selected, item.bias)
        reply = attention_pb2.BatchAttendResponse()
        response = self.run(call, reply, self.connection.attention.BatchAttend)
        return [
            _outcome(found.status, lambda: take_attend(found.response, query, item.with_missed))
            for item, query, found in zip(items, queries, response.items, strict=True)
        ]

    def batch_decode(self, items: Sequence[DecodeItem]) -> list[AttendOutcome]:
        """Makes `decode` calls of any sessions, those of one session in their order; returns a
        result or an error for each."""
        request = attention_pb2.BatchDecodeRequest()
        call = PlaneCall(frames.BATCH_DECODE, request)
        queries = [check_tensor("query", item.query) for item in items]
        ahead: dict[tuple[str, int], int] = {}
        stored: list[int] = []
        for item, query in zip(items, queries):
            session = item.session
            message = request.items.add()
            key = check_tensor("key", item.key)
            outputs = check_outputs(query, item.outputs)
            fill_attend(message, session, item.layer, item.options, item.with_missed, outputs)
            call.output_bytes += output_bytes(query, item.with_missed)
            call.add(message.query, query)
            call.add(message.key, key)
            call.add(message.value, check_tensor("value", item.value))
            add_optional(call, message, item.selected, item.bias)
            message.step = session.next_step()
            place = (session.name, item.layer)
            if session.knows(item.layer):
                message.position = session.length(item.layer) + ahead.get(place, 0)
            ahead[place] = ahead.get(place, 0) + key.shape[0]
            stored.append(key.shape[0])
        reply = attention_pb2.BatchDecodeResponse()
        response = self.run(call, reply, self.connection.attention.BatchDecode)
        for item, tokens, found in zip(items, stored, response.items, strict=True):
            if found.status.code == 0:
                item.session.stored(item.layer, tokens)
        return [
            _outcome(found.status, lambda: take_attend(found.response, query, item.with_missed))
            for item, query, found in zip(items, queries, response.items)
        ]

    def batch_fetch(self, items: Sequence[FetchItem]) -> list[FetchOutcome]:
        """Makes `fetch` calls of any sessions, whose rows fit in one reply; returns a result or an
        error for each."""
        request = attention_pb2.BatchFetchRequest()
        call = PlaneCall(frames.BATCH_FETCH, request)
        for item in items:
            ids = tensors.check("tokens", item.tokens, ["int32"])
            message = request.items.add()
            fill_fetch(message, item.session, item.layer)
            call.output_bytes += item.session.fetch_bytes(ids)
            call.add(message.tokens, ids)
        reply = attention_pb2.BatchFetchResponse()
        response = self.run(call, reply, self.connection.attention.BatchFetch)
        return [
            _outcome(found.status, lambda: take_fetch(found.response)) for found in response.items
        ]


def _outcome(status: status_pb2.ItemStatus, take: Callable[[], T]) -> T | ClientError:
    if status.code == 0:
        return take()
    return make_error(status.code, status.message, Details(reason=status.reason))
