"""The page cache through the client."""

from __future__ import annotations

import gc
import unittest
from typing import Any

import kvtier
import numpy as np
from server import ServerTest

PAGE = 40_000  # bytes, no multiple of anything


def page(seed: int, size: int = PAGE) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


class PagesTest(ServerTest):
    def setUp(self) -> None:
        self.client = kvtier.Client(self.server.address)
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
        with kvtier.Client(self.server.address) as other:
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

    def test_a_closed_lease_is_unknown(self) -> None:
        pages = self.open("closed")
        pages.close()
        pages.close()
        with self.assertRaises(kvtier.ClientError):
            pages.lookup([digest(1)], [0])
        gc.collect()


if __name__ == "__main__":
    unittest.main()
