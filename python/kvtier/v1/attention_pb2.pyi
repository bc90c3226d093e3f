from kvtier.v1 import retrieval_pb2 as _retrieval_pb2
from kvtier.v1 import status_pb2 as _status_pb2
from kvtier.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AppendRequest(_message.Message):
    __slots__ = ["key", "layer", "position", "session", "value"]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: _tensor_pb2.Tensor
    layer: int
    position: int
    session: str
    value: _tensor_pb2.Tensor
    def __init__(self, session: _Optional[str] = ..., layer: _Optional[int] = ..., key: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., position: _Optional[int] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ["layer_lengths"]
    LAYER_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    layer_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ["bias", "layer", "lse_memory", "options", "out_memory", "query", "selected", "session", "with_missed"]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    LSE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OUT_MEMORY_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WITH_MISSED_FIELD_NUMBER: _ClassVar[int]
    bias: _tensor_pb2.Tensor
    layer: int
    lse_memory: _tensor_pb2.DeviceMemory
    options: _retrieval_pb2.AttendOptions
    out_memory: _tensor_pb2.DeviceMemory
    query: _tensor_pb2.Tensor
    selected: _tensor_pb2.Tensor
    session: str
    with_missed: bool
    def __init__(self, session: _Optional[str] = ..., layer: _Optional[int] = ..., query: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., selected: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., options: _Optional[_Union[_retrieval_pb2.AttendOptions, _Mapping]] = ..., out_memory: _Optional[_Union[_tensor_pb2.DeviceMemory, _Mapping]] = ..., lse_memory: _Optional[_Union[_tensor_pb2.DeviceMemory, _Mapping]] = ..., with_missed: bool = ..., bias: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ["lse", "missed", "out"]
    LSE_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    lse: _tensor_pb2.Tensor
    missed: _tensor_pb2.Tensor
    out: _tensor_pb2.Tensor
    def __init__(self, out: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., missed: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class BatchAttendRequest(_message.Message):
    __slots__ = ["items"]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[AttendRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[AttendRequest, _Mapping]]] = ...) -> None: ...

class BatchAttendResponse(_message.Message):
    __slots__ = ["items"]
    class Item(_message.Message):
        __slots__ = ["response", "status"]
        RESPONSE_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        response: AttendResponse
        status: _status_pb2.ItemStatus
        def __init__(self, status: _Optional[_Union[_status_pb2.ItemStatus, _Mapping]] = ..., response: _Optional[_Union[AttendResponse, _Mapping]] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchAttendResponse.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[BatchAttendResponse.Item, _Mapping]]] = ...) -> None: ...

class BatchDecodeRequest(_message.Message):
    __slots__ = ["items"]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DecodeRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[DecodeRequest, _Mapping]]] = ...) -> None: ...

class BatchDecodeResponse(_message.Message):
    __slots__ = ["items"]
    class Item(_message.Message):
        __slots__ = ["response", "status"]
        RESPONSE_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        response: DecodeResponse
        status: _status_pb2.ItemStatus
        def __init__(self, status: _Optional[_Union[_status_pb2.ItemStatus, _Mapping]] = ..., response: _Optional[_Union[DecodeResponse, _Mapping]] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchDecodeResponse.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[BatchDecodeResponse.Item, _Mapping]]] = ...) -> None: ...

class BatchFetchRequest(_message.Message):
    __slots__ = ["items"]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[FetchRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[FetchRequest, _Mapping]]] = ...) -> None: ...

class BatchFetchResponse(_message.Message):
    __slots__ = ["items"]
    class Item(_message.Message):
        __slots__ = ["response", "status"]
        RESPONSE_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        response: FetchResponse
        status: _status_pb2.ItemStatus
        def __init__(self, status: _Optional[_Union[_status_pb2.ItemStatus, _Mapping]] = ..., response: _Optional[_Union[FetchResponse, _Mapping]] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchFetchResponse.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[BatchFetchResponse.Item, _Mapping]]] = ...) -> None: ...

class BatchSelectRequest(_message.Message):
    __slots__ = ["items"]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SelectRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[SelectRequest, _Mapping]]] = ...) -> None: ...

class BatchSelectResponse(_message.Message):
    __slots__ = ["items"]
    class Item(_message.Message):
        __slots__ = ["response", "status"]
        RESPONSE_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        response: SelectResponse
        status: _status_pb2.ItemStatus
        def __init__(self, status: _Optional[_Union[_status_pb2.ItemStatus, _Mapping]] = ..., response: _Optional[_Union[SelectResponse, _Mapping]] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchSelectResponse.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[BatchSelectResponse.Item, _Mapping]]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ["bias", "key", "layer", "lse_memory", "options", "out_memory", "position", "query", "selected", "session", "step", "value", "with_missed"]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    LSE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OUT_MEMORY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WITH_MISSED_FIELD_NUMBER: _ClassVar[int]
    bias: _tensor_pb2.Tensor
    key: _tensor_pb2.Tensor
    layer: int
    lse_memory: _tensor_pb2.DeviceMemory
    options: _retrieval_pb2.AttendOptions
    out_memory: _tensor_pb2.DeviceMemory
    position: int
    query: _tensor_pb2.Tensor
    selected: _tensor_pb2.Tensor
    session: str
    step: int
    value: _tensor_pb2.Tensor
    with_missed: bool
    def __init__(self, session: _Optional[str] = ..., layer: _Optional[int] = ..., step: _Optional[int] = ..., query: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., key: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., options: _Optional[_Union[_retrieval_pb2.AttendOptions, _Mapping]] = ..., position: _Optional[int] = ..., selected: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., out_memory: _Optional[_Union[_tensor_pb2.DeviceMemory, _Mapping]] = ..., lse_memory: _Optional[_Union[_tensor_pb2.DeviceMemory, _Mapping]] = ..., with_missed: bool = ..., bias: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ["layer", "lse", "missed", "out", "step"]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    LSE_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    layer: int
    lse: _tensor_pb2.Tensor
    missed: _tensor_pb2.Tensor
    out: _tensor_pb2.Tensor
    step: int
    def __init__(self, layer: _Optional[int] = ..., step: _Optional[int] = ..., out: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., missed: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ["layer", "session", "tokens"]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    session: str
    tokens: _tensor_pb2.Tensor
    def __init__(self, session: _Optional[str] = ..., layer: _Optional[int] = ..., tokens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ["key", "value"]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: _tensor_pb2.Tensor
    value: _tensor_pb2.Tensor
    def __init__(self, key: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SelectRequest(_message.Message):
    __slots__ = ["layer", "options", "query", "session", "with_bias", "with_scores"]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WITH_BIAS_FIELD_NUMBER: _ClassVar[int]
    WITH_SCORES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    options: _retrieval_pb2.AttendOptions
    query: _tensor_pb2.Tensor
    session: str
    with_bias: bool
    with_scores: bool
    def __init__(self, session: _Optional[str] = ..., layer: _Optional[int] = ..., query: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., options: _Optional[_Union[_retrieval_pb2.AttendOptions, _Mapping]] = ..., with_scores: bool = ..., with_bias: bool = ...) -> None: ...

class SelectResponse(_message.Message):
    __slots__ = ["bias", "ids", "scores"]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    bias: _tensor_pb2.Tensor
    ids: _tensor_pb2.Tensor
    scores: _tensor_pb2.Tensor
    def __init__(self, ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scores: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., bias: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
