#!/usr/bin/env python3
"""Times what vLLM's scheduler waits for in the tier while the server stands still.

    paused.py [--steps N] [--keys N] [--json FILE]

Needs the environment of scripts/engines.sh with vLLM, and KVTIER_BINARY, the server. Each step asks for the keys of a new
request and ends, as the scheduler does; half of the keys are stored. The first steps find the server running, then it is
stopped (SIGSTOP), then it goes on (SIGCONT). Requests one after another have other keys, since vLLM remembers those of
requests that have not ended. A step is paced to 10 ms, so that the pause has calls that run into their deadline, trials of
the circuit breaker included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from kvtier.model_options import whole_file  # noqa: E402
from server import Server  # noqa: E402

PACE = 0.01
ROW_BYTES = 1 << 20
SETS = 3  # of keys, taken in turns


def quantiles(seconds: list[float]) -> dict[str, float]:
    milliseconds = 1e3 * np.asarray(seconds)
    return {
        name: round(float(np.quantile(milliseconds, q)), 3)
        for name, q in (("p50_ms", 0.5), ("p99_ms", 0.99), ("most_ms", 1.0))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="of each phase")
    parser.add_argument("--keys", type=int, default=64, help="of a request")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    import vllm_test
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    import kvtier.vllm

    kvtier.vllm.register()
    stored = arguments.keys // 2
    server = Server("--page-arena-mib", "256")
    memory = np.zeros((SETS * stored, ROW_BYTES), np.uint8)
    tier = SecondaryTierFactory.create_secondary_tier(
        {"type": "kvtier", "server": server.address}, memoryview(memory),
        vllm_test.make_spec("org/paused"),
    )
    keys = [
        [vllm_test.make_key(1000 * each + number) for number in range(arguments.keys)]
        for each in range(SETS)
    ]
    rows = list(range(SETS * stored))
    known = [key for each in keys for key in each[:stored]]
    tier.submit_store(vllm_test.make_job(0, known, rows, "store", False))
    tier.drain_jobs()
    results: dict[str, Any] = {}
    step = 0

    def run(phase: str) -> None:
        nonlocal step
        lookups: list[float] = []
        steps: list[float] = []
        answers: dict[str, int] = {}
        previous: Any = None
        for _ in range(arguments.steps):
            begun = time.perf_counter()
            step += 1
            context = ReqContext(req_id=f"request {step}")
            for asked, number in ((previous, step - 1), (context, step)):
                if asked is None:
                    continue
                for key in keys[number % SETS]:  # a request is asked for again in the next step
                    before = time.perf_counter()
                    result = tier.lookup(key, asked)
                    lookups.append(time.perf_counter() - before)
                    answers[result.name] = answers.get(result.name, 0) + 1
            before = time.perf_counter()
            tier.on_schedule_end(None)
            list(tier.get_finished_jobs())
            if previous is not None:
                tier.on_request_finished(previous)
            previous = context
            now = time.perf_counter()
            steps.append(now - before + sum(lookups[-2 * arguments.keys :]))
            time.sleep(max(PACE - (now - begun), 0))
        tier.on_request_finished(previous)
        results[phase] = {
            "lookup": quantiles(lookups), "step": quantiles(steps), "answers": answers
        }

    try:
        run("running")
        server.pause()
        run("paused")
        server.resume()
        run("resumed")
    finally:
        server.resume()
        tier.shutdown()
        server.close()
    assert "HIT" not in results["paused"]["answers"], "answered by a server that stands still"
    figures = {
        "steps": arguments.steps, "keys": arguments.keys, "cores": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()], **results,
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        with whole_file(arguments.json) as part:
            part.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
