"""Chooses how many tokens to select, by how many bits and which rule, from a recorded trace.

    python -m kvtier.tune --trace FILE [--error X] [--plot FILE]

Runs `kvtier replay` over a grid of settings and prints the cheapest whose output error, relative to
dense attention and averaged over steps, heads and layers, is at most X: the fewest tokens first, then
the fewest bits. Settings have a fixed k, or an error target, of which the tokens that it took in the
mean count. The program `kvtier` is looked for in PATH, or named by --kvtier. A plot needs
matplotlib."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence

from kvtier.model_options import check_folder, interruptible, whole_file

_SIZES = "32,64,128,256,512,1024,2048"
_RULES = "top_k,priority"
_CODES = "sign,scalar"
_TARGETS = "0.02,0.03,0.045"

#: The exit code where no setting reaches the error.
_NO_SETTING = 3


class Setting(NamedTuple):
    """Settings of a norm-aware selection and what they gave on the trace."""

    #: Tokens selected; with an error target the mean, of each KV head.
    k: float
    bits: int
    code: str
    rule: str
    #: ||y - o|| / ||o|| of the attention output.
    error: float
    #: Of the layer with the largest error.
    worst_layer: str
    worst_error: float
    #: Share of the attention that fell on the tokens attended to.
    mass: float
    #: In place of a fixed k; 0: none.
    error_target: float = 0.0

    @property
    def size(self) -> str:
        return f"e={self.error_target:g}" if self.error_target else f"k={int(self.k)}"

    def __str__(self) -> str:
        return f"{self.size}, {self.bits} bits, {self.code}, {self.rule}"


def settings_of(report: dict[str, Any]) -> list[Setting]:
    """Returns the settings of a report of `kvtier replay --json`, the exact selector left out."""
    settings = []
    for row in report["rows"]:
        if row["estimator"] == "exact":
            continue
        worst = max(row["layers"].items(), key=lambda item: float(item[1]["output_error"]))
        mean = row["mean"]
        k = row["k"] or mean["selected_rows_per_kv_head"]
        settings.append(
            Setting(
                *(k, row["bits"], row["code"], row["rule"], mean["output_error"]),
                *(worst[0], worst[1]["output_error"], mean["attention_mass"]),
                0.0 if row["k"] else row["error_target"],
            )
        )
    return settings


def choose(settings: Sequence[Setting], error: float) -> Optional[Setting]:
    """Returns the setting with the fewest tokens whose error is at most `error`, of these that with
    the fewest bits and then the smallest error; None where none is."""
    fitting = [setting for setting in settings if setting.error <= error]
    return min(fitting, key=lambda each: (each.k, each.bits, each.error), default=None)


def replay(program: str, trace: Path, options: argparse.Namespace) -> list[Setting]:
    """Runs `kvtier replay`; raises `CalledProcessError` where it fails, and `OSError`, `ValueError`
    or `KeyError` where it cannot be run or writes no report of a replay."""
    settings = []
    with tempfile.TemporaryDirectory(prefix="kvtier-tune-") as folder:
        report = Path(folder) / "report.json"
        sizes = [["--rule", options.rules, "--k", options.k]]
        targets = ",".join(filter(None, options.error_targets.split(",")))
        if "priority" in options.rules.split(",") and targets:
            sizes.append(["--rule", "priority", "--k", "0", "--error-target", targets])
        for size in sizes:
            command = [program, "replay", str(trace), "--estimator", "norm_aware"]
            command += ["--code", options.codes, *size, "--steps", str(options.steps)]
            command += ["--json", str(report)]
            if options.bits:
                command += ["--bits", options.bits]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            settings += settings_of(json.loads(report.read_text()))
    return settings


def plot(settings: Sequence[Setting], error: float, path: Path) -> None:
    """Writes error over tokens, a line for each code, number of bits and rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    codes = sorted({(each.code, each.bits) for each in settings})
    rules = sorted({each.rule for each in settings})
    for color, (code, bits) in enumerate(codes):
        for style, rule in zip(("o-", "s--"), rules):
            own = sorted(
                each
                for each in settings
                if each[1:4] == (bits, code, rule) and not each.error_target
            )
            found = [each.k for each in own], [each.error for each in own]
            size = max(9 - 1.5 * color, 4)  # so that equal lines are all seen
            label = f"{code}, {bits} bits, {rule}"
            axes.plot(*found, style, color=f"C{color}", markersize=size, label=label)
    targets = [each for each in settings if each.error_target]
    if targets:
        found = [each.k for each in targets], [each.error for each in targets]
        axes.plot(*found, "x", color="black", label="error targets, in the mean")
    axes.axhline(error, color="black", linestyle=":", linewidth=1.5, label=f"wanted: {error:g}")
    best = choose(settings, error)
    if best is not None:
        place = dict(marker="o", markersize=14, fillstyle="none", color="black", linestyle="none")
        axes.plot(best.k, best.error, label="chosen", **place)
    sizes = sorted({each.k for each in settings if not each.error_target})
    axes.set(xscale="log", yscale="log", xlabel="selected tokens", ylabel="relative output error")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with whole_file(path) as part:
        figure.savefig(part, bbox_inches="tight", format=path.suffix[1:] or "png")
    pyplot.close(figure)


def check_plot(path: Path) -> None:
    """Ends the program where a plot cannot be drawn or written."""
    check_folder(parser(), "--plot", path)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        parser().error("--plot: expected the package matplotlib, found none")
    formats = FigureCanvasBase.filetypes
    if path.suffix and path.suffix[1:].lower() not in formats:
        parser().error(f"--plot: expected one of {', '.join(sorted(formats))}, found {path}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m kvtier.tune", description="Choose k, bits and rule for a wanted output error"
    )
    result.add_argument("--trace", type=Path, required=True, help="of python -m kvtier.record")
    result.add_argument("--error", type=float, default=0.05, help="most output error (default 0.05)")
    result.add_argument("--k", default=_SIZES, help=f"tokens to try (default {_SIZES})")
    result.add_argument("--bits", help="bits of a key to try (default: 256)")
    result.add_argument("--codes", default=_CODES, help=f"codes to try (default {_CODES})")
    result.add_argument("--rules", default=_RULES, help=f"rules to try (default {_RULES})")
    result.add_argument(
        "--error-targets",
        default=_TARGETS,
        help=f"error targets to try with the rule priority, in place of k (default {_TARGETS})",
    )
    result.add_argument("--steps", type=int, default=16, help="steps to replay (default 16; 0: all)")
    result.add_argument("--plot", type=Path, help="file to write, such as error.svg")
    result.add_argument("--kvtier", help="the program kvtier (default: from PATH)")
    return result


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@interruptible
def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parser().parse_args(arguments)
    if not options.error > 0.0:
        parser().error(f"--error: expected above 0, found {options.error:g}")
    if not options.trace.is_file():
        parser().error(f"--trace: expected a file, found {options.trace}")
    if any(size.strip() in ("", "0") for size in options.k.split(",")):
        parser().error(f"--k: expected numbers of at least 1, found {options.k}")
    for option, known in (("codes", _CODES), ("rules", _RULES)):
        for name in getattr(options, option).split(","):
            if name not in known.split(","):
                parser().error(f"--{option}: expected some of {known}, found {name}")
    for target in filter(None, options.error_targets.split(",")):
        if not 0.0 < _number(target) < 1.0:
            parser().error(
                f"--error-targets: expected numbers above 0 and below 1, found {target}"
            )
    if options.plot is not None:
        check_plot(options.plot)
    program = shutil.which(options.kvtier or "kvtier")
    if program is None:
        parser().error(
            f"--kvtier: expected the program kvtier, found {options.kvtier or 'none in PATH'}"
        )
    try:
        settings = replay(program, options.trace, options)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)  # kvtier replay has said why
    except (OSError, ValueError, KeyError) as error:
        parser().error(f"--kvtier: expected the program kvtier, found {program}: {error}")
    settings.sort(key=lambda each: (each.k, each.bits, each.error))
    print("size      tokens  bits  code    rule      error   worst layer     mass")
    for each in settings:
        print(
            f"{each.size:8}  {each.k:6.0f}  {each.bits:4}  {each.code:6}  {each.rule:8}  "
            f"{each.error:.4f}  {each.worst_error:.4f} ({each.worst_layer:>3})  {each.mass:.3f}"
        )
    if options.plot is not None:
        plot(settings, options.error, options.plot)
    best = choose(settings, options.error)
    if best is None:
        least = min(settings, key=lambda each: each.error)
        print(f"no setting reaches an error of {options.error:g}; nearest: {least}, {least.error:.3g}")
        return _NO_SETTING
    print(f"for an error of at most {options.error:g}: {best} ({best.error:.3g})")
    size = f"error_target={best.error_target:g}" if best.error_target else f"top_k={int(best.k)}"
    print(
        "kvtier.RetrievalConfig(estimator=kvtier.Estimator.NORM_AWARE, "
        f"code=kvtier.SketchCode.{best.code.upper()}, rule=kvtier.SelectionRule."
        f"{best.rule.upper()}, num_planes={best.bits}, {size})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
