"""kvtier.torch: its operators by themselves, in compiled functions, and over a process group,
against dense attention in double precision and against one engine that holds everything.

Skipped without torch and kvtier-engine; KVTIER_TORCH_PYTHON names a Python that has them.
"""

from __future__ import annotations

import datetime
import gc
import tempfile
import unittest
from typing import Any, Callable

from torch_python import rerun_or_skip

try:
    import torch
    from torch import distributed
    from torch._dynamo.testing import CompileCounter

    import kvtier
    import kvtier_engine  # noqa: F401
    from kvtier.torch import HeadParallel, Session, TokenParallel
except ImportError as error:
    rerun_or_skip(error)

RANKS = 4
QUERY_HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 4, 64, 2
TOP_K = 96
SECONDS = 120  # after which a rank that waits for another gives up
# Sums of some hundred products in float32 against double precision.
TOLERANCE = 2e-5
# An engine with a half of the heads places rows and planes alike; sums are in another order.
ORDER = 2e-6


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys_and_values(seed: int, tokens: int, heads: int = KV_HEADS) -> tuple[Any, Any]:
    """Of bfloat16 values, so that stored ones are the same."""
    rows = random(seed, 2, tokens, heads, HEAD_DIM).bfloat16()
    return rows[0], rows[1]


def retrieval(top_k: int = TOP_K, **settings: Any) -> kvtier.RetrievalConfig:
    return kvtier.RetrievalConfig(
        **{
            "estimator": kvtier.Estimator.NORM_AWARE,
            "rule": kvtier.SelectionRule.TOP_K,
            "code": kvtier.SketchCode.SIGN,
            "num_planes": 256,
            "top_k": top_k,
            "sink_tokens": 16,
            "recent_tokens": 16,
            **settings,
        }
    )


def engine_of(
    dense: bool = False,
    share: int = 1,
    backend: kvtier.Backend = kvtier.Backend.CPU,
    **settings: Any,
) -> Any:
    mode = kvtier.LayerMode.DENSE if dense else kvtier.LayerMode.SPARSE
    model = kvtier.ModelConfig(
        layers=LAYERS,
        query_heads=QUERY_HEADS // share,
        kv_heads=KV_HEADS // share,
        head_dim=HEAD_DIM,
        layer_options=(kvtier.LayerConfig(mode=mode),) * LAYERS,
    )
    memory = kvtier.MemoryConfig(host_bytes=64 << 20, max_session_tokens=2048)
    return kvtier.Engine(model, retrieval(**settings), memory, backend=backend)


def dense_attention(query: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """Of one query, [1, query_heads, head_dim], over [tokens, kv_heads, head_dim], in double."""
    q = query[0].double().view(KV_HEADS, -1, HEAD_DIM)
    k, v = (rows.double().transpose(0, 1) for rows in (keys, values))
    logits = q @ k.transpose(1, 2) / HEAD_DIM**0.5
    out = logits.softmax(-1) @ v
    return out.reshape(1, QUERY_HEADS, HEAD_DIM), logits.logsumexp(-1).reshape(1, QUERY_HEADS)


class TorchTest(unittest.TestCase):
    def assert_close(self, found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
        for each, other in zip(found, expected):
            torch.testing.assert_close(
                each.double(), other.double(), atol=tolerance, rtol=tolerance
            )

    def session(self, engine: Any = None, **settings: Any) -> Session:
        engine = engine_of(**settings) if engine is None else engine
        session = engine.open()
        self.addCleanup(engine.close)
        self.addCleanup(session.close)
        return Session(session)


class OperatorsTest(TorchTest):
    def test_dense_steps_are_dense_attention(self) -> None:
        session = self.session(dense=True)
        keys, values = keys_and_values(1, 300)
        session.append(0, keys[:297], values[:297])
        for step in range(297, 300):
            query = random(step, 1, QUERY_HEADS, HEAD_DIM)
            found = session.decode(0, query, keys[step : step + 1], values[step : step + 1])
            expected = dense_attention(query, keys[: step + 1], values[: step + 1])
            self.assert_close(found, expected)
            self.assert_close(session.attend(0, query), expected)

    def test_sparse_steps_are_those_of_the_session(self) -> None:
        session, plain = self.session(), self.session().session
        keys, values = keys_and_values(2, 500)
        session.append(1, keys[:499], values[:499])
        plain.append(1, keys[:499], values[:499])
        query = random(3, 1, QUERY_HEADS, HEAD_DIM)
        found = session.decode(1, query, keys[499:], values[499:])
        expected = plain.decode(1, query, keys[499:], values[499:])
        for each, other in zip(found, expected):
            self.assertTrue(torch.equal(each, other))

    def test_selection_has_the_same_shape_at_every_length(self) -> None:
        # With an error target as many ids as it takes at most, 1.25 / .1^2.
        error = {"top_k": 0, "error_target": 0.1, "rule": kvtier.SelectionRule.PRIORITY}
        for settings, width in (({}, TOP_K), (error, 125)):
            with self.subTest(width):
                session = self.session(**settings)
                query = random(4, 2, QUERY_HEADS, HEAD_DIM)
                keys, values = keys_and_values(5, 400)
                for begin, end in ((0, 60), (60, 400)):
                    session.append(0, keys[begin:end], values[begin:end])
                    ids = session.select(0, query)
                    self.assertEqual((ids.shape, ids.dtype), ((2, KV_HEADS, width), torch.int32))
                    expected = session.session.select(0, query).ids
                    columns = expected.shape[2]
                    self.assertTrue(torch.equal(ids[..., :columns], expected))
                    self.assertTrue((ids[..., columns:] == -1).all())

    def test_operators_are_what_the_compiler_is_told(self) -> None:
        session = self.session()
        keys, values = keys_and_values(6, 50)
        query = random(7, 1, QUERY_HEADS, HEAD_DIM)
        first = session.order, session.handle, 0
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        for operator, arguments in (
            (torch.ops.kvtier.append, (*first, keys, values)),
            (torch.ops.kvtier.decode, (*first, query, keys[:1], values[:1])),
            (torch.ops.kvtier.attend, (*first, query)),
            (torch.ops.kvtier.select, (*first, KV_HEADS, TOP_K, query)),
            (torch.ops.kvtier.attend_share, (*first, query)),
        ):
            with self.subTest(str(operator)):
                torch.library.opcheck(operator.default, arguments, test_utils=checks)

    def test_refuses_what_no_step_can_be(self) -> None:
        session = self.session(sparsity=10.0)
        keys, values = keys_and_values(8, 20)
        session.append(0, keys, values)
        query = random(9, 1, QUERY_HEADS, HEAD_DIM)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "retrieval: expected top_k or"):
            session.select(0, query)
        for name, call in (
            ("keys", lambda: session.decode(0, query, keys[:1, :2], values[:1])),
            ("query", lambda: session.decode(0, query[:, :, :32], keys[:1], values[:1])),
            ("keys", lambda: session.append(0, keys.double(), values)),
            ("query", lambda: session.attend(0, query.requires_grad_())),
        ):
            with self.subTest(name):
                with self.assertRaisesRegex(kvtier.InvalidArgumentError, f"{name}: expected"):
                    call()
                self.assertEqual(session.session.length(0), 20)
        handle, order = session.handle, session.order
        session.session.close()
        with self.assertRaises(kvtier.FailedPreconditionError):
            torch.ops.kvtier.attend(order, handle, 0, query.detach())
        self.doCleanups()
        del session, name, call
        gc.collect()
        with self.assertRaisesRegex(kvtier.FailedPreconditionError, "session: expected one that"):
            torch.ops.kvtier.attend(order, handle, 0, query.detach())


class DecodeRowsTest(TorchTest):
    def test_rows_are_those_of_batch_decode(self) -> None:
        engine = engine_of()
        sessions, others = ([self.session(engine).session for _ in range(3)] for _ in range(2))
        for row, (session, other) in enumerate(zip(sessions, others)):
            keys, values = keys_and_values(30 + row, 300 + row)
            for each in (session, other):
                each.append(1, keys, values)
        options = kvtier.AttendOptions(softmax_scale=0.2)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            # Views of larger tensors, as models split them off.
            query = random(40, 3, 5, QUERY_HEADS, HEAD_DIM).to(dtype)[:, 1:3].transpose(1, 2)
            keys, values = random(41, 2, 3, 4, KV_HEADS, HEAD_DIM).to(dtype)[:, :, 2:].transpose(2, 3)
            found = engine.decode_rows(1, sessions, query, keys, values, options)
            self.assertEqual((found.dtype, found.shape), (dtype, (3, 2, QUERY_HEADS, HEAD_DIM)))
            rows = zip(others, *(each.transpose(1, 2) for each in (query, keys, values)))
            items = [kvtier.BatchItem(*row, options) for row in rows]
            for each, (expected, _) in zip(found, engine.batch_decode(1, items)):
                self.assertTrue(torch.equal(each, expected))
        self.assertEqual([session.length(1) for session in sessions], [306, 307, 308])

    def test_refuses_rows_and_changes_nothing(self) -> None:
        engine = engine_of()
        sessions = [self.session(engine).session for _ in range(2)]
        query = random(42, 2, QUERY_HEADS, 1, HEAD_DIM)
        key, value = random(43, 2, 2, KV_HEADS, 1, HEAD_DIM)
        sparse = random(44, 2, KV_HEADS, HEAD_DIM, 2)[..., :1].mT
        for message, given in (
            (r"query: expected \[batch, heads.*2 sessions, found shape", (query[0], key, value)),
            (r"key: expected \[batch, heads.*2 sessions, found shape", (query, key[:1], value)),
            ("query: expected float32, float16 or bfloat16", (query.double(), key, value)),
            ("value: expected a tensor without gradient", (query, key, value.clone().requires_grad_())),
            ("value: expected a tensor without negative bit", (query, key, torch._neg_view(value))),
            ("key: expected a tensor on the CPU", (query, key.to("meta"), value)),
            (r"keys: expected \[tokens, 4, 64\]", (query, key[:, :2], value)),
            ("values: expected last stride 1", (query, key, sparse)),
            (r"query: expected \[tokens, 8, 64\]", (query[..., :32], key, value)),
        ):
            with self.subTest(message):
                with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                    engine.decode_rows(0, sessions, *given)
        with self.assertRaisesRegex(kvtier.FailedPreconditionError, "one call at a time"):
            engine.decode_rows(0, [sessions[0]] * 2, query, key, value)
        rows = key[0].transpose(0, 1)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "values: .* without negative bit"):
            sessions[0].append(0, rows, torch._neg_view(rows))
        self.assertEqual([session.length(0) for session in sessions], [0, 0])
        sessions[1].close()
        with self.assertRaisesRegex(kvtier.FailedPreconditionError, "session: expected an open one"):
            engine.decode_rows(0, sessions, query, key, value)


class CompileTest(TorchTest):
    def test_compiled_steps_are_those_of_eager_code(self) -> None:
        for backend in ("aot_eager", "inductor"):
            with self.subTest(backend):
                torch._dynamo.reset()
                session, eager = self.session(), self.session()

                def step(own: Session, query: Any, keys: Any, values: Any) -> Any:
                    for layer in range(LAYERS):
                        before = own.attend(layer, query)[0]  # without the token that follows
                        own.append(layer, keys[:1], values[:1])
                        out, lse = own.decode(layer, query + before, keys[1:], values[1:])
                        ids = own.select(layer, query)
                        query = (query + out * lse[..., None].sigmoid()) * (ids >= 0).float().mean()
                    return query

                keys, values = keys_and_values(10, 306)
                for each in (session, eager):
                    for layer in range(LAYERS):
                        each.append(layer, keys[:300], values[:300])
                compiled = torch.compile(step, backend=backend, fullgraph=True)
                with torch.no_grad():
                    for first in (300, 302, 304):
                        query = random(first, 1, QUERY_HEADS, HEAD_DIM)
                        rows = slice(first, first + 2)
                        found = compiled(session, query, keys[rows], values[rows])
                        expected = step(eager, query, keys[rows], values[rows])
                        self.assert_close([found], [expected], 1e-5)
                self.assertEqual(session.session.length(), eager.session.length())

    def test_another_session_needs_no_new_code(self) -> None:
        torch._dynamo.reset()
        counted = CompileCounter()
        sessions = [self.session(dense=True) for _ in range(4)]
        compiled = torch.compile(lambda own, q, k, v: own.decode(0, q, k, v)[0], backend=counted)
        key, value = keys_and_values(11, 1)
        query = random(12, 1, QUERY_HEADS, HEAD_DIM)
        for session in sessions:
            found = compiled(session, query, key, value)
            self.assert_close([found], dense_attention(query, key, value)[:1])
        self.assertLessEqual(counted.frame_count, 2)


@unittest.skipUnless(torch.cuda.is_available(), "no GPU")
class CudaTest(TorchTest):
    def pair(self) -> tuple[Session, Session, Any, Any]:
        """Two sessions of the same 500 tokens, and keys and values for more."""
        engine = engine_of(backend=kvtier.Backend.CUDA)
        pair = self.session(engine), self.session(engine)
        keys, values = (rows.cuda() for rows in keys_and_values(90, 540))
        for each in pair:
            each.append(0, keys[:500], values[:500])
        return *pair, keys, values

    def test_replays_of_a_captured_step_are_those_of_eager_code(self) -> None:
        session, eager, keys, values = self.pair()
        session.session.reserve(40)
        query = torch.zeros(1, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        key, value = torch.zeros_like(keys[:1]), torch.zeros_like(values[:1])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out, lse = session.decode(0, query, key, value)
            ids = session.select(0, query)
        for step in range(500, 540):
            query.copy_(random(step, 1, QUERY_HEADS, HEAD_DIM))
            key.copy_(keys[step : step + 1])
            value.copy_(values[step : step + 1])
            graph.replay()
            session.session.advance(0, 1)
            expected = eager.decode(0, query, key, value)
            self.assertTrue(torch.equal(ids, eager.select(0, query)))
            self.assert_close((out, lse), expected, 1e-2)
        self.assertEqual(session.session.length(0), eager.session.length(0))

    def test_calls_are_ordered_on_the_current_stream(self) -> None:
        session, eager, keys, values = self.pair()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(500, 540):
                query = random(step, 1, QUERY_HEADS, HEAD_DIM).cuda() * 2  # of this stream
                rows = slice(step, step + 1)
                found = session.decode(0, query, keys[rows] + 0, values[rows] + 0)
        stream.synchronize()
        for step in range(500, 540):
            query = random(step, 1, QUERY_HEADS, HEAD_DIM).cuda() * 2
            rows = slice(step, step + 1)
            expected = eager.decode(0, query, keys[rows], values[rows])
        self.assert_close(found, expected, 1e-5)

    def test_compiled_steps_are_those_of_eager_code(self) -> None:
        torch._dynamo.reset()
        session, eager, keys, values = self.pair()
        compiled = torch.compile(
            lambda own, q, k, v: own.decode(0, q * 2, k, v)[0] * 2, backend="aot_eager"
        )
        with torch.no_grad():
            for step in range(500, 503):
                query, rows = random(step, 1, QUERY_HEADS, HEAD_DIM).cuda(), slice(step, step + 1)
                found = compiled(session, query, keys[rows], values[rows])
                expected = eager.decode(0, query * 2, keys[rows], values[rows])[0] * 2
                self.assert_close([found], [expected], 1e-5)


def on_every_rank(*works: Callable[[int], None]) -> None:
    """Runs each `work(rank)` in as many processes, joined by gloo."""
    with tempfile.TemporaryDirectory(prefix="kvtier-python-") as folder:
        torch.multiprocessing.spawn(_join, (works, f"file://{folder}/ranks"), nprocs=RANKS)


def _join(rank: int, works: tuple[Callable[[int], None], ...], meeting: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timeout
    )
    try:
        for work in works:
            work(rank)
    finally:
        distributed.destroy_process_group()


def _steps(tokens: int, seed: int) -> list[tuple[Any, Any, Any]]:
    steps = []
    for i in range(tokens):
        key, value = keys_and_values(seed + i, 1)
        steps.append((random(seed + 100 + i, 1, QUERY_HEADS, HEAD_DIM), key, value))
    return steps


def _dense_by_tokens(rank: int) -> None:
    """Shares of different lengths, one of them empty."""
    check = TorchTest()
    engine = engine_of(dense=True)
    session = engine.open()
    parallel = TokenParallel(Session(session), block_tokens=2)
    keys, values = keys_and_values(20, 400)
    bounds = [0, 100, 100, 350, 400]
    share = slice(bounds[rank], bounds[rank + 1])
    for compiled in (False, True):
        session.truncate(0)
        if share.start < share.stop:
            parallel.append(0, keys[share], values[share])
        decode: Any = parallel.decode
        if compiled:
            decode = torch.compile(decode, backend="aot_eager")
        seen, before = (keys, values), parallel.steps[0]
        for query, key, value in _steps(9, 30):
            found = decode(0, query, key, value)
            seen = torch.cat([seen[0], key]), torch.cat([seen[1], value])
            check.assert_close(found, dense_attention(query, *seen))
            check.assert_close(parallel.attend(0, query), found, ORDER)
        own = session.length(0) - (share.stop - share.start)
        held = [i // 2 % RANKS for i in range(before, before + 9)]
        check.assertEqual(own, held.count(rank))
    check.assertEqual(session.length(1), 0)
    session.close()
    engine.close()


def _sparse_by_tokens(rank: int) -> None:
    """What the ranks attend to, attended to by one engine with all tokens."""
    check = TorchTest()
    engine, whole = engine_of(top_k=24), engine_of()
    session, single = engine.open(), whole.open()
    parallel = TokenParallel(Session(session))
    keys, values = keys_and_values(40, 1200)
    share = slice(rank * 300, rank * 300 + 300)
    parallel.append(0, keys[share], values[share])
    for query, key, value in _steps(3, 50):
        found = parallel.decode(0, query, key, value)
        # The first rank stores the token behind its share; here it is behind all.
        mine = session.attend(0, query, with_selected=True).selected
        length = session.length(0)
        ends = torch.tensor([*range(16), *range(length - 16, length)], dtype=torch.int32)
        ids = torch.cat([mine[0], ends.expand(KV_HEADS, -1)], 1)
        moved = torch.where(ids < 300, ids + rank * 300, ids + 900)
        moved = torch.where(ids < 0, ids, moved).int()
        gathered = [torch.empty_like(moved) for _ in range(RANKS)]
        distributed.all_gather(gathered, moved)
        if single.length(0) == 0:
            single.append(0, keys, values)
        single.append(0, key, value)
        heads = []
        for head in range(KV_HEADS):
            row = torch.cat([each[head] for each in gathered]).unique()
            heads.append(row[row >= 0])
        width = max(len(row) for row in heads)
        selected = torch.full((1, KV_HEADS, width), -1, dtype=torch.int32)
        for head, row in enumerate(heads):
            selected[0, head, : len(row)] = row
        no_ends = kvtier.AttendOptions(retrieval=retrieval(sink_tokens=0, recent_tokens=0))
        expected = single.attend(0, query, no_ends, selected=selected)
        check.assert_close(found, expected)
    for each in (session, single, engine, whole):
        each.close()


def _by_heads(rank: int) -> None:
    """Against one engine with all heads, and of dense layers against double precision."""
    check = TorchTest()
    keys, values = keys_and_values(60, 500)
    for dense in (False, True):
        engine, whole = engine_of(dense, RANKS), engine_of(dense)
        session, single = engine.open(), whole.open()
        parallel = HeadParallel(Session(session))
        parallel.append(0, keys, values)
        single.append(0, keys, values)
        seen = keys, values
        for query, key, value in _steps(3, 70):
            found = parallel.decode(0, query, key, value)
            seen = torch.cat([seen[0], key]), torch.cat([seen[1], value])
            check.assert_close(found, single.decode(0, query, key, value), ORDER)
            check.assert_close(parallel.attend(0, query), found, ORDER)
            if dense:
                check.assert_close(found, dense_attention(query, *seen))
        for name, call in (
            ("query", lambda: parallel.attend(0, query[:, : QUERY_HEADS // RANKS])),
            ("key", lambda: parallel.decode(0, query, key[:, :1], value)),
            ("values", lambda: parallel.append(0, key, value[0])),
        ):
            with check.assertRaisesRegex(kvtier.InvalidArgumentError, f"{name}: expected"):
                call()
        check.assertEqual(session.length(0), single.length(0))
        for each in (session, single, engine, whole):
            each.close()


def _refused(rank: int) -> None:
    check = TorchTest()
    engine = engine_of()
    session = engine.open()
    with check.assertRaisesRegex(kvtier.InvalidArgumentError, "block_tokens: expected at least 1"):
        TokenParallel(Session(session), block_tokens=0)
    parallel = TokenParallel(Session(session))
    keys, values = keys_and_values(80, 2)
    with check.assertRaisesRegex(kvtier.InvalidArgumentError, r"query: expected \[1, query_heads"):
        parallel.decode(0, random(81, 2, QUERY_HEADS, HEAD_DIM), keys, values)
    check.assertEqual((session.length(0), parallel.steps), (0, [0] * LAYERS))
    session.close()
    engine.close()


class ParallelTest(unittest.TestCase):
    def test_shares_of_the_tokens(self) -> None:
        on_every_rank(_dense_by_tokens, _sparse_by_tokens, _refused)

    def test_shares_of_the_heads(self) -> None:
        on_every_rank(_by_heads)


if __name__ == "__main__":
    unittest.main()
