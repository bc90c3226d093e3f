"""SmolLM2-135M-Instruct, as scripts/real_model.sh makes it, through transformers with kvtier: against
sdpa, against kvtier-llama, and against a server; and the commands chat, record and tune on it.

Skipped without torch, transformers, kvtier-engine or the model; KVTIER_TORCH_PYTHON names a Python
that has the first three, KVTIER_REAL_MODEL the folder of the model.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from pathlib import Path
from typing import Any

from torch_python import SKIPPED, rerun_or_skip

ROOT = Path(__file__).resolve().parents[2]
REAL = Path(os.environ.get("KVTIER_REAL_MODEL", ROOT / "build" / "real-model"))

try:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    import kvtier
    import kvtier.hf
    import kvtier.chat
    import kvtier.record
    import kvtier.tune
except ImportError as error:
    rerun_or_skip(error)

if not (REAL / "ready").exists():
    print(f"no model in {REAL}: skipped; scripts/real_model.sh makes it")
    sys.exit(SKIPPED)

from server import BINARY, Server  # noqa: E402

LLAMA = os.environ["KVTIER_LLAMA_BINARY"]
MODEL = REAL / "model"
TASKS = REAL / "tasks.safetensors"
CASE, CONTEXT = "continuation.3584", 3584
PROMPT = 1200
# Of logits of about 20 in float32: sums in another order, and keys and values that are rounded to the
# other of two neighbouring bfloat16 for it.
TOLERANCE = 0.05
# Mean divergence, nats: tests/python/transformers_test.py has the same for dense logits. At 33x a
# near-tie at the edge of a selection may fall either way.
DENSE_KL, SPARSE_KL = 3e-4, 1e-3
SPARSITY = 10.0
# As the commands of kvtier-llama below.
RETRIEVAL = kvtier.RetrievalConfig(
    estimator=kvtier.Estimator.NORM_AWARE,
    rule=kvtier.SelectionRule.TOP_K,
    code=kvtier.SketchCode.SIGN,
    selection=kvtier.Selection.PER_KV_HEAD,
    num_planes=256,
    query_bits=4,
    sparsity=SPARSITY,
    sink_tokens=64,
    recent_tokens=64,
    seed=0,
)
METHOD = ["--estimator", "norm_aware", "--rule", "top_k", "--code", "sign", "--bits", "256"]
METHOD += ["--selection", "per_kv_head", "--query-bits", "4", "--sink", "64", "--window", "64"]


class RoundedCache(DynamicCache):
    """Keys and values in bfloat16, but for those of a first pass while it attends to them."""

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        stored = keys.bfloat16().to(keys.dtype), values.bfloat16().to(values.dtype)
        first = layer >= len(self.layers) or self.layers[layer].get_seq_length() == 0
        result = super().update(*stored, layer, *args, **kwargs)
        return (keys, values) if first else result


def mean_divergence(p_logits: Any, q_logits: Any) -> float:
    """Mean KL(p || q) of the rows."""
    p, q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


class SmolLm2Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        cls.ids = load_file(TASKS)[f"{CASE}.tokens"][:1].long()

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        without = torch.no_grad()
        without.__enter__()
        self.addCleanup(without.__exit__, None, None, None)

    def cache(self, **settings: Any) -> Any:
        cache = kvtier.hf.KvtierCache(self.model.config, **settings)
        self.addCleanup(cache.close)
        return cache

    def prefill(self, attention: str, cache: Any, context: int) -> Any:
        self.model.set_attn_implementation(attention)
        self.model(self.ids[:, :context], past_key_values=cache, logits_to_keep=1)
        return cache

    def logits(self, cache: Any, context: int, steps: int) -> Any:
        """Of the tokens behind the context of a cache, one step each, as its prefill attended."""
        rows = []
        for position in range(context, context + steps):
            step = self.ids[:, position : position + 1]
            rows.append(self.model(step, past_key_values=cache).logits[0, -1])
        return torch.stack(rows)

    def test_dense_logits_are_those_of_sdpa(self) -> None:
        cache = self.prefill("kvtier", self.cache(dense=True, max_tokens=2048), PROMPT)
        found = self.logits(cache, PROMPT, 8)
        cache = self.prefill("sdpa", DynamicCache(), PROMPT)
        rounded = RoundedCache()  # which a first pass does not attend to, so one pass gives both
        for index, layer in enumerate(cache.layers):
            rounded.update(layer.keys, layer.values, index)
        exact = self.logits(cache, PROMPT, 8)
        torch.testing.assert_close(
            found, self.logits(rounded, PROMPT, 8), atol=TOLERANCE, rtol=0.0
        )
        self.assertLess(mean_divergence(exact, found), DENSE_KL)

    def test_sparse_logits_are_those_of_kvtier_llama(self) -> None:
        steps = 16
        expected = self.folder / "logits"
        command = [LLAMA, "eval", "--model", MODEL, "--tasks", TASKS, "--cases", CASE, *METHOD]
        command += ["--backend", "cpu", "--sparsity", f"0,{SPARSITY:g}", "--logits", expected]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        logits = load_file(expected)
        dense, sparse = (logits[f"{CASE}.0.{row}"][:steps] for row in range(2))
        cache = self.cache(retrieval=RETRIEVAL, max_tokens=CONTEXT + steps)
        found = self.logits(self.prefill("kvtier", cache, CONTEXT), CONTEXT, steps)
        near = mean_divergence(sparse, found)
        far = mean_divergence(dense, found)
        print(f"divergence from kvtier-llama: sparse {near:.2g}, dense {far:.2g}")
        self.assertLess(near, SPARSE_KL)
        self.assertGreater(far, 3 * near)

    def test_generates_the_same_tokens_embedded_here_and_by_a_server(self) -> None:
        prompt = self.ids[:, :PROMPT]
        (self.folder / "ids").write_text(",".join(map(str, prompt[0].tolist())))
        command = [LLAMA, "generate", "--model", MODEL, "--prompt-ids", f"@{self.folder / 'ids'}"]
        command += ["--max-tokens", "24"]
        server = Server()
        self.addCleanup(server.close)
        self.model.set_attn_implementation("kvtier")
        for sparsity in ("0", f"{SPARSITY:g}"):
            with self.subTest(sparsity=sparsity):
                method = [*command, *METHOD, "--sparsity", sparsity]
                embedded, served = (
                    subprocess.run(
                        [*method, *where], check=True, stdout=subprocess.PIPE, text=True
                    ).stdout
                    for where in (["--backend", "cpu"], ["--kv", server.address])
                )
                expected = [int(word) for word in re.findall(r"\d+", embedded)]
                self.assertEqual(len(expected), 24)
                self.assertEqual([int(word) for word in re.findall(r"\d+", served)], expected)
                cache = self.cache(
                    retrieval=RETRIEVAL, dense=sparsity == "0", max_tokens=PROMPT + 64
                )
                found = self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    past_key_values=cache,
                    do_sample=False,
                    max_new_tokens=24,
                )
                self.assertEqual(found[0, PROMPT:].tolist(), expected)


class CommandsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.text = self.folder / "text"
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        ids = load_file(TASKS)[f"{CASE}.tokens"][0].tolist()
        self.text.write_text(tokenizer.decode(ids))

    def run_main(self, module: Any, *arguments: Any, code: int = 0) -> tuple[str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                found = module.main([str(each) for each in arguments])
            except SystemExit as stopped:
                found = stopped.code
        self.assertEqual(found, code, err.getvalue())
        return out.getvalue(), err.getvalue()

    def test_chat_answers_and_remembers(self) -> None:
        common = ["--model", MODEL, "--dtype", "float32", "--device", "cpu", "--max-tokens", "512"]
        turns = io.StringIO("What is the capital of France?\nAnd of Italy?\n\nnot read\n")
        stdin, sys.stdin = sys.stdin, turns
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)  # of arguments that will be removed
                out, err = self.run_main(kvtier.chat, *common, "--new-tokens", "24")
        finally:
            sys.stdin = stdin
        first, second = out.strip().splitlines()
        self.assertIn("Paris", first)
        self.assertIn("Rome", second)
        self.assertEqual(len(re.findall(r"tokens/s; \d+ tokens: keys and values", err)), 2)
        self.assertEqual(err.count("sketches 3.2 MiB on the CPU (room for 1,024 tokens)"), 2)
        for preset in kvtier.chat.PRESETS:
            with self.subTest(preset):
                size = [] if preset == "dense" else ["--k", "32"]
                more = ["--preset", preset, *size, "--new-tokens", "8"]
                out, err = self.run_main(kvtier.chat, *common, *more, "--prompt", "Hello!")
                self.assertGreater(len(out.strip()), 3)

    def test_chat_in_a_terminal_asks_and_ends_by_control_c(self) -> None:
        pid, terminal = pty.fork()
        if pid == 0:
            command = [sys.executable, "-m", "kvtier.chat", "--model", str(MODEL), "--device", "cpu"]
            more = ["--dtype", "float32", "--max-tokens", "512", "--new-tokens", "4"]
            os.execv(sys.executable, [*command, *more])
        shown, sent = "", 0
        with os.fdopen(terminal, "r+b", buffering=0) as screen:
            deadline = time.monotonic() + 300.0
            while time.monotonic() < deadline:
                if not select.select([screen], [], [], 10.0)[0]:
                    # Python loses one that comes right before it waits for a line.
                    if sent == 2:
                        screen.write(b"\x03")
                    continue
                try:
                    piece = screen.read(4096)
                except OSError:  # so a terminal ends
                    break
                shown += piece.decode(errors="replace")
                if len(re.findall(r"^> ", shown, re.MULTILINE)) > sent:
                    sent += 1
                    screen.write(b"Hello!\n" if sent == 1 else b"\x03")
            else:
                os.kill(pid, signal.SIGKILL)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 130, shown)
        self.assertIn("tokens/s", shown)
        self.assertNotIn("Traceback", shown)

    def test_chat_refuses(self) -> None:
        _, err = self.run_main(kvtier.chat, "--model", self.folder, code=2)
        self.assertIn("--model: expected a folder with config.json, found", err)
        untold = self.folder / "untold"
        untold.mkdir()
        (untold / "config.json").write_text("{}")
        _, err = self.run_main(kvtier.chat, "--model", untold, "--device", "cpu", code=1)
        self.assertIn("--model: expected a model and a tokenizer that transformers reads, found", err)
        _, err = self.run_main(kvtier.chat, "--model", MODEL, "--dtype", "bf16", code=2)
        self.assertIn("invalid choice: 'bf16' (choose from", err)
        _, err = self.run_main(kvtier.record, "--dtype", "bf16", code=2)
        self.assertIn("invalid choice: 'bf16' (choose from", err)
        dense = ["--preset", "dense", "--k", "5"]
        _, err = self.run_main(kvtier.chat, "--model", MODEL, *dense, code=2)
        self.assertIn("--k: expected none with --preset dense, found 5", err)
        _, err = self.run_main(kvtier.chat, "--model", MODEL, "--k", "-1", code=2)
        self.assertIn("--k: expected at least 0, found -1", err)
        _, err = self.run_main(
            *(kvtier.chat, "--model", MODEL, "--device", "cpu", "--dtype", "float32"),
            *("--max-tokens", "16", "--prompt", "Hello!"),
            code=1,
        )
        self.assertIn("prompt: expected fewer than 16 tokens", err)
        _, err = self.run_main(kvtier.chat, "--model", MODEL, "--device", "none", code=1)
        self.assertIn("--device: expected one that torch can use, found none: ", err)

    def test_records_what_replay_and_tune_read(self) -> None:
        trace, plot = self.folder / "trace.safetensors", self.folder / "plot.svg"
        common = ["--model", MODEL, "--text", self.text, "--out", trace, "--device", "cpu"]
        common += ["--dtype", "float32"]
        self.run_main(
            *(kvtier.record, *common, "--tokens", 1000, "--steps", 8, "--layers", "2,20")
        )
        tensors = load_file(trace)
        model = AutoModelForCausalLM.from_pretrained(MODEL).config
        self.assertEqual(
            tensors["layers.20.k"].shape, (model.num_key_value_heads, 1000, model.head_dim)
        )
        # Attention of what was recorded, in double precision, is what the model computed.
        for layer in (2, 20):
            q, k, v, o = (tensors[f"layers.{layer}.{name}"].double() for name in "qkvo")
            group = q.shape[0] // k.shape[0]
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            logits = q @ k.transpose(1, 2) / model.head_dim**0.5
            seen = torch.arange(1000)[None] <= torch.arange(992, 1000)[:, None]
            found = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v
            self.assertLess((found - o).norm() / o.norm(), 0.02)  # bfloat16

        tune = ["--trace", trace, "--kvtier", BINARY, "--steps", 4, "--k", "16,64,256"]
        out, _ = self.run_main(kvtier.tune, *tune, "--error", 0.05)
        rows = re.findall(r"^([ke]=\S+) +(\d+) +\d+ +\w+ +\w+ +([\d.]+) ", out, re.MULTILINE)
        self.assertEqual(len(rows), (3 * 2 + 3) * 2)
        chosen = re.search(r"error of at most 0.05: (\S+), .* \(([\d.]+)\)", out)
        assert chosen is not None, out
        tokens = min(int(tokens) for size, tokens, _ in rows if size == chosen[1])
        fewer = [float(error) for _, found, error in rows if int(found) < tokens]
        self.assertLessEqual(float(chosen[2]), 0.05)
        self.assertTrue(all(error > 0.05 for error in fewer))
        out, _ = self.run_main(kvtier.tune, *tune, "--error", 1e-6, code=3)
        self.assertIn("no setting reaches an error of 1e-06; nearest: ", out)

        with contextlib.suppress(ImportError):
            import matplotlib  # noqa: F401

            self.run_main(kvtier.tune, *tune, "--plot", plot)
            self.assertIn("<svg", plot.read_text())

    def test_record_and_tune_refuse(self) -> None:
        trace = self.folder / "trace.safetensors"
        common = ["--model", MODEL, "--text", self.text, "--out", trace, "--device", "cpu"]
        for more, message in (
            (["--tokens", 10**6], "tokens: expected 1 to"),
            (["--tokens", 20, "--steps", 21], "steps: expected 1 to 20, found 21"),
            (["--tokens", 20, "--steps", 1, "--layers", "30"], "layers: expected 0 to 29, found 30"),
        ):
            with self.subTest(message):
                _, err = self.run_main(kvtier.record, *common, *more, code=1)
                self.assertIn(message, err)
                self.assertFalse(trace.exists())
        nowhere, binary = self.folder / "none" / "file", self.folder / "binary"
        binary.write_bytes(b"\xff")
        for more, message in (
            (["--out", nowhere], f"--out: expected a file in a folder that is there, found {nowhere}"),
            (["--text", binary], f"--text: expected UTF-8, found {binary}"),
            (["--layers", "a"], "--layers: expected such as 0,5,9, or all, found a"),
        ):
            with self.subTest(message):
                _, err = self.run_main(kvtier.record, *common, *more, code=2)
                self.assertIn(message, err)
        for more, message in (
            (["--plot", nowhere], f"--plot: expected a file in a folder that is there, found {nowhere}"),
            (["--k", "0,32"], "--k: expected numbers of at least 1, found 0,32"),
        ):
            with self.subTest(message):
                _, err = self.run_main(kvtier.tune, "--trace", self.text, *more, code=2)
                self.assertIn(message, err)
        _, err = self.run_main(kvtier.tune, "--trace", trace, code=2)
        self.assertIn("--trace: expected a file, found", err)
        _, err = self.run_main(
            kvtier.tune, "--trace", self.text, "--kvtier", self.folder / "none", code=2
        )
        self.assertIn("--kvtier: expected the program kvtier, found", err)
        _, err = self.run_main(kvtier.tune, "--trace", self.text, "--error", 0, code=2)
        self.assertIn("--error: expected above 0, found 0", err)


if __name__ == "__main__":
    unittest.main()
