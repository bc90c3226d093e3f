"""The releases of SGLang that the storage backend has been tested with."""

from __future__ import annotations

import sglang

from kvtier.releases import check_release


def check_version(version: str) -> None:
    """Raises ImportError for a release of SGLang that has not been tested."""
    check_release("SGLang", version, (0, 5), 23, "storage")


check_version(sglang.__version__)
