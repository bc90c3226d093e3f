"""What differs between the releases of vLLM that the tier has been tested with."""

from __future__ import annotations

import inspect
from typing import Any, Mapping, Sequence

import vllm
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult

#: First and last release, both included.
TESTED = ("0.25", "0.33")


def check_version(version: str) -> None:
    """Raises ImportError for a vLLM that has not been tested."""
    first, last = (_minor(tested) for tested in TESTED)
    try:
        found = _minor(version)
    except ValueError:
        found = (0, 0)
    if not first <= found <= last:
        raise ImportError(
            f"kvtier: expected vLLM {TESTED[0]} to {TESTED[1]}, found {version}; its interface of "
            "secondary tiers changes between releases"
        )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


check_version(vllm.__version__)

_RESULT_FIELDS = frozenset(inspect.signature(JobResult).parameters)
_MAPPER_FIELDS = frozenset(inspect.signature(FileMapper.from_offloading_spec).parameters)


def rows_of(job: Any) -> list[int]:
    """Returns the rows of the primary tier that a job names, in the order of its keys."""
    rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(row) for row in rows]


def make_result(
    job_id: int, success: bool, *, loaded: Sequence[bytes] | None, seconds: float, nbytes: int
) -> Any:
    """Returns the result of a job. `loaded`: of a load that failed in part, the keys that came;
    releases that do not take it drop them."""
    details = {
        "successful_keys": loaded or None,
        "transfer_time": seconds,
        "transfer_bytes": nbytes,
    }
    taken = {name: value for name, value in details.items() if name in _RESULT_FIELDS}
    return JobResult(job_id=job_id, success=success, **taken)


def identity_fields(spec: Any) -> dict[str, Any]:
    """Returns what vLLM itself keeps files of KV apart by: model, dtype, block sizes, layers by
    group and, unless the bytes do not depend on them, parallel sizes and the rank. Beside that the
    order of heads and tokens in a block, which the backend of attention chooses, as far as the
    release has it."""
    if "blocks_per_file" in _MAPPER_FIELDS:
        blocks = {"blocks_per_file": spec.blocks_per_chunk}
    else:
        blocks = {"gpu_blocks_per_file": spec.block_size_factor}
    mapper = FileMapper.from_offloading_spec(
        root_dir="", offloading_spec=spec, parallel_agnostic=True, **blocks
    )
    fields = {**mapper.fields, "rank": mapper.rank}
    layout = getattr(getattr(spec, "config", None), "kv_cache_layout", None)
    return fields if layout is None else {**fields, "kv_cache_layout": str(layout)}


_EVENT_FIELDS = frozenset(inspect.signature(base.OffloadingEvent).parameters)


def publishes_events(spec: Any) -> bool:
    """Returns whether vLLM publishes KV events at all."""
    events = getattr(spec, "kv_events_config", None)
    return bool(getattr(events, "enable_kv_cache_events", False))


def make_event(keys: Sequence[bytes], removed: bool) -> Any:
    """Returns the event that chunks are stored, or gone, beside vLLM's process."""
    medium = getattr(base, "Medium", None)
    details = {
        "keys": list(keys),
        "medium": "STORAGE" if medium is None else medium.STORAGE,
        "removed": removed,
        "block_size": 0,  # of releases that have it: not known to a tier
    }
    return base.OffloadingEvent(**{k: v for k, v in details.items() if k in _EVENT_FIELDS})


def metric_definitions(counters: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
    """Returns the definitions of counters, given as their help and labels; none for releases
    whose tiers have no metrics of their own."""
    metadata = getattr(base, "OffloadingCounterMetadata", None)
    if metadata is None:
        return {}
    return {
        name: metadata(documentation=help, labelnames=labels)
        for name, (help, labels) in counters.items()
    }


def make_stats(increases: Sequence[tuple[str, tuple[str, ...], int]]) -> Any:
    """Returns what counters have grown by, or None for releases that take none."""
    if not hasattr(base, "OffloadingCounterMetadata"):
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    stats = OffloadingConnectorStats()
    for name, labels, amount in increases:
        stats.increase_counter(name, amount, labels)
    return stats
