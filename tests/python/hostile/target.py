"""A server that is attacked, the bystander beside the attack, and the server's memory meanwhile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import tempfile
import threading
from pathlib import Path
from typing import Callable, Iterator

from bystander import Bystander, demand, descriptors, memory_mib, running
from cases import Figures
from server import Server

QUIET, BUSY = "quiet-token", "busy-token"  # credentials of the two tenants
#: Seconds between two steps of the bystander: an engine that decodes, and leaves the attack a core.
PAUSE = 0.005
STEPS_ALONE = 200
SAMPLE_SECONDS = 0.02


#: Takes address, seed and count; returns what it counted.
Attack = Callable[[str, int, int], dict[str, int]]


class Target:
    """`kvtier serve` with the tenants "quiet" and "busy", and a bystander of the first."""

    def __init__(self, *options: str, worker: bool = False, inflight_mib: int = 0) -> None:
        """`inflight_mib`: what the busy tenant may have in flight; 0: as much as the server."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-tenants-")
        self.server: Server | None = None
        try:
            tenants = Path(self._folder.name) / "tenants.json"
            tenants.write_text(
                json.dumps({"tenants": [_tenant("quiet", QUIET), _tenant("busy", BUSY, inflight_mib)]})
            )
            self.server = Server(
                "--tenants", str(tenants), "--worker", "on" if worker else "off", *options
            )
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def running(self) -> Server:
        assert self.server is not None
        return self.server

    @property
    def address(self) -> str:
        return self.running.address

    def close(self) -> None:
        self.running.close()
        self._folder.cleanup()


def _tenant(name: str, token: str, inflight_mib: int = 0) -> dict[str, object]:
    limits = {"max_inflight_bytes": inflight_mib << 20} if inflight_mib else {}
    return {
        **limits,
        "name": name,
        "token_sha256": hashlib.sha256(token.encode()).hexdigest(),
        "max_sessions": 64,
    }


class Beside:
    """What became of server and bystander under an attack: `figures` is filled when it is over."""

    def __init__(self) -> None:
        self.figures: Figures = {}
        self.peak_mib = 0.0


@contextlib.contextmanager
def attacked(*options: str, inflight_mib: int = 0) -> Iterator[tuple[Target, Beside]]:
    """A server under attack. The bystander steps alone first, then as long as the context lasts; an
    answer of it that is wrong, or fails, is raised, and so is the end of the server."""
    target = Target(*options, inflight_mib=inflight_mib)
    beside = Beside()
    try:
        bystander = Bystander(target.address, attempts=1, token=QUIET)
        try:
            for _ in range(STEPS_ALONE):
                bystander.step()
            alone = _latencies(bystander)
            bystander.seconds.clear()
            base = memory_mib(target.running, "RssAnon")
            base_descriptors = descriptors(target.running)
            beside.peak_mib = base
            with running(bystander, PAUSE), _sampled(target.running, beside):
                yield target, beside
            demand(target.running.process.poll() is None, "the server outlives the attack")
            beside.figures = {
                "bystander": {
                    "wrong_answers": 0,
                    "answers_checked": STEPS_ALONE + len(bystander.seconds),
                    "alone_ms": alone,
                    "beside_ms": _latencies(bystander),
                },
                "anonymous_mib": {
                    "base": base,
                    "peak": beside.peak_mib,
                    "end": memory_mib(target.running, "RssAnon"),
                },
                "descriptors": [base_descriptors, descriptors(target.running)],
            }
        finally:
            bystander.close()
    finally:
        target.close()


def _latencies(bystander: Bystander) -> dict[str, float]:
    return {f"p{percent}": bystander.percentile_ms(percent) for percent in (50, 99)}


@contextlib.contextmanager
def _sampled(server: Server, beside: Beside) -> Iterator[None]:
    ending = threading.Event()

    def sample() -> None:
        while not ending.wait(SAMPLE_SECONDS):
            with contextlib.suppress(OSError, AssertionError):  # a server that has ended is seen elsewhere
                beside.peak_mib = max(beside.peak_mib, memory_mib(server, "RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def in_processes(
    attack: Attack, address: str, count: int, processes: int = 2
) -> dict[str, int]:
    """Runs `attack(address, seed, count)` in processes of their own, which share `count`, so that
    they take nothing of the bystander's interpreter. Returns the sums of what they counted."""
    sums: dict[str, int] = {}
    with concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        shares = [count // processes + (i < count % processes) for i in range(processes)]
        started = [pool.submit(attack, address, i + 1, share) for i, share in enumerate(shares)]
        for future in started:
            for key, number in future.result().items():
                sums[key] = sums.get(key, 0) + number
    return dict(sorted(sums.items()))
