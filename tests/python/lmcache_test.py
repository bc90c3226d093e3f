"""The adapter against LMCache's own interface, and a server."""

from __future__ import annotations

import select
import sys
import unittest
from typing import Any

from engines import IMPATIENT, LARGE, PATIENT, content, need, poll

need("lmcache", "torch")

import kvtier
import lmcache
import numpy as np
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
    PluginL2AdapterConfig,
    _create_plugin_adapter,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform.event_notifier import consume_fd
from server import PATIENCE, Server, ServerTest

from kvtier.chunk_options import ChunkOptions
from kvtier.lmcache.objects import ObjectStore


def make_object(data: Any) -> Any:
    """Returns an object of LMCache over a copy of the bytes."""
    tensor = torch.from_numpy(np.array(data, np.uint8))
    metadata = MemoryObjMetadata(
        shape=torch.Size([tensor.numel()]),
        dtype=torch.uint8,
        address=tensor.data_ptr(),
        phy_size=tensor.numel(),
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(tensor, metadata, parent_allocator=None)


def make_adapter(options: dict[str, Any]) -> Any:
    """Makes the adapter as LMCache does of `--l2-adapter`."""
    config = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvtier.lmcache.adapter",
            "class_name": "KvtierL2Adapter",
            "adapter_params": options,
        }
    )
    return _create_plugin_adapter(config)


class Level:
    """An adapter, and what LMCache's controllers do with it."""

    def __init__(self, server: Server, model: str, **options: Any) -> None:
        self.adapter = make_adapter({"server": server.address, **PATIENT, **options})
        self.model = model

    def key(self, number: int, **fields: Any) -> ObjectKey:
        values = {"model_name": self.model, "kv_rank": 0, **fields}
        return ObjectKey(chunk_hash=number.to_bytes(32, "little"), **values)

    def wait(self, fd: int) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(1000 * PATIENCE), "no event"
        consume_fd(fd)

    def store(self, keys: list[ObjectKey], data: list[Any]) -> bool:
        objects = [make_object(each) for each in data]
        task = self.adapter.submit_store_task(keys, objects)
        self.wait(self.adapter.get_store_event_fd())
        result = self.adapter.pop_completed_store_tasks()[task]
        assert not result.is_successful() or result.bytes_transferred() == sum(
            each.nbytes for each in data
        )
        return bool(result.is_successful())

    def lock(self, keys: list[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        self.wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None  # given once
        return [bool(found.test(i)) for i in range(len(keys))]

    def load(self, keys: list[ObjectKey], data: list[Any]) -> list[bool]:
        """What is said to be there must be `data`."""
        objects = [make_object(np.zeros_like(each)) for each in data]
        task = self.adapter.submit_load_task(keys, objects)
        self.wait(self.adapter.get_load_event_fd())
        found = self.adapter.query_load_result(task)
        assert self.adapter.query_load_result(task) is None
        read = [bool(found.test(i)) for i in range(len(keys))]
        for each, expected, good in zip(objects, data, read):
            if good:
                np.testing.assert_array_equal(each.raw_tensor.numpy(), expected)
        return read


class LmcacheTest(ServerTest):
    def level(self, model: str = "", **options: Any) -> Level:
        """Of a model that no other case has."""
        level = Level(self.server, model or self.id(), **options)
        self.addCleanup(level.adapter.close)
        return level

    def test_objects_of_any_size_come_back_bit_for_bit(self) -> None:
        writer, reader = self.level(), self.level()
        sizes = [1, 8, 4096, 40_000, 4 << 20, LARGE, 40_000]
        keys = [writer.key(n) for n in range(len(sizes))]
        data = [content(n, size) for n, size in enumerate(sizes)]
        self.assertTrue(writer.store(keys, data))
        order = [3, 0, 6, 5, 1, 2, 4]
        asked = [keys[i] for i in order] + [reader.key(99)]
        self.assertEqual(reader.lock(asked), [True] * 7 + [False])
        wanted = [data[i] for i in order] + [content(99, 10)]
        self.assertEqual(reader.load(asked, wanted), [True] * 7 + [False])
        reader.adapter.submit_unlock(asked)
        poll(lambda: reader.adapter.report_status()["locked_key_count"] == 0)

    def test_event_fds_are_distinct(self) -> None:
        adapter = self.level().adapter
        fds = {
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        }
        self.assertEqual(len(fds), 3)

    def test_all_that_a_key_has_tells_objects_apart(self) -> None:
        level = self.level()
        keys = [
            level.key(1),
            level.key(2),
            level.key(1, kv_rank=1),
            level.key(1, object_group_id=1),
            level.key(1, cache_salt="user"),
            level.key(1, model_name="another"),
        ]
        for number, key in enumerate(keys):
            self.assertEqual(level.lock(keys), [True] * number + [False] * (len(keys) - number))
            self.assertTrue(level.store([key], [content(number, 1000)]))
        data = [content(number, 1000) for number in range(len(keys))]
        self.assertEqual(level.load(keys, data), [True] * len(keys))

    def test_an_object_of_another_size_is_a_miss(self) -> None:
        level = self.level()
        level.store([level.key(1)], [content(1, 1000)])
        for size in (999, 1001, 2000):
            self.assertEqual(level.load([level.key(1)], [content(1, size)]), [False])

    def test_tasks_overlap(self) -> None:
        level = self.level()
        keys = [level.key(n) for n in range(64)]
        objects = [make_object(content(n, 50_000)) for n in range(64)]
        tasks = [
            level.adapter.submit_store_task(keys[n : n + 4], objects[n : n + 4])
            for n in range(0, 64, 4)
        ]
        done: dict[int, Any] = {}

        def all_done() -> bool:
            done.update(level.adapter.pop_completed_store_tasks())
            return len(done) == len(tasks)

        poll(all_done)
        self.assertTrue(all(done[task].is_successful() for task in tasks))
        self.assertEqual(level.lock(keys), [True] * 64)

    def test_wrong_options_are_refused_at_the_start(self) -> None:
        for options, message in (
            ({"tiemout": 1.0}, 'found "tiemout", did you mean "timeout"'),
            ({"io_threads": "4"}, "io_threads: expected an integer, found '4'"),
            ({"server": "localhost"}, "expected unix:PATH or tcp:HOST:PORT"),
        ):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                make_adapter({"server": self.server.address, **options})

    def test_its_configuration_is_described(self) -> None:
        from kvtier.lmcache.adapter import KvtierL2AdapterConfig

        self.assertIn("server", KvtierL2AdapterConfig.help())
        config = KvtierL2AdapterConfig.from_dict({"timeout": 1})
        self.assertEqual(config.options.timeout, 1)

    def test_a_release_that_was_not_tested_is_refused(self) -> None:
        from kvtier.lmcache import _compat

        for version in ("0.5.5", "0.4.7", "0.6.0", "unknown"):
            with self.assertRaisesRegex(ImportError, f"expected LMCache 0.5.6 .* found {version}"):
                _compat.check_version(version)
        _compat.check_version("0.5.7")

    def test_a_closed_adapter_has_nothing(self) -> None:
        level = self.level()
        level.adapter.close()
        level.adapter.close()
        task = level.adapter.submit_store_task([level.key(1)], [make_object(content(1, 10))])
        self.assertFalse(level.adapter.pop_completed_store_tasks()[task].is_successful())

    def test_locks_of_a_closed_store_end_with_it(self) -> None:
        objects = ObjectStore("test", ChunkOptions.parse({"server": self.server.address, **PATIENT}))
        self.addCleanup(objects.close)
        self.assertEqual(objects.put([b"k"], [memoryview(b"object")]), [True])
        self.assertEqual(objects.lock([b"k"]), [True])
        objects.close()
        objects.unlock([b"k"])
        self.assertEqual(objects.count_locked(), 0)


class LmcacheFaultTest(unittest.TestCase):
    def setUp(self) -> None:
        self.server = Server("--page-arena-mib", "8")
        self.addCleanup(self.server.close)

    def level(self, **options: Any) -> Level:
        level = Level(self.server, "model", **{"retry_after": 0.01, **options})
        self.addCleanup(level.adapter.close)
        return level

    def test_a_killed_server_is_a_miss_and_a_new_one_is_used(self) -> None:
        level = self.level()
        keys, data = [level.key(1)], [content(1, 100_000)]
        self.assertTrue(level.store(keys, data))
        self.assertEqual(level.lock(keys), [True])
        self.server.kill()
        self.assertEqual(level.load(keys, data), [False])
        self.assertEqual(level.lock(keys), [False])
        self.assertFalse(level.store([level.key(2)], data))
        level.adapter.submit_unlock(keys)
        self.server.start()
        poll(lambda: level.store(keys, data))
        self.assertEqual(level.lock(keys), [True])
        self.assertEqual(level.load(keys, data), [True])

    def test_a_server_that_stands_still_holds_up_nothing(self) -> None:
        level = self.level(**IMPATIENT)
        keys, data = [level.key(1)], [content(1, 100_000)]
        poll(lambda: level.store(keys, data))
        self.server.pause()
        try:
            self.assertEqual(level.load(keys, data), [False])
            self.assertEqual(level.lock(keys), [False])
            self.assertFalse(level.store([level.key(2)], data))
        finally:
            self.server.resume()
        poll(lambda: level.load(keys, data) == [True])

    def test_locked_objects_stay_in_a_full_server(self) -> None:
        level = self.level()
        kept = [level.key(1)]
        data = [content(1, 1 << 20)]
        self.assertTrue(level.store(kept, data))
        self.assertEqual(level.lock(kept), [True])
        for number in range(10, 40):
            level.store([level.key(number)], [content(number, 1 << 20)])
        self.assertEqual(level.load(kept, data), [True])
        self.assertEqual(level.lock([level.key(10)]), [False])
        level.adapter.submit_unlock(kept)
        poll(lambda: level.adapter.report_status()["locked_key_count"] == 0)

        def gone() -> bool:
            for number in range(40, 60):
                level.store([level.key(number)], [content(number, 1 << 20)])
            return level.load(kept, data) == [False]

        poll(gone)

    def test_it_starts_without_a_server(self) -> None:
        self.server.kill()
        level = self.level()
        keys, data = [level.key(1)], [content(1, 1000)]
        self.assertEqual(level.lock(keys), [False])
        self.server.start()
        poll(lambda: level.store(keys, data))
        self.assertTrue(level.adapter.report_status()["is_healthy"])


if __name__ == "__main__":
    print(f"LMCache {lmcache.__version__}", file=sys.stderr)
    unittest.main()
