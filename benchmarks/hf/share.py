#!/usr/bin/env python3
"""What kvtier adds to a token of a model of transformers on the host and on the device.

    share.py [--tokens N,...] [--layers N] [--caches NAME,...] [--steps N] [--profile] --out FILE

A model with narrow layers, and attention of the shape of Llama-3.1-8B (32 query heads, 8 KV heads of 128
elements), random weights, random keys and values. Each row is a cache at a length; "none" is the same
model with an attention function that returns at once, and no cache. Names with "-graph" replay a token as
one CUDA graph.

Tokens of "none" and of the row are timed in turns, since the speed of a host's cores varies. "host_us":
from the call of a pass until it has returned, the device idle before. "total_us": until the device has
finished, too. Medians, in microseconds; "share" is the median difference to "none" (of graphs to a graph),
divided by the layers. "inside_us_per_layer" is what the host spends within `KvtierLayer.update` and the
attention function of kvtier. With --profile a row has "host_ops" and "device_ops": microseconds of a layer
and calls of a layer, by torch.profiler, which itself makes calls slower; and "python": by cProfile.
"""

from __future__ import annotations

import argparse
import cProfile
import contextlib
import copy
import datetime
import json
import os
import pstats
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

import kvtier
import kvtier.hf
from kvtier.hf.attention import kvtier_attention
from kvtier.hf.shape import memory_config, model_config
from kvtier.model_options import whole_file

CACHES = ("device", "host", "device-graph", "host-graph")
FILL_TOKENS = 8192
MOST_ROWS = 25  # of a profile


def size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


class Share:
    def __init__(self, own: argparse.Namespace) -> None:
        self.own = own
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.kept: Any = None
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=own.layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=max(own.tokens) + 4096,
        )
        with self.device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.plain = copy.deepcopy(self.model)
        self.model.set_attn_implementation("kvtier")
        AttentionInterface.register("none", lambda module, query, *a, **k: (query.transpose(1, 2), None))
        self.plain.set_attn_implementation("none")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def cache(self, name: str, tokens: int) -> Any:
        shape = model_config(self.model.config, False, kvtier.DType.BFLOAT16)
        retrieval = kvtier.hf.default_retrieval(shape.head_dim)
        retrieval = replace(retrieval, num_planes=self.own.bits, top_k=self.own.k)
        capacity = tokens + 4096
        memory = memory_config(shape, retrieval, 1, capacity, rows=1)
        if name.startswith("device"):
            memory = replace(
                memory,
                placement=kvtier.KvPlacement.DEVICE,
                device_bytes=memory.device_bytes + memory.host_bytes,
                host_bytes=0,
            )
        elif self.own.row_cache_rows:
            own_rows = {"row_cache_rows": self.own.row_cache_rows}
            cache = kvtier.session_memory(shape, capacity, retrieval, memory, **own_rows).row_cache
            memory = replace(memory, row_cache_bytes=cache, **own_rows)
        cache = kvtier.hf.KvtierCache(self.model.config, retrieval, memory=memory, max_tokens=capacity)
        for layer in range(shape.layers):
            for first in range(0, tokens, FILL_TOKENS):
                rows = (1, shape.kv_heads, min(FILL_TOKENS, tokens - first), shape.head_dim)
                cache.append(
                    layer,
                    *(torch.randn(rows, dtype=torch.bfloat16, device=self.device) for _ in range(2)),
                )
        self.synchronize()
        return cache

    def pair(self, step: Any, other: Any) -> dict[str, float]:
        """Times tokens of both in turns."""
        found: dict[str, list[float]] = {"host": [], "total": [], "none_host": [], "none_total": []}
        for _ in range(self.own.steps):
            for prefix, call in (("", step), ("none_", other)):
                start = time.perf_counter()
                call()
                found[f"{prefix}host"].append(time.perf_counter() - start)
                self.synchronize()
                found[f"{prefix}total"].append(time.perf_counter() - start)
        row = {f"{name}_us": statistics.median(times) * 1e6 for name, times in found.items()}
        for what in ("host", "total"):
            more = [own - none for own, none in zip(found[what], found[f"none_{what}"])]
            row[f"share_{what}_us_per_layer"] = statistics.median(more) * 1e6 / self.own.layers
        return row

    def none(self, graph: bool) -> Any:
        """A token of the model without attention."""
        ids, positions = (torch.full((1, 1), at, device=self.device) for at in (5, 1000))
        call = lambda: self.plain(ids, position_ids=positions, use_cache=False).logits  # noqa: E731
        call()
        if not graph:
            return call
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        self.kept = captured, ids, positions  # what the graph reads
        return captured.replay

    def inside(self, cache: Any, step: Any) -> float:
        """Microseconds within kvtier of a layer: the median of tokens."""
        spent = [0.0]

        def wrapped(call: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                result = call(*args, **kwargs)
                spent[0] += time.perf_counter() - start
                return result

            return timed

        for layer in cache.layers:
            layer.update = wrapped(layer.update)
        AttentionInterface.register("kvtier", wrapped(kvtier_attention))
        times = []
        for _ in range(self.own.steps):
            spent[0] = 0.0
            step()
            self.synchronize()
            times.append(spent[0])
        AttentionInterface.register("kvtier", kvtier_attention)
        for layer in cache.layers:
            del layer.update
        return statistics.median(times) / self.own.layers * 1e6

    def measure(self, name: str, tokens: int) -> dict[str, Any]:
        row: dict[str, Any] = {"cache": name, "tokens": tokens}
        cache = self.cache(name, tokens)
        ids = torch.full((1, 1), 5, device=self.device)
        graph = name.endswith("-graph")
        block = kvtier.hf.graphed(self.model, cache) if graph else contextlib.nullcontext()
        with torch.inference_mode(), block:
            step = lambda: self.model(ids, past_key_values=cache).logits  # noqa: E731
            none = self.none(graph)
            for _ in range(6):
                step()
                none()
            self.synchronize()
            row |= self.pair(step, none)
            if not graph:
                row["inside_us_per_layer"] = self.inside(cache, step)
            if self.own.profile:
                row |= self.profile(step)
        cache.close()
        return row

    def profile(self, step: Any) -> dict[str, Any]:
        count = 8
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(count):
                step()
            self.synchronize()
        scale = count * self.own.layers
        events = found.key_averages()

        def table(device: bool) -> list[str]:
            kind = torch.autograd.DeviceType.CUDA if device else torch.autograd.DeviceType.CPU
            rows = [
                (
                    (each.self_device_time_total if device else each.self_cpu_time_total) / scale,
                    each.count / scale,
                    each.key[:110],
                )
                for each in events
                if each.device_type == kind
            ]
            rows = sorted(rows, reverse=True)[:MOST_ROWS]
            return [f"{us:8.2f} us {calls:6.2f} x {key}" for us, calls, key in rows]

        calls = cProfile.Profile()
        calls.enable()
        for _ in range(count):
            step()
        calls.disable()
        self.synchronize()
        own = pstats.Stats(calls).stats  # type: ignore[attr-defined]
        rows = sorted(
            (
                (times[2] / scale * 1e6, times[1] / scale, f"{Path(place[0]).name}:{place[1]} {place[2]}")
                for place, times in own.items()
            ),
            reverse=True,
        )[:MOST_ROWS]
        return {
            "host_ops": table(False),
            "device_ops": table(True),
            "python": [f"{us:8.2f} us {calls:6.2f} x {key}" for us, calls, key in rows],
        }

    def run(self) -> None:
        rows: list[dict[str, Any]] = []
        for tokens in self.own.tokens:
            for name in self.own.caches:
                rows.append(self.measure(name, tokens))
                print(json.dumps({k: v for k, v in rows[-1].items() if not isinstance(v, list)}), flush=True)
                self.write(rows)

    def write(self, rows: list[dict[str, Any]]) -> None:
        on_gpu = self.device.type == "cuda"
        report = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["benchmarks/hf/share.py", *sys.argv[1:]]),
            "hardware": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores",
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rows": rows,
        }
        with whole_file(self.own.out) as part:
            part.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    listed = lambda text: text.split(",")  # noqa: E731
    sizes = lambda text: [size(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--tokens", type=sizes, default=[32 << 10])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--caches", type=listed, default=list(CACHES), help=", ".join(CACHES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bits", type=int, default=256)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--row-cache-rows", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    own = parser.parse_args()
    for each in own.caches:
        if each not in CACHES:
            parser.error(f"--caches: expected some of {', '.join(CACHES)}, found {each}")
    Share(own).run()


if __name__ == "__main__":
    main()
