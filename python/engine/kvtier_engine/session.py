"""A session of an engine in this process."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Optional, Sequence

import numpy as np
from kvtier.config import AttendOptions, DType, Selection
from kvtier.errors import invalid
from kvtier.lease import Closing
from kvtier.session import FetchResult, check_ids
from numpy.typing import NDArray

from kvtier_engine import _native
from kvtier_engine.arrays import Array, like, native, shape_of

if TYPE_CHECKING:
    from kvtier_engine.engine import Engine


class _Attended(NamedTuple):
    out: Array
    lse: Array


class AttendResult(_Attended):
    """`out`: [tokens, query_heads, head_dim], dtype of the query. `lse`: float32 [tokens,
    query_heads], natural log of the softmax denominator. These two are what it unpacks to. Arrays
    of the query's library, on its device, or those that the call was given."""

    #: float32 [tokens, query_heads], the estimated share of the attention of all visible tokens
    #: that fell on tokens not attended; None unless asked for.
    missed: Optional[Array] = None
    #: int32 [tokens, query_heads or kv_heads, n], the ids chosen by score, ascending, padded with
    #: -1; None unless asked for.
    selected: Optional[Array] = None


class SelectResult(NamedTuple):
    """`ids`: int32 [tokens, query_heads or kv_heads, n], ascending, padded with -1. `scores`:
    float32 as `ids`, -infinity where padded. `bias`: float32 as `ids`, the logarithm of how many
    times each id counts, 0 where padded. The last two are None unless asked for."""

    ids: Array
    scores: Optional[Array]
    bias: Optional[Array] = None


@lru_cache(maxsize=256)
def native_options(options: AttendOptions, tokens_after: int) -> _native.Options:
    return _native.Options(options, tokens_after)


class Session(Closing):
    """The keys and values of one sequence and their sketches, in all layers; made by
    `Engine.open`. As `kvtier::Session`.

    Arrays are of numpy, of torch, or of any library with DLPack: float32, float16, bfloat16 (of
    numpy as `ml_dtypes.bfloat16` or as its bits in uint16), the last dimension dense, on the host
    or, where the engine runs on a GPU, on it. Rotary embedding is already applied to queries and
    keys.

    `stream`: None, and a call returns when its outputs are written; or a `cudaStream_t` as an
    integer (`torch.cuda.current_stream().cuda_stream`), and it is enqueued there: tensors have to
    be on the engine's GPU then and stay valid until the stream has passed the call. Without a
    stream, device tensors must have been written before the call.

    One call at a time: a second thread's raises `FailedPreconditionError`, as every call of a
    closed session does. Wrong shapes, dtypes, layers and values raise `InvalidArgumentError`, no
    room `ResourceExhaustedError`. A call that raises has changed nothing. The GIL is released
    while the engine works."""

    def __init__(self, engine: Engine, session: _native.Session) -> None:
        """Made by `Engine.open` and `fork`."""
        self._engine = engine
        self.native = session

    @property
    def engine(self) -> Engine:
        return self._engine

    def append(
        self, layer: int, keys: Array, values: Array, *, stream: Optional[int] = None
    ) -> None:
        """Stores tokens, [tokens, kv_heads, head_dim] each."""
        self.native.append(layer, native("keys", keys), native("values", values), stream)

    def reserve(self, tokens: int, *, stream: Optional[int] = None) -> None:
        """Makes room for `tokens` more in every layer, as steps need that are captured in a CUDA
        graph."""
        self.native.reserve(tokens, stream)

    def select(
        self,
        layer: int,
        query: Array,
        options: AttendOptions = AttendOptions(),
        *,
        with_scores: bool = False,
        with_bias: bool = False,
        ids: Optional[Array] = None,
        tokens_after: int = 0,
        stream: Optional[int] = None,
    ) -> SelectResult:
        """Scores the eligible tokens and returns the chosen ids. Stores nothing. `query`: [tokens,
        query_heads, head_dim]. `ids`: an array that is written instead of a new one, of at least as
        many columns as there are ids. `with_bias`: with what `attend` takes as `bias` beside the ids, of
        the priority rule. `tokens_after`: tokens of the layer behind the query's last one.
        `FailedPreconditionError` on an empty layer, one that is dense, or without a fitting
        sketch."""
        if ids is None:
            shape = self._ids_shape(layer, query, options, self.length(layer))
            ids = like("ids", query, shape, "int32")
        shape = tuple(getattr(ids, "shape", ()))
        scores = like("scores", query, shape, "float32") if with_scores else None
        bias = like("bias", query, shape, "float32") if with_bias else None
        self.native.select(
            *(layer, native("query", query), native("ids", ids), scores, bias, stream),
            native_options(options, tokens_after),
        )
        return SelectResult(ids, scores, bias)

    def attend(
        self,
        layer: int,
        query: Array,
        options: AttendOptions = AttendOptions(),
        *,
        selected: Optional[Array] = None,
        bias: Optional[Array] = None,
        with_missed: bool = False,
        with_selected: bool = False,
        out: Optional[Array] = None,
        lse: Optional[Array] = None,
        tokens_after: int = 0,
        stream: Optional[int] = None,
    ) -> AttendResult:
        """Selects and attends. Stores nothing. `query`: [tokens, query_heads, head_dim]; query t of
        T sees the tokens up to number length - tokens_after - T + t. `selected`: int32 [tokens,
        query_heads or kv_heads, n] ids to attend beside sink, window and dense tokens, -1 for none;
        replaces scoring. `bias`: float32 of its shape, what is added to the logit of each id.
        `out`, `lse`: arrays that are written instead of new ones, as `AttendResult` says; `out` may
        have another float dtype. `with_missed`: of norm-aware selections. `with_selected`: with the
        ids. `FailedPreconditionError` on an empty layer or without a fitting sketch."""
        result = self.outputs(layer, query, options, 0, with_missed, with_selected, out, lse)
        self.native.attend(
            *(layer, native("query", query), native("selected", selected), native("bias", bias)),
            *(native("out", result.out), native("lse", result.lse), result.selected),
            *(result.missed, stream, native_options(options, tokens_after)),
        )
        return result

    def decode(
        self,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        options: AttendOptions = AttendOptions(),
        *,
        selected: Optional[Array] = None,
        bias: Optional[Array] = None,
        with_missed: bool = False,
        with_selected: bool = False,
        out: Optional[Array] = None,
        lse: Optional[Array] = None,
        tokens_after: int = 0,
        stream: Optional[int] = None,
    ) -> AttendResult:
        """Appends `key` and `value`, [tokens, kv_heads, head_dim] each, then attends as `attend`
        does."""
        more = shape_of("key", key)[0]
        result = self.outputs(layer, query, options, more, with_missed, with_selected, out, lse)
        self.native.decode(
            *(layer, native("query", query), native("key", key), native("value", value)),
            *(native("selected", selected), native("bias", bias), native("out", result.out)),
            *(native("lse", result.lse), result.selected, result.missed, stream),
            native_options(options, tokens_after),
        )
        return result

    def prefetch(
        self,
        layer: int,
        query: Array,
        options: AttendOptions = AttendOptions(),
        *,
        stream: Optional[int] = None,
    ) -> None:
        """Fetches the rows that these queries select to the device, for steps to come. Changes no
        result; does nothing without a row cache (`MemoryConfig.row_cache_bytes`)."""
        self.native.prefetch(layer, native("query", query), stream, native_options(options, 0))

    def fetch(self, layer: int, tokens: Array) -> FetchResult:
        """Returns stored rows, bit for bit. `tokens`: int32 [kv_heads, n] on the host, for each KV
        head its own ids in any order; for -1 the row is zeros."""
        model = self._engine.model
        shape = tuple(getattr(tokens, "shape", ()))
        if len(shape) != 2:
            raise invalid(f"tokens: expected int32 [kv_heads, n], found shape {list(shape)}")
        dtype = np.dtype(np.float16 if model.kv_dtype == DType.FLOAT16 else np.uint16)
        rows = (*shape, model.head_dim)
        keys, values = np.empty(rows, dtype), np.empty(rows, dtype)
        # Bits of bfloat16 as the native module reads them; float16 as it is.
        self.native.fetch(layer, tokens, keys, values)
        return FetchResult(keys, values)

    def length(self, layer: Optional[int] = None) -> int:
        """Returns the tokens of one layer, or those that every layer has."""
        return self.native.length(layer)

    def truncate(
        self, tokens: int, *, layer: Optional[int] = None, stream: Optional[int] = None
    ) -> None:
        """Drops the tokens from index `tokens` on, in every layer or in one."""
        self.native.truncate(tokens, stream, layer)

    def fork(self, count: int, *, stream: Optional[int] = None) -> list[Session]:
        """Opens `count` sessions that start as this one is and share its pages until they are
        written to."""
        return [Session(self._engine, made) for made in self.native.fork(count, stream)]

    def publish(
        self, token_ids: Sequence[int] | NDArray[np.int32], *, stream: Optional[int] = None
    ) -> None:
        """Stores the whole pages of the first tokens, whose ids these are, for sessions that are
        opened later with the same ids, secret and fingerprint."""
        self.native.publish(check_ids(token_ids), stream)

    def advance(self, layer: int, tokens: int) -> None:
        """Takes note of `tokens` that replays of a captured graph have appended to `layer`."""
        self.native.advance(layer, tokens)

    def close(self) -> None:
        """Releases the memory. A second call does nothing; others raise from now on."""
        self.native.close()

    def outputs(
        self,
        layer: int,
        query: Array,
        options: AttendOptions,
        more: int,
        with_missed: bool,
        with_selected: bool,
        out: Optional[Array],
        lse: Optional[Array],
    ) -> AttendResult:
        """Returns where a call writes; `more`: tokens that it appends before it attends."""
        shape = shape_of("query", query)
        result = AttendResult(
            like("out", query, shape) if out is None else out,
            like("lse", query, shape[:2], "float32") if lse is None else lse,
        )
        if with_missed:
            result.missed = like("missed", query, shape[:2], "float32")
        if with_selected:
            ids = self._ids_shape(layer, query, options, self.length(layer) + more)
            result.selected = like("selected", query, ids, "int32")
        return result

    def _ids_shape(
        self, layer: int, query: Array, options: AttendOptions, length: int
    ) -> tuple[int, int, int]:
        """Shape of the ids that a call may choose from `length` tokens."""
        engine = self._engine
        retrieval = engine.retrieval if options.retrieval is None else options.retrieval
        if options.recall_target is not None:
            retrieval = retrieval.with_fixed_k()
        heads = {
            Selection.PER_QUERY_HEAD: engine.model.query_heads,
            Selection.PER_KV_HEAD: engine.model.kv_heads,
            Selection.PER_SEQUENCE: 1,
        }[retrieval.selection]
        return shape_of("query", query)[0], heads, max(retrieval.most_selected(length), 1)
