"""Frames of the data plane that are hostile: changed calls and pages, and such as are no frames."""

from __future__ import annotations

import itertools
import select
import struct
import time
from dataclasses import dataclass
from random import Random
from typing import Any, Mapping

import kvtier
import numpy as np
from bystander import MODEL, RETRIEVAL, demand, rows
from cases import Figures
from hostile.mutations import EXTENTS, forged, mutate_bytes, mutate_message
from hostile.target import BUSY, attacked, in_processes
from kvtier import frames
from kvtier.data_plane import Attached
from kvtier.v1 import attention_pb2, tensor_pb2
from server import PATIENCE, bfloat_bits

INLINE = 1
PAGE = 4096
TOKENS = 16
STAGING = 1 << 16
MOST_AT_ONCE = 100  # frames, of which the last may end the connection
BOUND_MIB = 64  # anonymous memory after the attack over that before: what the allocator keeps

Wrong = Mapping[str, int]

_HEAD = struct.Struct("<IHHIIQQI")
_ANSWER = struct.Struct("<6xHI4xQQ")  # type, flags, request id and body of a header


def header(
    type: int, control: bytes, *, flags: int = 0, request_id: int = 1, payload: int = 0, wrong: Wrong = {}
) -> bytes:
    """Returns a header with the checksums of what it says; `wrong`: fields as they should not be."""
    fields = {
        "magic": 0x4654564B,
        "version": 1,
        "type": type,
        "flags": flags,
        "control_bytes": len(control),
        "request_id": request_id,
        "body_bytes": len(control) + payload,
        "control_crc": frames.crc32c(control),
        **wrong,
    }
    head = _HEAD.pack(*fields.values())
    return head + struct.pack("<I", frames.crc32c(head))


def frame(type: int, control: bytes, flags: int, request_id: int, payload: bytes = b"") -> bytes:
    head = header(type, control, flags=flags, request_id=request_id, payload=len(payload))
    return head + control + payload


@dataclass
class Names:
    """What the attacker may name, and may not."""

    session: str
    lease: str
    handles: list[bytes]


@dataclass(frozen=True)
class Call:
    """A call that is good, as long as it is not changed."""

    method: int
    message: Any
    sizes: list[int]


def _tensor(message: tensor_pb2.Tensor, dtype: int, shape: list[int]) -> int:
    message.dtype = dtype  # type: ignore[assignment]
    message.shape.extend(shape)
    return int(np.prod(shape)) * (4 if dtype == tensor_pb2.DATA_TYPE_INT32 else 2)


def good_calls(session: str) -> list[Call]:
    """One of each method of the data plane, in a batch of three where it is one."""
    bf16, ints = tensor_pb2.DATA_TYPE_BFLOAT16, tensor_pb2.DATA_TYPE_INT32
    query, token = [1, MODEL.query_heads, MODEL.head_dim], [1, MODEL.kv_heads, MODEL.head_dim]

    def fill(request: Any, parts: str) -> list[int]:
        request.session = session
        shapes = {"query": (bf16, query), "key": (bf16, token), "value": (bf16, token),
                  "tokens": (ints, [MODEL.kv_heads, 4]), "selected": (ints, query[:2] + [4])}
        return [_tensor(getattr(request, part), *shapes[part]) for part in parts.split()]

    calls = []
    for method, request, parts in (
        (frames.APPEND, attention_pb2.AppendRequest(), "key value"),
        (frames.SELECT, attention_pb2.SelectRequest(), "query"),
        (frames.ATTEND, attention_pb2.AttendRequest(), "query selected"),
        (frames.DECODE, attention_pb2.DecodeRequest(step=1), "query key value"),
        (frames.FETCH, attention_pb2.FetchRequest(), "tokens"),
    ):
        calls.append(Call(method, request, fill(request, parts)))
    for method, batch, parts in (
        (frames.BATCH_DECODE, attention_pb2.BatchDecodeRequest(), "query key value"),
        (frames.BATCH_ATTEND, attention_pb2.BatchAttendRequest(), "query"),
        (frames.BATCH_SELECT, attention_pb2.BatchSelectRequest(), "query"),
        (frames.BATCH_FETCH, attention_pb2.BatchFetchRequest(), "tokens"),
    ):
        sizes = [size for _ in range(3) for size in fill(batch.items.add(), parts)]
        calls.append(Call(method, batch, sizes))
    return calls


class Enemy:
    """Makes hostile frames, of whose connections most go on."""

    def __init__(self, random: Random, names: Names) -> None:
        self._random = random
        self._names = names
        self._calls = good_calls(names.session)
        handles = [handle.decode() for handle in names.handles]
        known = [names.session, names.lease, *handles]
        self._texts = [*known, *(forged(random, name) for name in known)]

    def frame(self, request_id: int) -> bytes:
        """A frame with the right lengths and checksums, and a control that can be taken apart."""
        random = self._random
        kind = random.random()
        flags = random.choice((0, 0, 0, 0, frames.SERVER_SUMS, frames.FAILED, frames.MORE))
        payload = b""
        if random.random() < 0.1:
            flags |= INLINE
            payload = random.randbytes(random.randrange(4096))
        if kind < 0.7:
            return frame(frames.CALL, self._call(), flags, request_id, payload)
        if kind < 0.85:
            return frame(frames.READ_PAGES, self._descriptors(), flags, request_id, payload)
        lease = random.choice(self._texts).encode()
        control = struct.pack("<I", len(lease)) + lease + self._descriptors()
        return frame(frames.WRITE_PAGES, control, flags, request_id, payload)

    def last_frame(self) -> bytes:
        """Bytes after which a connection should end, with anything behind them."""
        random = self._random
        control = self._call()
        kind = random.randrange(8)
        if kind == 0:
            changed = bytearray(frame(frames.CALL, control, 0, 1))
            bit = random.randrange(8 * frames.HEADER_BYTES)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)
        if kind == 1:
            field = random.choice(("magic", "version", "type", "flags"))
            number = random.choice((0, 0x10, 0x7FFF, 0xFFFF))
            return header(frames.CALL, control, wrong={field: number}) + control
        if kind == 2:
            field = random.choice(("control_bytes", "body_bytes"))
            number = random.choice(((1 << 20) + 1, (1 << 32) - 1, 0, len(control) - 1))
            return header(frames.CALL, control, wrong={field: number}) + control
        if kind == 3:
            wrong = frames.crc32c(control) ^ 1 << random.randrange(32)
            return header(frames.CALL, control, wrong={"control_crc": wrong}) + control
        if kind == 4:
            return random.randbytes(random.randrange(40, 400))
        if kind == 5:  # a length that lies by a little: the rest is of another frame
            more = random.randrange(1, 64)
            size = len(control) + more
            lie = {"control_bytes": size, "body_bytes": size}
            return header(frames.CALL, control, wrong=lie) + control + bytes(more)
        if kind == 6:
            type = random.choice((frames.READ_PAGES, frames.WRITE_PAGES, frames.CALL))
            cut = mutate_bytes(random, control if type == frames.CALL else self._descriptors())
            return frame(type, cut, 0, 1)
        return frame(random.randrange(1, 10), mutate_bytes(random, control), 0, 1)

    def _call(self) -> bytes:
        random = self._random
        call = random.choice(self._calls)
        message = call.message
        extents = self._places(call.sizes)
        output = (STAGING // 2, STAGING // 2)
        text: bytes
        kind = random.randrange(4)
        if kind == 0:
            text = mutate_bytes(random, message.SerializeToString())
        elif kind == 1:
            changed = type(message)()
            changed.CopyFrom(message)
            for _ in range(random.randrange(1, 4)):
                mutate_message(random, changed, self._texts)
            text = changed.SerializeToString()
        else:
            text = message.SerializeToString()
            if kind == 2:
                extents = self._hostile_extents(extents)
            else:
                output = (random.choice(EXTENTS), random.choice(EXTENTS))
        head = struct.pack("<HHIQQI", call.method, 0, random.choice((0, 1, 50, 10_000)), *output, len(extents))
        places = b"".join(struct.pack("<QQ", *extent) for extent in extents)
        return b"".join((head, places, struct.pack("<I", len(text)), text))

    def _places(self, sizes: list[int]) -> list[tuple[int, int]]:
        ends = itertools.accumulate(map(frames.aligned, sizes), initial=0)
        return list(zip(ends, sizes))

    def _hostile_extents(self, extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
        random = self._random
        kind = random.randrange(4)
        if kind == 0:
            return extents * random.choice((0, 2, 40))
        if kind == 1:
            return [extents[0]] * len(extents)
        at = random.randrange(len(extents))
        place = [*extents[at]]
        place[random.randrange(2)] = random.choice((*EXTENTS, STAGING - 1, STAGING, STAGING + 1))
        return [*extents[:at], (place[0], place[1]), *extents[at + 1 :]]

    def _descriptors(self) -> bytes:
        random = self._random
        count = random.choice((0, 1, 1, 2, 3, 16))
        parts = [struct.pack("<I", count)]
        for _ in range(count):
            handle = random.choice(self._names.handles)
            if random.random() < 0.5:
                handle = mutate_bytes(random, handle)[:32].ljust(32, b"\0")
            numbers = [0, PAGE, 0]
            if random.random() < 0.7:
                numbers[random.randrange(3)] = random.choice(EXTENTS)
            parts.append(struct.pack("<32sQQQI", handle, *numbers, random.getrandbits(32)))
        return b"".join(parts)


class Plane:
    """A connection of the data plane on which anything may be written."""

    def __init__(self, client: kvtier.Client) -> None:
        deadline = time.monotonic() + PATIENCE
        attached: Attached | None = None
        while attached is None:
            demand(time.monotonic() < deadline, "a client that was sent away may attach again")
            attached = client.planes.attach(STAGING)
        self._socket = attached.channel._socket
        self._socket.setblocking(False)
        self._received = bytearray()
        self.refused = 0

    def close(self) -> None:
        self._socket.close()

    def exchange(self, data: bytes, requests: int, last_id: int) -> tuple[int, bytes | None]:
        """Sends `data`, and receives until `requests` were answered, in any order, or the connection
        ends. Returns how many were, and the answer to `last_id`; None: the connection has ended."""
        rest = memoryview(data)
        answered = 0
        last: bytes | None = None
        deadline = time.monotonic() + PATIENCE
        while True:
            demand(time.monotonic() < deadline, "the server answers or ends the connection")
            readable, writable, _ = select.select(
                [self._socket], [self._socket] if rest else [], [], 1.0
            )
            try:
                if writable:
                    rest = rest[self._socket.send(rest) :]
                if not readable:
                    continue
                part = self._socket.recv(1 << 18)
            except OSError:
                part = b""
            if not part:
                return answered, None
            self._received += part
            for type, flags, request_id, body in self._answers():
                if type == frames.GO_AWAY:
                    return answered, None
                answered += not flags & frames.MORE
                self.refused += bool(flags & frames.FAILED)
                if request_id == last_id:
                    last = body
                if answered == requests:
                    return answered, last

    def _answers(self) -> list[tuple[int, int, int, bytes]]:
        """Takes the frames that have come: type, flags, request id, body."""
        answers = []
        at = 0
        while len(self._received) - at >= frames.HEADER_BYTES:
            type, flags, request_id, size = _ANSWER.unpack_from(self._received, at)
            end = at + frames.HEADER_BYTES + size
            if end > len(self._received):
                break
            body = bytes(self._received[at + frames.HEADER_BYTES : end])
            at = end
            answers.append((type, flags, request_id, body))
        del self._received[:at]
        return answers


def _probe(session: str, request_id: int) -> bytes:
    """Fetches the first tokens, bytes in the frame: staging is what hostile calls write to."""
    request = attention_pb2.FetchRequest(session=session)
    size = _tensor(request.tokens, tensor_pb2.DATA_TYPE_INT32, [1, TOKENS])
    control = frames.encode_call(
        frames.FETCH, PATIENCE, (0, 0), [(0, size)], request.SerializeToString()
    )
    return frame(frames.CALL, control, INLINE, request_id, np.arange(TOKENS, dtype=np.int32).tobytes())


def attack(address: str, seed: int, count: int) -> dict[str, int]:
    """Sends frames until `count` of them were answered, or have ended their connection. Its own
    tokens and pages must stay as they were, too."""
    random = Random(seed)
    keys, values = (bfloat_bits(rows(seed + i, TOKENS, 1)) for i in (0, 100))
    contents = [np.frombuffer(random.randbytes(PAGE), np.uint8) for _ in range(4)]
    counts = dict.fromkeys(("answered", "refused", "connections_ended", "probes_checked"), 0)
    with kvtier.Client(address, token=BUSY, attempts=1) as client:
        session = client.open(MODEL, RETRIEVAL, capacity_tokens=512)
        session.append(0, keys, values)
        pages = client.open_pages("frames", PAGE)
        put = pages.put(
            [kvtier.PagePut(bytes([seed, i]), 0, data) for i, data in enumerate(contents)]
        )
        handles = [page.handle for page in put if isinstance(page, kvtier.FoundPage)]
        demand(len(handles) == len(contents), "the attacker's pages are stored")
        enemy = Enemy(random, Names(session.name, pages.name, [h.encode() for h in handles]))
        plane = Plane(client)
        expected = keys.tobytes() + values.tobytes()
        while counts["answered"] + counts["connections_ended"] < count:
            batch = [enemy.frame(i + 1) for i in range(random.randrange(1, MOST_AT_ONCE))]
            probe_id = len(batch) + 1
            requests = probe_id
            if random.random() < 0.5:
                requests += 1  # one more than are asked for: the end of the connection is awaited
                batch.append(enemy.last_frame() + bytes(frames.HEADER_BYTES))
            else:
                batch.append(_probe(session.name, probe_id))
            answered, answer = plane.exchange(b"".join(batch), requests, probe_id)
            if answer is None:
                counts["answered"] += answered
                counts["connections_ended"] += 1
                counts["refused"] += plane.refused
                plane.close()
                plane = Plane(client)
                continue
            counts["answered"] += answered - 1
            counts["probes_checked"] += 1
            demand(answer.endswith(expected), "tokens stay as they were appended")
        counts["refused"] += plane.refused
        plane.close()
        for outcome, data in zip(pages.get(handles), contents, strict=True):
            demand(isinstance(outcome, np.ndarray), f"a committed page stays, found {outcome}")
            np.testing.assert_array_equal(outcome, data)
        pages.close()
        session.close()
    return counts


def run(count: int) -> Figures:
    """Hostile frames of two clients beside a tenant that decodes."""
    with attacked("--max-inflight-mib", "64") as (target, beside):
        counts = in_processes(attack, target.address, count)
    memory = beside.figures["anonymous_mib"]
    demand(memory["end"] <= memory["base"] + BOUND_MIB, f"memory comes back, found {memory} MiB")
    return {"hostile_frames": counts["answered"] + counts["connections_ended"], **counts, **beside.figures}
