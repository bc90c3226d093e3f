"""The attention function and the mask function that transformers calls by the name "kvtier"."""

from __future__ import annotations

from typing import Any, Optional

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from kvtier.errors import invalid
from kvtier.hf.layer import LAYER_OF_KEYS, CacheLength, KvtierLayer

#: For `attn_implementation` and `set_attn_implementation`.
IMPLEMENTATION = "kvtier"

_SAMPLES = 256  # positions of a long pass at which its mask is looked at

# Arguments of attention functions that change the result in a way that no engine computes.
_UNSUPPORTED = ("s_aux", "position_bias", "head_mask")


def register() -> None:
    """Makes `attn_implementation="kvtier"` known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, kvtier_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, kvtier_mask)


def kvtier_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the keys and values of a `KvtierCache`, `query` [batch, query_heads, tokens,
    head_dim]; over those that are given, as sdpa does it, in a pass without such a cache. Returns
    [batch, tokens, query_heads, head_dim]. Raises `InvalidArgumentError` for what the engine does
    not compute."""
    layer: Optional[KvtierLayer] = getattr(key, LAYER_OF_KEYS, None)
    if layer is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    try:
        _check_call(module, layer, attention_mask, dropout, kwargs)
        return layer.attend(module, query, scaling, kwargs.get("softcap") or None), None
    except BaseException:
        layer.undo()
        raise


def kvtier_mask(
    *,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Optional[torch.Tensor]:
    """Returns None for a pass with a `KvtierCache`, which takes its padding from `attention_mask`;
    the mask of sdpa for others. Raises `InvalidArgumentError` for a mask that is not causal."""
    if not isinstance(kv_length, CacheLength):
        return sdpa_mask(
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    # transformers 4 gives positions, 5 their number.
    positions = kwargs.get("cache_position")
    query_length = kwargs["q_length"] if positions is None else positions.shape[0]
    if query_length > 1 and mask_function is not causal_mask_function:
        _check_mask(mask_function, kwargs["batch_size"], query_length, kv_length)
    kv_length.cache.take_padding(attention_mask, query_length, int(kv_length))
    return None


def _check_mask(mask_function: Any, batch: int, query_length: int, kv_length: CacheLength) -> None:
    """Checks that a mask is causal, over all tokens or over the model's window."""
    past = int(kv_length) - query_length
    new = torch.linspace(past, kv_length - 1, min(query_length, _SAMPLES)).long()
    windows = {layer.window for layer in kv_length.cache.layers}
    edges = [new - max(window - shift, 0) for window in windows for shift in (0, 1)]
    seen = torch.cat([new, *edges, torch.linspace(0, kv_length - 1, _SAMPLES).long()])
    seen = seen.clamp(min=0).unique()
    q, k = new[None, None, :, None], seen[None, None, None, :]
    rows, head = torch.arange(batch)[:, None, None, None], torch.zeros(1, 1, 1, 1).long()
    found = mask_function(rows, head, q, k).expand(batch, 1, len(new), len(seen))
    for window in windows:
        expected = (k <= q) & (k > q - window) if window else k <= q
        if torch.equal(found, expected.expand_as(found)):
            return
    raise invalid(
        "attention mask: expected a causal one, over all tokens or the sliding window, with a "
        "KvtierCache, found another"
    )


def _check_call(
    module: torch.nn.Module,
    layer: KvtierLayer,
    attention_mask: Optional[torch.Tensor],
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    """Checks that the engine computes what is asked for."""
    if attention_mask is not None:
        raise invalid(
            "attention_mask: expected [batch, tokens] or none, found a mask of "
            f"shape {list(attention_mask.shape)}"
        )
    if dropout > 0.0:
        raise invalid(f"dropout: expected 0 with a KvtierCache, found {dropout}")
    # Of the configuration, which is slow to read, the first layer's answer is that of the pass.
    wanted = layer.is_first and getattr(module.config, "output_attentions", False)
    if wanted or kwargs.get("output_attentions"):
        raise invalid("output_attentions: expected False with a KvtierCache, found True")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise invalid("is_causal: expected True with a KvtierCache, found False")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise invalid(f"{name}: expected none with a KvtierCache, found one")
