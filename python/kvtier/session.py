"""A session in the server."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, NamedTuple, Sequence, Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier import frames, tensors
from kvtier.calls import Caller, Leased
from kvtier.config import AttendOptions
from kvtier.data_plane import PlaneCall
from kvtier.device import DeviceTensor
from kvtier.errors import ClientError, ErrorCode, invalid, make_error
from kvtier.stream import DecodeStream
from kvtier.tensors import Array
from kvtier.v1 import attention_pb2, session_pb2, tensor_pb2

_CHUNK_BYTES = 1 << 20
_CHUNK_TOKENS = 8192
_FETCH_BYTES = 1 << 20
SELECTION_BYTES = 2 << 20  # room for ids, scores and biases, whose number the server knows

#: What leaves open whether an append was stored, or says that it may be stored already.
_UNKNOWN_OUTCOME = (
    ErrorCode.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED,
    ErrorCode.ABORTED,
)

_INT32 = np.dtype(np.int32)
_UINT16 = np.dtype(np.uint16)
_FLOAT16 = np.dtype(np.float16)
_FLOAT32 = np.dtype(np.float32)


#: Keys, values and queries: arrays, or device memory that is shared with the server.
TensorLike = Union[ArrayLike, DeviceTensor]
_Tensor = Union[Array, DeviceTensor]


class Outputs(NamedTuple):
    """Where the server writes what it attends; None: the reply has it."""

    out: DeviceTensor | None = None
    lse: DeviceTensor | None = None


class _Attended(NamedTuple):
    out: Array
    lse: NDArray[np.float32]


class AttendResult(_Attended):
    """`out`: [tokens, query_heads, head_dim], dtype of the query. `lse`: [tokens, query_heads],
    natural log of the softmax denominator. These two are what it unpacks to. Read-only; empty where
    the call named device memory for them."""

    #: As `lse`, the estimated share of the attention of all visible tokens that fell on tokens not
    #: attended; None unless asked for.
    missed: NDArray[np.float32] | None = None


class SelectResult(NamedTuple):
    """`ids`: [tokens, query_heads or kv_heads, k], ascending, padded with -1. `scores`: as `ids`.
    `bias`: as `ids`, the logarithm of how many times each id counts, 0 where padded. Both None
    unless asked for. Read-only."""

    ids: NDArray[np.int32]
    scores: NDArray[np.float32] | None
    bias: NDArray[np.float32] | None = None


class FetchResult(NamedTuple):
    """`keys`, `values`: [kv_heads, n, head_dim] as stored, float16, or the bits of bfloat16 in
    uint16 (`.view(ml_dtypes.bfloat16)`)."""

    keys: Array
    values: Array


def check_ids(token_ids: Sequence[int] | NDArray[np.int32]) -> list[int]:
    """Returns ids of tokens as they go into a message."""
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise invalid(f"token_ids: expected integers [n], found {ids.dtype} {list(ids.shape)}")
    if ids.min() < -(1 << 31) or ids.max() >= 1 << 31:
        raise invalid(f"token_ids: expected int32, found {ids.min()} to {ids.max()}")
    return [int(token) for token in ids]


def fill_select(
    request: attention_pb2.SelectRequest,
    session: RemoteSession,
    layer: int,
    options: AttendOptions,
    with_scores: bool,
    with_bias: bool,
) -> None:
    request.session = session.open_name()
    request.layer = layer
    request.options.CopyFrom(options.message())
    request.with_scores = with_scores
    request.with_bias = with_bias


def fill_attend(
    request: attention_pb2.AttendRequest | attention_pb2.DecodeRequest,
    session: RemoteSession,
    layer: int,
    options: AttendOptions,
    with_missed: bool,
    outputs: Outputs,
) -> None:
    request.session = session.open_name()
    request.layer = layer
    request.options.CopyFrom(options.message())
    request.with_missed = with_missed
    if outputs.out is not None:
        request.out_memory.CopyFrom(outputs.out.place())
    if outputs.lse is not None:
        request.lse_memory.CopyFrom(outputs.lse.place())


def check_tensor(name: str, value: TensorLike) -> _Tensor:
    """Returns what a call can send, `value` itself where it is that."""
    return value if isinstance(value, DeviceTensor) else tensors.check(name, value, tensors.FLOATS)


def check_outputs(query: _Tensor, outputs: Outputs) -> Outputs:
    """Returns outputs of a query that have its shape."""
    if len(query.shape) != 3:
        return outputs  # the server refuses it
    for name, tensor, shape, dtype in (
        ("out", outputs.out, query.shape, query.dtype),
        ("lse", outputs.lse, query.shape[:2], _FLOAT32),
    ):
        # bfloat16 is its bits, or a type of its own that is as long.
        if tensor is None or (tensor.shape == shape and tensor.dtype.itemsize == dtype.itemsize):
            continue
        raise invalid(
            f"{name}: expected {dtype} {list(shape)}, found {tensor.dtype} {list(tensor.shape)}"
        )
    return outputs


def output_bytes(query: _Tensor, with_missed: bool) -> int:
    """Room for what is attended, and at most 1/32 of it for the log-sum-exps, and the shares that
    were missed."""
    per_head = frames.aligned(query.nbytes // 32)
    return frames.aligned(query.nbytes) + (2 * per_head if with_missed else per_head)


def add_optional(
    call: PlaneCall,
    request: attention_pb2.AttendRequest | attention_pb2.DecodeRequest,
    selected: ArrayLike | None,
    bias: ArrayLike | None,
) -> None:
    if selected is not None:
        call.add(request.selected, tensors.check("selected", selected, ["int32"]))
    if bias is not None:
        call.add(request.bias, tensors.check("bias", bias, ["float32"]))


def fill_fetch(
    request: attention_pb2.FetchRequest, session: RemoteSession, layer: int
) -> None:
    request.session = session.open_name()
    request.layer = layer


def take_select(
    response: attention_pb2.SelectResponse, with_scores: bool, with_bias: bool
) -> SelectResult:
    ids = tensors.take(response.ids, "ids", _INT32)
    scores = tensors.take(response.scores, "scores", _FLOAT32) if with_scores else None
    bias = tensors.take(response.bias, "bias", _FLOAT32) if with_bias else None
    return SelectResult(ids, scores, bias)


def take_attend(
    response: attention_pb2.AttendResponse | attention_pb2.DecodeResponse,
    query: _Tensor,
    with_missed: bool,
) -> AttendResult:
    out, lse = (
        np.empty(0, dtype) if tensor.HasField("memory") else tensors.take(tensor, name, dtype)
        for tensor, name, dtype in (
            (response.out, "out", query.dtype),
            (response.lse, "lse", _FLOAT32),
        )
    )
    result = AttendResult(out, lse)
    if with_missed:
        result.missed = tensors.take(response.missed, "missed", _FLOAT32)
    return result


def take_fetch(response: attention_pb2.FetchResponse) -> FetchResult:
    dtype = _FLOAT16 if response.key.dtype == tensor_pb2.DATA_TYPE_FLOAT16 else _UINT16
    keys = tensors.take(response.key, "keys", dtype)
    return FetchResult(keys, tensors.take(response.value, "values", dtype))


class RemoteSession(Leased):
    """As `kvtier::RemoteSession`. Used by one thread at a time. Released by `close`, or at the end
    of a `with`; one that is dropped without is released by the end of its lease.

    `UnavailableError` and `DeadlineExceededError` of an `append` leave open whether it was stored:
    `refresh` reports.
    """

    def __init__(self, client: Caller, session: session_pb2.Session) -> None:
        super().__init__(client, "session", session.name, session.lease_ttl)
        self._planes = client.planes
        self._lengths: list[int] = list(session.layer_lengths)
        self._row_bytes = 4 * session.geometry.kv_heads * session.geometry.head_dim
        self._fetch_tokens = max(_FETCH_BYTES // max(self._row_bytes, 1), 1)
        self._step = 0
        self._steps = DecodeStream(client.connection, client.watchdog)

    def append(self, layer: int, keys: TensorLike, values: TensorLike) -> None:
        """Stores tokens, [tokens, kv_heads, head_dim] each, in chunks; those before one that fails
        stay."""
        name = self.open_name()
        key = check_tensor("keys", keys)
        value = check_tensor("values", values)
        if key.shape[0] != value.shape[0]:
            raise invalid(f"values: expected {key.shape[0]} tokens, found {value.shape[0]}")
        chunks = [
            (_rows(key, first, end), _rows(value, first, end))
            for first, end in _chunks_of(key, value)
        ]
        if not self._append_over_plane(name, layer, chunks):
            self._append_over_grpc(name, layer, chunks)

    def select(
        self,
        layer: int,
        query: TensorLike,
        options: AttendOptions = AttendOptions(),
        *,
        with_scores: bool = False,
        with_bias: bool = False,
    ) -> SelectResult:
        """Scores the eligible tokens and returns the chosen ids. Stores nothing. `with_bias`: with
        what `attend` and `decode` take as `bias` beside them, of the priority rule."""
        array = check_tensor("query", query)
        request = attention_pb2.SelectRequest()
        fill_select(request, self, layer, options, with_scores, with_bias)
        call = PlaneCall(frames.SELECT, request, SELECTION_BYTES)
        call.add(request.query, array)
        response = self._client.run(call, attention_pb2.SelectResponse(), self._connection.attention.Select)
        return take_select(response, with_scores, with_bias)

    def attend(
        self,
        layer: int,
        query: TensorLike,
        options: AttendOptions = AttendOptions(),
        *,
        selected: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        with_missed: bool = False,
        outputs: Outputs = Outputs(),
    ) -> AttendResult:
        """Selects and attends. Stores nothing. `selected` replaces scoring; `bias`, of its
        shape, is added to the logits of these ids. `with_missed`: with the share of the attention
        that was left out, of norm-aware selections."""
        array = check_tensor("query", query)
        request = attention_pb2.AttendRequest()
        fill_attend(request, self, layer, options, with_missed, check_outputs(array, outputs))
        call = PlaneCall(frames.ATTEND, request, output_bytes(array, with_missed))
        call.add(request.query, array)
        add_optional(call, request, selected, bias)
        response = self._client.run(call, attention_pb2.AttendResponse(), self._connection.attention.Attend)
        return take_attend(response, array, with_missed)

    def decode(
        self,
        layer: int,
        query: TensorLike,
        key: TensorLike,
        value: TensorLike,
        options: AttendOptions = AttendOptions(),
        *,
        selected: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        with_missed: bool = False,
        outputs: Outputs = Outputs(),
    ) -> AttendResult:
        """Appends, then attends as `attend` does, over the session's stream. A step whose reply was
        lost is asked for again, never stored twice."""
        array = check_tensor("query", query)
        keys = check_tensor("key", key)
        request = attention_pb2.DecodeRequest()
        fill_attend(request, self, layer, options, with_missed, check_outputs(array, outputs))
        call = PlaneCall(frames.DECODE, request, output_bytes(array, with_missed))
        call.add(request.query, array)
        call.add(request.key, keys)
        call.add(request.value, check_tensor("value", value))
        add_optional(call, request, selected, bias)
        request.step = self.next_step()
        if self.knows(layer):
            request.position = self._lengths[layer]
        response = self._planes.repeatable(call, attention_pb2.DecodeResponse())
        if response is None:
            response = self._decode_over_grpc(call.inline())
        self.stored(layer, keys.shape[0])
        return take_attend(response, array, with_missed)

    def fetch(self, layer: int, tokens: ArrayLike) -> FetchResult:
        """Returns stored rows. `tokens`: int32 [kv_heads, n], for each KV head its own ids in any
        order; for -1 the row is zeros."""
        ids = tensors.check("tokens", tokens, ["int32"])
        if ids.ndim != 2:
            raise invalid(f"tokens: expected [kv_heads, n], found shape {list(ids.shape)}")
        parts = []
        for first in range(0, max(ids.shape[1], 1), self._fetch_tokens):
            piece = np.ascontiguousarray(ids[:, first : first + self._fetch_tokens])
            request = attention_pb2.FetchRequest()
            fill_fetch(request, self, layer)
            call = PlaneCall(frames.FETCH, request, self.fetch_bytes(piece))
            call.add(request.tokens, piece)
            fetch = self._connection.attention.Fetch
            parts.append(take_fetch(self._client.run(call, attention_pb2.FetchResponse(), fetch)))
        if len(parts) == 1:
            return parts[0]
        return FetchResult(*(np.concatenate(rows, axis=1) for rows in zip(*parts)))

    def truncate(self, tokens: int) -> None:
        """Drops the tokens from `tokens` on, in every layer."""
        request = session_pb2.TruncateSessionRequest(
            name=self.open_name(), tokens=tokens, request_id=self._client.make_request_id()
        )
        response = self._connection.call(self._connection.sessions.TruncateSession, request)
        self._lengths = list(response.session.layer_lengths)

    def fork(self, count: int) -> list[RemoteSession]:
        """Opens `count` sessions (1 to 64) that start as this one is and share its pages."""
        request = session_pb2.ForkSessionRequest(
            name=self.open_name(), count=count, request_id=self._client.make_request_id()
        )
        response = self._connection.call(self._connection.sessions.ForkSession, request)
        return [RemoteSession(self._client, session) for session in response.sessions]

    def publish(self, token_ids: Sequence[int] | NDArray[np.int32]) -> int:
        """Stores the whole pages of the first tokens, whose ids these are, for sessions that are
        opened later with the same ids and fingerprint; returns how many tokens that is."""
        request = session_pb2.PublishPrefixRequest(
            name=self.open_name(), token_ids=check_ids(token_ids)
        )
        response = self._connection.call(self._connection.sessions.PublishPrefix, request)
        return int(response.stored_tokens)

    def length(self, layer: int | None = None) -> int:
        """Returns the tokens of one layer, or those that every layer has, by what the server has
        said."""
        if layer is None:
            return min(self._lengths, default=0)
        if not self.knows(layer):
            raise invalid(f"layer: expected 0..{len(self._lengths) - 1}, found {layer}")
        return self._lengths[layer]

    def refresh(self) -> None:
        """Asks the server for the lengths."""
        request = session_pb2.GetSessionRequest(name=self.open_name())
        response = self._connection.call(self._connection.sessions.GetSession, request)
        self._lengths = list(response.session.layer_lengths)

    def close(self) -> None:
        """Releases the session, waiting a second at most. When this fails, the lease ends it."""
        if not self._connection.is_forked:
            self._steps.close()
        request = session_pb2.ReleaseSessionRequest(name=self._name)
        self._end(self._connection.sessions.ReleaseSession, request)

    def fetch_bytes(self, ids: Array) -> int:
        """Returns the room that a fetch of these ids needs."""
        return 2 * frames.aligned(self._row_bytes // 2 * ids.shape[-1])

    def next_step(self) -> int:
        """Returns the number of a new step."""
        self._step += 1
        return self._step

    def knows(self, layer: int) -> bool:
        """Returns whether the layer is one; the server refuses it otherwise."""
        return 0 <= layer < len(self._lengths)

    def stored(self, layer: int, tokens: int) -> None:
        """Takes note of tokens that a call has stored."""
        self._lengths[layer] += tokens

    def _append_over_plane(
        self, name: str, layer: int, chunks: Sequence[tuple[_Tensor, _Tensor]]
    ) -> bool:
        """Returns False when nothing was sent."""
        for index, (key, value) in enumerate(chunks):
            request = attention_pb2.AppendRequest(session=name, layer=layer)
            if self.knows(layer):
                request.position = self._lengths[layer]
            call = PlaneCall(frames.APPEND, request)
            call.add(request.key, key)
            call.add(request.value, value)
            response = self._planes.run(call, attention_pb2.AppendResponse())
            if response is None:
                if index == 0:
                    return False
                raise make_error(ErrorCode.UNAVAILABLE.value, "the data plane has ended")
            self._lengths = list(response.layer_lengths)
        return True

    def _append_over_grpc(
        self, name: str, layer: int, chunks: Sequence[tuple[_Tensor, _Tensor]]
    ) -> None:
        connection = self._connection
        requests = self._append_requests(name, layer, chunks)
        try:
            response = connection.call_once(connection.attention.Append, requests)
        except ClientError as error:
            if error.code not in _UNKNOWN_OUTCOME:
                self._take_lengths_of_chunks(name)
            raise
        self._lengths = list(response.layer_lengths)

    def _take_lengths_of_chunks(self, name: str) -> None:
        """After a chunk that was refused: those before it are stored."""
        connection = self._connection
        request = session_pb2.GetSessionRequest(name=name)
        with contextlib.suppress(ClientError):
            response = connection.call_once(connection.sessions.GetSession, request)
            self._lengths = list(response.session.layer_lengths)

    def _append_requests(
        self, name: str, layer: int, chunks: Sequence[tuple[_Tensor, _Tensor]]
    ) -> Iterator[attention_pb2.AppendRequest]:
        position = self._lengths[layer] if self.knows(layer) else None
        for index, (key, value) in enumerate(chunks):
            request = attention_pb2.AppendRequest(layer=layer)
            if index == 0:
                request.session = name
            if position is not None:
                request.position = position
                position += key.shape[0]
            _fill(request.key, key)
            _fill(request.value, value)
            yield request

    def _decode_over_grpc(
        self, request: attention_pb2.DecodeRequest
    ) -> attention_pb2.DecodeResponse:
        def exchange() -> attention_pb2.DecodeResponse:
            try:
                return self._steps.exchange(request)
            except ClientError as error:
                if error.reason != "STREAM_IDLE":
                    raise
            # The server ends streams that stand still; the session lives on.
            return self._steps.exchange(request)

        return self._connection.retry(exchange)


def _rows(tensor: _Tensor, first: int, end: int) -> _Tensor:
    return tensor.rows(first, end) if isinstance(tensor, DeviceTensor) else tensor[first:end]


def _fill(message: tensor_pb2.Tensor, tensor: _Tensor) -> None:
    if isinstance(tensor, DeviceTensor):
        tensor.describe(message)
    else:
        tensors.fill(message, tensor)


def _chunks_of(key: _Tensor, value: _Tensor) -> Iterator[tuple[int, int]]:
    """Yields where the chunks of an append begin and end."""
    tokens = key.shape[0]
    sent = sum(each.nbytes for each in (key, value) if not isinstance(each, DeviceTensor))
    row_bytes = sent // max(tokens, 1)
    chunk = min(max(_CHUNK_BYTES // max(row_bytes, 1), 1), _CHUNK_TOKENS)
    for first in range(0, max(tokens, 1), chunk):
        yield first, first + chunk
