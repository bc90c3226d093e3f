#!/usr/bin/env python3
"""Times a connector beside the engine's own backend, in one process and in turns: vLLM's and SGLang's for files, on
tmpfs; LMCache's for Redis, on loopback.

    compare.py {vllm,sglang,lmcache} [--pages N] [--page-kib N] [--rounds N] [--json FILE]

Needs the environment of scripts/engines.sh and KVTIER_BINARY, the server; redis-server for LMCache. Every round stores
all pages under new keys, asks for them, and reads them back, with each backend; which is first changes by the round. vLLM
also asks for keys of which every second is not stored. Prints medians over the rounds, and of the rounds' ratios the
median, the least and the most. Bytes that were read are compared with those that were stored.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Protocol

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from kvtier.model_options import whole_file  # noqa: E402
from server import Server  # noqa: E402

PATIENCE = 120.0


class Backend(Protocol):
    """What is timed; all pages at once, page i of the pool under key i of the round."""

    memory: Any  # uint8, of the pool
    operations: tuple[str, ...]  # what is timed, in this order

    def store(self, round: int) -> None: ...

    def lookup(self, round: int) -> None: ...

    def load(self, round: int) -> None: ...

    def close(self) -> None: ...


class VllmTier:
    """A secondary tier, driven as vLLM's scheduler does."""

    operations = ("store", "lookup", "lookup_every_second", "load")

    def __init__(self, options: dict[str, Any], pages: int, page_bytes: int) -> None:
        import vllm_test
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        import kvtier.vllm

        kvtier.vllm.register()
        self._test = vllm_test
        self._pages = pages
        self.memory = np.zeros((pages, page_bytes), np.uint8)
        self._tier = SecondaryTierFactory.create_secondary_tier(
            options, memoryview(self.memory), vllm_test.make_spec("org/benchmark")
        )

    def _keys(self, round: int) -> list[bytes]:
        return [self._test.make_key(round * self._pages + page) for page in range(self._pages)]

    def _run(self, round: int, load: bool) -> None:
        job = self._test.make_job(round, self._keys(round), list(range(self._pages)), "r", load)
        (self._tier.submit_load if load else self._tier.submit_store)(job)
        self._tier.drain_jobs()
        (result,) = _until(lambda: list(self._tier.get_finished_jobs()))
        assert result.success

    def store(self, round: int) -> None:
        self._run(round, False)

    def load(self, round: int) -> None:
        self._run(round, True)

    def lookup(self, round: int) -> None:
        assert all(self._look_up(self._keys(round)))

    def lookup_every_second(self, round: int) -> None:
        unknown = [self._test.make_key(1 << 30 | number) for number in range(self._pages)]
        keys = [key for pair in zip(self._keys(round), unknown) for key in pair]
        assert self._look_up(keys) == [True, False] * self._pages

    def _look_up(self, keys: list[bytes]) -> list[bool]:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        context = ReqContext(req_id="request")
        found: list[Any] = []

        def answered() -> bool:
            found[:] = [self._tier.lookup(key, context) for key in keys]
            self._tier.on_schedule_end(None)
            return LookupResult.RETRY not in found

        _until(answered)
        self._tier.on_request_finished(context)
        return [each is LookupResult.HIT for each in found]

    def close(self) -> None:
        self._tier.shutdown()


class SglangStorage:
    """A storage backend, driven as SGLang's controller does."""

    operations = ("store", "lookup", "load")

    def __init__(self, make: Callable[[Any], Any], pages: int, page_bytes: int, v1: bool) -> None:
        import sglang_test

        sglang_test.PAGES = pages
        layers = page_bytes // (2 * 2 * sglang_test.PAGE_TOKENS * 8 * 128)
        self._pool = sglang_test.MhaPool("page_first", heads=8, layers=layers, head_dim=128)
        self._pool.device, self._pool.pin_memory = "cpu", False
        self.memory = self._pool.kv_buffer.reshape(-1).view(sglang_test.torch.uint8).numpy()
        self._test, self._pages, self._v1 = sglang_test, pages, v1
        self._storage = make(self._pool)
        self._indices = sglang_test.slots(self._pool, list(range(pages)))

    def _keys(self, round: int) -> list[str]:
        return [self._test.key(round * self._pages + page) for page in range(self._pages)]

    def store(self, round: int) -> None:
        keys = self._keys(round)
        if self._v1:
            assert all(self._storage.batch_set_v1(keys, self._indices))
            return
        starts = self._indices[:: self._pool.page_size]
        assert self._storage.batch_set(keys, [self._pool.get_data_page(i) for i in starts])

    def load(self, round: int) -> None:
        keys = self._keys(round)
        if self._v1:
            assert all(self._storage.batch_get_v1(keys, self._indices))
            return
        pages = self._storage.batch_get(keys, [self._pool.get_dummy_flat_data_page() for _ in keys])
        for start, page in zip(self._indices[:: self._pool.page_size], pages):
            self._pool.set_from_flat_data_page(int(start), page)

    def lookup(self, round: int) -> None:
        assert self._storage.batch_exists(self._keys(round)) == self._pages

    def close(self) -> None:
        if hasattr(self._storage, "close"):
            self._storage.close()


class LmcacheBackend:
    """A remote backend of LMCache's in-process mode, driven as its storage manager does."""

    operations = ("store", "lookup", "load")

    def __init__(self, pages: int, page_bytes: int, url: str = "", plugin: dict[str, Any] | None = None) -> None:
        import asyncio
        import threading

        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        layers, heads, head_dim = 4, 2, 64
        tokens = page_bytes // (2 * layers * heads * head_dim * 2)
        shape = torch.Size([2, layers, tokens, heads * head_dim])
        self._pages = pages
        self._pool = np.zeros((pages, page_bytes), np.uint8)
        self._to = np.zeros((pages, page_bytes), np.uint8)  # what loads write
        self._taken = 0
        self._loaded: list[Any] = []

        def make(raw: Any) -> Any:
            return TensorMemoryObj(
                torch.from_numpy(raw),
                MemoryObjMetadata(
                    shape=shape, dtype=torch.bfloat16, address=raw.ctypes.data, phy_size=raw.nbytes,
                    fmt=MemoryFormat.KV_2LTD, ref_count=1, shapes=[shape], dtypes=[torch.bfloat16],
                ),
                parent_allocator=None,
            )

        self._make = make
        self._key = lambda number: CacheEngineKey("benchmark", 1, 0, number, torch.bfloat16)
        self._plugin = plugin is not None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        if plugin is not None:
            prefix = "remote_storage_plugin.kvtier."
            where: dict[str, Any] = {
                "remote_storage_plugins": ["kvtier"],
                "extra_config": {prefix + name: value for name, value in plugin.items()},
            }
        else:
            where = {"remote_url": url}
        config = LMCacheEngineConfig.from_defaults(chunk_size=tokens, remote_serde="naive", **where)
        metadata = LMCacheMetadata(
            "benchmark", 1, 1, 0, 0, torch.bfloat16, (layers, 2, tokens, heads, head_dim), chunk_size=tokens
        )
        memory = _LmcacheMemory(self._allocate, config, metadata)
        self._backend = RemoteBackend(
            config, metadata, self._loop, memory, "cpu", plugin_name=None if plugin is None else "kvtier"
        )

    def _allocate(self) -> Any:
        raw = self._to[self._taken]
        self._taken += 1
        return self._make(raw)

    @property
    def memory(self) -> Any:
        for page, loaded in zip(self._pool, self._loaded):
            page[:] = np.frombuffer(loaded.byte_array, np.uint8)
        self._loaded = []
        return self._pool

    def _keys(self, round: int) -> list[Any]:
        return [self._key(round * self._pages + page) for page in range(self._pages)]

    def store(self, round: int) -> None:
        done: list[Any] = []
        objects = [self._make(page) for page in self._pool]
        self._backend.batched_submit_put_task(self._keys(round), objects, on_complete_callback=done.append)
        _until(lambda: len(done) == self._pages)

    def load(self, round: int) -> None:
        self._taken = 0
        self._loaded = self._backend.batched_get_blocking(self._keys(round))
        assert all(each is not None for each in self._loaded)

    def lookup(self, round: int) -> None:
        keys = self._keys(round)
        connection = self._backend.connection
        if connection.support_batched_contains():
            assert connection.batched_contains(keys) == self._pages
        else:
            assert all(self._backend.contains(key) for key in keys)

    def close(self) -> None:
        if self._plugin:  # LMCache 0.5.6 waits for its own event loop on it where Redis is closed
            self._backend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)


class _LmcacheMemory:
    """What connectors ask of LMCache's memory of objects."""

    def __init__(self, make: Callable[[], Any], config: Any, metadata: Any) -> None:
        self._make, self.config, self.metadata = make, config, metadata

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any = None) -> Any:
        return self._make()


class Redis:
    """A server of Redis on loopback that keeps nothing on a disk."""

    def __init__(self, gib: int) -> None:
        import socket
        import subprocess

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
             "--maxmemory", f"{gib}gb", "--io-threads", str(os.cpu_count())],
            stdout=subprocess.DEVNULL,
        )

        def answers() -> bool:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                return False
            return True

        _until(answers)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)


def _until(take: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := take()):
        if time.monotonic() > end:
            raise TimeoutError("no result")
        time.sleep(0.0005)
    return found


def make_lmcache(server: Server, redis: str, pages: int, page_bytes: int) -> dict[str, Backend]:
    plugin = {
        "module_path": "kvtier.lmcache.connector", "class_name": "KvtierConnectorAdapter",
        "server": server.address, "timeout": 60.0, "lookup_timeout": 60.0,
    }
    return {
        "kvtier": LmcacheBackend(pages, page_bytes, plugin=plugin),
        "redis": LmcacheBackend(pages, page_bytes, url=redis),
    }


def make_backends(
    engine: str, server: Server, folder: str, pages: int, page_bytes: int
) -> dict[str, Backend]:
    patient = {"server": server.address, "timeout": 60.0, "lookup_timeout": 60.0}
    if engine == "vllm":
        return {
            "kvtier": VllmTier({"type": "kvtier", **patient}, pages, page_bytes),
            "file": VllmTier({"type": "fs", "root_dir": folder}, pages, page_bytes),
        }
    import sglang_test
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    def make_file(pool: Any) -> Any:
        config = sglang_test.make_config(server, "benchmark", {})
        config.extra_config = {}
        return HiCacheFile(config, folder)

    def make_kvtier(pool: Any) -> Any:
        return sglang_test.make_storage(server, "benchmark", pool, patient)

    return {
        "kvtier": SglangStorage(make_kvtier, pages, page_bytes, v1=True),
        "file": SglangStorage(make_file, pages, page_bytes, v1=False),
    }


def time_rounds(backends: dict[str, Backend], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns seconds by backend and operation. The first round, which makes connections and maps
    memory, is not counted."""
    seconds: dict[str, dict[str, list[float]]] = {
        name: {operation: [] for operation in backend.operations}
        for name, backend in backends.items()
    }
    random = np.random.default_rng(1)
    for round in range(rounds + 1):
        names = sorted(backends, reverse=bool(round % 2))
        data = random.integers(0, 256, backends[names[0]].memory.shape, np.uint8)
        for name in names:
            backend = backends[name]
            backend.memory[:] = data
            for operation in backend.operations:
                if operation == "load":
                    backend.memory[:] = 0
                begun = time.perf_counter()
                getattr(backend, operation)(round)
                if round > 0:
                    seconds[name][operation].append(time.perf_counter() - begun)
            np.testing.assert_array_equal(backend.memory, data)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("vllm", "sglang", "lmcache"))
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--page-kib", type=int, default=2048, help="2048: Llama-3.1-8B, 16 tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    page_bytes = arguments.page_kib << 10
    total = arguments.pages * page_bytes
    arena = 4 * (total * (arguments.rounds + 2) // (4 << 20) + 16)
    server = Server("--page-arena-mib", str(arena), "--page-memory-mib", str(arena))
    other = "redis" if arguments.engine == "lmcache" else "file"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.ExitStack() as end:
        end.callback(server.close)
        if arguments.engine == "lmcache":
            redis = Redis(2 * arena // 1024 + 1)
            end.callback(redis.close)
            url = f"redis://127.0.0.1:{redis.port}"
            backends = make_lmcache(server, url, arguments.pages, page_bytes)
        else:
            backends = make_backends(arguments.engine, server, folder, arguments.pages, page_bytes)
        for backend in backends.values():
            end.callback(backend.close)
        seconds = time_rounds(backends, arguments.rounds)
    figures: dict[str, Any] = {
        "engine": arguments.engine, "pages": arguments.pages, "page_bytes": page_bytes,
        "rounds": arguments.rounds, "cores": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }
    for operation in seconds["kvtier"]:
        own, theirs = seconds["kvtier"][operation], seconds[other][operation]
        ratios = [t / o for t, o in zip(theirs, own)]
        figures[operation] = {
            "kvtier_ms": round(1e3 * statistics.median(own), 2),
            f"{other}_ms": round(1e3 * statistics.median(theirs), 2),
            f"{other}_over_kvtier": round(statistics.median(ratios), 2),
            "least_and_most": [round(min(ratios), 2), round(max(ratios), 2)],
        }
        if operation in ("store", "load"):
            figures[operation]["kvtier_gb_per_s"] = round(total / statistics.median(own) / 1e9, 2)
    print(json.dumps(figures, indent=2))
    if arguments.json:
        with whole_file(arguments.json) as part:
            part.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
