"""The data plane: frames, calls through shared memory, and what happens when it cannot be had."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import socket
import struct
import tempfile
import threading
import time
import unittest
import unittest.mock
from typing import Any, Callable

import kvtier
import numpy as np
from kvtier import frames, page_plane
from kvtier.data_plane import Channel, PlaneCall
from kvtier.v1 import attention_pb2, status_pb2
from server import PATIENCE, ServerTest, succeeds_in_fork

MODEL = kvtier.ModelConfig(layers=1, query_heads=2, kv_heads=1, head_dim=64)
RETRIEVAL = kvtier.RetrievalConfig.of(
    kvtier.Estimator.SOFT_COLLISION, top_k=8, sink_tokens=4, recent_tokens=4
)
STAGING = 1 << 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def rows(tokens: int, heads: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((tokens, heads, 64), np.float32)


def bitwise_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class FramesTest(unittest.TestCase):
    def test_checksums_are_crc_32c(self) -> None:
        known = {  # of RFC 3720, appendix B.4
            bytes(32): 0x8A9136AA,
            b"\xff" * 32: 0x62A8AB43,
            bytes(range(32)): 0x46DD794E,
            b"123456789": 0xE3069283,
            b"": 0,
        }
        for data, crc in known.items():
            self.assertEqual(frames.crc32c(data), crc)
            self.assertEqual(frames.slow_crc32c(data), crc)
        source = random.Random(1)
        for size in (1, 3, 4, 255, 1023, 3000, 4095, 4096, 4097, 4099, 4100, 8193):
            data = source.randbytes(size)
            self.assertEqual(frames.crc32c(data), bitwise_crc32c(data), size)
            self.assertEqual(frames.slow_crc32c(data), bitwise_crc32c(data), size)

    def test_a_header_with_any_bit_turned_is_none(self) -> None:
        control = b"control"
        head = frames.encode_header(frames.CALL, 7, control)
        found = frames.decode_header(head)
        self.assertEqual(
            found, frames.Header(frames.CALL, 0, 7, 7, 7, bitwise_crc32c(control))
        )
        for bit in range(8 * len(head)):
            wrong = bytearray(head)
            wrong[bit // 8] ^= 1 << bit % 8
            with self.assertRaises(frames.FrameError):
                frames.decode_header(bytes(wrong))

    def test_lengths_beyond_the_limits_are_refused(self) -> None:
        for control, body in ((frames.MAX_CONTROL_BYTES + 1,) * 2, (8, 9), (9, 8), (0, 1 << 63)):
            head = struct.pack("<IHHIIQQI", 0x4654564B, 1, frames.REPLY, 0, control, 1, body, 0)
            head += struct.pack("<I", frames.crc32c(head))
            with self.assertRaises(frames.FrameError):
                frames.decode_header(head)

    def test_controls_that_are_cut_or_lie_about_counts_are_refused(self) -> None:
        reply = struct.pack("<IQQI", 1, 64, 8, 3) + b"abc"
        self.assertEqual(frames.decode_reply(reply), ([(64, 8)], b"abc"))
        for size in range(len(reply)):
            with self.assertRaises(frames.FrameError):
                frames.decode_reply(reply[:size])
        with self.assertRaises(frames.FrameError):
            frames.decode_reply(struct.pack("<IQQI", 0xFFFFFFFF, 0, 0, 0))
        with self.assertRaises(frames.FrameError):
            frames.decode_attached(struct.pack("<II", 1, 1))


class NoGrpc:
    """A stub whose calls must not be made."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*arguments: Any, **options: Any) -> Any:
            raise AssertionError(f"{name} went over gRPC")

        return refuse


class PlaneTest(ServerTest):
    def setUp(self) -> None:
        self.client = kvtier.Client(self.server.address)
        self.addCleanup(self.client.close)
        self.session = self.client.open(MODEL, RETRIEVAL)
        self.addCleanup(self.session.close)
        self.stub = self.client.connection.attention

    def test_calls_of_a_session_need_no_grpc(self) -> None:
        self.client.connection.attention = NoGrpc()
        self.session.append(0, rows(40, 1), rows(40, 1))
        found = [
            self.session.decode(0, rows(1, 2), rows(1, 1), rows(1, 1)).out,
            self.session.attend(0, rows(1, 2)).out,
            self.session.select(0, rows(1, 2), with_scores=True).ids,
            self.session.fetch(0, np.array([[40, 3]], np.int32)).keys,
        ]
        found += self.batch(self.client, self.session)
        self.client.connection.attention = self.stub
        with kvtier.Client(self.server.address, data_plane=False) as other:
            with other.open(MODEL, RETRIEVAL) as session:
                session.append(0, rows(40, 1), rows(40, 1))
                expected = [
                    session.decode(0, rows(1, 2), rows(1, 1), rows(1, 1)).out,
                    session.attend(0, rows(1, 2)).out,
                    session.select(0, rows(1, 2)).ids,
                    session.fetch(0, np.array([[40, 3]], np.int32)).keys,
                ]
                expected += self.batch(other, session)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)

    def batch(self, client: kvtier.Client, session: kvtier.RemoteSession) -> list[Any]:
        """The outputs of batches of three, of which the second item is wrong."""
        row = rows(1, 1)
        found = client.batch_decode(
            [kvtier.DecodeItem(session, at, rows(1, 2, at), row, row) for at in (0, 9, 0)]
        ) + client.batch_attend([kvtier.AttendItem(session, at, rows(2, 2, at)) for at in (0, 9, 0)])
        selected = client.batch_select(
            [kvtier.SelectItem(session, at, rows(2, 2, at), with_scores=True) for at in (0, 9, 0)]
        )
        ids = np.array([[40, 3]], np.int32)
        fetched = client.batch_fetch([kvtier.FetchItem(session, at, ids) for at in (0, 9, 0)])
        for wrong in (found[1], found[4], selected[1], fetched[1]):
            self.assertIsInstance(wrong, kvtier.InvalidArgumentError)
        rest = [
            array
            for item in (*selected, *fetched)
            if not isinstance(item, kvtier.ClientError)
            for array in item
            if array is not None
        ]
        self.assertEqual(len(rest), 8)
        outs = [item for item in found if isinstance(item, kvtier.AttendResult)]
        self.assertEqual(len(outs), 4)
        self.assertEqual(session.length(0), 43)
        return [item.out for item in outs] + [item.lse for item in outs] + rest

    def cut(self) -> None:
        """Ends the connection under the client."""
        (channel,) = self.client.planes._idle
        channel._socket.shutdown(socket.SHUT_RDWR)

    def test_a_fork_leaves_what_its_parent_has_attached(self) -> None:
        attached = self.client.planes.attach(1 << 20)
        assert attached is not None
        self.addCleanup(self.client.planes.detach, attached)

        def detach() -> bool:
            calls = unittest.mock.Mock()
            self.client.connection.shared_memory = calls
            self.client.planes.detach(attached)
            return not calls.mock_calls

        self.assertTrue(succeeds_in_fork(detach))

    def test_a_fork_closes_its_sessions_without_the_threads_of_its_parent(self) -> None:
        held, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with self.client.leases._changed:
                held.set()
                forked.wait(PATIENCE)

        def close() -> bool:
            steps = unittest.mock.Mock()
            self.session._steps = steps
            with self.session, self.client:
                pass
            return not steps.mock_calls

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            self.assertTrue(held.wait(PATIENCE))
            self.assertTrue(succeeds_in_fork(close))
        finally:
            forked.set()
            thread.join()
        self.session.refresh()

    def test_a_step_on_a_connection_that_ended_is_made_over_grpc_once(self) -> None:
        query, row = rows(1, 2), rows(1, 1)
        self.session.decode(0, query, row, row)
        self.cut()
        self.session.decode(0, query, row, row)
        self.session.refresh()
        self.assertEqual(self.session.length(0), 2)
        self.client.connection.attention = NoGrpc()  # a new connection can be made
        self.session.decode(0, query, row, row)
        self.client.connection.attention = self.stub
        self.assertEqual(self.session.length(0), 3)

    def test_an_append_on_a_connection_that_ended_is_not_repeated(self) -> None:
        row = rows(1, 1)
        self.session.append(0, row, row)
        self.cut()
        with self.assertRaises(kvtier.UnavailableError):
            self.session.append(0, row, row)
        self.session.refresh()
        self.assertEqual(self.session.length(0), 1)

    def test_threads_share_a_few_connections(self) -> None:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                with self.client.open(MODEL, RETRIEVAL) as session:
                    key, value, query = rows(20, 1, seed), rows(20, 1, seed + 100), rows(1, 2, seed)
                    session.append(0, key, value)
                    for _ in range(20):
                        session.attend(0, query)
                    ids = np.arange(20, dtype=np.int32)[None, :]
                    bits = session.fetch(0, ids).keys[0].astype(np.uint32) << 16
                    np.testing.assert_allclose(bits.view(np.float32), key[:, 0], rtol=2.0**-8)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertLessEqual(len(self.client.planes._idle), 4)

    def test_attachments_that_are_interrupted_take_no_room_of_others(self) -> None:
        planes = self.client.planes
        with unittest.mock.patch.object(planes, "_attach", side_effect=KeyboardInterrupt):
            for _ in range(5):  # one more than a client has channels
                planes._ask_again = 0.0
                with self.assertRaises(KeyboardInterrupt):
                    self.session.append(0, rows(1, 1), rows(1, 1))
        planes._ask_again = 0.0
        self.client.connection.attention = NoGrpc()
        self.session.append(0, rows(1, 1), rows(1, 1))
        self.client.connection.attention = self.stub

    def test_forks_of_a_process_do_not_use_its_connections(self) -> None:
        query, row = rows(1, 2), rows(1, 1)
        self.session.append(0, row, row)
        with unittest.mock.patch("os.getpid", return_value=os.getpid() + 1):
            for call in (
                lambda: self.session.append(0, row, row),
                lambda: self.session.attend(0, query),
                lambda: self.session.decode(0, query, row, row),
                lambda: self.client.open(MODEL, RETRIEVAL),
            ):
                with self.assertRaisesRegex(kvtier.FailedPreconditionError, "found a fork"):
                    call()
        self.session.attend(0, query)
        self.session.refresh()
        self.assertEqual(self.session.length(0), 1)

    def test_a_call_waits_for_a_connection_no_longer_than_its_timeout(self) -> None:
        clock, waits = [time.monotonic()], [0]

        def wait(timeout: float) -> bool:
            """A connection is given back each second, and another thread takes it."""
            waits[0] += 1
            self.assertLess(waits[0], 100, "waited in vain")
            clock[0] += min(timeout, 1.0)
            return timeout > 1.0

        planes = self.client.planes
        with unittest.mock.patch.object(planes, "_made", 4), unittest.mock.patch.object(
            planes, "_idle", []
        ), unittest.mock.patch.object(planes._returned, "wait", wait), unittest.mock.patch(
            "time.monotonic", lambda: clock[0]
        ):
            self.assertIsNone(planes._borrow())

    def test_what_does_not_fit_is_not_sent(self) -> None:
        self.session.append(0, rows(1, 1), rows(1, 1))
        (channel,) = self.client.planes._idle
        request = attention_pb2.AttendRequest(session=self.session.name)
        call = PlaneCall(frames.ATTEND, request, output_bytes=channel._room)
        call.add(request.query, rows(1, 2))
        self.assertIsNone(channel.run(call, attention_pb2.AttendResponse()))
        self.assertFalse(channel.broken)

    def test_clients_that_are_closed_hold_no_descriptors(self) -> None:
        def once() -> int:
            with kvtier.Client(self.server.address) as client, client.open(MODEL) as session:
                session.append(0, rows(1, 1), rows(1, 1))
                self.assertEqual(len(client.planes._idle), 1)
            del session, client
            gc.collect()
            return len([name for name in os.listdir("/proc/self/fd") if is_ours(name)])

        before = once()
        self.assertEqual(once(), before)


def is_ours(name: str) -> bool:
    """Whether a descriptor is shared memory; gRPC closes its own when it likes."""
    try:
        return "memfd" in os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return False


class WithoutPlaneTest(ServerTest):
    options = ("--data-listen", "none")

    def test_a_server_without_a_data_plane_is_asked_once_in_a_while(self) -> None:
        with kvtier.Client(self.server.address) as client:
            asked: list[Any] = []
            create = client.connection.shared_memory.CreateAttachment

            def counted(request: Any, **options: Any) -> Any:
                asked.append(request)
                return create(request, **options)

            client.connection.shared_memory.CreateAttachment = counted
            with client.open(MODEL, RETRIEVAL) as session:
                session.append(0, rows(3, 1), rows(3, 1))
                session.attend(0, rows(1, 2))
                self.assertEqual(session.length(0), 3)
                self.assertEqual(len(asked), 1)
                self.assertEqual(asked[0].process_id, os.getpid())
                with unittest.mock.patch("kvtier.data_plane.time.monotonic", return_value=1e9):
                    session.attend(0, rows(1, 2))
                self.assertEqual(len(asked), 2)  # after a while


class HostileServerTest(unittest.TestCase):
    """A server that sends what it is told to send."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.addCleanup(folder.cleanup)
        self.path = f"{folder.name}/data"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(self.listener.close)
        self.listener.bind(self.path)
        self.listener.listen()

    def serve(self, answer: Callable[[socket.socket], None]) -> None:
        def run() -> None:
            peer, _ = self.listener.accept()
            with peer:
                answer(peer)
                while peer.recv(1 << 16):  # until the client has gone
                    pass

        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join)

    @staticmethod
    def request_of(peer: socket.socket) -> frames.Header:
        head = peer.recv(frames.HEADER_BYTES, socket.MSG_WAITALL)
        header = frames.decode_header(head)
        peer.recv(header.control_bytes, socket.MSG_WAITALL)
        return header

    def attach(self, peer: socket.socket, seals: int = SEALS) -> None:
        header = self.request_of(peer)
        control = struct.pack("<IIIQ", 1, 1, frames.STAGING, STAGING)
        region = os.memfd_create("staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(region, STAGING)
        fcntl.fcntl(region, fcntl.F_ADD_SEALS, seals)
        head = frames.encode_header(frames.ATTACHED, header.request_id, control)
        socket.send_fds(peer, [head + control], [region])
        os.close(region)

    def call(self, channel: Channel) -> attention_pb2.AttendResponse | None:
        request = attention_pb2.AttendRequest(session="sessions/x")
        call = PlaneCall(frames.ATTEND, request, 1024)
        call.add(request.query, rows(1, 2))
        return channel.run(call, attention_pb2.AttendResponse())

    def test_no_server_like_this_is_attached_to(self) -> None:
        cases: list[tuple[Callable[[socket.socket], None], type[Exception]]] = [
            (lambda peer: peer.shutdown(socket.SHUT_WR), ConnectionError),
            (lambda peer: peer.sendall(bytes(100)), frames.FrameError),
            (lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4), frames.FrameError),
            (lambda peer: peer.sendall(frames.encode_header(9, 0, b"")), kvtier.ClientError),
            (lambda peer: peer.sendall(frames.encode_header(4, 0, b"")), kvtier.UnavailableError),
            (lambda peer: peer.sendall(self.attached_without_memory()), frames.FrameError),
            (lambda peer: self.attach(peer, seals=0), frames.FrameError),
            (lambda peer: self.attach(peer, seals=fcntl.F_SEAL_SHRINK), frames.FrameError),
        ]
        for answer, error in cases:
            self.serve(answer)
            with self.assertRaises(error):
                Channel(self.path, bytes(32), time.monotonic() + 30.0)

    @staticmethod
    def attached_without_memory() -> bytes:
        control = struct.pack("<IIIQ", 1, 1, frames.STAGING, STAGING)
        return frames.encode_header(frames.ATTACHED, 1, control) + control

    def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_the_timeout(self) -> None:
        self.serve(self.attach)
        channel = Channel(self.path, bytes(32), time.monotonic() + 30.0)
        self.addCleanup(channel.close)  # before the server's thread is waited for
        channel.deadline = time.monotonic() + 0.2
        with self.assertRaises(kvtier.DeadlineExceededError):
            self.call(channel)
        self.assertTrue(channel.broken)

    def test_batches_of_a_call_end_by_one_deadline(self) -> None:
        clock, asked = [0.0], []
        handles = ["h" * 32] * 600  # three batches

        def answer(peer: socket.socket) -> None:
            self.attach(peer)
            while len(asked) < 3 and (head := peer.recv(frames.HEADER_BYTES, socket.MSG_WAITALL)):
                header = frames.decode_header(head)
                asked.append(peer.recv(header.control_bytes, socket.MSG_WAITALL))
                clock[0] += 20.0
                control = struct.pack("<I", 0)
                reply = frames.encode_header(frames.PAGES, header.request_id, control)
                peer.sendall(reply + control)

        self.serve(answer)
        with unittest.mock.patch("time.monotonic", lambda: clock[0]):
            channel = Channel(self.path, bytes(32), 30.0)
            self.addCleanup(channel.close)
            channel.arena = unittest.mock.Mock()
            with self.assertRaisesRegex(kvtier.DeadlineExceededError, "the deadline has passed"):
                page_plane.read(channel, handles, 4096, np.empty, [None] * 600, set())
        self.assertEqual(len(asked), 2)
        self.assertFalse(channel.broken)

    def replied(self, control: bytes, type: int = frames.REPLY, flags: int = 0) -> Any:
        """Returns what a call raises that is answered so, and whether it broke the channel."""

        def answer(peer: socket.socket) -> None:
            self.attach(peer)
            header = self.request_of(peer)
            head = frames.encode_header(type, header.request_id, control)
            head = head[:8] + struct.pack("<I", flags) + head[12:36]
            peer.sendall(head + struct.pack("<I", frames.crc32c(head)) + control)

        self.serve(answer)
        channel = Channel(self.path, bytes(32), time.monotonic() + 30.0)
        try:
            self.call(channel)
        except kvtier.ClientError as error:
            return error, channel.broken
        finally:
            channel.close()
        return None, channel.broken

    def test_replies_that_are_none_break_the_channel(self) -> None:
        response = attention_pb2.AttendResponse()
        response.out.shape.append(1)
        message = response.SerializeToString()
        within = struct.pack("<IQQI", 1, STAGING - 8, 8, len(message)) + message
        self.assertEqual(self.replied(within), (None, False))
        for offset, size in ((STAGING - 8, 9), (STAGING + 1, 0), (1 << 63, 1 << 63), (0, 1 << 40)):
            control = struct.pack("<IQQI", 1, offset, size, len(message)) + message
            error, broken = self.replied(control)
            self.assertIsInstance(error, kvtier.UnavailableError)
            self.assertTrue(broken)
        others = [
            struct.pack("<II", 0, len(message)) + message,  # fewer tensors than the reply has
            struct.pack("<III", 0, 3, 0xFFFFFF)[:11],  # no message
            b"",
        ]
        for control in others:
            error, broken = self.replied(control)
            self.assertIsInstance(error, kvtier.UnavailableError)
            self.assertTrue(broken)

    def test_refusals_leave_the_channel_whole_and_farewells_do_not(self) -> None:
        status = status_pb2.ItemStatus(code=8, reason="QUOTA_EXCEEDED", message="too much")
        control = status.SerializeToString()
        error, broken = self.replied(control, flags=frames.FAILED)
        self.assertIsInstance(error, kvtier.QuotaExceededError)
        self.assertFalse(broken)
        error, broken = self.replied(control, type=frames.GO_AWAY)
        self.assertIsInstance(error, kvtier.QuotaExceededError)
        self.assertTrue(broken)


if __name__ == "__main__":
    unittest.main()
