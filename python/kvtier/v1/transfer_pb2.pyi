from kvtier.v1 import page_pb2 as _page_pb2
from kvtier.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadPagesRequest(_message.Message):
    __slots__ = ["client_verifies", "handles", "lease", "stale_reads"]
    CLIENT_VERIFIES_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STALE_READS_FIELD_NUMBER: _ClassVar[int]
    client_verifies: bool
    handles: _containers.RepeatedScalarFieldContainer[str]
    lease: str
    stale_reads: int
    def __init__(self, lease: _Optional[str] = ..., handles: _Optional[_Iterable[str]] = ..., client_verifies: bool = ..., stale_reads: _Optional[int] = ...) -> None: ...

class ReadPagesResponse(_message.Message):
    __slots__ = ["chunks"]
    class Chunk(_message.Message):
        __slots__ = ["data", "index", "last", "offset", "page", "status"]
        DATA_FIELD_NUMBER: _ClassVar[int]
        INDEX_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        PAGE_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        data: bytes
        index: int
        last: bool
        offset: int
        page: _page_pb2.Page
        status: _status_pb2.ItemStatus
        def __init__(self, index: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.ItemStatus, _Mapping]] = ..., offset: _Optional[int] = ..., page: _Optional[_Union[_page_pb2.Page, _Mapping]] = ..., last: bool = ..., data: _Optional[bytes] = ...) -> None: ...
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ReadPagesResponse.Chunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[ReadPagesResponse.Chunk, _Mapping]]] = ...) -> None: ...

class WritePagesRequest(_message.Message):
    __slots__ = ["chunks", "lease"]
    class Chunk(_message.Message):
        __slots__ = ["crc32c", "data", "handle", "index", "last", "offset"]
        CRC32C_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        HANDLE_FIELD_NUMBER: _ClassVar[int]
        INDEX_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        crc32c: int
        data: bytes
        handle: str
        index: int
        last: bool
        offset: int
        def __init__(self, index: _Optional[int] = ..., handle: _Optional[str] = ..., offset: _Optional[int] = ..., last: bool = ..., crc32c: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[WritePagesRequest.Chunk]
    lease: str
    def __init__(self, lease: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[WritePagesRequest.Chunk, _Mapping]]] = ...) -> None: ...

class WritePagesResponse(_message.Message):
    __slots__ = ["items"]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_page_pb2.PageResult]
    def __init__(self, items: _Optional[_Iterable[_Union[_page_pb2.PageResult, _Mapping]]] = ...) -> None: ...
