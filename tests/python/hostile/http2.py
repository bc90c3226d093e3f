"""HTTP/2 as bytes (RFC 9113, RFC 7541), for clients that keep to no rule of it."""

from __future__ import annotations

import socket
import struct
from typing import Sequence

from server import PATIENCE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
MAX_FRAME = 1 << 14
INITIAL_WINDOW_SIZE = 4  # of SETTINGS


def frame(type: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", type, flags, stream) + payload


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", name, value))


def literal(name: bytes, value: bytes, *, indexed: bool = False) -> bytes:
    """A header field of names and values below 127 bytes, with `indexed` for later fields to name."""
    first = b"\x40" if indexed else b"\x00"
    return first + bytes([len(name)]) + name + bytes([len(value)]) + value


def request_headers(path: str, token: str) -> bytes:
    fields: Sequence[tuple[str, str]] = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("authorization", f"Bearer {token}"),
    )
    return b"".join(literal(name.encode(), value.encode()) for name, value in fields)


def message(data: bytes) -> bytes:
    """A message of gRPC."""
    return struct.pack(">BI", 0, len(data)) + data


class Raw:
    """A connection to a Unix socket, on which anything may be written."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(address.removeprefix("unix:"))
        self.sent = 0

    def send(self, data: bytes) -> bool:
        """Returns whether the server was there to take it."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        self.sent += len(data)
        return True

    def drain(self) -> None:
        """Takes what has come."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1 << 16):
                pass
        except OSError:
            pass
        self.socket.settimeout(PATIENCE)

    def close(self) -> None:
        self.socket.close()
