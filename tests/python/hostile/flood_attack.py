"""Floods: descriptors that no call asks for, headers without end, bodies that do not come, replies that stay unread."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import tempfile
import time
from random import Random
from typing import Callable, Iterator, Sequence

import kvtier
import numpy as np
from bystander import await_true, demand, descriptors, memory_mib
from cases import Figures
from hostile import frame_attack, http2
from hostile.http2 import CONTINUATION, END_HEADERS, END_STREAM, HEADERS, MAX_FRAME, PREFACE, Raw
from hostile.target import BUSY, Attack, attacked, in_processes
from kvtier import frames
from kvtier.v1 import attention_pb2, tensor_pb2
from server import bfloat_bits

MOST_OF_A_MESSAGE = 253  # descriptors, SCM_MAX_FD
BOUND_MIB = 192  # anonymous memory at most over its base, with 64 MiB in flight
POLLERS = 16  # descriptors that gRPC makes for its threads when they are busy, and keeps
PAUSE_SECONDS = 0.001
MOST_SECONDS = 60.0  # of a flood
OLD_SECONDS = 0.11  # after which the reset of a stream is one of many
MOST_STREAMS = 128  # open at once on a connection
MOST_RESETS = 250  # of young streams that a connection may send at once
HOLD_SECONDS = 1.0  # how long what was sent stays unfinished, or unread
LIMITS = ("--max-inflight-mib", "64")
TENANT_MIB = 48  # in flight, so that others have room beside a tenant that takes all it may
WIDE = kvtier.ModelConfig(layers=1, query_heads=1, kv_heads=1, head_dim=256)
IDS = 1000  # of a call, whose reply is 256 times as large as its request
CALLS_OF_A_CONNECTION = 15  # in the 64 KiB that HTTP/2 lets send at first


def _kinds() -> Iterator[int]:
    """Descriptors of all kinds."""
    yield os.memfd_create("hostile")
    yield os.open("/dev/null", os.O_RDWR)
    yield os.eventfd(0)
    yield from os.pipe()
    for end in socket.socketpair():
        yield end.detach()


def send_descriptors(
    sockets: Sequence[str], address: str, seed: int, count: int
) -> dict[str, int]:
    """Sends `count` descriptors to `sockets`, of which "" is a connection of the data plane that is
    attached: before a word of the protocol and amid it."""
    random = Random(seed)
    sent = refused = connections = 0
    kinds = list(_kinds())
    with kvtier.Client(address, token=BUSY, attempts=1) as client:
        while sent < count:
            name = random.choice(sockets)
            attached = client.planes.attach(frame_attack.STAGING) if name == "" else None
            if name == "" and attached is None:
                continue  # those of before have not ended yet
            sock = attached.channel._socket if attached is not None else Raw(name).socket
            connections += 1
            with contextlib.suppress(OSError):  # the server has had enough
                if attached is None and random.random() < 0.5:
                    sock.sendall(PREFACE)
                    if random.random() < 0.5:  # with the server's first bytes unread
                        select.select([sock], [], [], 1.0)
                for _ in range(random.randrange(1, 4)):
                    number = random.choice((1, 2, 16, MOST_OF_A_MESSAGE))
                    passed = random.choices(kinds, k=number)
                    sent += number
                    try:
                        socket.send_fds(sock, [random.randbytes(random.randrange(1, 64))], passed)
                    except PermissionError:  # the server's socket takes none (Linux 6.16)
                        refused += number
            sock.close()
    for kind in kinds:
        os.close(kind)
    return {"descriptors_sent": sent, "descriptors_refused": refused, "connections": connections}


def run_descriptors(count: int) -> Figures:
    """Descriptors beside a tenant that decodes. None stays that the data plane or the metrics were
    sent, nor of those sent to gRPC's sockets where the kernel lets these refuse them; where it does
    not, some stay, which is reported (docs/faults.md, section 10)."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-floods-") as folder:
        admin, metrics = (f"unix:{folder}/{name}" for name in ("admin", "metrics"))
        options = ("--admin-listen", admin, "--metrics", metrics)
        for own in (True, False):
            with attacked(*LIMITS, *options, inflight_mib=TENANT_MIB) as (target, beside):
                base = descriptors(target.running)
                data = f"{target.address}.data"
                sockets = ("", data, metrics) if own else (target.address, admin)
                attack = functools.partial(send_descriptors, sockets)
                counts = in_processes(attack, target.address, count // 2)
                if own or counts["descriptors_refused"] == counts["descriptors_sent"]:
                    await_true(
                        lambda: descriptors(target.running) <= base + POLLERS,
                        "descriptors are closed",
                    )
            _check_peak("descriptors", beside.figures)
            figures["own" if own else "grpc"] = {**counts, **beside.figures}
    return figures


def _check_peak(name: str, figures: Figures) -> None:
    memory = figures["anonymous_mib"]
    demand(
        memory["peak"] <= memory["base"] + BOUND_MIB, f"{name}: memory is bounded, found {memory} MiB"
    )


#: Sends MiB on a connection, or what the server takes of them.
Form = Callable[[Raw, int], None]


def _continued(raw: Raw, first: bytes, rest: bytes, count: int) -> None:
    """A block of headers that begins with `first` and does not end within `count` MiB."""
    raw.send(PREFACE + http2.frame(http2.SETTINGS, 0, 0, b"") + http2.frame(HEADERS, 0, 1, first))
    many = http2.frame(CONTINUATION, 0, 1, rest[:MAX_FRAME]) * 8
    while raw.sent < count << 20 and raw.send(many):
        raw.drain()


def _indexed(raw: Raw, count: int) -> None:
    """A field for each byte: the first of the table."""
    _continued(raw, http2.literal(b"a", b"b", indexed=True), b"\xbe" * MAX_FRAME, count)


def _distinct(raw: Raw, count: int) -> None:
    fields = b"".join(http2.literal(b"x%d" % i, b"y" * 100) for i in range(140))
    _continued(raw, b"", fields, count)


def _empty(raw: Raw, count: int) -> None:
    _continued(raw, http2.literal(b"a", b"b"), b"", count)


def _large(raw: Raw, count: int) -> None:
    """Blocks of headers that end, each as large as may be, of a field for each byte."""
    raw.send(PREFACE + http2.frame(http2.SETTINGS, 0, 0, b""))
    first = http2.literal(b"a", b"b", indexed=True)
    stream = 1
    while raw.sent < count << 20:
        data = http2.frame(HEADERS, END_STREAM, stream, first + b"\xbe" * (MAX_FRAME - 8))
        data += http2.frame(CONTINUATION, END_HEADERS, stream, b"\xbe" * (MAX_FRAME - 8))
        if not raw.send(data):
            break
        raw.drain()
        stream += 2


def _opened(stream: int) -> bytes:
    fields = http2.request_headers("/kvtier.v1.SessionService/ListSessions", BUSY)
    return http2.frame(HEADERS, END_HEADERS | END_STREAM, stream, fields)


def _reset(stream: int) -> bytes:
    return http2.frame(http2.RST_STREAM, 0, stream, bytes([0, 0, 0, 8]))


def _resets(raw: Raw, count: int) -> None:
    """Streams that are reset as soon as they are open."""
    raw.send(PREFACE + http2.frame(http2.SETTINGS, 0, 0, b""))
    stream = 1
    while raw.sent < count << 20:
        streams = range(stream, stream + 200, 2)
        if not raw.send(b"".join(_opened(i) + _reset(i) for i in streams)):
            break
        raw.drain()
        stream += 200


def _abandoned(raw: Raw, count: int) -> None:
    """As many streams as may be open, on a connection that ends at once."""
    streams = range(1, 2 * MOST_STREAMS, 2)
    raw.send(PREFACE + http2.frame(http2.SETTINGS, 0, 0, b"") + b"".join(map(_opened, streams)))


def _late_resets(raw: Raw, count: int) -> None:
    """Streams that are reset when the server takes them for old, `count` times."""
    raw.send(PREFACE + http2.frame(http2.SETTINGS, 0, 0, b""))
    for round in range(count):
        streams = range(1 + 200 * round, 1 + 200 * (round + 1), 2)
        raw.send(b"".join(map(_opened, streams)))
        time.sleep(OLD_SECONDS)
        raw.send(b"".join(map(_reset, streams)))
        raw.drain()


def _pings(raw: Raw, count: int) -> None:
    """PINGs and SETTINGS whose answers are not read, as long as the server reads."""
    raw.socket.settimeout(1.0)
    raw.send(PREFACE + http2.frame(http2.SETTINGS, 0, 0, b""))
    many = (http2.frame(http2.PING, 0, 0, bytes(8)) + http2.frame(http2.SETTINGS, 0, 0, b"")) * 1000
    while raw.sent < count << 20 and raw.send(many):
        pass


_FORMS: tuple[Form, ...] = (
    _indexed,
    _distinct,
    _empty,
    _large,
    _resets,
    _abandoned,
    _late_resets,
    _pings,
)


def send_headers(form: Form, address: str, seed: int, count: int) -> dict[str, int]:
    """Sends `count` MiB of a form, each on as many connections as the server ends."""
    sent = connections = 0
    end = time.monotonic() + MOST_SECONDS
    while sent < count << 20 and time.monotonic() < end:
        try:
            raw = Raw(address)
        except BlockingIOError:  # connections that the server has not taken yet
            time.sleep(PAUSE_SECONDS)
            continue
        form(raw, count)
        raw.close()
        sent += raw.sent
        connections += 1
        if form in (_late_resets, _pings):
            break  # the server ends none, or does not read on
    return {"kib_sent": sent >> 10, "connections": connections}


def send_bodies(address: str, seed: int, count: int) -> dict[str, int]:
    """Sends `count` frames of 9 MiB, the last byte of which does not come, on connections of the data plane."""
    control, payload = bytes(1 << 20), bytes((8 << 20) - 1)
    head = frame_attack.header(frames.CALL, control, flags=frame_attack.INLINE, payload=8 << 20)
    with kvtier.Client(address, token=BUSY, attempts=1) as client, contextlib.ExitStack() as stack:
        begun = 0
        for _ in range(count):
            attached = client.planes.attach(4096)
            if attached is None:
                continue  # the tenant has its share of attachments
            stack.callback(attached.channel.close)
            with contextlib.suppress(OSError):
                attached.channel._socket.sendall(head + control + payload)
            begun += 1
        time.sleep(HOLD_SECONDS)
        return {"bodies_begun": begun}


def run_headers(count: int) -> Figures:
    """Headers without end, and bodies without an end, each beside a tenant that decodes. Every form
    has a server of its own: what one leaves in the allocator is given back by the minute."""
    figures: Figures = {}
    attacks: dict[str, Attack] = {
        form.__name__.strip("_"): functools.partial(send_headers, form) for form in _FORMS
    }
    for name, attack in (*attacks.items(), ("bodies", send_bodies)):
        with attacked(*LIMITS, inflight_mib=TENANT_MIB) as (target, beside):
            counts = in_processes(attack, target.address, count, processes=1)
        _check_peak(name, beside.figures)
        figures[name] = {**counts, **beside.figures}
    return figures


def send_together(address: str, seed: int, count: int) -> dict[str, int]:
    """Sends on `count` connections, all open at once, blocks of headers that do not end and are as
    large as may be, then streams that are reset as soon as they are open, as many as may be."""
    raws = [Raw(address) for _ in range(count)]
    first = http2.literal(b"a", b"b", indexed=True)
    for i, raw in enumerate(raws):
        raw.send(PREFACE + http2.frame(http2.SETTINGS, 0, 0, b""))
        if i % 2 == 0:
            raw.send(b"".join(_opened(s) + _reset(s) for s in range(1, 2 * MOST_RESETS, 2)))
        stream = 2 * MOST_RESETS + 1
        raw.send(http2.frame(HEADERS, 0, stream, first + b"\xbe" * (MAX_FRAME - 8)))
        raw.send(http2.frame(CONTINUATION, 0, stream, b"\xbe" * (MAX_FRAME - 8)))
    time.sleep(HOLD_SECONDS)
    for raw in raws:
        raw.close()
    return {"kib_sent": sum(raw.sent for raw in raws) >> 10}


def run_together(count: int) -> Figures:
    """What a connection may send of headers and resets, on many connections."""
    with attacked(*LIMITS, inflight_mib=TENANT_MIB) as (target, beside):
        counts = in_processes(send_together, target.address, count, processes=1)
    _check_peak("together", beside.figures)
    return {**counts, **beside.figures}


def leave_replies(address: str, seed: int, count: int) -> dict[str, int]:
    """Makes `count` calls with large replies on connections that let none be sent."""
    tokens = bfloat_bits(np.ones((1, 1, WIDE.head_dim), np.float32))
    with kvtier.Client(address, token=BUSY) as client, contextlib.ExitStack() as stack:
        session = stack.enter_context(client.open(WIDE, capacity_tokens=64))
        session.append(0, tokens, tokens)
        request = attention_pb2.FetchRequest(session=session.name)
        request.tokens.dtype = tensor_pb2.DATA_TYPE_INT32
        request.tokens.shape.extend([1, IDS])
        request.tokens.data = bytes(4 * IDS)
        body = http2.message(request.SerializeToString())
        fields = http2.request_headers("/kvtier.v1.AttentionService/Fetch", BUSY)
        made = 0
        while made < count:
            raw = Raw(address)
            stack.callback(raw.close)
            data = PREFACE + http2.setting(http2.INITIAL_WINDOW_SIZE, 0)
            for i in range(CALLS_OF_A_CONNECTION):
                data += http2.frame(HEADERS, END_HEADERS, 2 * i + 1, fields)
                data += http2.frame(http2.DATA, END_STREAM, 2 * i + 1, body)
            raw.send(data)
            made += CALLS_OF_A_CONNECTION
        time.sleep(HOLD_SECONDS)
    return {"unread_replies": made, "reply_bytes": IDS * WIDE.head_dim * 4 * made}


def run_replies(count: int) -> Figures:
    """Replies that are not read, beside a tenant that decodes."""
    with attacked(*LIMITS, inflight_mib=TENANT_MIB) as (target, beside):
        counts = in_processes(leave_replies, target.address, count)
    _check_peak("replies", beside.figures)
    return {**counts, **beside.figures}
