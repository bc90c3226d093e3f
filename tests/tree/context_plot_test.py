"""benchmarks/context_plot.py: which rows become which lines, and what the table and the plot have of them."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
K = 1024


def row(attention, tokens, rate, **fields):
    return {"what": "model", "batch": 1, "attention": attention, "tokens": tokens, "tokens_per_second": rate,
            "gpu_bytes": 20e9, **fields}


def on_host(tokens, rate, **fields):
    return row("kvtier, pages on the host", tokens, rate, **{"placement": "host", "kv_dtype": "int8", "k": 2048, **fields})


class ContextPlotTest(unittest.TestCase):
    def run_on(self, *runs):
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for i, rows in enumerate(runs):
                paths.append(pathlib.Path(folder) / f"{i}.json")
                paths[-1].write_text(json.dumps({"rows": rows}))
            out = pathlib.Path(folder) / "plot.svg"
            done = subprocess.run([sys.executable, "-B", ROOT / "benchmarks" / "context_plot.py", *paths, "--out", out],
                                  capture_output=True, text=True, timeout=60, check=False)
            return done, out.read_text() if out.exists() else None

    def test_draws_a_line_for_each_kind_of_row(self):
        done, svg = self.run_on(
            [row("none", 0, 200), row("cudnn", 32 * K, 90), row("cudnn", 128 * K, 50),
             {"what": "model", "batch": 1, "attention": "dense", "tokens": 512 * K, "error": "expected memory"},
             on_host(32 * K, 80), on_host(32 * K, 85), on_host(512 * K, 70), on_host(512 * K, 900, batch=8),
             on_host(512 * K, 77, k=512), {"what": "model_ratio", "tokens": 1}],
            [{"model": "m", "cache": "offloaded", "tokens": 128 * K, "tokens_per_s": 1.75, "device_bytes": 21e9},
             {"model": "m", "cache": "sdpa", "tokens": 128 * K, "tokens_per_s": 9, "device_bytes": 21e9}])
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], "| tokens/s (GPU memory) | 32K | 128K | 512K |")
        self.assertIn("| dense, KV on the GPU | 90.0 (20.0 GB) | 50.0 (20.0 GB) | does not fit |", lines)
        self.assertIn("| kvtier, int8 on the host, k 2048 | 85.0 (20.0 GB) |  | 70.0 (20.0 GB) |", lines)
        self.assertIn("| kvtier, int8 on the host, k 512 |  |  | 77.0 (20.0 GB) |", lines)
        self.assertIn("| transformers, OffloadedCache |  | 1.75 (21.0 GB) |  |", lines)
        self.assertEqual(len(lines), 6)
        texts = [text.text for text in xml.etree.ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
        for name in ("dense, KV on the GPU", "tokens/s", "GPU memory, GB", "128K"):
            self.assertIn(name, texts)

    def test_refuses_runs_without_rows(self):
        done, svg = self.run_on([{"what": "decode_step", "batch": 1, "attention": "none"}])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("expected rows of kvtier-llama bench with one sequence, found none", done.stderr)
        self.assertIsNone(svg)


if __name__ == "__main__":
    unittest.main()
