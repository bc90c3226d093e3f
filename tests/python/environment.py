#!/usr/bin/env python3
"""Makes a virtual environment with the package kvtier, installed from the tree by pip; or adds to
it kvtier-engine, linked with an installed kvtier.

    environment.py FOLDER PACKAGE
    environment.py FOLDER PACKAGE INSTALLED BUILD

Exits with 77 where there is no network, and pip finds nothing of what it needs in its cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SKIPPED = 77
NEEDED = [
    "gguf==0.19.*",
    "ml_dtypes",
    "mypy==1.*",
    "pymemcache==4.*",
    "redis==5.*",
    "safetensors==0.8.*",
]
# What pip says when it cannot reach an index.
NO_NETWORK = ("Failed to establish a new connection", "Temporary failure in name resolution")
UNREACHED = ("Network is unreachable", "Max retries exceeded", "Retrying (Retry", "timed out")


def install(folder: Path, package: Path, *arguments: str) -> int:
    """Has pip install a copy of `package`: building leaves files behind."""
    copy = folder / "source" / package.name
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns("build", "*.egg-info")
    shutil.copytree(package, copy, ignore=ignored)
    command = [folder / "bin" / "python", "-m", "pip", "install", "--retries", "1"]
    command += ["--timeout", "30", copy, *arguments]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if pip.returncode == 0:
        return 0
    print(pip.stdout)
    if any(sign in pip.stdout for sign in (*NO_NETWORK, *UNREACHED)):
        print("no network: pip cannot fetch what the package needs, so the Python tests are skipped")
        return SKIPPED
    return 1


def main() -> int:
    folder, package, *installed = (Path(argument) for argument in sys.argv[1:])
    ready = folder / "ready"
    if installed:
        if not ready.exists():
            print(f"no environment in {folder}: skipped")
            return SKIPPED
        prefix, build = installed
        options = ("cmake.define.KVTIER_ENGINE_INSTALLED=ON", f"cmake.define.kvtier_ROOT={prefix}")
        settings = [f"-C{option}" for option in (*options, f"build-dir={build}")]
        return install(folder, package, *settings)
    ready.unlink(missing_ok=True)
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    code = install(folder, package, *NEEDED)
    if code == 0:
        ready.touch()
    return code


if __name__ == "__main__":
    sys.exit(main())
