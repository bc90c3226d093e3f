#!/usr/bin/env python3
"""Writes the tables of docs/method.md, and its plots, from the runs of `kvtier-llama eval` on SmolLM2.

    benchmarks/quality/real_model.py            # needs matplotlib for the plots
    benchmarks/quality/real_model.py --check    # compares the tables, writes nothing
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from whole_file import write_whole  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "method.md"
PLOT = ROOT / "docs" / "quality" / "smollm2.svg"
BITS_PLOT = ROOT / "docs" / "quality" / "smollm2-bits.svg"
FIXED = ("2026-11-23-h200-smollm2.json", "2026-11-25-h100-smollm2-ends.json")
BITS = "2026-11-25-h100-smollm2-bits.json"
TARGETS = ("0.032", "0.045", "0.063", "0.089")
STEPS = "2026-11-23-h200-priority-step.json"
DRAWS = "2026-11-26-h100-smollm2-draws.json"
HUNDREDTH = "2026-11-27-h100-smollm2-100x.json"
MASS = "2026-11-26-cpu-smollm2-mass.json"
NEEDLE = "2026-11-26-cpu-needle-llama-error.json"

KINDS = ("continuation", "copying", "needles")
SPARSITIES = (5, 10, 33, 100, 200)
SETS = {"per_kv_head": "per KV head", "per_query_head": "per query head"}
METHODS = (("top_k", "sign"), ("top_k", "scalar"), ("priority", "sign"), ("priority", "scalar"))
ALWAYS = 128  # sink and window
TICKS = (32, 64, 128, 256, 512, 1024)
KEY_BITS = (64, 128, 256, 512)
LEVELS = (10, 33, 100)


def read(name):
    return json.loads((RESULTS / name).read_text())


def pick(rows, **wanted):
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    assert len(found) == 1, (wanted, len(found))
    return found[0]


def short(value):
    return f"{value:.4f}".lstrip("0")


def method_of(rule, code):
    return f"{rule.replace('_', '-')}, {code}"


def taken(rows, row):
    """Rows taken by score: without sink, window and the tokens after the context, half of them at a step in the mean."""
    dense = pick(rows, kind=row["kind"], estimator="dense")
    context = int(row["case"].split(".")[1])
    return row["rows_attended"] - ALWAYS - (dense["rows_attended"] - context)


def fixed_tables(rows):
    lines = ["| sets | rule, code | continuation, 5x 10x 33x 100x 200x | copying | needles |", "|---|---|---|---|---|"]
    for selection, sets in SETS.items():
        for rule, code in METHODS:
            of_method = {"selection": selection, "rule": rule, "code": code}
            cells = (" ".join(short(pick(rows, kind=kind, sparsity=s, **of_method)["kl"]) for s in SPARSITIES) for kind in KINDS)
            lines.append(f"| {sets} | {method_of(rule, code)} | {' | '.join(cells)} |")
    dense = [pick(rows, kind=kind, estimator="dense")["perplexity"] for kind in KINDS]
    lines += ["", "Perplexity at 33x, and the largest KL of a token:", "",
              f"| sets | rule, code | continuation (dense {dense[0]:.2f}) | copying ({dense[1]:.3f}) | needles ({dense[2]:.3f}) |",
              "|---|---|---|---|---|"]
    for selection, sets in SETS.items():
        for rule, code in (METHODS[0], METHODS[3]):
            of_method = {"selection": selection, "rule": rule, "code": code, "sparsity": 33}
            found = (pick(rows, kind=kind, **of_method) for kind in KINDS)
            cells = (f"{row['perplexity']:.3f}, {row['kl_max']:.2f}" for row in found)
            lines.append(f"| {sets} | {method_of(rule, code)} | {' | '.join(cells)} |")
    return lines


def bits_table():
    rows = read(BITS)["cases"]
    lines = ["| sets | rule, code | continuation, 64 128 256 512 bits | copying | needles |", "|---|---|---|---|---|"]
    for selection, sets in SETS.items():
        for rule, code in METHODS:
            of_method = {"selection": selection, "rule": rule, "code": code}
            cells = (" ".join(short(pick(rows, kind=kind, sketch_bits=bits, **of_method)["kl"]) for bits in KEY_BITS) for kind in KINDS)
            lines.append(f"| {sets} | {method_of(rule, code)} | {' | '.join(cells)} |")
    return lines


def target_rows():
    for target in TARGETS:
        rows = read(f"2026-11-23-h200-smollm2-error-{target}.json")["cases"]
        yield target, rows, [pick(rows, kind=kind, rule="priority") for kind in KINDS]


def target_table():
    lines = ["| error target | continuation: rows, KL | copying | needles |", "|---|---|---|---|"]
    for target, rows, found in target_rows():
        cells = (f"{taken(rows, row):.0f}, {short(row['kl'])}" for row in found)
        lines.append(f"| {target} | {' | '.join(cells)} |")
    return lines


def step_table():
    rows = read(STEPS)["rows"]
    lines = ["| context | " + " | ".join(method_of(rule, code) for rule, code in METHODS) + " |", "|---|---|---|---|---|"]
    for name, tokens in (("32K, 33x", 32768), ("128K, 33x", 131072), ("1M, k = 2048", 1048576)):
        cells = (f"{pick(rows, tokens=tokens, rule=rule, code=code)['us']:.1f}" for rule, code in METHODS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def standard_error(values):
    return statistics.stdev(values) / math.sqrt(len(values))


def signed(share):
    return f"{100 * share:+.2f} %"


def draw_rows_of(rows, kind, selection, sparsity):
    """One row of sequences for each seed, with a fixed k."""
    return [row for row in rows if row["kind"] == kind and row.get("selection") == selection and row.get("sparsity") == sparsity
            and "error_target" not in row and "equal_to_target" not in row]


def changes(rows, found):
    """ln of perplexity over dense: for each row of `found`, one number for each sequence."""
    dense = pick(rows, kind=found[0]["kind"], estimator="dense")["perplexity"]
    return [[math.log(own / dense[i]) for i, own in zip(row["sequences"], row["perplexity"])] for row in found]


def divergence_cell(rows, kind, selection, sparsity):
    found = [statistics.mean(row["kl"]) for row in draw_rows_of(rows, kind, selection, sparsity)]
    spread = f", {standard_error(found):.5f}".replace("0.", ".") if len(found) > 1 else ""
    return f"{statistics.mean(found):.5f}".lstrip("0") + spread


def perplexity_cell(rows, kind, selection):
    found = changes(rows, draw_rows_of(rows, kind, selection, 33))
    draws = [math.expm1(statistics.mean(own)) for own in found]
    sequences = [statistics.mean(own) for own in zip(*found)]
    cell = f"{signed(statistics.mean(draws))} "
    cell += f"({100 * standard_error(draws):.2f}, " if len(draws) > 1 else "(-, "
    return cell + f"{100 * standard_error(sequences):.2f}; {len(draws)})"


def cases_of_draws():
    return read(DRAWS)["cases"] + [row for row in read(HUNDREDTH)["cases"] if "error_target" not in row]


def heads_table():
    """Of selections per query head: the rows that heads attend together, and the KL divergence, with error targets and a fixed k."""
    targets = [row for row in read(HUNDREDTH)["cases"] if "error_target" in row and row["selection"] == "per_query_head"]
    lines = ["| | continuation: rows, KL | copying | needles |", "|---|---|---|---|"]
    for target in sorted({row["error_target"] for row in targets}):
        found = [pick(targets, kind=kind, error_target=target) for kind in KINDS]
        cells = (f"{statistics.mean(row['rows_attended']):.0f}, {short(statistics.mean(row['kl']))}" for row in found)
        lines.append(f"| error target {target} | {' | '.join(cells)} |")
    cells = []
    for kind in KINDS:
        rows = draw_rows_of(cases_of_draws(), kind, "per_query_head", 100)
        attended = statistics.mean(statistics.mean(row["rows_attended"]) for row in rows)
        cells.append(f"{attended:.0f}, {short(statistics.mean(statistics.mean(row['kl']) for row in rows))}")
    lines.append(f"| k = 76 for each head | {' | '.join(cells)} |")
    return lines


def draws_table():
    rows = cases_of_draws()
    lines = ["| sets | | continuation | copying | needles |", "|---|---|---|---|---|"]
    for selection, sets in SETS.items():
        for sparsity in LEVELS:
            cells = (divergence_cell(rows, kind, selection, sparsity) for kind in KINDS)
            lines.append(f"| {sets} | KL at {sparsity}x | {' | '.join(cells)} |")
        cells = (perplexity_cell(rows, kind, selection) for kind in KINDS)
        lines.append(f"| {sets} | perplexity at 33x | {' | '.join(cells)} |")
    return lines


def equal_pairs(rows, kind):
    """Of each error target: the row, and the one of the fixed k that is nearest to the rows it takes."""
    context = int(pick(rows, kind=kind, estimator="dense")["case"].split(".")[1])
    after = pick(rows, kind=kind, estimator="dense")["rows_attended"] - context
    fixed = [row for row in rows if row["kind"] == kind and "equal_to_target" in row]
    for row in sorted((row for row in rows if row["kind"] == kind and "error_target" in row), key=lambda row: row["error_target"]):
        own = statistics.mean(row["rows_attended"]) - ALWAYS - after
        yield row["error_target"], own, row, min(fixed, key=lambda other: abs(other["top_k"] - own))


def equal_table():
    rows = read(DRAWS)["cases"]
    lines = ["| error target | continuation: rows, KL, over that of fixed k | copying | needles |", "|---|---|---|---|"]
    found = [list(equal_pairs(rows, kind)) for kind in KINDS]
    for pairs in zip(*found):
        cells = []
        for _, own, row, fixed in pairs:
            kl, other = statistics.mean(row["kl"]), statistics.mean(fixed["kl"])
            cells.append(f"{own:.0f}, {kl:.5f}, {kl / other:.2f}x".replace(" 0.", " ."))
        lines.append(f"| {pairs[0][0]} | {' | '.join(cells)} |")
    return lines


def mass_table():
    rows = read(MASS)["rows"]
    lines = ["| ranked by | sets | mean | lowest layer | its standard deviation over draws | over sequences | lowest of all |", "|---|---|---|---|---|---|---|"]
    for weighting, name in (("none", "attention"), ("logit", "attention and value norm")):
        for selection, sets in SETS.items():
            own = [row for row in rows if row["value_weighting"] == weighting and row["selection"] == selection and row["sparsity"] == 33]
            layers = [statistics.mean(layer) for layer in zip(*(row["mass_over_exact"] for row in own))]
            worst = layers.index(min(layers))
            draws = statistics.mean(row["deviation_over_draws"][worst] for row in own)
            sequences = statistics.stdev(row["mass_over_exact"][worst] for row in own)
            lowest = min(row["lowest"] for row in own)
            lines.append(f"| {name} | {sets} | {100 * statistics.mean(layers):.2f} % | {100 * layers[worst]:.2f} %, layer {worst} | "
                         f"{100 * draws:.2f} | {100 * sequences:.2f} | {100 * lowest:.2f} % |")
    return lines


def error_cell(values, layers=None):
    text = f"{statistics.mean(values):.3f}, {standard_error(values):.3f}".replace("0.", ".")
    return text + (f" ({min(layers):.2f} to {max(layers):.2f})".replace("0.", ".") if layers else "")


def error_table():
    rows, needle = read(MASS)["rows"], read(NEEDLE)["rows"]
    traces = list(dict.fromkeys(row["trace"] for row in needle))
    lines = ["| sets | rows | " + " | ".join((*KINDS, *traces)) + " |", "|---|---|" + "---|" * (len(KINDS) + len(traces))]
    for selection, sets in SETS.items():
        for sparsity in LEVELS[:2]:
            cells = []
            for kind in KINDS:
                own = [row for row in rows if row["case"].startswith(kind) and row["selection"] == selection and row["sparsity"] == sparsity
                       and row["value_weighting"] == "logit"]
                draws = [statistics.mean(draw) for draw in zip(*(row["mean_error_of_priority_over_top_k"] for row in own))]
                layers = [statistics.mean(layer) for layer in zip(*(row["error_of_priority_over_top_k"] for row in own))]
                cells.append(error_cell(draws, layers))
            for trace in traces:
                row = pick(needle, trace=trace, selection=selection, sparsity=sparsity)
                cells.append(error_cell([own / other for own, other in zip(row["priority"], row["top_k"])]))
            lines.append(f"| {sets} | {sparsity}x | {' | '.join(cells)} |")
    return lines


def largest_divergence(rows, selection, sparsity):
    return max(statistics.mean(statistics.mean(row["kl"]) for row in draw_rows_of(rows, kind, selection, sparsity)) for kind in KINDS)


def error_range(rows, sparsity):
    """Error of priority over that of top-k, selections per KV head: the smallest and the largest mean of a kind of text."""
    found = []
    for kind in KINDS:
        own = [row for row in rows if row["case"].startswith(kind) and row["selection"] == "per_kv_head" and row["sparsity"] == sparsity
               and "mean_error_of_priority_over_top_k" in row]
        found.append(statistics.mean(statistics.mean(row["mean_error_of_priority_over_top_k"]) for row in own))
    return f"{min(found):.2f} to {max(found):.2f}".replace("0.", ".")


def targets_table():
    rows, recorded, needle = cases_of_draws(), read(MASS)["rows"], read(NEEDLE)["rows"]
    lines = ["| | must | aim | measured |", "|---|---|---|---|"]
    wanted = {10: (".0002, .0003", ".0001, .0002"), 33: (".0012, .0025", ".0008, .0016"), 100: (".007, .015", ".004, .010")}
    for sparsity, (must, aim) in wanted.items():
        found = ", ".join(f"{largest_divergence(rows, sets, sparsity):.5f}".lstrip("0") for sets in ("per_query_head", "per_kv_head"))
        lines.append(f"| KL at {sparsity}x, the largest of the three kinds: per query head, per KV head | {must} | {aim} | {found} |")
    for kind in KINDS[:2]:
        lines.append(f"| perplexity at 33x over dense, per KV head, {kind} | +1 % | +.5 % | {perplexity_cell(rows, kind, 'per_kv_head')} |")
    ratios = [statistics.mean(row["kl"]) / statistics.mean(fixed["kl"]) for kind in KINDS for _, _, row, fixed in equal_pairs(rows, kind)]
    lines.append(f"| KL with an error target over that of a fixed k of as many rows, per KV head | 1.05 | .9 | {min(ratios):.2f} to {max(ratios):.2f} |")
    own = [row for row in recorded if row["value_weighting"] == "none" and row["selection"] == "per_kv_head"]
    layers = [statistics.mean(layer) for layer in zip(*(row["mass_over_exact"] for row in own))]
    lines.append(f"| attention mass of top-k over exact, 33x, every layer | 99 % | 99.7 % | {100 * min(layers):.2f} % in the lowest, "
                 f"{sum(layer >= 0.997 for layer in layers)} of {len(layers)} reach the aim |")
    for sparsity, must, aim in ((10, ".50", ".33"), (33, ".67", ".50")):
        cells = [f"{error_range(recorded, sparsity)} on SmolLM2"]
        for row in needle:
            if row["selection"] == "per_kv_head" and row["sparsity"] == sparsity:
                ratio = statistics.mean(own / other for own, other in zip(row["priority"], row["top_k"]))
                cells.append(f"{ratio:.2f} on {row['trace']}".replace("0.", "."))
        lines.append(f"| output error of priority over top-k, {sparsity}x, per KV head | {must} | {aim} | {'; '.join(cells)} |")
    return lines


def with_table(text, name, lines):
    begin, end = f"<!-- table {name} -->\n", f"<!-- end of {name} -->\n"
    head, rest = text.split(begin)
    return head + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def draw(path, xlabel, ticks, columns, lines_of):
    """A panel for each kind of text; `lines_of(kind)` gives the lines: xs, ys, label, style."""
    sys.path.insert(0, str(Path(__file__).parent))
    import plots  # pylint: disable=import-outside-toplevel
    pyplot = plots.plotting()
    figure, every = pyplot.subplots(1, len(KINDS), figsize=(13, 5.5), sharey=True)
    for axes, kind in zip(every, KINDS):
        for xs, ys, label, style in lines_of(kind):
            axes.plot(xs, ys, label=label, markersize=4, **style)
        axes.set(xscale="log", yscale="log", title=kind, xlabel=xlabel)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    every[0].set_ylabel("KL divergence from dense attention")
    figure.legend(*every[0].get_legend_handles_labels(), loc="lower center", ncols=columns, fontsize=8, frameon=False)
    plots.save(pyplot, figure, path)


def draw_rows(rows):
    def lines_of(kind):
        for rule, code in METHODS:
            found = [pick(rows, kind=kind, sparsity=s, selection="per_kv_head", rule=rule, code=code) for s in SPARSITIES]
            yield ([taken(rows, row) for row in found], [row["kl"] for row in found], method_of(rule, code),
                   {"marker": "o", "linestyle": "-" if rule == "priority" else "--"})
        targets = [(taken(own, found[KINDS.index(kind)]), found[KINDS.index(kind)]["kl"]) for _, own, found in target_rows()]
        yield (*zip(*targets), "priority, scalar, error target", {"marker": "s", "linestyle": ":"})

    draw(PLOT, "rows taken by score, a set per KV head", TICKS, 5, lines_of)


def draw_bits():
    rows = read(BITS)["cases"]

    def lines_of(kind):
        for selection, sets in SETS.items():
            for rule, code in METHODS[2:] if selection == "per_query_head" else METHODS:
                found = [pick(rows, kind=kind, sketch_bits=bits, selection=selection, rule=rule, code=code) for bits in KEY_BITS]
                style = "--" if rule == "top_k" else "-" if selection == "per_kv_head" else ":"
                yield KEY_BITS, [row["kl"] for row in found], f"{method_of(rule, code)}, {sets}", {"marker": "o", "linestyle": style}

    draw(BITS_PLOT, "bits of a key, at 33x", KEY_BITS, 3, lines_of)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    rows = read(FIXED[0])["cases"] + [row for row in read(FIXED[1])["cases"] if row["estimator"] != "dense"]
    old = DOCUMENT.read_text()
    new = with_table(old, "fixed", fixed_tables(rows))
    new = with_table(new, "bits", bits_table())
    new = with_table(new, "target", target_table())
    new = with_table(new, "step", step_table())
    new = with_table(new, "targets", targets_table())
    new = with_table(new, "draws", draws_table())
    new = with_table(new, "equal", equal_table())
    new = with_table(new, "heads", heads_table())
    new = with_table(new, "mass", mass_table())
    new = with_table(new, "error", error_table())
    if arguments.check:
        if new != old:
            sys.exit("docs/method.md: expected the tables of benchmarks/results; run benchmarks/quality/real_model.py")
        return
    write_whole(DOCUMENT, new)
    draw_rows(rows)
    draw_bits()


if __name__ == "__main__":
    main()
