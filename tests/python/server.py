"""`kvtier serve` in a process of its own, and an oracle of its attention."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any, Callable

import numpy as np

BINARY = os.environ.get("KVTIER_BINARY", "")
PATIENCE = 60.0  # seconds, after which a test gives up waiting


class Server:
    def __init__(self, *options: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.address = f"unix:{self.folder.name}/kv.sock"
        self._options = options
        self.start()

    def start(self) -> None:
        command = [BINARY, "serve", "--listen", self.address, "--backend", "cpu", *self._options]
        errors = open(Path(self.folder.name) / "err", "w")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.close()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != f"listening on {self.address}\n":
            raise RuntimeError((Path(self.folder.name) / "err").read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def pause(self) -> None:
        """Stops the process; returns when all its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self.folder.cleanup()


def wait_until(test: unittest.TestCase, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        test.assertLess(time.monotonic(), end, "waited in vain")
        time.sleep(0.02)


def succeeds_in_fork(work: Callable[[], bool]) -> bool:
    """Returns whether `work` returns True in a fork of this process, in time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(PATIENCE))
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


class ServerTest(unittest.TestCase):
    """One server for the cases of a class."""

    options: tuple[str, ...] = ()
    server: Server

    @classmethod
    def setUpClass(cls) -> None:
        cls.server = Server(*cls.options)
        cls.addClassCleanup(cls.server.close)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(self, condition)


def bfloat_bits(array: Any) -> Any:
    """The upper halves of float32: bfloat16, rounded toward zero."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def dense_attention(query: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """Causal attention of the last tokens, in double precision: out and lse."""
    tokens, query_heads, head_dim = query.shape
    length, kv_heads, _ = keys.shape
    group = query_heads // kv_heads
    q, k, v = (np.asarray(x, np.float64) for x in (query, keys, values))
    logits = np.einsum("tgd,lgd->tgl", q, np.repeat(k, group, axis=1)) / np.sqrt(head_dim)
    seen = np.arange(length)[None, :] <= np.arange(length - tokens, length)[:, None]
    logits = np.where(seen[:, None, :], logits, -np.inf)
    top = logits.max(axis=2, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=2, keepdims=True)
    out = np.einsum("tgl,lgd->tgd", weights / total, np.repeat(v, group, axis=1))
    return out, (top + np.log(total))[:, :, 0]
