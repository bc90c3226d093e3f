"""What a configuration of transformers says about keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import kvtier
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
from kvtier.engine_config import Backend, MemoryConfig
from kvtier.errors import invalid

BLOCK_TOKENS = 1024  # of sketches, the unit in which a session takes them
_MAX_PLANES = 1024


def default_retrieval(head_dim: int) -> RetrievalConfig:
    """Returns the defaults with scores from 4 bits a coordinate of each key (docs/choosing.md)."""
    return RetrievalConfig(
        estimator=Estimator.NORM_AWARE,
        code=SketchCode.SCALAR,
        rule=SelectionRule.PRIORITY,
        num_planes=min(4 * head_dim, _MAX_PLANES),
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
    model: ModelConfig,
    retrieval: RetrievalConfig,
    sessions: int,
    tokens: int,
    rows: int,
    backend: Backend = Backend.AUTO,
) -> MemoryConfig:
    """Returns memory for so many sessions of so many tokens, by docs/memory.md: for each layer two
    pages and a block of sketches more, of which forks write one, and scores of `rows` queries at a
    time."""
    if backend == Backend.AUTO:
        backend = Backend.CUDA if torch.cuda.is_available() else Backend.CPU
    memory = MemoryConfig(max_session_tokens=tokens + BLOCK_TOKENS, max_batch_rows=rows)
    session = kvtier.session_memory(model, tokens + 2 * memory.page_tokens, retrieval, memory)
    memory = replace(memory, host_bytes=sessions * session.pages)
    device_bytes = kvtier.device_bytes_for(
        model, tokens + BLOCK_TOKENS, sessions, retrieval, memory, backend=backend
    )
    return replace(memory, device_bytes=device_bytes, max_session_tokens=tokens)


def batch_rows(decoder: Any, sessions: int) -> int:
    """Returns how many queries are attended with at a time: one for each session, or more where
    the engine attends in prompts, which is with a softcap."""
    most = MemoryConfig().max_batch_rows
    softcap = getattr(decoder, "attn_logit_softcapping", None)
    return most if softcap else min(sessions, most)
