"""Host pools of SGLang as chunks of a server."""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.chunks import ChunkGroup, ChunkStore
from kvtier.errors import invalid
from kvtier.identity import Field, make_identity
from kvtier.sglang import _compat

# Smaller buffers are copied together: the server keeps each in 4 KiB or a multiple.
_MIN_SEGMENT_BYTES = 64 << 10


class StoredPool:
    """The pages of one host pool. Buffers of a page that have one size are stored and read in
    place; others are copied together; of pools that have no addresses SGLang makes flat pages."""

    def __init__(self, store: ChunkStore, pool: Any, identity: dict[str, Field]) -> None:
        """`identity`: all that the bytes of a page depend on beside the pool's shape. Raises
        InvalidArgumentError for a pool without memory of its own."""
        self._pool = pool
        self._page_size = int(getattr(pool, "page_size", 1) or 1)
        self._sizes = self._buffer_sizes()
        self._flat = not self._sizes
        segments = len(self._sizes)
        if self._flat:
            self._sizes = [_flat_size(pool)]
            segments = 1
        elif len(set(self._sizes)) > 1 or self._sizes[0] < _MIN_SEGMENT_BYTES:
            segments = 1
        self._in_place = not self._flat and segments == len(self._sizes)
        shape: dict[str, Field] = {
            "dtype": str(getattr(pool, "dtype", None)),
            "layout": str(getattr(pool, "layout", None)),
            "page_tokens": self._page_size,
            "buffers": self._sizes,
            "flat": self._flat,
        }
        if getattr(pool, "dtype", None) == torch.uint8:
            shape["cache_dtypes"] = _compat.cache_dtypes()
        name = make_identity("sglang", {**identity, **shape})
        self.group: ChunkGroup = store.group(name, sum(self._sizes), segments)

    def load(self, keys: Sequence[bytes], indices: torch.Tensor) -> list[bool]:
        """Reads pages to the slots `indices` [keys * page tokens]; returns which were read."""
        self._check(keys, indices)
        if self._flat:
            return self._load_flat(keys, indices)
        buffers = self._buffers(indices)
        if self._in_place:
            return self.group.get(keys, buffers).result()
        pages = np.empty((len(keys), self.group.chunk_bytes), np.uint8)
        read = self.group.get(keys, list(pages)).result()
        count = len(self._sizes)
        for i, good in enumerate(read):
            begin = 0
            for buffer in buffers[i * count : (i + 1) * count] if good else ():
                buffer[:] = pages[i, begin : begin + len(buffer)]
                begin += len(buffer)
        return read

    def save(self, keys: Sequence[bytes], indices: torch.Tensor) -> list[bool]:
        """Stores the pages in the slots `indices`; returns which are stored."""
        self._check(keys, indices)
        if self._flat:
            pages = [
                _bytes(self._pool.get_data_page(slot, flat=True).contiguous())
                for slot in self._slots(indices)
            ]
            return self.group.put(keys, pages).result()
        buffers = self._buffers(indices)
        if not self._in_place:
            count = len(self._sizes)
            buffers = [
                np.concatenate(buffers[first : first + count])
                for first in range(0, len(buffers), count)
            ]
        return self.group.put(keys, buffers).result()

    def _load_flat(self, keys: Sequence[bytes], indices: torch.Tensor) -> list[bool]:
        pages = [self._pool.get_dummy_flat_data_page() for _ in keys]
        read = self.group.get(keys, [_bytes(page) for page in pages]).result()
        for slot, page, good in zip(self._slots(indices), pages, read):
            if good:
                self._pool.set_from_flat_data_page(slot, page)
        return read

    def _check(self, keys: Sequence[bytes], indices: torch.Tensor) -> None:
        expected = len(keys) * self._page_size
        if indices.numel() != expected:
            raise invalid(f"host_indices: expected {expected}, found {indices.numel()}")

    def _slots(self, indices: torch.Tensor) -> list[int]:
        return [int(slot) for slot in indices[:: self._page_size].tolist()]

    def _buffer_sizes(self) -> list[int]:
        """Returns the bytes of a page's buffers; none, where SGLang has no addresses of them."""
        try:
            return self._addresses(torch.arange(self._page_size, dtype=torch.int64))[1]
        except (NotImplementedError, ValueError, AttributeError):
            return []

    def _addresses(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        found = self._pool.get_page_buffer_meta(indices)
        if not found:
            raise NotImplementedError
        addresses, sizes = found
        if isinstance(sizes, int):
            sizes = [sizes] * len(addresses)
        return list(addresses), [int(size) for size in sizes]

    def _buffers(self, indices: torch.Tensor) -> list[NDArray[np.uint8]]:
        if indices.numel() == 0:
            return []
        return [_memory(address, size) for address, size in zip(*self._addresses(indices))]


def _memory(address: int, size: int) -> NDArray[np.uint8]:
    memory = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memoryview(memory).cast("B"), np.uint8)


def _flat_size(pool: Any) -> int:
    """Returns the bytes of a flat page."""
    try:
        page = pool.get_dummy_flat_data_page()
        size = int(page.numel()) * int(page.element_size())
    except (NotImplementedError, AttributeError):
        size = 0
    if size == 0:
        raise invalid(f"host pool: expected pages with memory, found {type(pool).__name__}")
    return size


def _bytes(page: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = page.reshape(-1).view(torch.uint8).numpy()
    return array
