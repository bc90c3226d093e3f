#!/usr/bin/env python3
"""Long runs against `kvtier serve`: clients that die, very many sessions, readers that are slow, ends under load.

    KVTIER_BINARY=... KVTIER_ENDLESS_CLIENT=... soak.py [--small] [--json FILE] [CASE...]

Every case checks what the server answers to a bystander against double precision all the while, and raises at the
first wrong value, call that fails without a reason, or descriptor that stays. Times are reported, never asserted.
`scripts/soak.sh` runs it; ctest runs it with --small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import kvtier
import numpy as np
from kvtier import tensors
from kvtier.v1 import attention_pb2, session_pb2
from server import BINARY, PATIENCE, Server, bfloat_bits, dense_attention, from_bits

MODEL = kvtier.ModelConfig(layers=1, query_heads=2, kv_heads=1, head_dim=64)
RETRIEVAL = kvtier.RetrievalConfig(estimator=kvtier.Estimator.NORM_AWARE, num_planes=64, top_k=8)
DENSE = kvtier.AttendOptions(mode=kvtier.LayerMode.DENSE)
LEASE = 1.0
ENDLESS = os.environ.get("KVTIER_ENDLESS_CLIENT", "")
TOLERANCE = 1e-5  # of fp32 sums

Figures = dict[str, Any]


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def rows(seed: int, tokens: int, heads: int) -> Any:
    normal = np.random.default_rng(seed).standard_normal((tokens, heads, MODEL.head_dim), np.float32)
    return from_bits(bfloat_bits(normal))


class Bystander:
    """A session of its own, each of whose answers is compared with the oracle."""

    def __init__(self, address: str, attempts: int = 4) -> None:
        self.client = kvtier.Client(address, attempts=attempts)
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

    def p99_ms(self) -> float:
        return round(float(np.percentile(self.seconds, 99)) * 1e3, 2)

    def close(self) -> None:
        self.session.close()
        self.client.close()


@contextlib.contextmanager
def running(bystander: Bystander) -> Iterator[None]:
    """Lets a bystander step in a thread of its own."""
    ending = threading.Event()
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            while not ending.is_set():
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


def memory_mib(server: Server) -> float:
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise AssertionError("no VmRSS")


def names(client: kvtier.Client) -> int:
    count, token = 0, ""
    while True:
        reply = client.connection.sessions.ListSessions(
            session_pb2.ListSessionsRequest(page_size=1000, page_token=token), timeout=30
        )
        count += len(reply.names)
        token = reply.next_page_token
        if not token:
            return count


def await_true(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> float:
    """Returns the seconds until `condition` holds."""
    start = time.monotonic()
    while not condition():
        demand(time.monotonic() - start < patience, what)
        time.sleep(0.02)
    return round(time.monotonic() - start, 2)


def kills(count: int) -> Figures:
    """Clients that are killed amid their steps, eight at a time."""
    server = Server("--lease-seconds", str(LEASE))
    bystander = Bystander(server.address)

    def kill(number: int) -> None:
        clients = [
            subprocess.Popen([ENDLESS, server.address], stdout=subprocess.PIPE) for _ in range(number)
        ]
        for client in clients:
            assert client.stdout is not None
            demand(client.stdout.readline().startswith(b"sessions/"), "a client opens a session")
        time.sleep(random.uniform(0.0, 0.05))  # wherever each is
        for client in clients:
            client.kill()
            client.wait()
            assert client.stdout is not None
            client.stdout.close()

    def settled() -> bool:
        return names(bystander.client) == 1

    try:
        with running(bystander):
            # What the allocator and the cache of replies keep, they have after these.
            for _ in range(max(4, count // 80)):
                kill(8)
            await_true(settled, "sessions of killed clients end")
            base_fds, base_mib = descriptors(server), memory_mib(server)
            series = [base_mib]
            for first in range(0, count, 8):
                kill(min(8, count - first))
                if first * 10 // count != (first + 8) * 10 // count:
                    series.append(memory_mib(server))
            seconds = await_true(
                lambda: settled() and descriptors(server) <= base_fds,
                "sessions and descriptors of killed clients go with their leases",
            )
            end_mib = memory_mib(server)
        demand(end_mib <= base_mib * 1.1 + 8, f"memory comes back: {base_mib} to {end_mib} MiB")
        return {
            "kills": count,
            "wrong_answers": 0,
            "answers_checked": len(bystander.seconds),
            "lease_seconds": LEASE,
            "seconds_until_at_base": seconds,
            "descriptors": [base_fds, descriptors(server)],
            "resident_mib": [base_mib, end_mib],
            "resident_mib_by_tenths": series,
        }
    finally:
        bystander.close()
        server.close()


def sessions(count: int) -> Figures:
    """Very many sessions of one client, each with a token of its own."""
    server = Server("--host-memory-mib", "4096", "--device-memory-mib", "2048", "--lease-seconds", "30")
    client = kvtier.Client(server.address, timeout=120)
    try:
        keys, values = rows(4, count, MODEL.kv_heads), rows(5, count, MODEL.kv_heads)
        start = time.monotonic()
        opened = []
        for i in range(count):
            session = client.open(MODEL, RETRIEVAL, capacity_tokens=64)
            session.append(0, keys[i : i + 1], values[i : i + 1])
            opened.append(session)
        open_seconds = time.monotonic() - start
        demand(names(client) == count, "every session is listed")
        mib, fds = memory_mib(server), descriptors(server)
        checked = random.Random(6).sample(range(count), min(count, 1000))
        query = rows(7, 1, MODEL.query_heads)
        for i in checked:
            # Over one token, attention is its value.
            out, _ = opened[i].attend(0, query, DENSE)
            np.testing.assert_allclose(out[0], np.repeat(values[i], 2, axis=0), atol=TOLERANCE)
        start = time.monotonic()
        for session in opened:
            session.close()
        close_seconds = time.monotonic() - start
        demand(names(client) == 0, "released sessions are gone")
        return {
            "sessions": count,
            "answers_checked": len(checked),
            "open_and_append_per_second": round(count / open_seconds),
            "release_per_second": round(count / close_seconds),
            "resident_mib": mib,
            "descriptors": fds,
        }
    finally:
        client.close()
        server.close()


def slow_readers(count: int) -> Figures:
    """Streams whose replies nobody reads, beside a bystander."""
    server = Server("--stream-idle-seconds", "600")
    bystander = Bystander(server.address)
    try:
        for _ in range(500):
            bystander.step()
        alone = bystander.p99_ms()
        client = kvtier.Client(server.address)
        open_, calls, sent = [], [], 0
        query = bfloat_bits(rows(8, 64, MODEL.query_heads))
        key = bfloat_bits(rows(9, 64, MODEL.kv_heads))
        for _ in range(count):
            session = client.open(MODEL, RETRIEVAL)
            open_.append(session)

            def steps(name: str = session.name) -> Iterator[Any]:
                nonlocal sent
                for step in range(200):
                    request = attention_pb2.DecodeRequest(session=name, step=step + 1)
                    request.options.CopyFrom(DENSE.message())
                    for message, array in (
                        (request.query, query),
                        (request.key, key),
                        (request.value, key),
                    ):
                        tensors.fill(message, array)
                    sent += 1
                    yield request

            calls.append(client.connection.attention.Decode(steps(), timeout=600))
        last = -1

        def stands_still() -> bool:
            nonlocal last
            last, before = sent, last
            time.sleep(0.5)
            return last == before

        await_true(stands_still, "streams without readers stop", patience=300)
        bystander.seconds.clear()
        before = memory_mib(server)
        for _ in range(2000):
            bystander.step()
        beside, after = bystander.p99_ms(), memory_mib(server)
        for call in calls:
            call.cancel()
        for session in open_:
            session.close()
        client.close()
        demand(names(bystander.client) == 1, "sessions of slow readers are released")
        return {
            "slow_readers": count,
            "requests_sent": sent,
            "answers_checked": 2500,
            "bystander_p99_ms_alone": alone,
            "bystander_p99_ms_beside": beside,
            "resident_mib": [before, after],
        }
    finally:
        bystander.close()
        server.close()


def terms(count: int) -> Figures:
    """SIGTERM amid calls: the server ends with 0, and tells callers why."""
    slowest = 0.0
    answered = 0
    for _ in range(count):
        server = Server()
        try:
            started = threading.Barrier(3)
            failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
            answers = [0, 0]

            def load(index: int) -> None:
                bystander = Bystander(server.address, attempts=1)
                try:
                    for i in range(1_000_000):
                        bystander.step()
                        answers[index] += 1
                        if i == 10:
                            started.wait()
                except (kvtier.UnavailableError, kvtier.CancelledError):
                    pass
                except BaseException as failure:
                    failures.put(failure)
                finally:
                    bystander.close()

            threads = [threading.Thread(target=load, args=(i,)) for i in range(2)]
            for thread in threads:
                thread.start()
            started.wait(PATIENCE)
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(PATIENCE)
            slowest = max(slowest, time.monotonic() - start)
            for thread in threads:
                thread.join()
            if not failures.empty():
                raise failures.get()
            demand(code == 0, f"the server ends with 0, not {code}")
            answered += sum(answers)
        finally:
            server.close()
    return {"sigterms": count, "answers_checked": answered, "slowest_end_seconds": round(slowest, 2)}


CASES: dict[str, tuple[Callable[[int], Figures], int, int]] = {
    "kills": (kills, 1000, 16),
    "sessions": (sessions, 10_000, 300),
    "slow_readers": (slow_readers, 32, 8),
    "terms": (terms, 100, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Long runs against kvtier serve")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--small", action="store_true", help="as many as fit a test suite")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    unknown = [case for case in arguments.cases if case not in CASES]
    if unknown:
        parser.error(f"CASE: expected {', '.join(CASES)}, found {unknown[0]}")
    for variable, program in (("KVTIER_BINARY", BINARY), ("KVTIER_ENDLESS_CLIENT", ENDLESS)):
        if not Path(program).is_file():
            parser.error(f"{variable}: expected a program of the build, found {program!r}")
    report: Figures = {
        "command": "scripts/soak.sh " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "load_at_start": round(os.getloadavg()[0], 1),
        "cases": {},
    }
    for name in arguments.cases or CASES:
        case, full, small = CASES[name]
        start = time.monotonic()
        figures = case(small if arguments.small else full)
        figures["seconds"] = round(time.monotonic() - start, 1)
        report["cases"][name] = figures
        print(name, json.dumps(figures), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
