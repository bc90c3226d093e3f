"""The README's Python example against a server: needle-llama's answers."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path

from server import ServerTest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python_engine" / "needle.py"


class ExampleTest(ServerTest):
    def test_answers_are_right(self) -> None:
        run = subprocess.run(
            [sys.executable, str(EXAMPLE), "--kv", self.server.address, "--questions", "3"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = run.stdout.splitlines()
        self.assertEqual(lines[1], "124 tokens sampled by priority")
        self.assertEqual(lines[-1], "3 of 3 right")

    def test_an_unknown_case_is_refused_by_name(self) -> None:
        run = subprocess.run(
            [sys.executable, str(EXAMPLE), "--kv", self.server.address, "--case", "n1.d1"],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.assertEqual(run.returncode, 1)
        self.assertIn("found n1.d1", run.stderr)

    def test_a_server_that_is_not_there_is_named(self) -> None:
        address = f"{self.server.address}.none"
        run = subprocess.run(
            [sys.executable, str(EXAMPLE), "--kv", address], stderr=subprocess.PIPE, text=True
        )
        self.assertEqual(run.returncode, 1)
        self.assertEqual(
            run.stderr,
            f"error: UNAVAILABLE: server: expected kvtier serve at {address}, found none "
            "(start it: kvtier serve)\n",
        )


if __name__ == "__main__":
    unittest.main()
