#!/usr/bin/env python3
"""Measures what rows of fewer bits do to the answers of a language model, with dense attention.

    benchmarks/quality/row_formats.py build/real-model --sequences 2 --json rows.json

Keys, after the rotary embedding, and values of every token are rounded to a format and read back as bf16. Attention is exact over all
tokens. A row of the report has KL(bf16 rows || rounded rows) of the next-token distribution in nats, and the perplexity over that of
bf16 rows, means over the tokens after the context. Needs PyTorch and transformers; the folder is that of scripts/real_model.sh.

Formats, with a factor for the keys of a row and one for its values: int8, integers of -127 to 127, as kvtier stores them; the same with
factors that are powers of two; fp8, e4m3 with a power of two; int4, integers of -7 to 7, with a factor a row or for 32 elements; e2m1, 4-bit
floats with a factor in e4m3 for 16 elements.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from whole_file import write_whole  # noqa: E402

LEAST = 2.0**-100
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def largest_of(x):
    return x.abs().amax(-1, keepdim=True).clamp_min(LEAST)


def power_of_two(factor):
    return torch.exp2(torch.ceil(torch.log2(factor)))


def integers(bits, elements=0, whole_exponents=False):
    """Returns a rounding to integers, with a factor for so many elements; 0: for all of a row."""
    most = 2 ** (bits - 1) - 1

    def rounded(x):
        parts = x.unflatten(-1, (-1, elements)) if elements else x
        factor = largest_of(parts) / most
        if whole_exponents:
            factor = power_of_two(factor)
        result = (parts / factor).round().clamp(-most, most) * factor
        return result.flatten(-2) if elements else result

    return rounded


def fp8(x):
    factor = power_of_two(largest_of(x) / 448)
    return (x / factor).to(torch.float8_e4m3fn).float() * factor


def e2m1(x):
    parts = x.unflatten(-1, (-1, 16))
    of_row = largest_of(x).unsqueeze(-1) / (6 * 448)
    factor = (largest_of(parts) / 6 / of_row).to(torch.float8_e4m3fn).float().clamp_min(2.0**-9) * of_row
    scaled = parts / factor
    nearest = E2M1[torch.bucketize(scaled.abs(), (E2M1[1:] + E2M1[:-1]) / 2)]
    return (nearest * scaled.sign() * factor).flatten(-2)


INT8 = integers(8)
FORMATS = {  # name: keys, values, bits of an element
    "int8": (INT8, INT8, 8.0),
    "int8, powers of two": (integers(8, whole_exponents=True), integers(8, whole_exponents=True), 8.0),
    "fp8": (fp8, fp8, 8.0),
    "int8 keys, e2m1 values": (INT8, e2m1, 6.25),
    "int4": (integers(4), integers(4), 4.0),
    "int4 by 32": (integers(4, 32), integers(4, 32), 4.5),
    "e2m1 by 16": (e2m1, e2m1, 4.5),
}


class Rows:
    """What attention reads of a row."""

    def __init__(self):
        self.keys = self.values = lambda x: x

    def read(self, rounding, x):
        return rounding(x.bfloat16().float()).bfloat16().to(x.dtype)

    def attend(self, module, query, key, value, mask, **options):
        return sdpa_attention_forward(
            module, query, self.read(self.keys, key), self.read(self.values, value), mask, **options)


def measure(model, rows, sequences, context):
    """Yields the name, KL and loss of each format, means over the tokens after the context."""
    sums = {name: [0.0, 0.0] for name in ("bf16", *FORMATS)}
    count = 0
    for sequence in sequences:
        dense = None
        target = sequence[context:, None]
        for name, total in sums.items():
            rows.keys, rows.values = FORMATS[name][:2] if name in FORMATS else (lambda x: x,) * 2
            logits = model(sequence[None, :-1], logits_to_keep=len(target)).logits[0].log_softmax(-1)
            dense = logits if dense is None else dense
            total[0] += (dense.exp() * (dense - logits)).sum().item()
            total[1] -= logits.gather(1, target).sum().item()
        count += len(target)
    for name, (kl, loss) in sums.items():
        yield name, kl / count, loss / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--tasks", default="continuation.3584,copying.3584,needles.3584")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = Rows()
    AttentionInterface.register("rounded_rows", rows.attend)
    AttentionMaskInterface.register("rounded_rows", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(
        options.folder / "model", dtype=torch.float32, attn_implementation="rounded_rows")
    report = []
    with safe_open(options.folder / "tasks.safetensors", "pt") as file, torch.no_grad():
        for task in options.tasks.split(","):
            sequences = file.get_tensor(f"{task}.tokens")[: options.sequences].long()
            base = None
            for name, kl, loss in measure(model, rows, sequences, int(task.split(".")[1])):
                base = loss if base is None else base
                report.append({"task": task, "sequences": len(sequences), "rows": name,
                               "bits": FORMATS[name][2] if name in FORMATS else 16.0, "kl": kl,
                               "perplexity_over_bf16": math.exp(loss - base)})
                print(json.dumps(report[-1]), flush=True)
    if options.json:
        write_whole(options.json, json.dumps({"rows": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
