"""What the writers of docs/performance.md share: the committed results, and how figures are written."""

import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
K, M = 1024, 1024 * 1024


def newest(kind, machine="h200"):
    files = sorted(RESULTS.glob(f"*-{machine}-{kind}.json"))
    if not files:
        sys.exit(f"performance.py: expected a file benchmarks/results/DATE-{machine}-{kind}.json, found none")
    return files[-1]


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def number(value, digits=3):
    """A figure with `digits` significant digits and no exponent; "not measured" for None."""
    if value is None:
        return "not measured"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{places}f}"


def times(value):
    return "not measured" if value is None else f"{value:.2f}x"


def percent(value):
    return "not measured" if value is None else f"{100 * value:.0f} %"


def context(tokens):
    return f"{tokens // M}M" if tokens % M == 0 else f"{tokens // K}K"


def fraction(value):
    """A share as .992, and 1 as 1.000."""
    return f"{value:.3f}".removeprefix("0")


def spread(row, field, form):
    return f"{form(row[field])} ({form(row[field + '_least'])} to {form(row[field + '_most'])})"
