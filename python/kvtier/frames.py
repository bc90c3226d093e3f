"""Frames of the data plane, as bytes (docs/service.md)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

google_crc32c: Any
try:
    import google_crc32c
except ImportError:
    google_crc32c = None

HEADER_BYTES = 40
MAX_CONTROL_BYTES = 1 << 20
MAX_TENSOR_BYTES = 8 << 20
MAX_TENSORS = 4096

ATTACH, ATTACHED, CALL, REPLY, READ_PAGES, PAGES, WRITE_PAGES, WRITTEN, GO_AWAY = range(1, 10)
FAILED, MORE, SERVER_SUMS = 2, 4, 8
APPEND, SELECT, ATTEND, DECODE, BATCH_DECODE, BATCH_ATTEND, FETCH = range(1, 8)
BATCH_SELECT, BATCH_FETCH, BATCH_LOOKUP_PAGES = 8, 9, 10
STAGING, READ_ARENA = 1, 2
PAGE_EXISTED = 6
DURABLE = 1

#: Offset and bytes in the staging region.
Extent = tuple[int, int]

_MAGIC = 0x4654564B
_VERSION = 1
_ALIGNMENT = 64
_HANDLE_BYTES = 32
_HEAD = struct.Struct("<IHHIIQQI")
_DESCRIPTOR = struct.Struct("<32sQQQI")
_POLYNOMIAL = 0x82F63B78


def aligned(size: int) -> int:
    """Returns `size`, rounded up to where the next tensor may begin."""
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


_CRC_BLOCK = 4096


def _crc_terms() -> NDArray[np.uint32]:
    """What a byte adds to the register when so many bytes of its block follow."""
    table: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    one, polynomial = np.uint32(1), np.uint32(_POLYNOMIAL)
    for _ in range(8):
        table = (table >> one) ^ (table & one) * polynomial
    terms = np.empty((_CRC_BLOCK, 256), np.uint32)
    terms[0] = table
    for i in range(1, _CRC_BLOCK):
        terms[i] = (terms[i - 1] >> 8) ^ terms[0][terms[i - 1] & 0xFF]
    return terms


class _Crc32c:
    """CRC-32C without google-crc32c. It is linear: the register after a block is the exclusive or
    of a term per byte, the register before it having been added to the first four. The terms, of
    one block, are 4 MiB; they are made by the first call."""

    def __init__(self) -> None:
        self._terms: NDArray[np.uint32] | None = None

    def __call__(self, data: bytes) -> int:
        terms = self._terms
        if terms is None:
            terms = self._terms = _crc_terms()
        state = 0xFFFFFFFF
        for begin in range(0, len(data), _CRC_BLOCK):
            block = np.frombuffer(data[begin : begin + _CRC_BLOCK], np.uint8).copy()
            if len(block) < 4:
                for byte in block.tolist():
                    state = int(terms[0, (state ^ byte) & 0xFF]) ^ (state >> 8)
                continue
            block[:4] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)
            follow = np.arange(len(block) - 1, -1, -1)
            state = int(np.bitwise_xor.reduce(terms[follow, block]))
        return state ^ 0xFFFFFFFF


slow_crc32c = _Crc32c()


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C of `data`."""
    if google_crc32c is None:
        return slow_crc32c(data)
    return int(google_crc32c.value(data))


@dataclass(frozen=True)
class Header:
    type: int
    flags: int
    control_bytes: int
    request_id: int
    body_bytes: int
    control_crc: int


class FrameError(Exception):
    """Bytes that are no frame."""


def encode_header(type: int, request_id: int, control: bytes, flags: int = 0) -> bytes:
    size = len(control)
    head = _HEAD.pack(_MAGIC, _VERSION, type, flags, size, request_id, size, crc32c(control))
    return head + struct.pack("<I", crc32c(head))


def decode_header(data: bytes) -> Header:
    magic, version, type, flags, control, request_id, body, crc = _HEAD.unpack_from(data)
    (header_crc,) = struct.unpack_from("<I", data, _HEAD.size)
    if (magic, version, header_crc) != (_MAGIC, _VERSION, crc32c(data[: _HEAD.size])):
        raise FrameError("expected a frame of version 1, found other bytes")
    if control > MAX_CONTROL_BYTES or body != control:
        raise FrameError(f"expected a control alone of at most 1 MiB, found {control} of {body}")
    return Header(type, flags, control, request_id, body, crc)


def encode_call(
    method: int, seconds: float, output: Extent, tensors: Sequence[Extent], message: bytes
) -> bytes:
    milliseconds = min(max(int(seconds * 1000), 1), 0xFFFFFFFF)
    parts = [struct.pack("<HHIQQI", method, 0, milliseconds, *output, len(tensors))]
    parts += [struct.pack("<QQ", *extent) for extent in tensors]
    parts += [struct.pack("<I", len(message)), message]
    return b"".join(parts)


def encode_descriptors(pages: Sequence[tuple[bytes, int, int]]) -> bytes:
    """Of whole pages: handle, bytes, and where they lie in the staging region."""
    parts = [struct.pack("<I", len(pages))]
    for handle, size, at in pages:
        known = handle if len(handle) == _HANDLE_BYTES else b""  # no page's
        parts.append(_DESCRIPTOR.pack(known, 0, size, at, 0))
    return b"".join(parts)


def encode_write(lease: str, pages: Sequence[tuple[bytes, int, int]]) -> bytes:
    name = lease.encode()
    return struct.pack("<I", len(name)) + name + encode_descriptors(pages)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def numbers(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        return struct.unpack(layout, self.take(size))

    def count(self, size: int) -> int:
        (number,) = self.numbers("<I")
        if number > (len(self._data) - self._at) // size:
            raise FrameError(f"expected {number} entries, found {len(self._data)} bytes")
        return int(number)

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise FrameError(f"expected {size} bytes, found {len(self._data) - self._at}")
        self._at += size
        return self._data[self._at - size : self._at]


def decode_reply(control: bytes) -> tuple[list[Extent], bytes]:
    """Returns where the reply's tensors lie, and the reply without them."""
    reader = _Reader(control)
    extents = [reader.numbers("<QQ") for _ in range(reader.count(16))]
    return extents, reader.take(reader.count(1))


class PageOutcome(NamedTuple):
    """What became of one page: `code` as in ItemStatus, or PAGE_EXISTED."""

    code: int
    crc32c: int
    slot: int
    generation: int
    offset: int
    bytes: int


def decode_outcomes(control: bytes) -> list[PageOutcome]:
    reader = _Reader(control)
    return [PageOutcome(*reader.numbers("<IIIIQQ")) for _ in range(reader.count(32))]


def decode_attached(control: bytes) -> list[tuple[int, int]]:
    """Returns kind and bytes of the regions, in the order of their descriptors."""
    reader = _Reader(control)
    reader.numbers("<I")  # the layout of pages
    return [reader.numbers("<IQ") for _ in range(reader.count(12))]
