"""A tenant's pages in memory that the server shares for reading."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from kvtier import frames

_MAGIC = int.from_bytes(b"KVTPAGE1", "little")
_VERSION = 1
_UNIT = 4096
_HEAD = struct.Struct("<QIIQQQ")
_PAGE_HEAD_BYTES = 64


class Arena:
    """A tenant's pages, mapped for reading (services/wire/page_layout.h)."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        if len(data) < _UNIT:
            raise frames.FrameError(f"expected an arena, found {len(data)} bytes")
        magic, version, _, units, begin, end = _HEAD.unpack_from(data.data)
        heads = _UNIT + units * _PAGE_HEAD_BYTES
        layout = (-(-heads // _UNIT) * _UNIT, -(-heads // _UNIT) * _UNIT + units * _UNIT)
        known = (magic, version) == (_MAGIC, _VERSION)
        if not known or (begin, end) != layout or end > len(data):
            raise frames.FrameError("expected an arena of version 1, found another")
        self._heads = data[_UNIT:heads].view(np.uint64).reshape(units, _PAGE_HEAD_BYTES // 8)
        self._pages = data[begin:end]

    def copy(self, slot: int, generation: int, to: NDArray[np.uint8]) -> bool:
        """Copies a page. Returns whether `to` has it: otherwise it has gone, before or meanwhile."""
        if slot >= len(self._heads) or slot * _UNIT + len(to) > len(self._pages):
            return False
        version, length = self._heads[slot, :2]
        if int(version) != 2 * generation or int(length) != len(to):
            return False
        np.copyto(to, self._pages[slot * _UNIT : slot * _UNIT + len(to)])
        return int(self._heads[slot, 0]) == 2 * generation
