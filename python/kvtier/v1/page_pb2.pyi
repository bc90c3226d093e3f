from google.protobuf import duration_pb2 as _duration_pb2
from kvtier.v1 import status_pb2 as _status_pb2
from kvtier.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchAbortPagesRequest(_message.Message):
    __slots__ = ["handles", "lease", "request_id"]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[str]
    lease: str
    request_id: str
    def __init__(self, lease: _Optional[str] = ..., handles: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class BatchAbortPagesResponse(_message.Message):
    __slots__ = ["statuses"]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.ItemStatus, _Mapping]]] = ...) -> None: ...

class BatchCommitPagesRequest(_message.Message):
    __slots__ = ["items", "lease"]
    class Item(_message.Message):
        __slots__ = ["crc32c", "handle"]
        CRC32C_FIELD_NUMBER: _ClassVar[int]
        HANDLE_FIELD_NUMBER: _ClassVar[int]
        crc32c: int
        handle: str
        def __init__(self, handle: _Optional[str] = ..., crc32c: _Optional[int] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchCommitPagesRequest.Item]
    lease: str
    def __init__(self, lease: _Optional[str] = ..., items: _Optional[_Iterable[_Union[BatchCommitPagesRequest.Item, _Mapping]]] = ...) -> None: ...

class BatchCommitPagesResponse(_message.Message):
    __slots__ = ["items"]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PageResult]
    def __init__(self, items: _Optional[_Iterable[_Union[PageResult, _Mapping]]] = ...) -> None: ...

class BatchDeletePagesRequest(_message.Message):
    __slots__ = ["handles", "lease", "request_id"]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[str]
    lease: str
    request_id: str
    def __init__(self, lease: _Optional[str] = ..., handles: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class BatchDeletePagesResponse(_message.Message):
    __slots__ = ["statuses"]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.ItemStatus, _Mapping]]] = ...) -> None: ...

class BatchLookupPagesRequest(_message.Message):
    __slots__ = ["hashes", "hits_only", "layers", "lease", "pin", "request_id"]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HITS_ONLY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    hits_only: bool
    layers: _containers.RepeatedScalarFieldContainer[int]
    lease: str
    pin: bool
    request_id: str
    def __init__(self, lease: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ..., layers: _Optional[_Iterable[int]] = ..., pin: bool = ..., request_id: _Optional[str] = ..., hits_only: bool = ...) -> None: ...

class BatchLookupPagesResponse(_message.Message):
    __slots__ = ["hits", "pages"]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    hits: _containers.RepeatedScalarFieldContainer[bool]
    pages: _containers.RepeatedCompositeFieldContainer[Page]
    def __init__(self, hits: _Optional[_Iterable[bool]] = ..., pages: _Optional[_Iterable[_Union[Page, _Mapping]]] = ...) -> None: ...

class BatchPinPagesRequest(_message.Message):
    __slots__ = ["handles", "lease", "request_id"]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[str]
    lease: str
    request_id: str
    def __init__(self, lease: _Optional[str] = ..., handles: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class BatchPinPagesResponse(_message.Message):
    __slots__ = ["items"]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PageResult]
    def __init__(self, items: _Optional[_Iterable[_Union[PageResult, _Mapping]]] = ...) -> None: ...

class BatchReservePagesRequest(_message.Message):
    __slots__ = ["keys", "lease", "request_id"]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[PageKey]
    lease: str
    request_id: str
    def __init__(self, lease: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[PageKey, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class BatchReservePagesResponse(_message.Message):
    __slots__ = ["items"]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PageResult]
    def __init__(self, items: _Optional[_Iterable[_Union[PageResult, _Mapping]]] = ...) -> None: ...

class BatchUnpinPagesRequest(_message.Message):
    __slots__ = ["handles", "lease", "request_id"]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[str]
    lease: str
    request_id: str
    def __init__(self, lease: _Optional[str] = ..., handles: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class BatchUnpinPagesResponse(_message.Message):
    __slots__ = ["statuses"]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.ItemStatus, _Mapping]]] = ...) -> None: ...

class CloseLeaseRequest(_message.Message):
    __slots__ = ["name", "request_id"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class CloseLeaseResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class LookupPrefixRequest(_message.Message):
    __slots__ = ["hashes", "layers", "lease", "pin", "request_id"]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    layers: _containers.RepeatedScalarFieldContainer[int]
    lease: str
    pin: bool
    request_id: str
    def __init__(self, lease: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ..., layers: _Optional[_Iterable[int]] = ..., pin: bool = ..., request_id: _Optional[str] = ...) -> None: ...

class LookupPrefixResponse(_message.Message):
    __slots__ = ["hits", "pages"]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    hits: int
    pages: _containers.RepeatedCompositeFieldContainer[Page]
    def __init__(self, hits: _Optional[int] = ..., pages: _Optional[_Iterable[_Union[Page, _Mapping]]] = ...) -> None: ...

class OpenLeaseRequest(_message.Message):
    __slots__ = ["geometry", "model", "page_bytes", "request_id"]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    geometry: PageGeometry
    model: str
    page_bytes: int
    request_id: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., geometry: _Optional[_Union[PageGeometry, _Mapping]] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class OpenLeaseResponse(_message.Message):
    __slots__ = ["lease", "limits", "server_epoch"]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease: PageLease
    limits: PageLimits
    server_epoch: int
    def __init__(self, lease: _Optional[_Union[PageLease, _Mapping]] = ..., limits: _Optional[_Union[PageLimits, _Mapping]] = ..., server_epoch: _Optional[int] = ...) -> None: ...

class Page(_message.Message):
    __slots__ = ["crc32c", "durable", "existed", "generation", "handle", "length", "slot"]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    crc32c: int
    durable: bool
    existed: bool
    generation: int
    handle: str
    length: int
    slot: int
    def __init__(self, handle: _Optional[str] = ..., length: _Optional[int] = ..., crc32c: _Optional[int] = ..., existed: bool = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., durable: bool = ...) -> None: ...

class PageGeometry(_message.Message):
    __slots__ = ["dtype", "head_dim", "kv_heads", "page_tokens"]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    dtype: _tensor_pb2.DataType
    head_dim: int
    kv_heads: int
    page_tokens: int
    def __init__(self, kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., page_tokens: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ...) -> None: ...

class PageKey(_message.Message):
    __slots__ = ["hash", "layer"]
    HASH_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    layer: int
    def __init__(self, hash: _Optional[bytes] = ..., layer: _Optional[int] = ...) -> None: ...

class PageLease(_message.Message):
    __slots__ = ["name", "page_bytes", "ttl"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_bytes: int
    ttl: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., page_bytes: _Optional[int] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PageLimits(_message.Message):
    __slots__ = ["max_batch_pages", "max_hash_bytes", "max_transfer_bytes", "reservation_ttl"]
    MAX_BATCH_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TTL_FIELD_NUMBER: _ClassVar[int]
    max_batch_pages: int
    max_hash_bytes: int
    max_transfer_bytes: int
    reservation_ttl: _duration_pb2.Duration
    def __init__(self, max_batch_pages: _Optional[int] = ..., max_hash_bytes: _Optional[int] = ..., max_transfer_bytes: _Optional[int] = ..., reservation_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PageResult(_message.Message):
    __slots__ = ["page", "status"]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    page: Page
    status: _status_pb2.ItemStatus
    def __init__(self, status: _Optional[_Union[_status_pb2.ItemStatus, _Mapping]] = ..., page: _Optional[_Union[Page, _Mapping]] = ...) -> None: ...
