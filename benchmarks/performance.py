#!/usr/bin/env python3
"""Writes docs/performance.md and its plot from the runs in benchmarks/results.

    performance.py            writes docs/performance.md and docs/performance.svg
    performance.py --check    fails when they are not what the results say

The text around the tables is benchmarks/performance.template; `{{name}}` there is replaced by what a function
`name` of this folder returns. The newest file of each kind counts: DATE-h200-kvtier-bench.json (`kvtier-bench all`), and DATE-h100-kvtier-bench.json,
DATE-h200-needle-llama.json, DATE-h200-replay.json, DATE-h200-model.json (`kvtier-bench
model`), DATE-h200-host.json and DATE-h200-batches.json (`kvtier-llama bench` with KV in host memory), DATE-h200-ttft.json (`kvtier-bench ttft`),
DATE-h100-dense-rule.json and DATE-h100-codes.json (`kvtier-bench decode_step`), DATE-cpu-tiers.json (`kvtier-tier-bench`), which may be missing. Python's standard library is enough.
"""

import argparse
import math
import re
import sys
from statistics import median

from figures import K, M, ROOT, context, fraction, load, newest, number, percent, table, times
from host_figures import oversubscription, oversubscription_block, service, service_block, tiers, tiers_block
from whole_file import write_whole

NARROW = ("int8", "fp8")  # rows in pages of 8 bits; the latter until 2026-11-26
SHAPE = {"batch": 1, "query_heads": 32, "kv_heads": 8}
NORM_AWARE = {"estimator": "norm_aware", "bits": 256, "selection": "per_kv_head", "placement": "device"}
SOFT = {"estimator": "soft_collision", "bits": 600, "selection": "per_kv_head", "placement": "device"}


# Former names, in results that are older than the names of today.
FORMER = {"hot_step": "row_cache_step", "hot_rows": "row_cache_rows", "hot_share": "row_cache_share"}


def renamed(row):
    return {FORMER.get(key, key): FORMER.get(value, value) if key == "what" else value for key, value in row.items()}


class Run:
    """The rows of one `kvtier-bench all`."""

    def __init__(self, path):
        self.path = path
        document = load(path)
        self.date, self.command, self.machine = document["date"], document["command"], document["machine"]
        self.rows = [renamed(row) for row in document["rows"]]
        priority = {"rule": "priority", "code": "scalar"}
        self.main = {**NORM_AWARE, **(priority if self.find("decode_step", **priority) else {})}  # older runs: the k best, signs

    def find(self, what, **wanted):
        """The last row of a kind with these parameters and no error, or None."""
        found = [row for row in self.rows if row["what"] == what and "error" not in row
                 and all(row.get(key) == value for key, value in wanted.items())]
        return found[-1] if found else None

    def get(self, field, what, **wanted):
        row = self.find(what, **wanted)
        return None if row is None else row.get(field)

    def dense(self, tokens, **shape):
        return self.get("us", "dense_cudnn", tokens=tokens, **{**SHAPE, **shape})

    def own_dense(self, tokens, **shape):
        return self.get("us", "decode_step", tokens=tokens, estimator="dense", **{**SHAPE, **shape})

    def step(self, tokens, selector, **wanted):
        return self.get("us", "decode_step", tokens=tokens, **{**SHAPE, **selector, "recall": None, "kv_dtype": None,
                                                                    "error_target": None, **wanted})

    def threshold(self, tokens, bits):
        """The row with an error target in place of a k, or None."""
        return next((row for row in self.rows if row["what"] == "decode_step" and "error" not in row and "error_target" in row
                     and (row["tokens"], row["bits"]) == (tokens, bits)), None)

    def faster(self, tokens, selector, **wanted):
        """Dense attention by cuDNN with all KV on the device, over the step."""
        shape = {key: wanted[key] for key in SHAPE if key in wanted}
        dense, step = self.dense(tokens, **shape), self.step(tokens, selector, **wanted)
        return None if dense is None or step is None else dense / step


def run_block(run):
    machine = run.machine
    return (f"`benchmarks/results/{run.path.name}`, {run.date}, by `{run.command}`: {machine['device']}"
            f"{', driver ' + driver(machine) if driver(machine) else ''}. Measured in that run: reading device memory "
            f"{number(machine['read_gbps'], 4)} GB/s, copies from pinned memory {number(machine['host_to_device_gbps'])}"
            f" GB/s and to it {number(machine['device_to_host_gbps'])} GB/s"
            f"{product_rate(run)}.")


def driver(machine):
    match = re.search(r"\b(\d+\.\d+\.\d+)\b", machine.get("driver", ""))
    return match.group(1) if match else ""


def product_rate(run):
    row = run.find("prefill_sketch", bits=600)
    return "" if row is None else f", a bf16 matrix product {number(row['product_tflops'])} TFLOP/s"


def targets(run):
    def selection(field, selector):
        return run.get(field, "select", tokens=M, batch=1, k=2048, **selector)

    norm_aware = {key: NORM_AWARE[key] for key in ("estimator", "bits")}
    soft = {key: SOFT[key] for key in ("estimator", "bits")}
    main = run.main
    at_32k = [run.faster(32 * K, selector, sparsity=33) for selector in (main, SOFT)]
    gather = run.find("gather", rows=16384, placement="host", kv_dtype=None)
    region = "64 GiB" if gather is None else f"{gather['region_gib']} GiB"
    prefill = {bits: run.get("over_floor", "prefill_sketch", bits=bits) for bits in (256, 600)}
    rows = [
        ("norm-aware 256 bits: scoring pass, share of the read bandwidth over sketch and norms, 1M", "75 %", "85 %",
         percent(selection("pass_share_of_read", norm_aware))),
        ("soft collision (600 bits), k = 2048: scoring pass, the same measure, 1M", "50 %", "80 %",
         percent(selection("pass_share_of_read", soft))),
    ]
    if "rule" not in main:  # else they are in the table of steps
        rows += [
            ("whole step, per KV head, 33x, norm-aware 256 bits, 128K: faster than dense by", "3x", "4.5x",
             times(run.faster(128 * K, main, sparsity=33))),
            ("whole step, k = 2048 per KV head, 1M: norm-aware 256 / 128 bits", "6x / 7x", "9x / 12x",
             f"{times(run.faster(M, main, k=2048))} / {times(run.faster(M, main, k=2048, bits=128))}"),
            ("whole step, per KV head, 33x, soft collision, 128K / 1M", "2x / 2.5x", "3x / 4x",
             f"{times(run.faster(128 * K, SOFT, sparsity=33))} / {times(run.faster(M, SOFT, sparsity=33))}"),
            ("whole step, one set per query head (the paper), 33x, soft collision, 128K", "1.5x", "2.5x",
             times(run.faster(128 * K, SOFT, sparsity=33, selection="per_query_head"))),
            ("whole step at 32K, 33x: norm-aware 256 bits / soft collision", "1x", "2x",
             " / ".join(times(value) for value in at_32k)),
        ]
    rows += [
        (f"gather of 16,384 random 512-byte rows from pinned memory, row sets rotating over {region}, GB/s", "24", "48",
         number(None if gather is None else gather["gbps"])),
        ("whole step, KV in pinned memory, k = 2048, norm-aware 256 bits, 1M: faster than dense over KV on the device",
         "1.8x", "3.3x", times(run.faster(M, main, k=2048, placement="host"))),
        *row_cache_targets(run),
        ("sketches of 128K tokens, one layer, 256 / 600 bits: time over the larger of reading K and the product", "1.6x",
         "1.15x", f"{times(prefill[256])} / {times(prefill[600])}"),
    ]
    return table(["what", "must", "aim", "measured"], rows)


def row_cache_targets(run):
    """Of the step with a row cache, once a run has it."""
    cached = run.find("row_cache_step", tokens=M, **{**SHAPE, **NORM_AWARE, "k": 2048, "placement": "host"})
    if cached is None:
        return []
    dense = run.dense(M)
    found = f"{percent(cached['found'])} of the selected rows found among {cached['row_cache_rows']} cached ones per KV head"
    return [(f"step at 1M tokens, KV in host memory, k = 2048, {found}: faster than dense over KV on the device", "4x", "6x",
             times(None if dense is None else dense / cached["us"])),
            (f"of that step: exposed fetch time, what it takes longer than when every row is found ({number(cached['found_all_us'])} us; "
             f"{number(cached['resident_us'])} us with KV on the device)", "20 %", "10 %", percent(cached["exposed"]))]


def step_targets(run):
    """Each shape with a mark, once a run has the rows."""
    if "rule" not in run.main:
        return ""
    rows = []

    def add(what, step, against, must, aim, ratio=None):
        ratio = ratio or (None if step is None or against is None else against / step)
        rows.append((what, number(against), number(step), times(ratio), f"{must}x", f"{aim}x"))

    def compare(must, aim, tokens, selector, name="", **wanted):
        shape = {**SHAPE, **{key: wanted[key] for key in SHAPE if key in wanted}}
        many = f"{shape['batch']} sequences of " if shape["batch"] > 1 else ""
        chosen = f"{wanted['sparsity']}x" if "sparsity" in wanted else f"k = {wanted['k']}"
        bits = f", {wanted['bits']} bits" if "bits" in wanted else ""
        add(f"{name}{shape['query_heads']}/{shape['kv_heads']}: {many}{context(tokens)}, {chosen}{bits}",
            run.step(tokens, selector, **wanted), run.dense(tokens, **shape), must, aim)

    def threshold(must, aim, tokens, bits=256):
        row = run.threshold(tokens, bits) or {}
        found = f", {row['error_target']:g}: {row['rows_attended'] / 8 - 256:,.0f} rows in the mean" if row else ""
        add(f"32/8: {context(tokens)}, error target{found}{'' if bits == 256 else f', {bits} bits'}", row.get("us"), run.dense(tokens), must, aim)

    def recall(tokens):
        plain, step = run.step(tokens, run.main, k=2048), run.step(tokens, run.main, k=2048, recall=0.99)
        add(f"32/8: {context(tokens)}, k = 2048, recall target .99, over the step without (left)", step, plain, "at most 1.25",
            "at most 1.1", None if plain is None or step is None else step / plain)

    main = run.main
    for tokens, must, aim in ((16, 1.3, 1.7), (32, 1.8, 2.3), (64, 2.7, 3.4), (128, 4, 5), (256, 4.5, 6), (1024, 6, 7.5)):
        compare(must, aim, tokens * K, main, sparsity=33)
    threshold(4.5, 6, 128 * K)
    threshold(5.5, 8, 256 * K)
    compare(9, 12, M, main, k=2048)
    compare(12, 18, M, main, k=2048, bits=128)
    threshold(9, 12, M)
    threshold(12, 18, M, 128)
    for query_heads, kv_heads, must, aim in ((64, 8, 3.3, 4.4), (40, 8, 3.3, 4.4), (32, 4, 2.5, 3.3), (28, 4, 2.5, 3.3), (64, 4, 1.6, 2.5),
                                             (32, 2, 1.2, 1.8)):
        compare(must, aim, 128 * K, main, sparsity=33, query_heads=query_heads, kv_heads=kv_heads)
    compare(6.5, 8.5, 128 * K, main, k=2048, batch=8)
    compare(6, 8, 64 * K, main, k=2048, batch=32)
    compare(4.5, 6, 32 * K, main, sparsity=33, batch=16)
    compare(2.4, 3, 128 * K, SOFT, "soft collision, ", sparsity=33)
    compare(3.5, 4.3, M, SOFT, "soft collision, ", sparsity=33)
    compare(1.5, 2, 128 * K, SOFT, "soft collision, a set per query head, ", sparsity=33, selection="per_query_head")
    recall(128 * K)
    recall(M)
    return ("Steps beside dense attention by cuDNN of the same shape (query heads / KV heads: context). Unless a row says otherwise: norm-aware "
            "256 bits, priority rule, scalar code.\n\n" + table(["shape", "dense", "step", "ratio", "must", "aim"], rows))


def other_card(_):
    """The shapes with a mark on another card, in a run that has them all."""
    run = Run(newest("kvtier-bench", "h100"))
    return f"{run_block(run)}\n\n{step_targets(run)}"


def graphs(run):
    """How many steps a graph has."""
    least = min((row["graph_steps"] for row in run.rows if "graph_steps" in row), default=0)
    return f" A graph has at least {least} steps, so that its launch is little of each." if least else ""


def contexts(run):
    rows = []
    for tokens in sorted({row["tokens"] for row in run.rows if row["what"] == "dense_cudnn" and "us" in row}):
        def cell(selector, tokens=tokens, **wanted):
            us = run.step(tokens, selector, **wanted)
            return "" if us is None else f"{number(us)} ({times(run.faster(tokens, selector, **wanted))})"

        if run.dense(tokens) is None:
            continue
        own = run.own_dense(tokens)
        rows.append((context(tokens), number(run.dense(tokens)), "" if own is None else number(own),
                     cell(run.main, sparsity=33), cell(run.main, k=2048), cell(SOFT, sparsity=33)))
    return table(["context", "dense, cuDNN", "dense, kvtier", "norm-aware 256, 33x", "norm-aware 256, k = 2048",
                  "soft collision, 33x"], rows)


def shapes(run):
    rows = []
    for row in run.rows:
        if row["what"] != "decode_step" or "us" not in row or row["estimator"] == "dense":
            continue
        shape = {key: row[key] for key in SHAPE}
        of_contexts = any(all(row.get(key) == value for key, value in {**SHAPE, **selector}.items()) for selector in
                          (run.main, {**SOFT, "k": None}))
        if of_contexts and "recall" not in row and "error_target" not in row:
            continue  # in the table of contexts
        dense = run.dense(row["tokens"], **shape)
        rows.append((context(row["tokens"]), row["batch"], f"{row['query_heads']} / {row['kv_heads']}",
                     selector_name(row), row["placement"], number(row["us"]),
                     "" if dense is None else number(dense), "" if dense is None else times(dense / row["us"])))
    return table(["context", "sequences", "query / KV heads", "selector", "KV", "us", "dense, cuDNN", "faster by"], rows)


def selector_name(row):
    names = {"norm_aware": "norm-aware", "soft_collision": "soft collision", "hard_collision": "hard collision"}
    rows = (f"error target {row['error_target']:g}" if "error_target" in row else
            f"{row['sparsity']:g}x" if "sparsity" in row else f"k = {row['k']}")
    rule = ", priority" if row.get("rule") == "priority" else ""
    code = ", scalar" if row.get("code") == "scalar" else ""
    per_head = ", a set per query head" if row["selection"] == "per_query_head" else ""
    recall = f" at most, recall target {row['recall']:g}" if "recall" in row else ""
    narrow = f", {row['kv_dtype']} rows" if row.get("kv_dtype") in NARROW else ""
    return f"{names[row['estimator']]} {row['bits']} bits{rule}{code}, {rows}{recall}{per_head}{narrow}"


def selections(run):
    rows = []
    for row in run.rows:
        if row["what"] != "select" or "us" not in row:
            continue
        rows.append((context(row["tokens"]), row["batch"], selector_name(row), number(row["bytes"] / 1e6),
                     number(row["us"]), percent(row["share_of_read"]),
                     number(row["pass_us"]) if "pass_us" in row else "",
                     percent(row["pass_share_of_read"]) if "pass_us" in row else ""))
    return table(["context", "sequences", "selector", "MB of sketches", "tables, scores, choice: us", "of read bandwidth",
                  "longest kernel: us", "of read bandwidth"], rows)


def kernels(run):
    def rate(row):
        share = f", {percent(row['share_of_link'])} of the link" if "share_of_link" in row else \
            f", {percent(row['share_of_read'])} of read bandwidth"
        return f"{number(row['gbps'])} GB/s{share}"

    def plural(count, what):
        return f"{count} {what}{'' if count == 1 else 's'}"

    rows = []
    for row in run.rows:
        if "us" not in row:
            continue
        what = row["what"]
        if what == "gather":
            where = "device memory" if row["placement"] == "device" else "pinned memory"
            narrow = f" {row['kv_dtype']}" if row.get("kv_dtype") in NARROW else ""
            rows.append((f"gather of {row['rows']:,} random{narrow} rows from {where} ({row['region_gib']} GiB)",
                         number(row["us"]), rate(row)))
        elif what == "flash_decode":
            rows.append((f"flash-decode over {row['rows']:,} rows, {row['order']}", number(row["us"]), rate(row)))
        elif what == "ingest":
            rows.append((f"append of a token each to {plural(row['batch'], 'sequence')}, {row['bits']} bits, pages in "
                         f"{row['placement']} memory", number(row["us"]), ""))
        elif what == "tables":
            rows.append((f"tables of a query, {selector_name(row).split(',')[0]}, {plural(row['batch'], 'sequence')}",
                         number(row["us"]), ""))
        elif what == "prefill_sketch":
            rows.append((f"sketches of {row['tokens']:,} tokens, {row['bits']} bits (K read {number(row['read_keys_us'])} "
                         f"us, product {number(row['product_us'])} us: {times(row['over_floor'])})", number(row["us"]),
                         rate(row)))
        elif what == "prefill_append":
            link = f", {percent(row['share_of_link'])} of the link" if "share_of_link" in row else ""
            rows.append((f"append of {row['tokens']:,} tokens with sketches, pages in {row['placement']} memory",
                         number(row["us"]), f"{number(row['gbps'])} GB/s{link}"))
    return table(["kernels", "us", "rate"], rows)


def stages(run):
    lines = []
    for row in run.rows:
        if row["what"] != "decode_step" or "stages" not in row:
            continue
        kept = [stage for stage in row["stages"] if abs(stage["us"]) >= 0.5]
        parts = ", ".join(f"`{stage['kernel']}` {number(stage['us'], 2)}" for stage in kept)
        batch = f"{row['batch']} sequences of " if row["batch"] > 1 else ""
        heads = "" if (row["query_heads"], row["kv_heads"]) == (32, 8) else f", {row['query_heads']} / {row['kv_heads']} heads"
        lines.append(f"- {batch}{context(row['tokens'])}{heads}, {selector_name(row)}, KV on the {row['placement']} "
                     f"({number(row['us'])} us): {parts}")
    return "\n".join(lines)


def overlaps(run):
    rows = [(context(row["tokens"]), selector_name(row), f"{row['fast_with_scored']['mean']:.4f}",
             f"{row['fast_with_exact']['mean']:.4f}", f"{row['fast_with_exact']['least']:.4f}")
            for row in run.rows if row["what"] == "overlap" and "error" not in row]
    return table(["context", "selector", "with the same scores, all written", "with float weights, all written: mean",
                  "least"], rows)


def dense_rows(run):
    rows = [(context(row["tokens"]), row["batch"], f"{row['query_heads']} / {row['kv_heads']}", number(row["us"]),
             number(row["gbps"], 4), percent(row["share_of_read"]), row["layout"])
            for row in run.rows if row["what"] == "dense_cudnn" and "us" in row]
    return table(["context", "sequences", "query / KV heads", "us", "GB/s", "of read bandwidth", "layout"], rows)


def failures(run):
    lines = [f"- `{row['what']}`: {row['error']}" for row in run.rows if "error" in row]
    return "\n".join(["Rows that could not be measured in this run:", ""] + lines) if lines else ""


def needle(_):
    data = load(newest("needle-llama"))["cases"]
    names = [("norm-aware 256 bits", {"estimator": "norm_aware", "bits": 256, "value_weighting": "logit"}),
             ("norm-aware 128 bits", {"estimator": "norm_aware", "bits": 128, "value_weighting": "logit"}),
             ("soft collision, linear (SOCKET)", {"estimator": "soft_collision", "value_weighting": "linear"}),
             ("soft collision, calibrated", {"estimator": "soft_collision", "value_weighting": "calibrated"}),
             ("soft collision, no value norm", {"estimator": "soft_collision", "value_weighting": "none"})]

    def find(**wanted):
        return next(row for row in data if row["case"] == "n8192.d100"
                    and all(row.get(key) == value for key, value in wanted.items()))

    dense = find(estimator="dense")
    rows = [("dense", "", fraction(dense["exact"]), "0", f"{dense['rows_attended']:,.0f}")]
    for name, wanted in names:
        pair = [find(sparsity=33.0, selection=selection, **wanted) for selection in ("per_kv_head", "per_query_head")]
        rows.append((name, "per KV head / per query head", " / ".join(fraction(row["exact"]) for row in pair),
                     " / ".join(number(row["kl"]) if row["kl"] >= .1 else fraction(row["kl"]) for row in pair),
                     " / ".join(f"{row['rows_attended']:,.0f} ({row['effective_sparsity']:.1f}x)" for row in pair)))
    return table(["selector", "selection", "exact", "KL", "rows attended (effective)"], rows)


def replay(_):
    rows = {}
    for run in load(newest("replay"))["runs"]:
        for row in run["rows"]:
            name = {"exact": "exact q.k",
                    "soft_collision": f"soft collision, {row.get('value_weighting')}",
                    "norm_aware": f"norm-aware {row.get('bits')} bits"}[row["estimator"]]
            rows.setdefault(name, {})[row["sparsity"]] = fraction(row["mean"]["attention_mass"])
    return table(["selector", "33x", "100x"], [(name, mass[33.0], mass[100.0]) for name, mass in rows.items()])


def needle_file(_):
    return newest("needle-llama").name


def replay_file(_):
    return newest("replay").name


def plot(run):
    """Microseconds of a step over the context length, both on logarithmic axes, as SVG."""
    series = [("dense, cuDNN", "#444444", "6 4", lambda n: run.dense(n)),
              ("dense, kvtier", "#9a9a9a", "2 3", lambda n: run.own_dense(n)),
              ("soft collision 600 bits, 33x", "#d1660a", "", lambda n: run.step(n, SOFT, sparsity=33)),
              ("norm-aware 256 bits, 33x", "#1f6fb4", "", lambda n: run.step(n, run.main, sparsity=33)),
              ("norm-aware 256 bits, k = 2048", "#1b8a4b", "", lambda n: run.step(n, run.main, k=2048))]
    lengths = [16 * K << i for i in range(7)]
    points = [(name, color, dash, [(n, us) for n in lengths if (us := value(n)) is not None])
              for name, color, dash, value in series]
    every = [us for *_, line in points for _, us in line]
    if not every:
        sys.exit(f"performance.py: {run.path.name}: expected decode steps over several contexts, found none")
    low, high = min(every) / 1.25, max(every) * 1.25
    width, height, left, right, top, bottom = 760, 440, 64, 24, 24, 56

    def x(tokens):
        return left + (width - left - right) * math.log(tokens / lengths[0]) / math.log(lengths[-1] / lengths[0])

    def y(us):
        return height - bottom - (height - top - bottom) * math.log(us / low) / math.log(high / low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222222">',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for tokens in lengths:
        out.append(f'<path d="M{x(tokens):.1f} {top}V{height - bottom}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{x(tokens):.1f}" y="{height - bottom + 20}" text-anchor="middle">{context(tokens)}</text>')
    ticks = [m * 10**e for e in range(0, 5) for m in (1, 2, 5)]
    for us in [tick for tick in ticks if low <= tick <= high]:
        out.append(f'<path d="M{left} {y(us):.1f}H{width - right}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{left - 8}" y="{y(us) + 4:.1f}" text-anchor="end">{us}</text>')
    out.append(f'<text x="{(left + width - right) / 2:.0f}" y="{height - 14}" text-anchor="middle">'
               'context, tokens</text>')
    out.append(f'<text transform="translate(18 {(top + height - bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">'
               'one layer, one step: microseconds</text>')
    for row, (name, color, dash, line) in enumerate(points):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        path = "L".join(f"{x(n):.1f} {y(us):.1f}" for n, us in line)
        if line:
            out.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        out += [f'<circle cx="{x(n):.1f}" cy="{y(us):.1f}" r="3" fill="{color}"/>' for n, us in line]
        at = top + 18 + 20 * row
        out.append(f'<path d="M{left + 14} {at - 4}h28" stroke="{color}" stroke-width="2"{dashes}/>')
        out.append(f'<text x="{left + 50}" y="{at}">{name}</text>')
    return "\n".join(out + ["</svg>", ""])


def whole_model(_):
    run = Run(newest("model"))
    rest = run.find("model", attention="none")
    rows = []
    for dense in [row for row in run.rows if row["what"] == "model" and row["attention"] == "cudnn"]:
        cells = [f"{dense['tokens']:,}", number(dense["tokens_per_second"])]
        for place in ("device", "host"):
            sparse = run.find("model", tokens=dense["tokens"], attention=f"kvtier, pages on the {place}")
            ratio = "" if sparse is None else f" ({times(dense['us'] / sparse['us'])})"
            cells.append(number(None if sparse is None else sparse["tokens_per_second"]) + ratio)
        rows.append(cells)
    head = ["context", "cuDNN, dense", "kvtier, KV on the device", "kvtier, KV in host memory"]
    return (f"`benchmarks/results/{run.path.name}`, {run.date}, by `{run.command}`. Without attention the token takes "
            f"{number(rest['us'] / 1000)} ms: {number(rest['weight_bytes'] / 1e9)} GB of weights at {number(rest['gbps'], 4)} GB/s.\n\n"
            + table(head, rows))


def host_model(_):
    """Whole models with KV in host memory; dense rows of the same shape on the GPU."""
    run = Run(newest("host", "h200"))
    shown = []
    without = {}  # a token without attention, of the run that a row belongs to
    for row in [row for row in run.rows if "us" in row]:
        if row["attention"] == "none":
            without[row["batch"]] = row["us"]
            continue
        layer = (row["us"] - without[row["batch"]]) / row["layers"]
        dense = row["attention"] == "cudnn"
        bits = ", 128 bits" if row.get("bits") == 128 else ""
        attended = "all" if dense else f"k = {row['k']}" if "k" in row else f"{row['sparsity']:g}x"
        attended += bits
        pages = "GPU" if dense or row["placement"] == "device" else f"host, {row['kv_dtype']}"
        cached = f"{row['row_cache_rows']:,}: {row['found']:.2f}" if row.get("row_cache_rows") else ""
        shown.append((f"{row['layers']}", f"{row['tokens']:,}", str(row["batch"]), attended, pages, cached, number(layer), f"{row['us'] / 1000:.2f}", f"{row['us_p99'] / 1000:.2f}",
                      number(row["tokens_per_second"]), f"{row['gpu_bytes'] / 1e9:.1f}"))
    head = ["layers", "context", "sequences", "attended", "KV", "rows cached: found", "us a layer", "ms", "ms, p99", "tokens/s", "GPU GB"]
    return f"`benchmarks/results/{run.path.name}`, {run.date}, by `" + "`; `".join(run.command) + "`.\n\n" + table(head, shown)


def batches(_):
    """Whole models against the number of sequences: KV in host memory, and dense on the GPU as far as that has room."""
    run = Run(newest("batches"))
    rows = []
    for sparse in [row for row in run.rows if row.get("attention") == "kvtier, pages on the host"]:
        same = {"tokens": sparse["tokens"], "batch": sparse["batch"]}
        dense = run.find("model", attention="cudnn", **same)
        cells = [context(sparse["tokens"]), str(sparse["batch"])]
        for row in (dense, sparse):
            cells += ["", "", "does not fit"] if row is None else [
                number(row["tokens_per_second"]), f"{row['us_p99'] / 1000:.2f}", f"{row['gpu_bytes'] / 1e9:.1f}"]
        cells.append("" if dense is None else times(dense["us"] / sparse["us"]))
        rows.append(cells)
    head = ["context", "sequences", "dense: tokens/s", "ms, p99", "GPU GB", "host: tokens/s", "ms, p99", "GPU GB", "over dense"]
    return f"`benchmarks/results/{run.path.name}`, {run.date}, one {run.machine['device']}, by `" + "`; `".join(run.command) + "`.\n\n" + table(head, rows)


def ttft(_):
    run = Run(newest("ttft"))
    rows = [(row["with"], number(row["us"] / 1000, 4), f"{100 * row['overhead']:.2f} %" if "overhead" in row else "")
            for row in run.rows if row["what"] == "ttft"]
    return (f"`benchmarks/results/{run.path.name}`, {run.date}, by `{run.command}`.\n\n"
            + table(["prefill of a layer with", "ms", "of the prefill"], rows))


def dense_rule(_):
    """Steps of kvtier, dense and sparse, and cuDNN's."""
    run = Run(newest("dense-rule", "h100"))
    shapes = [(32, 2), (64, 4), (8, 1), (16, 2), (28, 4), (32, 4), (32, 8), (64, 8)]
    lengths = [16 * K, 32 * K, 64 * K, 128 * K, 256 * K, M]

    def cell(tokens, query_heads, kv_heads):
        shape = {"tokens": tokens, "batch": 1, "query_heads": query_heads, "kv_heads": kv_heads}
        dense = run.get("us", "decode_step", estimator="dense", **shape)
        sparse = run.get("us", "decode_step", estimator="norm_aware", recall=None, **shape)
        library = run.get("us", "dense_cudnn", **shape)
        if dense is None or sparse is None:
            return ""
        return f"{number(dense)} / {number(sparse)}" + ("" if library is None else f" ({number(library)})")

    rows = [(f"{q} / {kv}", *(cell(tokens, q, kv) for tokens in lengths)) for q, kv in shapes]
    return (f"`benchmarks/results/{run.path.name}`, {run.date}, one {run.machine['device']}. Microseconds of a step, append included: dense by kvtier / sparse, "
            "norm-aware 256 bits, 33x. In brackets: cuDNN, without an append.\n\n"
            + table(["query / KV heads", *(context(tokens) for tokens in lengths)], rows))


def codes(_):
    """Steps by rule and code of the sketch: medians of several processes."""
    run = Run(newest("codes", "h100"))
    pairs = [("priority", "scalar"), ("priority", "sign"), ("top_k", "scalar"), ("top_k", "sign")]

    def median_us(shape, rule, code):
        names = ("tokens", "batch", "query_heads", "kv_heads", "rule", "code")
        return median(row["us"] for row in run.rows if tuple(row[name] for name in names) == (*shape, rule, code))

    def cells(shape):
        us = {pair: median_us(shape, *pair) for pair in pairs}
        tokens, batch, query_heads, kv_heads = shape
        yield f"{query_heads}/{kv_heads}: {f'{batch} sequences of ' if batch > 1 else ''}{context(tokens)}"
        yield from (f"{us[pair]:.1f}" for pair in pairs)
        yield f"{100 * (us[pairs[0]] / us[pairs[1]] - 1):+.1f} %"
        yield f"{100 * (us[pairs[0]] / us[pairs[2]] - 1):+.1f} %"

    shapes = sorted({(row["tokens"], row["batch"], row["query_heads"], row["kv_heads"]) for row in run.rows},
                    key=lambda shape: (shape[1], -shape[3], shape[2], shape[0]))
    return (f"`benchmarks/results/{run.path.name}`, {run.date}, by `{run.command}`: {run.machine['device']}.\n\n"
            + table(["shape", *(f"{rule.replace('_', '-')}, {code}" for rule, code in pairs), "scalar over sign, must +3 %",
                     "priority over top-k, must +8 %"], [list(cells(shape)) for shape in shapes]))


def resident(_):
    run = Run(newest("resident"))

    def over_bare(what, placement):
        row = run.find("resident_step", tokens=32 * K, placement=placement)
        return (f"everything resident, 32K, 33x, {what}: step over the same by an engine without, replays of a graph / calls", "1.05", "1.02",
                f"{row['over_bare']:.3f} / {row['called_over_bare']:.3f}")

    append = run.find("prefill_append", tokens=32 * K, placement="host")
    fork = run.find("fork", tokens=M)
    rows = [over_bare("KV on the device, cached rows configured", "device"),
            over_bare("KV in host memory, with a disk cache", "host"),
            ("append of a prompt of 32K tokens, pages in host memory: share of the link's rate to the host", "80 %", "90 %",
             percent(append["share_of_link"])),
            (f"{fork['children']} forks of a session of 1M tokens, {fork['layers']} layers: time; memory, of the parent's, until a child is used",
             "20 ms; 1 %", "5 ms; 0.2 %", f"{number(fork['us'] / 1000)} ms; {100 * fork['share_of_parent']:.2f} %")]
    cached = run.find("row_cache_step", tokens=32 * K)
    return (f"`benchmarks/results/{run.path.name}`, {run.date}, by `{run.command}`.\n\n" + table(["what", "must", "aim", "measured"], rows)
            + f"\n\nWith KV in host memory and cached rows for all of it the step takes {number(cached['found_all_us'])} us, {number(cached['resident_us'])} with KV on the device.")


BLOCKS = {function.__name__: function for function in
          (run_block, graphs, targets, step_targets, other_card, contexts, shapes, selections, kernels, stages, overlaps, dense_rows, failures, needle,
           needle_file, replay, replay_file, whole_model, host_model, batches, ttft, resident, codes, dense_rule, oversubscription, oversubscription_block, service, service_block, tiers, tiers_block)}


def document(run):
    template = (ROOT / "benchmarks" / "performance.template").read_text(encoding="utf-8")
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: BLOCKS[match.group(1)](run), template)
    return re.sub(r"\n{3,}", "\n\n", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    run = Run(newest("kvtier-bench"))
    files = {ROOT / "docs" / "performance.md": document(run), ROOT / "docs" / "performance.svg": plot(run)}
    for path, text in files.items():
        if not arguments.check:
            write_whole(path, text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"performance.py: {path.relative_to(ROOT)}: expected what benchmarks/results says, found "
                     "something else; run benchmarks/performance.py")


if __name__ == "__main__":
    main()
