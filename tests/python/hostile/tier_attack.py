"""Tiers that lie: the disk cache, memcached and Redis are changed while a server reads from them.

The files of the disk cache have no names; they are reached as `/proc/PID/fd` of the server, which a process of its
user may. What memcached and Redis keep is reached as any of their clients reaches it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from random import Random
from typing import Callable, Iterator, Protocol

import kvtier
import numpy as np
import pymemcache  # type: ignore[import-untyped]
import redis
from bystander import DENSE, demand
from cases import Figures
from hostile.target import BUSY, QUIET, Target, attacked
from server import PATIENCE, bfloat_bits, dense_attention, from_bits

#: Another geometry than the bystander's: an engine of its own.
MODEL = kvtier.ModelConfig(layers=1, query_heads=1, kv_heads=1, head_dim=64)
TOKENS = 8192  # 2 MiB, in an engine with 1 MiB
TOLERANCE = 1e-4  # of fp32 sums over TOKENS rows
KINDS = ("flip", "cut", "swap", "replay", "wipe")


class Tier(Protocol):
    """What can be changed behind a server's back."""

    def change(self, kind: str, random: Random) -> bool:
        """Makes a change; returns whether there was anything to change."""


class Disk:
    """The segments that a server has open below a folder."""

    def __init__(self, process: int, folder: Path) -> None:
        self._descriptors = Path(f"/proc/{process}/fd")
        self._folder = str(folder.resolve())
        self._kept: dict[int, bytes] = {}  # by inode

    def _segments(self) -> list[Path]:
        found = []
        for path in self._descriptors.iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(path)
                if name.startswith(self._folder) and name.endswith(".segment (deleted)"):
                    found.append(path)
        return found

    def change(self, kind: str, random: Random) -> bool:
        changed = False
        for path in self._segments():
            with contextlib.suppress(FileNotFoundError):  # the segment has gone
                changed |= self._change_segment(path, kind, random)
        return changed

    def _change_segment(self, path: Path, kind: str, random: Random) -> bool:
        with path.open("r+b", buffering=0) as file:
            inode, size = os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_size
            if size < 2 * 4096:
                return False
            old = os.pread(file.fileno(), size, 0)
            data = bytearray(old)
            blocks = len(data) // 4096
            if kind == "flip":
                for _ in range(8):
                    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            elif kind == "cut":
                os.ftruncate(file.fileno(), random.randrange(size))
                return True
            elif kind == "swap":
                for _ in range(8):
                    a, b = (4096 * random.randrange(blocks) for _ in range(2))
                    data[a : a + 4096], data[b : b + 4096] = data[b : b + 4096], data[a : a + 4096]
            elif kind == "replay":
                data[:] = self._kept.get(inode, old)[:size].ljust(size, b"\0")
                self._kept[inode] = old
            else:
                data = bytearray(size)
            os.pwrite(file.fileno(), data, 0)
        return True


class Values(Protocol):
    """A server of values, as its clients see it."""

    def names(self) -> list[bytes]: ...
    def get(self, name: bytes) -> bytes | None: ...
    def set(self, name: bytes, value: bytes) -> None: ...
    def flush(self) -> None: ...


class Memcached:
    def __init__(self, path: str) -> None:
        self._client = pymemcache.Client(path, timeout=PATIENCE)

    def names(self) -> list[bytes]:
        listed: bytes = self._client.raw_command("lru_crawler metadump all", "END\r\n")
        names = [line.split()[0] for line in listed.splitlines() if line.startswith(b"key=")]
        return [urllib.parse.unquote_to_bytes(name.removeprefix(b"key=")) for name in names]

    def get(self, name: bytes) -> bytes | None:
        value: bytes | None = self._client.get(name)
        return value

    def set(self, name: bytes, value: bytes) -> None:
        self._client.set(name, value, noreply=False)

    def flush(self) -> None:
        self._client.flush_all(noreply=False)


class Redis:
    def __init__(self, path: str) -> None:
        self._client = redis.Redis(unix_socket_path=path, socket_timeout=PATIENCE)

    def names(self) -> list[bytes]:
        return list(self._client.scan_iter(count=1000))

    def get(self, name: bytes) -> bytes | None:
        value: bytes | None = self._client.get(name)  # type: ignore[assignment]
        return value

    def set(self, name: bytes, value: bytes) -> None:
        self._client.set(name, value)

    def flush(self) -> None:
        self._client.flushall()


class Remote:
    """Copies of pages on a server of values."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._kept: dict[bytes, bytes] = {}

    def change(self, kind: str, random: Random) -> bool:
        if kind == "wipe":
            self._values.flush()
            return True
        names = self._values.names()
        found = [(name, value) for name in names if (value := self._values.get(name))]
        if len(found) < 2:
            return False
        others = [value for _, value in found]
        random.shuffle(others)
        for (name, value), other in zip(found, others):
            self._values.set(name, self._changed(kind, random, name, value, other))
        self._kept.update(found)
        return True

    def _changed(self, kind: str, random: Random, name: bytes, value: bytes, other: bytes) -> bytes:
        if kind == "flip":
            turned = bytearray(value)
            turned[random.randrange(len(turned))] ^= 1 << random.randrange(8)
            return bytes(turned)
        if kind == "cut":
            return value[: random.randrange(len(value))]
        return other if kind == "swap" else self._kept.get(name, value)


class Owner:
    """A session whose pages do not fit into host memory, and what was appended to it."""

    def __init__(self, client: kvtier.Client, random: Random) -> None:
        self._client = client
        self._random = random
        self._session: kvtier.RemoteSession | None = None
        self._rows = np.empty((0, 1, MODEL.head_dim), np.uint16)
        self.counts: Counter[str] = Counter()

    def read(self) -> None:
        """Compares all rows, and an answer over them; one that is lost begins anew."""
        try:
            self._read()
        except kvtier.DataLossError:
            self.counts["lost"] += 1
            self.close()
        except kvtier.UnavailableError as error:
            # No answer of a tier in time: nothing has changed.
            demand("DEVICE_LOST" != error.reason, f"no device is lost: {error}")
            self.counts["unavailable"] += 1

    def _read(self) -> None:
        session = self._session
        if session is None:
            session = self._session = self._client.open(MODEL, capacity_tokens=TOKENS)
            self._rows = self._rows[:0]
        if len(self._rows) < TOKENS:
            fresh = self._fresh(TOKENS - len(self._rows))
            session.append(0, fresh, fresh)
            self._rows = np.concatenate([self._rows, fresh])
        found = session.fetch(0, np.arange(TOKENS, dtype=np.int32)[None, :])
        for stored in (found.keys, found.values):
            bits = np.asarray(stored).view(np.uint16).reshape(self._rows.shape)
            np.testing.assert_array_equal(bits, self._rows)
        query = from_bits(bfloat_bits(np.full((1, 1, MODEL.head_dim), 0.25, np.float32)))
        out, _ = session.attend(0, query, DENSE)
        rows = from_bits(self._rows)
        expected, _ = dense_attention(query, rows, rows)
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE)
        self.counts["same_bits"] += 1

    def rewrite(self) -> None:
        """Other rows take the place of the last ones: what tiers had of those is out of date."""
        if self._session is not None and len(self._rows) == TOKENS:
            length = self._random.randrange(TOKENS)
            self._session.truncate(length)
            self._rows = self._rows[:length]

    def _fresh(self, tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
        source = np.random.default_rng(self._random.getrandbits(64))
        return bfloat_bits(source.standard_normal((tokens, 1, MODEL.head_dim), np.float32))  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


@contextlib.contextmanager
def _values_server(kind: str, folder: Path) -> Iterator[tuple[str, Values]]:
    """A memcached, or a Redis, and the option that names it."""
    path = f"{folder}/{kind}.sock"
    if kind == "memcached":
        command = ["memcached", "-s", path, "-m", "64", "-u", "root"]
    else:
        command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
    try:
        end = time.monotonic() + PATIENCE
        while not Path(path).exists():
            demand(process.poll() is None and time.monotonic() < end, f"{kind} starts")
            time.sleep(0.02)
        yield f"--{kind}=unix:{path}", Memcached(path) if kind == "memcached" else Redis(path)
    finally:
        process.kill()
        process.wait()


def _rounds(target: Target, cache: Path, values: Values, count: int) -> Counter[str]:
    """Changes tiers, before or while sessions of both tenants are read."""
    random = Random(count)
    disk, remote = Disk(target.running.process.pid, cache), Remote(values)
    choices: list[list[Tier]] = [[disk], [remote], [disk, remote]]
    counts: Counter[str] = Counter()
    with kvtier.Client(target.address, token=QUIET) as quiet, kvtier.Client(target.address, token=BUSY) as busy:
        owners = [Owner(client, random) for client in (quiet, busy)]
        for number in range(count):
            for owner in owners:
                owner.read()
                if random.random() < 0.3:
                    owner.rewrite()
            kind = KINDS[number % len(KINDS)]
            tiers = random.choice(choices)
            seed = random.getrandbits(64)

            def change() -> None:
                for tier in tiers:
                    changed = tier.change(kind, Random(seed))
                    counts[f"{type(tier).__name__.lower()}_{kind}"] += changed

            _read_beside(change, owners, amid=random.random() < 0.5)
        for owner in owners:
            counts.update(owner.counts)
            owner.close()
    return counts


def _read_beside(change: Callable[[], None], owners: list[Owner], amid: bool) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            change()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    if not amid:
        thread.join()
    try:
        for owner in owners:
            owner.read()
    finally:
        thread.join()
    if failures:
        raise failures[0]


def run(count: int) -> Figures:
    """`count` changes of tiers, half with memcached behind the disk cache and half with Redis."""
    figures: Figures = {"wrong_bits": 0}
    for kind, program in (("memcached", "memcached"), ("redis", "redis-server")):
        if shutil.which(program) is None:
            figures[kind] = f"skipped: no {program} is installed"
            continue
        with tempfile.TemporaryDirectory(prefix="kvtier-tiers-") as name:
            folder = Path(name)
            cache = folder / "cache"
            with _values_server(kind, folder) as (option, values):
                options = (option, "--disk-cache", str(cache), "--disk-capacity-mib", "64")
                with attacked("--host-memory-mib", "1", *options) as (target, beside):
                    counts = _rounds(target, cache, values, count // 2)
            figures[kind] = {"rounds": count // 2, **dict(sorted(counts.items())), **beside.figures}
    return figures
