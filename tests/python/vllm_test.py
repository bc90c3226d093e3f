"""The secondary tier against vLLM's own interface and a server."""

from __future__ import annotations

import inspect
import sys
import unittest
from types import SimpleNamespace
from typing import Any

from engines import IMPATIENT, LARGE, PATIENT, content, need, poll

need("vllm", "torch")

import kvtier
import kvtier.vllm
import numpy as np
import vllm
from server import Server, ServerTest
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

ROWS = 64


def make_spec(
    model: str = "org/model", tp_size: int = 1, layers: int = 2, layout: str | None = None
) -> Any:
    """Returns of vLLM's specification what a tier reads, with the classes of this release."""
    names = tuple(f"layers.{i}" for i in range(layers))
    try:
        from vllm.v1.kv_offload import config as offload
    except ImportError:
        return _older_spec(model, tp_size, names)
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=names, group_id=0),),
        model=SimpleNamespace(name=model, dtype="bfloat16", max_model_len=0),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(
            rank=0, world_size=tp_size, tp_size=tp_size, pp_size=1, pcp_size=1, dcp_size=1,
            is_parallelism_agnostic=False,
        ),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=layout,
    )
    for name in list(vars(config)):  # as far as this release has them
        if name not in offload.OffloadingConfig.__dataclass_fields__:
            delattr(config, name)
    return SimpleNamespace(config=config, blocks_per_chunk=1, block_size_factor=1)


def _older_spec(model: str, tp_size: int, names: tuple[str, ...]) -> Any:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16), layer_names=names)
    parallel = SimpleNamespace(
        tensor_parallel_size=tp_size, pipeline_parallel_size=1, prefill_context_parallel_size=1,
        decode_context_parallel_size=1, rank=0,
    )
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=parallel,
            cache_config=SimpleNamespace(cache_dtype="bfloat16", block_size=16),
            model_config=SimpleNamespace(model=model),
            use_v2_model_runner=False,
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        block_size_factor=1,
        blocks_per_chunk=1,
    )


def make_key(number: int, group: int = 0) -> bytes:
    return bytes(make_offload_key(number.to_bytes(32, "little"), group))


def make_job(job_id: int, keys: list[bytes], rows: list[int], request: str, load: bool) -> Any:
    context = ReqContext(req_id=request)
    job = tiering.TransferJob if hasattr(tiering, "TransferJob") else tiering.JobMetadata
    ids = "chunk_ids" if "chunk_ids" in job.__dataclass_fields__ else "block_ids"
    return job(
        job_id=job_id, keys=keys, is_promotion=load, req_context=context, **{ids: np.array(rows)}
    )


class Engine:
    """A tier with a primary tier of `ROWS` rows, and what vLLM does with it."""

    def __init__(self, server: Server, row_bytes: int, spec: Any, options: Any) -> None:
        kvtier.vllm.register()
        self.rows = np.zeros((ROWS, row_bytes), np.uint8)
        self.view = memoryview(self.rows)
        config = {"type": "kvtier", "server": server.address, **PATIENT, **options}
        self.tier = SecondaryTierFactory.create_secondary_tier(config, self.view, spec)
        self.jobs = 0

    def close(self) -> None:
        self.tier.shutdown()
        self.view.release()  # as vLLM does: refused while the tier has any of it

    def run(self, keys: list[bytes], rows: list[int], load: bool, request: str = "r") -> Any:
        """Returns the result of a job."""
        self.jobs += 1
        job = make_job(self.jobs, keys, rows, request, load)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        (result,) = poll(lambda: list(self.tier.get_finished_jobs()))
        assert result.job_id == self.jobs
        return result

    def store(self, seeds: list[int]) -> bool:
        for row, seed in enumerate(seeds):
            self.rows[row] = content(seed, self.rows.shape[1])
        result = self.run([make_key(seed) for seed in seeds], list(range(len(seeds))), False)
        return bool(result.success)

    def load(self, seeds: list[int], request: str = "r") -> bool:
        """Loads to the last rows, the wrong way round; what is said to be there must be."""
        rows = [ROWS - 1 - i for i in range(len(seeds))]
        self.rows[rows] = 0
        keys = [make_key(seed) for seed in seeds]
        result = self.run(keys, rows, True, request)
        whole = set(keys) if result.success else set(getattr(result, "successful_keys", None) or ())
        for seed, row in zip(seeds, rows):
            if make_key(seed) in whole:
                np.testing.assert_array_equal(self.rows[row], content(seed, self.rows.shape[1]))
        return bool(result.success)

    def lookup(self, keys: list[bytes], request: str = "r") -> list[bool]:
        context = ReqContext(req_id=request)

        def answered() -> Any:
            results = [self.tier.lookup(key, context) for key in keys]
            self.tier.on_schedule_end(None)
            return None if LookupResult.RETRY in results else results

        return [result is LookupResult.HIT for result in poll(answered)]

    def finish(self, request: str = "r") -> None:
        self.tier.on_request_finished(ReqContext(req_id=request))


class VllmTest(ServerTest):
    def engine(self, row_bytes: int = 40_000, spec: Any = None, **options: Any) -> Engine:
        """Of a model that no other case has."""
        engine = Engine(self.server, row_bytes, spec or make_spec(self.id()), options)
        self.addCleanup(engine.close)
        return engine

    def test_rows_come_back_bit_for_bit_in_another_engine(self) -> None:
        for row_bytes in (16, 40_000, 4 << 20, LARGE):
            with self.subTest(row_bytes=row_bytes):
                writer, reader = self.engine(row_bytes), self.engine(row_bytes)
                self.assertTrue(writer.store([1, 2, 3]))
                keys = [make_key(seed) for seed in (3, 9, 1, 2)]
                self.assertEqual(reader.lookup(keys), [True, False, True, True])
                self.assertTrue(reader.load([2, 3, 1]))

    def test_any_share_of_a_load_is_right_or_missing(self) -> None:
        engine = self.engine()
        random = np.random.default_rng(3)
        for _ in range(20):
            seeds = [int(seed) for seed in random.permutation(40)[: random.integers(1, 20)]]
            if random.integers(2):
                self.assertTrue(engine.store(seeds))
            else:
                engine.load(seeds)

    def test_a_job_is_pending_until_it_is_taken(self) -> None:
        engine = self.engine()
        self.assertFalse(engine.tier.has_pending_work())
        engine.tier.submit_store(make_job(1, [make_key(77)], [0], "r", False))
        self.assertTrue(engine.tier.has_pending_work())
        engine.tier.drain_jobs()
        (result,) = engine.tier.get_finished_jobs()
        self.assertTrue(result.success)
        self.assertFalse(engine.tier.has_pending_work())
        self.assertEqual(list(engine.tier.get_finished_jobs()), [])

    def test_single_keys_and_groups_are_found_as_prefixes_are(self) -> None:
        engine = self.engine()
        keys = [make_key(n, group) for n in (201, 202, 203, 204) for group in (0, 1)]
        stored = [keys[i] for i in (0, 3, 5, 6)]
        self.assertTrue(engine.run(stored, [0, 1, 2, 3], load=False).success)
        self.assertEqual(engine.lookup(keys), [key in stored for key in keys])

    def test_a_row_that_has_gone_since_the_lookup_is_a_miss_for_the_request(self) -> None:
        engine = self.engine(model_row := 30_000)
        self.assertTrue(engine.store([1, 2]))
        keys = [make_key(1), make_key(5)]
        self.assertEqual(engine.lookup(keys), [True, False])
        result = engine.run(keys, [10, 11], load=True)  # the second has never been there
        self.assertFalse(result.success)
        if hasattr(result, "successful_keys"):
            self.assertEqual(list(result.successful_keys), [keys[0]])
        self.assertEqual(engine.lookup([keys[1]]), [False])
        self.assertEqual(engine.rows.shape[1], model_row)
        engine.finish()
        self.assertTrue(engine.store([5]))
        self.assertEqual(engine.lookup([keys[1]]), [True])  # asked anew

    def test_other_models_parallel_sizes_and_row_sizes_do_not_meet(self) -> None:
        writer = self.engine(spec=make_spec("org/one"))
        self.assertTrue(writer.store([1]))
        self.assertEqual(self.engine(spec=make_spec("org/one")).lookup([make_key(1)]), [True])
        others: list[dict[str, Any]] = [
            {"spec": make_spec("org/two")},
            {"spec": make_spec("org/one", tp_size=2)},
            {"spec": make_spec("org/one", layers=3)},
            {"spec": make_spec("org/one"), "row_bytes": 20_000},
        ]
        for other in others:
            engine = self.engine(**other)
            self.assertEqual(engine.lookup([make_key(1)]), [False])
            self.assertFalse(engine.load([1]))

    def test_other_orders_of_heads_and_tokens_do_not_meet(self) -> None:
        def spec(layout: str) -> Any:
            return make_spec(self.id(), layout=layout)

        if not hasattr(getattr(spec("LBNHC"), "config", None), "kv_cache_layout"):
            self.skipTest("this release says nothing of the order")
        writer = self.engine(spec=spec("LBNHC"))
        self.assertTrue(writer.store([1]))
        self.assertEqual(self.engine(spec=spec("LBHNC")).lookup([make_key(1)]), [False])
        self.assertEqual(self.engine(spec=spec("LBNHC")).lookup([make_key(1)]), [True])

    def events(self, engine: Engine) -> list[tuple[list[bytes], bool]]:
        return [([bytes(key) for key in event.keys], event.removed)
                for event in engine.tier.take_events()]

    def test_events_name_what_is_stored_and_what_is_gone(self) -> None:
        spec = make_spec(self.id())
        spec.kv_events_config = SimpleNamespace(
            enable_kv_cache_events=True, self_describing_kv_events=False
        )
        engine = self.engine(spec=spec, enable_kv_events=True)
        self.assertTrue(engine.store([1, 2]))
        self.assertEqual(self.events(engine), [([make_key(1), make_key(2)], False)])
        self.assertFalse(engine.load([1, 5]))
        self.assertEqual(self.events(engine), [([make_key(5)], True)])
        self.assertTrue(engine.load([1]))
        self.assertEqual(self.events(engine), [])

        for silent, options in ((spec, {}), (make_spec(self.id()), {"enable_kv_events": True})):
            engine = self.engine(spec=silent, **options)
            engine.store([3])
            self.assertEqual(self.events(engine), [])

    def test_counters_go_to_the_registry_of_the_engine(self) -> None:
        engine = self.engine()
        definitions = type(engine.tier).build_metric_definitions({})
        self.assertIsNone(engine.tier.get_stats())
        self.assertTrue(engine.store([1, 2]))
        self.assertFalse(engine.load([1, 5]))
        stats = engine.tier.get_stats()
        if not definitions:
            self.assertIsNone(stats)  # a release whose tiers have none
            return
        counted = stats.reduce()
        for outcome, amount in (("read", 1), ("missed", 1), ("stored", 2)):
            self.assertEqual(counted[f"vllm:kvtier_chunks:('{outcome}',)"], amount)
        self.assertEqual(len(counted), 3)
        self.assertLessEqual({key.rpartition(":(")[0] for key in counted}, set(definitions))
        self.assertIsNone(engine.tier.get_stats())

    def test_misspelt_options_are_refused_at_the_start(self) -> None:
        for options, message in (
            ({"enable_kv_events": 1}, "enable_kv_events: expected true or false, found 1"),
            ({"tiemout": 1.0}, 'found "tiemout", did you mean "timeout"'),
            ({"io_threads": "4"}, "io_threads: expected an integer, found '4'"),
            ({"server": "localhost"}, "expected unix:PATH or tcp:HOST:PORT"),
        ):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                self.engine(**options)

    def test_a_release_that_was_not_tested_is_refused(self) -> None:
        from kvtier.vllm import _compat

        for version in ("0.24.9", "0.34.0", "1.25.0", "nightly"):
            with self.assertRaisesRegex(ImportError, f"expected vLLM 0.25 to 0.33, found {version}"):
                _compat.check_version(version)
        for version in ("0.25.0", "0.33.1rc2", "0.33.0+cpu"):
            _compat.check_version(version)

    def test_registering_twice_does_nothing(self) -> None:
        kvtier.vllm.register()
        kvtier.vllm.register()
        self.assertEqual(
            SecondaryTierFactory.get_tier_class({"type": "kvtier"}).__name__, "KvtierTier"
        )


class Memory:
    """Memory of a primary tier."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows = np.zeros((rows, row_bytes), np.uint8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.rows)

    def cleanup(self) -> None:
        pass


PRIMARY = inspect.signature(CPUPrimaryTierOffloadingManager).parameters


@unittest.skipUnless("num_chunks" in PRIMARY, f"vLLM {vllm.__version__} calls chunks blocks")
class VllmManagerTest(ServerTest):
    """vLLM's own manager of tiers, which stores to and promotes from the tier."""

    def manager(self, row_bytes: int) -> tuple[Any, Memory]:
        memory = Memory(ROWS, row_bytes)
        primary = CPUPrimaryTierOffloadingManager(num_chunks=ROWS, mmap_region=memory)
        kvtier.vllm.register()
        tier = SecondaryTierFactory.create_secondary_tier(
            {"type": "kvtier", "server": self.server.address, **PATIENT},
            primary.get_kv_memoryview(),
            make_spec(self.id()),
        )
        manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[tier])
        self.addCleanup(manager.shutdown)
        return manager, memory

    def step(self, manager: Any) -> None:
        manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def test_what_one_engine_stores_another_promotes(self) -> None:
        keys = [make_key(n) for n in range(8)]
        manager, memory = self.manager(30_000)
        context = ReqContext(req_id="writer")
        manager.on_new_request(context)
        stored = manager.prepare_store(keys, context)
        for key, row in zip(stored.keys_to_store, stored.store_spec.chunk_ids):
            memory.rows[row] = content(keys.index(key), 30_000)
        manager.complete_store(stored.keys_to_store, context)
        for tier in manager.secondary_tiers:
            tier.drain_jobs()
        self.step(manager)
        manager.on_request_finished(context)

        manager, memory = self.manager(30_000)
        context = ReqContext(req_id="reader")
        manager.on_new_request(context)

        def promoted() -> bool:
            found = [manager.lookup(key, context) for key in [*keys, make_key(99)]]
            self.step(manager)
            done = [result is LookupResult.HIT for result in found[:-1]]
            return all(done) and found[-1] is LookupResult.MISS

        poll(promoted)
        spec = manager.prepare_load(keys, context)
        for number, row in enumerate(spec.chunk_ids):
            np.testing.assert_array_equal(memory.rows[row], content(number, 30_000))
        manager.complete_load(keys, context)
        manager.on_request_finished(context)


class VllmFaultTest(unittest.TestCase):
    def setUp(self) -> None:
        self.server = Server("--page-arena-mib", "8")
        self.addCleanup(self.server.close)

    def engine(self, row_bytes: int = 100_000, **options: Any) -> Engine:
        options = {"retry_after": 0.01, **options}
        engine = Engine(self.server, row_bytes, make_spec(), options)
        self.addCleanup(engine.close)
        return engine

    def test_a_killed_server_is_a_miss_and_a_new_one_is_used(self) -> None:
        engine = self.engine()
        self.assertTrue(engine.store([1]))
        self.server.kill()
        self.assertFalse(engine.load([1]))
        self.assertFalse(engine.store([2]))
        self.assertEqual(engine.lookup([make_key(1)], "another"), [False])
        self.server.start()
        poll(lambda: engine.store([1]))
        self.assertTrue(engine.load([1]))

    def test_a_server_that_stands_still_holds_up_nothing(self) -> None:
        engine = self.engine(**IMPATIENT)
        poll(lambda: engine.store([1]))
        self.server.pause()
        try:
            self.assertFalse(engine.load([1]))
            self.assertEqual(engine.lookup([make_key(1)]), [False])
            engine.tier.submit_store(make_job(900, [make_key(3)], [0], "r", False))
            engine.tier.drain_jobs()
            self.assertFalse(next(iter(engine.tier.get_finished_jobs())).success)
        finally:
            self.server.resume()
        poll(lambda: engine.load([1], "later"))

    def test_a_full_server_makes_room_or_says_no(self) -> None:
        engine = self.engine(1 << 20)
        for first in range(0, 60, 4):
            engine.store(list(range(first, first + 4)))
        found = engine.lookup([make_key(n) for n in range(60)])
        self.assertTrue(0 < sum(found) < 10 and found[-1])
        for seed, there in enumerate(found):
            if there:
                self.assertTrue(engine.load([seed]))

    def test_the_engine_starts_without_a_server(self) -> None:
        self.server.kill()
        engine = self.engine()
        self.assertEqual(engine.lookup([make_key(1)]), [False])
        self.server.start()
        poll(lambda: engine.store([1]))


if __name__ == "__main__":
    print(f"vLLM {vllm.__version__}", file=sys.stderr)
    unittest.main()
