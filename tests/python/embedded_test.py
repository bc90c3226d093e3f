"""kvtier_engine: the engine in this process, against attention in double precision."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from typing import Any

import numpy as np

import kvtier
from kvtier import AttendOptions, LayerConfig, LayerMode, RetrievalConfig
from server import bfloat_bits, dense_attention, from_bits

SKIPPED = 77
ROOT = Path(__file__).resolve().parents[2]

try:
    import kvtier_engine
except ImportError as error:
    print(f"{error}: skipped")
    sys.exit(SKIPPED)

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 64
GROUP = QUERY_HEADS // KV_HEADS
SINK, RECENT = 4, 8
# Keys, values and queries are exact in float16; sums are of float32.
TOLERANCE = 2e-5

NORM_AWARE = RetrievalConfig(
    rule=kvtier.SelectionRule.TOP_K,
    code=kvtier.SketchCode.SIGN,
    top_k=32,
    sink_tokens=SINK,
    recent_tokens=RECENT,
)
PRIORITY = RetrievalConfig(
    rule=kvtier.SelectionRule.PRIORITY,
    code=kvtier.SketchCode.SIGN,
    top_k=32,
    sink_tokens=SINK,
    recent_tokens=RECENT,
)


# A fork calls, closes and ends what its parent has made.
FORKED = """
import os, signal, sys
import numpy as np
import kvtier
shape = kvtier.ModelConfig(layers=1, query_heads=2, kv_heads=1, head_dim=64)
sizes = kvtier.MemoryConfig(host_bytes=16 << 20, max_session_tokens=1024)
engine = kvtier.Engine(shape, memory=sizes, backend=kvtier.Backend.CPU)
session, other = engine.open(), engine.open()
paged = kvtier.PagedSketches(shape, num_blocks=4, max_tokens=64, backend=kvtier.Backend.CPU)
rows = np.ones((100, 1, 64), np.float32)
session.append(0, rows, rows)
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends one that waits for threads of its parent
    refused = 0
    calls = (engine.stats, engine.open, session.length, lambda: session.append(0, rows, rows), paged.check)
    for call in calls:
        try:
            call()
        except kvtier.FailedPreconditionError as error:
            refused += "found a fork of that process" in str(error)
    session.close()
    engine.close()
    sys.exit(refused)
_, status = os.waitpid(child, 0)
session.append(0, rows, rows)
print(os.waitstatus_to_exitcode(status), session.length())
"""


def model(**changes: Any) -> kvtier.ModelConfig:
    settings: dict[str, Any] = {
        "layers": LAYERS,
        "query_heads": QUERY_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "kv_dtype": kvtier.DType.FLOAT16,
    }
    return kvtier.ModelConfig(**{**settings, **changes})


def memory(**changes: Any) -> kvtier.MemoryConfig:
    settings: dict[str, Any] = {
        "host_bytes": 16 << 20,
        "device_bytes": 64 << 20,
        "max_session_tokens": 4096,
    }
    return kvtier.MemoryConfig(**{**settings, **changes})


def rows(seed: int, tokens: int, heads: int, dtype: Any = np.float16) -> Any:
    return np.random.default_rng(seed).standard_normal((tokens, heads, HEAD_DIM)).astype(dtype)


def attention_over(query: Any, keys: Any, values: Any, ids: Any, bias: Any = None) -> Any:
    """Attention of one query token in double precision. `ids`: for each query head the tokens it
    attends to, `bias` what is added to their logits."""
    out = np.empty((QUERY_HEADS, HEAD_DIM))
    for head in range(QUERY_HEADS):
        k = keys[ids[head], head // GROUP].astype(np.float64)
        v = values[ids[head], head // GROUP].astype(np.float64)
        logits = k @ query[head].astype(np.float64) / np.sqrt(HEAD_DIM)
        if bias is not None:
            logits = logits + bias[head]
        weights = np.exp(logits - logits.max())
        out[head] = weights @ v / weights.sum()
    return out


class EngineTest(unittest.TestCase):
    def open(
        self,
        retrieval: RetrievalConfig = NORM_AWARE,
        *,
        shape: kvtier.ModelConfig = model(),
        sizes: kvtier.MemoryConfig = memory(),
    ) -> Any:
        engine = kvtier.Engine(shape, retrieval, sizes, backend=kvtier.Backend.CPU)
        self.addCleanup(engine.close)
        session = engine.open()
        self.addCleanup(session.close)
        return session

    def filled(self, tokens: int, **settings: Any) -> tuple[Any, Any, Any]:
        session = self.open(**settings)
        keys, values = rows(1, tokens, KV_HEADS), rows(2, tokens, KV_HEADS)
        for layer in range(LAYERS):
            session.append(layer, keys, values)
        return session, keys, values


class AttentionTest(EngineTest):
    def test_a_sequence_has_one_list_for_all_heads(self) -> None:
        one = dataclasses.replace(PRIORITY, selection=kvtier.Selection.PER_SEQUENCE)
        session, keys, values = self.filled(300, retrieval=one)
        query = rows(3, 1, QUERY_HEADS, np.float32)
        chosen = session.select(0, query, with_bias=True)
        self.assertEqual(chosen.ids.shape, (1, 1, 32))
        static_tokens = [*range(SINK), *range(300 - RECENT, 300)]
        attended = np.array([*static_tokens, *chosen.ids[0, 0]])
        bias = np.array([*([0.0] * len(static_tokens)), *chosen.bias[0, 0]])
        expected = attention_over(
            query[0], keys, values, [attended] * QUERY_HEADS, [bias] * QUERY_HEADS
        )
        out, _ = session.attend(0, query)
        np.testing.assert_allclose(out[0], expected, atol=TOLERANCE)
        given, _ = session.attend(0, query, selected=chosen.ids, bias=chosen.bias)
        np.testing.assert_array_equal(given, out)

    def test_is_dense_where_k_covers_the_length(self) -> None:
        for tokens in (1, 63, 64, 65, 300):
            for asked in (1, min(5, tokens)):
                with self.subTest(tokens=tokens, asked=asked):
                    session, keys, values = self.filled(tokens)
                    query = rows(3, asked, QUERY_HEADS, np.float32)
                    options = AttendOptions(
                        retrieval=dataclasses.replace(NORM_AWARE, top_k=4096)
                    )
                    out, lse = session.attend(0, query, options)
                    expected, expected_lse = dense_attention(query, keys, values)
                    np.testing.assert_allclose(out, expected, atol=TOLERANCE)
                    np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE)

    def test_decode_is_an_append_and_an_attend(self) -> None:
        session, keys, values = self.filled(200)
        query, key, value = rows(3, 2, QUERY_HEADS), rows(4, 2, KV_HEADS), rows(5, 2, KV_HEADS)
        dense = AttendOptions(mode=LayerMode.DENSE)
        out, lse = session.decode(1, query, key, value, dense)
        self.assertEqual((session.length(0), session.length(1), session.length()), (200, 202, 200))
        self.assertEqual(out.dtype, np.float16)
        expected, expected_lse = dense_attention(
            query, np.concatenate([keys, key]), np.concatenate([values, value])
        )
        np.testing.assert_allclose(out, expected, atol=1e-3)  # rounded to float16
        np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE)

    def test_sees_what_a_window_has(self) -> None:
        window = LayerConfig(mode=LayerMode.SLIDING_WINDOW, window_tokens=50)
        session, keys, values = self.filled(300, shape=model(layer_options=(window,) * LAYERS))
        query = rows(3, 1, QUERY_HEADS, np.float32)
        expected, _ = dense_attention(query, keys[-50:], values[-50:])
        np.testing.assert_allclose(session.attend(0, query).out, expected, atol=TOLERANCE)

    def test_attends_to_the_ids_that_select_returns(self) -> None:
        for seed in range(3):
            session, keys, values = self.filled(500)
            query = rows(10 + seed, 1, QUERY_HEADS, np.float32)
            ids, scores, bias = session.select(0, query, with_scores=True)
            self.assertIsNone(bias)
            self.assertEqual(ids.shape, (1, KV_HEADS, 32))
            self.assertEqual(scores.shape, ids.shape)
            static_tokens = np.r_[:SINK, 500 - RECENT : 500]
            chosen = []
            for kv_head in range(KV_HEADS):
                found = ids[0, kv_head]
                self.assertTrue((np.diff(found) > 0).all())
                self.assertFalse(np.isin(found, static_tokens).any())
                chosen += [np.concatenate([found, static_tokens])] * GROUP
            expected = attention_over(query[0], keys, values, chosen)
            result = session.attend(0, query, with_selected=True, with_missed=True)
            np.testing.assert_allclose(result.out[0], expected, atol=TOLERANCE)
            np.testing.assert_array_equal(result.selected, ids)
            self.assertTrue(((result.missed > 0.0) & (result.missed < 1.0)).all())
            given = session.attend(0, query, selected=ids)
            np.testing.assert_allclose(given.out[0], expected, atol=TOLERANCE)

    def test_top_k_takes_the_largest_scores(self) -> None:
        session, _, _ = self.filled(400)
        query = rows(3, 1, QUERY_HEADS, np.float32)
        wide = AttendOptions(
            retrieval=dataclasses.replace(NORM_AWARE, top_k=400)
        )
        every = session.select(0, query, wide, with_scores=True)
        some = session.select(0, query)
        for kv_head in range(KV_HEADS):
            order = np.argsort(-every.scores[0, kv_head], kind="stable")[:32]
            expected = np.sort(every.ids[0, kv_head, order])
            np.testing.assert_array_equal(some.ids[0, kv_head], expected)

    def test_an_error_decides_how_many_where_nothing_is_given(self) -> None:
        length = 500
        retrieval = dataclasses.replace(PRIORITY, top_k=0)
        session, keys, values = self.filled(length, retrieval=retrieval)
        query = 4.0 * rows(3, 1, QUERY_HEADS, np.float32)  # sharp attention
        ids, _, bias = session.select(0, query, with_bias=True)
        self.assertEqual(ids.shape, (1, KV_HEADS, length))  # so many it could be
        counts = (ids[0] >= 0).sum(axis=1)
        self.assertTrue((counts < length // 2).all(), counts)
        stated = AttendOptions(retrieval=dataclasses.replace(PRIORITY, top_k=1389, error_target=0.03))
        np.testing.assert_array_equal(session.select(0, query, stated).ids, ids)
        static_tokens = np.r_[:SINK, length - RECENT : length]
        chosen, added = [], []
        for head in range(QUERY_HEADS):
            kept = ids[0, head // GROUP] >= 0
            chosen.append(np.r_[static_tokens, ids[0, head // GROUP][kept]])
            added.append(np.r_[np.zeros(len(static_tokens)), bias[0, head // GROUP][kept]])
        result = session.attend(0, query, with_selected=True)
        np.testing.assert_array_equal(result.selected, ids)
        expected = attention_over(query[0], keys, values, chosen, added)
        np.testing.assert_allclose(result.out[0], expected, atol=TOLERANCE)
        # A recall target says how many, too: a number is the most.
        recall = AttendOptions(recall_target=kvtier.RecallTarget(min_top_k=1))
        fixed = dataclasses.replace(recall, retrieval=retrieval.with_fixed_k())
        found = session.select(0, query, recall).ids
        np.testing.assert_array_equal(found, session.select(0, query, fixed).ids)

    def test_priority_counts_each_id_by_its_bias(self) -> None:
        session, keys, values = self.filled(500, retrieval=PRIORITY)
        query = rows(3, 1, QUERY_HEADS, np.float32)
        ids, _, bias = session.select(0, query, with_bias=True)
        self.assertTrue((bias >= 0.0).all())
        static_tokens = np.r_[:SINK, 500 - RECENT : 500]
        chosen, added = [], []
        for head in range(QUERY_HEADS):
            found = ids[0, head // GROUP]
            kept = found >= 0
            chosen.append(np.concatenate([found[kept], static_tokens]))
            added.append(np.concatenate([bias[0, head // GROUP][kept], np.zeros(len(static_tokens))]))
        expected = attention_over(query[0], keys, values, chosen, added)
        np.testing.assert_allclose(session.attend(0, query).out[0], expected, atol=TOLERANCE)
        given = session.attend(0, query, selected=ids, bias=bias)
        np.testing.assert_allclose(given.out[0], expected, atol=TOLERANCE)

    def test_merges_parts_by_their_lse(self) -> None:
        first, keys, values = self.filled(200)
        second = first.engine.open()
        self.addCleanup(second.close)
        more_keys, more_values = rows(6, 77, KV_HEADS), rows(7, 77, KV_HEADS)
        second.append(0, more_keys, more_values)
        query = rows(3, 1, QUERY_HEADS, np.float32)
        dense = AttendOptions(mode=LayerMode.DENSE)
        parts = [tuple(each.attend(0, query, dense)) for each in (first, second)]
        out, lse = first.engine.merge(parts)
        expected, expected_lse = dense_attention(
            query, np.concatenate([keys, more_keys]), np.concatenate([values, more_values])
        )
        np.testing.assert_allclose(out, expected, atol=TOLERANCE)
        np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE)

    def test_a_ragged_batch_is_each_of_its_items(self) -> None:
        lengths = (1, 70, 333)
        alone = [self.filled(length)[0] for length in lengths]
        engine = alone[0].engine
        batched = []
        for length in lengths:
            session = engine.open()
            self.addCleanup(session.close)
            session.append(0, rows(1, length, KV_HEADS), rows(2, length, KV_HEADS))
            batched.append(session)
        query, key, value = (rows(i, 1, h) for i, h in ((3, QUERY_HEADS), (4, KV_HEADS), (5, KV_HEADS)))
        items = [kvtier.BatchItem(session, query, key, value) for session in batched]
        for found, session in zip(engine.batch_decode(0, items), alone):
            expected = session.decode(0, query, key, value)
            np.testing.assert_array_equal(found.out, expected.out)
            np.testing.assert_array_equal(found.lse, expected.lse)

    def test_writes_into_what_it_is_given(self) -> None:
        session, _, _ = self.filled(100)
        query = rows(3, 2, QUERY_HEADS)
        wide = np.zeros((2, QUERY_HEADS, 2 * HEAD_DIM), np.float32)
        lse = np.zeros((2, QUERY_HEADS), np.float32)
        result = session.attend(0, query, out=wide[:, :, :HEAD_DIM], lse=lse)
        self.assertIs(result.lse, lse)
        expected = session.attend(0, query.astype(np.float32))
        np.testing.assert_array_equal(wide[:, :, :HEAD_DIM], expected.out)
        self.assertFalse(wide[:, :, HEAD_DIM:].any())


class ArrayTest(EngineTest):
    def test_bfloat16_is_taken_as_bits_and_by_name(self) -> None:
        import ml_dtypes

        shape = model(kv_dtype=kvtier.DType.BFLOAT16)
        keys, values = (bfloat_bits(rows(i, 100, KV_HEADS, np.float32)) for i in (1, 2))
        query = bfloat_bits(rows(3, 1, QUERY_HEADS, np.float32))
        bits, named = self.open(shape=shape), self.open(shape=shape)
        bits.append(0, keys, values)
        named.append(0, keys.view(ml_dtypes.bfloat16), values.view(ml_dtypes.bfloat16))
        dense = AttendOptions(mode=LayerMode.DENSE)
        by_bits = bits.attend(0, query, dense).out
        by_name = named.attend(0, query.view(ml_dtypes.bfloat16), dense).out
        self.assertEqual((by_bits.dtype, by_name.dtype), (np.uint16, ml_dtypes.bfloat16))
        np.testing.assert_array_equal(by_bits, by_name.view(np.uint16))
        expected, _ = dense_attention(*(from_bits(each) for each in (query, keys, values)))
        np.testing.assert_allclose(by_name.astype(np.float64), expected, rtol=2**-8, atol=1e-4)

    def test_rows_come_back_bit_for_bit(self) -> None:
        session, keys, values = self.filled(150)
        tokens = np.array([[149, 0, -1, 77, 77], [3, 2, 1, 0, -1]], np.int32)
        found = session.fetch(0, tokens)
        for array, stored in ((found.keys, keys), (found.values, values)):
            for head in range(KV_HEADS):
                for column, token in enumerate(tokens[head]):
                    expected = np.zeros(HEAD_DIM) if token < 0 else stored[token, head]
                    np.testing.assert_array_equal(array[head, column], expected)

    def test_strided_and_read_only_arrays_are_taken(self) -> None:
        session = self.open()
        heads_first = rows(1, KV_HEADS, 120).transpose(1, 0, 2)  # [tokens, kv_heads, head_dim]
        heads_first.flags.writeable = False
        session.append(0, heads_first, heads_first)
        found = session.fetch(0, np.arange(120, dtype=np.int32)[None].repeat(KV_HEADS, 0))
        np.testing.assert_array_equal(found.keys, heads_first.transpose(1, 0, 2))

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_tensors_of_torch_come_back_as_such(self) -> None:
        shape = model(kv_dtype=kvtier.DType.BFLOAT16)
        generator = torch.Generator().manual_seed(0)

        def tensor(tokens: int, heads: int) -> Any:
            # As models have them: [1, heads, tokens, head_dim].
            made = torch.randn(1, heads, tokens, HEAD_DIM, generator=generator)
            return made.bfloat16()[0].transpose(0, 1)

        session = self.open(shape=shape)
        keys, values, query = tensor(90, KV_HEADS), tensor(90, KV_HEADS), tensor(3, QUERY_HEADS)
        session.append(0, keys, values)
        result = session.attend(0, query, AttendOptions(mode=LayerMode.DENSE), with_selected=True)
        self.assertEqual(result.out.dtype, torch.bfloat16)
        self.assertEqual(result.selected.dtype, torch.int32)
        expected, _ = dense_attention(*(each.float().numpy() for each in (query, keys, values)))
        np.testing.assert_allclose(result.out.float(), expected, rtol=2**-8, atol=1e-4)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "keys: expected a tensor without"):
            session.append(0, keys.float().requires_grad_(), values)


class SequenceTest(EngineTest):
    def test_truncate_and_append_is_a_sequence_without_what_was_dropped(self) -> None:
        session, keys, values = self.filled(300)
        session.truncate(130)
        self.assertEqual(session.length(), 130)
        more_keys, more_values = rows(6, 40, KV_HEADS), rows(7, 40, KV_HEADS)
        session.append(0, more_keys, more_values)
        query = rows(3, 1, QUERY_HEADS, np.float32)
        expected, _ = dense_attention(
            query,
            np.concatenate([keys[:130], more_keys]),
            np.concatenate([values[:130], more_values]),
        )
        found = session.attend(0, query, AttendOptions(mode=LayerMode.DENSE)).out
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        session.truncate(10, layer=1)
        self.assertEqual((session.length(0), session.length(1)), (170, 10))

    def test_forks_share_a_past_and_nothing_after(self) -> None:
        session, keys, values = self.filled(100)
        children = session.fork(2)
        ends = [rows(20 + i, 30, KV_HEADS) for i in range(3)]
        for each, end in zip((session, *children), ends):
            each.append(0, end, end)
        query = rows(3, 1, QUERY_HEADS, np.float32)
        for each, end in zip((session, *children), ends):
            expected, _ = dense_attention(
                query, np.concatenate([keys, end]), np.concatenate([values, end])
            )
            found = each.attend(0, query, AttendOptions(mode=LayerMode.DENSE)).out
            np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        for child in children:
            child.close()

    def test_a_stored_prefix_begins_a_session(self) -> None:
        session, keys, _ = self.filled(200)
        ids = np.arange(200, dtype=np.int32)
        session.publish(ids)
        with session.engine.open(token_ids=ids) as again:
            self.assertEqual(again.length(), 192)  # whole pages of 64
            found = again.fetch(0, np.arange(192, dtype=np.int32)[None].repeat(KV_HEADS, 0))
            np.testing.assert_array_equal(found.keys, keys[:192].transpose(1, 0, 2))
        with session.engine.open(token_ids=ids, tenant_secret=b"another") as other:
            self.assertEqual(other.length(), 0)

    def test_counters_and_quotas(self) -> None:
        session, _, _ = self.filled(200)
        engine = session.engine
        stats = engine.stats()
        self.assertEqual(stats.cumulative["tokens_appended"], 200 * LAYERS)
        self.assertEqual(stats.snapshot["sessions"], 1)
        page = stats.snapshot["host_page_bytes"] // stats.snapshot["pages"]
        engine.set_quota("someone", page)
        with engine.open(tenant="someone") as limited:
            limited.append(0, rows(1, 64, KV_HEADS), rows(2, 64, KV_HEADS))
            with self.assertRaises(kvtier.ResourceExhaustedError):
                limited.append(0, rows(1, 1, KV_HEADS), rows(2, 1, KV_HEADS))
            self.assertEqual(limited.length(0), 64)
            self.assertEqual(engine.stats().tenants[-1]["quota_bytes"], page)

    def test_a_session_outlives_its_engine(self) -> None:
        session, keys, values = self.filled(100)
        session.engine.close()
        query = rows(3, 1, QUERY_HEADS, np.float32)
        expected, _ = dense_attention(query, keys, values)
        found = session.attend(0, query, AttendOptions(mode=LayerMode.DENSE)).out
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        for call in (session.engine.open, session.engine.stats):
            with self.assertRaisesRegex(kvtier.FailedPreconditionError, "closed"):
                call()

    def test_messages_go_to_logging(self) -> None:
        with self.assertLogs("kvtier.engine", logging.DEBUG):
            kvtier.Engine(model(), NORM_AWARE, memory()).close()


class MemoryTest(unittest.TestCase):
    def test_a_session_takes_what_the_document_says(self) -> None:
        tokens, rows_kept = 3000, 100
        found = kvtier.session_memory(
            model(), tokens, NORM_AWARE, memory(), row_cache_rows=rows_kept
        )
        heads = LAYERS * KV_HEADS
        planes = NORM_AWARE.sketch(HEAD_DIM).num_planes
        self.assertEqual(found.tokens, tokens)
        self.assertEqual(found.pages, heads * 4 * HEAD_DIM * 47 * 64)
        self.assertEqual(found.sketches, heads * (-(-planes // 128) * 16 + 4) * 3 * 1024)
        row_cache = heads * 4 * (32 * (4 * HEAD_DIM + 8) + 16)
        self.assertIn(found.row_cache - row_cache, range(LAYERS * 256))  # each layer's is aligned

    def test_an_engine_has_room_for_the_sessions_that_it_was_sized_for(self) -> None:
        tokens, sessions = 2048, 3
        sizes = memory(max_session_tokens=tokens)
        pages = kvtier.session_memory(model(), tokens, NORM_AWARE, sizes).pages
        sizes = dataclasses.replace(
            sizes,
            host_bytes=sessions * pages,
            device_bytes=kvtier.device_bytes_for(
                model(), tokens, sessions, NORM_AWARE, sizes, backend=kvtier.Backend.CPU
            ),
        )
        with kvtier.Engine(model(), NORM_AWARE, sizes, backend=kvtier.Backend.CPU) as engine:
            opened = [engine.open() for _ in range(sessions)]
            for session in opened:
                for layer in range(LAYERS):
                    session.append(layer, rows(1, tokens, KV_HEADS), rows(2, tokens, KV_HEADS))
            with self.assertRaises(kvtier.ResourceExhaustedError):
                engine.open().append(0, rows(1, 64, KV_HEADS), rows(2, 64, KV_HEADS))

    def test_a_whole_session_is_opened_only_where_all_of_it_fits(self) -> None:
        sizes = memory(max_session_tokens=2048)
        pages = kvtier.session_memory(model(), 2048, NORM_AWARE, sizes).pages
        sizes = dataclasses.replace(sizes, host_bytes=pages + pages // 2)
        with kvtier.Engine(model(), NORM_AWARE, sizes, backend=kvtier.Backend.CPU) as engine:
            with engine.open(whole=True):
                with self.assertRaisesRegex(kvtier.ResourceExhaustedError, "MiB of pages"):
                    engine.open(whole=True)
                engine.open(capacity_tokens=1024, whole=True).close()
            engine.open(whole=True).close()

    def test_refuses_what_no_engine_takes(self) -> None:
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "tokens: expected 1..4096"):
            kvtier.session_memory(model(), 4097, NORM_AWARE, memory())
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "backend: expected cpu or cuda"):
            kvtier.device_bytes_for(
                model(), 64, 1, NORM_AWARE, memory(), backend=kvtier.Backend.AUTO
            )


class BadInputTest(EngineTest):
    def test_names_what_it_expected_and_found_and_changes_nothing(self) -> None:
        session, keys, values = self.filled(100)
        query = rows(3, 1, QUERY_HEADS)
        bad = np.full_like(keys, np.nan)
        cases: list[tuple[str, Any]] = [
            ("layer: expected 0..1, found 2", lambda: session.append(2, keys, values)),
            ("keys: expected an array .*, found list", lambda: session.append(0, [1.0], values)),
            (
                r"keys: expected float32, float16 or bfloat16 \(or its bits as uint16\), found float64",
                lambda: session.append(0, keys.astype(float), values),
            ),
            ("keys: expected fp32, fp16 or bf16, found int32", lambda: session.append(0, keys.astype(np.int32), values)),
            ("keys: expected the byte order of this machine, found >f4", lambda: session.append(0, keys.astype(">f4"), values)),
            ("selected: expected int32, found float64", lambda: session.attend(0, query, selected=np.zeros((1, KV_HEADS, 1)))),
            ("bias: expected float32, found float64", lambda: session.attend(0, query, selected=np.zeros((1, KV_HEADS, 1), np.int32), bias=np.zeros((1, KV_HEADS, 1)))),
            ("keys: expected .*found fp16", lambda: session.append(0, keys[:, :1], values)),
            ("values: expected .*found", lambda: session.append(0, keys, values[:5])),
            ("keys: expected finite", lambda: session.append(0, bad, values)),
            ("keys: expected last stride 1", lambda: session.append(0, keys[:, :, ::2].repeat(2, 2)[..., ::-1], values)),
            ("stream: expected None", lambda: session.append(0, keys, values, stream=0)),
            ("query: expected .tokens", lambda: session.attend(0, query[0])),
            ("query: expected .*found", lambda: session.attend(0, query[:, :1])),
            (
                "recall_target: expected logit_softcap 0, found 20",
                lambda: session.attend(
                    *(0, query),
                    kvtier.AttendOptions(logit_softcap=20.0, recall_target=kvtier.RecallTarget()),
                ),
            ),
            (
                "logit_softcap: expected 0 or .*found -1",
                lambda: session.attend(0, query, kvtier.AttendOptions(logit_softcap=-1.0)),
            ),
            ("tokens_after: expected", lambda: session.attend(0, query, tokens_after=101)),
            ("out: expected", lambda: session.attend(0, query, out=np.empty((1, 1, 1), np.float32))),
            ("lse: expected a writable array", lambda: session.attend(0, query, lse="no")),
            ("tokens: expected", lambda: session.fetch(0, np.zeros(3, np.int32))),
            ("token", lambda: session.fetch(0, np.full((KV_HEADS, 1), 100, np.int32))),
            ("tokens", lambda: session.truncate(101)),
            ("count", lambda: session.fork(0)),
            ("token_ids", lambda: session.publish(list(range(101)))),
        ]
        before = session.attend(0, query).out
        for message, call in cases:
            with self.subTest(message), self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                call()
            self.assertEqual((session.length(0), session.length(1)), (100, 100))
        np.testing.assert_array_equal(session.attend(0, query).out, before)

    def test_refuses_settings_with_all_problems(self) -> None:
        for message, settings in (
            ("head_dim", {"shape": model(head_dim=65)}),
            ("model.head_dim: expected an integer, found 'x'", {"shape": model(head_dim="x")}),
            ("tier_deadline", {"sizes": memory(tier_deadline=0.0)}),
            ("page_tokens", {"sizes": memory(page_tokens=63)}),
            ("memory.host_bytes: expected an integer of at least 0", {"sizes": memory(host_bytes=-1)}),
        ):
            with self.subTest(message), self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                self.open(**settings)

    def test_refuses_the_name_of_a_backend(self) -> None:
        for make in (
            lambda: kvtier.Engine(model(), NORM_AWARE, memory(), backend="CPU"),  # type: ignore[arg-type]
            lambda: kvtier.device_bytes_for(model(), 1, 1, backend="CPU"),  # type: ignore[arg-type]
            lambda: kvtier.PagedSketches(model(), num_blocks=1, max_tokens=1, backend="CPU"),  # type: ignore[arg-type]
        ):
            with self.assertRaisesRegex(
                kvtier.InvalidArgumentError,
                "backend: expected one of .*kvtier.Backend.CPU, kvtier.Backend.CUDA, found 'CPU'",
            ):
                make()

    def test_errors_are_those_of_the_client(self) -> None:
        session = self.open()
        query = rows(3, 1, QUERY_HEADS)
        with self.assertRaises(kvtier.FailedPreconditionError) as raised:
            session.attend(0, query)
        self.assertEqual(raised.exception.code, kvtier.ErrorCode.FAILED_PRECONDITION)
        small = self.open(sizes=memory(max_session_tokens=64))
        keys = rows(1, 65, KV_HEADS)
        with self.assertRaises(kvtier.ResourceExhaustedError):
            small.append(0, keys, keys)
        self.assertEqual(small.length(0), 0)
        soft = AttendOptions(retrieval=RetrievalConfig.socket())
        session.append(0, keys, keys)
        with self.assertRaises(kvtier.FailedPreconditionError):
            session.attend(0, query, soft)  # no such sketch

    def test_refuses_calls_of_a_closed_session(self) -> None:
        session, keys, values = self.filled(10)
        session.close()
        session.close()
        for call in (
            session.length,
            lambda: session.append(0, keys, values),
            lambda: session.attend(0, rows(3, 1, QUERY_HEADS)),
            lambda: session.fork(1),
        ):
            with self.assertRaisesRegex(kvtier.FailedPreconditionError, "closed"):
                call()

    def test_a_fork_of_the_process_is_refused_and_ends(self) -> None:
        command = [sys.executable, "-c", FORKED]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
        self.assertEqual(found.stdout, "5 200\n")

    def test_refuses_a_session_twice_in_a_batch(self) -> None:
        session, keys, values = self.filled(10)
        item = kvtier.BatchItem(session, rows(3, 1, QUERY_HEADS), keys[:1], values[:1])
        with self.assertRaisesRegex(kvtier.FailedPreconditionError, "one call at a time"):
            session.engine.batch_decode(0, [item, item])
        self.assertEqual(session.length(0), 10)

    def test_one_thread_at_a_time_and_no_gil_held(self) -> None:
        """While one call works, this thread runs, and its call of the same session is refused."""
        keys = rows(1, 4000, KV_HEADS)
        query = rows(3, 64, QUERY_HEADS)
        refused = False
        for _ in range(50):
            session = self.open()
            session.append(0, keys, keys)
            dense = AttendOptions(mode=LayerMode.DENSE)
            worker = threading.Thread(target=session.attend, args=(0, query, dense))
            worker.start()
            while worker.is_alive() and not refused:
                try:
                    session.length()
                except kvtier.FailedPreconditionError as error:
                    self.assertIn("one call at a time", str(error))
                    refused = True
            worker.join(60.0)
            self.assertFalse(worker.is_alive())
            if refused:
                break
        self.assertTrue(refused)


class DocumentTest(unittest.TestCase):
    def test_the_example_runs(self) -> None:
        text = (ROOT / "docs" / "python.md").read_text()
        example = text.split("```python\n")[1].split("```")[0]
        found: dict[str, Any] = {}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(example, found)
        self.assertEqual(printed.getvalue(), f"(1, 8, 64) {found['engine'].backend}\n")
        self.assertEqual(found["out"].shape, (1, 8, 64))
        self.assertTrue(np.isfinite(found["lse"]).all())


class ImportTest(unittest.TestCase):
    def test_names_the_package_that_is_missing(self) -> None:
        saved = sys.modules.pop("kvtier_engine")
        sys.modules["kvtier_engine"] = None  # type: ignore[assignment]
        try:
            with self.assertRaisesRegex(
                ImportError, "expected the package kvtier-engine, found none .*pip install ./python ./python/engine"
            ):
                kvtier.Engine  # noqa: B018
        finally:
            sys.modules["kvtier_engine"] = saved
        self.assertIs(kvtier.Engine, kvtier_engine.Engine)
        with self.assertRaises(AttributeError):
            kvtier.Engines  # noqa: B018

    def test_versions_agree(self) -> None:
        self.assertEqual(kvtier_engine.__version__, kvtier.__version__)

    def test_is_typed(self) -> None:
        self.assertTrue((Path(kvtier_engine.__file__).parent / "py.typed").exists())


if __name__ == "__main__":
    unittest.main()
