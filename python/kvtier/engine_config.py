"""Settings of an engine in this process, as in kvtier/config.h."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvtier.config import Settings

__all__ = [
    "Backend",
    "HostAllocation",
    "RowCachePolicy",
    "KvPlacement",
    "MemoryConfig",
    "PageFormat",
]

_MIB = 1 << 20
_GIB = 1 << 30


class Backend(enum.Enum):
    """Where kernels run. `AUTO`: on a GPU when the build has CUDA and a usable one is found."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class KvPlacement(enum.Enum):
    """Where the pages of keys and values are. `HOST`: in pinned memory of the host."""

    HOST = "host"
    DEVICE = "device"


class PageFormat(enum.Enum):
    """How rows lie in pages. `MODEL`: as `ModelConfig.kv_dtype`. `INT8`: integers with a factor
    for each row, half of the memory; `kv_dtype` has to be bfloat16."""

    MODEL = "model"
    INT8 = "int8"


class HostAllocation(enum.Enum):
    """How the pinned memory of the page pool is obtained with CUDA."""

    AUTO = "auto"
    MANAGED = "managed"
    REGISTERED = "registered"
    DRIVER = "driver"


class RowCachePolicy(enum.Enum):
    """Which of the rows kept on the device is replaced by a new one."""

    CLOCK = "clock"
    LRU = "lru"
    SCORE = "score"


@dataclass(frozen=True)
class MemoryConfig(Settings):
    """Memory of an engine, allocated when it is made. Sizes in bytes."""

    #: Sketches, staging and workspaces, and pages with `KvPlacement.DEVICE`.
    device_bytes: int = 512 * _MIB
    #: Keys and values.
    host_bytes: int = _GIB
    placement: KvPlacement = KvPlacement.HOST
    page_format: PageFormat = PageFormat.MODEL
    #: Keeps a checksum of every row, and compares the rows that a step reads.
    verify_rows: bool = False
    #: 16, 32, 64, 128 or 256.
    page_tokens: int = 64
    #: Capacity of a session unless `Engine.open` names a smaller one.
    max_session_tokens: int = 1 << 17
    #: Query tokens scored together, 1 to 64.
    max_batch_rows: int = 16
    #: Rows fetched to the device ahead of attention; -1: all on CUDA, none on the CPU.
    staging_rows: int = -1
    #: The device row cache, beside `device_bytes`: rows that steps have fetched. 0: none. None: what
    #: `device_bytes` has left beside the workspace and the sketches of the pages, as far as steps
    #: have a use for it (docs/memory.md).
    row_cache_bytes: int | None = None
    #: Rows of it per KV head of a session's layer; -1: automatic, 0: no row cache.
    row_cache_rows: int = -1
    row_cache_policy: RowCachePolicy = RowCachePolicy.SCORE
    #: Threads that touch pages before they are pinned; 0: all.
    pin_threads: int = 0
    host_allocation: HostAllocation = HostAllocation.AUTO
    #: A file that `kvtier calibrate` has written; empty: none.
    calibration_file: str = ""
    #: A folder for pages that do not fit into `host_bytes`, whose contents are deleted, and the
    #: most bytes there. Empty and 0: none.
    disk_cache: str = ""
    disk_cache_bytes: int = 0
    prefetch_rows: bool = False
    #: Seconds that a call waits for a batch of pages on disk.
    tier_deadline: float = 10.0
