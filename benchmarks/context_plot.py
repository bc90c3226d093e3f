#!/usr/bin/env python3
"""Draws tokens/s over the context length, and the GPU's memory beneath, of recorded runs.

    context_plot.py RUN.json ... --out docs/context.svg    of kvtier-llama bench and of hf/bench.py

A line for each kind of attention, type of rows in memory, and number of rows selected, of one sequence. Of several rows of a line
at one context, such as those with other row caches, the fastest counts. A line of dense attention ends where a run says that memory
does not suffice. Prints the same as a table.
"""

import argparse
import math
import pathlib
import sys

from figures import context, load, number, table
from whole_file import write_whole

COLORS = ("#444444", "#d1660a", "#1f6fb4", "#1b8a4b", "#8a4bb8", "#b83a5a", "#6b6b00", "#007a7a")
OF_TRANSFORMERS = {"offloaded": "transformers, OffloadedCache"}
GB = 1e9


def name_of(row):
    """The line that a row of `kvtier-llama bench` belongs to."""
    if row["attention"] == "cudnn":
        return "dense, KV on the GPU"
    chosen = f"k {row['k']}" if "k" in row else f"{row['sparsity']:g}x"
    place = "GPU" if row["placement"] == "device" else "host"
    return f"kvtier, {row['kv_dtype']} on the {place}, {chosen}"


def read(path):
    """Yields (line, tokens, tokens/s, bytes of the GPU) of a run; without rates where memory does not suffice."""
    for row in load(path)["rows"]:
        if "cache" in row:
            name = OF_TRANSFORMERS.get(row["cache"])
            if name and "tokens_per_s" in row:
                yield name, row["tokens"], row["tokens_per_s"], row["device_bytes"]
        elif row["what"] == "model" and row["batch"] == 1 and row["attention"] != "none":
            if "error" not in row:
                yield name_of(row), row["tokens"], row["tokens_per_second"], row["gpu_bytes"]
            elif row["attention"] == "dense":
                yield "dense, KV on the GPU", row["tokens"], None, None


def lines_of(paths):
    """Returns {line: {tokens: (tokens/s, bytes)}}, and {line: the first context that does not fit}."""
    lines, ends = {}, {}
    for path in paths:
        for name, tokens, rate, used in read(path):
            if rate is None:
                ends[name] = min(tokens, ends.get(name, tokens))
                continue
            known = lines.setdefault(name, {}).get(tokens)
            if known is None or rate > known[0]:
                lines[name][tokens] = (rate, used)
    if not lines:
        sys.exit("context_plot.py: expected rows of kvtier-llama bench with one sequence, found none")
    return lines, ends


class Panel:
    """One of the plots: a logarithmic axis of contexts, and one of values between top and bottom."""

    def __init__(self, lengths, values, top, bottom, title, logarithmic):
        self.lengths, self.top, self.bottom, self.title = lengths, top, bottom, title
        self.left, self.right = 64, 736
        self.logarithmic = logarithmic
        self.low = min(values) / 1.25 if logarithmic else 0.0
        self.high = max(values) * (1.25 if logarithmic else 1.1)

    def x(self, tokens):
        span = math.log(self.lengths[-1] / self.lengths[0]) or 1.0
        return self.left + (self.right - self.left) * math.log(tokens / self.lengths[0]) / span

    def y(self, value):
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = value / self.high
        return self.bottom - (self.bottom - self.top) * share

    def ticks(self):
        if self.logarithmic:
            return [m * 10**e for e in range(5) for m in (1, 2, 5) if self.low <= m * 10**e <= self.high]
        step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200) if self.high / s <= 8)
        return range(0, int(self.high) + 1, step)

    def frame(self):
        for tokens in self.lengths:
            x = self.x(tokens)
            yield f'<path d="M{x:.1f} {self.top}V{self.bottom}" stroke="#e4e4e4"/>'
            yield f'<text x="{x:.1f}" y="{self.bottom + 18}" text-anchor="middle">{label(tokens)}</text>'
        for tick in self.ticks():
            yield f'<path d="M{self.left} {self.y(tick):.1f}H{self.right}" stroke="#e4e4e4"/>'
            yield f'<text x="{self.left - 8}" y="{self.y(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
        middle = (self.top + self.bottom) / 2
        yield f'<text transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle">{self.title}</text>'

    def line(self, points, color):
        path = "L".join(f"{self.x(n):.1f} {self.y(value):.1f}" for n, value in points)
        yield f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        for n, value in points:
            yield f'<circle cx="{self.x(n):.1f}" cy="{self.y(value):.1f}" r="3" fill="{color}"/>'

    def end(self, points, tokens, color):
        """Where the line's memory ends: a short line towards the first context that does not fit."""
        n, value = points[-1]
        to = self.x(n) + 0.4 * (self.x(tokens) - self.x(n))
        y = self.y(value)
        yield f'<path d="M{self.x(n):.1f} {y:.1f}H{to:.1f}" stroke="{color}" stroke-width="2" stroke-dasharray="3 3"/>'
        yield f'<path d="M{to - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{color}" stroke-width="2"/>'


def label(tokens):
    return context(tokens) if tokens % 1024 == 0 else f"{tokens / 1000:g}k"


def plot(lines, ends):
    lengths = sorted({n for points in lines.values() for n in points})
    width, legend = 760, 20 * len(lines) + 16
    height = legend + 560
    every = [point for points in lines.values() for point in points.values()]
    panels = (Panel(lengths, [rate for rate, _ in every], legend + 16, legend + 286, "tokens/s", True),
              Panel(lengths, [used / GB for _, used in every], legend + 330, legend + 510, "GPU memory, GB", False))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222222">',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for panel in panels:
        out += panel.frame()
    for row, (name, points) in enumerate(lines.items()):
        color = COLORS[row % len(COLORS)]
        for i, panel in enumerate(panels):
            line = [(n, point[i] / (GB if i else 1)) for n, point in sorted(points.items())]
            out += panel.line(line, color)
            if name in ends and ends[name] > line[-1][0]:
                out += panel.end(line, ends[name], color)
        at = 20 + 20 * row
        out.append(f'<path d="M78 {at - 4}h28" stroke="{color}" stroke-width="2"/>')
        out.append(f'<text x="114" y="{at}">{name}</text>')
    out.append(f'<text x="400" y="{height - 10}" text-anchor="middle">context, tokens</text>')
    return "\n".join(out + ["</svg>", ""])


def as_table(lines, ends):
    lengths = sorted({n for points in lines.values() for n in points} | set(ends.values()))

    def cell(name, n):
        if n in lines[name]:
            rate, used = lines[name][n]
            return f"{number(rate)} ({number(used / GB)} GB)"
        return "does not fit" if n >= ends.get(name, math.inf) else ""

    return table(["tokens/s (GPU memory)", *map(label, lengths)],
                 [[name, *(cell(name, n) for n in lengths)] for name in lines])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="JSON files")
    parser.add_argument("--out", type=pathlib.Path, help="SVG file (default: the table alone)")
    options = parser.parse_args()
    lines, ends = lines_of(options.runs)
    print(as_table(lines, ends))
    if options.out:
        write_whole(options.out, plot(lines, ends))


if __name__ == "__main__":
    main()
