"""SIGKILL of worker and supervisor, amid writes of pages and of sessions, whose histories are kept."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Callable

import kvtier
import numpy as np
from bystander import MODEL, RETRIEVAL, demand, rows
from cases import Figures
from hostile.target import BUSY, QUIET, Target
from numpy.typing import NDArray
from server import PATIENCE, Server, bfloat_bits

PAGE = 16_384
KEYS = 24  # of one writer
AT_ONCE = 4  # pages of a put
CAPACITY = 512
WORKERS_PER_SUPERVISOR = 2  # kills of a worker for each of a supervisor; more in a row are waited after
LEAST_OPERATIONS = 60  # of each writer between two kills
_HEAD = struct.Struct("<QQQ")  # writer, key, version

_GONE = (kvtier.UnavailableError, kvtier.CancelledError, kvtier.DeadlineExceededError)


def contents(writer: int, key: int, version: int) -> NDArray[np.uint8]:
    """A page that says what it is, the rest of which follows from that."""
    fill = np.random.default_rng([writer, key, version]).bytes(PAGE - _HEAD.size)
    return np.frombuffer(_HEAD.pack(writer, key, version) + fill, np.uint8)


class Killed(Exception):
    """The server was killed amid a call, or before it."""


def calling(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except _GONE as error:
        raise Killed from error
    except kvtier.AbortedError as error:
        demand(error.reason in ("SERVER_EPOCH", "CANCELLED"), f"a call ends for a reason: {error}")
        raise Killed from error


class Writer:
    """Puts, reads and removes pages under keys of its own, and appends to sessions of its own. What a
    read may find is what was acknowledged, or was under way when the server was killed."""

    def __init__(self, number: int, token: str) -> None:
        self.number = number
        self.counts: Counter[str] = Counter()
        #: Sessions since the last kill, with the times when their servers had answered. A server that
        #: is back soon may open one for a writer that has not seen the kill.
        self.opened: list[tuple[float, str]] = []
        self._token = token
        self._random = Random(number)
        self._version = 0
        #: Versions that a key may have, beside none.
        self._allowed: list[set[int]] = [set() for _ in range(KEYS)]
        self._open_session: kvtier.RemoteSession | None = None
        self._rows: list[int] = []

    def forget(self) -> None:
        """The server began with nothing: no page of before may ever be seen."""
        self._allowed = [set() for _ in range(KEYS)]

    def live(self, address: str, progress: Callable[[], None]) -> None:
        """Works until the server is killed."""
        self.opened.clear()
        self._open_session = None
        with kvtier.Client(address, token=self._token, attempts=1) as client:
            try:
                pages = calling(lambda: client.open_pages("kills", PAGE))
                while True:
                    kind = self._random.random()
                    if kind < 0.35:
                        self._put(pages)
                    elif kind < 0.65:
                        self._read(pages)
                    elif kind < 0.72:
                        self._remove(pages)
                    else:
                        self._step(client)
                    progress()
            except Killed:
                pass

    def _hash(self, key: int) -> bytes:
        return struct.pack("<QQ", self.number, key)

    def _put(self, pages: kvtier.RemotePages) -> None:
        keys = self._random.sample(range(KEYS), AT_ONCE)
        versions = []
        for key in keys:
            self._version += 1
            versions.append(self._version)
        puts = [
            kvtier.PagePut(self._hash(key), 0, contents(self.number, key, version))
            for key, version in zip(keys, versions)
        ]
        before = [set(self._allowed[key]) for key in keys]
        for key, version in zip(keys, versions):
            self._allowed[key].add(version)  # from now on, until it is known
        for key, version, old, outcome in zip(keys, versions, before, calling(lambda: pages.put(puts))):
            if isinstance(outcome, kvtier.FoundPage):
                demand(not outcome.existed or bool(old), "no page is there that has not been put")
                self._allowed[key] = old if outcome.existed else {version}
                self.counts["pages_acknowledged"] += not outcome.existed

    def _read(self, pages: kvtier.RemotePages) -> None:
        for key in self._random.sample(range(KEYS), AT_ONCE):
            found = calling(lambda: pages.lookup([self._hash(key)], [0]))
            if not found:
                self.counts["pages_missed"] += 1
                continue
            (outcome,) = calling(lambda: pages.get([found[0].handle]))
            if not isinstance(outcome, np.ndarray):
                demand(outcome.reason in ("PAGE_GONE", "NOT_ANSWERED"), f"a page or a miss, found {outcome}")
                continue
            writer, stored, version = _HEAD.unpack_from(outcome.tobytes())
            demand((writer, stored) == (self.number, key), "a page is that of its key")
            demand(
                version in self._allowed[key],
                f"a page is one of {self._allowed[key]}, acknowledged or under way, found {version}",
            )
            np.testing.assert_array_equal(outcome, contents(writer, key, version))
            self.counts["pages_read"] += 1

    def _remove(self, pages: kvtier.RemotePages) -> None:
        (key,) = self._random.sample(range(KEYS), 1)
        found = calling(lambda: pages.lookup([self._hash(key)], [0]))
        if found and calling(lambda: pages.remove([found[0].handle])) == [None]:
            self._allowed[key] = set()
            self.counts["pages_removed"] += 1

    def _step(self, client: kvtier.Client) -> None:
        """Appends a token, whose number tells its rows, truncates, or compares all."""
        session = self._open_session
        if session is None or (len(self.opened) < 8 and self._random.random() < 0.05):
            session = calling(lambda: client.open(MODEL, RETRIEVAL, capacity_tokens=CAPACITY))
            self._open_session = session
            self.opened.append((time.monotonic(), session.name))
            self._rows = []
        assert session is not None
        if len(self._rows) == CAPACITY or (self._rows and self._random.random() < 0.05):
            length = self._random.randrange(len(self._rows))
            calling(lambda: session.truncate(length))
            del self._rows[length:]
        self._version += 1
        row = bfloat_bits(rows(self._version, 1, MODEL.kv_heads))
        calling(lambda: session.append(0, row, row))
        self._rows.append(self._version)
        if self._random.random() < 0.2:
            ids = np.arange(len(self._rows), dtype=np.int32)[None, :]
            found = calling(lambda: session.fetch(0, ids))
            expected = np.stack([bfloat_bits(rows(seed, 1, 1))[0, 0] for seed in self._rows])
            for stored in (found.keys, found.values):
                np.testing.assert_array_equal(np.asarray(stored).view(np.uint16)[0], expected)
            self.counts["tokens_compared"] += len(self._rows)

    def check_names(self, address: str, killed: float) -> None:
        """Raises unless the server answers each session opened before `killed` with SERVER_EPOCH."""
        with kvtier.Client(address, token=self._token) as client:
            for name in [name for opened, name in self.opened if opened < killed]:
                try:
                    client.session_info(name)
                except kvtier.AbortedError as error:
                    demand(error.reason == "SERVER_EPOCH", f"expected SERVER_EPOCH, found {error}")
                    self.counts["names_refused"] += 1
                else:
                    raise AssertionError("a session of before a kill is there")


def worker_of(server: Server) -> int:
    parent = server.process.pid
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("the supervisor has a worker")


def _await_answers(address: str, start: float) -> float:
    """Returns the seconds from `start` until a call is answered."""
    while True:
        try:
            with kvtier.Client(address, token=QUIET, attempts=1, data_plane=False) as client:
                client.list_sessions()
                return time.monotonic() - start
        except kvtier.ClientError as error:
            demand(time.monotonic() - start < 2 * PATIENCE, f"the server is back, found {error}")
        time.sleep(0.01)


def _one_life(target: Target, writers: list[Writer], kill: Callable[[], None]) -> float:
    """Lets the writers work, kills, and waits until all have seen it. Returns the time before the kill."""
    done = threading.Semaphore(0)
    failures: list[BaseException] = []

    def live(writer: Writer) -> None:
        try:
            writer.live(target.address, done.release)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=live, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for _ in range(LEAST_OPERATIONS * len(writers)):
        acquired = False
        end = time.monotonic() + PATIENCE
        while not acquired and not failures and time.monotonic() < end:
            acquired = done.acquire(timeout=0.1)
        if not acquired:
            break
    time.sleep(Random().uniform(0.0, 0.1))  # wherever each is
    killed = time.monotonic()
    kill()
    for thread in threads:
        thread.join(2 * PATIENCE)
        demand(not thread.is_alive(), "calls of before a kill end")
    if failures:
        raise failures[0]
    return killed


def run(count: int) -> Figures:
    """`count` kills, two thirds of them of the worker, amid the work of two writers of each tenant."""
    target = Target(worker=True)
    writers = [Writer(i, (QUIET, BUSY)[i % 2]) for i in range(4)]
    kills: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {"worker": [], "supervisor": []}
    try:
        _await_answers(target.address, time.monotonic())
        while sum(kills.values()) < count:
            supervisor = sum(kills.values()) % (WORKERS_PER_SUPERVISOR + 1) == WORKERS_PER_SUPERVISOR
            what = "supervisor" if supervisor else "worker"
            worker = worker_of(target.running)

            def kill() -> None:
                if supervisor:
                    target.running.kill()
                else:
                    os.kill(worker, signal.SIGKILL)

            killed = _one_life(target, writers, kill)
            kills[what] += 1
            if supervisor:
                target.running.start()
                for writer in writers:
                    writer.forget()
            seconds[what].append(_await_answers(target.address, killed))
            for writer in writers:
                writer.check_names(target.address, killed)
        demand(target.running.process.poll() is None, "the server serves after all")
    finally:
        target.close()
    counts = sum((writer.counts for writer in writers), Counter())
    return {
        "kills": dict(kills),
        "wrong_pages": 0,
        "wrong_tokens": 0,
        **dict(sorted(counts.items())),
        "seconds_until_answers": {
            what: {"median": round(float(np.median(times)), 2), "max": round(max(times), 2)}
            for what, times in seconds.items()
            if times
        },
    }
