"""Calls over the data plane: tensors in memory that client and server share."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
import time
from typing import Any, Callable, NamedTuple, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvtier import frames, tensors
from kvtier.arena import Arena
from kvtier.connection import Connection, check_peer
from kvtier.device import DeviceTensor
from kvtier.errors import ClientError, Details, ErrorCode, make_error
from kvtier.v1 import shared_memory_pb2, status_pb2, tensor_pb2

Reply = TypeVar("Reply")

_MAX_CHANNELS = 4
# What kept a server from giving a channel may have gone by then.
_ASK_AGAIN_AFTER = 5.0
_DETACH_SECONDS = 1.0
_MAX_DESCRIPTORS = 8
_BUFFER_BYTES = 64 << 10
# Without them the process that made the memory could make it smaller, and reading it would end this one.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _gone(what: str) -> ClientError:
    return make_error(ErrorCode.UNAVAILABLE.value, f"data plane: {what}", Details("DISCONNECTED"))


class PlaneCall:
    """A call whose tensors may travel beside its message. `add` them in the order in which they
    stand in the request."""

    def __init__(self, method: int, request: Any, output_bytes: int = 0) -> None:
        """`output_bytes`: of the reply's tensors at most, each rounded up."""
        self.method = method
        self.request = request
        self.output_bytes = output_bytes
        self.tensors: list[tuple[tensor_pb2.Tensor, tensors.Array]] = []

    def add(self, message: tensor_pb2.Tensor, value: tensors.Array | DeviceTensor) -> None:
        if isinstance(value, DeviceTensor):
            value.describe(message)
            return
        tensors.describe(message, value)
        self.tensors.append((message, value))

    def inline(self) -> Any:
        """Returns the request with its tensors inside, as gRPC takes it."""
        for message, value in self.tensors:
            message.data = value.tobytes()
        return self.request


class Channel:
    """An attached connection. Used by one thread at a time; broken after an error but one that the
    server reported."""

    def __init__(self, path: str, token: bytes, deadline: float) -> None:
        #: By the steady clock, of the calls until it is set anew.
        self.deadline = deadline
        self._last_id = 0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._have = 0
        self._descriptors: list[int] = []
        self.arena: Arena | None = None  # when the tenant had pages at the time
        self.broken = True
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._limit_wait()
            self._socket.connect(path)
            check_peer(self._socket)
            self.staging = self._attach(token)
        except BaseException:
            self._socket.close()
            raise
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)  # what is mapped stays mapped
        self._room = len(self.staging)
        self.broken = False

    def close(self) -> None:
        self._socket.close()

    def run(self, call: PlaneCall, response: Reply) -> Reply | None:
        """Returns the reply, its tensors inside; None, with nothing sent, when those of the request
        do not fit. Raises what the server says."""
        extents, end = self._place(call)
        if end is None:
            return None
        control = frames.encode_call(
            call.method,
            self.deadline - time.monotonic(),
            (end, call.output_bytes),
            extents,
            call.request.SerializeToString(),
        )
        if len(control) > frames.MAX_CONTROL_BYTES:
            return None
        (body,) = self.exchange(frames.CALL, control)
        try:
            self._take(body, response)
        except (frames.FrameError, DecodeError) as error:
            self.broken = True
            raise _gone(str(error)) from None
        return response

    def _take(self, body: bytes, response: Any) -> None:
        places, message = frames.decode_reply(body)
        response.ParseFromString(message)
        found = _tensors_of(response)
        if len(places) != len(found):
            raise frames.FrameError(f"expected {len(found)} tensors, found {len(places)}")
        for (offset, size), tensor in zip(places, found):
            if offset > self._room or size > self._room - offset:
                raise frames.FrameError("expected tensors within the staging region")
            tensor.data = self.staging[offset : offset + size].tobytes()

    def _place(self, call: PlaneCall) -> tuple[list[frames.Extent], int | None]:
        sizes = [value.nbytes for _, value in call.tensors]
        end = sum(map(frames.aligned, sizes))
        fits = end + call.output_bytes <= self._room and len(sizes) <= frames.MAX_TENSORS
        if not fits or max(sizes, default=0) > frames.MAX_TENSOR_BYTES:
            return [], None
        extents = []
        at = 0
        for (_, value), size in zip(call.tensors, sizes):
            place = self.staging[at : at + size].view(value.dtype).reshape(value.shape)
            np.copyto(place, value)
            extents.append((at, size))
            at += frames.aligned(size)
        return extents, end

    def exchange(self, type: int, control: bytes, flags: int = 0) -> list[bytes]:
        """Makes a request and returns the controls of its reply's frames, one but for many pages.
        Raises what the server says; after the deadline, with nothing sent, DeadlineExceededError."""
        bodies: list[bytes] = []
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise make_error(ErrorCode.DEADLINE_EXCEEDED, "data plane: the deadline has passed")
        self.broken = True  # unless all goes well
        self._last_id += 1
        try:
            self._send(type, control, flags)
            while True:
                header, body = self._receive()
                if header.type == frames.GO_AWAY:
                    break
                if header.request_id == self._last_id:
                    bodies.append(body)
                    if not header.flags & frames.MORE:
                        break
        except TimeoutError:
            message = f"data plane: no answer within {seconds:.3g} s"
            raise make_error(ErrorCode.DEADLINE_EXCEEDED, message) from None
        except (OSError, frames.FrameError) as error:
            raise _gone(f"the server is gone: {error}") from None
        if header.type == frames.GO_AWAY:
            raise _told(body)
        self.broken = False
        if header.flags & frames.FAILED:
            raise _told(body)
        return bodies

    def _attach(self, token: bytes) -> NDArray[np.uint8]:
        self._send(frames.ATTACH, token)
        header, body = self._receive()
        if header.type != frames.ATTACHED:
            raise _told(body) if header.type == frames.GO_AWAY else _gone("expected to be attached")
        regions = frames.decode_attached(body)
        if len(regions) != len(self._descriptors):
            raise frames.FrameError("expected a descriptor per region")
        staging: NDArray[np.uint8] | None = None
        for (kind, size), descriptor in zip(regions, self._descriptors):
            if size > 0 and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise frames.FrameError("expected memory whose size is sealed")
            if kind == frames.STAGING and size > 0:
                staging = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
            elif kind == frames.READ_ARENA and size > 0:
                pages = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
                self.arena = Arena(np.frombuffer(pages, np.uint8))
        if staging is None:
            raise _gone("expected memory to share")
        return staging

    def _limit_wait(self) -> None:
        self._socket.settimeout(max(self.deadline - time.monotonic(), 1e-3))

    def _send(self, type: int, control: bytes, flags: int = 0) -> None:
        self._limit_wait()
        self._socket.sendall(frames.encode_header(type, self._last_id, control, flags) + control)

    def _receive(self) -> tuple[frames.Header, bytes]:
        self._fill(frames.HEADER_BYTES)
        header = frames.decode_header(bytes(self._buffer[: frames.HEADER_BYTES]))
        end = frames.HEADER_BYTES + header.control_bytes
        self._fill(end)
        body = bytes(self._buffer[frames.HEADER_BYTES : end])
        self._buffer[: self._have - end] = self._buffer[end : self._have]
        self._have -= end
        if frames.crc32c(body) != header.control_crc:
            raise frames.FrameError("expected a control with the checksum of the header")
        return header, body

    def _fill(self, size: int) -> None:
        """Receives until the buffer has `size` bytes."""
        if size > len(self._buffer):
            self._buffer.extend(bytes(size - len(self._buffer)))
        while self._have < size:
            self._limit_wait()
            if self._last_id == 0:  # attaching
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket, len(self._buffer) - self._have, _MAX_DESCRIPTORS
                )
                self._descriptors.extend(descriptors)
                count = len(data)
                self._buffer[self._have : self._have + count] = data
            else:
                count = self._socket.recv_into(memoryview(self._buffer)[self._have :])
            if count == 0:
                raise ConnectionError("it has closed the connection")
            self._have += count


def _told(control: bytes) -> ClientError:
    status = status_pb2.ItemStatus()
    try:
        status.ParseFromString(control)
    except DecodeError:
        return _gone("expected a status")
    return make_error(status.code, status.message, Details(reason=status.reason))


def _tensors_of(response: Any) -> list[tensor_pb2.Tensor]:
    """Returns the tensors of a reply in their order, those of a batch item by item."""
    found: list[tensor_pb2.Tensor] = []
    for field, value in response.ListFields():
        if field.name == "items":
            for item in value:
                if item.HasField("response"):
                    found.extend(_tensors_of(item.response))
        elif isinstance(value, tensor_pb2.Tensor) and not value.HasField("memory"):
            found.append(value)
    return found


class Attached(NamedTuple):
    """A channel of its own, and the attachment that it ends with."""

    channel: Channel
    name: str


class Planes:
    """Channels to the data plane of one server, made when they are needed. A server without one, or
    that refuses, is asked again after a few seconds. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        options = connection.options
        self._connection = connection
        self._usable = options.data_plane and options.server.startswith("unix:")
        self._ask_again = 0.0  # by the steady clock
        self._returned = threading.Condition()
        self._idle: list[Channel] = []
        self._made = 0

    def run(self, call: PlaneCall, response: Reply) -> Reply | None:
        """As `Channel.run`; None as well when there is no channel."""
        channel = self._borrow()
        if channel is None:
            return None
        try:
            return channel.run(call, response)
        finally:
            self._give_back(channel)

    def repeatable(self, call: PlaneCall, response: Reply) -> Reply | None:
        """As `run`, of a call that may be repeated: None as well when it must be made another
        way."""
        try:
            return self.run(call, response)
        except ClientError as error:
            unavailable = error.code in (ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED)
            if unavailable or error.reason == "REPLY_TOO_LARGE":
                return None
            raise

    def with_pages(self, work: Callable[[Channel], None]) -> None:
        """Runs `work` with a channel that has mapped the tenant's pages, if there is one, until it
        ends or raises what a channel raises."""
        channel = self._borrow()
        if channel is None:
            return
        try:
            if channel.arena is None:  # attached before there were pages
                fresh = self._make(channel.deadline)
                if fresh is None:
                    return
                channel.close()
                channel = fresh
            work(channel)
        except (ClientError, frames.FrameError):
            pass  # pages can go over gRPC
        finally:
            self._give_back(channel)

    def close(self) -> None:
        with self._returned:
            self._usable = False
            idle, self._idle = self._idle, []
            self._returned.notify_all()
        for channel in idle:
            channel.close()

    def _borrow(self) -> Channel | None:
        if not self._usable:
            return None
        deadline = time.monotonic() + self._connection.seconds_left()
        with self._returned:
            while self._may_ask() and not self._idle and self._made >= _MAX_CHANNELS:
                if not self._returned.wait(deadline - time.monotonic()):
                    return None
            if not self._usable or not (self._idle or self._may_ask()):
                return None
            if self._idle:
                channel = self._idle.pop()
                channel.deadline = deadline
                return channel
            self._made += 1
        made: Channel | None = None
        try:
            made = self._make(deadline)
        finally:
            if made is None:
                with self._returned:
                    self._made -= 1
                    self._ask_again = time.monotonic() + _ASK_AGAIN_AFTER
                    self._returned.notify_all()
        return made

    def _may_ask(self) -> bool:
        return self._usable and time.monotonic() >= self._ask_again

    def _give_back(self, channel: Channel) -> None:
        closed: list[Channel] = []
        with self._returned:
            if channel.broken:
                # The others are likely broken too, and new ones are soon made.
                closed = [channel, *self._idle]
                self._made -= len(closed)
                self._idle = []
            elif self._usable:
                self._idle.append(channel)
            else:
                closed = [channel]
            self._returned.notify_all()
        for each in closed:
            each.close()

    def attach(self, staging_bytes: int) -> Attached | None:
        """Returns a channel that no call uses; None when there is none to be had."""
        if not self._usable:
            return None
        return self._attach(staging_bytes, time.monotonic() + self._connection.seconds_left())

    def detach(self, attached: Attached) -> None:
        """Ends an attachment and closes its channel; in a fork of the process leaves it as it is.
        Waits for the server, a second at most."""
        connection = self._connection
        if connection.is_forked:
            return
        request = shared_memory_pb2.DeleteAttachmentRequest(name=attached.name)
        try:
            connection.shared_memory.DeleteAttachment(
                request, timeout=_DETACH_SECONDS, metadata=connection.metadata
            )
        except (grpc.RpcError, ValueError):
            pass  # the end of the connection ends it, too
        attached.channel.close()

    def _make(self, deadline: float) -> Channel | None:
        attached = self._attach(0, deadline)
        return None if attached is None else attached.channel

    def _attach(self, staging_bytes: int, deadline: float) -> Attached | None:
        connection = self._connection
        request = shared_memory_pb2.CreateAttachmentRequest(
            process_id=os.getpid(), staging_bytes=staging_bytes
        )
        try:
            left = deadline - time.monotonic()
            create = connection.shared_memory.CreateAttachment
            made = connection.call_once(create, request, left)
            for endpoint in made.endpoints:
                if endpoint.startswith("unix:"):
                    path = endpoint.removeprefix("unix:")
                    channel = Channel(path, made.token, deadline)
                    return Attached(channel, made.attachment.name)
        except (ClientError, OSError, ValueError, frames.FrameError):
            pass  # every call can go over gRPC
        return None
