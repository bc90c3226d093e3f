"""Page calls as futures and coroutines."""

from __future__ import annotations

import asyncio
import threading
import unittest
from typing import Any

import kvtier
import numpy as np
from server import PATIENCE, ServerTest, succeeds_in_fork

PAGE = 40_000


def page(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, PAGE, np.uint8)


def puts(seeds: list[int]) -> list[kvtier.PagePut]:
    return [kvtier.PagePut(bytes([s]), 0, page(s)) for s in seeds]


class PageCallsTest(ServerTest):
    def setUp(self) -> None:
        self.client = kvtier.Client(self.server.address)
        self.addCleanup(self.client.close)

    def open(self, model: str) -> kvtier.RemotePages:
        pages = self.client.open_pages(model, PAGE)
        self.addCleanup(pages.close)
        return pages

    def test_futures_have_what_the_calls_return(self) -> None:
        pages = self.open("futures")
        with kvtier.PageFutures(pages) as calls:
            batches = [list(range(first, first + 5)) for first in range(0, 50, 5)]
            for future in [calls.put(puts(batch)) for batch in batches]:
                for outcome in future.result(PATIENCE):
                    self.assertIsInstance(outcome, kvtier.FoundPage)
            hashes = [bytes([s]) for s in range(60)]
            self.assertEqual(calls.contains(hashes, [0]).result(PATIENCE), [s < 50 for s in range(60)])
            found = calls.lookup(hashes, [0], pin=True).result(PATIENCE)
            self.assertEqual(len(found), 50)
            self.assertEqual(calls.find(hashes[48:52], [0]).result(PATIENCE)[1], [found[49]])
            buffers = [np.zeros(PAGE, np.uint8) for _ in found]
            reads = [
                calls.get([each.handle], [buffer]) for each, buffer in zip(found, buffers)
            ]
            for seed, (read, buffer) in enumerate(zip(reads, buffers)):
                read.result(PATIENCE)
                np.testing.assert_array_equal(buffer, page(seed))
            handles = [each.handle for each in found]
            self.assertEqual(calls.unpin(handles).result(PATIENCE), [None] * 50)
            (pinned,) = calls.pin(handles[:1]).result(PATIENCE)
            self.assertEqual(pinned, found[0])
            self.assertEqual(calls.remove(handles[:1]).result(PATIENCE), [None])
        with self.assertRaises(RuntimeError):
            calls.contains(hashes, [0])

    def test_errors_are_those_of_the_calls(self) -> None:
        with kvtier.PageFutures(self.open("errors")) as calls:
            future = calls.put([kvtier.PagePut(b"x", 0, b"short")])
            self.assertIsInstance(future.exception(PATIENCE), kvtier.InvalidArgumentError)
        for threads in (0, 65):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, "threads: expected 1 to 64"):
                kvtier.PageFutures(self.open("errors"), threads)

    def test_a_fork_is_refused(self) -> None:
        with kvtier.PageFutures(self.open("fork"), 1) as calls:
            self.assertEqual(calls.contains([b"x"], [0]).result(PATIENCE), [False])

            def refused() -> bool:
                with calls, self.assertRaisesRegex(kvtier.FailedPreconditionError, "found a fork"):
                    calls.contains([b"x"], [0]).result(PATIENCE)
                return True

            self.assertTrue(succeeds_in_fork(refused))
            self.assertEqual(calls.contains([b"x"], [0]).result(PATIENCE), [False])

    def test_a_paused_server_does_not_hold_up_the_event_loop(self) -> None:
        pages = self.open("paused")
        resumed = threading.Timer(PATIENCE, self.server.resume)  # whatever happens
        resumed.start()
        self.addCleanup(resumed.cancel)
        self.addCleanup(self.server.resume)

        async def run() -> int:
            turns = 0
            async with kvtier.AsyncPages(pages) as calls:
                self.server.pause()
                put = asyncio.ensure_future(calls.put(puts([1])))
                for turns in range(100):
                    await asyncio.sleep(0)
                self.assertFalse(put.done())
                self.server.resume()
                (outcome,) = await put
                self.assertIsInstance(outcome, kvtier.FoundPage)
            return turns

        self.assertEqual(asyncio.run(run()), 99)

    def test_coroutines_return_what_the_calls_do(self) -> None:
        pages = self.open("coroutines")

        async def run() -> None:
            async with kvtier.AsyncPages(pages) as calls:
                await asyncio.gather(*(calls.put(puts([seed])) for seed in range(10)))
                hashes = [bytes([s]) for s in range(12)]
                self.assertEqual(await calls.contains(hashes, [0]), [True] * 10 + [False] * 2)
                found = await calls.lookup(hashes, [0])
                each = await calls.find(hashes, [0], pin=True)
                self.assertEqual(each[:10], [[one] for one in found])
                handles = [one.handle for one in found]
                for seed, read in enumerate(await calls.get(handles)):
                    np.testing.assert_array_equal(read, page(seed))
                self.assertEqual(await calls.unpin(handles), [None] * 10)
                self.assertEqual(await calls.pin(handles[:1]), found[:1])
                self.assertEqual(await calls.remove(handles[:1]), [None])
                with self.assertRaises(kvtier.InvalidArgumentError):
                    await calls.contains(hashes, [])

        asyncio.run(run())


if __name__ == "__main__":
    unittest.main()
