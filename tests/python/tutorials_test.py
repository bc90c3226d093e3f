"""The tutorials of the service, in C++ and Python, against a server."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from pathlib import Path

from server import PATIENCE, ServerTest

TUTORIALS = Path(__file__).resolve().parents[2] / "examples" / "tutorials"


class TutorialsTest(ServerTest):
    def run_tutorial(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    def test_service(self) -> None:
        binary = os.environ.get("KVTIER_TUTORIAL_SERVICE")
        if not binary:
            self.skipTest("a build without the examples")
        done = self.run_tutorial(binary, self.server.address)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_service_without_an_address(self) -> None:
        binary = os.environ.get("KVTIER_TUTORIAL_SERVICE")
        if not binary:
            self.skipTest("a build without the examples")
        done = self.run_tutorial(binary)
        self.assertEqual(done.returncode, 2)
        self.assertIn("expected the address of a server", done.stderr)

    def test_python(self) -> None:
        done = self.run_tutorial(
            sys.executable, str(TUTORIALS / "05_python.py"), self.server.address
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_python_without_an_address(self) -> None:
        done = self.run_tutorial(sys.executable, str(TUTORIALS / "05_python.py"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("expected the address of a server", done.stderr)


if __name__ == "__main__":
    unittest.main()
