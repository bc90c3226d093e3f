"""A client whose every answer is compared with double precision, and what is read of a server meanwhile."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import kvtier
import numpy as np
from server import PATIENCE, Server, bfloat_bits, dense_attention, from_bits

MODEL = kvtier.ModelConfig(layers=1, query_heads=2, kv_heads=1, head_dim=64)
RETRIEVAL = kvtier.RetrievalConfig(
    rule=kvtier.SelectionRule.TOP_K, code=kvtier.SketchCode.SIGN, num_planes=64, top_k=8
)
DENSE = kvtier.AttendOptions(mode=kvtier.LayerMode.DENSE)
TOLERANCE = 1e-5  # of fp32 sums


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def rows(seed: int, tokens: int, heads: int) -> Any:
    normal = np.random.default_rng(seed).standard_normal((tokens, heads, MODEL.head_dim), np.float32)
    return from_bits(bfloat_bits(normal))


class Bystander:
    """A session of its own, each of whose answers is compared with the oracle."""

    def __init__(self, address: str, attempts: int = 4, token: str = "") -> None:
        self.client = kvtier.Client(address, attempts=attempts, token=token)
        self.session = self.client.open(MODEL, RETRIEVAL)
        self.keys, self.values = rows(1, 512, MODEL.kv_heads), rows(2, 512, MODEL.kv_heads)
        self.queries = rows(3, 512, MODEL.query_heads)
        self.seconds: list[float] = []

    def step(self) -> None:
        at = self.session.length(0)
        if at == len(self.keys):
            self.session.truncate(0)
            at = 0
        query = self.queries[at : at + 1]
        start = time.monotonic()
        out, _ = self.session.decode(
            0, query, self.keys[at : at + 1], self.values[at : at + 1], DENSE
        )
        self.seconds.append(time.monotonic() - start)
        expected, _ = dense_attention(query, self.keys[: at + 1], self.values[: at + 1])
        np.testing.assert_allclose(out, expected, atol=TOLERANCE)

    def percentile_ms(self, percent: float) -> float:
        return round(float(np.percentile(self.seconds, percent)) * 1e3, 2)

    def close(self) -> None:
        self.session.close()
        self.client.close()


@contextlib.contextmanager
def running(bystander: Bystander, pause: float = 0.0) -> Iterator[None]:
    """Lets a bystander step in a thread of its own, `pause` seconds between two steps."""
    ending = threading.Event()
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            while not ending.wait(pause):
                bystander.step()
        except BaseException as failure:
            failures.put(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
    if not failures.empty():
        raise failures.get()


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def memory_mib(server: Server, field: str = "VmRSS") -> float:
    """Returns a figure of /proc/PID/status, as `RssAnon`."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise AssertionError(f"no {field}")


def await_true(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> float:
    """Returns the seconds until `condition` holds."""
    start = time.monotonic()
    while not condition():
        demand(time.monotonic() - start < patience, what)
        time.sleep(0.02)
    return round(time.monotonic() - start, 2)
