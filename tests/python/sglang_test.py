"""The storage backend against SGLang's own interface and host pools, and a server."""

from __future__ import annotations

import sys
import unittest
from typing import Any

from engines import IMPATIENT, PATIENT, content, need, poll

need("sglang", "torch")

import kvtier
import numpy as np
import sglang
import torch
from prometheus_client import REGISTRY
from server import Server, ServerTest
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.observability.metrics_collector import StorageMetricsCollector
from sglang.srt.runtime_context import get_context

PAGES = 24
PAGE_TOKENS = 16
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class MhaPool(MHATokenToKVPoolHost):
    """SGLang's host pool of keys and values, without a device pool: its own methods address pages."""

    def __init__(self, layout: str, heads: int = 4, layers: int = 3, head_dim: int = 64) -> None:
        self.layout = layout
        self.dtype = torch.bfloat16
        self.page_size = PAGE_TOKENS
        self.layer_num, self.head_num, self.head_dim = layers, heads, head_dim
        self.size = PAGES * PAGE_TOKENS
        shape = {
            "layer_first": (2, layers, self.size, heads, head_dim),
            "page_first": (2, self.size, layers, heads, head_dim),
            "page_first_direct": (2, PAGES, layers, PAGE_TOKENS, heads, head_dim),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)


class MlaPool(MLATokenToKVPoolHost):
    """The same of latent attention."""

    def __init__(self, layout: str, layers: int = 3, width: int = 576) -> None:
        self.layout = layout
        self.dtype = torch.bfloat16
        self.page_size = PAGE_TOKENS
        self.dcp_size, self.dcp_rank = 1, 0
        self.layer_num, self.kv_cache_dim = layers, width
        self.size = PAGES * PAGE_TOKENS
        shape = {
            "layer_first": (layers, self.size, 1, width),
            "page_first": (self.size, layers, 1, width),
            "page_first_direct": (PAGES, layers, PAGE_TOKENS, 1, width),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)


class StatePool:
    """States of two unequal buffers, a slot to a page, as of Mamba."""

    layout = "page_first"
    dtype = torch.float32
    page_size = 1

    def __init__(self) -> None:
        self.temporal = torch.zeros((PAGES, 3000), dtype=torch.float32)
        self.conv = torch.zeros((PAGES, 77), dtype=torch.float16)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        parts = (self.temporal, self.conv)
        addresses = [part[int(i)].data_ptr() for i in indices for part in parts]
        return addresses, [part[0].nbytes for _ in indices for part in parts]


class FlatPool:
    """A pool without addresses of its pages."""

    dtype = torch.float32
    page_size = 1

    def __init__(self) -> None:
        self.state = torch.zeros((PAGES, 500), dtype=torch.float32)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        raise NotImplementedError

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(500, dtype=torch.float32)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.state[index]

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.state[index] = page


def tensors(pool: Any) -> list[torch.Tensor]:
    names = ("kv_buffer", "temporal", "conv", "state")
    return [getattr(pool, name) for name in names if hasattr(pool, name)]


def fill(pool: Any, seed: int) -> None:
    for i, tensor in enumerate(tensors(pool)):
        memory = tensor.reshape(-1).view(torch.uint8).numpy()
        memory[:] = content(seed + i, len(memory))


def clear(pool: Any) -> None:
    for tensor in tensors(pool):
        tensor.zero_()


def slots(pool: Any, pages: list[int]) -> torch.Tensor:
    """Returns the tokens of pages."""
    size = pool.page_size
    return torch.tensor([page * size + i for page in pages for i in range(size)], dtype=torch.int64)


def page_bytes(pool: Any, page: int) -> bytes:
    """What is in a page, found without addresses."""
    if isinstance(pool, (StatePool, FlatPool)):
        return b"".join(tensor[page].numpy().tobytes() for tensor in tensors(pool))
    if pool.layout == "page_first_direct":
        axis, index = (1 if isinstance(pool, MhaPool) else 0), slice(page, page + 1)
    else:
        outer = pool.layout == "layer_first"
        axis = (1 if isinstance(pool, MhaPool) else 0) + (1 if outer else 0)
        index = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
    found = pool.kv_buffer[tuple([slice(None)] * axis + [index])]
    return found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def key(number: int) -> str:
    return f"{number:064x}"


def make_config(server: Server, model: str, extra: dict[str, Any], **fields: Any) -> Any:
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": model,
        "extra_config": {
            "backend_name": "kvtier", "module_path": "kvtier.sglang.storage",
            "class_name": "KvtierStorage", "interface_v1": 1, "server": server.address, **PATIENT, **extra,
        },
    }
    return HiCacheStorageConfig(**{**values, **fields})


def make_storage(server: Server, model: str, pool: Any, extra: Any = None, **fields: Any) -> Any:
    """Makes and attaches the backend as SGLang's controller does."""
    storage = StorageBackendFactory.create_backend(
        "dynamic", make_config(server, model, extra or {}, **fields), pool
    )
    try:
        storage.register_mem_pool_host(pool)
    except BaseException:
        storage.close()
        raise
    return storage


class SglangTest(ServerTest):
    def storage(self, pool: Any, model: str = "", extra: Any = None, **fields: Any) -> Any:
        """Of a model that no other case has."""
        storage = make_storage(self.server, model or self.id(), pool, extra, **fields)
        self.addCleanup(storage.close)
        return storage

    def test_pages_of_all_layouts_come_back_bit_for_bit(self) -> None:
        pools = [MhaPool(layout) for layout in LAYOUTS]
        pools += [MhaPool("layer_first", heads=64), MhaPool("page_first", 32, 40, 128)]
        pools += [MlaPool(layout) for layout in LAYOUTS]
        for number, pool in enumerate(pools):
            name = f"{type(pool).__name__} {pool.layout}"
            with self.subTest(pool=name):
                model = f"{self.id()} {number}"
                storage = self.storage(pool, model)
                fill(pool, number)
                pages = [5, 3, 8, 0]
                before = [page_bytes(pool, page) for page in pages]
                keys = [key(page) for page in pages]
                stored = storage.batch_set_v1(keys, slots(pool, pages))
                self.assertEqual(stored, [True] * 4)
                self.assertEqual(storage.batch_exists([*keys, key(99)]), 4)
                clear(pool)
                reader = self.storage(pool, model)
                to = [20, 21, 1, 7, 9]
                read = reader.batch_get_v1([*keys, key(99)], slots(pool, to))
                self.assertEqual(read, [True] * 4 + [False])
                self.assertEqual([page_bytes(pool, page) for page in to[:4]], before)
                self.assertFalse(any(any(page_bytes(pool, page)) for page in (0, 2, 19, 22, 23)))

    def test_a_prefix_ends_at_the_first_missing_page(self) -> None:
        pool = MhaPool("page_first")
        storage = self.storage(pool)
        self.assertEqual(storage.batch_exists([key(1)]), 0)
        storage.batch_set_v1([key(1), key(2), key(4)], slots(pool, [1, 2, 4]))
        self.assertEqual(storage.batch_exists([key(n) for n in (1, 2, 3, 4)]), 2)
        self.assertTrue(storage.exists(key(4)))
        self.assertFalse(storage.exists(key(3)))
        self.assertEqual(storage.batch_exists([]), 0)

    def test_extra_pools_come_back_and_limit_the_prefix(self) -> None:
        for state in (StatePool(), FlatPool(), MhaPool("page_first")):
            with self.subTest(pool=type(state).__name__):
                pool = MhaPool("page_first")
                storage = self.storage(pool, f"{self.id()} {type(state).__name__}")
                storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
                fill(pool, 1)
                fill(state, 7)
                keys = [key(n) for n in range(6)]
                before = [page_bytes(state, page) for page in (2, 3)]
                self.assertTrue(all(storage.batch_set_v1(keys, slots(pool, list(range(6))))))
                stored = storage.batch_set_v2(
                    [PoolTransfer(PoolName.MAMBA, slots(state, [2, 3]), keys=[keys[2], keys[3]])]
                )
                self.assertEqual(stored, {PoolName.MAMBA: [True, True]})
                for policy, last, expected in (
                    (PoolHitPolicy.TRAILING_PAGES, 1, [3, 4]),
                    (PoolHitPolicy.TRAILING_PAGES, 2, [4]),
                    (PoolHitPolicy.ALL_PAGES, 6, []),
                ):
                    asked = PoolTransfer(PoolName.MAMBA, keys=keys[-last:], hit_policy=policy)
                    found = storage.batch_exists_v2(keys, [asked])
                    self.assertEqual(found.restorable_prefix_pages, expected)
                    self.assertEqual(found.kv_hit_pages, max(expected, default=0))
                self.assertEqual(storage.batch_exists_v2(keys).kv_hit_pages, 6)
                unknown = PoolTransfer(PoolName.SWA, slots(state, [0]), keys=keys[:1])
                self.assertEqual(storage.batch_exists_v2(keys, [unknown]).kv_hit_pages, 0)
                self.assertEqual(storage.batch_get_v2([unknown]), {PoolName.SWA: [False]})
                clear(state)
                read = storage.batch_get_v2(
                    [PoolTransfer(PoolName.MAMBA, slots(state, [9, 8, 7]), keys=keys[2:5])]
                )
                self.assertEqual(read, {PoolName.MAMBA: [True, True, False]})
                self.assertEqual([page_bytes(state, page) for page in (9, 8)], before)

    def test_prefixes_of_pools_are_those_of_their_policy(self) -> None:
        from kvtier.sglang.storage import _usable_prefixes

        random = np.random.default_rng(2)
        for _ in range(200):
            there = [bool(x) for x in random.integers(0, 2, random.integers(0, 12))]
            window = int(random.integers(1, 5))
            expected = {
                n for n in range(1, len(there) + 1) if all(there[max(0, n - window) : n])
            }
            self.assertEqual(_usable_prefixes(there, window), expected)

    def test_batches_are_in_the_metrics_of_sglang(self) -> None:
        pool = MhaPool("page_first")
        fill(pool, 1)
        storage = self.storage(pool)
        keys, where = [key(page) for page in range(4)], slots(pool, [0, 1, 2, 3])
        storage.batch_set_v1(keys, where)
        storage.batch_get_v1([*keys[:3], key(99)], where)
        storage.batch_get_v1([key(99)], slots(pool, [5]))  # a miss moves nothing
        storage.batch_get_v2([PoolTransfer(PoolName.KV, slots(pool, [6, 7]), keys=keys[:2])])
        stats = storage.get_stats()
        self.assertEqual((stats.backup_pgs, stats.prefetch_pgs), ([4], [3, 2]))
        self.assertEqual((len(stats.backup_bandwidth), len(stats.prefetch_bandwidth)), (1, 2))
        self.assertTrue(all(0 < each < 1000 for each in stats.prefetch_bandwidth))
        labels = {"storage_backend": "KvtierStorage", "tp_rank": "0", "dp_rank": "0"}
        stats.prefetch_stats = {}
        StorageMetricsCollector(labels).log_storage_metrics(stats)
        self.assertEqual(REGISTRY.get_sample_value("sglang:prefetch_pgs_sum", labels), 5)
        self.assertEqual(storage.get_stats().prefetch_pgs, [])

    def test_other_models_ranks_and_shapes_do_not_meet(self) -> None:
        pool = MhaPool("page_first")
        writer = self.storage(pool, "one", tp_size=2)
        writer.batch_set_v1([key(1)], slots(pool, [1]))
        self.assertEqual(self.storage(pool, "one", tp_size=2).batch_exists([key(1)]), 1)
        others: list[tuple[Any, str, dict[str, Any]]] = [
            (pool, "two", {"tp_size": 2}),
            (pool, "one", {"tp_size": 2, "tp_rank": 1}),
            (pool, "one", {"tp_size": 2, "pp_size": 2}),
            (MhaPool("layer_first"), "one", {"tp_size": 2}),
            (MhaPool("page_first", heads=2), "one", {"tp_size": 2}),
        ]
        for other, model, fields in others:
            storage = self.storage(other, model, **fields)
            self.assertEqual(storage.batch_exists([key(1)]), 0)
            self.assertEqual(storage.batch_get_v1([key(1)], slots(other, [2])), [False])

    def test_dtypes_of_8_bits_do_not_meet(self) -> None:
        pool = MhaPool("page_first")
        pool.dtype = torch.uint8  # as SGLang has them
        pool.kv_buffer = pool.kv_buffer.to(torch.uint8)
        found = []
        for dtype in ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3"):
            with get_context().override_server_args(kv_cache_dtype=dtype):
                storage = self.storage(pool)
            found.append(storage.batch_exists([key(1)]))
            storage.batch_set_v1([key(1)], slots(pool, [1]))
        self.assertEqual(found, [0, 0, 1])

    def test_says_that_it_clears_nothing(self) -> None:
        pool = MhaPool("page_first")
        storage = self.storage(pool)
        storage.batch_set_v1([key(1)], slots(pool, [1]))
        with self.assertRaisesRegex(NotImplementedError, "pages stay with the server"):
            storage.clear()
        self.assertTrue(storage.exists(key(1)))

    def test_ranks_share_what_is_replicated(self) -> None:
        pool, state = MlaPool("page_first"), StatePool()
        writer = self.storage(pool, tp_size=2, is_mla_model=True)
        writer.register_mem_host_pool_v2(state, PoolName.MAMBA)
        writer.batch_set_v1([key(1)], slots(pool, [1]))
        writer.batch_set_v2([PoolTransfer(PoolName.MAMBA, slots(state, [1]), keys=[key(1)])])
        other = self.storage(pool, tp_size=2, tp_rank=1, is_mla_model=True)
        other.register_mem_host_pool_v2(state, PoolName.MAMBA)
        self.assertEqual(other.batch_exists([key(1)]), 1)
        asked = PoolTransfer(PoolName.MAMBA, slots(state, [2]), keys=[key(1)])
        self.assertEqual(other.batch_get_v2([asked]), {PoolName.MAMBA: [False]})

    def test_wrong_options_are_refused_at_the_start(self) -> None:
        pool = MhaPool("page_first")
        for extra, fields, message in (
            ({"tiemout": 1.0}, {}, 'found "tiemout", did you mean "timeout"'),
            ({"timeout": "1"}, {}, "timeout: expected a number, found '1'"),
            ({"interface_v1": 0}, {}, 'expected "interface_v1": 1, .* found 0'),
            ({"server": "localhost"}, {}, "expected unix:PATH or tcp:HOST:PORT"),
            ({}, {"dcp_size": 2, "is_mla_model": True, "tp_size": 2, "logical_page_size": 16},
             "context parallel size: expected 1, .* found 2"),
        ):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                self.storage(pool, extra=extra, **fields)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected pages with memory"):
            self.storage(object())

    def test_options_of_sglang_itself_are_left_to_it(self) -> None:
        self.storage(MhaPool("page_first"), extra={"file_storage_path": "/somewhere"})

    def test_indices_that_do_not_fit_are_refused(self) -> None:
        pool = MhaPool("page_first")
        storage = self.storage(pool)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected 32, found 16"):
            storage.batch_get_v1([key(1), key(2)], slots(pool, [1]))

    def test_a_release_that_was_not_tested_is_refused(self) -> None:
        from kvtier.sglang import _compat

        for version in ("0.5.22", "0.4.99", "0.6.0", "1.5.23", "nightly"):
            with self.assertRaisesRegex(ImportError, f"expected SGLang 0.5.23 .* found {version}"):
                _compat.check_version(version)
        for version in ("0.5.23", "0.5.24", "0.5.23+cpu"):
            _compat.check_version(version)


class SglangFaultTest(unittest.TestCase):
    def setUp(self) -> None:
        self.server = Server("--page-arena-mib", "8")
        self.addCleanup(self.server.close)
        self.pool = MhaPool("page_first")

    def storage(self, **extra: Any) -> Any:
        extra = {"retry_after": 0.01, **extra}
        storage = make_storage(self.server, "model", self.pool, extra)
        self.addCleanup(storage.close)
        return storage

    def set(self, storage: Any, page: int) -> bool:
        return all(storage.batch_set_v1([key(page)], slots(self.pool, [page])))

    def get(self, storage: Any, page: int) -> bool:
        return all(storage.batch_get_v1([key(page)], slots(self.pool, [page])))

    def test_a_killed_server_is_a_miss_and_a_new_one_is_used(self) -> None:
        storage = self.storage()
        self.assertTrue(self.set(storage, 1))
        self.server.kill()
        self.assertFalse(self.get(storage, 1))
        self.assertFalse(self.set(storage, 2))
        self.assertEqual(storage.batch_exists([key(1)]), 0)
        self.assertEqual(storage.batch_exists_v2([key(1)]).kv_hit_pages, 0)
        self.server.start()
        poll(lambda: self.set(storage, 1))
        self.assertTrue(self.get(storage, 1))

    def test_a_server_that_stands_still_holds_up_nothing(self) -> None:
        storage = self.storage(**IMPATIENT)
        fill(self.pool, 3)
        poll(lambda: self.set(storage, 1))
        before = page_bytes(self.pool, 1)
        self.server.pause()
        try:
            self.assertFalse(self.get(storage, 1))
            self.assertEqual(storage.batch_exists([key(1)]), 0)
            self.assertFalse(self.set(storage, 2))
        finally:
            self.server.resume()
        poll(lambda: self.get(storage, 1))
        self.assertEqual(page_bytes(self.pool, 1), before)

    def test_a_full_server_makes_room_or_says_no(self) -> None:
        storage = self.storage()
        fill(self.pool, 4)
        before = [page_bytes(self.pool, page) for page in range(PAGES)]
        for round in range(40):
            keys = [key(100 * round + page) for page in range(PAGES)]
            storage.batch_set_v1(keys, slots(self.pool, list(range(PAGES))))
        clear(self.pool)
        read = storage.batch_get_v1(keys, slots(self.pool, list(range(PAGES))))
        self.assertTrue(any(read))
        for page, good in enumerate(read):
            if good:
                self.assertEqual(page_bytes(self.pool, page), before[page])

    def test_the_engine_starts_without_a_server(self) -> None:
        self.server.kill()
        storage = self.storage()
        self.assertEqual(storage.batch_exists([key(1)]), 0)
        self.server.start()
        poll(lambda: self.set(storage, 1))


if __name__ == "__main__":
    print(f"SGLang {sglang.__version__}", file=sys.stderr)
    unittest.main()
