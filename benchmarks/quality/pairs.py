"""Rows of docs/quality.md against dense attention over the same questions; for report.py."""

import math
import statistics


def paired(row, dense):
    """Returns by how much a row's share of right answers is above that of dense attention over the same questions, with the standard error
    of that difference, and how many answers are lost and gained."""
    pairs = list(zip(row["right"], dense["right"], strict=True))
    lost, gained = pairs.count(("0", "1")), pairs.count(("1", "0"))
    count = len(pairs)
    difference = (gained - lost) / count
    return difference, math.sqrt((lost + gained) / count - difference ** 2) / math.sqrt(count), lost, gained


def sign_test(lost, gained):
    """Returns how likely a split at least as uneven is if an answer is as likely lost as gained (McNemar's exact test)."""
    changed = lost + gained
    tail = sum(math.comb(changed, i) for i in range(min(lost, gained) + 1)) / 2 ** changed
    return min(1.0, 2 * tail)


def signed(values):
    return ", ".join(f"{value:+.3f}".replace("0.", ".") for value in values)
