from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
LOG_LEVEL_DEBUG: LogLevel
LOG_LEVEL_ERROR: LogLevel
LOG_LEVEL_INFO: LogLevel
LOG_LEVEL_OFF: LogLevel
LOG_LEVEL_UNSPECIFIED: LogLevel
LOG_LEVEL_WARNING: LogLevel
METRICS_FORMAT_JSON: MetricsFormat
METRICS_FORMAT_UNSPECIFIED: MetricsFormat
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_UNSPECIFIED: ServerState

class CumulativeStats(_message.Message):
    __slots__ = ["bytes_device_resident", "bytes_device_to_host", "bytes_host_to_device", "bytes_sketch_read", "cold_steps", "nonfinite_tokens", "pages_evicted", "pages_lost", "pages_repaired", "pages_restored", "prefix_tokens_asked", "prefix_tokens_attached", "prefix_tokens_evicted", "queries", "row_cache_admissions", "row_cache_evictions", "row_cache_hits", "row_cache_misses", "rows_attended", "rows_corrupt", "rows_selected", "tier_wait", "tokens_appended"]
    BYTES_DEVICE_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_DEVICE_TO_HOST_FIELD_NUMBER: _ClassVar[int]
    BYTES_HOST_TO_DEVICE_FIELD_NUMBER: _ClassVar[int]
    BYTES_SKETCH_READ_FIELD_NUMBER: _ClassVar[int]
    COLD_STEPS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_LOST_FIELD_NUMBER: _ClassVar[int]
    PAGES_REPAIRED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESTORED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_ASKED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    ROWS_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    ROWS_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_SELECTED_FIELD_NUMBER: _ClassVar[int]
    ROW_CACHE_ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_CACHE_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    ROW_CACHE_MISSES_FIELD_NUMBER: _ClassVar[int]
    TIER_WAIT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_APPENDED_FIELD_NUMBER: _ClassVar[int]
    bytes_device_resident: int
    bytes_device_to_host: int
    bytes_host_to_device: int
    bytes_sketch_read: int
    cold_steps: int
    nonfinite_tokens: int
    pages_evicted: int
    pages_lost: int
    pages_repaired: int
    pages_restored: int
    prefix_tokens_asked: int
    prefix_tokens_attached: int
    prefix_tokens_evicted: int
    queries: int
    row_cache_admissions: int
    row_cache_evictions: int
    row_cache_hits: int
    row_cache_misses: int
    rows_attended: int
    rows_corrupt: int
    rows_selected: int
    tier_wait: _duration_pb2.Duration
    tokens_appended: int
    def __init__(self, tokens_appended: _Optional[int] = ..., queries: _Optional[int] = ..., rows_selected: _Optional[int] = ..., rows_attended: _Optional[int] = ..., bytes_host_to_device: _Optional[int] = ..., bytes_device_to_host: _Optional[int] = ..., bytes_device_resident: _Optional[int] = ..., bytes_sketch_read: _Optional[int] = ..., nonfinite_tokens: _Optional[int] = ..., pages_evicted: _Optional[int] = ..., pages_restored: _Optional[int] = ..., pages_repaired: _Optional[int] = ..., pages_lost: _Optional[int] = ..., cold_steps: _Optional[int] = ..., tier_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., prefix_tokens_asked: _Optional[int] = ..., prefix_tokens_attached: _Optional[int] = ..., prefix_tokens_evicted: _Optional[int] = ..., row_cache_hits: _Optional[int] = ..., row_cache_misses: _Optional[int] = ..., row_cache_admissions: _Optional[int] = ..., row_cache_evictions: _Optional[int] = ..., rows_corrupt: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class EvictTenantRequest(_message.Message):
    __slots__ = ["name"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class EvictTenantResponse(_message.Message):
    __slots__ = ["bytes", "pages"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    pages: int
    def __init__(self, pages: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ["format"]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    format: MetricsFormat
    def __init__(self, format: _Optional[_Union[MetricsFormat, str]] = ...) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ["text"]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ["server_epoch", "state", "uptime", "version"]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    server_epoch: int
    state: ServerState
    uptime: _duration_pb2.Duration
    version: str
    def __init__(self, version: _Optional[str] = ..., server_epoch: _Optional[int] = ..., state: _Optional[_Union[ServerState, str]] = ..., uptime: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ["cumulative", "page_cache", "service", "snapshot", "tiers"]
    CUMULATIVE_FIELD_NUMBER: _ClassVar[int]
    PAGE_CACHE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    cumulative: CumulativeStats
    page_cache: PageCacheStats
    service: ServiceStats
    snapshot: SnapshotStats
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    def __init__(self, cumulative: _Optional[_Union[CumulativeStats, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotStats, _Mapping]] = ..., service: _Optional[_Union[ServiceStats, _Mapping]] = ..., page_cache: _Optional[_Union[PageCacheStats, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ...) -> None: ...

class LatencyCounts(_message.Message):
    __slots__ = ["counts", "total"]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total: _duration_pb2.Duration
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., total: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ["page_size", "page_token"]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ["next_page_token", "tenants"]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    next_page_token: str
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class PageCacheStats(_message.Message):
    __slots__ = ["bytes_evicted", "bytes_read", "bytes_written", "checksum_failures", "committed_bytes", "committed_pages", "crc_mismatches", "free_bytes", "leases", "lookup_hits", "lookup_misses", "pages_aborted", "pages_committed", "pages_deleted", "pages_evicted", "pages_existed", "pages_reserved", "pinned_pages", "quarantined_bytes", "quarantined_pages", "refused_full", "refused_quota", "reservations_expired", "reserved_bytes", "reserved_pages", "stale_handles", "total_bytes"]
    BYTES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    CRC_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_HITS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_MISSES_FIELD_NUMBER: _ClassVar[int]
    PAGES_ABORTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_DELETED_FIELD_NUMBER: _ClassVar[int]
    PAGES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_EXISTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESERVED_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FULL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_QUOTA_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    STALE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes_evicted: int
    bytes_read: int
    bytes_written: int
    checksum_failures: int
    committed_bytes: int
    committed_pages: int
    crc_mismatches: int
    free_bytes: int
    leases: int
    lookup_hits: int
    lookup_misses: int
    pages_aborted: int
    pages_committed: int
    pages_deleted: int
    pages_evicted: int
    pages_existed: int
    pages_reserved: int
    pinned_pages: int
    quarantined_bytes: int
    quarantined_pages: int
    refused_full: int
    refused_quota: int
    reservations_expired: int
    reserved_bytes: int
    reserved_pages: int
    stale_handles: int
    total_bytes: int
    def __init__(self, total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., committed_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., reserved_pages: _Optional[int] = ..., committed_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., pinned_pages: _Optional[int] = ..., leases: _Optional[int] = ..., pages_reserved: _Optional[int] = ..., pages_committed: _Optional[int] = ..., pages_existed: _Optional[int] = ..., pages_aborted: _Optional[int] = ..., reservations_expired: _Optional[int] = ..., pages_deleted: _Optional[int] = ..., pages_evicted: _Optional[int] = ..., bytes_evicted: _Optional[int] = ..., lookup_hits: _Optional[int] = ..., lookup_misses: _Optional[int] = ..., stale_handles: _Optional[int] = ..., checksum_failures: _Optional[int] = ..., crc_mismatches: _Optional[int] = ..., refused_full: _Optional[int] = ..., refused_quota: _Optional[int] = ..., bytes_written: _Optional[int] = ..., bytes_read: _Optional[int] = ...) -> None: ...

class ServiceStats(_message.Message):
    __slots__ = ["admitted", "inflight_bytes", "inflight_bytes_limit", "leases_expired", "models", "received", "rejected", "sessions_created", "sessions_released"]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_BYTES_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LEASES_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_CREATED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_RELEASED_FIELD_NUMBER: _ClassVar[int]
    admitted: int
    inflight_bytes: int
    inflight_bytes_limit: int
    leases_expired: int
    models: int
    received: int
    rejected: int
    sessions_created: int
    sessions_released: int
    def __init__(self, models: _Optional[int] = ..., sessions_created: _Optional[int] = ..., sessions_released: _Optional[int] = ..., leases_expired: _Optional[int] = ..., received: _Optional[int] = ..., admitted: _Optional[int] = ..., rejected: _Optional[int] = ..., inflight_bytes: _Optional[int] = ..., inflight_bytes_limit: _Optional[int] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ["level"]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: LogLevel
    def __init__(self, level: _Optional[_Union[LogLevel, str]] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class SetTenantQuotaRequest(_message.Message):
    __slots__ = ["name", "quota"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    name: str
    quota: TenantQuota
    def __init__(self, name: _Optional[str] = ..., quota: _Optional[_Union[TenantQuota, _Mapping]] = ...) -> None: ...

class SetTenantQuotaResponse(_message.Message):
    __slots__ = ["tenant"]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class SnapshotStats(_message.Message):
    __slots__ = ["device_bytes", "host_page_bytes", "host_page_bytes_used", "pages", "pages_in_tiers", "pages_shared", "pages_used", "prefix_tokens", "row_cache_bytes", "row_cache_bytes_used", "sessions", "sketch_bytes_used"]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGE_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_IN_TIERS_FIELD_NUMBER: _ClassVar[int]
    PAGES_SHARED_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_CACHE_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SKETCH_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    device_bytes: int
    host_page_bytes: int
    host_page_bytes_used: int
    pages: int
    pages_in_tiers: int
    pages_shared: int
    pages_used: int
    prefix_tokens: int
    row_cache_bytes: int
    row_cache_bytes_used: int
    sessions: int
    sketch_bytes_used: int
    def __init__(self, sessions: _Optional[int] = ..., host_page_bytes: _Optional[int] = ..., host_page_bytes_used: _Optional[int] = ..., device_bytes: _Optional[int] = ..., sketch_bytes_used: _Optional[int] = ..., pages: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_shared: _Optional[int] = ..., pages_in_tiers: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., row_cache_bytes: _Optional[int] = ..., row_cache_bytes_used: _Optional[int] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ["kv_bytes", "name", "quota", "sessions"]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    kv_bytes: int
    name: str
    quota: TenantQuota
    sessions: int
    def __init__(self, name: _Optional[str] = ..., quota: _Optional[_Union[TenantQuota, _Mapping]] = ..., sessions: _Optional[int] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ["max_kv_bytes", "max_sessions"]
    MAX_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    max_kv_bytes: int
    max_sessions: int
    def __init__(self, max_sessions: _Optional[int] = ..., max_kv_bytes: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ["bytes_read", "bytes_written", "capacity_bytes", "corrupt", "get_failures", "get_time", "get_timeouts", "gets", "hits", "kind", "misses", "pages_evicted", "put_failures", "put_time", "put_timeouts", "puts", "refused", "servers", "servers_open", "servers_probing", "stored", "used_bytes"]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    GETS_FIELD_NUMBER: _ClassVar[int]
    GET_FAILURES_FIELD_NUMBER: _ClassVar[int]
    GET_TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    GET_TIME_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    PAGES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PUTS_FIELD_NUMBER: _ClassVar[int]
    PUT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PUT_TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    PUT_TIME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_OPEN_FIELD_NUMBER: _ClassVar[int]
    SERVERS_PROBING_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes_read: int
    bytes_written: int
    capacity_bytes: int
    corrupt: int
    get_failures: int
    get_time: LatencyCounts
    get_timeouts: int
    gets: int
    hits: int
    kind: str
    misses: int
    pages_evicted: int
    put_failures: int
    put_time: LatencyCounts
    put_timeouts: int
    puts: int
    refused: int
    servers: int
    servers_open: int
    servers_probing: int
    stored: int
    used_bytes: int
    def __init__(self, kind: _Optional[str] = ..., gets: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., corrupt: _Optional[int] = ..., get_timeouts: _Optional[int] = ..., get_failures: _Optional[int] = ..., puts: _Optional[int] = ..., stored: _Optional[int] = ..., refused: _Optional[int] = ..., put_timeouts: _Optional[int] = ..., put_failures: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., pages_evicted: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., servers: _Optional[int] = ..., servers_open: _Optional[int] = ..., servers_probing: _Optional[int] = ..., get_time: _Optional[_Union[LatencyCounts, _Mapping]] = ..., put_time: _Optional[_Union[LatencyCounts, _Mapping]] = ...) -> None: ...

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class MetricsFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class LogLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
