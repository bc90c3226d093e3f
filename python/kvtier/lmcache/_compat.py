"""The releases of LMCache that the adapter has been tested with."""

from __future__ import annotations

import lmcache

from kvtier.releases import check_release


def check_version(version: str) -> None:
    """Raises ImportError for a release of LMCache that has not been tested."""
    check_release("LMCache", version, (0, 5), 6, "adapters")


check_version(lmcache.__version__)
