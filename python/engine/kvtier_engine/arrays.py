"""Arrays of numpy, torch and whatever else has DLPack, as the native module takes them."""

from __future__ import annotations

import sys
from typing import Any, Optional

import numpy as np
from kvtier.errors import invalid

#: An array of numpy, torch, CuPy, JAX...: anything with DLPack or the buffer protocol.
Array = Any


def _is_torch(array: Array) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


#: Of `kvtier::DType`.
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
_torch_dtypes: dict[Any, int] = {}


def _check_stored(name: str, tensor: Array) -> None:
    """Refuses tensors of torch that are not what their memory says."""
    if tensor.requires_grad:
        raise invalid(f"{name}: expected a tensor without gradient, found one that requires it")
    if tensor.is_neg():
        raise invalid(f"{name}: expected a tensor without negative bit (resolve_neg), found one with it")


def torch_fields(name: str, tensor: Array, device: Any) -> tuple[int, int, Any, Any]:
    """Returns address, number of the dtype, shape and strides of a tensor of torch on `device`."""
    if not _torch_dtypes:
        torch = sys.modules["torch"]
        _torch_dtypes.update({getattr(torch, each): code for each, code in _DTYPES.items()})
    code = _torch_dtypes.get(tensor.dtype)
    if code is None:
        raise invalid(f"{name}: expected float32, float16 or bfloat16, found {tensor.dtype}")
    _check_stored(name, tensor)
    if tensor.device != device or not (tensor.is_cuda or tensor.is_cpu):
        raise invalid(
            f"{name}: expected a tensor on the CPU or a CUDA device, that of the query, found one "
            f"on {tensor.device}"
        )
    return tensor.data_ptr(), code, tensor.shape, tensor.stride()


def native(name: str, array: Optional[Array]) -> Optional[Array]:
    """Returns what the native module takes for `array`: bfloat16 of ml_dtypes as its bits, since
    numpy exports no other type than its own."""
    if isinstance(array, np.ndarray):
        if not array.dtype.isnative:
            raise invalid(f"{name}: expected the byte order of this machine, found {array.dtype.str}")
        return array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    if array is not None and _is_torch(array):
        _check_stored(name, array)
        if array.device.type not in ("cpu", "cuda"):
            raise invalid(
                f"{name}: expected a tensor on the CPU or a CUDA device, found one on {array.device}"
            )
    return array


def like(name: str, query: Array, shape: tuple[int, ...], dtype: Optional[str] = None) -> Array:
    """Returns an empty array of the query's library and device. `dtype` None: that of the query."""
    if _is_torch(query):
        torch = sys.modules["torch"]
        return query.new_empty(shape, dtype=None if dtype is None else getattr(torch, dtype))
    if isinstance(query, np.ndarray):
        return np.empty(shape, query.dtype if dtype is None else dtype)
    raise invalid(
        f"{name}: expected an array to write, since the query is neither of numpy nor of torch, "
        "found None"
    )


def shape_of(name: str, array: Array) -> tuple[int, ...]:
    """Returns the shape of a query, [tokens, query_heads, head_dim]."""
    shape = tuple(getattr(array, "shape", ()))
    if len(shape) != 3:
        found = f"shape {list(shape)}" if hasattr(array, "shape") else type(array).__name__
        raise invalid(f"{name}: expected [tokens, query_heads, head_dim], found {found}")
    return shape
