#!/usr/bin/env python3
"""Answers the questions of needle-llama with every selector at every sparsity: the main grid of docs/quality.md.

    benchmarks/quality/grid.py --out benchmarks/results
    benchmarks/quality/grid.py --quick                     # one sequence of 8K tokens at 20x and 100x
    benchmarks/quality/grid.py --others --out benchmarks/results   # the other ten cases, fewer selectors, 20x and 100x

Runs kvtier-quality-answers in pieces, a sequence and a group of selectors each, a core to each, longest first. A piece's
report appears in --pieces when it is done, and is not made again, whatever has changed since: a run that was stopped goes on when repeated. Once all are
there, they become one report for each case in --out, from which report.py writes the tables.
"""

import argparse
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from whole_file import write_whole  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPARSITIES = (5, 10, 20, 50, 100, 200)
CASES = {"n8192.d100": 4, "n32768.d100": 1}  # and sequences
# What one process answers, the longest first, and at how many sparsities when the context has 32K tokens.
GROUPS = (("pqcache", 6), ("dense,norm_aware", 2), ("quest,streaming,random", 6), ("h2o", 6), ("double_sparsity", 6), ("vattention", 3),
          ("exact", 3), ("magicpig", 3), ("rabitq", 3), ("hard_lsh", 6), ("soft_collision", 1), ("soft_collision --other-planes", 1),
          ("norm_aware --other-planes", 3))
GROUPS_OF_OTHERS = (("dense,norm_aware", 2), ("soft_collision", 2), ("exact", 2))
ORDER = ("dense", "soft_collision", "norm_aware", "hard_lsh", "dense, 8-bit rows", "norm_aware, 8-bit rows", "exact", "magicpig", "quest",
         "double_sparsity", "pqcache", "rabitq", "vattention", "h2o", "streaming", "random")
MEANS = ("rows_attended", "exact", "first_token", "fwe", "kl", "kl_answers")  # over sequences


class Piece:
    def __init__(self, options, case, sequence, group, sparsities):
        sparsities = [f"{s:g}" for s in sparsities]
        selectors, *flags = group.split()
        name = ".".join((case, str(sequence), group.replace(",", "+").replace(" --", "."), "-".join(sparsities)))
        self.path = options.pieces / f"{name}.json"
        self.command = [str(options.program), "--model", str(options.data / "model"), "--tasks", str(options.data / "tasks/dev.safetensors"),
                        "--case", case, "--first-sequence", str(sequence), "--sparsity", ",".join(sparsities), "--selectors", selectors,
                        *flags, "--json", str(self.path)]


def context_of(case):
    return int(case[1:].split(".")[0])


def split(options, case):
    """Returns lists of pieces that differ in the sequence alone."""
    longer = max(1, 32768 // context_of(case))
    return [[Piece(options, case, sequence, group, options.sparsity[at:at + most * longer]) for sequence in range(options.cases[case])]
            for group, most in options.groups for at in range(0, len(options.sparsity), most * longer)]


def run(options, pieces):
    """Runs the pieces, a core to each or, where there are fewer of them, several, until the limit."""
    waiting = [piece for piece in pieces if not piece.path.exists()]
    all_cores = sorted(os.sched_getaffinity(0))[:options.jobs]
    slots = min(len(all_cores), max(1, len(waiting)))
    cores = [frozenset(all_cores[slot::slots]) for slot in range(slots)]
    begin = time.monotonic()
    running = {}
    failed = False
    try:
        while (waiting and not failed) or running:
            if options.limit and time.monotonic() - begin > options.limit:
                break
            while waiting and not failed and len(running) < len(cores):
                core = next(core for core in cores if core not in running)
                piece = waiting.pop(0)
                with piece.path.with_suffix(".log").open("w") as log:
                    process = subprocess.Popen(piece.command, stdout=log, stderr=log,
                                               preexec_fn=lambda core=core: os.sched_setaffinity(0, core))
                running[core] = (process, piece, time.monotonic())
            time.sleep(0.1)
            for core, (process, piece, since) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[core]
                failed = failed or process.returncode != 0
                print(f"{piece.path.name}: exit code {process.returncode} after {time.monotonic() - since:.0f} s; "
                      f"{len(waiting) + len(running)} left", flush=True)
    finally:
        for process, _, _ in running.values():
            process.kill()
            process.wait()


def rank(row):
    name = row["selector"]
    if row["settings"].endswith(("int8 rows", "fp8 rows")):
        name += ", 8-bit rows"
    return ORDER.index(name)


def merge(options, case):
    """Returns one report: rows of all pieces, each the mean of its sequences."""
    rows = {}  # by name, settings, selection and sparsity, as they come
    for pieces in split(options, case):
        reports = [json.loads(piece.path.read_text()) for piece in pieces]
        for same in zip(*(report["rows"] for report in reports), strict=True):
            row = dict(same[0])
            for key in MEANS:
                row[key] = sum(each[key] for each in same) / len(same)
            if "right" in row:
                row["right"] = "".join(each["right"] for each in same)
            rows[row["selector"], row["settings"], row["selection"], row["sparsity"]] = row
    settings = list(dict.fromkeys(key[:3] for key in rows))
    result = {key: value for key, value in reports[0].items() if key != "rows"}
    result["sequences"] = len(reports)
    result["queries"] = sum(report["queries"] for report in reports)
    result["date"] = max(report["date"] for report in reports)
    result["command"] = options.command
    result["rows"] = sorted(rows.values(), key=lambda row: (
        rank(row), settings.index((row["selector"], row["settings"], row["selection"])), row["sparsity"]))
    return result


def numbers(text):
    return [float(part) for part in text.split(",")]


def parse():
    build = ROOT / "build/release/benchmarks/quality/kvtier-quality-answers"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one sequence of n8192.d100 at 20x and 100x")
    parser.add_argument("--others", action="store_true", help="the first sequence of the other cases at 20x and 100x, in one report")
    parser.add_argument("--case", help="this one alone")
    parser.add_argument("--sequences", type=int, help="of each case (default: 4 of n8192.d100, 1 of n32768.d100)")
    parser.add_argument("--sparsity", type=numbers, default=list(SPARSITIES), help="S,S,...: select 1/S of the context")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cores, and most pieces at once")
    parser.add_argument("--limit", type=float, default=0, help="stop after this many seconds")
    parser.add_argument("--pieces", type=pathlib.Path, default=ROOT / "build/quality", help="folder of what is done")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/quality", help="folder of the reports")
    parser.add_argument("--program", type=pathlib.Path, default=build, help="kvtier-quality-answers")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "data/needle-llama", help="folder of model and tasks")
    options = parser.parse_args()
    options.cases = dict(CASES)
    options.groups = GROUPS
    options.command = "benchmarks/quality/grid.py --out benchmarks/results"
    if options.others:
        names = [f"n{context}.d{density}" for context in (4096, 8192, 16384, 32768) for density in (10, 50, 100)]
        options.cases = {name: 1 for name in names if name not in CASES}
        options.sparsity = [20.0, 100.0]
        options.groups = GROUPS_OF_OTHERS
        options.command = options.command.replace(" --out", " --others --out")
    if options.quick:
        options.cases, options.sparsity = {"n8192.d100": 1}, [20.0, 100.0]
    if options.case:
        options.cases = {options.case: CASES.get(options.case, 1)}
    if options.sequences is not None:
        options.cases = {case: options.sequences for case in options.cases}
    if options.jobs < 1 or any(count < 1 for count in options.cases.values()):
        parser.error("--jobs and --sequences: expected at least 1")
    return options


def main():
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    options.pieces.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    longest_first = sorted(options.cases, key=context_of, reverse=True)
    pieces = [piece for case in longest_first for same in split(options, case) for piece in same]
    run(options, pieces)
    left = sum(not piece.path.exists() for piece in pieces)
    if left:
        sys.exit(f"{left} of {len(pieces)} pieces are missing in {options.pieces}: the same command goes on, and the logs there tell of errors")
    reports = {case: merge(options, case) for case in options.cases}
    if options.others:
        reports = {"needle-llama": {"cases": list(reports.values())}}
    for name, report in reports.items():
        path = options.out / f"{datetime.date.today()}-cpu-{'cases' if options.others else 'answers'}-{name}.json"
        write_whole(path, json.dumps(report, indent=1, sort_keys=True) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
