"""kvtier in this process: keys and values off the GPU, selection and attention beside the model.

Settings and errors are those of the package kvtier, which offers these names as `kvtier.Engine`,
`kvtier.Session` and so on."""

from kvtier.config import SessionMemory

from kvtier_engine._native import version as __version__
from kvtier_engine.engine import BatchItem, Engine, Stats
from kvtier_engine.memory import device_bytes_for, session_memory
from kvtier_engine.paged import PagedAttendResult, PagedSelectResult, PagedSketches
from kvtier_engine.session import AttendResult, SelectResult, Session

__all__ = [
    "AttendResult",
    "BatchItem",
    "Engine",
    "PagedAttendResult",
    "PagedSelectResult",
    "PagedSketches",
    "SelectResult",
    "Session",
    "SessionMemory",
    "Stats",
    "__version__",
    "device_bytes_for",
    "session_memory",
]
