"""Sparse decode over a paged KV cache of the caller."""

from __future__ import annotations

from typing import NamedTuple, Optional

from kvtier.config import ModelConfig, RetrievalConfig, Selection, check_member
from kvtier.engine_config import Backend
from kvtier.lease import Closing

from kvtier_engine import _native
from kvtier_engine.arrays import Array, like, native, shape_of


class PagedSelectResult(NamedTuple):
    """`ids`: int32 [sequences, 1 or kv_heads, n], every token to attend, ascending, padded with -1.
    `bias`: float32 as `ids`, what to add to the logit of each; None unless asked for."""

    ids: Array
    bias: Optional[Array]


class PagedAttendResult(NamedTuple):
    """`out`: [sequences, query_heads, head_dim], dtype of the query. `lse`: float32 [sequences,
    query_heads], natural log of the softmax denominator."""

    out: Array
    lse: Array


class PagedSketches(Closing):
    """The sketches of the slots of a paged KV cache that an engine owns, and the workspace to
    select from them and to attend. As `kvtier::PagedSketches`; docs/engines/paged.md.

    `num_blocks`, `block_tokens`: of the engine's cache, the same in all layers. `max_tokens`: of
    the longest sequence. `max_batch_rows`: sequences of a launch, 1 to 64.

    `blocks`: int32 [sequences, n], the block table; token t is in block `blocks[t // block_tokens]`.
    `lengths`: int32 [sequences]. `max_length`: what the lengths stay below or reach, 0:
    `max_tokens`. Arrays are as `Session` takes them, all on the GPU where it is used. With a
    `stream` calls are enqueued there, can be captured in a CUDA graph, and arrays stay valid until
    the stream has passed them; without one a call returns when its outputs are written. Calls use
    one workspace: one stream at a time.

    Raises `InvalidArgumentError` for settings and arrays that do not fit, and in the next call for
    block ids and lengths that a call has met on the GPU."""

    def __init__(
        self,
        model: ModelConfig,
        retrieval: RetrievalConfig = RetrievalConfig(selection=Selection.PER_SEQUENCE),
        *,
        num_blocks: int,
        max_tokens: int,
        block_tokens: int = 16,
        max_batch_rows: int = 16,
        backend: Backend = Backend.AUTO,
    ) -> None:
        check_member("backend", backend, Backend)
        self.model = model
        self.retrieval = retrieval
        self._max_tokens = max_tokens
        self._native = _native.PagedSketches(
            *(model, retrieval, num_blocks, block_tokens, max_tokens, max_batch_rows, backend)
        )

    @property
    def backend(self) -> Backend:
        """Where kernels run: `CPU` or `CUDA`."""
        return Backend[self._native.backend().name]

    @property
    def device_bytes(self) -> int:
        """Memory of sketches and workspace."""
        return self._native.device_bytes()

    def store(
        self,
        layer: int,
        keys: Array,
        values: Array,
        slots: Array,
        *,
        stream: Optional[int] = None,
    ) -> None:
        """Sketches new tokens, [tokens, kv_heads, head_dim] each, rotary embedding applied.
        `slots`: int32 [tokens], block * block_tokens + offset; one outside the cache is passed
        over. Keys and values themselves are the engine's to write."""
        self._native.store(
            *(layer, native("keys", keys), native("values", values), slots, stream)
        )

    def attended_bound(self, length: int) -> int:
        """Returns how many tokens a query attends at most, of a sequence of `length` tokens."""
        return self._native.attended_bound(length)

    def select(
        self,
        layer: int,
        query: Array,
        blocks: Array,
        lengths: Array,
        *,
        max_length: int = 0,
        with_bias: bool = False,
        ids: Optional[Array] = None,
        bias: Optional[Array] = None,
        stream: Optional[int] = None,
    ) -> PagedSelectResult:
        """Lists what the queries, [sequences, query_heads, head_dim], attend. `ids`, `bias`: arrays
        that are written instead of new ones."""
        if ids is None:
            sets = {Selection.PER_SEQUENCE: 1, Selection.PER_KV_HEAD: self.model.kv_heads}
            count = self.attended_bound(max_length or self._max_tokens)
            shape = (shape_of("query", query)[0], sets[self.retrieval.selection], max(count, 1))
            ids = like("ids", query, shape, "int32")
        if with_bias and bias is None:
            bias = like("bias", query, tuple(ids.shape), "float32")
        self._native.select(
            *(layer, blocks, lengths, max_length, native("query", query), ids, bias, stream)
        )
        return PagedSelectResult(ids, bias)

    def attend(
        self,
        layer: int,
        query: Array,
        blocks: Array,
        lengths: Array,
        keys: Array,
        values: Array,
        *,
        max_length: int = 0,
        out: Optional[Array] = None,
        lse: Optional[Array] = None,
        stream: Optional[int] = None,
    ) -> PagedAttendResult:
        """Selects and attends. `keys`, `values`: the layer's cache, [num_blocks, block_tokens,
        kv_heads, head_dim] each, with strides of the engine's layout."""
        shape = shape_of("query", query)
        if out is None:
            out = like("out", query, shape)
        if lse is None:
            lse = like("lse", query, shape[:2], "float32")
        self._native.attend(
            *(layer, blocks, lengths, max_length, native("query", query), native("keys", keys)),
            *(native("values", values), native("out", out), native("lse", lse), stream),
        )
        return PagedAttendResult(out, lse)

    def check(self) -> None:
        """Raises `InvalidArgumentError` when a call or a replay has met a block id outside the
        cache, or a length that cannot be; then forgets it. Every call does this first."""
        self._native.check()

    def close(self) -> None:
        """Frees the memory; the work of all calls must be done."""
        self._native.close()
