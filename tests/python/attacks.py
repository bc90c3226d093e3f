#!/usr/bin/env python3
"""Attacks on `kvtier serve`: hostile frames and calls, kills, corrupted tiers, floods.

    KVTIER_BINARY=... attacks.py [--small] [--json FILE] [CASE...]

Beside each, another tenant goes on, whose every answer is compared; an attack raises at the first wrong value, at the
end of the server, and at memory or descriptors that do not come back. Latencies are reported, never asserted.
`scripts/soak.sh hostile` runs it; ctest runs it with --small.
"""

from __future__ import annotations

import cases
from cases import Case
from hostile import call_attack, flood_attack, frame_attack, kill_attack, tier_attack
from server import BINARY

CASES: dict[str, Case] = {
    "frames": (frame_attack.run, 1_000_000, 2_000),
    "calls": (call_attack.run, 100_000, 400),
    "kills": (kill_attack.run, 60, 3),
    "tiers": (tier_attack.run, 300, 10),
    "descriptors": (flood_attack.run_descriptors, 100_000, 2_000),
    "headers": (flood_attack.run_headers, 48, 2),
    "replies": (flood_attack.run_replies, 1_200, 60),
    "together": (flood_attack.run_together, 32, 8),
}

if __name__ == "__main__":
    cases.main("Attacks on kvtier serve", "scripts/soak.sh hostile", CASES, {"KVTIER_BINARY": BINARY})
