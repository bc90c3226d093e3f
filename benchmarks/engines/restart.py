#!/usr/bin/env python3
"""Times the restart of a server that keeps the page cache's pages on a disk, and counts what is lost.

    restart.py --folder DIR [--mib N] [--page-kib N] [--json FILE]

Needs the Python package, as scripts/engines.sh installs it, and KVTIER_BINARY, the server. Stores pages with commits that
wait for the disk, ends the server by SIGKILL, starts another on the same folder, and measures from its start to the first
page that is read and compared. Then it reads every page that was acknowledged as durable.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import kvtier  # noqa: E402
from kvtier.model_options import whole_file  # noqa: E402
from server import Server  # noqa: E402

BATCH_BYTES = 32 << 20


def page_of(number: int, size: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument("--mib", type=int, default=4096, help="stored")
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--arena-mib", type=int, default=1024, help="of memory, for what is read")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    size = arguments.page_kib << 10
    count = (arguments.mib << 20) // size
    batch = max(BATCH_BYTES // size, 1)
    hashes = [number.to_bytes(32, "little") for number in range(count)]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        key = Path(folder) / "key"
        key.write_bytes(os.urandom(32))
        server = Server(
            "--page-arena-mib", str(arguments.arena_mib),
            "--page-folder", f"{folder}/pages", "--page-folder-mib", str(arguments.mib * 3 // 2 + 512),
            "--page-key-file", str(key), "--page-wait-for-disk",
        )
        try:
            durable: list[int] = []
            stored_s = 0.0
            with kvtier.Client(server.address, timeout=120) as client:
                with client.open_pages("restart", size) as pages:
                    for first in range(0, count, batch):
                        numbers = range(first, min(first + batch, count))
                        puts = [kvtier.PagePut(hashes[n], 0, page_of(n, size)) for n in numbers]
                        begun = time.perf_counter()
                        outcomes = pages.put(puts)
                        stored_s += time.perf_counter() - begun
                        durable.extend(
                            n for n, outcome in zip(numbers, outcomes)
                            if isinstance(outcome, kvtier.FoundPage) and outcome.durable
                        )
            server.kill()

            begun = time.perf_counter()
            server.start()
            listening_s = time.perf_counter() - begun
            with kvtier.Client(server.address, timeout=120) as client:
                with client.open_pages("restart", size) as pages:
                    lease_s = time.perf_counter() - begun
                    found = pages.lookup(hashes[:1], [0])
                    (first_page,) = pages.get([found[0].handle])
                    first_hit_s = time.perf_counter() - begun
                    np.testing.assert_array_equal(first_page, page_of(0, size))
                    begun = time.perf_counter()
                    there = pages.contains(hashes, [0])
                    contains_s = time.perf_counter() - begun
                    lost = 0
                    reading_s = 0.0
                    for first in range(0, len(durable), batch):
                        numbers = durable[first : first + batch]
                        begun = time.perf_counter()
                        each = pages.find([hashes[n] for n in numbers], [0])
                        handles = [one[0].handle for one in each if one is not None]
                        read = iter(pages.get(handles))
                        reading_s += time.perf_counter() - begun
                        for number, one in zip(numbers, each):
                            outcome = next(read) if one is not None else None
                            if isinstance(outcome, np.ndarray):
                                np.testing.assert_array_equal(outcome, page_of(number, size))
                            else:
                                lost += 1
        finally:
            server.close()
    figures = {
        "stored_mib": arguments.mib, "page_bytes": size, "pages": count,
        "durable_pages": len(durable), "durable_pages_lost": lost,
        "found_by_contains": sum(there),
        "put_gb_per_s": round(count * size / stored_s / 1e9, 3),
        "listening_s": round(listening_s, 3), "lease_s": round(lease_s, 3),
        "first_hit_s": round(first_hit_s, 3),
        "contains_all_s": round(contains_s, 3),
        "read_back_gb_per_s": round(len(durable) * size / reading_s / 1e9, 3),
        "cores": os.cpu_count(), "load_average": [round(load, 1) for load in os.getloadavg()],
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        with whole_file(arguments.json) as part:
            part.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
