"""Arrays to messages and back."""

from __future__ import annotations

import math
from typing import Any, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.errors import invalid
from kvtier.v1 import tensor_pb2

Array = NDArray[Any]

_TYPES: dict[str, int] = {
    "float32": tensor_pb2.DATA_TYPE_FLOAT32,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb2.DATA_TYPE_BFLOAT16,
    "uint16": tensor_pb2.DATA_TYPE_BFLOAT16,
    "int32": tensor_pb2.DATA_TYPE_INT32,
}


#: Of keys, values and queries; uint16 is the bits of bfloat16.
FLOATS = ("float32", "float16", "bfloat16", "uint16")


def check(name: str, array: ArrayLike, dtypes: Sequence[str]) -> Array:
    """Returns a dense array of one of `dtypes` that a message can carry, `array` itself where it is
    one."""
    try:
        found = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as failure:  # as torch does for bfloat16, and on a GPU
        raise invalid(
            f"{name}: expected what numpy takes (of a bfloat16 tensor of torch its bits: "
            f"tensor.cpu().view(torch.uint16).numpy()), found {type(array).__name__}: {failure}"
        ) from None
    if not found.dtype.isnative or found.dtype.name not in dtypes:
        floats = "float32, float16 or bfloat16 (or its bits as uint16)"
        expected = floats if dtypes == FLOATS else " or ".join(dtypes)
        raise invalid(f"{name}: expected {expected}, found {found.dtype}")
    if not 1 <= found.ndim <= 4:
        raise invalid(f"{name}: expected 1 to 4 dimensions, found shape {list(found.shape)}")
    return np.ascontiguousarray(found)


def describe(message: tensor_pb2.Tensor, array: Array) -> None:
    """Gives a message the dtype and the shape of a checked array."""
    message.dtype = _TYPES[array.dtype.name]  # type: ignore[assignment]
    message.shape.extend(array.shape)


def fill(message: tensor_pb2.Tensor, array: Array) -> None:
    """Writes a checked array into a message."""
    describe(message, array)
    message.data = array.tobytes()


def take(message: tensor_pb2.Tensor, name: str, dtype: np.dtype[Any]) -> Array:
    """Returns the array of a reply, read-only, as `dtype`."""
    shape = tuple(message.shape)
    if message.dtype != _TYPES[dtype.name] or len(message.data) != math.prod(shape) * dtype.itemsize:
        raise invalid(
            f"{name}: expected {dtype.name} in the reply, found "
            f"{tensor_pb2.DataType.Name(message.dtype)} {list(shape)} of {len(message.data)} bytes"
        )
    return np.frombuffer(message.data, dtype).reshape(shape)
