"""What the client does when a server is slow, overloaded or gone, by one with scripted answers."""

from __future__ import annotations

import dataclasses
import pickle
import queue
import re
import socket
import tempfile
import threading
import time
import unittest
import unittest.mock
from concurrent import futures
from pathlib import Path
from typing import Any, Callable, Iterator

import grpc
import kvtier
import numpy as np
from google.rpc import error_details_pb2, status_pb2
from kvtier.connection import ClientOptions, Watchdog, delay_before
from kvtier.errors import Details, FieldViolation, make_error
from kvtier.v1 import (
    admin_pb2,
    attention_pb2,
    attention_pb2_grpc,
    page_pb2,
    session_pb2,
    session_pb2_grpc,
    shared_memory_pb2,
    tensor_pb2,
    transfer_pb2,
)

MODEL = kvtier.ModelConfig(layers=1, query_heads=1, kv_heads=1, head_dim=64)
ROW = np.ones((1, 1, 64), np.float32)
DETAILS = "grpc-status-details-bin"

Refusal = tuple[grpc.StatusCode, tuple[Any, ...]]
OVERLOAD = error_details_pb2.RetryInfo()
OVERLOAD.retry_delay.nanos = 1_000_000


def reason(text: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=text, domain="kvtier", metadata={"where": "here"})


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode, details: tuple[Any, ...]) -> None:
    status = status_pb2.Status(code=code.value[0])
    for detail in details:
        status.details.add().Pack(detail)
    context.set_trailing_metadata(((DETAILS, status.SerializeToString()),))
    context.abort(code, "refused by the script")


class FakeServer(session_pb2_grpc.SessionServiceServicer, attention_pb2_grpc.AttentionServiceServicer):
    """Keeps the requests that came, and refuses those for which there is a refusal."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.refusals: list[Refusal] = []
        self.never = threading.Event()  # set at the end of the test: frees calls that hang
        self.hang = False

    def _take(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        if self.refusals:
            refuse(context, *self.refusals.pop(0))
        if self.hang:
            self.never.wait()

    def CreateSession(self, request: Any, context: Any) -> Any:
        self._take(request, context)
        session = session_pb2.Session(name="sessions/x", layer_lengths=[0])
        session.lease_ttl.seconds = 60
        return session_pb2.CreateSessionResponse(session=session)

    def ReleaseSession(self, request: Any, context: Any) -> Any:
        return session_pb2.ReleaseSessionResponse()

    def GetSession(self, request: Any, context: Any) -> Any:
        self._take(request, context)
        return session_pb2.GetSessionResponse(
            session=session_pb2.Session(name=request.name, layer_lengths=[3])
        )

    def Append(self, requests: Iterator[Any], context: Any) -> Any:
        for request in requests:
            self._take(request, context)
        return attention_pb2.AppendResponse(layer_lengths=[1])

    def Decode(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            self._take(request, context)
            out = tensor_pb2.Tensor(
                dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, 1, 64], data=ROW.tobytes()
            )
            lse = tensor_pb2.Tensor(
                dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, 1], data=bytes(4)
            )
            yield attention_pb2.DecodeResponse(step=request.step, out=out, lse=lse)


class RulesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.addCleanup(folder.cleanup)
        self.address = f"unix:{folder.name}/s"
        self.fake = FakeServer()
        server = grpc.server(futures.ThreadPoolExecutor(8))
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.fake, server)  # type: ignore[no-untyped-call]
        attention_pb2_grpc.add_AttentionServiceServicer_to_server(self.fake, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(self.address)
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        self.addCleanup(self.fake.never.set)

    def open(self, **options: Any) -> kvtier.RemoteSession:
        self.client = kvtier.Client(self.address, **options)
        self.addCleanup(self.client.close)
        session = self.client.open(MODEL)
        self.addCleanup(session.close)
        self.fake.requests.clear()
        return session

    def set_timeout(self, seconds: float) -> None:
        """Of calls from now on."""
        connection = self.client.connection
        connection.options = dataclasses.replace(connection.options, timeout=seconds)

    def test_what_cannot_be_taken_now_is_asked_again_with_the_same_id(self) -> None:
        self.fake.refusals = [
            (grpc.StatusCode.UNAVAILABLE, (reason("DRAINING"),)),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, (reason("OVERLOADED"), OVERLOAD)),
        ]
        with kvtier.Client(self.address) as client:
            client.open(MODEL).close()
        ids = [request.request_id for request in self.fake.requests]
        self.assertEqual(len(ids), 3)
        self.assertEqual(len(set(ids)), 1)

    def test_a_server_that_is_not_there_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))  # and does not listen
            for server in (
                f"unix:{folder}/none.sock",
                f"unix:{folder}/none/none.sock",
                f"tcp:127.0.0.1:{bound.getsockname()[1]}",
            ):
                with kvtier.Client(server, insecure_tcp=True, attempts=1) as client:
                    for call in (lambda: client.open(MODEL), lambda: client.open_pages("m", 4096)):
                        with self.assertRaises(kvtier.UnavailableError) as caught:
                            call()
                        self.assertEqual(
                            caught.exception.message,
                            f"server: expected kvtier serve at {server}, found none "
                            "(start it: kvtier serve)",
                        )

    def test_tokens_that_no_header_takes_are_refused(self) -> None:
        for token in ("x\n", "a b", "\u00e9", "\x7f"):
            with self.subTest(token), self.assertRaisesRegex(
                kvtier.InvalidArgumentError,
                "token: expected printable ASCII without white space, found other characters",
            ):
                kvtier.Client("unix:/x", token=token)

    def test_attempts_are_bounded(self) -> None:
        session = self.open(attempts=2)
        self.fake.refusals = [(grpc.StatusCode.UNAVAILABLE, ())] * 5
        with self.assertRaises(kvtier.UnavailableError) as caught:
            session.refresh()
        self.assertNotIn("expected kvtier serve", caught.exception.message)
        self.assertEqual(len(self.fake.requests), 2)

    def test_quotas_and_wrong_arguments_are_not_asked_again(self) -> None:
        session = self.open()
        violation = error_details_pb2.BadRequest(
            field_violations=[error_details_pb2.BadRequest.FieldViolation(field="name", description="d")]
        )
        self.fake.refusals = [
            (grpc.StatusCode.RESOURCE_EXHAUSTED, (reason("QUOTA_EXCEEDED"),)),
            (grpc.StatusCode.INVALID_ARGUMENT, (reason("INVALID_ARGUMENT"), violation)),
        ]
        with self.assertRaises(kvtier.QuotaExceededError) as quota:
            session.refresh()
        self.assertEqual(quota.exception.details.metadata, {"where": "here"})
        self.assertIsNone(quota.exception.details.retry_delay)
        with self.assertRaises(ValueError) as wrong:
            session.refresh()
        assert isinstance(wrong.exception, kvtier.InvalidArgumentError)
        self.assertEqual(wrong.exception.details.violations, (kvtier.FieldViolation("name", "d"),))
        self.assertEqual(len(self.fake.requests), 2)

    def test_an_append_is_sent_once(self) -> None:
        session = self.open()
        self.fake.refusals = [(grpc.StatusCode.UNAVAILABLE, ())]
        with self.assertRaises(kvtier.UnavailableError):
            session.append(0, ROW, ROW)
        self.assertEqual(len(self.fake.requests), 1)

    def test_a_step_whose_reply_was_lost_is_asked_again_unchanged(self) -> None:
        session = self.open()
        session.decode(0, ROW, ROW, ROW)
        self.fake.requests.clear()
        self.fake.refusals = [
            (grpc.StatusCode.UNAVAILABLE, ()),
            (grpc.StatusCode.FAILED_PRECONDITION, (reason("STREAM_IDLE"),)),
        ]
        out, _ = session.decode(0, ROW, ROW, ROW)
        np.testing.assert_array_equal(out, ROW)
        self.assertEqual(len(self.fake.requests), 3)
        for request in self.fake.requests:
            self.assertEqual(request, self.fake.requests[0])
        self.assertEqual([self.fake.requests[0].step, self.fake.requests[0].position], [2, 1])
        self.assertEqual(session.length(0), 2)

    def test_no_call_waits_longer_than_the_timeout(self) -> None:
        session = self.open()
        self.set_timeout(0.2)
        self.fake.hang = True
        calls: list[Callable[[], Any]] = [
            session.refresh,
            lambda: session.append(0, ROW, ROW),
            lambda: session.decode(0, ROW, ROW, ROW),
        ]
        for call in calls:
            with self.assertRaises(kvtier.DeadlineExceededError):
                call()
        self.assertEqual(session.length(0), 0)

    def test_a_step_ends_by_the_deadline_of_its_thread(self) -> None:
        session = self.open()
        self.fake.hang = True
        with self.client.connection.deadline(0.2):
            with self.assertRaises(kvtier.DeadlineExceededError):
                session.decode(0, ROW, ROW, ROW)
            self.fake.requests.clear()
            with self.assertRaises(kvtier.DeadlineExceededError):
                session.decode(0, ROW, ROW, ROW)
        self.assertEqual(self.fake.requests, [])
        self.fake.hang = False
        session.decode(0, ROW, ROW, ROW)
        self.assertEqual(session.length(0), 1)

    def test_a_step_after_one_that_took_too_long_has_a_new_stream(self) -> None:
        session = self.open()
        self.set_timeout(0.5)
        self.fake.hang = True
        with self.assertRaises(kvtier.DeadlineExceededError):
            session.decode(0, ROW, ROW, ROW)
        self.fake.hang = False
        self.set_timeout(30.0)
        session.decode(0, ROW, ROW, ROW)
        self.assertEqual(session.length(0), 1)

    def test_a_step_after_one_that_was_interrupted_has_a_new_stream(self) -> None:
        session = self.open(data_plane=False)
        session.decode(0, ROW, ROW, ROW)
        stream = session._steps
        with unittest.mock.patch.object(stream, "_call") as call:
            call.__next__.side_effect = KeyboardInterrupt
            with self.assertRaises(KeyboardInterrupt):
                session.decode(0, ROW, ROW, ROW)
        request = attention_pb2.DecodeRequest(session=session.name, step=7)
        self.assertEqual(stream.exchange(request).step, 7)


class OptionsTest(unittest.TestCase):
    def test_options_that_do_not_go_together_are_refused(self) -> None:
        refused: list[tuple[dict[str, Any], str]] = [
            ({"server": "nowhere"}, "expected unix:PATH or tcp:HOST:PORT"),
            ({"server": "tcp:localhost:1"}, "expected TLS files for TCP, or insecure_tcp"),
            ({"server": "tcp:localhost:1", "tls_key": "x"}, "together, found some"),
            ({"server": "unix:/x", "timeout": 0}, "above 0 s and at most 1e.09, found 0"),
            ({"server": "unix:/x", "timeout": float("nan")}, "above 0 s .*, found nan"),
            ({"server": "unix:/x", "timeout": float("inf")}, "above 0 s .*, found inf"),
            ({"server": "unix:/x", "timeout": 1e10}, "above 0 s .*, found 10000000000"),
            ({"server": "unix:/x", "attempts": 0}, "at least 1, found 0"),
        ]
        before = threading.active_count()
        for options, message in refused:
            with self.subTest(message), self.assertRaisesRegex(
                kvtier.InvalidArgumentError, message
            ):
                kvtier.Client(**options)
        files = {name: "/nowhere" for name in ("tls_server_ca", "tls_certificate", "tls_key")}
        with self.assertRaisesRegex(kvtier.NotFoundError, "readable file, found /nowhere"):
            kvtier.Client("tcp:localhost:1", **files)  # type: ignore[arg-type]
        self.assertEqual(threading.active_count(), before)

    def test_a_token_is_in_no_text(self) -> None:
        options = ClientOptions("unix:/x", token="secret")
        self.assertNotIn("secret", f"{options} {options!r}")

    def test_an_error_is_aimed_at_where_nothing_is_given(self) -> None:
        by_score = {"rule": kvtier.SelectionRule.TOP_K}
        for settings, error, most in (
            ({}, 0.03, (10, 1000, 1389)),
            ({"coarse_bits": 2}, 0.0, (10, 1000, 2048)),
            (by_score, 0.0, (10, 1000, 2048)),
            ({"top_k": 512}, 0.0, (10, 512, 512)),
            ({"sparsity": 33.0}, 0.0, (1, 30, 30303)),
            ({"error_target": 0.1}, 0.1, (10, 125, 125)),
            ({"error_target": 0.001}, 0.001, (10, 1000, 1000000)),
            ({"error_target": 1e-200}, 1e-200, (10, 1000, 1000000)),
            ({"error_target": 0.1, "top_k": 100}, 0.1, (10, 100, 100)),
            ({"error_target": 0.1, "top_k": 500}, 0.1, (10, 125, 125)),
            ({"error_target": 0.1, "sparsity": 33.0}, 0.1, (1, 30, 30303)),
        ):
            with self.subTest(settings):
                config = kvtier.RetrievalConfig(**settings)
                self.assertEqual(config.error_in_force(), error)
                found = tuple(config.most_selected(visible) for visible in (10, 1000, 1000000))
                self.assertEqual(found, most)
                self.assertEqual((config.most_selected(0), config.most_selected(1)), (0, 1))
                nothing = not settings or settings in ({"coarse_bits": 2}, by_score)
                expected = dataclasses.replace(config, top_k=2048) if nothing else config
                self.assertEqual(config.with_fixed_k(), expected)

    def test_messages_have_all_that_a_configuration_has(self) -> None:
        config = kvtier.RetrievalConfig(sparsity=20.0, plane_kind=kvtier.PlaneKind.ORTHOGONAL)
        message = config.message()
        self.assertEqual(message.size.WhichOneof("size"), "sparsity")
        # "None given" is said, too: the server's own number would be in force otherwise.
        size = kvtier.RetrievalConfig().message().size
        self.assertEqual((size.WhichOneof("size"), size.top_k), ("top_k", 0))
        for field in message.DESCRIPTOR.fields:
            if field.has_presence:
                self.assertTrue(message.HasField(field.name), field.name)
        model = kvtier.ModelConfig(
            layers=1,
            layer_options=(kvtier.LayerConfig(kvtier.LayerMode.SLIDING_WINDOW, 128, 0.5, 30.0),),
        ).message()
        self.assertEqual(model.layer_options[0].window_tokens, 128)
        self.assertEqual(model.layer_options[0].softmax_scale, 0.5)


class ErrorsTest(unittest.TestCase):
    def test_every_code_has_its_class(self) -> None:
        self.assertEqual({code.value for code in kvtier.ErrorCode}, set(range(1, 17)))
        self.assertIsInstance(make_error(14, "m"), ConnectionError)
        self.assertIsInstance(make_error(4, "m"), TimeoutError)
        self.assertEqual(make_error(99, "m").code, kvtier.ErrorCode.UNKNOWN)
        # A reason that does not belong to the code changes nothing.
        odd = make_error(14, "m", Details(reason="LEASE_EXPIRED"))
        self.assertIs(type(odd), kvtier.UnavailableError)
        expired = make_error(9, "m", Details(reason="LEASE_EXPIRED"))
        self.assertEqual(str(expired), "FAILED_PRECONDITION (LEASE_EXPIRED): m")

    def test_errors_pass_between_processes(self) -> None:
        details = Details("QUOTA_EXCEEDED", {"quota": "sessions"}, (FieldViolation("a", "b"),), 0.5)
        for code in kvtier.ErrorCode:
            error = make_error(code.value, "why", details)
            found = pickle.loads(pickle.dumps(error))
            self.assertIs(type(found), type(error))
            self.assertEqual((found.code, found.message, found.details), (code, "why", details))
            self.assertEqual(str(found), str(error))

    def test_delays_are_bounded_and_follow_the_hint(self) -> None:
        for attempt in range(10):
            plain = delay_before(make_error(14, "m"), attempt)
            assert plain is not None
            self.assertTrue(0.05 <= plain <= 1.0, plain)
            hinted = delay_before(make_error(8, "m", Details(retry_delay=0.7)), attempt)
            assert hinted is not None
            self.assertTrue(0.35 <= hinted <= 1.0, hinted)
            long = delay_before(make_error(14, "m", Details(retry_delay=3600.0)), attempt)
            assert long is not None
            self.assertLessEqual(long, 1.0)
            for code in set(range(1, 17)) - {1, 14}:
                self.assertIsNone(delay_before(make_error(code, "m"), attempt))


class ApiTest(unittest.TestCase):
    def test_every_call_of_the_service_is_made_but_those_that_stay_out(self) -> None:
        package = Path(kvtier.__file__).parent
        sources = "".join(path.read_text() for path in package.glob("*.py"))
        files = (admin_pb2, attention_pb2, page_pb2, session_pb2, shared_memory_pb2, transfer_pb2)
        methods = [
            method.name
            for file in files
            for service in file.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        ]
        self.assertIn("Append", methods)
        unused = {name for name in methods if not re.search(rf'[."]{name}\b', sources)}
        # docs/service.md, section 7, says why.
        self.assertEqual(unused, {"BatchCommitPages", "BatchAbortPages", "ListAttachments"})


class WatchdogTest(unittest.TestCase):
    def test_cancels_what_is_late_and_nothing_else(self) -> None:
        class Call:
            def __init__(self) -> None:
                self.cancelled = threading.Event()

            def cancel(self) -> None:
                self.cancelled.set()

        watchdog = Watchdog()
        self.addCleanup(watchdog.close)
        late, in_time, ended = Call(), Call(), Call()
        watchdog.start(in_time, 3600.0)
        watchdog.start(ended, 3600.0)
        self.assertFalse(watchdog.stop(ended))
        start = time.monotonic()
        watchdog.start(late, 0.01)  # earlier than what the thread waits for
        self.assertTrue(late.cancelled.wait(30.0))
        self.assertGreaterEqual(time.monotonic() - start, 0.01)
        self.assertTrue(watchdog.stop(late))
        self.assertFalse(watchdog.stop(in_time))
        self.assertFalse(in_time.cancelled.is_set() or ended.cancelled.is_set())

    def test_may_be_closed_by_its_own_thread(self) -> None:
        closed: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        class Call:
            def cancel(self) -> None:
                try:
                    watchdog.close()
                    closed.put(None)
                except BaseException as failure:
                    closed.put(failure)

        watchdog = Watchdog()
        watchdog.start(Call(), 0.0)
        self.assertIsNone(closed.get(timeout=30.0))


if __name__ == "__main__":
    unittest.main()
