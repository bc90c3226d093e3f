"""vLLM's prefix cache in `kvtier serve`: a secondary tier of its offloading (docs/engines/vllm.md).

Importing this needs no vLLM."""

from __future__ import annotations


def register() -> None:
    """Makes the tier known to vLLM as "kvtier". vLLM calls it, as the entry point of
    `vllm.general_plugins`, in each of its processes. Does nothing where this vLLM has no secondary
    tiers. A vLLM that has not been tested is refused where the tier is used."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        return
    try:
        SecondaryTierFactory.register_tier("kvtier", "kvtier.vllm.tier", "KvtierTier")
    except ValueError:
        pass  # registered before, in this process
