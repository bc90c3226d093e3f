"""A channel, and how calls over it are made."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence, TypeVar

import grpc

from kvtier.errors import ClientError, ErrorCode, error_of, invalid, make_error
from kvtier.v1 import (
    admin_pb2_grpc,
    attention_pb2_grpc,
    page_pb2_grpc,
    session_pb2_grpc,
    shared_memory_pb2_grpc,
    transfer_pb2_grpc,
)

T = TypeVar("T")

_MAX_MESSAGE_BYTES = 4 << 20
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 1.0
_MAX_TIMEOUT = 1e9  # seconds; grpc and sockets take little more
# What grpc's message ends with where nothing listens, before the number of the error in some releases.
_NO_LISTENER = ("Connection refused", "No such file or directory")

# What grpc says of a socket that takes connections and speaks something else.
_NO_HTTP2 = "Failed parsing HTTP/2"


def _check_user(user: int) -> None:
    if os.geteuid() not in (0, user) and user != 0:
        raise make_error(
            ErrorCode.FAILED_PRECONDITION.value,
            f"client: expected a server of user {os.geteuid()} or root, found one of user {user}",
        )


def check_peer(connected: socket.socket) -> None:
    """Raises unless the other end of a Unix socket is a process of this user, or of root."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _check_user(struct.unpack("iII", found)[1])


def check_owner(path: str) -> None:
    """As `check_peer`, of who has made a socket, or a link to one; nothing when there is none."""
    try:
        for look in (os.lstat, os.stat):
            _check_user(look(path).st_uid)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as failure:
        message = f"client: expected a path of a socket, found {path}: {failure.strerror}"
        raise make_error(ErrorCode.FAILED_PRECONDITION, message) from failure


@dataclass(frozen=True)
class ClientOptions:
    """As `kvtier::ClientOptions`."""

    #: "unix:PATH" or "tcp:HOST:PORT".
    server: str
    #: Names the tenant, where the server knows tenants by token.
    token: str = field(default="", repr=False)
    #: Files in PEM, all three for TCP: the CA of the server, the client's certificate and key.
    tls_server_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    #: TCP without TLS; the server must allow it.
    insecure_tcp: bool = False
    #: Seconds that a call may take, above 0 and at most 1e9: none waits for ever.
    timeout: float = 30.0
    #: Attempts at a call that the server cannot take now; 1: no retry.
    attempts: int = 4
    #: Send tensors through memory shared with a server on a Unix socket, where it has a data plane.
    data_plane: bool = True


def default_folder() -> str:
    """Returns the folder in which `kvtier serve` has its sockets by default."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return f"{folder}/kvtier" if folder else f"/tmp/kvtier-{os.getuid()}"


def delay_before(error: ClientError, attempt: int) -> float | None:
    """Returns how long to wait before attempt `attempt` + 2; None: none is worth it."""
    # A client cancels nothing itself: a server that shuts down does.
    unavailable = error.code in (ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED)
    hint = error.details.retry_delay
    overloaded = error.code == ErrorCode.RESOURCE_EXHAUSTED and hint is not None
    if not unavailable and not overloaded:
        return None
    delay = min(_FIRST_BACKOFF * 2 ** min(attempt, 4), _LONGEST_BACKOFF)
    if hint is not None:
        delay = min(max(hint, delay), _LONGEST_BACKOFF)
    return random.uniform(delay / 2, delay)


class _Deadline(threading.local):
    """Of the calls of a thread, by the steady clock."""

    at = float("inf")


class Connection:
    """Thread-safe."""

    def __init__(self, options: ClientOptions, *, is_admin: bool = False) -> None:
        if not 0 < options.timeout <= _MAX_TIMEOUT:
            raise invalid(
                f"timeout: expected above 0 s and at most {_MAX_TIMEOUT:g}, found {options.timeout}"
            )
        if options.attempts < 1:
            raise invalid(f"attempts: expected at least 1, found {options.attempts}")
        if not all("!" <= c <= "~" for c in options.token):
            raise invalid("token: expected printable ASCII without white space, found other characters")
        self.options = options
        self._is_admin = is_admin
        self.metadata: Sequence[tuple[str, str]] = (
            (("authorization", f"Bearer {options.token}"),) if options.token else ()
        )
        self._channel = _make_channel(options)
        self._process = os.getpid()
        self._deadline = _Deadline()
        self.sessions: Any = session_pb2_grpc.SessionServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.attention: Any = attention_pb2_grpc.AttentionServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.pages: Any = page_pb2_grpc.PageServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.shared_memory: Any = shared_memory_pb2_grpc.SharedMemoryServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.transfer: Any = transfer_pb2_grpc.TransferServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ends the channel; in a fork of the process leaves it to the other process."""
        if not self.is_forked:
            self._channel.close()

    @contextlib.contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """All calls that this thread makes inside end within `seconds` together."""
        before = self._deadline.at
        self._deadline.at = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._deadline.at = before

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made the connection."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raises FailedPreconditionError in a fork of the process, which has the same sockets, so that
        each would read what the other is sent, and none of the threads."""
        if self.is_forked:
            message = "client: expected the process that made it, found a fork of that process"
            raise make_error(ErrorCode.FAILED_PRECONDITION, message)

    def seconds_left(self) -> float:
        """Returns how long a call of this thread may take: the timeout, less within `deadline`.
        Raises DeadlineExceededError when that has passed, and as `check_process` does."""
        self.check_process()
        left = self._deadline.at - time.monotonic()
        if left <= 0:
            raise make_error(ErrorCode.DEADLINE_EXCEEDED, "client: the deadline has passed")
        return min(self.options.timeout, left)

    def error_of(self, failure: Any) -> ClientError:
        """Returns the error of a call that grpc has raised."""
        error = error_of(failure)
        wrong = self._wrong_socket(error)
        if wrong:
            return make_error(error.code, wrong, error.details)
        if error.code != ErrorCode.UNAVAILABLE or not error.message.startswith("failed to connect"):
            return error
        if not error.message.rstrip(" ()0123456789").endswith(_NO_LISTENER):
            return error
        server = self.options.server
        message = f"server: expected kvtier serve at {server}, found none (start it: kvtier serve)"
        return make_error(error.code, message, error.details)

    def _wrong_socket(self, error: ClientError) -> str:
        """Returns what to say where a server has another of its sockets; empty: it has not."""
        unknown_method = error.code == ErrorCode.UNIMPLEMENTED and not error.message
        server = self.options.server
        if not server.startswith("unix:") or not (unknown_method or _NO_HTTP2 in error.message):
            return ""
        expected = "an admin socket" if self._is_admin else "a socket of clients"
        other = server.removesuffix(".data").removesuffix(".admin")
        if self._is_admin and not other.endswith("/kvtier.sock"):  # beside this it has its own name
            other += ".admin"
        hint = f": try {other}" if other != server else ""
        return f"server: expected {expected}, found another at {server}{hint}"

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Raises as `ClientError` what grpc raises."""
        try:
            yield
        except grpc.RpcError as failure:
            raise self.error_of(failure) from None
        except ValueError as failure:
            if isinstance(failure, ClientError):
                raise
            # So grpc refuses a channel that is closed.
            message = "client: expected an open client, found one that is closed"
            raise make_error(ErrorCode.FAILED_PRECONDITION, message) from failure

    def retry(self, attempt: Callable[[], T]) -> T:
        """Runs `attempt`, which raises `ClientError`, until it is taken or attempts are used up."""
        for i in range(self.options.attempts):
            try:
                return attempt()
            except ClientError as error:
                delay = delay_before(error, i)
                if delay is None or i + 1 == self.options.attempts:
                    raise
            time.sleep(delay)
        raise AssertionError("unreachable")

    def call(self, method: Callable[..., Any], request: Any) -> Any:
        """Makes a unary call until it is taken or the attempts are used up."""
        return self.retry(lambda: self.call_once(method, request))

    def call_once(
        self, method: Callable[..., Any], request: Any, timeout: float | None = None
    ) -> Any:
        """As `call`, of a call that must not be repeated."""
        left = self.seconds_left()
        seconds = left if timeout is None else min(timeout, left)
        with self.translated():
            return method(request, timeout=seconds, metadata=self.metadata)


class Watchdog:
    """Cancels what has not ended by its deadline. Its thread starts with the first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[Any, float] = {}
        self._expired: set[Any] = set()
        self._wake_at = float("inf")
        self._thread: threading.Thread | None = None
        self._ending = False

    def start(self, call: Any, seconds: float) -> None:
        """Cancels `call` unless `stop` comes within `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._deadlines[call] = deadline
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvtier-deadlines", daemon=True
                )
                self._thread.start()
            if deadline < self._wake_at:
                self._changed.notify()

    def stop(self, call: Any) -> bool:
        """Returns whether the time of `call` had run out."""
        with self._changed:
            self._deadlines.pop(call, None)
            expired = call in self._expired
            self._expired.discard(call)
            return expired

    def close(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._ending:
                now = time.monotonic()
                for call in [c for c, deadline in self._deadlines.items() if deadline <= now]:
                    del self._deadlines[call]
                    self._expired.add(call)
                    call.cancel()
                self._wake_at = min(self._deadlines.values(), default=float("inf"))
                self._changed.wait(None if not self._deadlines else self._wake_at - now)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as failure:
        message = f"client: expected a readable file, found {path}"
        raise make_error(ErrorCode.NOT_FOUND, message) from failure


def _make_channel(options: ClientOptions) -> Any:
    arguments = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1 << 20),
        ("grpc.keepalive_time_ms", 30_000),  # the server takes one in 20 s
        ("grpc.enable_retries", 0),
        # A pool of its own: connections of one process do not share their limit of streams.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
    ]
    server = options.server
    if server.startswith("unix:"):
        check_owner(server.removeprefix("unix:"))
        return grpc.insecure_channel(server, options=arguments)
    if not server.startswith("tcp:"):
        raise invalid(f'client: server: expected unix:PATH or tcp:HOST:PORT, found "{server}"')
    target = server.removeprefix("tcp:")
    files = (options.tls_server_ca, options.tls_key, options.tls_certificate)
    if all(files):
        credentials = grpc.ssl_channel_credentials(*(_read(path) for path in files))
        return grpc.secure_channel(target, credentials, options=arguments)
    if any(files):
        raise invalid(
            "client: TLS: expected server CA, certificate and key together, found some of them"
        )
    if not options.insecure_tcp:
        raise invalid("client: expected TLS files for TCP, or insecure_tcp, found neither")
    return grpc.insecure_channel(target, options=arguments)
