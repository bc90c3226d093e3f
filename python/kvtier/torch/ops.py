"""Operators over a session of an engine in this process."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Optional

import torch

from kvtier.config import AttendOptions, Selection
from kvtier.engine_config import Backend
from kvtier.errors import ErrorCode, FailedPreconditionError, invalid

if TYPE_CHECKING:
    import kvtier_engine

_handles = itertools.count(1)
_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


class Session:
    """A session for compiled and captured code. Operators take an integer for the session, and the
    tensor `order`, which those that store tokens are said to write: so a compiler keeps the order
    of the calls. It has no contents.

    `options`: of every call. `device`: of the queries, by default the engine's.

    Calls are enqueued on torch's current stream when tensors are on a GPU, and never wait for it.
    On the CPU they return when their outputs are written. Shapes, dtypes and errors are those of
    `kvtier.Session`. Nothing here has a backward pass.

    In a CUDA graph: `session.reserve(tokens)` of the wrapped session before the capture, and its
    `advance(layer, tokens)` after each replay."""

    def __init__(
        self,
        session: kvtier_engine.Session,
        options: AttendOptions = AttendOptions(),
        *,
        device: Optional[torch.device | str] = None,
    ) -> None:
        retrieval = session.engine.retrieval if options.retrieval is None else options.retrieval
        model = session.engine.model
        if device is None:
            device = "cuda" if session.engine.backend == Backend.CUDA else "cpu"
        self.session = session
        self.options = options
        self.order = torch.empty(0, dtype=torch.uint8, device=device)
        self.handle = next(_handles)
        self._query_heads = model.query_heads
        per_query_head = retrieval.selection == Selection.PER_QUERY_HEAD
        self._set_heads = model.query_heads if per_query_head else model.kv_heads
        if options.recall_target is not None:
            retrieval = retrieval.with_fixed_k()
        most_tokens = session.engine.memory.max_session_tokens
        self._width = 0 if retrieval.sparsity > 0.0 else retrieval.most_selected(most_tokens)
        _sessions[self.handle] = self

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores tokens, [tokens, kv_heads, head_dim] each."""
        _append(self.order, self.handle, layer, keys, values)

    def decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `key` and `value`, [tokens, kv_heads, head_dim] each, then attends as `attend`
        does."""
        return _decode(self.order, self.handle, layer, query, key, value)

    def attend(self, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the attention of `query`, [tokens, query_heads, head_dim], of its shape and
        dtype, and the natural logarithm of the softmax denominators, float32 [tokens,
        query_heads]."""
        return _attend(self.order, self.handle, layer, query)

    def select(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Returns the ids that `query` selects, int32 [tokens, kv_heads or query_heads, width],
        ascending, padded with -1; `width` is `RetrievalConfig.most_selected` of the most tokens of
        a session. `InvalidArgumentError` where `sparsity` makes their number depend on the
        length."""
        if self._width == 0:
            raise invalid("retrieval: expected top_k or an error target, found sparsity")
        return _select(self.order, self.handle, layer, self._set_heads, self._width, query)


def session_of(handle: int) -> Session:
    """Returns the session of a handle."""
    session = _sessions.get(handle)
    if session is None:
        raise FailedPreconditionError(
            ErrorCode.FAILED_PRECONDITION, f"session: expected one that exists, found {handle}"
        )
    return session


def stream_of(tensor: torch.Tensor) -> Optional[int]:
    """Returns torch's current stream on the device of a tensor; None on the CPU."""
    if tensor.device.type != "cuda":
        return None
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


@torch.library.custom_op("kvtier::append", mutates_args=("order",))
def _append(
    order: torch.Tensor, session: int, layer: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    session_of(session).session.append(layer, keys, values, stream=stream_of(keys))


@torch.library.custom_op("kvtier::decode", mutates_args=("order",))
def _decode(
    order: torch.Tensor,
    session: int,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    own = session_of(session)
    out, lse = own.session.decode(layer, query, key, value, own.options, stream=stream_of(query))
    return out, lse


@torch.library.custom_op("kvtier::attend", mutates_args=())
def _attend(
    order: torch.Tensor, session: int, layer: int, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    own = session_of(session)
    out, lse = own.session.attend(layer, query, own.options, stream=stream_of(query))
    return out, lse


@torch.library.custom_op("kvtier::select", mutates_args=())
def _select(
    order: torch.Tensor, session: int, layer: int, heads: int, width: int, query: torch.Tensor
) -> torch.Tensor:
    own = session_of(session)
    ids = query.new_empty((query.shape[0], heads, width), dtype=torch.int32)
    own.session.select(layer, query, own.options, ids=ids, stream=stream_of(query))
    return ids


@_append.register_fake
def _(
    order: torch.Tensor, session: int, layer: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    pass


def _outputs(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@_decode.register_fake
def _(
    order: torch.Tensor,
    session: int,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(query)


@_attend.register_fake
def _(
    order: torch.Tensor, session: int, layer: int, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(query)


@_select.register_fake
def _(
    order: torch.Tensor, session: int, layer: int, heads: int, width: int, query: torch.Tensor
) -> torch.Tensor:
    return query.new_empty((query.shape[0], heads, width), dtype=torch.int32)
