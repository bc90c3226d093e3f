"""Priority selection, scalar codes and biases against `kvtier serve`."""

from __future__ import annotations

import dataclasses
import unittest

import client_test
import kvtier
import numpy as np
from server import ServerTest


class BiasTest(ServerTest):
    """Over memory that is shared with the server."""

    data_plane = True

    def setUp(self) -> None:
        self.client = kvtier.Client(self.server.address, data_plane=self.data_plane)
        self.addCleanup(self.client.close)

    def test_a_sequence_has_one_list_for_all_heads(self) -> None:
        retrieval = kvtier.RetrievalConfig(
            selection=kvtier.Selection.PER_SEQUENCE, top_k=40, sink_tokens=4, recent_tokens=4
        )
        case = client_test.Case(301)
        session = self.client.open(client_test.MODEL, retrieval)
        self.addCleanup(session.close)
        session.append(0, case.keys[:300], case.values[:300])
        query = case.query(2)
        ids, scores, bias = session.select(0, query, with_scores=True, with_bias=True)
        assert scores is not None and bias is not None
        self.assertEqual(ids.shape, (2, 1, 40))
        self.assertTrue(np.all(np.diff(ids[:, 0]) > 0))
        found = session.attend(0, query, selected=ids, bias=bias)
        np.testing.assert_array_equal(found.out, session.attend(0, query).out)
        each = (2, client_test.MODEL.kv_heads, 40)
        repeated = session.attend(
            0, query, selected=np.broadcast_to(ids, each).copy(),
            bias=np.broadcast_to(bias, each).copy(),
        )
        np.testing.assert_array_equal(repeated.out, found.out)

    def test_biases_of_priority_selection_are_taken_back(self) -> None:
        priority = kvtier.RetrievalConfig(
            estimator=kvtier.Estimator.NORM_AWARE,
            rule=kvtier.SelectionRule.PRIORITY,
            code=kvtier.SketchCode.SCALAR,
            num_planes=128,
            top_k=40,
            sink_tokens=4,
            recent_tokens=4,
        )
        case = client_test.Case(301)
        session = self.client.open(client_test.MODEL, priority)
        self.addCleanup(session.close)
        session.append(0, case.keys[:300], case.values[:300])
        query = case.query(2)
        ids, scores, bias = session.select(0, query, with_bias=True)
        self.assertIsNone(scores)
        assert bias is not None
        self.assertEqual(bias.shape, ids.shape)
        self.assertGreaterEqual(float(bias.min()), 0)
        self.assertGreater(float(bias.max()), 0)
        found = session.attend(0, query, selected=ids, bias=bias)
        np.testing.assert_array_equal(found.out, session.attend(0, query).out)
        bare = session.attend(0, query, selected=ids)
        self.assertFalse(np.array_equal(found.out, bare.out))

        (chosen,) = self.client.batch_select([kvtier.SelectItem(session, 0, query, with_bias=True)])
        assert isinstance(chosen, kvtier.SelectResult) and chosen.bias is not None
        np.testing.assert_array_equal(chosen.bias, bias)
        items = [
            kvtier.AttendItem(session, 0, query, selected=ids, bias=bias),
            kvtier.AttendItem(session, 0, query, selected=ids),
        ]
        for item, expected in zip(self.client.batch_attend(items), (found, bare)):
            assert isinstance(item, kvtier.AttendResult)
            np.testing.assert_array_equal(item.out, expected.out)
        key, step = case.keys[300:], case.values[300:]
        (child,) = session.fork(1)
        self.addCleanup(child.close)
        one = {"selected": ids[:1], "bias": bias[:1]}
        out, _ = session.decode(0, query[:1], key, step, **one)
        batch = [kvtier.DecodeItem(child, 0, query[:1], key, step, **one)]
        (decoded,) = self.client.batch_decode(batch)
        assert isinstance(decoded, kvtier.AttendResult)
        np.testing.assert_array_equal(decoded.out, out)

        for wrong, message in (
            (bias[:, :, 1:], r"expected fp32 of the shape of selected, int32 \[2, 2, 40\], found"),
            (bias.astype(np.float16), "expected float32, found float16"),
            (bias.astype(np.float64), "expected float32"),
        ):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, f"bias: {message}"):
                session.attend(0, query, selected=ids, bias=wrong)
        for value in (-1, np.nan, np.inf):
            spoiled = bias.copy()
            spoiled[1, 0, 2] = value
            with self.assertRaisesRegex(
                kvtier.InvalidArgumentError, r"bias\[1, 0, 2\]: expected a finite number"
            ):
                session.attend(0, query, selected=ids, bias=spoiled)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "none without selected ids"):
            session.attend(0, query, bias=bias)
        top_k = kvtier.AttendOptions(
            retrieval=dataclasses.replace(priority, rule=kvtier.SelectionRule.TOP_K)
        )
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "none without the priority rule"):
            session.select(0, query, top_k, with_bias=True)

    def test_a_code_needs_its_sketch(self) -> None:
        scalar = kvtier.RetrievalConfig(
            estimator=kvtier.Estimator.NORM_AWARE, code=kvtier.SketchCode.SCALAR, num_planes=128
        )
        case = client_test.Case(100)
        extra = [scalar.sketch(client_test.MODEL.head_dim)]
        signs = client_test.RETRIEVAL
        with self.client.open(client_test.MODEL, signs, extra_sketches=extra) as session:
            session.append(0, case.keys, case.values)
            query = case.query(1)
            session.attend(0, query, kvtier.AttendOptions(retrieval=scalar))
            for changes in ({"code": kvtier.SketchCode.SIGN}, {"num_planes": 64}):
                other = dataclasses.replace(scalar, **changes)
                with self.assertRaises(kvtier.FailedPreconditionError):
                    session.attend(0, query, kvtier.AttendOptions(retrieval=other))
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "found 100"):
            self.client.open(client_test.MODEL, dataclasses.replace(scalar, num_planes=100))

    def test_the_preset_of_the_paper_opens(self) -> None:
        socket = kvtier.RetrievalConfig.socket()
        message = socket.message()
        self.assertEqual((message.planes_per_table, message.tables), (10, 60))
        self.assertEqual(socket.rule, kvtier.SelectionRule.TOP_K)
        self.client.open(client_test.MODEL, socket).close()


class BiasOverGrpcTest(BiasTest):
    """As messages."""

    data_plane = False


if __name__ == "__main__":
    unittest.main()
