"""A cache of transformers whose keys and values are in sessions of an engine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Optional, Sequence

import torch
from transformers.cache_utils import Cache

import kvtier
from kvtier.config import DType, LayerConfig, LayerMode, ModelConfig, RetrievalConfig
from kvtier.engine_config import Backend, MemoryConfig
from kvtier.errors import ErrorCode, FailedPreconditionError, ResourceExhaustedError, invalid
from kvtier.hf.layer import KvtierLayer
from kvtier.hf.shape import (
    batch_rows,
    default_retrieval,
    layer_windows,
    memory_config,
    model_config,
    text_config,
)

if TYPE_CHECKING:
    from kvtier_engine import Engine, Session


class KvtierCache(Cache):
    """Keeps the keys and values of `generate` or of forward passes off the GPU, in pages of the
    host: one session for each row of the batch. For models whose attention implementation is
    "kvtier".

    `config`: that of the model. `retrieval`: how a step of one token selects the tokens that it
    attends to, by default `default_retrieval(head_dim)`; `dense`: it attends to all. Passes of more
    tokens are dense. Layers with a sliding window attend to all of it.

    `max_tokens`: capacity of a row, by default `config.max_position_embeddings`; `max_batch_size`:
    rows, beams among them. Both size `memory`, which is allocated here, unless it is given. At 8 KV
    heads of 128 elements and 32 layers a token takes 128 KiB. `engine`: shares one that was made
    for the same model instead; `memory`, `retrieval`, `dense`, `kv_dtype` and `backend` are then
    its own.

    `kv_dtype`: of stored keys and values, by default float16 where `config.dtype` is that and
    bfloat16 elsewhere; those of a float32 model are rounded. What is refused: docs/python.md.

    Left padding takes no room: `attention_mask` may have zeros at the beginnings of rows and
    nowhere else. `crop`, `reorder_cache`, `batch_repeat_interleave`, `batch_select_indices`,
    `reset` and `copy.deepcopy` work; copies of rows share their pages. Not for training, not
    compileable. A pass whose attention raises leaves the cache as it was before. One that is interrupted
    between two layers is dropped by the next, which raises `FailedPreconditionError`."""

    def __init__(
        self,
        config: Any,
        retrieval: Optional[RetrievalConfig] = None,
        *,
        dense: bool = False,
        max_tokens: Optional[int] = None,
        max_batch_size: int = 1,
        kv_dtype: Optional[DType] = None,
        memory: Optional[MemoryConfig] = None,
        backend: Backend = Backend.AUTO,
        engine: Optional[Engine] = None,
    ) -> None:
        decoder = text_config(config)
        windows = layer_windows(decoder)
        if max_batch_size < 1:
            raise invalid(f"max_batch_size: expected at least 1, found {max_batch_size}")
        if kv_dtype is None:
            half = getattr(decoder, "dtype", None) == torch.float16
            kv_dtype = DType.FLOAT16 if half else DType.BFLOAT16
        shape = model_config(decoder, dense, kv_dtype)
        self._owns_engine = engine is None
        if engine is None:
            if retrieval is None:
                retrieval = default_retrieval(shape.head_dim)
            sized = ""
            if memory is None:
                tokens = decoder.max_position_embeddings if max_tokens is None else max_tokens
                rows = batch_rows(decoder, max_batch_size)
                memory = memory_config(shape, retrieval, max_batch_size, tokens, rows, backend)
                sized = f", for max_tokens {tokens} and max_batch_size {max_batch_size}"
            try:
                engine = kvtier.Engine(shape, retrieval, memory, backend=backend)
            except ResourceExhaustedError as error:
                raise ResourceExhaustedError(error.code, error.message + sized) from None
        _check_fit(engine.model, shape)
        self.config = config
        self.engine = engine
        self.on_gpu = engine.backend == Backend.CUDA
        self.max_tokens = engine.memory.max_session_tokens if max_tokens is None else max_tokens
        self.sessions: list[Session] = []
        #: Tokens of left padding of each row.
        self.padding: list[int] = []
        #: Of the last pass.
        self.device = torch.device("cpu")
        #: How often sessions were replaced, cut or copied: graphs of before are not replayed.
        self.changes = 0
        self._replays = False  # that sessions do not know of
        super().__init__(
            layers=[KvtierLayer(self, index, window) for index, window in enumerate(windows)]
        )

    def rows(self, batch: int) -> list[Session]:
        """Returns the sessions of a batch, opened by the first pass."""
        if len(self.sessions) != batch and self.get_seq_length() == 0:
            self.sessions = [
                self.engine.open(capacity_tokens=self.max_tokens) for _ in range(batch)
            ]
        self.padding = self.padding or [0] * batch
        for name, found in (("key_states", len(self.sessions)), ("attention_mask", len(self.padding))):
            if found != batch:
                raise invalid(f"{name}: expected a batch of {found}, as before, found {batch}")
        return self.sessions

    def append(self, layer: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Stores keys and values that were computed elsewhere, [batch, kv_heads, tokens, head_dim]
        each, behind those of the layer; every layer is given as many before the next pass."""
        self.layers[layer].append(key_states, value_states)

    def stream(self) -> Optional[int]:
        """Returns the stream on which calls of the sessions are ordered, that of torch on the GPU of
        the model; None for a model on the CPU."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def replayed(self) -> None:
        """Takes note that the replay of a graph has appended a token to every row."""
        for session in self.sessions:
            for layer in range(len(self.layers)):
                session.advance(layer, 1)
        for layer in self.layers:
            layer.advance(1)
        self._replays = True

    def wait_for_replays(self) -> None:
        """Waits for replays, of which sessions do not know when they give memory back."""
        if self._replays:
            torch.cuda.synchronize(self.device)
        self._replays = False

    def _change(self) -> None:
        self.wait_for_replays()
        self.changes += 1

    def take_padding(self, mask: Optional[torch.Tensor], query_length: int, length: int) -> None:
        """Takes the padding of the next pass from `attention_mask` (bool [batch, length]): left
        padding alone, the same as in passes before. On a GPU that of single tokens is not read,
        since the host would wait for it."""
        past = length - query_length
        if mask is None and past == 0:
            self.padding = []
        if mask is None or (past > 0 and query_length == 1 and mask.is_cuda):
            return
        self.drop_part_of_pass()  # whose tokens no mask counts
        if mask.ndim != 2 or mask.shape[1] != length:
            raise invalid(
                f"attention_mask: expected [batch, {length}] with past and new tokens, "
                f"found {list(mask.shape)}"
            )
        if past > 0 and mask.shape[0] != len(self.padding):
            raise invalid(
                f"attention_mask: expected a batch of {len(self.padding)}, as before, "
                f"found {mask.shape[0]}"
            )
        gaps = (mask[:, :-1] & ~mask[:, 1:]).nonzero()
        if len(gaps) > 0:
            row, position = gaps[0].tolist()
            raise invalid(
                "attention_mask: expected zeros at the beginning of a row alone (left padding), "
                f"found one in row {row} at position {position + 1}"
            )
        found = (length - mask.sum(1)).tolist()
        if past > 0:
            for row, (before, now) in enumerate(zip(self.padding, found)):
                if now != before and before < past:
                    raise invalid(
                        f"attention_mask: expected {before} tokens of padding in row {row}, as "
                        f"before, found {now}"
                    )
        self.padding = found

    def drop_part_of_pass(self) -> None:
        """At the start of a pass, drops what one before has stored in some layers alone, since it was
        interrupted between them, and raises: positions of the pass are already those behind it."""
        lengths = [layer.get_seq_length() for layer in self.layers]
        if min(lengths) == max(lengths):
            return
        self.truncate(min(lengths))
        raise FailedPreconditionError(
            ErrorCode.FAILED_PRECONDITION,
            f"past_key_values: expected layers of one length, found {min(lengths)} to {max(lengths)} tokens, "
            f"of a pass that was interrupted; the cache now has {min(lengths)}, as before that pass",
        )

    def truncate(self, length: int) -> None:
        """Drops the tokens from position `length` on, padding counted, in every layer."""
        self._change()
        for layer in self.layers:
            layer.cut(length)
        for session, padding in zip(self.sessions, self.padding):
            kept = max(length - padding, 0)
            if kept < max(session.length(layer) for layer in range(len(self.layers))):
                session.truncate(kept, stream=self.stream())

    def crop(self, tokens: int) -> None:
        """Drops the last `-tokens` tokens, or, for `tokens` above 0, all behind the first
        `tokens`."""
        tokens = int(tokens)  # a tensor from transformers 5.17
        length = self.get_seq_length()
        if -tokens > length:
            raise invalid(f"crop: expected at most {length} tokens to remove, found {-tokens}")
        kept = length + tokens if tokens <= 0 else min(tokens, length)
        if kept < length:
            self.truncate(kept)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i what row `beam_idx[i]` is, as beam search does."""
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self._take([row for row in range(len(self.sessions)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows, by index or by a mask."""
        rows = torch.arange(len(self.sessions), device=indices.device)
        self._take(rows[indices].tolist())

    def reset(self) -> None:
        """Empties the cache; rows, padding and model of the next pass may be others."""
        self._change()
        for session in self.sessions:
            session.close()
        self.sessions = []
        self.padding = []
        for layer in self.layers:
            layer.reset()

    def close(self) -> None:
        """Releases the memory. The cache cannot be used after."""
        self.reset()
        if self._owns_engine:
            self.engine.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> KvtierCache:
        """Returns a cache of the same engine that starts as this one is; pages are shared until
        they are written to. They need room in the engine: `max_batch_size`."""
        self._change()
        copied = KvtierCache(self.config, engine=self.engine, max_tokens=self.max_tokens)
        memo[id(self)] = copied
        copied.sessions = [session.fork(1, stream=self.stream())[0] for session in self.sessions]
        copied.padding = list(self.padding)
        copied.device = self.device
        for layer, other in zip(copied.layers, self.layers):
            layer.take_state(other)
        return copied

    def __repr__(self) -> str:
        return (
            f"KvtierCache(layers={len(self.layers)}, rows={len(self.sessions)}, "
            f"tokens={self.get_seq_length()}, max_tokens={self.max_tokens})"
        )

    def _take(self, rows: Sequence[int]) -> None:
        if not self.sessions:
            return
        self._change()
        forks = {
            row: self.sessions[row].fork(count - 1, stream=self.stream())
            for row, count in Counter(rows).items()
            if count > 1
        }
        old = dict(enumerate(self.sessions))
        self.sessions = [old.pop(row) if row in old else forks[row].pop() for row in rows]
        self.padding = [self.padding[row] for row in rows]
        for session in old.values():
            session.close()


def _check_fit(found: Any, expected: Any) -> None:
    """Checks that an engine was made for the shape of a model."""
    for name in ("layers", "query_heads", "kv_heads", "head_dim"):
        if getattr(found, name) != getattr(expected, name):
            raise FailedPreconditionError(
                ErrorCode.FAILED_PRECONDITION,
                f"engine: expected {name} {getattr(expected, name)}, as the model has, "
                f"found {getattr(found, name)}",
            )
    for layer, (window, other) in enumerate(zip(_windows(expected), _windows(found))):
        if window != other:
            raise FailedPreconditionError(
                ErrorCode.FAILED_PRECONDITION,
                f"engine: expected layer {layer} with a window of {window} tokens (0: none), as the "
                f"model has, found {other}",
            )


def _windows(model: ModelConfig) -> list[int]:
    options = model.layer_options or (LayerConfig(),) * model.layers
    return [
        each.window_tokens if each.mode == LayerMode.SLIDING_WINDOW else 0 for each in options
    ]
