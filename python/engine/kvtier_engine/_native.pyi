from typing import Any, Optional, Sequence

from kvtier.config import AttendOptions, ModelConfig, RetrievalConfig, SketchConfig
from kvtier.engine_config import Backend as BackendChoice
from kvtier.engine_config import MemoryConfig

version: str

class Backend:
    @property
    def name(self) -> str: ...

def session_memory(
    model: ModelConfig,
    memory: MemoryConfig,
    retrieval: RetrievalConfig,
    extra_sketches: Sequence[SketchConfig],
    backend: BackendChoice,
    tokens: int,
    row_cache_rows: int,
    /,
) -> tuple[int, int, int, int, int]: ...
def device_bytes_for(
    model: ModelConfig,
    memory: MemoryConfig,
    retrieval: RetrievalConfig,
    extra_sketches: Sequence[SketchConfig],
    backend: BackendChoice,
    tokens: int,
    sessions: int,
    /,
) -> int: ...

class Options:
    def __init__(self, options: AttendOptions, tokens_after: int, /) -> None: ...

class Session:
    def append(self, layer: int, keys: Any, values: Any, stream: Optional[int], /) -> None: ...
    def reserve(self, tokens: int, stream: Optional[int], /) -> None: ...
    def select(
        self,
        layer: int,
        query: Any,
        ids: Any,
        scores: Any,
        bias: Any,
        stream: Optional[int],
        options: Options,
        /,
    ) -> None: ...
    def attend(
        self,
        layer: int,
        query: Any,
        selected: Any,
        bias: Any,
        out: Any,
        lse: Any,
        ids: Any,
        missed: Any,
        stream: Optional[int],
        options: Options,
        /,
    ) -> None: ...
    def decode(
        self,
        layer: int,
        query: Any,
        key: Any,
        value: Any,
        selected: Any,
        bias: Any,
        out: Any,
        lse: Any,
        ids: Any,
        missed: Any,
        stream: Optional[int],
        options: Options,
        /,
    ) -> None: ...
    def prefetch(
        self, layer: int, query: Any, stream: Optional[int], options: Options, /
    ) -> None: ...
    def fetch(self, layer: int, tokens: Any, keys: Any, values: Any, /) -> None: ...
    def length(self, layer: Optional[int]) -> int: ...
    def truncate(self, tokens: int, stream: Optional[int], layer: Optional[int], /) -> None: ...
    def fork(self, count: int, stream: Optional[int], /) -> list[Session]: ...
    def publish(self, token_ids: Sequence[int], stream: Optional[int], /) -> None: ...
    def advance(self, layer: int, tokens: int, /) -> None: ...
    def close(self) -> None: ...

class PagedSketches:
    def __init__(
        self,
        model: ModelConfig,
        retrieval: RetrievalConfig,
        num_blocks: int,
        block_tokens: int,
        max_tokens: int,
        max_batch_rows: int,
        backend: BackendChoice,
        /,
    ) -> None: ...
    def store(
        self, layer: int, keys: Any, values: Any, slots: Any, stream: Optional[int], /
    ) -> None: ...
    def select(
        self,
        layer: int,
        blocks: Any,
        lengths: Any,
        max_length: int,
        query: Any,
        ids: Any,
        bias: Any,
        stream: Optional[int],
        /,
    ) -> None: ...
    def attend(
        self,
        layer: int,
        blocks: Any,
        lengths: Any,
        max_length: int,
        query: Any,
        keys: Any,
        values: Any,
        out: Any,
        lse: Any,
        stream: Optional[int],
        /,
    ) -> None: ...
    def attended_bound(self, length: int, /) -> int: ...
    def check(self) -> None: ...
    def backend(self) -> Backend: ...
    def device_bytes(self) -> int: ...
    def close(self) -> None: ...

class Engine:
    def __init__(
        self,
        model: ModelConfig,
        memory: MemoryConfig,
        retrieval: RetrievalConfig,
        extra_sketches: Sequence[SketchConfig],
        backend: BackendChoice,
        reject_nonfinite: bool,
        time_stages: bool,
        dense_when_faster: bool,
        /,
    ) -> None: ...
    def open(
        self,
        capacity_tokens: int,
        token_ids: Sequence[int],
        tenant_secret: bytes,
        model_fingerprint: str,
        max_page_bytes: int,
        tenant: str,
        whole: bool,
        /,
    ) -> Session: ...
    def set_quota(self, tenant: str, page_bytes: Optional[int], /) -> None: ...
    def decode(self, layer: int, items: list[Any], stream: Optional[int], /) -> None: ...
    def decode_rows(
        self,
        layer: int,
        sessions: list[Session],
        query: tuple[Any, ...],
        key: tuple[Any, ...],
        value: tuple[Any, ...],
        out: int,
        gpu: int,
        stream: Optional[int],
        options: Options,
        /,
    ) -> None: ...
    def merge(
        self, parts: list[Any], out: Any, lse: Any, stream: Optional[int], /
    ) -> None: ...
    def backend(self) -> Backend: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
