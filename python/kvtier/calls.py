"""What makes calls of a server, and what lives there under a name by a lease."""

from __future__ import annotations

import threading
import uuid
import weakref
from typing import Any, Callable

from google.protobuf.duration_pb2 import Duration

from kvtier.connection import ClientOptions, Connection, Watchdog
from kvtier.data_plane import PlaneCall, Planes, Reply
from kvtier.errors import ClientError, ErrorCode, make_error
from kvtier.lease import Closing, LeaseKeeper

_RELEASE_SECONDS = 1.0


class Caller(Closing):
    """A connection to a server, its data plane, and the threads that renew leases and end calls. The part of a client
    that sessions and pages use."""

    def __init__(self, options: ClientOptions) -> None:
        self.connection = Connection(options)
        self.planes = Planes(self.connection)
        self.watchdog = Watchdog()
        self.leases = LeaseKeeper(self.connection)
        self._end = weakref.finalize(
            self, _end, self.leases, self.watchdog, self.planes, self.connection
        )

    def close(self) -> None:
        """Ends the connection. Sessions that are open are released by the end of their leases."""
        self._end()

    def run(self, call: PlaneCall, response: Reply, method: Callable[..., Any]) -> Reply:
        """Makes a call that may be repeated, over the data plane or over gRPC."""
        found = self.planes.repeatable(call, response)
        if found is not None:
            return found
        reply: Reply = self.connection.call(method, call.inline())
        return reply

    @staticmethod
    def make_request_id() -> str:
        return str(uuid.uuid4())


class Leased(Closing):
    """Lives in the server under a name, by a lease that is renewed as long as the object lives.
    `kind`: what errors call it."""

    def __init__(self, client: Caller, kind: str, name: str, ttl: Duration) -> None:
        self._client = client
        self._connection = client.connection
        self._kind = kind
        self._name = name
        self._closing = threading.Lock()
        self._open = True
        client.leases.add(self, name, ttl.seconds + ttl.nanos * 1e-9)

    @property
    def name(self) -> str:
        return self._name

    def open_name(self) -> str:
        """Returns the name, for a request. `FailedPreconditionError` after `close`."""
        if not self._open:
            message = f"{self._kind}: expected an open one, found one that is closed"
            raise make_error(ErrorCode.FAILED_PRECONDITION, message)
        return self._name

    def check_process(self) -> None:
        """As `Connection.check_process`."""
        self._connection.check_process()

    def _end(self, method: Callable[..., Any], request: Any) -> None:
        """Ends the lease by a call, once, waiting a second at most. When this fails, it runs out. In a
        fork of the process the lease stays that of the other process."""
        if self._connection.is_forked:
            self._open = False
            return
        with self._closing:
            if not self._open:
                return
            self._open = False
        self._client.leases.remove(self._name)
        try:
            self._connection.call_once(method, request, _RELEASE_SECONDS)
        except ClientError:
            pass


def _end(
    leases: LeaseKeeper, watchdog: Watchdog, planes: Planes, connection: Connection
) -> None:
    if connection.is_forked:
        return  # its threads and sockets are those of the other process
    leases.close()
    watchdog.close()
    planes.close()
    connection.close()
