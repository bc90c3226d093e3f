"""What a call raises: one class per status code, and some for a reason."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Mapping

import grpc
from google.rpc import error_details_pb2, status_pb2


class ErrorCode(enum.IntEnum):
    """gRPC's status codes."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True)
class FieldViolation:
    """A field of the request that is wrong: its path, and why."""

    field: str
    description: str


@dataclass(frozen=True)
class Details:
    """What the server says beside code and message."""

    #: Such as "QUOTA_EXCEEDED" or "LEASE_EXPIRED"; empty when there was no answer.
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    #: Seconds after which to call again; None: no hint.
    retry_delay: float | None = None


class ClientError(Exception):
    """A call that the client, the way to the server or the server has refused."""

    def __init__(self, code: ErrorCode, message: str, details: Details = Details()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception's own would call the class with the message alone.
        return type(self), (self.code, self.message, self.details)

    @property
    def reason(self) -> str:
        return self.details.reason

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason and self.reason != self.code.name else ""
        return f"{self.code.name}{reason}: {self.message}"


class CancelledError(ClientError):
    pass


class InvalidArgumentError(ClientError, ValueError):
    pass


class DeadlineExceededError(ClientError, TimeoutError):
    pass


class NotFoundError(ClientError):
    pass


class ResourceExhaustedError(ClientError):
    pass


class QuotaExceededError(ResourceExhaustedError):
    pass


class FailedPreconditionError(ClientError):
    pass


class LeaseExpiredError(FailedPreconditionError):
    pass


class AbortedError(ClientError):
    pass


class ServerEpochError(AbortedError):
    """The session is of an earlier start of the server."""


class PositionMismatchError(AbortedError):
    """The chunk is not the layer's next: it may be stored already."""


class UnimplementedError(ClientError, NotImplementedError):
    pass


class InternalError(ClientError):
    pass


class UnavailableError(ClientError, ConnectionError):
    pass


class DataLossError(ClientError):
    pass


class UnauthenticatedError(ClientError, PermissionError):
    pass


_BY_CODE: dict[ErrorCode, type[ClientError]] = {
    ErrorCode.CANCELLED: CancelledError,
    ErrorCode.INVALID_ARGUMENT: InvalidArgumentError,
    ErrorCode.OUT_OF_RANGE: InvalidArgumentError,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    ErrorCode.NOT_FOUND: NotFoundError,
    ErrorCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    ErrorCode.FAILED_PRECONDITION: FailedPreconditionError,
    ErrorCode.ABORTED: AbortedError,
    ErrorCode.UNIMPLEMENTED: UnimplementedError,
    ErrorCode.INTERNAL: InternalError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.DATA_LOSS: DataLossError,
    ErrorCode.UNAUTHENTICATED: UnauthenticatedError,
    ErrorCode.PERMISSION_DENIED: UnauthenticatedError,
}
_BY_REASON: dict[str, type[ClientError]] = {
    "QUOTA_EXCEEDED": QuotaExceededError,
    "LEASE_EXPIRED": LeaseExpiredError,
    "SERVER_EPOCH": ServerEpochError,
    "POSITION_MISMATCH": PositionMismatchError,
}
_STATUS_DETAILS = "grpc-status-details-bin"


def make_error(code: int, message: str, details: Details = Details()) -> ClientError:
    """Returns the error of a status code that is not OK."""
    try:
        known = ErrorCode(code)
    except ValueError:
        known = ErrorCode.UNKNOWN
    kind = _BY_CODE.get(known, ClientError)
    special = _BY_REASON.get(details.reason)
    if special is not None and issubclass(special, kind):
        kind = special
    return kind(known, message, details)


def invalid(message: str) -> InvalidArgumentError:
    """Returns the error of an argument that the client itself refuses."""
    return InvalidArgumentError(ErrorCode.INVALID_ARGUMENT, message)


def without_package(error: ImportError, command: str) -> str:
    """Returns the reason why a package, which `command` installs, cannot be imported."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return str(error)
    package = error.name.replace("_", "-")
    return f"expected the package {package}, found none (in a checkout: {command})"


def error_of(failure: Any) -> ClientError:
    """Returns the error of a call that failed (`grpc.RpcError`, which is the call as well)."""
    code: grpc.StatusCode = failure.code()
    return make_error(code.value[0], failure.details() or "", _details_of(failure))


def _details_of(failure: Any) -> Details:
    status = status_pb2.Status()
    for key, value in failure.trailing_metadata() or ():
        if key == _STATUS_DETAILS:
            try:
                status.ParseFromString(value)
            except Exception:  # protobuf's DecodeError; what cannot be read is ignored
                return Details()
    reason = ""
    metadata: dict[str, str] = {}
    violations: tuple[FieldViolation, ...] = ()
    retry_delay = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
            metadata = dict(info.metadata)
        elif detail.Unpack(request):
            violations = tuple(
                FieldViolation(v.field, v.description) for v in request.field_violations
            )
        elif detail.Unpack(retry):
            retry_delay = retry.retry_delay.seconds + retry.retry_delay.nanos * 1e-9
    return Details(reason, metadata, violations, retry_delay)
