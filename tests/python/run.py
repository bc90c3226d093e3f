#!/usr/bin/env python3
"""Runs a command with the Python of an environment that environment.py made.

    run.py FOLDER ARGUMENT...

Exits with 77 when there is no such environment, as without a network.
"""

import os
import sys
from pathlib import Path

SKIPPED = 77

folder = Path(sys.argv[1])
if not (folder / "ready").exists():
    print(f"no environment in {folder}: skipped")
    sys.exit(SKIPPED)
python = folder / "bin" / "python"
os.execv(python, [str(python), *sys.argv[2:]])
