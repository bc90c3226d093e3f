"""What the contract tests of the connectors share."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from typing import Any, Callable

import numpy as np
from server import PATIENCE

SKIPPED = 77

#: Timeouts that a busy machine does not reach, for cases that are not about them.
PATIENT = {"timeout": PATIENCE, "lookup_timeout": PATIENCE}

#: Timeouts for cases that wait for them.
IMPATIENT = {"timeout": 1.0, "lookup_timeout": 1.0}

#: A size that takes several pages of the server, and is no multiple of anything.
LARGE = (9 << 20) + 123


def need(*modules: str) -> None:
    """Ends the program, as skipped, where a module is not installed. Quietens the connector."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as failure:
            print(f"{failure}: skipped; scripts/engines.sh installs it and runs this test")
            sys.exit(SKIPPED)
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)


def poll(take: Callable[[], Any]) -> Any:
    """Returns the first result of `take` that is not None or empty."""
    end = time.monotonic() + PATIENCE
    while not (found := take()):
        if time.monotonic() > end:
            raise AssertionError("waited in vain")
        time.sleep(0.002)
    return found


def content(seed: int, size: int) -> Any:
    """Returns bytes of KV, uint8 [size]."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)
