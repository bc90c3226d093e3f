#!/usr/bin/env python3
"""Writes docs/quality.md, its plots and scripts/quality.sh from the reports of kvtier-quality and its kin in
benchmarks/results.

    python3 -m pip install matplotlib
    benchmarks/quality/report.py [--check]

Plots go to docs/quality/. Without matplotlib only the tables and the script are written, and it says so. --check writes
nothing, and fails when the tables or the script differ from the reports.
"""

import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from pairs import paired, sign_test, signed  # noqa: E402
from plots import OURS, closest, draw_answers, draw_masses, draw_ranking, draw_rules, drawn_by, methods_of, selectors, title  # noqa: E402
from whole_file import write_whole  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "quality.md"
SCRIPT = ROOT / "scripts" / "quality.sh"
PLOTS = ROOT / "docs" / "quality"
RESULTS = ROOT / "benchmarks" / "results"
BINARIES = {"kvtier-quality-budget": "build/release/benchmarks/quality/kvtier-quality-budget",
            "kvtier-quality-answers": "build/release/benchmarks/quality/kvtier-quality-answers",
            "kvtier-quality-rows": "build/release/benchmarks/quality/kvtier-quality-rows",
            "kvtier-quality": "build/release/benchmarks/quality/kvtier-quality",
            "kvtier-llama": "build/release/examples/llama/kvtier-llama",
            "benchmarks/quality/grid.py": "benchmarks/quality/grid.py"}

HEAD = """# Token selectors, compared

Which tokens attention keeps decides its answer. Here kvtier's selectors stand beside others of the literature, each as its paper
defines it, on recorded attention. There is one set of tokens per query head, k = visible tokens / sparsity, and first and last tokens are always
attended. Everything is compared with dense attention in double precision. The metrics are defined in section 6 of
[algorithm.md](algorithm.md). Rows are of the CPU backend where nothing else is said.

`benchmarks/quality/report.py` writes this file from the `-quality-`, `-answers-`, `-cases-`, `-oracle-`, `-variants-`, `-options-`, `-ratios-`,
`-rules-`, `-ablations-`, `-budget-` and `-rows-` reports in `benchmarks/results/`. It also writes `scripts/quality.sh`, which runs their commands again:

```sh
cmake --preset release && cmake --build --preset release
scripts/quality.sh --list                                   # the commands, and where each can run
scripts/quality.sh needle-layer2-cut                        # those that contain this text; without it, all
```

The script leaves its reports and traces in `build/quality`. Copy a report to `benchmarks/results/` to put it into this file.
`benchmarks/quality/grid.py` spreads selectors and sequences over the cores, keeps what is done, and continues when it is started again. Its `--quick`
answers the questions of one sequence of 8K tokens at 20x and 100x, some minutes on two cores.

What to know about the rows (`benchmarks/quality/*_selectors.h` says the rest):

- *bits* are what a selector's index keeps per token and KV head, counted from its arrays. Sketches count with their norms, in whole
  chunks of 128 planes; keys, in 16 bit, where a selector reads them. Centroids, planes and rotations are left out: they do not grow with the context.
- *exact* takes the best by q.k, with ln |v| the best by q.k / sqrt(d) + ln |v|.
- *magicpig* samples, so that its number of tokens follows from its tables; a larger sample than the budget is thinned. Mass counts
  the tokens attended; its correction by the sampling probability shows in the output error.
- *double_sparsity* is calibrated on queries that are not evaluated: other steps of the trace, or the last 64 tokens of the context.
- *pqcache* runs k-means over the keys of the context, the cost of which is not in this table.
- *vattention* takes half of its budget by exact q.k and samples the others.
- *h2o* sums attention over the recorded steps, or the tokens after the context, only, and nothing is evicted for good.
- *fp8 rows* are kvtier's over pages that hold the keys and values of the context in e4m3, where the others have bf16. Pages of 8 bits hold integers now, which are
  nearer ([algorithm.md](algorithm.md#4-attend)).
- HashAttention is missing: its mapping has to be learned for each model.
"""

# Written to scripts/quality.sh.
RUNNER = r"""#!/usr/bin/env bash
# Runs the measurements of docs/quality.md again. Written by benchmarks/quality/report.py from benchmarks/results.
#
#   scripts/quality.sh [--list] [TEXT]
#
# Runs the commands that contain TEXT, all by default; --list only prints them. Reports and traces go to build/quality.
# Needs the preset release, built. A command that cannot run here is named and skipped: it
# needs a GPU (KVTIER_CUDA_LIBS names the folders of its libraries), or a trace that is not in the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

list=0
if [[ ${1:-} == --list ]]; then
  list=1
  shift
fi
wanted=${1:-}

mkdir -p build/quality
cd build/quality
for folder in benchmarks data build; do ln -sfn "../../$folder" "$folder"; done

# why_not COMMAND: prints why a command cannot run here, or nothing.
why_not() {
  if [[ $1 == *"--backend cuda"* ]] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "needs a GPU"
  elif [[ $1 == *" trace-layer2.safetensors"* && ! -e trace-layer2.safetensors ]]; then
    echo "needs the trace build/quality/trace-layer2.safetensors"
  fi
}

mapfile -t commands <<'COMMANDS'
{commands}
COMMANDS

found=0
for command in "${commands[@]}"; do
  if [[ $command != *"$wanted"* ]]; then continue; fi
  found=1
  reason=$(why_not "$command")
  echo "== ${reason:+skipped, $reason: }$command"
  if ((list)) || [[ -n $reason ]]; then continue; fi
  bash -euc "${command//--cuda-libs DIR/--cuda-libs ${KVTIER_CUDA_LIBS:-.}}"
done
if ((!found)); then
  echo "quality.sh: expected a text that a command contains, found $wanted" >&2
  exit 2
fi
"""


def cell(row):
    return title(row).replace("|", "\\|")


def number(value, digits=3):
    if value is None:
        return "-"
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def metric_table(report, metric):
    sparsities = sorted({row["sparsity"] for row in report["rows"]})
    lines = ["| selector | bits | " + " | ".join(f"{s:g}x" for s in sparsities) + " |",
             "|---|---|" + "---|" * len(sparsities)]
    for name, rows in selectors(report).items():
        cells = [number(rows[s][metric]) for s in sparsities]
        bits = next(iter(rows.values()))["bits_per_token"]
        lines.append(f"| {cell(next(iter(rows.values())))} | {bits:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def layer_table(report, sparsity):
    layers = report["trace"]["layers"]
    lines = ["| selector | bits | " + " | ".join(f"layer {layer}" for layer in layers) + " |", "|---|---|" + "---|" * len(layers)]
    for row in report["rows"]:
        if row["sparsity"] != sparsity or not row["selector"].startswith(("exact", *OURS)):
            continue
        lines.append(f"| {cell(row)} | {row['bits_per_token']:.0f} | " + " | ".join(number(mass) for mass in row["layer_attention_mass"]) + " |")
    return "\n".join(lines)


def ranking_table(report, sparsity):
    lines = ["| selector | precision | Jaccard | NDCG | rows attended (effective) |", "|---|---|---|---|---|"]
    for name, rows in selectors(report).items():
        row = rows.get(sparsity)
        if row is None:
            continue
        lines.append(f"| {cell(row)} | {number(row['precision'])} | {number(row['jaccard'])} | {number(row['ndcg'])} | "
                     f"{row['attended_rows']:.0f} ({row['effective_sparsity']:.1f}x) |")
    return "\n".join(lines)


def score_table(report):
    lines = ["| scores of | bits | correlation | spread |", "|---|---|---|---|"]
    for score in report["scores"]:
        lines.append(f"| {cell(score)} | {score['bits_per_token']:.0f} | {number(score['correlation'])} | "
                     f"{number(score['spread'])} |")
    return "\n".join(lines)


def made_by(report):
    """Returns the commands that made a report's traces."""
    commands = report.get("made_by") or report.get("trace", {}).get("made_by") or ""
    return [command for command in commands.split("; ") if command]


def runnable(command):
    """Names the program of a command, or of a loop, by its path in a build."""
    head, loop, program = command.rpartition("do ") if command.startswith("for ") else ("", "", command)
    name, arguments = program.split(maxsplit=1)
    return f"{head}{loop}{BINARIES[name]} {arguments}"


def here(command):
    """Lets a command write to the folder in which it runs, not over the reports that are kept. States what was the
    default where a command was recorded that does not name a rule: top-k of signs, and in the library a sink and a
    window of 128 tokens."""
    command = command.replace("--json benchmarks/results/", "--json ").replace("--out benchmarks/results", "--out .")
    if "--rule" in command:
        return command
    if "kvtier-llama eval" in command:
        return command.replace(" --estimator ", " --rule top_k --code sign --estimator ")
    if "kvtier-quality-rows" in command:
        return command.replace(" --json ", " --rule top_k --code sign --sink 128 --window 128 --json ")
    return command


def describe(report):
    trace = report["trace"]
    layers = ", ".join(trace["layers"])
    return (f"{trace['context_tokens']:,} tokens of context, layer{'s' if len(trace['layers']) > 1 else ''} {layers}, "
            f"{report['steps']} steps, {trace['query_heads']} query heads over {trace['kv_heads']} KV heads, head_dim "
            f"{trace['head_dim']}; the first {report['sink_tokens']} and the last {report['recent_tokens']} tokens always "
            f"attended.")


def answers_table(report, cell_of):
    """Returns a table of selectors by sparsities."""
    rows = [row for row in report["rows"] if row["sparsity"]]
    sparsities = sorted({row["sparsity"] for row in rows})
    found = {}
    for row in rows:
        found.setdefault((title(row), row["selection"]), {})[row["sparsity"]] = row
    lines = ["| selector | set per | bits | " + " | ".join(f"{s:g}x" for s in sparsities) + " |",
             "|---|---|---|" + "---|" * len(sparsities)]
    for (_, selection), by_sparsity in found.items():
        first = next(iter(by_sparsity.values()))
        cells = " | ".join(cell_of(by_sparsity[s]) for s in sparsities)
        lines.append(f"| {cell(first)} | {selection[4:].replace('_', ' ')} | {first['bits_per_token']:.0f} | {cells} |")
    return "\n".join(lines)


def answers_section(report, plotted):
    dense = {title(row): row for row in report["rows"] if not row["sparsity"]}
    name = report["case"]
    parts = [f"\n## Answers of needle-llama, {name}\n\n{report['context_tokens']:,} tokens of context, {report['sequences']} sequence"
             f"{'s' if report['sequences'] > 1 else ''}, {report['queries']} questions; the first {report['sink_tokens']} tokens, the "
             f"last {report['recent_tokens']} of the context and all after it always attended. A context is prefilled once, densely, for all rows "
             f"of a process. Run on {report['date']} on {report['hardware']}.\n"]
    if plotted:
        parts.append(f"\n![answers of {name}](quality/answers-{name}.svg)\n")
    parts.append("\n### Questions wholly right, frequent words right\n\nWith dense attention "
                 + "; ".join(f"{number(row['exact'])}, {number(row['fwe'])}" + (f" ({row['settings']})" if row["settings"] else "")
                             for row in dense.values()) + ".\n\n"
                 + answers_table(report, lambda row: f"{number(row['exact'])}, {number(row['fwe'])}") + "\n")
    parts.append("\n### KL divergence from dense attention\n\nOf next-token distributions: at all positions after the context, at answers."
                 + "".join(f" With dense attention over {row['settings']} {number(row['kl'], 4)}, {number(row['kl_answers'], 4)}."
                           for row in dense.values() if row["settings"]) + "\n\n"
                 + answers_table(report, lambda row: f"{number(row['kl'], 4)}, {number(row['kl_answers'], 4)}") + "\n")
    return "".join(parts)


def cases_section(report):
    cases = report["cases"]
    first = cases[0]
    parts = [f"\n## Answers of needle-llama, the other cases\n\n{first['sequences']} sequence of each case, {first['queries']} questions; n: tokens of context, "
             f"d: share of them that tell something to ask for, in percent. One set per query head, the first {first['sink_tokens']} and the last {first['recent_tokens']} "
             "tokens of the context always attended. A cell is the share of questions wholly right, and the KL divergence from dense attention. "
             f"Run on {first['date']} on {first['hardware']}.\n"]
    wanted = ("dense", "exact, q.k", "soft_collision, linear", "norm_aware, 128 planes", "norm_aware, 256 planes")
    for sparsity in sorted({row["sparsity"] for row in first["rows"] if row["sparsity"]}):
        parts.append(f"\n| {sparsity:g}x | " + " | ".join(case["case"] for case in cases) + " |\n|---|" + "---|" * len(cases) + "\n")
        for name in wanted:
            rows = [next(row for row in case["rows"] if title(row) == name and row["sparsity"] in (0, sparsity)
                         and row["selection"] in ("all", "per_query_head")) for case in cases]
            parts.append(f"| {name} | " + " | ".join(f"{number(row['exact'])}, {number(row['kl'], 4)}" for row in rows) + " |\n")
    return "".join(parts)


def ratios_section(report):
    parts = [f"\n## Answers of needle-llama by sparsity, {report['sequences']} sequences\n\nkvtier's selectors, one set per query head, the first "
             f"{report['sink_tokens']} and the last {report['recent_tokens']} tokens of the context always attended. A cell is the share of questions "
             f"wholly right, and the KL divergence from dense attention. CUDA backend, run on {report['date']} on {report['hardware']}.\n"]
    for case in dict.fromkeys(row["case"] for row in report["ratios"]):
        rows = [row for row in report["ratios"] if row["case"] == case]
        sparsities = sorted({row["sparsity"] for row in rows if row["sparsity"]})
        dense = next(row for row in rows if row["selector"] == "dense")
        parts.append(f"\n| {case}, dense {number(dense['exact'])} | " + " | ".join(f"{s:g}x" for s in sparsities) + " |\n|---|"
                     + "---|" * len(sparsities) + "\n")
        for selector in dict.fromkeys(row["selector"] for row in rows if row["sparsity"]):
            found = {row["sparsity"]: row for row in rows if row["selector"] == selector}
            parts.append(f"| {selector} | " + " | ".join(f"{number(found[s]['exact'])}, {number(found[s]['kl'], 4)}" for s in sparsities) + " |\n")
    return "".join(parts)


def rules_section(report, plot):
    """Both rules with both codes: answers and divergence over sparsity."""
    rows = report["rules"]
    case = rows[0]["case"]
    dense = next(row for row in rows if row["method"] == "dense")
    sparsities = sorted({row["sparsity"] for row in rows if row["sparsity"]})
    drawn = f" The plot has other bits, too.\n\n![rules and codes of {case}](quality/{plot.name})" if plot.exists() else ""
    parts = [f"\n## Rules and codes, answers of needle-llama, {case}\n\nNorm-aware scores, {report['sequences']} sequences, the first "
             f"{report['sink_tokens']} and the last {report['recent_tokens']} tokens of the context always attended. A cell is the share of questions "
             f"wholly right ({number(dense['exact'])} with dense attention), and the KL divergence from dense attention. CUDA backend, run on {report['date']} on {report['hardware']}.{drawn}\n"]
    parts.append("\n| sets | rule, code | bits | " + " | ".join(f"{s:g}x" for s in sparsities) + " |\n|---|---|---|" + "---|" * len(sparsities) + "\n")
    for (selection, name, code, bits), found in methods_of(rows).items():
        if bits not in (128, 256):
            continue
        parts.append(f"| {selection.replace('_', ' ').replace('kv', 'KV')} | {name.replace('_', '-')}, {code} | {bits} | "
                     + " | ".join(f"{number(found[s]['exact'])}, {number(found[s]['kl'], 4)}" for s in sparsities) + " |\n")
    return "".join(parts)


def ablations_section(report):
    options = list(dict.fromkeys(row["option"] for row in report["ablations"]))
    parts = [f"\n## Ablations, answers of needle-llama, {report['case']}\n\nAt {report['sparsity']}x, one option varied and the others at their "
             f"defaults (P 10, L 60, tau 0.4); {report['sequences']} sequences, {report['queries']} questions, one set per query head, the first "
             f"{report['sink_tokens']} and the last {report['recent_tokens']} tokens of the context always attended. A cell is the share of questions "
             f"wholly right ({number(report['dense_exact'])} with dense attention), and the KL divergence from dense attention. CUDA backend, run on {report['date']} on {report['hardware']}.\n"]
    for option in options:
        rows = [row for row in report["ablations"] if row["option"] == option]
        values = sorted({row["value"] for row in rows})
        parts.append(f"\n| {option} | " + " | ".join(f"{value:g}" for value in values) + " |\n|---|" + "---|" * len(values) + "\n")
        for weighting in dict.fromkeys(row["value_weighting"] for row in rows):
            cells = [f"{number(row['exact'])}, {number(row['kl'], 4)}" for value in values for row in rows
                     if row["value"] == value and row["value_weighting"] == weighting]
            parts.append(f"| {rows[0]['estimator']}, {weighting} | " + " | ".join(cells) + " |\n")
    return "".join(parts)


def rule(row):
    return f"recall {row['recall']:g}" if row["recall"] else "fixed k"


def calibration_table(calibration):
    lines = ["| noise_share | " + " | ".join(f"{s:g}x: bias | 95th percentile" for s in sparsities_of(calibration)) + " |",
             "|---|" + "---|---|" * len(sparsities_of(calibration))]
    for share in sorted({row["noise_share"] for row in calibration["rows"]}):
        cells = [f"{row['error_mean']:+.4f} | {number(row['error_p95'])}" for s in sparsities_of(calibration)
                 for row in calibration["rows"] if row["sparsity"] == s and row["noise_share"] == share]
        lines.append(f"| {share:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sparsities_of(calibration):
    return sorted({row["sparsity"] for row in calibration["rows"]})


def budget_table(rows):
    lines = ["| rule | mean k | missed | missed, 95th percentile | output error | error of the estimate: bias | median | "
             "95th percentile |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {rule(row)} | {row['mean_k']:.0f} | {number(row['missed'], 4)} | {number(row['missed_p95'])} | "
                     f"{number(row['output_error'])} | {row['error_mean']:+.4f} | {number(row['error_p50'], 4)} | "
                     f"{number(row['error_p95'])} |")
    return "\n".join(lines)


def pairs_of(answers):
    """Returns the rows of each target with that of the fixed k which equals its mean."""
    return zip(answers["rows"][::2], answers["rows"][1::2])


def budget_answers(answers):
    lines = [f"\nAnswers of needle-llama, {answers['case']}: {answers['sequences']} sequence"
             f"{'s' if answers['sequences'] > 1 else ''}, {answers['queries']} questions.\n\n"
             "| rule | mean k | exact | fwe | KL | KL, answers | KL over that of fixed k |\n|---|---|---|---|---|---|---|\n"]
    for adaptive, fixed in pairs_of(answers):
        for row in (adaptive, fixed):
            ratio = f"{row['kl'] / fixed['kl']:.2f}" if row is adaptive else ""
            lines.append(f"| {rule(row)} | {row['mean_k']:.0f} | {number(row['exact'])} | {number(row['fwe'])} | "
                         f"{number(row['kl'], 4)} | {number(row['kl_answers'], 4)} | {ratio} |\n")
    return "".join(lines)


def budget_section(report, first):
    if not first:
        return budget_answers(report["answers"])
    parts = ["\n## Adaptive budget\n\n`recall_target` against the fixed k that equals its mean: norm-aware, "
             f"{report['planes']} planes, one set {report['selection'].replace('_', ' ')}. The first {report['sink_tokens']} and the "
             f"last {report['recent_tokens']} tokens are always attended, and a target selects at least {report['min_top_k']}. *missed*: attention mass on tokens not attended, the mean and the "
             "95th percentile over layers, steps and query heads. *error of the estimate*: the missed mass by `AttendOutputs::missed`, "
             f"less the true one; percentiles are of its size. Run on {report['date']} on {report['hardware']}.\n"]
    calibration = report.get("calibration")
    if calibration:
        parts.append(f"\n`noise_share` is calibrated on {calibration['name']}, with fixed k:\n\n{calibration_table(calibration)}\n")
    for trace in report["traces"]:
        parts.append(f"\n{trace['name']}, not used to calibrate:\n\n{budget_table(trace['rows'])}\n")
    parts.append(budget_answers(report["answers"]))
    return "".join(parts)


def rows_section(report):
    parts = ["\n## A cache of rows\n\nOf the tokens that a step selects many were selected by steps before, so a cache of rows on the GPU would spare reads "
             "from host memory. Here the selected tokens of recorded dense decoding are looked up in one cache per layer and KV head, empty at first. It has sets "
             "of 32 slots (`transfer/row_cache/row_cache_set.h`) and one of three policies of replacement (`transfer/row_cache/row_cache_policy.h`). A cell is the share of rows "
             "found, and that share over the one of Belady's optimum. That is a cache which knows all later steps, and after each keeps in any slots "
             f"what is best of the rows that it had and of those of the step. Norm-aware, {report['bits']} planes, one set {report['selection'].replace('_', ' ')}, at {report['sparsity']:g}x. The "
             f"first {report['sink_tokens']} and the last {report['recent_tokens']} tokens are always attended and not counted. *overlap*: share of a step's "
             "tokens that the step before selected as well. The half-life of *score* was chosen on the first two traces. "
             f"Run on {report['date']} on {report['hardware']}.\n"]
    policies = [policy["policy"] for policy in report["replays"][0]["rows"][0]["policies"]]
    parts.append("\n| trace | layers | context | steps | overlap | slots | Belady | " + " | ".join(policies) + " |\n|---|---|---|---|---|---|---|"
                 + "---|" * len(policies) + "\n")
    for replay in report["replays"]:
        name = replay["file"].removesuffix(".safetensors")
        for row in replay["rows"]:
            cells = [f"{number(policy['hit_ratio'])}, {number(policy['of_belady'])}" for policy in row["policies"]]
            parts.append(f"| {name} | {replay['layers']} | {replay['context_tokens']:,} | {replay['steps']} | {number(replay['step_overlap'])} | "
                         f"{row['capacity']:,} | {number(row['belady_hit_ratio'])} | " + " | ".join(cells) + " |\n")
    return "".join(parts) + pages_section(report)


def pages_section(report):
    replays = [replay for replay in report["replays"] if replay.get("pages", {}).get("rows")]
    if not replays:
        return ""
    policies = [policy["policy"] for policy in replays[0]["pages"]["rows"][0]["policies"]]
    page_tokens = replays[0]["pages"]["page_tokens"]
    parts = [f"\n## A pool of pages\n\nThe pages of {page_tokens} tokens that the same steps read, layer by layer, are looked up in a pool that has frames for a share of them. "
             "The columns are orders in which pages may be evicted; `score` is that of `runtime/paging/page_policy.h`, and the others are not in the library any more ([decision 23](decisions/0023-one-page-order.md)). A page has the rows of all KV heads, so a call needs most pages of its layer (*of a call*: at most). "
             "A cell is the share of pages found, and that share over the one of Belady's optimum. The layers go round: what was used the longest ago is "
             "needed next, which is the worst for a clock and for LRU. A pool that the pages of one call do not fit in is left out.\n"
             "\n| trace | pages | of a call | frames | Belady | " + " | ".join(policies) + " |\n|---|---|---|---|---|" + "---|" * len(policies) + "\n"]
    for replay in replays:
        pages = replay["pages"]
        for row in pages["rows"]:
            cells = [f"{number(policy['hit_ratio'])}, {number(policy['of_belady'])}" for policy in row["policies"]]
            parts.append(f"| {replay['file'].removesuffix('.safetensors')} | {pages['pages']:,} | {pages['most_of_a_call']:,} | {100 * row['share']:.0f} % | "
                         f"{number(row['belady_hit_ratio'])} | " + " | ".join(cells) + " |\n")
    return "".join(parts)


def of_name(report, name, sparsity, selection="per_query_head"):
    return next(row for row in report["rows"] if title(row) == name and row["sparsity"] == sparsity
                and row.get("selection", report.get("selection")) == selection)


def of_seeds(report, planes):
    """Returns the rows of norm-aware for every draw of planes."""
    return [row for row in report["rows"] if row["selection"] == "per_query_head"
            and (row["settings"] == planes or row["settings"].startswith(f"{planes}, seed"))]


def pairs_table(report, dense):
    parts = ["| selector | lost | gained | difference | standard error | p | KL |\n|---|---|---|---|---|---|---|\n"]
    for row in report["rows"]:
        if not row["sparsity"] or row["selection"] != "per_query_head" or row["settings"].endswith(("int8 rows", "fp8 rows")):
            continue
        difference, error, lost, gained = paired(row, dense)
        parts.append(f"| {cell(row)} | {lost} | {gained} | {signed([difference])} | {number(error)} | {number(sign_test(lost, gained), 2)} | "
                     f"{number(row['kl'], 4)} |\n")
    return "".join(parts)


def pairs_section(report):
    dense = next(row for row in report["rows"] if row["selector"] == "dense" and not row["settings"])
    sparsity = next(row["sparsity"] for row in report["rows"] if row["sparsity"])
    parts = [f"\n## Answers lost, {report['case']} at {sparsity:g}x\n\n{report['sequences']} sequences, {report['queries']} questions, of which dense attention "
             f"answers {dense['right'].count('1')} wholly right. One set per query head; the first {report['sink_tokens']} and the last {report['recent_tokens']} tokens of the "
             "context are always attended. *lost* and *gained*: questions that only dense attention, or only the selector, answers. The difference of the shares has the standard "
             "error of paired questions. *p* is McNemar's: how likely a split at least as uneven is if an answer is as likely lost as gained. "
             f"Norm-aware has a row for every draw of planes. Run on {report['date']} on {report['hardware']}.\n\n", pairs_table(report, dense)]
    for planes in ("128 planes", "256 planes"):
        rows = of_seeds(report, planes)
        differences = [paired(row, dense)[0] for row in rows]
        parts.append(f"\nOver {len(rows)} draws of {planes} the difference is {signed([statistics.mean(differences)])} in the mean, from "
                     f"{signed([min(differences)])} to {signed([max(differences)])}.\n")
    return "".join(parts)


def variants_section(reports):
    """Returns what a sketch of 128 planes would bring with other corrections and weights, on every case that was run."""
    variants = [report["variants"] for report in reports if "variants" in report]
    options = next(report["options"] for report in reports if "options" in report)
    parts = ["\n## Where a sketch of 128 planes loses answers\n\n*exact* ranks without any error. *signs* has the information that norm-aware with 128 planes has, the signs of one "
             "rotation and the query in full precision; it is not part of the library. *corrected*: by each key's own inner product with its signs, as RaBitQ does, in place of "
             "the mean of such products. *centred*: the signs are those of keys less their mean. Both cost no bit. Rows differ in how much the logarithm of the value norm weighs.\n"]
    for report in variants:
        dense = next(row for row in report["rows"] if row["selector"] == "dense" and not row["settings"])
        sparsity = next(row["sparsity"] for row in report["rows"] if row["sparsity"])
        parts.append(f"\n{report['case']} at {sparsity:g}x, {report['queries']} questions; run on {report['date']} on {report['hardware']}.\n\n" + pairs_table(report, dense))
    parts.append(f"\nNorm-aware, 128 bits, with other options: {options['case']} at 50x but where it says otherwise, {options['queries']} questions. The number of tokens "
                 f"attended by a query head is the same. CUDA backend, run on {options['date']} on {options['hardware']}. *rows*: of a KV head, those of its query heads taken "
                 "together.\n\n| options | difference | KL | rows |\n|---|---|---|---|\n")
    parts += [f"| {row['settings']} | {signed([row['exact'] - row['exact_dense']])} | {number(row['kl'], 4)} | {row['rows_attended']:,.0f} |\n" for row in options["rows"]]
    parts.append("\nThe target of -.02 is two questions of 128. Ranked by q.k alone the exact best tokens miss it as well; by q.k with ln \\|v\\| they meet it, and what a sketch gets "
                 "wrong costs the rest. Nothing here that leaves the bits as they are brings that back. The query's precision, the draw of planes, which tokens are always attended, and a "
                 "better estimate of q.k each move the difference by no more than its standard error. The more value norms weigh, the fewer questions are lost by exact scores, "
                 "down to none. By signs that holds for twice the weight, within the standard error, and not beside the corrections. Only the weight of 1 "
                 "follows from what the ranking is for (a_j \\|v_j\\|): the library has no larger one. On n8192.d100 no variant loses an answer. More weight lowers the KL of exact scores there too, and that of "
                 "signs by less than another draw of planes changes it (.0318 with those of norm-aware). One set per KV head with four "
                 "times the tokens meets the target, for a quarter more rows than the sets of its query heads have together.\n")
    return "".join(parts)


def targets_section(reports):
    """Returns what is wanted of kvtier's selectors, and what the reports say."""
    masses = next(report for report in reports if report.get("trace", {}).get("name") == "n8192.d100")
    collisions = [row["layer_attention_mass"] for row in masses["rows"] if row["selector"] == "soft_collision" and row["sparsity"] == 33]
    ours, exact = (of_name(masses, name, 33)["layer_attention_mass"] for name in ("norm_aware, 256 planes, no value norm", "exact, q.k"))
    over_collisions = [mine - max(others) for mine, *others in zip(ours, *collisions)]
    long = next(report["oracle"] for report in reports if "oracle" in report)
    dense = next(row for row in long["rows"] if row["selector"] == "dense" and not row["settings"])
    (sign, error, *_), (oracle, *_), (weighted, *_) = (paired(of_name(long, name, 50), dense)
                                                       for name in ("norm_aware, 128 planes", "exact, q.k", "exact, q.k, ln |v|"))
    draws = [paired(row, dense)[0] for row in of_seeds(long, "128 planes")]
    budgets = [report for report in reports if "traces" in report]
    ratios = [f"{budget['answers']['case']}: " + ", ".join(f"{adaptive['kl'] / fixed['kl']:.2f} at {adaptive['recall']:g}" for adaptive, fixed in pairs_of(budget["answers"]))
              for budget in sorted(budgets, key=lambda budget: budget["answers"]["context_tokens"])]
    budget = next(budget for budget in budgets if budget["traces"])
    errors = [f"{number(row['error_p95'])} at {row['recall']:g}" for row in budget["traces"][0]["rows"] if row["recall"]]
    return ("\n## Targets\n\n| | must | aim | measured |\n|---|---|---|---|\n"
            "| norm-aware, 256 planes, no value norm, less the best soft collision of 600 bits, with any weighting and planes: attention mass "
            f"at 33x, layer by layer | 0 | higher | {signed(over_collisions)} |\n"
            f"| the same, less the exact best tokens | | -.01 | {signed(mine - best for mine, best in zip(ours, exact))} |\n"
            "| norm-aware, 128 planes, n32768.d100 at 50x, less dense attention: questions wholly right | -.02 | 0 | "
            f"{signed([sign])} of {long['queries']} questions, standard error {number(error)}; {signed([statistics.mean(draws)])} over {len(draws)} draws of planes, "
            f"from {signed([min(draws)])} to {signed([max(draws)])}; {signed([oracle])} of the exact best tokens by q.k, {signed([weighted])} by q.k with ln \\|v\\| |\n"
            f"| adaptive budget: KL over that of fixed k, by recall target | 1 | 0.70 | {'; '.join(ratios)} |\n"
            "| estimated missed mass: 95th percentile of the error, by recall target, steps not used to calibrate | .05 | .02 | "
            f"{', '.join(errors)} |\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the tables differ from the reports")
    check = parser.parse_args().check
    paths = sorted([*RESULTS.glob("*-quality-*.json"), *RESULTS.glob("*-answers-*.json"),
                    *RESULTS.glob("*-budget-*.json"), *RESULTS.glob("*-ablations-*.json"),
                    *RESULTS.glob("*-ratios-*.json"), *RESULTS.glob("*-rules-*.json"), *RESULTS.glob("*-rows-*.json"), *RESULTS.glob("*-cpu-cases-*.json"), *RESULTS.glob("*-cpu-oracle-*.json"),
                    *RESULTS.glob("*-cpu-variants-*.json"), *RESULTS.glob("*-options-*.json")])
    reports = [json.loads(path.read_text()) for path in paths]
    commands = dict.fromkeys(runnable(command) for report in reports for part in (report, *report.get("cases", [])[:1])
                             for command in (*made_by(part), *part.get("commands", []), part.get("command")) if command)
    script = RUNNER.replace("{commands}", "\n".join(map(here, commands)))
    parts = [HEAD, targets_section(reports)]
    drawn = True
    for report in reports:
        if "trace" not in report:
            continue
        name = report["trace"]["name"]
        parts.append(f"\n## {name}\n\n{describe(report)} Run on {report['date']} on {report['hardware']}.\n")
        plot = PLOTS / f"{name}.svg"
        drawn = check or drawn_by(draw_masses, report, plot) and drawn
        if plot.exists():
            parts.append(f"\n![attention mass of {name}](quality/{plot.name})\n")
        sparsities = sorted({row["sparsity"] for row in report["rows"]})
        sparsity = closest(sparsities, 20)
        parts.append(f"\n### Attention mass kept\n\n{metric_table(report, 'attention_mass')}\n")
        if 33 in sparsities and len(report["trace"]["layers"]) > 1:
            parts.append(f"\n### Attention mass by layer at 33x\n\n{layer_table(report, 33)}\n")
        parts.append(f"\n### Output error\n\n{metric_table(report, 'output_error')}\n")
        parts.append(f"\n### Ranking at {sparsity:g}x\n\n{ranking_table(report, sparsity)}\n")
        plot = PLOTS / f"ranking-{name}.svg"
        drawn = check or drawn_by(draw_ranking, report, plot) and drawn
        if plot.exists():
            parts.append(f"\n![ranking of {name}](quality/{plot.name})\n")
        parts.append("\n### Correlation of scores with q.k\n\nPearson's, over the eligible tokens of a step; its mean and standard "
                     f"deviation over layers, query heads and steps.\n\n{score_table(report)}\n")
    for report in reports:
        if "rows" not in report or "case" not in report:
            continue
        plot = PLOTS / f"answers-{report['case']}.svg"
        drawn = check or drawn_by(draw_answers, report, plot) and drawn
        parts.append(answers_section(report, plot.exists()))
    parts += [pairs_section(report["oracle"]) for report in reports if "oracle" in report]
    parts.append(variants_section(reports))
    parts += [cases_section(report) for report in reports if "cases" in report]
    parts += [ratios_section(report) for report in reports if "ratios" in report]
    for report in reports:
        if "rules" not in report:
            continue
        plot = PLOTS / f"rules-{report['rules'][0]['case']}.svg"
        if len({row["sketch_bits"] for row in report["rules"] if row["sparsity"]}) > 2:
            drawn = check or drawn_by(draw_rules, report, plot) and drawn
        parts.append(rules_section(report, plot))
    parts += [ablations_section(report) for report in reports if "ablations" in report]
    budgets = sorted((report for report in reports if "traces" in report), key=lambda report: not report["traces"])
    parts += [budget_section(report, report is budgets[0]) for report in budgets]
    parts += [rows_section(report) for report in reports if "replays" in report]
    text = "".join(parts)
    for path, wanted in ((DOCUMENT, text), (SCRIPT, script)):
        if not check:
            write_whole(path, wanted)
        elif not path.exists() or path.read_text() != wanted:
            sys.exit(f"{path.relative_to(ROOT)}: expected what benchmarks/results says, found something else; run "
                     "benchmarks/quality/report.py")
    if check:
        return
    SCRIPT.chmod(0o755)
    print(f"wrote {DOCUMENT.relative_to(ROOT)}" + ("" if drawn else "; matplotlib is missing: plots were left as they are"),
          file=sys.stderr)


if __name__ == "__main__":
    main()
