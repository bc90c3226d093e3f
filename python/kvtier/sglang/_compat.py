"""The releases of SGLang that the storage backend has been tested with."""

from __future__ import annotations

import sglang

#: By major and minor release, and the first of its patches.
TESTED = ((0, 5), 23)


def check_version(version: str) -> None:
    """Raises ImportError for an SGLang that has not been tested."""
    series, patch = TESTED
    parts = version.replace("+", ".").split(".")
    try:
        known = (int(parts[0]), int(parts[1])) == series and int(parts[2]) >= patch
    except (IndexError, ValueError):
        known = False
    if not known:
        raise ImportError(
            f"kvtier: expected SGLang {series[0]}.{series[1]}.{patch} or a later {series[0]}."
            f"{series[1]}, found {version}; its interface of storage changes between releases"
        )


check_version(sglang.__version__)
