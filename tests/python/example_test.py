"""The README's Python example against a server: needle-llama's answers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from server import ServerTest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python_engine" / "needle.py"


sys.path.insert(0, str(EXAMPLE.parent))
import checkpoint  # noqa: E402

CONFIG = {
    "model_type": "llama", "hidden_act": "silu", "num_attention_heads": 2, "num_hidden_layers": 1,
    "hidden_size": 128, "vocab_size": 8, "rms_norm_eps": 1e-5,
}  # fmt: skip


def theta_of(**fields: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG | fields))
        return checkpoint.read_config(Path(folder)).rope_theta


class ConfigTest(unittest.TestCase):
    def test_reads_the_rotation_where_either_version_has_it(self) -> None:
        self.assertEqual(theta_of(rope_theta=5.0), 5.0)
        self.assertEqual(theta_of(rope_parameters={"rope_theta": 7.0, "rope_type": "default"}), 7.0)

    def test_refuses_another_rotation(self) -> None:
        with self.assertRaisesRegex(ValueError, "rope_type: expected default, found yarn"):
            theta_of(rope_parameters={"rope_theta": 7.0, "rope_type": "yarn"})
        with self.assertRaisesRegex(ValueError, "rope_theta: expected a number, found none"):
            theta_of()


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

    def test_what_it_cannot_read_is_named_in_a_line(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            empty = Path(folder, "empty")
            empty.touch()
            Path(folder, "config.json").write_text("{}")
            for arguments, problem in (
                (["--model", "/no/model"], "found /no/model/config.json: No such file"),
                (["--model", folder], "config.json: model_type: expected llama, found None"),
                (["--tasks", "/no/tasks"], "found /no/tasks: No such file"),
                (["--tasks", folder], f"found {folder}: Is a directory"),
                (["--tasks", str(empty)], "empty"),
                (["--tasks", str(EXAMPLE)], "expected a header of"),
                (["--logits", "/no/folder/logits"], "--logits: expected a file in a folder"),
                (["--case", "n1.d1"], "--case: expected one of n16384.d10, "),
                (["--sequence", "99"], "--sequence: expected 0 to "),
            ):
                with self.subTest(arguments):
                    run = subprocess.run(
                        [sys.executable, str(EXAMPLE), "--kv", self.server.address, *arguments],
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                    self.assertEqual(run.returncode, 2)
                    self.assertRegex(run.stderr, r"\Aerror: [^\n]*\n\Z")
                    self.assertIn(problem, run.stderr)

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
