"""What a test does that cannot import PyTorch or what it needs beside it."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

SKIPPED = 77  # as ctest reads it


def rerun_or_skip(error: ImportError) -> NoReturn:
    """Runs the script again with the Python that KVTIER_TORCH_PYTHON names, once; without one ends
    it as skipped."""
    python = os.environ.pop("KVTIER_TORCH_PYTHON", None)
    if python:
        os.execv(python, [python, *sys.argv])
    print(f"{error}: skipped")
    sys.exit(SKIPPED)
