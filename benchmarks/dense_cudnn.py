#!/usr/bin/env python3
"""Time of dense decode attention by cuDNN, as PyTorch calls it: the denominator of kvtier's ratios.

    dense_cudnn.py [--shape TOKENS[xBATCH[:QUERY_HEADS/KV_HEADS]]]... [--json FILE]

One query token per sequence, bf16, head_dim 128. Each shape is a CUDA graph of several layers, every one with its
own keys and values, so that a replay finds none of them in the cache, and is visited again until the graph has 16
steps; the median of its replays over the steps is the time. Keys in both usual layouts are measured, and the faster one counts. The outputs are compared with a product
in fp32. Prints one JSON document; needs PyTorch with cuDNN and an NVIDIA GPU.
"""

import argparse
import datetime
import json
import re
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whole_file import write_whole

HEAD_DIM = 128
ROTATED_BYTES = 1 << 30
DEFAULT_SHAPES = ["16384", "32768", "65536", "131072", "262144", "524288", "1048576", "131072x8", "131072:32/32",
                  "131072:32/4", "131072:64/8"]


def parse_shape(text):
    match = re.fullmatch(r"(\d+)(?:x(\d+))?(?::(\d+)/(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected TOKENS[xBATCH[:QUERY_HEADS/KV_HEADS]], found {text}")
    tokens, batch, query_heads, kv_heads = (int(x) if x else None for x in match.groups())
    return tokens, batch or 1, query_heads or 32, kv_heads or 8


def attend(query, key, value):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def relative_error(out, query, key, value):
    """Of the first sequence, against fp32."""
    group = query.shape[1] // key.shape[1]
    q = query[0].float().reshape(key.shape[1], group, HEAD_DIM)
    weights = torch.softmax(q @ key[0].float().transpose(1, 2) / HEAD_DIM**0.5, dim=-1)
    expected = (weights @ value[0].float()).reshape(query.shape[1], HEAD_DIM)
    found = out[0].float().reshape(query.shape[1], HEAD_DIM)
    return ((found - expected).norm() / expected.norm()).item()


def measure(shape, heads_first, replays):
    tokens, batch, query_heads, kv_heads = shape
    layer_bytes = tokens * batch * kv_heads * HEAD_DIM * 4
    layers = max(1, min(16, -(-ROTATED_BYTES // layer_bytes)))
    passes = -(-16 // layers)

    def cache():
        if heads_first:
            return torch.randn(batch, kv_heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        return torch.randn(batch, tokens, kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    inputs = [(torch.randn(batch, query_heads, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16), cache(), cache())
              for _ in range(layers)]
    error = relative_error(attend(*inputs[0]), *inputs[0])
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attend(*inputs[0])
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for layer in inputs * passes:
                attend(*layer)
        times = []
        for _ in range(replays + 3):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / (layers * passes))
    us = statistics.median(times[3:])
    return {"us": us, "gbps": layer_bytes / us * 1e-3, "layers": layers, "graph_steps": layers * passes, "relative_error": error,
            "layout": "heads first" if heads_first else "tokens first"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=parse_shape, action="append")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--json", help="writes the result to a file too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("dense_cudnn.py: expected an NVIDIA GPU, found none")
    rows = []
    for shape in arguments.shape or [parse_shape(text) for text in DEFAULT_SHAPES]:
        best = min((measure(shape, heads_first, arguments.replays) for heads_first in (True, False)),
                   key=lambda row: row["us"])
        torch.cuda.empty_cache()
        tokens, batch, query_heads, kv_heads = shape
        rows.append({"what": "dense_cudnn", "tokens": tokens, "batch": batch, "query_heads": query_heads,
                     "kv_heads": kv_heads, "head_dim": HEAD_DIM, **best})
        if best["relative_error"] > 2e-2:
            sys.exit(f"dense_cudnn.py: {rows[-1]}: expected a relative error below 2e-2")
    result = {"date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(),
              "library": f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", "rows": rows}
    print(json.dumps(result, indent=1))
    if arguments.json:
        write_whole(arguments.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
