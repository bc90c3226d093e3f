"""The releases of LMCache that the adapter has been tested with."""

from __future__ import annotations

import lmcache

#: By major and minor release, and the first of its patches.
TESTED = ((0, 5), 6)


def check_version(version: str) -> None:
    """Raises ImportError for an LMCache that has not been tested."""
    series, patch = TESTED
    parts = version.replace("+", ".").split(".")
    try:
        known = (int(parts[0]), int(parts[1])) == series and int(parts[2]) >= patch
    except (IndexError, ValueError):
        known = False
    if not known:
        raise ImportError(
            f"kvtier: expected LMCache {series[0]}.{series[1]}.{patch} or a later {series[0]}."
            f"{series[1]}, found {version}; its interface of adapters changes between releases"
        )


check_version(lmcache.__version__)
