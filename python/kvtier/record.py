"""Records what a model of Hugging Face transformers attends to: a trace for `kvtier replay` and
`python -m kvtier.tune`.

    python -m kvtier.record --model DIR --text FILE --out TRACE [--tokens N] [--steps N]

One dense forward pass over the text. Of each recorded layer, the trace has the keys and values of
all tokens, and the queries and attention outputs of the last ones. Needs torch, transformers and
safetensors; no engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Sequence, Union

from kvtier.errors import InvalidArgumentError, invalid, without_package
from kvtier.model_options import (
    add_model_options,
    check_folder,
    interruptible,
    load_model,
    whole_file,
)

# What the extra `record` brings is imported where it is used: --help and the errors of options need
# none of it.
if TYPE_CHECKING:
    import torch

_NAME = "kvtier_record"
_DEFAULT_LAYERS = 8


def record(model: Any, ids: torch.Tensor, steps: int, layers: Sequence[int]) -> dict[str, Any]:
    """Returns the tensors of a trace by name, in bfloat16: `layers.N.k` and `.v` [kv_heads, tokens,
    head_dim], `.q` and `.o` [query_heads, steps, head_dim]. `ids`: [1, tokens]. `layers`: indices,
    which attend to all tokens. Queries are scaled such that attention divides their products by
    sqrt(head_dim). `InvalidArgumentError` for layers that no trace can describe."""
    import torch
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    from kvtier.hf.shape import layer_windows, text_config

    windows = layer_windows(text_config(model.config))
    if not 0 < steps <= ids.shape[1]:
        raise invalid(f"steps: expected 1 to {ids.shape[1]}, found {steps}")
    for layer in layers:
        if not 0 <= layer < len(windows):
            raise invalid(f"layers: expected 0 to {len(windows) - 1}, found {layer}")
        if windows[layer]:
            raise invalid(
                f"layers: expected layers that attend to all tokens, found {layer} with a window "
                f"of {windows[layer]}"
            )
    trace: dict[str, torch.Tensor] = {}

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        if kwargs.get("softcap"):
            raise invalid(f"softcap: expected none in a trace, found {kwargs['softcap']}")
        out, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        if module.layer_idx in layers:
            scaling, head_dim = kwargs.get("scaling"), query.shape[-1]
            factor = 1.0 if scaling is None else scaling * head_dim**0.5
            parts = {
                "k": key[0],
                "v": value[0],
                "q": query[0, :, -steps:] * factor,
                "o": out[0, -steps:].transpose(0, 1),
            }
            for name, part in parts.items():
                stored = part.to(torch.bfloat16).contiguous().cpu()
                trace[f"layers.{module.layer_idx}.{name}"] = stored
        return out, None

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        with torch.inference_mode():
            model(ids.to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return trace


def spread(windows: Sequence[int], count: int) -> list[int]:
    """Returns as many layers that attend to all tokens, spread over the model."""
    full = [layer for layer, window in enumerate(windows) if window == 0]
    if not full:
        raise invalid("model: expected a layer that attends to all tokens, found none")
    count = min(count, len(full))
    return [full[(2 * i + 1) * len(full) // (2 * count)] for i in range(count)]


def layer_list(text: str) -> Union[str, list[int]]:
    """Reads `--layers`."""
    try:
        return text if text == "all" else [int(layer) for layer in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected such as 0,5,9, or all, found {text}") from None


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m kvtier.record", description="Record a trace of a model on a text"
    )
    add_model_options(result)
    result.add_argument("--text", type=Path, required=True, help="a file of text, UTF-8")
    result.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    result.add_argument("--tokens", type=int, help="first tokens of the text (default: all)")
    result.add_argument("--steps", type=int, default=64, help="last tokens with queries (default 64)")
    result.add_argument(
        "--layers",
        type=layer_list,
        help=f"such as 0,5,9, or all (default: {_DEFAULT_LAYERS}, spread over the model)",
    )
    return result


@interruptible
def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parser().parse_args(arguments)
    if not (options.model / "config.json").is_file():
        parser().error(f"--model: expected a folder with config.json, found {options.model}")
    if not options.text.is_file():
        parser().error(f"--text: expected a file, found {options.text}")
    check_folder(parser(), "--out", options.out)
    try:
        text = options.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        parser().error(f"--text: expected UTF-8, found {options.text}: {error}")
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
        from safetensors.torch import save_file

        from kvtier.hf.shape import layer_windows, text_config
    except ImportError as error:
        command = "pip install './python[record]'"
        print(f"error: {without_package(error, command)}", file=sys.stderr)
        return 1
    try:
        model, tokenizer = load_model(options)
        ids = tokenizer(text, return_tensors="pt").input_ids
        tokens = ids.shape[1] if options.tokens is None else options.tokens
        if not 0 < tokens <= ids.shape[1]:
            raise invalid(f"tokens: expected 1 to {ids.shape[1]}, those of the text, found {tokens}")
        windows = layer_windows(text_config(model.config))
        if options.layers is None:
            layers = spread(windows, _DEFAULT_LAYERS)
        elif options.layers == "all":
            layers = spread(windows, len(windows))
        else:
            layers = options.layers
        trace = record(model, ids[:, :tokens], options.steps, layers)
    except InvalidArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with whole_file(options.out) as part:
        save_file(trace, part)
    size = options.out.stat().st_size / (1 << 20)
    print(f"{options.out}: layers {layers} of {tokens} tokens, {size:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
