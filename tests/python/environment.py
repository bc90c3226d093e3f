#!/usr/bin/env python3
"""Makes a virtual environment with the package kvtier, installed from the tree by pip.

    environment.py FOLDER PACKAGE

Exits with 77 where there is no network, and pip finds nothing of what it needs in its cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SKIPPED = 77
NEEDED = ["gguf==0.19.*", "ml_dtypes", "mypy==1.*", "safetensors==0.8.*"]
# What pip says when it cannot reach an index.
NO_NETWORK = ("Failed to establish a new connection", "Temporary failure in name resolution")
UNREACHED = ("Network is unreachable", "Max retries exceeded", "Retrying (Retry", "timed out")


def main() -> int:
    folder, package = (Path(argument) for argument in sys.argv[1:])
    python = folder / "bin" / "python"
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # A copy: building leaves files behind.
    copy = folder / "source"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = [python, "-m", "pip", "install", "--retries", "1", "--timeout", "30", copy, *NEEDED]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if pip.returncode == 0:
        ready.touch()
        return 0
    print(pip.stdout)
    if any(sign in pip.stdout for sign in (*NO_NETWORK, *UNREACHED)):
        print("no network: pip cannot fetch what the package needs, so the Python tests are skipped")
        return SKIPPED
    return 1


if __name__ == "__main__":
    sys.exit(main())
