"""Options and files of the programs that load a model of Hugging Face transformers, or tune one."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

from kvtier.errors import invalid


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


def check_folder(parser: argparse.ArgumentParser, name: str, path: Path) -> None:
    """Ends the program where the folder of a file to write is not there."""
    if not path.parent.is_dir():
        parser.error(f"{name}: expected a file in a folder that is there, found {path}")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path to write to. What is written there takes the place of `path` at the end, and goes
    after an error. A device or a pipe is written to itself."""
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def interruptible(main: Callable[..., int]) -> Callable[..., int]:
    """Has a program end with 130 and no traceback where control-C interrupts it."""

    @functools.wraps(main)
    def run(arguments: Optional[Sequence[str]] = None) -> int:
        try:
            return main(arguments)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 130

    return run


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the model of these options and its tokenizer, and sets the device where none is.
    `InvalidArgumentError` for a device that torch cannot use, and a folder that transformers cannot read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=options.device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise invalid(
            f"--device: expected one that torch can use, found {options.device}: {reason}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise invalid(
            f"--model: expected a model and a tokenizer that transformers reads, found {options.model}: {reason}"
        ) from error
    return model.to(options.device).eval(), tokenizer
