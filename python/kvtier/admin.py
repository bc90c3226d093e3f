"""What operators of `kvtier serve` ask over its admin socket."""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtier.connection import ClientOptions, Connection, default_folder
from kvtier.lease import Closing
from kvtier.v1 import admin_pb2


@dataclass(frozen=True)
class ServerInfo:
    version: str
    #: Differs after every start.
    epoch: int
    #: It ends: no new calls are taken.
    draining: bool
    #: Seconds.
    uptime: int


@dataclass(frozen=True)
class TenantStatus:
    name: str
    sessions: int
    #: Of keys and values.
    kv_bytes: int
    max_sessions: int
    max_kv_bytes: int


class EvictedPages(NamedTuple):
    """`bytes`: of their places, which the tenant is no longer charged for."""

    pages: int
    bytes: int


class LogLevel(enum.Enum):
    """The least that a server logs."""

    DEBUG = "LOG_LEVEL_DEBUG"
    INFO = "LOG_LEVEL_INFO"
    WARNING = "LOG_LEVEL_WARNING"
    ERROR = "LOG_LEVEL_ERROR"
    OFF = "LOG_LEVEL_OFF"


def default_admin_server() -> str:
    """Returns the address of the admin socket that `kvtier serve` has by default."""
    return f"unix:{default_folder()}/admin.sock"


class AdminClient(Closing):
    """As `kvtier::AdminClient`: a connection to the admin socket (`--admin-listen`), made by the
    first call. Thread-safe. `server`: "unix:PATH", by default that of `kvtier serve` without
    options; the other arguments: `ClientOptions`."""

    def __init__(
        self, server: str | None = None, *, timeout: float = 30.0, attempts: int = 4
    ) -> None:
        options = ClientOptions(
            server=default_admin_server() if server is None else server,
            timeout=timeout,
            attempts=attempts,
        )
        self._connection = Connection(options, is_admin=True)
        self._end = weakref.finalize(self, self._connection.close)

    def info(self) -> ServerInfo:
        found = self._call("GetServerInfo", admin_pb2.GetServerInfoRequest())
        draining = found.state == admin_pb2.SERVER_STATE_DRAINING
        return ServerInfo(found.version, found.server_epoch, draining, found.uptime.seconds)

    def stats(self) -> admin_pb2.GetStatsResponse:
        """Returns counters since the start, and what there is now, as admin.proto has them."""
        found: admin_pb2.GetStatsResponse = self._call("GetStats", admin_pb2.GetStatsRequest())
        return found

    def metrics(self) -> str:
        """Returns what the metrics listener has, in the text format of Prometheus."""
        return str(self._call("GetMetrics", admin_pb2.GetMetricsRequest()).text)

    def drain(self) -> None:
        """Starts the end of the server, as SIGTERM does: no new calls, those in flight finish."""
        self._connection.call_once(self._connection.admin.Drain, admin_pb2.DrainRequest())

    def tenants(self) -> list[TenantStatus]:
        found: list[TenantStatus] = []
        token = ""
        while True:
            request = admin_pb2.ListTenantsRequest(page_token=token)
            page = self._call("ListTenants", request)
            found += map(_status_of, page.tenants)
            token = page.next_page_token
            if not token:
                return found

    def set_quota(self, tenant: str, *, max_sessions: int, max_kv_bytes: int) -> TenantStatus:
        """Changes what a tenant may hold, until the server ends. What it holds already stays."""
        quota = admin_pb2.TenantQuota(max_sessions=max_sessions, max_kv_bytes=max_kv_bytes)
        request = admin_pb2.SetTenantQuotaRequest(name=tenant, quota=quota)
        return _status_of(self._call("SetTenantQuota", request).tenant)

    def evict_tenant(self, tenant: str) -> EvictedPages:
        """Deletes the pages of a tenant in the page cache that no client has pinned or used since the
        call began. Its sessions and leases stay. Returns what the last attempt has deleted, where
        the reply of one before was lost."""
        found = self._call("EvictTenant", admin_pb2.EvictTenantRequest(name=tenant))
        return EvictedPages(found.pages, found.bytes)

    def set_log_level(self, level: LogLevel) -> None:
        """Changes what the server, or its worker, logs until it ends."""
        request = admin_pb2.SetLogLevelRequest(level=level.value)
        self._call("SetLogLevel", request)

    def close(self) -> None:
        self._end()

    def _call(self, method: str, request: Any) -> Any:
        return self._connection.call(getattr(self._connection.admin, method), request)


def _status_of(tenant: admin_pb2.Tenant) -> TenantStatus:
    quota = tenant.quota
    return TenantStatus(
        tenant.name, tenant.sessions, tenant.kv_bytes, quota.max_sessions, quota.max_kv_bytes
    )
