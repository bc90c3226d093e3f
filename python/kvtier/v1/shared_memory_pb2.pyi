from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Attachment(_message.Message):
    __slots__ = ["connected", "device_bytes", "name", "process_id", "staging_bytes"]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    connected: bool
    device_bytes: int
    name: str
    process_id: int
    staging_bytes: int
    def __init__(self, name: _Optional[str] = ..., process_id: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., connected: bool = ..., device_bytes: _Optional[int] = ...) -> None: ...

class CreateAttachmentRequest(_message.Message):
    __slots__ = ["process_id", "staging_bytes"]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    process_id: int
    staging_bytes: int
    def __init__(self, process_id: _Optional[int] = ..., staging_bytes: _Optional[int] = ...) -> None: ...

class CreateAttachmentResponse(_message.Message):
    __slots__ = ["attachment", "endpoints", "token", "token_ttl"]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TTL_FIELD_NUMBER: _ClassVar[int]
    attachment: Attachment
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    token: bytes
    token_ttl: _duration_pb2.Duration
    def __init__(self, attachment: _Optional[_Union[Attachment, _Mapping]] = ..., endpoints: _Optional[_Iterable[str]] = ..., token: _Optional[bytes] = ..., token_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DeleteAttachmentRequest(_message.Message):
    __slots__ = ["name"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteAttachmentResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class ListAttachmentsRequest(_message.Message):
    __slots__ = ["page_size", "page_token"]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAttachmentsResponse(_message.Message):
    __slots__ = ["attachments", "next_page_token"]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    attachments: _containers.RepeatedCompositeFieldContainer[Attachment]
    next_page_token: str
    def __init__(self, attachments: _Optional[_Iterable[_Union[Attachment, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ShareDeviceMemoryRequest(_message.Message):
    __slots__ = ["attachment", "bytes", "cuda_ipc_handle", "device_uuid"]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    attachment: str
    bytes: int
    cuda_ipc_handle: bytes
    device_uuid: bytes
    def __init__(self, attachment: _Optional[str] = ..., cuda_ipc_handle: _Optional[bytes] = ..., device_uuid: _Optional[bytes] = ..., bytes: _Optional[int] = ...) -> None: ...

class ShareDeviceMemoryResponse(_message.Message):
    __slots__ = ["region"]
    REGION_FIELD_NUMBER: _ClassVar[int]
    region: str
    def __init__(self, region: _Optional[str] = ...) -> None: ...
