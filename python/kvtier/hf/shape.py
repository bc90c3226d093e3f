"""What a configuration of transformers says about keys and values."""

from __future__ import annotations

from typing import Any

from kvtier.config import (
    DType,
    Estimator,
    LayerConfig,
    LayerMode,
    ModelConfig,
    RetrievalConfig,
    SelectionRule,
    SketchCode,
)
from kvtier.engine_config import MemoryConfig
from kvtier.errors import invalid

_MIB = 1 << 20
_BLOCK_TOKENS = 1024  # of sketches, the unit in which a session takes them
_MAX_PLANES = 1024
_CACHED_ROWS = 4  # of the row cache, for each that a step selects


def default_retrieval(head_dim: int) -> RetrievalConfig:
    """Returns what docs/choosing.md advises: scores from 4 bits a coordinate of each key, a priority
    sample of four tokens a coordinate."""
    return RetrievalConfig(
        estimator=Estimator.NORM_AWARE,
        code=SketchCode.SCALAR,
        rule=SelectionRule.PRIORITY,
        num_planes=min(4 * head_dim, _MAX_PLANES),
        top_k=4 * head_dim,
    )


def text_config(config: Any) -> Any:
    """Returns the decoder's part of a configuration. Raises `InvalidArgumentError` for a model with
    another kind of attention than causal and sliding-window self-attention."""
    if getattr(config, "is_encoder_decoder", False):
        raise invalid("config: expected a decoder, found an encoder-decoder (cross-attention)")
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "cross_attention_layers", None):
        raise invalid("config: expected self-attention alone, found cross_attention_layers")
    if getattr(decoder, "num_kv_shared_layers", 0):
        raise invalid("config: expected keys and values of each layer, found num_kv_shared_layers")
    return decoder


def layer_windows(decoder: Any) -> list[int]:
    """Returns for each layer the tokens of its window, 0 for all."""
    layers = decoder.num_hidden_layers
    window = getattr(decoder, "sliding_window", None)
    types = getattr(decoder, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * layers
    windows = []
    for index, kind in enumerate(types):
        if kind == "sliding_attention" and window:
            windows.append(int(window))
        elif kind in ("full_attention", "attention"):
            windows.append(0)
        else:
            raise invalid(
                f"config.layer_types[{index}]: expected full_attention, or sliding_attention with "
                f"sliding_window, found {kind} with {window}"
            )
    return windows


def model_config(decoder: Any, dense: bool, kv_dtype: DType) -> ModelConfig:
    """Returns the model's shape. `dense`: layers without a window attend to all tokens."""
    heads = decoder.num_attention_heads
    full = LayerConfig(mode=LayerMode.DENSE if dense else LayerMode.SPARSE)
    head_dim = getattr(decoder, "head_dim", None)
    return ModelConfig(
        layers=decoder.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(decoder, "num_key_value_heads", None) or heads,
        head_dim=head_dim or decoder.hidden_size // heads,
        kv_dtype=kv_dtype,
        layer_options=tuple(
            LayerConfig(mode=LayerMode.SLIDING_WINDOW, window_tokens=window) if window else full
            for window in layer_windows(decoder)
        ),
    )


def memory_config(
    model: ModelConfig, retrieval: RetrievalConfig, sessions: int, tokens: int, rows: int
) -> MemoryConfig:
    """Returns memory for so many sessions of so many tokens: whole pages, and two more for each
    layer, of which forks write one; sketches in whole blocks; scores of `rows` queries at a time
    beside a fixed share for the rest; and the row cache of a GPU by docs/memory.md."""
    base = MemoryConfig(max_batch_rows=rows)
    pages = -(-tokens // base.page_tokens) + 2
    page_bytes = base.page_tokens * model.kv_heads * model.head_dim * 4
    blocks = -(-tokens // _BLOCK_TOKENS) + 1
    sketch_bytes = retrieval.sketch(model.head_dim).num_planes // 8 + 16
    scores = tokens * base.max_batch_rows * model.query_heads * 16
    per_session = model.layers * blocks * _BLOCK_TOKENS * model.kv_heads * sketch_bytes
    return MemoryConfig(
        host_bytes=sessions * model.layers * pages * page_bytes,
        device_bytes=sessions * per_session
        + scores
        + 256 * _MIB
        + row_cache_bytes(model, retrieval, sessions, tokens),
        max_session_tokens=tokens,
        max_batch_rows=rows,
    )


def row_cache_bytes(
    model: ModelConfig, retrieval: RetrievalConfig, sessions: int, tokens: int
) -> int:
    """Returns what the row cache takes of `device_bytes` (docs/memory.md), with the part-filled
    blocks of sketches that come before it."""
    layers = [layer.mode for layer in model.layer_options]
    sparse = layers.count(LayerMode.SPARSE) if layers else model.layers
    selected = int(tokens / retrieval.sparsity) if retrieval.sparsity else retrieval.top_k
    sets = -(-min(_CACHED_ROWS * selected, tokens) // 32) * model.kv_heads
    cache = sets * (32 * (4 * model.head_dim + 8) + 16)
    spare = max(64 * _BLOCK_TOKENS, 4 * _BLOCK_TOKENS * model.layers * sessions)
    sketch_bytes = retrieval.sketch(model.head_dim).num_planes // 8 + 16
    return sessions * sparse * (cache + 256) + spare * model.kv_heads * sketch_bytes


def batch_rows(decoder: Any, sessions: int) -> int:
    """Returns how many queries are attended with at a time: one for each session, or more where
    the engine attends in prompts, which is with a softcap."""
    most = MemoryConfig().max_batch_rows
    softcap = getattr(decoder, "attn_logit_softcapping", None)
    return most if softcap else min(sessions, most)
