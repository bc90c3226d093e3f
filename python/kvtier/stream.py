"""Steps of one session over one stream."""

from __future__ import annotations

import queue
from typing import Any, Iterator

import grpc

from kvtier.connection import Connection, Watchdog
from kvtier.errors import ClientError, ErrorCode, make_error
from kvtier.v1 import attention_pb2


class DecodeStream:
    """Requests and replies that alternate, each within the deadline of its call. Opened by the first
    step, and anew after one that failed. Used by one thread at a time."""

    def __init__(self, connection: Connection, watchdog: Watchdog) -> None:
        self._connection = connection
        self._watchdog = watchdog
        self._requests: queue.SimpleQueue[attention_pb2.DecodeRequest | None] | None = None
        self._call: Any = None

    def __del__(self) -> None:
        if self._requests is not None:
            self._requests.put(None)  # ends the thread of grpc that waits for requests

    def exchange(self, request: attention_pb2.DecodeRequest) -> attention_pb2.DecodeResponse:
        """Sends a request and waits for its reply."""
        timeout = self._connection.seconds_left()
        if self._requests is None:
            self._open()
        assert self._requests is not None
        failure: ClientError | None = None
        response: attention_pb2.DecodeResponse | None = None
        try:
            self._requests.put(request)
            self._watchdog.start(self._call, timeout)
            response = next(self._call)
        except StopIteration:
            failure = make_error(ErrorCode.UNAVAILABLE, "the server ended the stream")
        except grpc.RpcError as error:
            failure = self._connection.error_of(error)
        finally:
            expired = self._watchdog.stop(self._call)
            if response is None:
                self.close()  # also when interrupted: a later step would take the reply of this one
        if response is not None:
            return response
        if expired:
            failure = make_error(
                ErrorCode.DEADLINE_EXCEEDED, f"the step took longer than {timeout:.3g} s"
            )
        assert failure is not None
        raise failure

    def close(self) -> None:
        """Ends the stream."""
        if self._requests is None:
            return
        self._requests.put(None)
        self._requests = None
        self._call.cancel()
        self._call = None

    def _open(self) -> None:
        requests: queue.SimpleQueue[attention_pb2.DecodeRequest | None] = queue.SimpleQueue()

        def sent() -> Iterator[attention_pb2.DecodeRequest]:
            while (request := requests.get()) is not None:
                yield request

        with self._connection.translated():
            self._call = self._connection.attention.Decode(
                sent(), metadata=self._connection.metadata
            )
        self._requests = requests
