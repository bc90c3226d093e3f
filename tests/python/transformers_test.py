"""kvtier-llama's dense logits against those of PyTorch's transformers: on needle-llama, and on what
scripts/real_model.sh makes where that has run.

Skipped without torch and transformers; KVTIER_TORCH_PYTHON names a Python that has them.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from torch_python import rerun_or_skip

try:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
except ImportError as error:
    rerun_or_skip(error)

ROOT = Path(__file__).resolve().parents[2]
LLAMA = os.environ["KVTIER_LLAMA_BINARY"]
REAL = Path(os.environ.get("KVTIER_REAL_MODEL", ROOT / "build" / "real-model"))
# Mean divergence, nats. Keys and values are bf16 here, all else fp32; there all is of one dtype.
LARGEST = {torch.float32: 3e-4, torch.bfloat16: 2e-3}


def mean_divergence(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """Mean KL(p || q) of the rows."""
    p = p_logits.double().log_softmax(-1)
    q = q_logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


class TransformersTest(unittest.TestCase):
    def compare(self, model: Path, tasks: Path, case: str, context: int) -> None:
        with tempfile.TemporaryDirectory(prefix="kvtier-python-") as folder:
            logits = Path(folder) / "logits"
            command = [LLAMA, "eval", "--model", model, "--tasks", tasks, "--cases", case]
            command += ["--backend", "cpu", "--sparsity", "0", "--logits", logits]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found = load_file(logits)[f"{case}.0.0"]
        ids = load_file(tasks)[f"{case}.tokens"][:1].long()
        for dtype, largest in LARGEST.items():
            with self.subTest(dtype), torch.no_grad():
                reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
                kept = ids.shape[1] - context
                expected = reference(ids, logits_to_keep=kept).logits[0].float()
                kl = mean_divergence(expected, found)
                print(f"{case}, {dtype}: mean divergence {kl:.2g} over {kept} tokens")
                self.assertLessEqual(kl, largest)

    def test_needle_llama(self) -> None:
        data = ROOT / "data" / "needle-llama"
        self.compare(data / "model", data / "tasks" / "dev.safetensors", "n4096.d100", 4096)

    @unittest.skipUnless((REAL / "ready").exists(), f"no real model in {REAL}")
    def test_real_model(self) -> None:
        tasks = REAL / "tasks.safetensors"
        self.compare(REAL / "model", tasks, "continuation.3584", 3584)


if __name__ == "__main__":
    unittest.main()
