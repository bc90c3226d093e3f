"""Who imports whom in the package: the client imports sessions and pages, and what it imports has no cycle."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from server import BINARY, PATIENCE

from kvtier.chat import main as chat
from kvtier.model_options import whole_file
from kvtier.tune import main as tune
from kvtier.tune import plot

PACKAGE = Path(__file__).resolve().parents[2] / "python"


def imports(module: str) -> set[str]:
    """The modules of the package that one imports, also for types alone and in functions."""
    path = PACKAGE / (module.replace(".", "/") + ".py")
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if (PACKAGE / (name.replace(".", "/") + ".py")).is_file()}


class Imports(unittest.TestCase):
    def test_what_the_client_imports_has_no_cycle(self) -> None:
        done: set[str] = set()

        def visit(module: str, path: list[str]) -> None:
            self.assertNotIn(module, path, "a cycle of imports")
            if module not in done:
                for other in sorted(imports(module)):
                    visit(other, [*path, module])
                done.add(module)

        visit("kvtier.client", [])
        self.assertLess({"kvtier.session", "kvtier.pages", "kvtier.lease"}, done)

    def test_options_of_programs_need_no_torch(self) -> None:
        def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            program = f"import sys; sys.modules['torch'] = None; from kvtier.{name} import main; sys.exit(main())"
            return subprocess.run(
                [sys.executable, "-c", program, *arguments],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text("{}")
            text = ["--text", f"{folder}/config.json", "--out", f"{folder}/out"]
            for name, more in (("chat", []), ("record", text)):
                self.assertIn("--dtype {auto,", run(name, "--help").stdout)
                found = run(name, "--model", folder, *more)
                self.assertEqual(found.returncode, 1)
                self.assertRegex(
                    found.stderr, "^error: expected the package torch, found none .*pip install"
                )

    def test_programs_that_are_interrupted_end_with_130_and_no_traceback(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text("{}")
            out = f"{folder}/out"
            for name, where, arguments in (
                ("record", "parser", []),
                ("record", "without_package", ["--model", folder, "--text", str(file), "--out", out]),
                ("tune", "replay", ["--trace", str(file), "--kvtier", sys.executable]),
            ):
                program = (
                    f"import sys; sys.modules['torch'] = None; import kvtier.{name} as program\n"
                    "def interrupted(*_): raise KeyboardInterrupt\n"
                    f"program.{where} = interrupted; sys.exit(program.main())"
                )
                found = subprocess.run(
                    [sys.executable, "-c", program, *arguments],
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE,
                )
                self.assertEqual((found.returncode, found.stderr.strip()), (130, ""), name)
                self.assertFalse(Path(out).exists())

    def test_tune_replays_its_error_targets_in_one_run(self) -> None:
        error = {"output_error": 0.01, "attention_mass": 1}
        row = {"estimator": "norm_aware", "k": 8, "bits": 256, "code": "sign", "rule": "top_k"}
        report = json.dumps({"rows": [{**row, "mean": error, "layers": {"0": error}}]})
        with tempfile.TemporaryDirectory() as folder:
            trace, runs, program = (Path(folder) / name for name in ("trace", "runs", "kvtier"))
            trace.write_text("")
            last = "for file; do :; done"  # the report of --json
            program.write_text(
                f"""#!/bin/sh\necho "$*" >> {runs}\n{last}\necho '{report}' > "$file"\n"""
            )
            program.chmod(0o700)
            arguments = ["--trace", str(trace), "--kvtier", str(program), "--error-targets", "0.1,0.2,"]
            with contextlib.redirect_stdout(io.StringIO()):
                self.assertEqual(tune(arguments), 0)
            fixed, targets = runs.read_text().splitlines()
            self.assertIn("--code sign,scalar --rule top_k,priority --k 32,", fixed)
            self.assertIn("--rule priority --k 0 --error-target 0.1,0.2 ", targets)

    def test_tune_refuses_a_program_that_is_not_kvtier(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            trace.write_text("")
            for name, line in (("none", "true"), ("other", "echo {} >"), ("text", "echo no >")):
                program = Path(folder) / name
                last = "for file; do :; done"  # the report of --json
                program.write_text(f'#!/bin/sh\n{last}\n{line} "$file"\n')
                program.chmod(0o700)
                err = io.StringIO()
                with contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as ended:
                    tune(["--trace", str(trace), "--kvtier", str(program)])
                self.assertEqual(ended.exception.code, 2)
                self.assertIn(
                    f"--kvtier: expected the program kvtier, found {program}: ", err.getvalue()
                )

    def test_tune_tries_error_targets_too(self) -> None:
        trace = Path(__file__).resolve().parents[2] / "data/traces/needle-layer2-cut.safetensors"
        common = ["--trace", str(trace), "--kvtier", BINARY, "--steps", "2", "--codes", "scalar"]
        common += ["--k", "16"]

        def run(*more: str) -> tuple[int, str]:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                return tune([*common, *more]), out.getvalue()

        code, out = run("--error", "0.08")
        self.assertEqual(code, 0, out)
        self.assertEqual(len(re.findall("^e=0[.]0(?:2|3|45) ", out, re.MULTILINE)), 3, out)
        self.assertEqual(len(re.findall("^k=16 ", out, re.MULTILINE)), 2, out)
        self.assertRegex(out, r"at most 0\.08: e=\S+, 256 bits, scalar, priority \(0\.0\d+\)")
        self.assertRegex(out, r"RetrievalConfig\(.*rule=\S+PRIORITY, num_planes=256, error_target=0")
        code, out = run("--error", "0.0001", "--error-targets", "0.045")
        self.assertEqual(code, 3)
        self.assertRegex(out, r"an error of 0\.0001; nearest: e=0\.045, .*, 0\.0\d{3,4}\n")

    def test_tune_names_its_own_options(self) -> None:
        for option, found, message in (
            ("--codes", "foo", "--codes: expected some of sign,scalar, found foo"),
            ("--rules", "top_k,foo", "--rules: expected some of top_k,priority, found foo"),
            (
                "--error-targets",
                "0.1,1",
                "--error-targets: expected numbers above 0 and below 1, found 1",
            ),
            ("--error-targets", "low", "--error-targets: expected numbers above 0"),
        ):
            err = io.StringIO()
            with contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as ended:
                tune(["--trace", __file__, option, found])
            self.assertEqual(ended.exception.code, 2)
            self.assertIn(message, err.getvalue())

    def test_chat_takes_no_k_with_dense(self) -> None:
        err = io.StringIO()
        with contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as ended:
            chat(["--model", "/no/such/model", "--preset", "dense", "--k", "5"])
        self.assertEqual(ended.exception.code, 2)
        self.assertIn("--k: expected none with --preset dense, found 5", err.getvalue())

    def test_a_plot_that_cannot_be_written_leaves_the_former_one(self) -> None:
        def savefig(path: Path, **_: Any) -> None:
            path.write_text("<svg")
            raise OSError("no space left")

        matplotlib, figure = MagicMock(), MagicMock()
        matplotlib.pyplot.subplots.return_value = figure, MagicMock()
        figure.savefig = savefig
        stubs = {"matplotlib": matplotlib, "matplotlib.pyplot": matplotlib.pyplot}
        with tempfile.TemporaryDirectory() as folder, patch.dict(sys.modules, stubs):
            path = Path(folder) / "error.svg"
            path.write_text("former")
            with self.assertRaises(OSError):
                plot([], 0.05, path)
            self.assertEqual(path.read_text(), "former")
            self.assertEqual(list(Path(folder).iterdir()), [path])

    def test_a_device_is_written_to_itself(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder) / "null"
            link.symlink_to("/dev/null")
            with whole_file(link) as part:
                part.write_text("text")
            self.assertTrue(link.is_char_device())
            self.assertEqual(list(Path(folder).iterdir()), [link])

    def test_plots_that_cannot_be_drawn_are_refused_before_the_work(self) -> None:
        canvas = MagicMock()
        canvas.FigureCanvasBase.filetypes = {"svg": "", "png": ""}
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            trace.write_text("")
            for name, module, message in (
                ("a.svg", None, "--plot: expected the package matplotlib, found none"),
                ("a.exe", canvas, f"--plot: expected one of png, svg, found {folder}/a.exe"),
            ):
                stubs = {"matplotlib": module, "matplotlib.backend_bases": module}
                err = io.StringIO()
                with patch.dict(sys.modules, stubs), contextlib.redirect_stderr(err):
                    with self.assertRaises(SystemExit):
                        tune(["--trace", str(trace), "--plot", f"{folder}/{name}"])
                self.assertIn(message, err.getvalue())

    def test_modules_without_torch_say_what_installs_it(self) -> None:
        for module, extra in (("hf", "hf"), ("torch", "torch")):
            program = f"import sys; sys.modules['torch'] = None; import kvtier.{module}"
            found = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
            )
            self.assertEqual(found.returncode, 1)
            self.assertRegex(
                found.stderr.strip().splitlines()[-1],
                rf"^ImportError: kvtier.{module}: expected the package torch, found none .*python\[{extra}\]",
            )


if __name__ == "__main__":
    unittest.main()
