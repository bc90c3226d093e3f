#!/usr/bin/env python3
"""Tutorial 05: a decode step from Python, with the KV in a server.

    kvtier serve --listen unix:/tmp/kvtier.sock &
    python examples/tutorials/05_python.py unix:/tmp/kvtier.sock

docs/tutorials/05-python.md explains it.
"""

from __future__ import annotations

import sys

import kvtier
import numpy as np
from numpy.typing import NDArray

TOKENS = 2000
QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
GROUP = QUERY_HEADS // KV_HEADS
TARGET = 700  # the token that the query looks for


def dense_attention(
    query: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Returns attention of `query` [1, query_heads, head_dim] over all keys and values
    [tokens, kv_heads, head_dim], in double precision: [1, query_heads, head_dim]."""
    out = np.empty(query.shape)
    for head in range(QUERY_HEADS):
        logits = keys[:, head // GROUP].astype(np.float64) @ query[0, head] / np.sqrt(HEAD_DIM)
        weights = np.exp(logits - logits.max())
        out[0, head] = weights @ values[:, head // GROUP] / weights.sum()
    return out


def main(server: str) -> int:
    random = np.random.default_rng(1)
    keys = random.standard_normal((TOKENS, KV_HEADS, HEAD_DIM), dtype=np.float32)
    values = random.standard_normal((TOKENS, KV_HEADS, HEAD_DIM), dtype=np.float32)
    query = 0.3 * random.standard_normal((1, QUERY_HEADS, HEAD_DIM), dtype=np.float32)
    query += 2.0 * np.repeat(keys[TARGET], GROUP, axis=0)

    model = kvtier.ModelConfig(
        layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    with kvtier.Client(server) as client, client.open(model) as session:
        session.append(0, keys[:-1], values[:-1])
        out, _ = session.decode(0, query, keys[-1:], values[-1:])
        selected = session.select(0, query).ids  # int32 [tokens, kv_heads, most]
        length = session.length()

    dense = dense_attention(query, keys, values)
    error = float(np.linalg.norm(out - dense) / np.linalg.norm(dense))
    found = all(TARGET in head for head in selected[0])
    print(f"{length} tokens in {server}: relative error {error:.4f}")
    chosen = (selected >= 0).sum()
    print(f"token {TARGET} is among the {chosen} selected for {KV_HEADS} KV heads: {found}")
    return 0 if error < 0.1 and found else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected the address of a server, such as unix:/tmp/kvtier.sock")
    try:
        sys.exit(main(sys.argv[1]))
    except kvtier.ClientError as error:
        sys.exit(f"error: {error}")
