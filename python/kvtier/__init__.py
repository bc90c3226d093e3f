"""KV cache, selection and attention beside a model: in another process (`Client`), or in this one
(`Engine`, `Session`, `BatchItem` and `PagedSketches`, which the package kvtier-engine brings)."""

from typing import TYPE_CHECKING, Any

from kvtier.admin import (
    AdminClient,
    EvictedPages,
    LogLevel,
    ServerInfo,
    TenantStatus,
    default_admin_server,
)
from kvtier.client import (
    AttendItem,
    AttendOutcome,
    Client,
    DecodeItem,
    FetchItem,
    FetchOutcome,
    SelectItem,
    SelectOutcome,
    SessionInfo,
    default_server,
)
from kvtier.config import (
    AttendOptions,
    DType,
    Estimator,
    LayerConfig,
    LayerMode,
    ModelConfig,
    PlaneKind,
    RecallTarget,
    RetrievalConfig,
    Selection,
    SelectionRule,
    SessionMemory,
    SketchCode,
    SketchConfig,
    ValueWeighting,
)
from kvtier.connection import ClientOptions
from kvtier.device import DeviceTensor, SharedDeviceMemory
from kvtier.engine_config import (
    Backend,
    HostAllocation,
    RowCachePolicy,
    KvPlacement,
    MemoryConfig,
    PageFormat,
)
from kvtier.errors import (
    AbortedError,
    CancelledError,
    ClientError,
    DataLossError,
    DeadlineExceededError,
    Details,
    ErrorCode,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    LeaseExpiredError,
    NotFoundError,
    PositionMismatchError,
    QuotaExceededError,
    ResourceExhaustedError,
    ServerEpochError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from kvtier.page_calls import AsyncPages, PageFutures
from kvtier.pages import FoundPage, GetOutcome, PagePut, PutOutcome, RemotePages
from kvtier.session import AttendResult, FetchResult, Outputs, RemoteSession, SelectResult

if TYPE_CHECKING:
    from kvtier_engine import BatchItem as BatchItem
    from kvtier_engine import Engine as Engine
    from kvtier_engine import PagedSketches as PagedSketches
    from kvtier_engine import Session as Session
    from kvtier_engine import device_bytes_for as device_bytes_for
    from kvtier_engine import session_memory as session_memory

__version__ = "0.1.0"

_OF_THE_ENGINE = (
    "BatchItem",
    "Engine",
    "PagedSketches",
    "Session",
    "device_bytes_for",
    "session_memory",
)

__all__ = [
    "AbortedError",
    "AdminClient",
    "AsyncPages",
    "AttendItem",
    "AttendOptions",
    "AttendOutcome",
    "AttendResult",
    "Backend",
    "CancelledError",
    "Client",
    "ClientError",
    "ClientOptions",
    "DType",
    "DataLossError",
    "DeadlineExceededError",
    "DecodeItem",
    "Details",
    "DeviceTensor",
    "ErrorCode",
    "Estimator",
    "EvictedPages",
    "FailedPreconditionError",
    "FetchItem",
    "FetchOutcome",
    "FetchResult",
    "FieldViolation",
    "FoundPage",
    "GetOutcome",
    "HostAllocation",
    "RowCachePolicy",
    "InternalError",
    "InvalidArgumentError",
    "KvPlacement",
    "LayerConfig",
    "LayerMode",
    "LeaseExpiredError",
    "LogLevel",
    "MemoryConfig",
    "ModelConfig",
    "NotFoundError",
    "Outputs",
    "PageFormat",
    "PageFutures",
    "PagePut",
    "PlaneKind",
    "PositionMismatchError",
    "PutOutcome",
    "QuotaExceededError",
    "RecallTarget",
    "RemotePages",
    "RemoteSession",
    "ResourceExhaustedError",
    "RetrievalConfig",
    "SelectItem",
    "SelectOutcome",
    "SelectResult",
    "Selection",
    "SelectionRule",
    "ServerEpochError",
    "ServerInfo",
    "SessionInfo",
    "SessionMemory",
    "SharedDeviceMemory",
    "SketchCode",
    "SketchConfig",
    "TenantStatus",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "ValueWeighting",
    "default_admin_server",
    "default_server",
]


def __getattr__(name: str) -> Any:
    if name not in _OF_THE_ENGINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import kvtier_engine
    except ModuleNotFoundError as error:
        if error.name != "kvtier_engine":
            raise
        raise ImportError(
            f"kvtier.{name}: expected the package kvtier-engine, found none "
            "(in a checkout: pip install ./python ./python/engine)"
        ) from error
    return getattr(kvtier_engine, name)
