#!/usr/bin/env python3
"""Long runs against `kvtier serve`: clients that die, very many sessions, readers that are slow, ends under load.

    KVTIER_BINARY=... KVTIER_ENDLESS_CLIENT=... soak.py [--small] [--json FILE] [CASE...]

Every case checks what the server answers to a bystander against double precision all the while, and raises at the
first wrong value, call that fails without a reason, or descriptor that stays. Times are reported, never asserted.
`scripts/soak.sh` runs it; ctest runs it with --small.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import threading
import time
from typing import Any, Iterator

import cases
import kvtier
import numpy as np
from bystander import (
    DENSE,
    MODEL,
    RETRIEVAL,
    TOLERANCE,
    Bystander,
    await_true,
    demand,
    descriptors,
    memory_mib,
    rows,
    running,
)
from cases import Case, Figures
from kvtier import tensors
from kvtier.v1 import attention_pb2, session_pb2
from server import BINARY, PATIENCE, Server, bfloat_bits

LEASE = 1.0
ENDLESS = os.environ.get("KVTIER_ENDLESS_CLIENT", "")


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
        alone = bystander.percentile_ms(99)
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
        beside, after = bystander.percentile_ms(99), memory_mib(server)
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


CASES: dict[str, Case] = {
    "kills": (kills, 1000, 16),
    "sessions": (sessions, 10_000, 300),
    "slow_readers": (slow_readers, 32, 8),
    "terms": (terms, 100, 3),
}

if __name__ == "__main__":
    cases.main(
        "Long runs against kvtier serve",
        "scripts/soak.sh",
        CASES,
        {"KVTIER_BINARY": BINARY, "KVTIER_ENDLESS_CLIENT": ENDLESS},
    )
