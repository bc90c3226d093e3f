#!/usr/bin/env python3
"""Decoding of Hugging Face models with kvtier and with the caches of transformers, one run.

    bench.py [--models NAME,...] [--tokens N,...] [--caches NAME,...] [--steps N] --out FILE
    bench.py --checkpoint DIR --tasks FILE --case NAME --tokens 7680 --caches sdpa,kvtier-host --out FILE

Without --checkpoint: random weights in bfloat16 of a published model's shape, and a cache that is
filled with random keys and values instead of by a prefill, which would take minutes. With it: the
checkpoint's weights, and a prefill of the first sequence of a task file (examples/README.md).

Each row is a cache at a length: tokens/s of single-token forward passes, device memory, and the
parts of a token's time, unless kvtier's tokens are CUDA graphs (--graphs). "none" has no cache and
no attention: what the rest of the model takes, from Python.
"device_bytes" is what the whole process holds on the GPU, weights included. A row that does not fit
has "error" instead.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import torch
import transformers
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

import kvtier
import kvtier.hf
from kvtier.hf.shape import memory_config, model_config, text_config
from kvtier.model_options import whole_file

# Of the published configurations.
SHAPES: dict[str, Any] = {
    "llama-3.1-8b": (
        transformers.LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
        },
    ),
    "qwen3-8b": (
        transformers.Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1000000.0,
        },
    ),
}
CACHES = ("none", "sdpa", "offloaded", "kvtier-device", "kvtier-host", "kvtier-host-int8")
FILL_TOKENS = 8192  # random keys and values made at a time
WARMUP_STEPS = 4
SPLIT_STEPS = 8
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class DoesNotFit(Exception):
    """There is not enough memory, found before it is taken."""


def size(text: str) -> int:
    unit = UNITS.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def no_attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return query.transpose(1, 2), None


def available_host_bytes() -> int:
    """Of the machine, or of the control group where that has less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rows: list[dict[str, Any]] = []
        self.load_at_start = os.getloadavg()[0]
        self.model: Any = None
        self.ids: Any = None

    def load(self, name: str) -> None:
        self.model = None
        self.collect()
        if self.arguments.checkpoint:
            self.model = AutoModelForCausalLM.from_pretrained(
                self.arguments.checkpoint, dtype=self.arguments.dtype
            )
            tasks = load_file(self.arguments.tasks)
            self.ids = tasks[f"{self.arguments.case}.tokens"][:1].long().to(self.device)
        else:
            kind, shape = SHAPES[name]
            if self.arguments.layers:
                shape = {**shape, "num_hidden_layers": self.arguments.layers}
            config = kind(**shape, max_position_embeddings=max(self.arguments.tokens) + 1024)
            with self.device:
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model.to(self.device).eval()

    def collect(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def kv_bytes(self, tokens: int) -> int:
        shape = model_config(self.model.config, False, kvtier.DType.BFLOAT16)
        return tokens * shape.layers * shape.kv_heads * shape.head_dim * 4

    def cache(self, name: str, tokens: int) -> Any:
        """An empty cache, and the attention it goes with."""
        config = self.model.config
        if name == "none":
            self.model.set_attn_implementation("none")
            return None
        if name in ("sdpa", "offloaded"):
            self.model.set_attn_implementation("sdpa")
            if name == "offloaded" and self.device.type != "cuda":
                raise DoesNotFit("device: expected a GPU, found none")
            if name == "offloaded" and self.kv_bytes(tokens) > available_host_bytes():
                raise DoesNotFit(f"host memory: expected {self.kv_bytes(tokens)} bytes")
            return DynamicCache(config=config, offloading=name == "offloaded")
        self.model.set_attn_implementation("kvtier")
        shape = model_config(text_config(config), False, kvtier.DType.BFLOAT16)
        retrieval = kvtier.hf.default_retrieval(shape.head_dim)
        own = self.arguments
        retrieval = replace(retrieval, top_k=own.k or 4 * shape.head_dim)
        if own.bits:
            retrieval = replace(retrieval, num_planes=own.bits)
        if own.rule:
            retrieval = replace(retrieval, rule=kvtier.SelectionRule[own.rule.upper()])
        capacity = tokens + 1024
        memory = memory_config(shape, retrieval, 1, capacity, rows=1)
        pages = memory.host_bytes
        if name == "kvtier-device":
            memory = replace(
                memory,
                placement=kvtier.KvPlacement.DEVICE,
                device_bytes=memory.device_bytes + pages,
                host_bytes=0,
            )
        if name == "kvtier-host-int8":
            row = 2 * shape.head_dim * 2
            pages = pages // row * (row // 2 + 8)
            memory = replace(memory, host_bytes=pages, page_format=kvtier.PageFormat.INT8)
        if own.row_cache_rows and name != "kvtier-device":
            own_rows = {"row_cache_rows": own.row_cache_rows}
            cache = kvtier.session_memory(shape, capacity, retrieval, memory, **own_rows).row_cache
            memory = replace(memory, row_cache_bytes=cache, **own_rows)
        if name != "kvtier-device" and pages > available_host_bytes():
            raise DoesNotFit(f"host memory: expected {pages} bytes")
        return kvtier.hf.KvtierCache(config, retrieval, memory=memory, max_tokens=capacity)

    def fill(self, cache: Any, tokens: int) -> None:
        """Gives every layer as many keys and values: by a prefill, or random ones."""
        if cache is None:
            return
        if self.ids is not None:
            with torch.inference_mode():
                self.model(self.ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
            return
        shape = model_config(self.model.config, False, kvtier.DType.BFLOAT16)
        for layer in range(shape.layers):
            if isinstance(cache, DynamicCache):
                cache.update(*self.random_rows(shape, tokens), layer)
                continue
            for first in range(0, tokens, FILL_TOKENS):
                count = min(FILL_TOKENS, tokens - first)
                cache.append(layer, *self.random_rows(shape, count))
        self.synchronize()

    def random_rows(self, shape: Any, tokens: int) -> list[torch.Tensor]:
        rows = (1, shape.kv_heads, tokens, shape.head_dim)
        return [
            torch.randn(rows, dtype=torch.bfloat16, device=self.device) for _ in ("keys", "values")
        ]

    def steps(self, cache: Any, token: torch.Tensor, count: int) -> torch.Tensor:
        use = {"use_cache": False} if cache is None else {"past_key_values": cache}
        for _ in range(count):
            token = self.model(token, **use).logits[:, -1:].argmax(-1)
        return token

    def measure(self, name: str, tokens: int) -> dict[str, Any]:
        row: dict[str, Any] = {"cache": name, "tokens": tokens}
        cache = None
        start = time.perf_counter()
        try:
            cache = self.cache(name, tokens)
            row["make_seconds"] = round(time.perf_counter() - start, 3)
            start = time.perf_counter()
            self.fill(cache, tokens)
            row["fill_seconds"] = round(time.perf_counter() - start, 3)
            self.timed(cache, row)
        except (DoesNotFit, torch.OutOfMemoryError, kvtier.ResourceExhaustedError) as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        finally:
            if isinstance(cache, kvtier.hf.KvtierCache):
                cache.close()
            del cache
            self.collect()
        return row

    def timed(self, cache: Any, row: dict[str, Any]) -> None:
        first = torch.full((1, 1), 5, device=self.device)
        own = isinstance(cache, kvtier.hf.KvtierCache)
        graphs = own and self.arguments.graphs
        block = kvtier.hf.graphed(self.model, cache) if graphs else contextlib.nullcontext()
        with torch.inference_mode(), block:
            token = self.steps(cache, first, WARMUP_STEPS)
            self.synchronize()
            times = []
            started, cpu = time.perf_counter(), time.process_time()
            for _ in range(self.arguments.steps):
                start = time.perf_counter()
                token = self.steps(cache, token, 1)
                self.synchronize()
                times.append(time.perf_counter() - start)
                if time.perf_counter() - started > self.arguments.seconds:
                    break
            cpu = (time.process_time() - cpu) / len(times)
            median = sorted(times)[len(times) // 2]
            row |= {"steps": len(times), "ms_per_token": median * 1e3, "tokens_per_s": 1 / median}
            row["cpu_ms_per_token"] = cpu * 1e3
            if self.device.type == "cuda":
                free, total = torch.cuda.mem_get_info()
                row["device_bytes"] = total - free
                row["torch_peak_bytes"] = torch.cuda.max_memory_allocated()
            if own:
                row |= {"graphs": True} if graphs else self.split(cache, token)
                kv = cache.engine.stats().snapshot
                row["kvtier_device_bytes"] = kv["device_bytes"]
                row["kvtier_host_bytes"] = kv["host_page_bytes"]

    def split(self, cache: Any, token: torch.Tensor) -> dict[str, float]:
        """What `KvtierLayer` takes of a token's time, on the host (until its calls have been
        enqueued) and on the device."""
        host = [0.0]
        events: list[tuple[Any, Any]] = []

        def wrapped(call: Callable[..., Any], on_device: bool) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                if on_device and self.device.type == "cuda":
                    pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin = time.perf_counter()
                    pair[0].record()
                    result = call(*args, **kwargs)
                    pair[1].record()
                    events.append(pair)
                else:
                    result = call(*args, **kwargs)
                host[0] += time.perf_counter() - begin
                return result

            return timed

        kept = [(layer.update, layer.attend) for layer in cache.layers]
        for layer in cache.layers:
            layer.update, layer.attend = wrapped(layer.update, False), wrapped(layer.attend, True)
        self.steps(cache, token, SPLIT_STEPS)
        self.synchronize()
        for layer, (update, attend) in zip(cache.layers, kept):
            layer.update, layer.attend = update, attend
        result = {"kvtier_host_us_per_layer": host[0] / SPLIT_STEPS / len(cache.layers) * 1e6}
        if events:
            total = sum(begin.elapsed_time(end) for begin, end in events)
            result["kvtier_device_us_per_layer"] = total / len(events) * 1e3
        return result

    def run(self) -> None:
        AttentionInterface.register("none", no_attention)
        names = [str(self.arguments.checkpoint)] if self.arguments.checkpoint else self.arguments.models
        for name in names:
            start = time.perf_counter()
            self.load(name)
            self.synchronize()
            print(f"{name}: weights in {time.perf_counter() - start:.1f} s", flush=True)
            for tokens in self.arguments.tokens:
                for cache in self.arguments.caches:
                    row = {"model": Path(name).name, **self.measure(cache, tokens)}
                    self.rows.append(row)
                    print(json.dumps(row), flush=True)
                    self.write()

    def write(self) -> None:
        """After every row, so that a run that is ended leaves what it has measured."""
        machine = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
        machine += f", {os.cpu_count()} cores"
        if self.device.type == "cuda":
            machine = torch.cuda.get_device_name()
        report = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["benchmarks/hf/bench.py", *sys.argv[1:]]),
            "hardware": machine,
            "load_at_start": self.load_at_start,
            "load_at_end": os.getloadavg()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvtier": kvtier.__version__,
            "rows": self.rows,
        }
        with whole_file(self.arguments.out) as part:
            part.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    listed = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=listed, default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--checkpoint", type=Path, help="a folder that transformers reads")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of a checkpoint"
    )
    parser.add_argument("--tasks", type=Path, help="of a checkpoint: a task file that it reads")
    parser.add_argument("--case", default="continuation.7680", help="of the task file")
    parser.add_argument(
        "--tokens", type=lambda text: [size(each) for each in text.split(",")], default=[32 << 10]
    )
    parser.add_argument("--caches", type=listed, default=list(CACHES), help=", ".join(CACHES))
    parser.add_argument("--steps", type=int, default=32, help="measured, at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measured steps, at most")
    parser.add_argument("--layers", type=int, default=0, help="instead of those of the shape")
    parser.add_argument("--k", type=int, default=0, help="of kvtier (default: 4 x head_dim)")
    parser.add_argument("--bits", type=int, default=0, help="of a sketch (default: 4 x head_dim)")
    parser.add_argument("--rule", choices=("top_k", "priority"), help="default: priority")
    parser.add_argument("--graphs", action="store_true", help="replay kvtier's passes as CUDA graphs")
    parser.add_argument("--row-cache-rows", type=int, default=0, help="kept on the device (default: 0)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for name, known in ((arguments.models, SHAPES), (arguments.caches, CACHES)):
        for each in name:
            if each not in known:
                parser.error(f"expected one of {', '.join(known)}, found {each}")
    if bool(arguments.checkpoint) != bool(arguments.tasks):
        parser.error("expected --checkpoint and --tasks together, found one of them")
    Bench(arguments).run()


if __name__ == "__main__":
    main()
