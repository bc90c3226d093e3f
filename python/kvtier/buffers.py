"""Memory of the caller as bytes."""

from __future__ import annotations

from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import invalid

#: Anything with the buffer protocol: bytes, or an array.
Bytes = Union[bytes, bytearray, memoryview, NDArray[Any]]


def readable(data: Bytes, size: int, name: str = "data") -> NDArray[np.uint8]:
    """Returns uint8 [size]: the memory of `data`, or a copy of an array that is not contiguous.
    Raises InvalidArgumentError for another size."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if array.nbytes != size:
        raise invalid(f"{name}: expected {size} bytes, found {array.nbytes}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def writable(buffer: Bytes, size: int, name: str = "into") -> NDArray[np.uint8]:
    """Returns uint8 [size], the memory of `buffer`. Raises InvalidArgumentError for a buffer of
    another size, one that is read-only and one that is not contiguous."""
    expected = f"{name}: expected a writable contiguous buffer of {size} bytes"
    try:
        array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    except (BufferError, ValueError) as failure:
        raise invalid(f"{expected}, found {failure}") from None
    if not array.flags.writeable or not array.flags.c_contiguous or array.nbytes != size:
        kind = "writable" if array.flags.writeable else "read-only"
        order = "contiguous" if array.flags.c_contiguous else "not contiguous"
        raise invalid(f"{expected}, found {array.nbytes} bytes, {kind}, {order}")
    return array.reshape(-1).view(np.uint8)
