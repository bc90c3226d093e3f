"""kvtier as operators of PyTorch, for models that are compiled or captured in CUDA graphs, and for
sequences that several ranks of `torch.distributed` hold together.

`Session` calls the operators `torch.ops.kvtier.{append,decode,attend,select}`; `TokenParallel` and
`HeadParallel` are one sequence on all ranks of a process group. Needs torch and kvtier-engine."""

from kvtier.errors import without_package

try:
    import torch  # noqa: F401
except ImportError as error:
    command = "pip install './python[torch]' ./python/engine"
    raise ImportError(f"kvtier.torch: {without_package(error, command)}") from error

from kvtier.torch.ops import Session
from kvtier.torch.parallel import HeadParallel, TokenParallel

__all__ = ["HeadParallel", "Session", "TokenParallel"]
