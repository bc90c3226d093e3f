"""Calls of gRPC that are hostile: every method for clients, its request changed in fields and in bytes."""

from __future__ import annotations

import collections
import contextlib
from random import Random
from typing import Any, Iterator

import grpc
import kvtier
import numpy as np
from bystander import MODEL, RETRIEVAL, await_true, demand, rows
from cases import Figures
from google.protobuf.message_factory import GetMessageClass
from hostile.frame_attack import good_calls
from hostile.mutations import forged, mutate_bytes, mutate_message
from hostile.target import BUSY, QUIET, attacked, in_processes
from kvtier.v1 import attention_pb2, page_pb2, session_pb2, shared_memory_pb2, transfer_pb2
from server import PATIENCE, bfloat_bits

PAGE = 4096
TOKENS = 16
ROUND = 200  # calls, after which what the attacker had is looked at, and had anew
BOUND_MIB = 192  # anonymous memory over its base: the engines that the attack may make, too
_NAMES = ("session", "name", "lease", "attachment")  # fields that say whose the call is
_NO_ERROR_OF_A_REQUEST = ("UNKNOWN", "INTERNAL", "UNAVAILABLE")

Requests = dict[type[Any], Any]


class Method:
    """A method by its descriptor, whose requests are bytes."""

    def __init__(self, channel: grpc.Channel, service: Any, method: Any) -> None:
        self.name = method.name
        self.request: Any = GetMessageClass(method.input_type)
        path = f"/{service.full_name}/{method.name}"
        self.streams = (method.client_streaming, method.server_streaming)
        factory = {
            (False, False): channel.unary_unary,
            (True, False): channel.stream_unary,
            (False, True): channel.unary_stream,
            (True, True): channel.stream_stream,
        }[self.streams]
        self._call = factory(path)

    def __call__(self, request: bytes) -> tuple[str, bytes]:
        """Returns the name of the status, and the reply of a method that has one."""
        sent: Any = iter([request, request]) if self.streams[0] else request
        metadata = (("authorization", f"Bearer {BUSY}"),)
        try:
            reply = self._call(sent, timeout=PATIENCE, metadata=metadata)
            if self.streams[1]:
                reply = b"".join(reply)
        except grpc.RpcError as error:
            return str(error.code().name), b""
        return "OK", reply


def client_methods(channel: grpc.Channel) -> Iterator[Method]:
    for module in (session_pb2, attention_pb2, page_pb2, transfer_pb2, shared_memory_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield Method(channel, service, method)


class Belongings:
    """A session with tokens, and a lease with pages: what names are of."""

    def __init__(self, client: kvtier.Client, seed: int) -> None:
        self.session = client.open(MODEL, RETRIEVAL, capacity_tokens=512)
        self.keys, self.values = (bfloat_bits(rows(seed + i, TOKENS, 1)) for i in (0, 1))
        self.session.append(0, self.keys, self.values)
        self.pages = client.open_pages("calls", PAGE)
        self.contents = [np.frombuffer(Random(seed + i).randbytes(PAGE), np.uint8) for i in range(2)]
        put = self.pages.put(
            [kvtier.PagePut(bytes([seed, i]), 0, data) for i, data in enumerate(self.contents)]
        )
        self.handles = [page.handle for page in put if isinstance(page, kvtier.FoundPage)]
        demand(len(self.handles) == len(self.contents), "pages are stored")

    def names(self) -> list[str]:
        return [self.session.name, self.pages.name, *self.handles]

    def check(self) -> None:
        """Raises unless tokens and pages are those of before."""
        demand(self.session.length(0) == TOKENS, "no other call appends or truncates")
        self.session.refresh()
        demand(self.session.length(0) == TOKENS, "no other call appends or truncates")
        found = self.session.fetch(0, np.arange(TOKENS, dtype=np.int32)[None, :])
        for stored, data in ((found.keys, self.keys), (found.values, self.values)):
            np.testing.assert_array_equal(np.asarray(stored).view(np.uint16).ravel(), data.ravel())
        for outcome, page in zip(self.pages.get(self.handles), self.contents, strict=True):
            demand(isinstance(outcome, np.ndarray), f"a page stays, found {outcome}")
            np.testing.assert_array_equal(outcome, page)

    def close(self) -> None:
        self.session.close()
        self.pages.close()


def good_requests(own: Belongings) -> Requests:
    """By their class; those that are not here begin empty, but for their names."""
    lease, session, handles = own.pages.name, own.session.name, own.handles
    requests: list[Any] = [
        session_pb2.CreateSessionRequest(
            geometry=MODEL.message(), capacity_tokens=64, retrieval=RETRIEVAL.message()
        ),
        session_pb2.ForkSessionRequest(name=session, count=1),
        session_pb2.PublishPrefixRequest(name=session, token_ids=range(TOKENS)),
        session_pb2.KeepAliveRequest(names=[session, lease]),
        page_pb2.OpenLeaseRequest(model="calls", page_bytes=PAGE),
        page_pb2.LookupPrefixRequest(lease=lease, hashes=[b"1", b"2"], layers=[0]),
        page_pb2.BatchReservePagesRequest(lease=lease, keys=[page_pb2.PageKey(hash=b"h")]),
        page_pb2.BatchCommitPagesRequest(lease=lease, items=[{"handle": handles[0]}]),
        page_pb2.BatchAbortPagesRequest(lease=lease, handles=handles),
        page_pb2.BatchDeletePagesRequest(lease=lease, handles=handles),
        page_pb2.BatchPinPagesRequest(lease=lease, handles=handles),
        page_pb2.BatchUnpinPagesRequest(lease=lease, handles=handles),
        transfer_pb2.ReadPagesRequest(lease=lease, handles=handles),
        transfer_pb2.WritePagesRequest(
            lease=lease, chunks=[{"handle": handles[0], "data": bytes(PAGE), "last": True}]
        ),
        shared_memory_pb2.CreateAttachmentRequest(staging_bytes=1 << 16),
        shared_memory_pb2.ShareDeviceMemoryRequest(
            cuda_ipc_handle=bytes(64), device_uuid=bytes(16), bytes=1 << 20
        ),
    ]
    for call in good_calls(session):
        for item in getattr(call.message, "items", [call.message]):
            for field, value in item.ListFields():
                if field.name in ("query", "key", "value", "tokens", "selected"):
                    size = int(np.prod(value.shape)) * (4 if value.dtype == 4 else 2)
                    value.data = bytes(size)
        requests.append(call.message)
    return {type(request): request for request in requests}


def _names_another(request: Any, others: frozenset[str]) -> bool:
    return any(getattr(request, field, "") in others for field in _NAMES)


def attack(address: str, seed: int, count: int) -> dict[str, int]:
    """Makes `count` calls; counts them by status. Raises when a name of another tenant, or a forged
    one, is accepted, or when what the attacker's victim has changes."""
    random = Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    options = [("grpc.use_local_subchannel_pool", 1)]
    with kvtier.Client(address, token=QUIET) as victim, kvtier.Client(address, token=BUSY) as client:
        foreign = Belongings(victim, 50 + seed)
        channel = grpc.insecure_channel(address, options)
        methods = list(client_methods(channel))
        while sum(counts.values()) < count:
            own = _own(client, seed)
            made: set[str] = set()
            good = good_requests(own)
            names = own.names()
            others = [*foreign.names(), *(forged(random, n) for n in (*names, *foreign.names()))]
            forbidden = frozenset(others) - frozenset(names)
            for _ in range(min(ROUND, count - sum(counts.values()))):
                method = random.choice(methods)
                hostile, data = _request(random, method, good, [*names, *others], names)
                status, reply = method(data)
                demand(
                    status != "OK" or hostile is None or not _names_another(hostile, forbidden),
                    f"{method.name}: expected a refusal of a name that is not the caller's, found {hostile}",
                )
                demand(
                    status not in _NO_ERROR_OF_A_REQUEST,
                    f"{method.name}: expected an error of the request, found {status} of {hostile}",
                )
                counts[status] += 1
                if status == "OK":
                    made.update(_created(method.name, reply))
            for name in made:
                # Released by a hostile call, or not called since.
                with contextlib.suppress(kvtier.NotFoundError, kvtier.LeaseExpiredError):
                    client.release(name)
            own.close()
            foreign.check()
        channel.close()
        foreign.close()
    return dict(counts)


def _request(
    random: Random, method: Method, good: Requests, names: list[str], own: list[str]
) -> tuple[Any, bytes]:
    """Returns a hostile request, None where its bytes were changed as well, and its bytes."""
    request = method.request()
    if method.request in good:
        request.CopyFrom(good[method.request])
    else:
        for field in _NAMES:
            if field in request.DESCRIPTOR.fields_by_name:
                setattr(request, field, random.choice(own))
    for _ in range(random.randrange(1, 4)):
        mutate_message(random, request, names)
    data = request.SerializeToString()
    if random.random() < 0.3:
        return None, mutate_bytes(random, data)
    return request, data


def _own(client: kvtier.Client, seed: int) -> Belongings:
    """What the attacker has, once hostile forks of another process leave its tenant room for it."""
    made: list[Belongings] = []

    def has_room() -> bool:
        with contextlib.suppress(kvtier.QuotaExceededError):
            made.append(Belongings(client, seed))
        return bool(made)

    await_true(has_room, "the tenant has room for a session")
    return made[0]


def _created(method: str, reply: bytes) -> list[str]:
    """Names of the sessions that a call has made."""
    if method == "CreateSession":
        return [session_pb2.CreateSessionResponse.FromString(reply).session.name]
    if method == "ForkSession":
        return [s.name for s in session_pb2.ForkSessionResponse.FromString(reply).sessions]
    return []


def run(count: int) -> Figures:
    """Hostile calls of two clients beside a tenant that decodes."""
    options = ("--max-inflight-mib", "64", "--host-memory-mib", "64", "--lease-seconds", "20")
    with attacked(*options) as (target, beside):
        counts = in_processes(attack, target.address, count)
    memory = beside.figures["anonymous_mib"]
    demand(memory["end"] <= memory["base"] + BOUND_MIB, f"memory comes back, found {memory} MiB")
    return {"hostile_calls": sum(counts.values()), "by_status": counts, **beside.figures}
