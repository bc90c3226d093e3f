"""Sparse decode over a paged cache of the caller, with numpy."""

from __future__ import annotations

import dataclasses
import unittest
from typing import Any

import kvtier
import numpy as np
from embedded_test import HEAD_DIM, KV_HEADS, QUERY_HEADS, TOLERANCE, attention_over, model, rows

BLOCKS, BLOCK_TOKENS, MAX_TOKENS = 64, 16, 512
SINK, RECENT, TOP_K = 4, 8, 32
LENGTHS = (300, 45, 0)

ONE_SET = kvtier.RetrievalConfig(
    selection=kvtier.Selection.PER_SEQUENCE, top_k=TOP_K, sink_tokens=SINK, recent_tokens=RECENT
)


class PagedSketchesTest(unittest.TestCase):
    """Three sequences whose blocks are in a mixed order, in vLLM's layout."""

    def setUp(self) -> None:
        order = iter(np.random.default_rng(5).permutation(BLOCKS).astype(np.int32))
        self.blocks = np.full((len(LENGTHS), MAX_TOKENS // BLOCK_TOKENS), -1, np.int32)
        self.lengths = np.array(LENGTHS, np.int32)
        self.cache = np.full((BLOCKS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM), np.nan, np.float16)
        self.keys = [rows(10 + i, length, KV_HEADS) for i, length in enumerate(LENGTHS)]
        self.values = [rows(20 + i, length, KV_HEADS) for i, length in enumerate(LENGTHS)]
        self.slots = []
        for i, length in enumerate(LENGTHS):
            for block in range(-(-length // BLOCK_TOKENS)):
                self.blocks[i, block] = next(order)
            tokens = np.arange(length)
            slots = self.blocks[i, tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS
            self.slots.append(slots.astype(np.int32))
            self.cache[slots // BLOCK_TOKENS, 0, slots % BLOCK_TOKENS] = self.keys[i]
            self.cache[slots // BLOCK_TOKENS, 1, slots % BLOCK_TOKENS] = self.values[i]
        self.query = rows(3, len(LENGTHS), QUERY_HEADS, np.float32)
        self.batch = (self.query, self.blocks, self.lengths)
        self.halves = (self.cache[:, 0], self.cache[:, 1])

    def filled(self, retrieval: kvtier.RetrievalConfig = ONE_SET) -> Any:
        sketches = kvtier.PagedSketches(
            model(), retrieval, num_blocks=BLOCKS, max_tokens=MAX_TOKENS, max_batch_rows=2,
            backend=kvtier.Backend.CPU,
        )
        self.addCleanup(sketches.close)
        for i, length in enumerate(LENGTHS):
            if length > 0:
                sketches.store(1, self.keys[i], self.values[i], self.slots[i])
        return sketches

    def test_attends_to_what_it_lists(self) -> None:
        for selection in (kvtier.Selection.PER_SEQUENCE, kvtier.Selection.PER_KV_HEAD):
            with self.subTest(selection=selection):
                sketches = self.filled(dataclasses.replace(ONE_SET, selection=selection))
                ids, bias = sketches.select(1, *self.batch, with_bias=True)
                sets = 1 if selection is kvtier.Selection.PER_SEQUENCE else KV_HEADS
                self.assertEqual(ids.shape, (3, sets, SINK + RECENT + TOP_K))
                self.assertGreater(float(bias.max()), 0.0)
                out, lse = sketches.attend(1, *self.batch, *self.halves)
                for i in (0, 1):
                    of_head = [head * sets // QUERY_HEADS for head in range(QUERY_HEADS)]
                    kept = [ids[i, each] >= 0 for each in of_head]
                    expected = attention_over(
                        self.query[i], self.keys[i], self.values[i],
                        [ids[i, each][keep] for each, keep in zip(of_head, kept)],
                        [bias[i, each][keep] for each, keep in zip(of_head, kept)],
                    )
                    np.testing.assert_allclose(out[i], expected, atol=TOLERANCE)
                self.assertTrue(np.all(ids[2] == -1))
                self.assertTrue(np.all(out[2] == 0) and np.all(np.isneginf(lse[2])))

    def test_is_dense_where_k_covers_the_length(self) -> None:
        sketches = self.filled(dataclasses.replace(ONE_SET, top_k=4096))
        out = np.empty((3, QUERY_HEADS, HEAD_DIM), np.float32)
        found = sketches.attend(1, *self.batch, *self.halves, max_length=300, out=out)
        self.assertIs(found.out, out)
        for i in (0, 1):
            every = [np.arange(LENGTHS[i])] * QUERY_HEADS
            expected = attention_over(self.query[i], self.keys[i], self.values[i], every)
            np.testing.assert_allclose(out[i], expected, atol=TOLERANCE)

    def test_what_does_not_fit_is_refused(self) -> None:
        sketches = self.filled()
        query, blocks, lengths = self.batch
        outside = blocks.copy()
        outside[1, 0] = BLOCKS
        for call, message in (
            (
                lambda: sketches.attend(1, query, outside, lengths, *self.halves),
                "blocks: expected ids in 0..63, found 1",
            ),
            (
                lambda: sketches.attend(1, query, blocks[:, :5], lengths, *self.halves),
                "blocks: expected 32 ids or more",
            ),
            (
                lambda: sketches.attend(1, query, blocks, lengths.astype(np.float32), *self.halves),
                "lengths: expected int32",
            ),
            (
                lambda: sketches.attend(1, query, blocks, lengths, *(each[:9] for each in self.halves)),
                "cache.keys: expected fp16",
            ),
            (
                lambda: sketches.store(2, self.keys[1], self.values[1], self.slots[1]),
                "layer: expected 0..1",
            ),
            (
                lambda: sketches.store(1, self.keys[1], self.values[1], self.slots[0]),
                "slots: expected int32",
            ),
            (
                lambda: self.filled(dataclasses.replace(ONE_SET, query_bits=0)),
                "query_bits: expected 4 or 8",
            ),
        ):
            with self.subTest(message), self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                call()
        sketches.close()
        with self.assertRaisesRegex(kvtier.FailedPreconditionError, "closed"):
            sketches.check()


if __name__ == "__main__":
    unittest.main()
