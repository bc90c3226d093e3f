"""The command line of long runs: cases by name, small or full, and their figures as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Callable, Mapping

Figures = dict[str, Any]
#: What a case runs, given its size; its full size, and its small one.
Case = tuple[Callable[[int], Figures], int, int]


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main(
    description: str, command: str, cases: Mapping[str, Case], programs: Mapping[str, str]
) -> None:
    """Runs the cases that the arguments of the program name. `programs`: paths of programs by the
    variables of the environment that give them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    parser.add_argument("--small", action="store_true", help="as many as fit a test suite")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    unknown = [case for case in arguments.cases if case not in cases]
    if unknown:
        parser.error(f"CASE: expected {', '.join(cases)}, found {unknown[0]}")
    for variable, program in programs.items():
        if not Path(program).is_file():
            parser.error(f"{variable}: expected a program of the build, found {program!r}")
    report: Figures = {
        "command": " ".join([command, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{processor()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{platform.system()} {platform.release()}",
        "load_at_start": round(os.getloadavg()[0], 1),
        "cases": {},
    }
    for name in arguments.cases or cases:
        case, full, small = cases[name]
        load, start = os.getloadavg()[0], time.monotonic()
        figures = case(small if arguments.small else full)
        figures["seconds"] = round(time.monotonic() - start, 1)
        figures["load"] = [round(load, 1), round(os.getloadavg()[0], 1)]
        report["cases"][name] = figures
        print(name, json.dumps(figures), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")
