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


def draws_of(report, filled):
    """Returns the rows of 128 planes at 50x with a set per query head, one for every draw of planes."""
    return [row for row in report["rows"] if row["selection"] == "per_query_head" and row["sparsity"] == 50
            and row["settings"].startswith("128 planes") and row["settings"].endswith("filled") == filled]


def filled_draws(report, filled=True):
    """Returns by how much each of these is off dense attention."""
    dense = next(row for row in report["rows"] if row["selector"] == "dense")
    return [paired(row, dense)[0] for row in draws_of(report, filled)]


def filled_section(filled, row_name, number):
    """Returns norm-aware with and without a value for what is not attended, for every case that was run. `row_name` and
    `number` name a row and write a number."""
    parts = ["\n## What is not attended as one value\n\n*filled*: `AttendInputs::rest` is the mean value of the context per layer and KV head, and counts with the share of attention "
             "that the step is estimated to miss ([algorithm.md](algorithm.md), section 4). Mean and estimate are of the sequence itself; no constant in them was chosen for this. "
             "*answers KL*: over positions that predict an answer. Norm-aware with 4-bit queries.\n"]
    for report in filled:
        dense = next(row for row in report["rows"] if row["selector"] == "dense")
        parts.append(f"\n{report['case']}, {report['queries']} questions; run on {report['date']} on {report['hardware']}.\n\n"
                     "| selection | sparsity | lost | gained | difference | KL | answers KL |\n|---|---|---|---|---|---|---|\n")
        for row in report["rows"]:
            if row is dense or ", seed" in row["settings"]:
                continue
            difference, _, lost, gained = paired(row, dense)
            parts.append(f"| {row_name(row)}, {row['selection'].replace('_', ' ')} | {row['sparsity']:g}x | {lost} | {gained} | {signed([difference])} | "
                         f"{number(row['kl'], 4)} | {number(row['kl_answers'], 4)} |\n")
        full, bare = filled_draws(report), filled_draws(report, False)
        if len(full) > 1:
            kls = [statistics.mean(row["kl"] for row in draws_of(report, filled)) for filled in (False, True)]
            parts.append(f"\nOver {len(full)} draws of 128 planes, a set per query head at 50x, the difference is {signed([statistics.mean(full)])} in the mean, from {signed([min(full)])} to "
                         f"{signed([max(full)])}; it is {signed([statistics.mean(bare)])}, from {signed([min(bare)])} to {signed([max(bare)])}, where nothing is filled. The KL falls from "
                         f"{number(kls[0], 4)} to {number(kls[1], 4)}.\n")
    parts.append("\nA token that is left out changes the output by its attention times what its value is off the output, and of many such changes the common part adds up: "
                 "the output is off in the direction of the mean. Choosing other tokens cannot mend that; counting the mean does. It is for sets per query head. One set per KV head "
                 "leaves out tokens that are the best of single heads, and for their value the mean is no stand-in: filled, such rows answer as many questions or more, but their KL over all "
                 "positions is higher, on n8192.d100 by far, with 128 planes more than with 256.\n")
    return "".join(parts)
