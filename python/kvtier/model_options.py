"""Options of the programs that load a model of Hugging Face transformers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, `--dtype` and `--device`."""
    parser.add_argument("--model", type=Path, required=True, help="a folder that transformers reads")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="of the weights (default auto: the model's)",
    )
    parser.add_argument("--device", help="of the model (default: cuda where there is a GPU, else cpu)")


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the model of these options and its tokenizer, and sets the device where none is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    return model.to(options.device).eval(), tokenizer
