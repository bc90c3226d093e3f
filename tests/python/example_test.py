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
        self.assertEqual(run.stdout.splitlines()[-1], "3 of 3 right")

    def test_an_unknown_case_is_refused_by_name(self) -> None:
        run = subprocess.run(
            [sys.executable, str(EXAMPLE), "--kv", self.server.address, "--case", "n1.d1"],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.assertEqual(run.returncode, 1)
        self.assertIn("found n1.d1", run.stderr)


if __name__ == "__main__":
    unittest.main()
