#!/usr/bin/env python3
"""Cuts a recorded trace down to a test fixture: cut_trace.py IN OUT [--context N] [--steps N].

Keeps the keys and values of the first context tokens and of the first decode steps, and those
steps' queries. The recorded attention output would be that of the whole context, so it is computed
again: dense attention over the tokens kept, in double, rounded to bf16. Needs nothing but Python.
"""

import argparse
import json
import math
import operator
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))
from whole_file import write_whole  # noqa: E402


def read_trace(path):
    """Returns {name: (shape, bits)} of the bf16 tensors of a safetensors file, and its metadata."""
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{path}: tensor {name}: expected BF16, found {entry['dtype']}")
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["shape"], struct.unpack(f"<{(end - begin) // 2}H", data[begin:end]))
    return tensors, metadata


def write_trace(path, tensors, metadata):
    header = {"__metadata__": metadata}
    offset = 0
    for name, (shape, bits) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + 2 * len(bits)]}
        offset += 2 * len(bits)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    values = b"".join(struct.pack(f"<{len(bits)}H", *bits) for _, bits in tensors.values())
    write_whole(path, struct.pack("<Q", len(text)) + text + values)


def to_float(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def to_bf16(value):
    """Rounds to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def rows_of(tensor, head, tokens):
    """Returns rows of one head as lists of floats."""
    (_, extent, dim), bits = tensor
    rows = []
    for token in tokens:
        begin = (head * extent + token) * dim
        rows.append([to_float(b) for b in bits[begin : begin + dim]])
    return rows


def cut(tensor, tokens):
    (heads, extent, dim), bits = tensor
    kept = []
    for head in range(heads):
        for token in tokens:
            begin = (head * extent + token) * dim
            kept.extend(bits[begin : begin + dim])
    return [heads, len(tokens), dim], kept


def dense_attention(keys, value_columns, query, visible):
    scale = 1.0 / math.sqrt(len(query))
    logits = [scale * sum(map(operator.mul, query, key)) for key in keys[:visible]]
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = sum(weights)
    return [sum(map(operator.mul, weights, column)) / total for column in value_columns]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--context", type=int, default=3072)
    parser.add_argument("--steps", type=int, default=36)
    arguments = parser.parse_args()

    tensors, metadata = read_trace(arguments.input)
    (kv_heads, tokens, _), _ = tensors["k"]
    (query_heads, steps, dim), _ = tensors["q"]
    context = tokens - steps
    if not 0 < arguments.context <= context or not 0 < arguments.steps <= steps:
        raise SystemExit(f"expected at most {context} context tokens and {steps} steps")
    kept = list(range(arguments.context)) + list(range(context, context + arguments.steps))

    output = []
    for head in range(query_heads):
        kv_head = head * kv_heads // query_heads
        keys = rows_of(tensors["k"], kv_head, kept)
        columns = list(zip(*rows_of(tensors["v"], kv_head, kept)))
        for step, query in enumerate(rows_of(tensors["q"], head, range(arguments.steps))):
            visible = arguments.context + step + 1
            output.extend(map(to_bf16, dense_attention(keys, columns, query, visible)))

    write_trace(
        arguments.output,
        {
            "k": cut(tensors["k"], kept),
            "o": ([query_heads, arguments.steps, dim], output),
            "q": cut(tensors["q"], range(arguments.steps)),
            "v": cut(tensors["v"], kept),
        },
        {
            "layer": metadata.get("layer", "0"),
            "context_tokens": str(arguments.context),
            "decode_steps": str(arguments.steps),
            "scale": repr(1.0 / math.sqrt(dim)),
            "layout": metadata.get("layout", ""),
            "origin": f"first {arguments.context} of {context} context tokens and first {arguments.steps} of "
            f"{steps} steps; o computed again over these tokens in double, rounded to bf16",
        },
    )


if __name__ == "__main__":
    main()
