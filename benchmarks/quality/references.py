#!/usr/bin/env python3
"""How many tokens a selection by a stream of keys scores again on recorded layers.

    benchmarks/quality/references.py TRACE... [--normal TOKENS] [--json FILE]

The pass over the sketches ranks tokens with *reference* normalisers, of a sample of the tokens (scoring/stream/stream_cuda.cuh). Exact
normalisers exceed those of the sample by other factors in each head. The largest over the least of these factors bounds how far a key
can be off, and all tokens within that bound of the k-th best are scored again. Two more counts are of methods that are not built: keys
that also have the head with the largest share and one of four bounds of that share, which bound how far the token's own key can be off;
and references of the sample and the HEAVIEST tokens of the step before, by their combined scores.

Traces are those of `python -m kvtier.record` and `kvtier-llama record`, with at most four query heads for each KV head. Logits are exact
here, so that what sketches add is not in it. `--normal` adds a layer of 32 query heads over 8 KV heads whose keys, values and queries are
normal, as those of `kvtier-bench decode_step`. Needs torch and safetensors.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path

import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from whole_file import write_whole  # noqa: E402

SINK = WINDOW = 64
RUN = 64  # neighbours of a sample, as a unit of the pass
STEPS = 3  # every third step, not the first, which has none before it
HEAVIEST = 64
GROUP = 4  # the most query heads of a KV head that SHARES fits
LEVELS = (33, 100)
SHARES = (1 / 4, 1 / 2, 7 / 8, 31 / 32)  # the largest of four heads has a fourth
BIN = 1 / 8  # octaves of the bin that has the k-th best key
LOG2E = 1.4426950408889634


def log_sum(values, dim):
    return torch.logsumexp(values / LOG2E, dim) * LOG2E


def references_with(heavy, logits, sample):
    """References of the sample, whose tokens stand for all others, and `heavy` [steps, tokens]."""
    count = logits.shape[2]
    weights = torch.zeros(heavy.shape[0], count)
    weights[:, sample] = (count - heavy.shape[1]) / len(sample)
    weights.scatter_(1, heavy, 1.0)
    return log_sum(logits + weights.log2(), 2)


def scored_again(keys, values, queries, before, scale, runs, uniforms):
    """Octaves between the factors of the heads, and candidates per selected token by level, as the pass is, with the head in the key and
    with the heaviest tokens of the step before, of each step. `keys` and `values` are [tokens, dim], of the eligible tokens, `queries` and
    those of the steps before [heads, steps, dim]."""
    count = keys.shape[0]
    value_norms = values.norm(dim=1).clamp_min(1e-6).log2()

    def logits_of(some):
        return torch.einsum("hsd,td->hst", some, keys) * (scale * LOG2E) + value_norms

    logits = logits_of(queries)
    starts = (torch.arange(runs) * (count - RUN)) // max(runs - 1, 1)
    sample = (starts[:, None] + torch.arange(RUN)).flatten()
    references = log_sum(logits[:, :, sample], 2)
    factors = references - log_sum(logits, 2)  # of exact shares over those with references
    most, least = factors.amax(0)[:, None], factors.amin(0)[:, None]
    scores = log_sum(logits - references[:, :, None], 0)
    ranked = scores - uniforms.log2()

    # A token whose head d has a share w or more: its factor lies between w f(d) + (1 - w) least and w f(d) + (1 - w) most.
    share, head = (logits - references[:, :, None] - scores).max(0)
    bounds = torch.tensor(SHARES)
    at_least = bounds[(share.exp2()[..., None] >= bounds[1:]).sum(-1)]
    of_head = at_least * factors.exp2().T.gather(1, head)
    lowest = ranked + (of_head + (1 - at_least) * least.exp2()).log2()
    highest = ranked + (of_head + (1 - at_least) * most.exp2()).log2()

    def candidates(low, high, k):
        return (high >= (low.topk(k + 1, dim=1).values[:, -1:] - BIN)).sum(1).float() / k

    def by_level(low, high):
        return {level: candidates(low, high, count // level) for level in LEVELS}

    last = logits_of(before)
    heavy = log_sum(last - log_sum(last, 2)[:, :, None], 0).topk(HEAVIEST, dim=1).indices
    better = references_with(heavy, logits, sample)
    factors = better - log_sum(logits, 2)
    nearer = log_sum(logits - better[:, :, None], 0) - uniforms.log2()
    with_heaviest = by_level(nearer + factors.amin(0)[:, None], nearer + factors.amax(0)[:, None])
    return (most - least)[:, 0], by_level(ranked + least, ranked + most), by_level(lowest, highest), with_heaviest


def layers(path, runs):
    """Yields what `scored_again` returns of each layer and KV head of a trace."""
    generator = torch.Generator().manual_seed(0)
    with safe_open(path, "pt") as file:
        facts = file.metadata() or {}
        scale = float(facts["scale"])
        for name in sorted(key for key in file.keys() if key == "k" or key.endswith(".k")):
            prefix = name[:-1]
            keys, values, queries = (file.get_tensor(prefix + which).float() for which in "kvq")
            context = int(facts.get("context") or facts.get("context_tokens") or keys.shape[1])
            group = queries.shape[0] // keys.shape[0]
            if group > GROUP:
                raise SystemExit(f"error: {path}: expected at most {GROUP} query heads for each KV head, found {group}")
            for head in range(keys.shape[0]):
                of_head = queries[head * group:(head + 1) * group]
                steps, before = of_head[:, STEPS::STEPS], of_head[:, STEPS - 1:-1:STEPS]
                eligible = slice(SINK, context - WINDOW)
                uniforms = 1 - torch.rand(context - SINK - WINDOW, generator=generator)
                yield scored_again(keys[head, eligible], values[head, eligible], steps, before, scale, runs, uniforms)


def normal_layer(tokens, runs):
    """The same of a layer with normal numbers."""
    generator = torch.Generator().manual_seed(1)
    dim = 128
    for _ in range(8):
        keys, values = torch.randn(2, tokens, dim, generator=generator)
        queries, before = torch.randn(2, GROUP, 12, dim, generator=generator)
        yield scored_again(keys, values, queries, before, dim**-0.5, runs, 1 - torch.rand(tokens, generator=generator))


def summary(numbers):
    points = torch.quantile(numbers, torch.tensor([.5, .9, .99]))
    return {"mean": round(numbers.mean().item(), 2), **{name: round(point.item(), 2) for name, point in zip(("median", "p90", "p99"), points)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--normal", type=int, metavar="TOKENS", help="normal keys as well, so many")
    parser.add_argument("--sample", type=int, default=512, help="tokens that give references, in runs of 64 (default: 512)")
    parser.add_argument("--json", type=Path, help="where the numbers go as well")
    options = parser.parse_args()
    if options.sample < RUN or options.sample % RUN:
        parser.error(f"--sample: expected a multiple of {RUN}, found {options.sample}")
    if not options.traces and not options.normal:
        parser.error("expected a trace or --normal, found neither")
    runs = options.sample // RUN
    sources = {path.name: layers(path, runs) for path in options.traces}
    if options.normal:
        sources["normal"] = normal_layer(options.normal, runs)
    rows = []
    for name, source in sources.items():
        spreads, now, with_heads, with_heaviest = zip(*source)
        row = {"trace": name, "sample": options.sample, "spread_octaves": summary(torch.cat(spreads))}
        for level in LEVELS:
            row[f"candidates_per_k_{level}x"] = summary(torch.cat([of_head[level] for of_head in now]))
            row[f"candidates_per_k_{level}x_with_heads"] = summary(torch.cat([of_head[level] for of_head in with_heads]))
            row[f"candidates_per_k_{level}x_with_heaviest"] = summary(torch.cat([of_head[level] for of_head in with_heaviest]))
        rows.append(row)
        print(json.dumps(row))
    if options.json:
        report = {"command": " ".join(["benchmarks/quality/references.py", *sys.argv[1:]]),
                  "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                  "hardware": f"{os.cpu_count()} cores, {platform.machine()}", "torch": torch.__version__, "rows": rows}
        write_whole(options.json, json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
