"""What engines and sessions take, as in kvtier/memory.h: the formulas of docs/memory.md, by which
engines size their pools."""

from __future__ import annotations

from typing import Sequence

from kvtier.config import ModelConfig, RetrievalConfig, SessionMemory, SketchConfig, check_member
from kvtier.engine_config import Backend, MemoryConfig

from kvtier_engine import _native


def session_memory(
    model: ModelConfig,
    tokens: int,
    retrieval: RetrievalConfig = RetrievalConfig(),
    memory: MemoryConfig = MemoryConfig(),
    *,
    extra_sketches: Sequence[SketchConfig] = (),
    row_cache_rows: int = 0,
) -> SessionMemory:
    """Returns what a session of `tokens` tokens takes in an engine of these settings whose row cache
    has `row_cache_rows` rows per KV head of a layer. Raises `InvalidArgumentError` for settings that
    are not valid, and for a number of tokens that is not in 1..`memory.max_session_tokens`."""
    return SessionMemory(
        *_native.session_memory(
            model, memory, retrieval, extra_sketches, Backend.AUTO, tokens, row_cache_rows
        )
    )


def device_bytes_for(
    model: ModelConfig,
    tokens: int,
    sessions: int,
    retrieval: RetrievalConfig = RetrievalConfig(),
    memory: MemoryConfig = MemoryConfig(),
    *,
    backend: Backend,
    extra_sketches: Sequence[SketchConfig] = (),
) -> int:
    """Returns the least `MemoryConfig.device_bytes` with which an engine of these settings on
    `backend`, `CPU` or `CUDA`, has its workspace, the sketches of so many sessions of so many tokens,
    and as much row cache as they can use. Raises as `session_memory`."""
    check_member("backend", backend, Backend)
    return _native.device_bytes_for(
        model, memory, retrieval, extra_sketches, backend, tokens, sessions
    )
