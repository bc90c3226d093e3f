"""One sequence on two GPUs: kvtier.torch's TokenParallel and HeadParallel over NCCL, a process for each
GPU, against dense attention in double precision and against one engine with all tokens.

Skipped without two GPUs, torch and kvtier-engine; KVTIER_TORCH_PYTHON names a Python that has them.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from torch_python import rerun_or_skip

try:
    import torch
    from torch import distributed
    from torch_test import (
        HEAD_DIM,
        QUERY_HEADS,
        TorchTest,
        dense_attention,
        engine_of,
        keys_and_values,
        random,
    )

    import kvtier
    from kvtier.torch import HeadParallel, Session, TokenParallel
except ImportError as error:
    rerun_or_skip(error)

RANKS = 2
SECONDS = 60  # after which a rank that waits for the other gives up
# Of outputs of about 1: products of bfloat16 on tensor cores.
TOLERANCE = 1e-2
_RANK, _MEETING = "KVTIER_NCCL_TEST_RANK", "KVTIER_NCCL_TEST_MEETING"


def step_of(seed: int) -> tuple[Any, Any, Any]:
    """A query and a token, of bfloat16 values."""
    key, value = (rows.cuda() for rows in keys_and_values(seed, 1))
    return random(seed + 100, 1, QUERY_HEADS, HEAD_DIM).bfloat16().float().cuda(), key, value


def by_tokens(rank: int, check: TorchTest) -> None:
    engine = engine_of(dense=True, backend=kvtier.Backend.CUDA)
    session = engine.open()
    parallel = TokenParallel(Session(session), block_tokens=2)
    keys, values = keys_and_values(20, 500)
    bounds = [0, 180, 500]
    share = slice(bounds[rank], bounds[rank + 1])
    parallel.append(0, keys[share].cuda(), values[share].cuda())
    seen = keys, values
    for i in range(9):
        query, key, value = step_of(30 + i)
        found = parallel.decode(0, query, key, value)
        seen = torch.cat([seen[0], key.cpu()]), torch.cat([seen[1], value.cpu()])
        expected = dense_attention(query.cpu(), *seen)
        check.assert_close([each.cpu() for each in found], expected, TOLERANCE)
        check.assert_close(parallel.attend(0, query), found, TOLERANCE)
        same_on_all_ranks(check, *found)
    own = session.length(0) - (share.stop - share.start)
    check.assertEqual(own, [i // 2 % RANKS for i in range(9)].count(rank))
    session.close()
    engine.close()


def by_heads(rank: int, check: TorchTest) -> None:
    keys, values = (rows.cuda() for rows in keys_and_values(60, 700))
    for dense in (True, False):
        engine = engine_of(dense, RANKS, backend=kvtier.Backend.CUDA)
        whole = engine_of(dense, backend=kvtier.Backend.CUDA)
        session, single = engine.open(), whole.open()
        parallel, one = HeadParallel(Session(session)), Session(single)
        for each in (parallel, one):
            each.append(0, keys, values)
        for i in range(5):
            query, key, value = step_of(70 + i)
            found = parallel.decode(0, query, key, value)
            check.assert_close(found, one.decode(0, query, key, value), TOLERANCE)
            same_on_all_ranks(check, *found)
        for closed in (session, single, engine, whole):
            closed.close()


def captured(rank: int, check: TorchTest) -> None:
    """Replays of a graph with a step and its collective call; the first rank stores all tokens."""
    engine = engine_of(dense=True, backend=kvtier.Backend.CUDA)
    sessions = [engine.open() for _ in range(2)]
    parallels = [TokenParallel(Session(session), block_tokens=1000) for session in sessions]
    keys, values = (rows.cuda() for rows in keys_and_values(80, 200))
    for parallel in parallels:
        parallel.append(0, keys[rank * 100 :][:100], values[rank * 100 :][:100])
        parallel.decode(0, *step_of(81))
    replayed, eager = parallels
    for session in sessions:
        session.reserve(16)
    given = [each.clone() for each in step_of(82)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = replayed.decode(0, *given)
    for i in range(8):
        step = step_of(90 + i)
        for each, now in zip(given, step):
            each.copy_(now)
        graph.replay()
        if rank == 0:
            sessions[0].advance(0, 1)
        check.assert_close(found, eager.decode(0, *step), TOLERANCE)
    check.assertEqual(sessions[0].length(0), sessions[1].length(0))
    torch.cuda.synchronize()
    del graph
    for closed in (*sessions, engine):
        closed.close()


def same_on_all_ranks(check: TorchTest, *tensors: Any) -> None:
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(RANKS)]
        distributed.all_gather(gathered, tensor.contiguous())
        check.assertTrue(all(torch.equal(each, tensor) for each in gathered))


def run_rank(rank: int, meeting: str) -> None:
    """In a process that sees one GPU."""
    torch.cuda.set_device(0)
    timeout = datetime.timedelta(seconds=SECONDS)
    distributed.init_process_group(
        "nccl", init_method=meeting, rank=rank, world_size=RANKS, timeout=timeout
    )
    try:
        for work in (by_tokens, by_heads, captured):
            work(rank, TorchTest())
            print(f"rank {rank}: {work.__name__} on {torch.cuda.get_device_name()}", flush=True)
    finally:
        distributed.destroy_process_group()


@unittest.skipUnless(torch.cuda.device_count() >= RANKS, f"not {RANKS} GPUs")
class NcclTest(unittest.TestCase):
    def test_ranks_on_two_gpus(self) -> None:
        # The library takes the first GPU of a process.
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(RANKS)))).split(",")
        with tempfile.TemporaryDirectory(prefix="kvtier-python-") as folder:
            meeting = f"file://{folder}/ranks"
            ranks = [
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).resolve())],
                    env={
                        **os.environ,
                        **{_RANK: str(rank), _MEETING: meeting, "CUDA_VISIBLE_DEVICES": gpus[rank]},
                    },
                )
                for rank in range(RANKS)
            ]
            try:
                codes = [process.wait(timeout=4 * SECONDS) for process in ranks]
            finally:
                for process in ranks:
                    process.kill()
        self.assertEqual(codes, [0] * RANKS)


if __name__ == "__main__":
    if _RANK in os.environ:
        run_rank(int(os.environ[_RANK]), os.environ[_MEETING])
    else:
        unittest.main()
