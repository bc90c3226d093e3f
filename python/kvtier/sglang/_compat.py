"""The releases of SGLang that the storage backend has been tested with."""

from __future__ import annotations

import sglang
from sglang.srt.runtime_context import get_model, get_spec

from kvtier.releases import check_release


def check_version(version: str) -> None:
    """Raises ImportError for a release of SGLang that has not been tested."""
    check_release("SGLang", version, (0, 5), 23, "storage")


check_version(sglang.__version__)


def cache_dtypes() -> list[str]:
    """Returns SGLang's own names of the dtypes of keys and values, those of the model and of a draft
    model: pools of all dtypes of 8 bits are uint8."""
    return [str(get_model().kv_cache_dtype), str(get_spec().speculative_draft_kv_cache_dtype)]
