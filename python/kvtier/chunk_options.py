"""Options of a store of chunks, as engines take them from their configuration."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Mapping

from kvtier.client import Client, default_server
from kvtier.errors import invalid

_KINDS = {"str": "a string", "float": "a number", "int": "an integer", "bool": "true or false"}


@dataclass(frozen=True)
class ChunkOptions:
    """The server, and how long to wait for it."""

    #: "unix:PATH" or "tcp:HOST:PORT"; empty: where `kvtier serve` listens by default.
    server: str = ""
    #: A file with the token that names the tenant, without the white space around it.
    token_file: str = ""
    #: Files in PEM, all three for TCP: the CA of the server, the client's certificate and key.
    tls_server_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    #: TCP without TLS; the server must allow it.
    insecure_tcp: bool = False
    #: Memory shared with a server on a Unix socket, where it has a data plane.
    data_plane: bool = True
    #: Seconds that a batch of chunks may take, above 0; what has not come by then is a miss.
    timeout: float = 2.0
    #: Seconds that a lookup may take, above 0.
    lookup_timeout: float = 0.5
    #: Seconds without a call after one that found no server, above 0.
    retry_after: float = 5.0
    #: Threads that move chunks, 1 to 64.
    io_threads: int = 4
    #: Bytes of chunks that one batch moves, at least 1; a single chunk may have more.
    batch_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        for name in ("timeout", "lookup_timeout", "retry_after"):
            if not 0 < getattr(self, name) < float("inf"):
                raise invalid(f"{name}: expected above 0 s, found {getattr(self, name)}")
        if not 1 <= self.io_threads <= 64:
            raise invalid(f"io_threads: expected 1 to 64, found {self.io_threads}")
        if self.batch_bytes < 1:
            raise invalid(f"batch_bytes: expected at least 1, found {self.batch_bytes}")

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ChunkOptions:
        """Returns the options of a mapping, such as JSON has. Raises InvalidArgumentError for one
        that is unknown or of another type."""
        known = {field.name: field for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f', did you mean "{near[0]}"?' if near else ""
                raise invalid(f'options: expected {", ".join(known)}, found "{name}"{hint}')
            kind = str(known[name].type)
            if not _is_of(value, kind):
                raise invalid(f"{name}: expected {_KINDS[kind]}, found {value!r}")
        return cls(**options)

    def connect(self) -> Client:
        """Returns a client whose calls are not repeated. Raises for addresses and files that are no
        use, not for a server that cannot be reached."""
        return Client(
            self.server or default_server(),
            token=_token(self.token_file),
            tls_server_ca=self.tls_server_ca,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            insecure_tcp=self.insecure_tcp,
            timeout=self.timeout,
            attempts=1,
            data_plane=self.data_plane,
        )


def _is_of(value: object, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind == "float":
        return isinstance(value, (int, float))
    return isinstance(value, {"str": str, "int": int}[kind])


def _token(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as failure:
        raise invalid(f"token_file: expected a readable file, found {path}: {failure}") from None
