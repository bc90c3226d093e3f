"""Memory of a GPU that the server reads and writes in place."""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable, Sequence

import numpy as np

from kvtier.errors import invalid
from kvtier.lease import Closing
from kvtier.v1 import tensor_pb2

HANDLE_BYTES = 64
UUID_BYTES = 16
_ALIGNMENT = 16  # of a tensor within its allocation, as the server asks

#: By the name that numpy, torch and cupy end a type with: as the message says it, as replies and
#: numpy have it, bfloat16 as its bits.
_TYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "float32": (tensor_pb2.DATA_TYPE_FLOAT32, np.dtype(np.float32)),
    "float16": (tensor_pb2.DATA_TYPE_FLOAT16, np.dtype(np.float16)),
    "bfloat16": (tensor_pb2.DATA_TYPE_BFLOAT16, np.dtype(np.uint16)),
}


class DeviceTensor:
    """A dense array in shared device memory, made by `SharedDeviceMemory.tensor`: keys, values and
    queries of a call, or where it writes `out` and `lse`."""

    def __init__(
        self, memory: SharedDeviceMemory, offset: int, shape: tuple[int, ...], dtype: str
    ) -> None:
        if dtype not in _TYPES:
            raise invalid(f"dtype: expected float32, float16 or bfloat16, found {dtype}")
        if not 1 <= len(shape) <= 4 or min(shape) < 0:
            raise invalid(f"shape: expected 1 to 4 extents of at least 0, found {list(shape)}")
        self._memory = memory
        self._offset = offset
        self._type = dtype
        self.shape = shape
        #: That of numpy; of bfloat16 uint16.
        self.dtype = _TYPES[dtype][1]
        self.nbytes = math.prod(shape) * self.dtype.itemsize
        if offset < 0 or offset % _ALIGNMENT != 0 or self.nbytes > memory.nbytes - offset:
            raise invalid(
                f"offset: expected a multiple of {_ALIGNMENT} with {self.nbytes} bytes behind it "
                f"within {memory.nbytes}, found {offset}"
            )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def rows(self, first: int, end: int) -> DeviceTensor:
        """Returns rows of the first dimension; where they begin must be aligned, too."""
        first, end = (min(max(at, 0), self.shape[0]) for at in (first, end))
        row = self.nbytes // self.shape[0] if self.shape[0] > 0 else 0
        shape = (max(end - first, 0), *self.shape[1:])
        return DeviceTensor(self._memory, self._offset + first * row, shape, self._type)

    def place(self) -> tensor_pb2.DeviceMemory:
        return tensor_pb2.DeviceMemory(region=self._memory.region, offset=self._offset)

    def describe(self, message: tensor_pb2.Tensor) -> None:
        """Names this array in a message."""
        message.dtype = _TYPES[self._type][0]  # type: ignore[assignment]
        message.shape.extend(self.shape)
        message.memory.CopyFrom(self.place())


class SharedDeviceMemory(Closing):
    """An allocation of `cudaMalloc` that the server has mapped, until `close`, the end of a `with`
    or of this object, which must come before the allocation is freed. Made by
    `Client.share_device_memory`."""

    def __init__(
        self, unshare: Callable[[], None], region: str, pointer: int, nbytes: int
    ) -> None:
        self.region = region
        self.pointer = pointer
        self.nbytes = nbytes
        self._end = weakref.finalize(self, unshare)

    def tensor(
        self, array: Any = None, *, offset: int = 0, shape: Sequence[int] = (), dtype: str = ""
    ) -> DeviceTensor:
        """Returns a dense array of this memory, as it is described to the server: `array`, a tensor of
        torch, or any object with `__cuda_array_interface__`; or what `offset`, `shape` and `dtype`
        say. What was written there must have arrived when a call is made
        (`torch.cuda.synchronize()`)."""
        if array is None:
            return DeviceTensor(self, offset, tuple(shape), dtype)
        pointer, shape, dtype = _described(array)
        if not self.pointer <= pointer < self.pointer + max(self.nbytes, 1):
            raise invalid("array: expected one that lies in this memory, found another")
        return DeviceTensor(self, pointer - self.pointer, tuple(shape), dtype)

    def close(self) -> None:
        """Waits until the server has let the memory go, a second at most."""
        self._end()


def _described(array: Any) -> tuple[int, tuple[int, ...], str]:
    """Returns where an array is, its shape and its type."""
    if hasattr(array, "data_ptr"):  # of torch, whose interface knows no bfloat16
        if not array.is_cuda or not array.is_contiguous():
            raise invalid("array: expected a dense tensor on a GPU, found another")
        if hasattr(array, "is_neg") and array.is_neg():
            raise invalid("array: expected a tensor without negative bit (resolve_neg), found one with it")
        return array.data_ptr(), tuple(array.shape), str(array.dtype).rpartition(".")[2]
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise invalid("array: expected __cuda_array_interface__, found none")
    if interface.get("strides") is not None:
        raise invalid("array: expected a dense array, found one with strides")
    return interface["data"][0], tuple(interface["shape"]), np.dtype(interface["typestr"]).name
