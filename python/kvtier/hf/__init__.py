"""kvtier for Hugging Face transformers: a cache that keeps keys and values in an engine of this
process, and the attention over them.

    import kvtier.hf

    model.set_attn_implementation("kvtier")
    model.generate(ids, past_key_values=kvtier.hf.KvtierCache(model.config))

The import registers the attention function and its mask under the name "kvtier". Needs torch,
transformers 4.57 or later and kvtier-engine."""

from kvtier.errors import without_package

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    command = "pip install './python[hf]' ./python/engine"
    raise ImportError(f"kvtier.hf: {without_package(error, command)}") from error

from kvtier.hf.attention import IMPLEMENTATION, register
from kvtier.hf.cache import KvtierCache
from kvtier.hf.graphs import graphed
from kvtier.hf.shape import default_retrieval

__all__ = ["IMPLEMENTATION", "KvtierCache", "default_retrieval", "graphed", "register"]

register()
