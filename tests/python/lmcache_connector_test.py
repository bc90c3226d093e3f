"""The in-process connector in LMCache's own remote backend, against a server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import unittest
from typing import Any

from engines import IMPATIENT, PATIENT, content, need, poll

need("lmcache", "torch")

import kvtier
import numpy as np
import torch
from lmcache.observability import LMCStatsMonitor
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from server import PATIENCE, Server, ServerTest

LAYERS, CHUNK, HEADS, HEAD_DIM = 4, 64, 2, 32
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2


class Memory:
    """LMCache's memory of objects, and how many are in use."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, busy_loop: bool = True) -> Any:
        shape, dtype = shapes[0], dtypes[0]
        raw = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8)
        metadata = MemoryObjMetadata(
            shape=shape, dtype=dtype, address=raw.data_ptr(), phy_size=raw.numel(), fmt=fmt,
            ref_count=1, shapes=[shape], dtypes=[dtype],
        )
        made = TensorMemoryObj(raw, metadata, parent_allocator=None)
        self.given.append(made)
        return made

    def make(self, seed: int, tokens: int = CHUNK) -> Any:
        shape = torch.Size([2, LAYERS, tokens, HEADS * HEAD_DIM])
        made = self.allocate([shape], [torch.bfloat16], MemoryFormat.KV_2LTD)
        memoryview(made.byte_array).cast("B")[:] = content(seed, tokens * TOKEN_BYTES).tobytes()
        return made

    def count(self) -> int:
        return sum(each.meta.ref_count > 0 for each in self.given)


def make_key(number: int, model: str) -> Any:
    return CacheEngineKey(model, 1, 0, number, torch.bfloat16)


class Process:
    """A remote backend, its event loop in a thread, and LMCache's memory."""

    def __init__(
        self, server: Server, model: str, options: dict[str, Any], room: int | None = None
    ) -> None:
        """`room`: bytes of LMCache's own memory, of which `load` takes its objects then."""
        self.model = model
        self.memory = Memory()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        given = {"server": server.address, **PATIENT, **options}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, remote_serde="naive", remote_storage_plugins=["kvtier"],
            local_cpu=False, blocking_timeout_secs=PATIENCE,
            extra_config={
                "remote_storage_plugin.kvtier.module_path": "kvtier.lmcache.connector",
                "remote_storage_plugin.kvtier.class_name": "KvtierConnectorAdapter",
                **{f"remote_storage_plugin.kvtier.{name}": each for name, each in given.items()},
            },
        )
        metadata = LMCacheMetadata(
            model, 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, CHUNK, HEADS, HEAD_DIM), chunk_size=CHUNK
        )
        self.parts = (config, metadata)
        memory: Any = self.memory
        if room is not None:
            memory = LocalCPUBackend(config, memory_allocator=HostMemoryAllocator(room))
        self.backend = RemoteBackend(
            config, metadata, self.loop, memory, "cpu", plugin_name="kvtier"
        )

    def close(self) -> None:
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE)
        self.loop.close()

    def key(self, number: int) -> Any:
        return make_key(number, self.model)

    def store(self, numbers: list[int], tokens: int = CHUNK) -> None:
        keys = [self.key(number) for number in numbers]
        objects = [self.memory.make(number, tokens) for number in numbers]
        done: list[Any] = []
        self.backend.batched_submit_put_task(keys, objects, on_complete_callback=done.append)
        poll(lambda: len(done) == len(keys))
        for each in objects:
            each.ref_count_down()

    def load(self, numbers: list[int], tokens: int = CHUNK) -> list[bool]:
        """Returns which objects came, compared with what they are to have."""
        found = self.backend.batched_get_blocking([self.key(number) for number in numbers])
        for number, each in zip(numbers, found):
            if each is None:
                continue
            np.testing.assert_array_equal(
                np.frombuffer(bytes(each.byte_array), np.uint8), content(number, tokens * TOKEN_BYTES)
            )
            assert tuple(each.get_shape()) == (2, LAYERS, tokens, HEADS * HEAD_DIM)
            each.ref_count_down()
        return [each is not None for each in found]


class ConnectorTest(ServerTest):
    def process(self, room: int | None = None, **options: Any) -> Process:
        process = Process(self.server, self.id(), options, room)
        self.addCleanup(process.close)
        return process

    def test_objects_come_back_in_another_process(self) -> None:
        writer, reader = self.process(), self.process()
        writer.store([1, 2, 3])
        self.assertEqual(reader.load([3, 9, 1, 2]), [True, False, True, True])
        self.assertTrue(reader.backend.contains(reader.key(2)))
        self.assertFalse(reader.backend.contains(reader.key(9)))
        asked = [reader.key(number) for number in (1, 2, 9, 3)]
        self.assertEqual(reader.backend.connection.getWrappedConnector().batched_contains(asked), 2)
        self.assertEqual(reader.memory.count(), 0)
        self.assertEqual(writer.memory.count(), 0, "references that were taken are given back")

    def test_lmcache_counts_bytes_and_times_of_the_connector(self) -> None:
        process = self.process()
        monitor = LMCStatsMonitor.GetOrCreate()

        def counted() -> tuple[int, int, int, int]:
            return (
                monitor.interval_remote_write_bytes, monitor.interval_remote_read_bytes,
                len(monitor.interval_remote_time_to_put), len(monitor.interval_remote_time_to_get),
            )

        before = counted()
        process.store([1, 2])
        process.load([1, 2, 9])
        grown = [after - each for each, after in zip(before, counted())]
        self.assertEqual(grown, [2 * CHUNK * TOKEN_BYTES, 2 * CHUNK * TOKEN_BYTES, 1, 1])

    def test_a_batch_that_does_not_fit_in_the_memory_comes_as_far_as_it_does(self) -> None:
        writer, reader = self.process(), self.process(3 * CHUNK * TOKEN_BYTES, timeout=PATIENCE / 4)
        numbers = [1, 2, 3, 4, 5]
        writer.store(numbers)
        for _ in range(2):  # the memory of the first is free again
            self.assertEqual(reader.load(numbers), [True] * 3 + [False] * 2)
        # Objects of others are waited for, and the event loop goes on meanwhile.
        held = reader.backend.batched_get_blocking([reader.key(number) for number in (1, 2, 3)])
        waiting = threading.Thread(target=lambda: found.extend(reader.load([4, 5])))
        found: list[bool] = []
        waiting.start()
        asked = reader.backend.connection.exists(reader.key(1))
        self.assertTrue(asyncio.run_coroutine_threadsafe(asked, reader.loop).result(PATIENCE))
        for each in held:
            each.ref_count_down()
        waiting.join(PATIENCE)
        self.assertEqual(found, [True, True])

    def test_a_part_of_a_chunk_has_its_own_shape(self) -> None:
        process = self.process()
        process.store([1], tokens=17)
        self.assertEqual(process.load([1], tokens=17), [True])

    def test_leading_objects_are_found_without_waiting(self) -> None:
        process = self.process()
        process.store([1, 2, 4])
        keys = [process.key(number) for number in (1, 2, 3, 4)]
        run = asyncio.run_coroutine_threadsafe(
            process.backend.batched_async_contains("lookup", keys), process.loop
        )
        self.assertEqual(run.result(PATIENCE), 2)
        got = asyncio.run_coroutine_threadsafe(
            process.backend.batched_get_non_blocking("lookup", keys), process.loop
        ).result(PATIENCE)
        self.assertEqual(len(got), 2)
        for each in got:
            each.ref_count_down()
        self.assertEqual(process.memory.count(), 0)

    def test_a_description_that_lmcache_does_not_know_is_a_miss(self) -> None:
        process = self.process()
        process.store([1, 3])
        connector = process.backend.connection.getWrappedConnector()
        name = hashlib.sha256(process.key(2).to_string().encode()).digest()
        unknown = b"\x7f" * connector.remote_metadata_bytes
        self.assertEqual(connector._descriptions.put([name], [unknown]).result(), [True])
        self.assertEqual(process.load([1, 2, 3]), [True, False, True])
        self.assertFalse(process.backend.contains(process.key(2)))
        self.assertEqual(process.memory.count(), 0)

    def test_models_and_workers_do_not_meet(self) -> None:
        process = self.process()
        process.store([1])
        other = CacheEngineKey(process.model, 2, 1, 1, torch.bfloat16)
        for key in (make_key(1, "another"), other):
            self.assertEqual(process.backend.batched_get_blocking([key]), [None])

    def test_misspelt_options_are_refused(self) -> None:
        process = self.process()
        config, metadata = process.parts
        config.extra_config["remote_storage_plugin.kvtier.tiemout"] = 1.0
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, 'did you mean "timeout"'):
            CreateConnector(
                "plugin://kvtier", process.loop, process.memory, config, metadata, "kvtier"
            )


class ConnectorFaultTest(unittest.TestCase):
    def setUp(self) -> None:
        self.server = Server("--page-arena-mib", "8")
        self.addCleanup(self.server.close)

    def process(self, **options: Any) -> Process:
        process = Process(self.server, self.id(), {"retry_after": 0.01, **options})
        self.addCleanup(process.close)
        return process

    def test_a_killed_server_is_a_miss_and_a_new_one_is_used(self) -> None:
        process = self.process()
        process.store([1])
        self.server.kill()
        self.assertEqual(process.load([1]), [False])
        self.assertFalse(process.backend.contains(process.key(1)))
        process.store([2])
        self.server.start()

        def stored() -> bool:
            process.store([3])
            return process.load([3]) == [True]

        poll(stored)
        self.assertEqual(process.memory.count(), 0)

    def test_a_server_that_stands_still_is_a_miss_within_the_deadline(self) -> None:
        process = self.process(**IMPATIENT)

        def stored() -> bool:
            process.store([1])
            return process.load([1]) == [True]

        poll(stored)
        self.server.pause()
        try:
            self.assertEqual(process.load([1]), [False])
            self.assertFalse(process.backend.contains(process.key(1)))
        finally:
            self.server.resume()
        poll(lambda: process.load([1]) == [True])
        self.assertEqual(process.memory.count(), 0)


if __name__ == "__main__":
    logging.getLogger("lmcache").setLevel(logging.CRITICAL)
    unittest.main()
