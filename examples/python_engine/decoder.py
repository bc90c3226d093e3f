"""A Llama decoder in numpy, whose keys and values are in a kvtier session."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import kvtier
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from checkpoint import Config, Floats, Layer, read_config, read_weights

Bfloats = NDArray[Any]
#: Of a layer's queries, keys and values [tokens, heads, head_dim]: attention's output, as queries.
Attention = Callable[[int, Floats, Bfloats, Bfloats], Floats]

_QUERY_TILE = 256
_DECODE_TOKENS = 64


class Decoder:
    def __init__(self, folder: Path) -> None:
        self.config: Config = read_config(folder)
        self._weights = read_weights(folder, self.config)
        half = np.arange(self.config.head_dim // 2)
        self._frequencies = self.config.rope_theta ** (-2.0 * half / self.config.head_dim)

    def model(self) -> kvtier.ModelConfig:
        """Returns the shape of the KV."""
        config = self.config
        return kvtier.ModelConfig(config.layers, config.query_heads, config.kv_heads, config.head_dim)

    def prefill(self, session: kvtier.RemoteSession, tokens: NDArray[np.int32]) -> None:
        """Appends `tokens` to an empty session; their attention is dense and computed here."""

        def attention(layer: int, query: Floats, key: Bfloats, value: Bfloats) -> Floats:
            session.append(layer, key, value)
            if layer == self.config.layers - 1:
                return np.zeros_like(query)  # nothing reads the output of the last layer
            return _dense(query, key.astype(np.float32), value.astype(np.float32))

        self._forward(tokens, 0, attention)

    def decode(
        self,
        session: kvtier.RemoteSession,
        tokens: NDArray[np.int32],
        options: kvtier.AttendOptions,
    ) -> Floats:
        """Appends `tokens`, which attend in the server, and returns logits [tokens, vocab]."""

        def attention(layer: int, query: Floats, key: Bfloats, value: Bfloats) -> Floats:
            out = np.empty_like(query)
            for at in range(0, len(query), _DECODE_TOKENS):
                rows = slice(at, at + _DECODE_TOKENS)
                out[rows] = session.decode(layer, query[rows], key[rows], value[rows], options).out
            return out

        hidden = self._forward(tokens, session.length(), attention)
        return self._norm(hidden, self._weights.final_norm) @ self._weights.head.T

    def _forward(self, tokens: NDArray[np.int32], first: int, attention: Attention) -> Floats:
        angles = np.arange(first, first + len(tokens))[:, None] * self._frequencies
        rope = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        hidden = self._weights.embedding[tokens]
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            context = attention(index, *self._project(normed, layer, rope))
            hidden = hidden + context.reshape(len(tokens), -1) @ layer.o.T
            normed = self._norm(hidden, layer.mlp_norm)
            gate = normed @ layer.gate.T
            hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ layer.up.T)) @ layer.down.T
        return hidden

    def _project(
        self, normed: Floats, layer: Layer, rope: tuple[Floats, Floats]
    ) -> tuple[Floats, Bfloats, Bfloats]:
        def heads(matrix: Floats, count: int) -> Floats:
            return (normed @ matrix.T).reshape(len(normed), count, self.config.head_dim)

        query = _rotate(heads(layer.q, self.config.query_heads), rope)
        key = _rotate(heads(layer.k, self.config.kv_heads), rope)
        value = heads(layer.v, self.config.kv_heads)
        return query, key.astype(ml_dtypes.bfloat16), value.astype(ml_dtypes.bfloat16)

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        result: Floats = x * (1 / np.sqrt(mean + np.float32(self.config.rms_norm_eps))) * weight
        return result


def _rotate(x: Floats, rope: tuple[Floats, Floats]) -> Floats:
    cosine, sine = (table[:, None, :] for table in rope)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def _dense(query: Floats, key: Floats, value: Floats) -> Floats:
    """Causal attention, a tile of queries at a time."""
    tokens, query_heads, head_dim = query.shape
    group = query_heads // key.shape[1]
    out = np.empty_like(query)
    scaled = query * np.float32(head_dim**-0.5)
    for head in range(query_heads):
        k = np.ascontiguousarray(key[:, head // group].T)
        v = np.ascontiguousarray(value[:, head // group])
        for first in range(0, tokens, _QUERY_TILE):
            last = min(first + _QUERY_TILE, tokens)
            logits = scaled[first:last, head] @ k[:, :last]
            for row in range(last - first):
                logits[row, first + row + 1 :] = -np.inf
            logits -= logits.max(axis=1, keepdims=True)
            np.exp(logits, out=logits)
            out[first:last, head] = (logits @ v[:last]) / logits.sum(axis=1, keepdims=True)
    return out
