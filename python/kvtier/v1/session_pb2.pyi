from google.protobuf import duration_pb2 as _duration_pb2
from kvtier.v1 import retrieval_pb2 as _retrieval_pb2
from kvtier.v1 import status_pb2 as _status_pb2
from kvtier.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateSessionRequest(_message.Message):
    __slots__ = ["capacity_tokens", "extra_sketches", "geometry", "model_fingerprint", "request_id", "retrieval", "token_ids"]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_SKETCHES_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    capacity_tokens: int
    extra_sketches: _containers.RepeatedCompositeFieldContainer[_retrieval_pb2.Sketch]
    geometry: Geometry
    model_fingerprint: str
    request_id: str
    retrieval: _retrieval_pb2.RetrievalOptions
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., capacity_tokens: _Optional[int] = ..., retrieval: _Optional[_Union[_retrieval_pb2.RetrievalOptions, _Mapping]] = ..., extra_sketches: _Optional[_Iterable[_Union[_retrieval_pb2.Sketch, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ["attached_tokens", "limits", "session"]
    ATTACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    attached_tokens: int
    limits: Limits
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., attached_tokens: _Optional[int] = ...) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ["count", "name", "request_id"]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    count: int
    name: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ForkSessionResponse(_message.Message):
    __slots__ = ["sessions"]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ["head_dim", "kv_dtype", "kv_heads", "layer_options", "layers", "query_heads"]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    head_dim: int
    kv_dtype: _tensor_pb2.DataType
    kv_heads: int
    layer_options: _containers.RepeatedCompositeFieldContainer[LayerOptions]
    layers: int
    query_heads: int
    def __init__(self, layers: _Optional[int] = ..., query_heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., kv_dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., layer_options: _Optional[_Iterable[_Union[LayerOptions, _Mapping]]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ["name"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ["session"]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ["names"]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ["statuses"]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.ItemStatus, _Mapping]]] = ...) -> None: ...

class LayerOptions(_message.Message):
    __slots__ = ["logit_softcap", "mode", "softmax_scale", "window_tokens"]
    LOGIT_SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SOFTMAX_SCALE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    logit_softcap: float
    mode: _retrieval_pb2.LayerMode
    softmax_scale: float
    window_tokens: int
    def __init__(self, mode: _Optional[_Union[_retrieval_pb2.LayerMode, str]] = ..., window_tokens: _Optional[int] = ..., softmax_scale: _Optional[float] = ..., logit_softcap: _Optional[float] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ["max_batch_items", "max_chunk_tokens", "max_message_bytes"]
    MAX_BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_batch_items: int
    max_chunk_tokens: int
    max_message_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_batch_items: _Optional[int] = ..., max_chunk_tokens: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ["page_size", "page_token"]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ["names", "next_page_token"]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    next_page_token: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class PublishPrefixRequest(_message.Message):
    __slots__ = ["name", "token_ids"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PublishPrefixResponse(_message.Message):
    __slots__ = ["stored_tokens"]
    STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stored_tokens: int
    def __init__(self, stored_tokens: _Optional[int] = ...) -> None: ...

class ReleaseSessionRequest(_message.Message):
    __slots__ = ["name", "request_id"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReleaseSessionResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Session(_message.Message):
    __slots__ = ["capacity_tokens", "geometry", "kv_bytes", "layer_lengths", "lease_ttl", "memory", "name"]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    capacity_tokens: int
    geometry: Geometry
    kv_bytes: int
    layer_lengths: _containers.RepeatedScalarFieldContainer[int]
    lease_ttl: _duration_pb2.Duration
    memory: SessionMemory
    name: str
    def __init__(self, name: _Optional[str] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., layer_lengths: _Optional[_Iterable[int]] = ..., capacity_tokens: _Optional[int] = ..., lease_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., kv_bytes: _Optional[int] = ..., memory: _Optional[_Union[SessionMemory, _Mapping]] = ...) -> None: ...

class SessionMemory(_message.Message):
    __slots__ = ["page_bytes", "row_cache_bytes", "sketch_bytes", "table_bytes"]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SKETCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    page_bytes: int
    row_cache_bytes: int
    sketch_bytes: int
    table_bytes: int
    def __init__(self, page_bytes: _Optional[int] = ..., sketch_bytes: _Optional[int] = ..., table_bytes: _Optional[int] = ..., row_cache_bytes: _Optional[int] = ...) -> None: ...

class TruncateSessionRequest(_message.Message):
    __slots__ = ["name", "request_id", "tokens"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    tokens: int
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class TruncateSessionResponse(_message.Message):
    __slots__ = ["session"]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...
