"""Chunks by key, of any size, with a server that may be slow, full or away."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
import unittest
import unittest.mock
from typing import Any, Callable

import kvtier
import numpy as np
from kvtier.breaker import CircuitBreaker
from kvtier.chunk_options import ChunkOptions
from kvtier.chunks import MAX_PAGE_BYTES, ChunkGroup, ChunkStore
from kvtier.identity import make_identity
from server import PATIENCE, Server, ServerTest, succeeds_in_fork, wait_until

SIZES = (1, 4095, 40_000, MAX_PAGE_BYTES, MAX_PAGE_BYTES + 1, 2 * MAX_PAGE_BYTES - 3)


def chunk(seed: int, size: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def key(number: int, size: int = 36) -> bytes:
    return number.to_bytes(size, "little")


def setUpModule() -> None:
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)  # of what these tests provoke


class ChunkCase(unittest.TestCase):
    data_plane = True

    def store(self, server: Server, **options: Any) -> ChunkStore:
        options = {"timeout": PATIENCE, "lookup_timeout": PATIENCE, **options}
        store = ChunkStore(
            ChunkOptions(server=server.address, data_plane=self.data_plane, **options)
        )
        self.addCleanup(store.close)
        return store

    def put(self, group: ChunkGroup, seeds: list[int]) -> list[bool]:
        chunks = [chunk(seed, group.chunk_bytes) for seed in seeds]
        return group.put([key(seed) for seed in seeds], chunks).result(PATIENCE)

    def get(self, group: ChunkGroup, seeds: list[int]) -> list[bool]:
        """Returns which were read, each of which must be what was put."""
        into = np.zeros((len(seeds), group.chunk_bytes), np.uint8)
        read = group.get([key(seed) for seed in seeds], list(into)).result(PATIENCE)
        for seed, row, good in zip(seeds, into, read, strict=True):
            if good:
                np.testing.assert_array_equal(row, chunk(seed, group.chunk_bytes))
        return read


class ChunksTest(ServerTest, ChunkCase):
    def test_chunks_of_any_size_come_back_bit_for_bit(self) -> None:
        writer, reader = self.store(self.server), self.store(self.server, io_threads=2)
        for size in SIZES:
            with self.subTest(size=size):
                self.assertEqual(self.put(writer.group("sizes", size), [1, 2, 3]), [True] * 3)
                group = reader.group("sizes", size)
                self.assertEqual(self.get(group, [2, 9, 1, 3]), [True, False, True, True])
        statistics = reader.statistics()
        self.assertEqual(statistics.read_chunks, 3 * len(SIZES))
        self.assertEqual(statistics.missed_chunks, len(SIZES))
        self.assertEqual(writer.statistics().stored_chunks, 3 * len(SIZES))

    def test_neighbours_of_a_buffer_are_left_alone(self) -> None:
        size = MAX_PAGE_BYTES + 1
        group = self.store(self.server).group("neighbours", size)
        self.put(group, [5])
        memory = np.zeros(3 * size, np.uint8)
        self.assertEqual(group.get([key(5)], [memory[size : 2 * size]]).result(PATIENCE), [True])
        np.testing.assert_array_equal(memory[size : 2 * size], chunk(5, size))
        self.assertFalse(memory[:size].any() or memory[2 * size :].any())

    def test_batches_answer_in_the_order_of_their_keys(self) -> None:
        group = self.store(self.server, batch_bytes=3000).group("batches", 1000)
        self.assertEqual(self.put(group, list(range(0, 50, 2))), [True] * 25)
        asked = [int(n) for n in np.random.default_rng(1).permutation(50)]
        self.assertEqual(self.get(group, asked), [n % 2 == 0 for n in asked])
        self.assertEqual(group.contains([key(n) for n in asked]), [n % 2 == 0 for n in asked])
        self.assertEqual(group.put([], []).result(PATIENCE), [])
        self.assertEqual(group.contains([]), [])

    def test_a_prefix_ends_at_the_first_miss(self) -> None:
        group = self.store(self.server).group("prefix", 16)
        present = list(range(5000))
        self.put(group, present)
        keys = [key(n) for n in present]
        self.assertEqual(group.count_prefix(keys), 5000)  # more than a call takes
        self.assertEqual(group.count_prefix(keys[:4097] + [key(9999)] + keys[4097:]), 4097)
        self.assertEqual(group.count_prefix([key(9999), *keys]), 0)
        self.assertEqual(group.count_prefix([]), 0)

    def test_a_key_is_stored_once(self) -> None:
        group = self.store(self.server).group("once", 100)
        same = chunk(1, 100)
        self.assertEqual(group.put([key(1)] * 3, [same] * 3).result(PATIENCE), [True] * 3)
        self.assertEqual(self.get(group, [1, 1]), [True, True])

    def test_segments_of_a_chunk_may_lie_anywhere(self) -> None:
        store = self.store(self.server, batch_bytes=60_000)
        for segments, segment_bytes in ((2, 10_000), (7, 33), (2, MAX_PAGE_BYTES + 5)):
            group = store.group("segments", segments * segment_bytes, segments)
            keys = [key(n) for n in range(5)]
            data = [chunk(n, segment_bytes) for n in range(5 * segments)]
            self.assertEqual(group.put(keys, data).result(PATIENCE), [True] * 5)
            memory = np.zeros((5 * segments, 2 * segment_bytes), np.uint8)
            into = [row[:segment_bytes] for row in memory]
            self.assertEqual(group.get(keys, into).result(PATIENCE), [True] * 5)
            np.testing.assert_array_equal(memory[:, :segment_bytes], data)
            self.assertFalse(memory[:, segment_bytes:].any())
            whole = store.group("segments", segments * segment_bytes)
            self.assertEqual(whole.contains(keys), [False] * 5)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "divisor of 10, .* found 3"):
            store.group("segments", 10, 3)

    def test_a_segment_is_read_whichever_is_locked(self) -> None:
        size = 1000
        group = self.store(self.server).group("locked segments", 2 * size, 2)
        data = [chunk(n, size) for n in range(2)]
        self.assertEqual(group.put([key(1)], data).result(PATIENCE), [True])
        segments = [group.segment(i) for i in range(2)]
        into = np.zeros(size, np.uint8)
        for locked in (group, *segments):
            self.assertEqual(locked.lock([key(1)]).result(PATIENCE), [True])
            for segment, expected in zip(segments, data):
                self.assertEqual(segment.get([key(1)], [into]).result(PATIENCE), [True])
                np.testing.assert_array_equal(into, expected)
            locked.unlock([key(1)]).result(PATIENCE)

    def test_keys_of_any_length_differ(self) -> None:
        group = self.store(self.server).group("lengths", 8)
        keys = [b"", b"\0", b"\0\0", b"k" * 64, b"k" * 65, b"k" * 1000]
        data = [chunk(i, 8) for i in range(len(keys))]
        self.assertTrue(all(group.put(keys, data).result(PATIENCE)))
        into = [np.zeros(8, np.uint8) for _ in keys]
        self.assertTrue(all(group.get(keys, into).result(PATIENCE)))
        np.testing.assert_array_equal(into, data)

    def test_identities_and_sizes_do_not_meet(self) -> None:
        store = self.store(self.server)
        self.put(store.group("one", 2 * MAX_PAGE_BYTES), [1])
        # Of the same size of pages.
        self.assertEqual(self.get(store.group("one", MAX_PAGE_BYTES), [1]), [False])
        self.assertEqual(self.get(store.group("two", 2 * MAX_PAGE_BYTES), [1]), [False])
        self.assertEqual(store.group("two", 2 * MAX_PAGE_BYTES).contains([key(1)]), [False])

    def test_a_chunk_is_there_when_all_its_parts_are(self) -> None:
        size = 2 * MAX_PAGE_BYTES
        group = self.store(self.server).group("parts", size)
        with kvtier.Client(self.server.address) as client:
            with client.open_pages(f"parts/{size}", MAX_PAGE_BYTES) as pages:
                part = chunk(1, size)[:MAX_PAGE_BYTES]
                pages.put([kvtier.PagePut(key(1), 0, part)])
                self.assertEqual(group.contains([key(1)]), [False])
                self.assertEqual(self.get(group, [1]), [False])
                self.assertEqual(self.put(group, [1]), [True])
                self.assertEqual(self.get(group, [1]), [True])

    def test_wrong_buffers_are_refused(self) -> None:
        group = self.store(self.server).group("refused", 10)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "chunk: expected 10 bytes, found 9"):
            group.put([key(1)], [bytes(9)])
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "10 bytes, found 10 bytes, read-only"):
            group.get([key(1)], [bytes(10)])
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected 1 for each of 2 keys, found 1"):
            group.get([key(1), key(2)], [bytearray(10)])
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "chunk_bytes: expected at least 1"):
            self.store(self.server).group("refused", 0)
        with self.assertRaises(kvtier.InvalidArgumentError):
            self.store(self.server).group("x" * 200, 10)

    def test_threads_share_a_store(self) -> None:
        store = self.store(self.server)
        failures: list[str] = []

        def work(number: int) -> None:
            group = store.group("threads", 5000 + number % 2)
            seeds = [100 * number + i for i in range(20)]
            if not all(self.put(group, seeds)) or not all(self.get(group, seeds)):
                failures.append(f"thread {number}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        self.assertEqual(failures, [])

    def test_a_closed_store_has_nothing(self) -> None:
        store = self.store(self.server)
        group = store.group("closed", 100)
        self.put(group, [1])
        store.close()
        store.close()
        self.assertEqual(self.get(group, [1]), [False])
        self.assertEqual(self.put(group, [2]), [False])
        self.assertEqual(group.contains([key(1)]), [False])
        self.assertTrue(group.lock([key(1)]).cancelled())


    def test_a_fork_of_the_process_has_misses(self) -> None:
        store = self.store(self.server, io_threads=1)
        group = store.group("fork", 4096)
        self.put(group, [1])

        def misses() -> bool:
            found = group.get([key(1)], [bytearray(4096)]).result(PATIENCE)
            held = group.lock([key(1)])
            store.close()
            return found == [False] and held.cancelled() and not group.contains([key(1)])[0]

        self.assertTrue(succeeds_in_fork(misses))
        self.assertEqual(self.get(group, [1]), [True])

    def test_the_leases_of_a_store_are_given_back_within_a_second(self) -> None:
        store = self.store(self.server)
        for size in (4096, 8192, 16384):
            store.group("end", size)
        clock, asked = [time.monotonic()], []

        def close(request: Any, timeout: float, metadata: Any) -> None:
            asked.append(timeout)
            clock[0] += timeout  # there is no answer
            raise kvtier.DeadlineExceededError(kvtier.ErrorCode.DEADLINE_EXCEEDED, "late")

        assert store._link is not None
        pages = unittest.mock.Mock(CloseLease=close)
        with unittest.mock.patch.object(store._link.client.connection, "pages", pages):
            with unittest.mock.patch("time.monotonic", lambda: clock[0]):
                store.close()
        self.assertLessEqual(sum(asked), 1.0 + 1e-6)


class GrpcChunksTest(ChunksTest):
    """The same over gRPC."""

    data_plane = False


class FullServerTest(ServerTest, ChunkCase):
    options = ("--page-arena-mib", "8")

    def test_locked_chunks_stay_and_the_others_make_room(self) -> None:
        group = self.store(self.server).group("full", 1 << 20)
        self.assertEqual(self.put(group, [1, 2]), [True, True])
        keys = [key(1), key(2), key(3)]
        self.assertEqual(group.lock(keys).result(PATIENCE), [True, True, False])
        for seed in range(10, 40):
            self.put(group, [seed])
        self.assertEqual(self.get(group, [1, 2]), [True, True])
        self.assertEqual(group.contains([key(10)]), [False])
        # With nothing but locked chunks, nothing more is stored.
        held = [seed for seed in range(10, 40) if group.contains([key(seed)]) == [True]]
        self.assertTrue(all(group.lock([key(seed) for seed in held]).result(PATIENCE)))
        self.assertFalse(any(self.put(group, list(range(50, 60)))[-1:]))
        self.assertEqual(self.get(group, [1]), [True])
        # Unlocked, they make room again.
        group.unlock([key(seed) for seed in (1, 2, 3, *held)]).result(PATIENCE)
        for seed in range(60, 80):
            self.assertEqual(self.put(group, [seed]), [True])
        self.assertEqual(group.contains([key(1), key(2)]), [False, False])

    def test_a_lock_lasts_until_as_many_unlocks(self) -> None:
        group = self.store(self.server).group("twice", 1 << 20)
        self.put(group, [1])
        for _ in range(2):
            group.lock([key(1)]).result(PATIENCE)
        group.unlock([key(1)]).result(PATIENCE)
        for seed in range(10, 30):
            self.put(group, [seed])
        self.assertEqual(self.get(group, [1]), [True])
        group.unlock([key(1)]).result(PATIENCE)
        for seed in range(30, 50):
            self.put(group, [seed])
        self.assertEqual(self.get(group, [1]), [False])


class FaultTest(ChunkCase):
    """A server of its own for each case."""

    def setUp(self) -> None:
        self.server = Server()
        self.addCleanup(self.server.close)

    def test_a_server_that_is_killed_is_a_miss_and_comes_back(self) -> None:
        store = self.store(self.server, retry_after=0.01)
        group = store.group("killed", 100_000)
        self.assertEqual(self.put(group, [1]), [True])
        self.server.kill()
        for _ in range(3):
            self.assertEqual(self.get(group, [1]), [False])
            self.assertEqual(self.put(group, [2]), [False])
            self.assertEqual(group.contains([key(1)]), [False])
            self.assertEqual(group.count_prefix([key(1)]), 0)
            self.assertEqual(group.lock([key(1)]).result(PATIENCE), [False])
            group.unlock([key(1)]).result(PATIENCE)
        self.server.start()
        self.until(lambda: self.put(group, [1]) == [True])
        self.assertEqual(self.get(group, [1]), [True])

    def test_a_restart_between_two_calls_costs_no_trial(self) -> None:
        store = self.store(self.server, retry_after=1000.0)
        group = store.group("restarted", 100_000)
        self.put(group, [1])
        self.assertEqual(group.lock([key(1)]).result(PATIENCE), [True])
        self.server.kill()
        self.server.start()
        self.assertEqual(self.get(group, [1]), [False])  # pages are in memory alone
        self.assertEqual(self.put(group, [1]), [True])
        self.assertEqual(self.get(group, [1]), [True])
        group.unlock([key(1)]).result(PATIENCE)  # of a lock that ended with the server
        self.assertEqual(store.statistics().skipped_calls, 0)

    def test_a_server_that_stands_still_is_a_miss_within_the_timeout(self) -> None:
        store = self.store(self.server, timeout=3.0, lookup_timeout=3.0, retry_after=1000.0)
        group = store.group("stopped", 100_000)
        self.put(group, [1])
        self.server.pause()
        try:
            results = [group.get([key(1)], [bytearray(100_000)]) for _ in range(8)]
            for result in results:
                self.assertEqual(result.result(PATIENCE), [False])
            failed = store.statistics().failed_calls
            self.assertLessEqual(failed, 4)  # one for each thread; others were not made
            for _ in range(100):
                self.assertEqual(group.contains([key(1)]), [False])
            self.assertEqual(store.statistics().failed_calls, failed)
            store.close()
        finally:
            self.server.resume()

    def test_a_server_that_goes_on_is_used_again(self) -> None:
        store = self.store(self.server, timeout=1.0, lookup_timeout=1.0, retry_after=0.01)
        group = store.group("goes on", 100_000)
        self.until(lambda: self.put(group, [1]) == [True])
        self.server.pause()
        try:
            self.assertEqual(self.get(group, [1]), [False])
        finally:
            self.server.resume()
        self.until(lambda: self.get(group, [1]) == [True])

    def test_a_server_may_start_after_the_store(self) -> None:
        self.server.kill()
        store = self.store(self.server, retry_after=0.01)
        group = store.group("late", 1000)
        self.assertEqual(self.put(group, [1]), [False])
        self.server.start()
        self.until(lambda: self.put(group, [1]) == [True])

    def test_what_a_server_refuses_is_an_error_at_the_start(self) -> None:
        for options, error in (
            (("--page-arena-mib", "0"), kvtier.FailedPreconditionError),
            (("--tenants", self.tenants()), kvtier.UnauthenticatedError),
        ):
            other = Server(*options)
            self.addCleanup(other.close)
            with self.assertRaises(error):
                self.store(other).group("refused", 1000)

    def tenants(self) -> str:
        path = f"{self.server.folder.name}/tenants.json"
        with open(path, "w") as file:
            json.dump({"tenants": [{"name": "a", "token_sha256": "0" * 64}]}, file)
        return path

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(self, condition)


class GrpcFaultTest(FaultTest):
    data_plane = False


class OptionsTest(unittest.TestCase):
    def test_options_are_those_of_a_mapping(self) -> None:
        options = ChunkOptions.parse({"server": "unix:/x", "timeout": 1, "insecure_tcp": True})
        self.assertEqual((options.server, options.timeout), ("unix:/x", 1))
        self.assertEqual(ChunkOptions.parse({}), ChunkOptions())

    def test_wrong_options_are_refused_by_name(self) -> None:
        for options, message in (
            ({"servr": "unix:/x"}, 'found "servr", did you mean "server"'),
            ({"surely": 1}, 'expected server, token_file, .*, found "surely"$'),
            ({"timeout": "1"}, "timeout: expected a number, found '1'"),
            ({"timeout": 0}, "timeout: expected above 0 s, found 0"),
            ({"timeout": float("nan")}, "timeout: expected above 0 s, found nan"),
            ({"retry_after": -1.0}, "retry_after: expected above 0 s"),
            ({"io_threads": 2.5}, "io_threads: expected an integer, found 2.5"),
            ({"io_threads": True}, "io_threads: expected an integer, found True"),
            ({"io_threads": 65}, "io_threads: expected 1 to 64, found 65"),
            ({"batch_bytes": 0}, "batch_bytes: expected at least 1, found 0"),
            ({"data_plane": 1}, "data_plane: expected true or false, found 1"),
        ):
            with self.subTest(options=options):
                with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                    ChunkOptions.parse(options)

    def test_addresses_and_files_are_looked_at_at_the_start(self) -> None:
        for options in (
            {"server": "localhost:80"},
            {"server": "tcp:localhost:80"},
            {"token_file": "/nowhere"},
        ):
            with self.subTest(options=options), self.assertRaises(kvtier.InvalidArgumentError):
                ChunkStore(ChunkOptions.parse(options))
        with tempfile.NamedTemporaryFile() as token:
            token.write(b"\xff")
            token.flush()
            options = {"token_file": token.name}
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, "token_file: expected a readable"):
                ChunkStore(ChunkOptions.parse(options))


class BreakerTest(unittest.TestCase):
    def setUp(self) -> None:
        self.now = 0.0
        self.breaker = CircuitBreaker(5.0, lambda: self.now)

    def test_a_trial_passes_after_a_while(self) -> None:
        self.assertTrue(self.breaker.allow())
        self.assertTrue(self.breaker.fail())
        self.assertFalse(self.breaker.fail())
        for self.now in (0.0, 4.9):
            self.assertFalse(self.breaker.allow())
        self.now = 5.0
        self.assertEqual([self.breaker.allow() for _ in range(3)], [True, False, False])
        self.now = 10.0  # the trial has ended in neither
        self.assertTrue(self.breaker.allow())

    def test_success_closes_it(self) -> None:
        self.assertFalse(self.breaker.succeed())
        self.breaker.fail()
        self.assertTrue(self.breaker.succeed())
        self.assertTrue(self.breaker.allow() and self.breaker.allow())


class IdentityTest(unittest.TestCase):
    def test_it_is_the_same_everywhere(self) -> None:
        # Of `printf '{"block":16,"model":"m\\u00e9"}' | sha256sum`.
        expected = "vllm-1-" + "5ab148d5134e940346e60292a6828e61885c483cf6f2fd7053fada6834f287e3"
        self.assertEqual(make_identity("vllm", {"model": "mé", "block": 16}), expected)
        self.assertEqual(make_identity("vllm", {"block": 16, "model": "mé"}), expected)

    def test_every_field_counts(self) -> None:
        fields: dict[str, Any] = {"model": "m", "tp": [0, 2], "layout": {"a": None, "b": True}}
        found = {make_identity("e", fields), make_identity("f", fields)}
        for name, value in (("model", "n"), ("tp", [1, 2]), ("tp", [0, 2, 0]), ("new", 1)):
            found.add(make_identity("e", {**fields, name: value}))
        self.assertEqual(len(found), 6)
        self.assertTrue(all(len(each) <= 96 for each in found))

    def test_what_json_does_not_keep_is_refused(self) -> None:
        for value in (1.5, b"x", object(), {1: 2}, [b"x"]):
            with self.assertRaises(TypeError):
                make_identity("e", {"x": value})  # type: ignore[dict-item]
        for engine in ("", "x" * 25, "é"):
            with self.assertRaises(ValueError):
                make_identity(engine, {})


if __name__ == "__main__":
    unittest.main()
