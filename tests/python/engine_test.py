"""The numpy engine with its KV in a server, against kvtier-llama with its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np
from server import Server

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "examples" / "python_engine"
sys.path.insert(0, str(ENGINE))

from checkpoint import SafeTensors  # noqa: E402

LLAMA = os.environ["KVTIER_LLAMA_BINARY"]
DATA = ROOT / "data" / "needle-llama"
CASE = "n4096.d100"
# Of the divergence from embedded: at every position where all tokens are attended. Where some are
# selected, a near-tie at the edge of the selection may fall either way at a few positions.
LARGEST = {"0": 1e-4}
MEDIAN = 1e-6
MEAN = {"10": 1e-4, "33": 1e-3}


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    """KL(p || q) of each row, in nats."""

    def normed(logits: np.ndarray) -> np.ndarray:
        x = logits.astype(np.float64)
        top = x.max(axis=1, keepdims=True)
        return x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))

    p, q = normed(p_logits), normed(q_logits)
    return (np.exp(p) * (p - q)).sum(axis=1)


class EngineTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.server = Server()
        self.addCleanup(self.server.close)

    def engine(self, *arguments: str) -> str:
        command = [sys.executable, str(ENGINE / "needle.py"), "--kv", self.server.address]
        return subprocess.run(
            [*command, *arguments], check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def test_logits_are_those_of_an_embedded_engine(self) -> None:
        rows = [*LARGEST, *MEAN]
        common = ["--sparsity", ",".join(rows), "--estimator", "norm_aware"]
        embedded = subprocess.run(
            [
                *(LLAMA, "eval", "--model", DATA / "model"),
                *("--tasks", DATA / "tasks" / "dev.safetensors", "--cases", CASE),
                *("--backend", "cpu", "--logits", self.folder / "embedded", *common),
            ],
            stdout=subprocess.DEVNULL,
        )
        self.assertEqual(embedded.returncode, 0)
        self.engine("--case", CASE, "--logits", str(self.folder / "remote"), *common)

        here = SafeTensors(self.folder / "embedded")
        there = SafeTensors(self.folder / "remote")
        self.assertEqual(here.names(), there.names())
        self.assertEqual(len(here.names()), len(rows))
        for row, sparsity in enumerate(rows):
            name = f"{CASE}.0.{row}"
            with self.subTest(sparsity):
                expected, found = here[name], there[name]
                self.assertEqual(found.shape, expected.shape)
                np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))
                kl = divergence(expected, found)
                self.assertLessEqual(kl.max(), LARGEST.get(sparsity, np.inf))
                self.assertLessEqual(np.median(kl), MEDIAN)
                self.assertLessEqual(kl.mean(), MEAN.get(sparsity, LARGEST.get(sparsity)))


if __name__ == "__main__":
    unittest.main()
