"""A session in the server."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier import tensors
from kvtier.config import AttendOptions
from kvtier.errors import ClientError, invalid
from kvtier.stream import DecodeStream
from kvtier.tensors import Array
from kvtier.v1 import attention_pb2, session_pb2

if TYPE_CHECKING:
    from kvtier.client import Client

_CHUNK_BYTES = 1 << 20
_CHUNK_TOKENS = 8192
_RELEASE_SECONDS = 1.0

_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


class AttendResult(NamedTuple):
    """`out`: [tokens, query_heads, head_dim], dtype of the query. `lse`: [tokens, query_heads],
    natural log of the softmax denominator. Read-only."""

    out: Array
    lse: NDArray[np.float32]


class SelectResult(NamedTuple):
    """`ids`: [tokens, query_heads or kv_heads, k], ascending, padded with -1. `scores`: as `ids`;
    None unless asked for. Read-only."""

    ids: NDArray[np.int32]
    scores: NDArray[np.float32] | None


def fill_select(
    request: attention_pb2.SelectRequest,
    session: RemoteSession,
    layer: int,
    query: Array,
    options: AttendOptions,
    with_scores: bool,
) -> None:
    request.session = session.name
    request.layer = layer
    tensors.fill(request.query, query)
    request.options.CopyFrom(options.message())
    request.with_scores = with_scores


def fill_attend(
    request: attention_pb2.AttendRequest | attention_pb2.DecodeRequest,
    session: RemoteSession,
    layer: int,
    query: Array,
    selected: ArrayLike | None,
    options: AttendOptions,
) -> None:
    request.session = session.name
    request.layer = layer
    tensors.fill(request.query, query)
    if selected is not None:
        tensors.fill(request.selected, tensors.check("selected", selected))
    request.options.CopyFrom(options.message())


def take_select(response: attention_pb2.SelectResponse, with_scores: bool) -> SelectResult:
    ids = tensors.take(response.ids, "ids", _INT32)
    scores = tensors.take(response.scores, "scores", _FLOAT32) if with_scores else None
    return SelectResult(ids, scores)


def take_attend(
    response: attention_pb2.AttendResponse | attention_pb2.DecodeResponse, query: Array
) -> AttendResult:
    out = tensors.take(response.out, "out", query.dtype)
    return AttendResult(out, tensors.take(response.lse, "lse", _FLOAT32))


class RemoteSession:
    """As `kvtier::RemoteSession`. Used by one thread at a time. Released by `close`, or at the end
    of a `with`; one that is dropped without is released by the end of its lease.

    `UnavailableError` and `DeadlineExceededError` of an `append` leave open whether it was stored:
    `refresh` tells.
    """

    def __init__(self, client: Client, session: session_pb2.Session) -> None:
        self._client = client
        self._connection = client.connection
        self._name = session.name
        self._lengths: list[int] = list(session.layer_lengths)
        self._step = 0
        self._steps = DecodeStream(client.connection, client.watchdog)
        self._open = True
        ttl = session.lease_ttl.seconds + session.lease_ttl.nanos * 1e-9
        client.leases.add(self, self._name, ttl)

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._name

    def append(self, layer: int, keys: ArrayLike, values: ArrayLike) -> None:
        """Stores tokens, [tokens, kv_heads, head_dim] each, in chunks; those before one that fails
        stay."""
        key = tensors.check("keys", keys)
        value = tensors.check("values", values)
        if key.shape[0] != value.shape[0]:
            raise invalid(f"values: expected {key.shape[0]} tokens, found {value.shape[0]}")
        connection = self._connection
        response = connection.call_once(
            connection.attention.Append, self._chunks(layer, key, value)
        )
        self._lengths = list(response.layer_lengths)

    def select(
        self,
        layer: int,
        query: ArrayLike,
        options: AttendOptions = AttendOptions(),
        *,
        with_scores: bool = False,
    ) -> SelectResult:
        """Scores the eligible tokens and returns the chosen ids. Stores nothing."""
        request = attention_pb2.SelectRequest()
        fill_select(request, self, layer, tensors.check("query", query), options, with_scores)
        response = self._connection.call(self._connection.attention.Select, request)
        return take_select(response, with_scores)

    def attend(
        self,
        layer: int,
        query: ArrayLike,
        options: AttendOptions = AttendOptions(),
        *,
        selected: ArrayLike | None = None,
    ) -> AttendResult:
        """Selects and attends. Stores nothing. `selected` replaces scoring."""
        array = tensors.check("query", query)
        request = attention_pb2.AttendRequest()
        fill_attend(request, self, layer, array, selected, options)
        response = self._connection.call(self._connection.attention.Attend, request)
        return take_attend(response, array)

    def decode(
        self,
        layer: int,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        options: AttendOptions = AttendOptions(),
        *,
        selected: ArrayLike | None = None,
    ) -> AttendResult:
        """Appends, then attends, over the session's stream. A step whose reply was lost is asked
        for again, never stored twice."""
        array = tensors.check("query", query)
        keys = tensors.check("key", key)
        request = attention_pb2.DecodeRequest()
        fill_attend(request, self, layer, array, selected, options)
        tensors.fill(request.key, keys)
        tensors.fill(request.value, tensors.check("value", value))
        request.step = self.next_step()
        if self.knows(layer):
            request.position = self._lengths[layer]

        def exchange() -> attention_pb2.DecodeResponse:
            try:
                return self._steps.exchange(request)
            except ClientError as error:
                if error.reason != "STREAM_IDLE":
                    raise
            # The server ends streams that stand still; the session lives on.
            return self._steps.exchange(request)

        response = self._connection.retry(exchange)
        self.stored(layer, keys.shape[0])
        return take_attend(response, array)

    def truncate(self, tokens: int) -> None:
        """Drops the tokens from `tokens` on, in every layer."""
        request = session_pb2.TruncateSessionRequest(
            name=self._name, tokens=tokens, request_id=self._client.make_request_id()
        )
        response = self._connection.call(self._connection.sessions.TruncateSession, request)
        self._lengths = list(response.session.layer_lengths)

    def fork(self, count: int) -> list[RemoteSession]:
        """Opens `count` sessions (1 to 64) that start as this one is and share its pages."""
        request = session_pb2.ForkSessionRequest(
            name=self._name, count=count, request_id=self._client.make_request_id()
        )
        response = self._connection.call(self._connection.sessions.ForkSession, request)
        return [RemoteSession(self._client, session) for session in response.sessions]

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
        request = session_pb2.GetSessionRequest(name=self._name)
        response = self._connection.call(self._connection.sessions.GetSession, request)
        self._lengths = list(response.session.layer_lengths)

    def close(self) -> None:
        """Releases the session, waiting a second at most. When this fails, the lease ends it."""
        if not self._open:
            return
        self._open = False
        self._client.leases.remove(self._name)
        self._steps.close()
        request = session_pb2.ReleaseSessionRequest(name=self._name)
        try:
            self._connection.call_once(
                self._connection.sessions.ReleaseSession, request, _RELEASE_SECONDS
            )
        except ClientError:
            pass

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

    def _chunks(self, layer: int, key: Array, value: Array) -> Iterator[Any]:
        tokens = key.shape[0]
        row_bytes = (key.nbytes + value.nbytes) // max(tokens, 1)
        chunk = min(max(_CHUNK_BYTES // max(row_bytes, 1), 1), _CHUNK_TOKENS)
        for first in range(0, max(tokens, 1), chunk):
            request = attention_pb2.AppendRequest(layer=layer)
            if first == 0:
                request.session = self._name
            if self.knows(layer):
                request.position = self._lengths[layer] + first
            tensors.fill(request.key, key[first : first + chunk])
            tensors.fill(request.value, value[first : first + chunk])
            yield request
