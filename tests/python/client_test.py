"""The client against `kvtier serve`."""

from __future__ import annotations

import dataclasses
import gc
import os
import tempfile
import threading
import unittest
from typing import Any

import kvtier
import ml_dtypes
import numpy as np
from kvtier.v1 import session_pb2
from server import Server, ServerTest, bfloat_bits, dense_attention, from_bits, wait_until

MODEL = kvtier.ModelConfig(layers=2, query_heads=4, kv_heads=2, head_dim=64)
RETRIEVAL = kvtier.RetrievalConfig.of(
    kvtier.Estimator.SOFT_COLLISION, top_k=8, sink_tokens=4, recent_tokens=4
)
DENSE = kvtier.AttendOptions(mode=kvtier.LayerMode.DENSE)
# fp32 sums in the server; outputs of 16 bits are rounded once more.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "uint16": 1.6e-2}


class Case:
    """Random tokens, keys and values exactly representable in bfloat16."""

    def __init__(self, tokens: int, seed: int = 1) -> None:
        self.random = np.random.default_rng(seed)
        self.keys = self._rows(tokens)
        self.values = self._rows(tokens)

    def _rows(self, tokens: int) -> Any:
        shape = (tokens, MODEL.kv_heads, MODEL.head_dim)
        return from_bits(bfloat_bits(self.random.standard_normal(shape, np.float32)))

    def query(self, tokens: int) -> Any:
        shape = (tokens, MODEL.query_heads, MODEL.head_dim)
        return from_bits(bfloat_bits(self.random.standard_normal(shape, np.float32)))


class NoArray:
    """As tensors of torch that are bfloat16, on a GPU or require a gradient."""

    def __array__(self, *arguments: Any, **settings: Any) -> Any:
        raise TypeError("of a GPU")


class SettingsTest(unittest.TestCase):
    def test_refuses_what_is_no_member_of_an_enumeration(self) -> None:
        kinds = {
            kvtier.ModelConfig: {"kv_dtype": kvtier.DType},
            kvtier.RetrievalConfig: {"rule": kvtier.SelectionRule, "plane_kind": kvtier.PlaneKind},
            kvtier.SketchConfig: {"code": kvtier.SketchCode},
            kvtier.LayerConfig: {"mode": kvtier.LayerMode},
            kvtier.AttendOptions: {"mode": kvtier.LayerMode},
            kvtier.MemoryConfig: {"placement": kvtier.KvPlacement},
        }
        for settings, fields in kinds.items():
            for name, kind in fields.items():
                first = list(kind.__members__)[0]
                with self.subTest(name), self.assertRaises(kvtier.InvalidArgumentError) as caught:
                    settings(**{name: first})
                expected = ", ".join(f"kvtier.{each}" for each in kind)
                self.assertEqual(
                    caught.exception.message,
                    f"{settings.__name__}.{name}: expected one of {expected}, found '{first}'",
                )
        with self.assertRaisesRegex(ValueError, "rule: expected .*TOP_K.*found <SketchCode.SIGN"):
            dataclasses.replace(kvtier.RetrievalConfig(), rule=kvtier.SketchCode.SIGN)


class AddressTest(unittest.TestCase):
    def test_paths_that_cannot_be_looked_at_are_refused_with_the_reason(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.symlink("loop", f"{folder}/loop")
            for path, reason in (
                (f"{folder}/loop", "Too many levels"),
                ("/" + 5000 * "x", "File name too long"),
            ):
                with self.assertRaisesRegex(kvtier.FailedPreconditionError, reason):
                    kvtier.Client(f"unix:{path}")


class SessionTest(ServerTest):
    """Over memory that is shared with the server."""

    data_plane = True

    def setUp(self) -> None:
        self.client = kvtier.Client(self.server.address, data_plane=self.data_plane)
        self.addCleanup(self.client.close)
        self.session = self.client.open(MODEL, RETRIEVAL)
        self.addCleanup(self.session.close)

    def test_dense_decode_is_that_of_the_oracle_in_every_dtype(self) -> None:
        case = Case(37)
        query = case.query(3)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.uint16):
            name = np.dtype(dtype).name
            with self.subTest(name), self.client.open(MODEL, RETRIEVAL) as session:
                keys, values, queries = (
                    bfloat_bits(x) if dtype is np.uint16 else x.astype(dtype)
                    for x in (case.keys, case.values, query)
                )
                session.append(1, keys[:34], values[:34])
                out, lse = session.decode(1, queries, keys[34:], values[34:], DENSE)

                self.assertEqual(out.dtype, np.dtype(dtype))
                # bfloat16 storage rounds what float16 carries; these values survive it.
                expected, expected_lse = dense_attention(
                    query if name != "float16" else queries, case.keys, case.values
                )
                found = from_bits(out) if dtype is np.uint16 else out.astype(np.float32)
                np.testing.assert_allclose(found, expected, atol=TOLERANCE[name])
                np.testing.assert_allclose(lse, expected_lse, atol=2e-3)
                self.assertEqual([session.length(0), session.length(1)], [0, 37])

    def test_append_in_chunks_stores_all(self) -> None:
        case = Case(9000)  # 4.4 MiB: more than one message may have
        self.session.append(0, case.keys, case.values)
        query = case.query(2)
        out, _ = self.session.attend(0, query, DENSE)
        self.assertEqual(self.session.length(0), 9000)
        np.testing.assert_allclose(
            out, dense_attention(query, case.keys, case.values)[0], atol=TOLERANCE["float32"]
        )

    def test_chunks_before_one_that_fails_stay_and_count(self) -> None:
        case = Case(5000)  # chunks of 2,048 tokens
        wrong = case.keys.copy()
        wrong[2999, 0, 0] = np.nan
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "NaN|finite|nan"):
            self.session.append(0, wrong, case.values)
        stored = self.session.length(0)
        self.assertGreater(stored, 0)
        self.assertLess(stored, 2999)
        self.session.refresh()
        self.assertEqual(self.session.length(0), stored)
        self.session.append(0, case.keys[stored:], case.values[stored:])
        query = case.query(2)
        out, _ = self.session.attend(0, query, DENSE)
        np.testing.assert_allclose(
            out, dense_attention(query, case.keys, case.values)[0], atol=TOLERANCE["float32"]
        )

    def test_a_full_session_says_so(self) -> None:
        case = Case(65)
        with self.client.open(MODEL, RETRIEVAL, capacity_tokens=64) as session:
            session.append(0, case.keys[:63], case.values[:63])
            for call in (
                lambda: session.append(0, case.keys[63:], case.values[63:]),
                lambda: session.decode(0, case.query(2), case.keys[63:], case.values[63:]),
            ):
                with self.assertRaises(kvtier.ResourceExhaustedError) as caught:
                    call()
                self.assertEqual(caught.exception.reason, "SESSION_FULL")
                self.assertIsNone(caught.exception.details.retry_delay)
                self.assertRegex(caught.exception.message, "capacity_tokens.*--max-session-tokens")
            self.assertEqual(session.length(0), 63)
            session.append(0, case.keys[63:64], case.values[63:64])

    def test_views_that_are_not_dense_are_taken(self) -> None:
        case = Case(20)
        self.session.append(0, case.keys[::2], case.values[::2])
        query = case.query(4)[::2]
        out, _ = self.session.attend(0, query, DENSE)
        expected, _ = dense_attention(query, case.keys[::2], case.values[::2])
        np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"])

    def test_select_returns_ids_that_attend_takes(self) -> None:
        case = Case(100)
        self.session.append(0, case.keys, case.values)
        query = case.query(2)
        ids, scores, bias = self.session.select(0, query, with_scores=True)
        self.assertIsNone(bias)
        self.assertEqual(ids.shape, (2, MODEL.kv_heads, RETRIEVAL.top_k))
        assert scores is not None
        self.assertEqual(scores.shape, ids.shape)
        self.assertTrue((np.diff(ids, axis=2) > 0).all())
        self.assertIsNone(self.session.select(0, query).scores)
        chosen, _ = self.session.attend(0, query, selected=ids)
        np.testing.assert_array_equal(chosen, self.session.attend(0, query).out)

    def test_a_call_may_change_the_retrieval(self) -> None:
        case = Case(100)
        self.session.append(0, case.keys, case.values)
        query = case.query(1)
        wide = kvtier.AttendOptions(retrieval=dataclasses.replace(RETRIEVAL, top_k=100))
        out, _ = self.session.attend(0, query, wide)
        expected, _ = dense_attention(query, case.keys, case.values)
        np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"])
        with self.assertRaises(kvtier.FailedPreconditionError):
            no_sketch = kvtier.RetrievalConfig()
            self.session.attend(0, query, kvtier.AttendOptions(retrieval=no_sketch))

    def test_extra_sketches_serve_other_estimators(self) -> None:
        other = kvtier.RetrievalConfig(top_k=100)
        case = Case(100)
        extra = [other.sketch(MODEL.head_dim)]
        with self.client.open(MODEL, RETRIEVAL, extra_sketches=extra) as session:
            session.append(0, case.keys, case.values)
            query = case.query(1)
            out, _ = session.attend(0, query, kvtier.AttendOptions(retrieval=other))
        expected, _ = dense_attention(query, case.keys, case.values)
        np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"])

    def test_recall_targets_keep_more_and_tell_what_is_missed(self) -> None:
        norm_aware = kvtier.RetrievalConfig(
            rule=kvtier.SelectionRule.TOP_K,
            code=kvtier.SketchCode.SIGN,
            top_k=200,
            sink_tokens=4,
            recent_tokens=4,
        )
        case = Case(300)
        session = self.client.open(MODEL, norm_aware)
        self.addCleanup(session.close)
        session.append(0, case.keys, case.values)
        query = case.query(2)
        counts, shares = [], []
        for recall in (0.3, 0.9):
            options = kvtier.AttendOptions(
                recall_target=kvtier.RecallTarget(recall=recall, min_top_k=1)
            )
            counts.append(int((session.select(0, query, options).ids >= 0).sum()))
            result = session.attend(0, query, options, with_missed=True)
            assert result.missed is not None
            self.assertEqual(result.missed.shape, (2, MODEL.query_heads))
            shares.append(float(result.missed.mean()))
            out, _ = session.attend(0, query, options)
            np.testing.assert_array_equal(out, result.out)
            item = kvtier.AttendItem(session, 0, query, options, with_missed=True)
            (found,) = self.client.batch_attend([item])
            assert isinstance(found, kvtier.AttendResult) and found.missed is not None
            np.testing.assert_array_equal(found.missed, result.missed)
        self.assertLess(counts[0], counts[1])
        self.assertGreater(shares[0], shares[1])
        step = session.decode(0, query[:1], case.keys[:1], case.values[:1], with_missed=True)
        assert step.missed is not None
        self.assertEqual(step.missed.shape, (1, MODEL.query_heads))
        with self.assertRaises(kvtier.InvalidArgumentError):
            target = kvtier.RecallTarget(recall=1.5)
            session.attend(0, query, kvtier.AttendOptions(recall_target=target))

    def test_sessions_of_other_clients_are_listed_and_released(self) -> None:
        before = set(self.client.list_sessions())
        self.assertIn(self.session.name, before)
        case = Case(10)
        with kvtier.Client(self.server.address, data_plane=self.data_plane) as other:
            left = other.open(MODEL, RETRIEVAL, capacity_tokens=100)
            left.append(1, case.keys, case.values)
            names = self.client.list_sessions()
            self.assertIn(left.name, names)
            self.assertEqual(set(names), before | {left.name})
            info = self.client.session_info(left.name)
            self.assertEqual(info.name, left.name)
            self.assertEqual(info.layer_lengths, [0, 10])
            self.assertEqual(info.capacity_tokens, 100)
            self.assertEqual(info.kv_bytes, 2 * case.keys.size * 2)
            self.assertGreater(info.lease_ttl, 0)
            self.assertEqual(info.memory.tokens, 100)
            # One page, of the server's own size, holds 100 tokens.
            self.assertEqual(info.memory.pages % (2 * case.keys[0].size * 2), 0)
            self.assertGreaterEqual(info.memory.pages, 2 * 2 * case.keys[0].size * 100)
            self.assertGreater(info.memory.sketches, 0)
            self.client.release(left.name)
            self.assertEqual(set(self.client.list_sessions()), before)
            with self.assertRaises(kvtier.NotFoundError):
                left.refresh()
        for call in (self.client.session_info, self.client.release):
            with self.assertRaises(kvtier.NotFoundError):
                call(left.name)

    def test_truncate_and_refresh_tell_the_lengths(self) -> None:
        case = Case(10)
        for layer in range(MODEL.layers):
            self.session.append(layer, case.keys, case.values)
        self.session.truncate(6)
        self.assertEqual(self.session.length(), 6)
        self.session.refresh()
        self.assertEqual(self.session.length(1), 6)
        query = case.query(1)
        expected, _ = dense_attention(query, case.keys[:6], case.values[:6])
        out, _ = self.session.attend(1, query, DENSE)
        np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"])

    def test_forks_start_as_their_parent_and_go_their_own_ways(self) -> None:
        case = Case(70)
        self.session.append(0, case.keys[:69], case.values[:69])
        children = self.session.fork(2)
        for child in children:
            self.addCleanup(child.close)
        self.assertEqual([child.length(0) for child in children], [69, 69])
        query = case.query(1)
        out, _ = children[0].decode(0, query, case.keys[69:], case.values[69:], DENSE)
        expected, _ = dense_attention(query, case.keys, case.values)
        np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"])
        self.session.close()
        before, _ = dense_attention(query, case.keys[:69], case.values[:69])
        out, _ = children[1].attend(0, query, DENSE)
        np.testing.assert_allclose(out, before, atol=TOLERANCE["float32"])
        with self.assertRaises(kvtier.InvalidArgumentError):
            children[0].fork(65)

    def test_a_session_begins_with_what_another_has_published(self) -> None:
        case = Case(70)
        ids = np.arange(1000, 1070, dtype=np.int32)
        fingerprint = f"model of {self.id()}"

        def opened() -> kvtier.RemoteSession:
            return self.client.open(
                MODEL, RETRIEVAL, token_ids=ids, model_fingerprint=fingerprint
            )

        with opened() as session:
            self.assertEqual(session.length(), 0)
            for layer in range(MODEL.layers):
                session.append(layer, case.keys, case.values)
            self.assertEqual(session.publish(ids), 64)
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, "at most 70"):
                session.publish([1] * 71)
        with opened() as session:
            self.assertEqual(session.length(), 64)
            query = case.query(1)
            expected, _ = dense_attention(query, case.keys[:64], case.values[:64])
            out, _ = session.attend(1, query, DENSE)
            np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"])
        with self.client.open(MODEL, RETRIEVAL, token_ids=ids, model_fingerprint="x") as session:
            self.assertEqual(session.length(), 0)
        for wrong, message in (
            ([0.5], "expected integers"),
            ([[1]], "expected integers"),
            ([1 << 31], "expected int32"),
        ):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                self.client.open(MODEL, token_ids=wrong, model_fingerprint="x")
        with self.assertRaises(kvtier.FailedPreconditionError):
            self.session.publish([])

    def test_fetch_returns_the_rows_that_were_appended(self) -> None:
        case = Case(200)
        self.session.append(1, case.keys, case.values)
        ids = case.random.integers(-1, 200, (MODEL.kv_heads, 5000), np.int32)  # more than a piece
        keys, values = self.session.fetch(1, ids)
        self.assertEqual(keys.dtype, np.uint16)
        heads = np.arange(MODEL.kv_heads)[:, None]
        for rows, expected in ((keys, case.keys), (values, case.values)):
            bits = np.where(ids[..., None] < 0, 0, bfloat_bits(expected)[ids, heads])
            np.testing.assert_array_equal(rows, bits)
        half = kvtier.ModelConfig(
            layers=1, query_heads=4, kv_heads=2, head_dim=64, kv_dtype=kvtier.DType.FLOAT16
        )
        with self.client.open(half, RETRIEVAL) as session:
            rounded = case.keys.astype(np.float16)
            session.append(0, rounded, rounded)
            keys, _ = session.fetch(0, ids[:, :3])
            expected = np.where(ids[:, :3, None] < 0, 0, rounded[ids[:, :3], heads])
            np.testing.assert_array_equal(keys, expected)

    def test_fetch_refuses_tokens_that_are_not_there(self) -> None:
        case = Case(20)
        self.session.append(0, case.keys, case.values)
        good = np.zeros((2, 1), np.int32)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "-1 or 0..19, found 20"):
            self.session.fetch(0, good + 20)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected int32"):
            self.session.fetch(0, good.astype(np.float32))
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, r"expected \[kv_heads, n\]"):
            self.session.fetch(0, good[0])
        with self.assertRaises(kvtier.FailedPreconditionError):
            self.session.fetch(1, good)
        found = self.client.batch_fetch(
            [kvtier.FetchItem(self.session, layer, good) for layer in (0, 1)]
        )
        assert isinstance(found[0], kvtier.FetchResult)
        np.testing.assert_array_equal(found[0].keys[:, 0], bfloat_bits(case.keys[0]))
        self.assertIsInstance(found[1], kvtier.FailedPreconditionError)

    def test_batches_answer_each_item(self) -> None:
        case = Case(12)
        other = self.client.open(MODEL, RETRIEVAL)
        self.addCleanup(other.close)
        queries = [case.query(1) for _ in range(4)]
        rows = [(case.keys[i : i + 1], case.values[i : i + 1]) for i in range(3)]
        found = self.client.batch_decode(
            [
                kvtier.DecodeItem(self.session, 0, queries[0], *rows[0], options=DENSE),
                kvtier.DecodeItem(other, 7, queries[1], *rows[1]),
                kvtier.DecodeItem(other, 0, queries[2], *rows[2], options=DENSE),
                kvtier.DecodeItem(self.session, 0, queries[3], *rows[1], options=DENSE),
            ]
        )
        self.assertEqual([self.session.length(0), other.length(0)], [2, 1])
        wrong = found[1]
        assert isinstance(wrong, kvtier.InvalidArgumentError)
        self.assertEqual(wrong.reason, "INVALID_ARGUMENT")
        for place, seen in ((0, [0]), (2, [2]), (3, [0, 1])):
            result = found[place]
            assert isinstance(result, kvtier.AttendResult)
            expected, _ = dense_attention(queries[place], case.keys[seen], case.values[seen])
            np.testing.assert_allclose(result.out, expected, atol=TOLERANCE["float32"])

        attended = self.client.batch_attend(
            [kvtier.AttendItem(s, 0, queries[0], DENSE) for s in (self.session, other)]
        )
        for session, outcome in zip((self.session, other), attended):
            assert isinstance(outcome, kvtier.AttendResult)
            np.testing.assert_array_equal(outcome.out, session.attend(0, queries[0], DENSE).out)
        selected = self.client.batch_select(
            [kvtier.SelectItem(self.session, 0, queries[0]), kvtier.SelectItem(other, 1, queries[0])]
        )
        self.assertIsInstance(selected[0], kvtier.SelectResult)
        self.assertIsInstance(selected[1], kvtier.FailedPreconditionError)

    def test_arguments_are_refused_and_nothing_changes(self) -> None:
        case = Case(4)
        query = case.query(1)
        for dtype in ("float64", "int32"):
            with self.assertRaises(kvtier.InvalidArgumentError) as caught:
                self.session.append(0, case.keys.astype(dtype), case.values)
            self.assertEqual(
                caught.exception.message,
                "keys: expected float32, float16 or bfloat16 (or its bits as uint16), "
                f"found {dtype}",
            )
        with self.assertRaisesRegex(
            kvtier.InvalidArgumentError, "keys: expected what numpy takes.*found NoArray: of a GPU"
        ):
            self.session.append(0, NoArray(), case.values)
        with self.assertRaisesRegex(
            kvtier.InvalidArgumentError, "selected: expected int32, found float32"
        ):
            self.session.attend(0, query, selected=query)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected float32.*found >f4"):
            self.session.attend(0, query.astype(">f4"))
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected 1 to 4 dimensions"):
            self.session.attend(0, np.float32(1))
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected 4 tokens, found 3"):
            self.session.append(0, case.keys, case.values[:3])
        with self.assertRaises(kvtier.InvalidArgumentError) as caught:
            self.session.append(0, case.keys[:, :1], case.values)
        self.assertIn("key.shape: expected", caught.exception.message)
        if not self.data_plane:  # frames have no details
            fields = [violation.field for violation in caught.exception.details.violations]
            self.assertEqual(fields, ["key.shape"])
        with self.assertRaises(kvtier.InvalidArgumentError):
            self.session.append(2, case.keys, case.values)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected 0..1, found 2"):
            self.session.length(2)
        self.session.refresh()
        self.assertEqual(self.session.length(0), 0)

    def test_a_second_append_at_a_position_is_refused(self) -> None:
        case = Case(4)
        self.session.append(0, case.keys, case.values)
        self.session.stored(0, -4)  # as a client that has missed the reply
        with self.assertRaises(kvtier.PositionMismatchError) as caught:
            self.session.append(0, case.keys, case.values)
        self.assertEqual(caught.exception.code, kvtier.ErrorCode.ABORTED)
        with self.assertRaises(kvtier.PositionMismatchError):
            self.session.decode(0, case.query(1), case.keys[:1], case.values[:1])
        self.session.refresh()
        self.assertEqual(self.session.length(0), 4)

    def test_a_closed_session_refuses_calls(self) -> None:
        self.session.close()
        self.session.close()
        rows = Case(1)
        query = rows.query(1)
        calls: list[Any] = [
            self.session.refresh,
            lambda: self.session.append(0, rows.keys, rows.values),
            lambda: self.session.select(0, query),
            lambda: self.session.attend(0, query),
            lambda: self.session.decode(0, query, rows.keys, rows.values),
            lambda: self.session.fetch(0, np.zeros((2, 1), np.int32)),
            lambda: self.session.truncate(0),
            lambda: self.session.fork(1),
            lambda: self.session.publish([1]),
            lambda: self.client.batch_attend([kvtier.AttendItem(self.session, 0, query)]),
        ]
        for call in calls:
            with self.assertRaisesRegex(
                kvtier.FailedPreconditionError,
                "session: expected an open one, found one that is closed",
            ):
                call()

    def test_a_session_that_was_released_by_name_is_unknown(self) -> None:
        self.client.release(self.session.name)
        with self.assertRaises(kvtier.NotFoundError):
            self.session.refresh()

    def test_a_closed_client_makes_no_calls(self) -> None:
        self.client.close()
        rows = Case(1).keys
        calls: list[Any] = [
            self.session.refresh,
            lambda: self.session.append(0, rows, rows),
            lambda: self.session.decode(0, rows, rows, rows),
        ]
        for call in calls:
            with self.assertRaisesRegex(kvtier.FailedPreconditionError, "found one that is closed"):
                call()


class GrpcSessionTest(SessionTest):
    """The same over gRPC alone."""

    data_plane = False

    def test_a_session_that_is_dropped_leaves_no_threads(self) -> None:
        rows = Case(1)
        self.session.decode(0, rows.query(1), rows.keys, rows.values)  # starts threads of the client
        before = set(threading.enumerate())
        session = self.client.open(MODEL, RETRIEVAL)
        session.decode(0, rows.query(1), rows.keys, rows.values)
        made = set(threading.enumerate()) - before
        self.assertTrue(made)  # of the stream of its steps
        del session
        gc.collect()
        wait_until(self, lambda: not any(thread.is_alive() for thread in made))


class LeaseTest(ServerTest):
    options = ("--lease-seconds", "10")  # the client renews them three times as often

    def names(self, client: kvtier.Client) -> set[str]:
        reply = client.connection.sessions.ListSessions(
            session_pb2.ListSessionsRequest(), timeout=30
        )
        return set(reply.names)

    def test_a_session_lives_as_long_as_its_object(self) -> None:
        with kvtier.Client(self.server.address) as client:
            kept = client.open(MODEL, RETRIEVAL)
            dropped = client.open(MODEL, RETRIEVAL)
            name = dropped.name
            self.assertEqual(self.names(client), {kept.name, name})
            del dropped
            gc.collect()
            self.wait_until(lambda: name not in self.names(client))
            self.assertEqual(self.names(client), {kept.name})  # older, and renewed
            kept.refresh()

    def test_sessions_of_a_closed_client_end(self) -> None:
        first = kvtier.Client(self.server.address)
        session = first.open(MODEL, RETRIEVAL)
        first.close()
        with kvtier.Client(self.server.address) as second:
            self.wait_until(lambda: session.name not in self.names(second))


class EndOfServerTest(unittest.TestCase):
    def test_a_server_that_died_is_unavailable_and_its_sessions_are_stale(self) -> None:
        server = Server()
        self.addCleanup(server.close)
        client = kvtier.Client(server.address, timeout=10)
        self.addCleanup(client.close)
        session = client.open(MODEL, RETRIEVAL)
        case = Case(2)
        query = case.query(1)
        session.decode(0, query, case.keys[:1], case.values[:1])
        server.kill()
        with self.assertRaises(kvtier.UnavailableError):
            session.decode(0, query, case.keys[1:], case.values[1:])
        server.start()

        def answer() -> type[Exception]:
            with self.assertRaises(kvtier.ClientError) as raised:
                session.decode(0, query, case.keys[1:], case.values[1:])
            return type(raised.exception)

        # Until gRPC connects again, a tenth of a second after it last failed, it says unavailable.
        wait_until(self, lambda: answer() is not kvtier.UnavailableError)
        self.assertIs(answer(), kvtier.ServerEpochError)


if __name__ == "__main__":
    unittest.main()
