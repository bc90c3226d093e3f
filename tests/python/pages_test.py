"""The page cache through the client."""

from __future__ import annotations

import gc
import struct
import threading
import unittest
import unittest.mock
from typing import Any

import kvtier
import numpy as np
from kvtier import frames
from kvtier.arena import Arena
from kvtier.data_plane import Channel
from server import ServerTest

PAGE = 40_000  # bytes, no multiple of anything


def page(seed: int, size: int = PAGE) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


class PagesTest(ServerTest):
    """Through memory that is shared with the server."""

    data_plane = True

    def setUp(self) -> None:
        self.client = kvtier.Client(self.server.address, data_plane=self.data_plane)
        self.addCleanup(self.client.close)

    def open(self, model: str, size: int = PAGE) -> kvtier.RemotePages:
        pages = self.client.open_pages(model, size)
        self.addCleanup(pages.close)
        return pages

    def put(self, pages: kvtier.RemotePages, seeds: list[int]) -> list[str]:
        handles = []
        for outcome in pages.put([kvtier.PagePut(digest(s), 0, page(s)) for s in seeds]):
            assert isinstance(outcome, kvtier.FoundPage), outcome
            handles.append(outcome.handle)
        return handles

    def test_what_one_client_puts_another_gets(self) -> None:
        writer = self.open("exchange")
        self.put(writer, [1, 2, 3])
        writer.close()
        with kvtier.Client(self.server.address, data_plane=self.data_plane) as other:
            with other.open_pages("exchange", PAGE) as reader:
                found = reader.lookup([digest(s) for s in (1, 2, 9, 3)], [0])
                self.assertEqual(len(found), 2)  # up to the first miss
                for seed, outcome in zip((1, 2), reader.get([f.handle for f in found])):
                    assert isinstance(outcome, np.ndarray), outcome
                    np.testing.assert_array_equal(outcome, page(seed))

    def test_a_page_larger_than_a_message_of_a_transfer_arrives_whole(self) -> None:
        size = (4 << 20) - 12_345
        pages = self.open("large", size)
        data = page(5, size)
        (stored,) = pages.put([kvtier.PagePut(digest(5), 0, data)])
        assert isinstance(stored, kvtier.FoundPage), stored
        (found,) = pages.get([stored.handle])
        assert isinstance(found, np.ndarray), found
        np.testing.assert_array_equal(found, data)

    def test_pages_go_to_the_buffers_of_the_caller(self) -> None:
        pages = self.open("into")
        handles = self.put(pages, [1, 2, 3])
        memory = np.zeros((5, PAGE), np.uint8)
        buffers = [memory[1], bytearray(PAGE), memoryview(memory[3])]
        found = pages.get(handles, into=buffers)
        for seed, outcome, buffer in zip((1, 2, 3), found, buffers, strict=True):
            assert isinstance(outcome, np.ndarray), outcome
            self.assertTrue(np.shares_memory(outcome, np.frombuffer(buffer, np.uint8)))
            np.testing.assert_array_equal(np.frombuffer(buffer, np.uint8), page(seed))
        for row in (0, 2, 4):  # of no page
            self.assertFalse(memory[row].any())
        halves = np.zeros((2, PAGE // 2), np.uint16)[:, : PAGE // 4].copy()  # PAGE bytes in two rows
        (outcome,) = pages.get(handles[:1], into=[halves])
        self.assertEqual(halves.tobytes(), page(1).tobytes())

    def test_a_page_that_has_gone_leaves_the_buffers_of_others_alone(self) -> None:
        pages = self.open("into gone")
        first, second = self.put(pages, [1, 2])
        pages.remove([first])
        memory = np.zeros((2, PAGE), np.uint8)
        gone, there = pages.get([first, second], into=list(memory))
        assert isinstance(gone, kvtier.NotFoundError), gone
        assert isinstance(there, np.ndarray), there
        np.testing.assert_array_equal(memory[1], page(2))

    def test_buffers_that_cannot_take_a_page_are_refused(self) -> None:
        pages = self.open("into refused")
        handles = self.put(pages, [1])
        wrong: list[tuple[Any, str]] = [
            ([], "expected 1 buffers, found 0"),
            ([bytearray(7)], f"expected .* {PAGE} bytes, found 7 bytes, writable, contiguous"),
            ([bytes(PAGE)], "read-only"),
            ([np.zeros((PAGE, 2), np.uint8)[:, 0]], "not contiguous"),
            ([memoryview(bytearray(2 * PAGE))[::2]], "expected a writable contiguous buffer"),
        ]
        for buffers, message in wrong:
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                pages.get(handles, into=buffers)

    def test_each_hash_is_found_for_itself(self) -> None:
        pages = self.open("single keys")
        for outcome in pages.put(
            [kvtier.PagePut(digest(s), layer, page(s)) for s in range(0, 300, 3) for layer in (0, 1)]
            + [kvtier.PagePut(digest(1), 1, page(1))]  # one layer of two
        ):
            self.assertIsInstance(outcome, kvtier.FoundPage)
        random = np.random.default_rng(5)
        for size in (0, 1, 5, 64, 65, 300):
            asked = [int(s) for s in random.permutation(300)[:size]]
            hashes = [digest(s) for s in asked]
            self.assertEqual(pages.contains(hashes, [0, 1]), [s % 3 == 0 for s in asked])
            for seed, found in zip(asked, pages.find(hashes, [0, 1]), strict=True):
                expected = pages.lookup([digest(seed)], [0, 1])
                self.assertEqual(found or [], expected)
        stored = [digest(s) for s in range(0, 300, 3)]
        self.assertEqual(pages.contains(stored + stored, [0, 1]), [True] * 200)
        self.assertEqual(pages.contains([digest(1)], [1]), [True])
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "layers: expected 1 to 4096, found 0"):
            pages.contains(stored, [])

    def test_what_is_found_can_be_pinned(self) -> None:
        pages = self.open("found and pinned")
        self.put(pages, [2, 4])
        found = pages.find([digest(s) for s in (1, 2, 3, 4)], [0], pin=True)
        self.assertEqual([each is None for each in found], [True, False, True, False])
        handles = [each[0].handle for each in found if each is not None]
        self.assertEqual(pages.unpin(handles), [None, None])
        self.assertIsInstance(pages.unpin(handles)[0], kvtier.FailedPreconditionError)

    def test_calls_within_a_deadline_end_by_it(self) -> None:
        pages = self.open("deadline")
        handles = self.put(pages, [1])
        with self.client.connection.deadline(0.0):
            with self.assertRaises(kvtier.DeadlineExceededError):
                pages.contains([digest(1)], [0])
            with self.client.connection.deadline(100.0):  # no longer than the one around it
                with self.assertRaises(kvtier.ClientError):
                    pages.get(handles)
        self.assertEqual(pages.contains([digest(1)], [0]), [True])

    def test_a_page_that_is_there_is_not_written_again(self) -> None:
        pages = self.open("again")
        (handle,) = self.put(pages, [7])
        (outcome,) = pages.put([kvtier.PagePut(digest(7), 0, page(8))])
        assert isinstance(outcome, kvtier.FoundPage)
        self.assertTrue(outcome.existed)
        (found,) = pages.get([outcome.handle])
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, page(7))

    def test_results_are_per_page(self) -> None:
        pages = self.open("removed")
        first, second = self.put(pages, [1, 2])
        self.assertEqual(pages.remove([first]), [None])
        gone, there = pages.get([first, second])
        assert isinstance(gone, kvtier.NotFoundError), gone
        self.assertEqual(gone.reason, "PAGE_GONE")
        assert isinstance(there, np.ndarray)
        np.testing.assert_array_equal(there, page(2))
        (error,) = pages.unpin([second])
        assert isinstance(error, kvtier.FailedPreconditionError), error
        self.assertEqual(error.reason, "NOT_PINNED")

    def test_pins_belong_to_the_lease(self) -> None:
        pages = self.open("pinned")
        self.put(pages, [3])
        (found,) = pages.lookup([digest(3)], [0], pin=True)
        self.assertEqual(pages.unpin([found.handle]), [None])
        self.assertIsInstance(pages.unpin([found.handle])[0], kvtier.FailedPreconditionError)

    def test_pages_are_pinned_by_their_handles(self) -> None:
        pages = self.open("by handle")
        first, second = self.put(pages, [3, 4])
        self.assertEqual(pages.remove([second]), [None])
        found, gone = pages.pin([first, second])
        assert isinstance(found, kvtier.FoundPage)
        self.assertEqual(found, pages.lookup([digest(3)], [0])[0])
        assert isinstance(gone, kvtier.NotFoundError)
        self.assertEqual(gone.reason, "PAGE_GONE")
        self.assertEqual(pages.pin([first])[0], found)
        self.assertEqual(pages.unpin([first]) + pages.unpin([first]), [None, None])
        self.assertIsInstance(pages.unpin([first])[0], kvtier.FailedPreconditionError)

    def test_a_wrong_size_is_refused_before_anything_is_reserved(self) -> None:
        pages = self.open("size")
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected 40000 bytes, found 7"):
            pages.put([kvtier.PagePut(digest(1), 0, b"1234567")])
        self.assertEqual(pages.lookup([digest(1)], [0]), [])
        with self.assertRaises(kvtier.InvalidArgumentError):
            self.client.open_pages("size", 5 << 20)

    def test_models_and_sizes_do_not_meet(self) -> None:
        self.put(self.open("one"), [4])
        self.assertEqual(self.open("two").lookup([digest(4)], [0]), [])
        self.assertEqual(self.open("one", PAGE + 8).lookup([digest(4)], [0]), [])

    def test_clients_that_put_the_same_agree_on_one_page(self) -> None:
        results: dict[int, list[Any]] = {}

        def work(client: int) -> None:
            pages = self.open("agreed")
            results[client] = [
                pages.put([kvtier.PagePut(digest(s), 0, page(s))])[0] for s in range(30)
            ]

        threads = [threading.Thread(target=work, args=(client,)) for client in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for first, second in zip(results[0], results[1], strict=True):
            assert isinstance(first, kvtier.FoundPage), first
            assert isinstance(second, kvtier.FoundPage), second
            self.assertEqual(first.handle, second.handle)
            self.assertNotEqual(first.existed, second.existed)
        found = self.open("agreed").get([outcome.handle for outcome in results[0]])
        for seed, data in enumerate(found):
            assert isinstance(data, np.ndarray), data
            np.testing.assert_array_equal(data, page(seed))

    def test_a_closed_lease_refuses_calls(self) -> None:
        pages = self.open("closed")
        pages.close()
        pages.close()
        calls: list[Any] = [
            lambda: pages.lookup([digest(1)], [0]),
            lambda: pages.find([digest(1)], [0]),
            lambda: pages.get(["handle"]),
            lambda: pages.remove(["handle"]),
        ]
        for call in calls:
            with self.assertRaisesRegex(
                kvtier.FailedPreconditionError,
                "lease: expected an open one, found one that is closed",
            ):
                call()
        gc.collect()


class GrpcPagesTest(PagesTest):
    """The same over gRPC."""

    data_plane = False


class SharedPagesTest(ServerTest):
    def test_pages_need_no_transfers(self) -> None:
        size = 1 << 20
        with kvtier.Client(self.server.address) as client:
            session = client.open(
                kvtier.ModelConfig(layers=1, query_heads=1, kv_heads=1, head_dim=64)
            )
            row = np.ones((1, 1, 64), np.float32)
            session.append(0, row, row)  # attaches before there are pages
            with client.open_pages("shared", size) as pages:
                client.connection.transfer = None  # type: ignore[assignment]
                data = [page(seed, size) for seed in range(20)]  # more than the region takes at once
                stored = pages.put([kvtier.PagePut(digest(s), 0, d) for s, d in enumerate(data)])
                handles = [outcome.handle for outcome in stored]  # type: ignore[union-attr]
                for found, expected in zip(pages.get(handles), data, strict=True):
                    assert isinstance(found, np.ndarray), found
                    np.testing.assert_array_equal(found, expected)
            session.close()

    def test_pages_before_a_connection_that_ends_are_stored_once(self) -> None:
        size = 1 << 20
        exchange = Channel.exchange
        writes = 0

        def cut(channel: Channel, type: int, control: bytes, flags: int = 0) -> Any:
            nonlocal writes
            writes += type == frames.WRITE_PAGES
            if writes == 2:
                channel.broken = True
                raise kvtier.UnavailableError(kvtier.ErrorCode.UNAVAILABLE, "cut")
            return exchange(channel, type, control, flags)

        puts = [kvtier.PagePut(digest(s), 0, page(s, size)) for s in range(20)]
        with (
            kvtier.Client(self.server.address) as client,
            client.open_pages("cut", size) as pages,
            unittest.mock.patch.object(Channel, "exchange", cut),
        ):
            outcomes = pages.put(puts)
        self.assertEqual(writes, 2)  # the rest goes over gRPC
        self.assertEqual([type(each) for each in outcomes], [kvtier.FoundPage] * len(puts))


class ArenaTest(unittest.TestCase):
    """Memory laid out as services/wire/page_layout.h says."""

    UNITS = 8

    def arena(self) -> Any:
        begin = 2 * 4096  # behind the header and a unit of page headers
        memory = np.zeros(begin + self.UNITS * 4096, np.uint8)
        head = struct.pack("<QIIQQQ", int.from_bytes(b"KVTPAGE1", "little"), 1, 7, self.UNITS, begin, len(memory))
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        entry = struct.pack("<QQI", 2 * 5, 5000, 0)
        memory[4096 + 64 * 3 : 4096 + 64 * 3 + len(entry)] = np.frombuffer(entry, np.uint8)
        memory[begin + 3 * 4096 : begin + 3 * 4096 + 5000] = page(1, 5000)
        return memory

    def test_a_page_is_copied_while_its_generation_lasts(self) -> None:
        memory = self.arena()
        arena = Arena(memory)
        found = np.empty(5000, np.uint8)
        self.assertTrue(arena.copy(3, 5, found))
        np.testing.assert_array_equal(found, page(1, 5000))
        for slot, generation, size in ((3, 4, 5000), (3, 5, 4999), (2, 5, 5000), (8, 5, 5000)):
            self.assertFalse(arena.copy(slot, generation, np.empty(size, np.uint8)))
        memory[4096 + 64 * 3] += 1  # as when the page goes
        self.assertFalse(arena.copy(3, 5, found))

    def test_bytes_that_are_none_are_refused(self) -> None:
        for at in (0, 8, 16, 24, 32):
            memory = self.arena()
            memory[at] ^= 1
            with self.assertRaises(frames.FrameError):
                Arena(memory)
        for size in (0, 4095, 4096, len(self.arena()) - 1):
            with self.assertRaises(frames.FrameError):
                Arena(self.arena()[:size])


if __name__ == "__main__":
    unittest.main()
