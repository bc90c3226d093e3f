"""The secondary tier of vLLM's offloading."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Collection, Iterable, Sequence

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.chunk_options import ChunkOptions
from kvtier.chunks import ChunkGroup, ChunkStatistics, ChunkStore
from kvtier.errors import invalid
from kvtier.identity import make_identity
from kvtier.vllm import _compat

#: Counters in vLLM's own registry: name, help, labels. Beside them vLLM counts queries, hits, bytes and
#: seconds of every tier by itself.
_COUNTERS = {
    "vllm:kvtier_chunks": ("Chunks by what became of them.", ("outcome",)),
    "vllm:kvtier_failed_calls": (
        "Calls that a server did not answer in time, or that were not made for that.", ("outcome",),
    ),
}
#: Of each counter the outcomes, and their fields of `ChunkStatistics`.
_OUTCOMES = {
    "vllm:kvtier_chunks": {
        "read": "read_chunks", "missed": "missed_chunks",
        "stored": "stored_chunks", "unstored": "unstored_chunks",
    },
    "vllm:kvtier_failed_calls": {"failed": "failed_calls", "skipped": "skipped_calls"},
}

_logger = logging.getLogger("kvtier")


@dataclass
class _Job:
    """A transfer under way."""

    keys: Sequence[bytes]
    request: str | None  # of a load
    done: Future[list[bool]]
    begun: float
    ended: float = 0.0  # 0: not yet noted

    def end(self, _: Future[list[bool]]) -> None:
        self.ended = time.monotonic()


class _Lookups(AsyncLookupManager):
    """Lookups in a thread of their own, a batch for each request and step."""

    def __init__(self, group: ChunkGroup, tier_type: str) -> None:
        self._group = group
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._group.contains(keys)


class KvtierTier(SecondaryTierManager):
    """Keeps the rows of the primary tier in the page cache of `kvtier serve`. Runs in vLLM's
    scheduler, where no method waits for the server: lookups and transfers are made by threads, with
    deadlines. What the server does not give is a miss, and vLLM computes it."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        enable_kv_events: bool = False,
        **options: Any,
    ) -> None:
        """`primary_kv_view` [rows, row bytes]; `options`: of `ChunkOptions`. With `enable_kv_events`,
        where vLLM publishes events, chunks have one when they are stored, and when found gone. Raises
        InvalidArgumentError for options that are no use, and what the server has against the
        connection; a server that cannot be reached is logged."""
        given = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **given)
        rows = np.asarray(primary_kv_view)
        if not rows.flags.c_contiguous or not rows.flags.writeable:
            raise invalid("primary_kv_view: expected rows side by side, writable, found others")
        self._rows = rows.reshape(len(rows), -1).view(np.uint8)
        self._row_bytes = int(self._rows.shape[1])
        if not isinstance(enable_kv_events, bool):
            raise invalid(f"enable_kv_events: expected true or false, found {enable_kv_events!r}")
        self._events: list[Any] | None = None
        if enable_kv_events and _compat.publishes_events(offloading_spec):
            self._events = []
        elif enable_kv_events:
            _logger.warning("kvtier: enable_kv_events, but vLLM publishes no KV events")
        self._counted = ChunkStatistics()
        self._store = ChunkStore(ChunkOptions.parse(options))
        try:
            identity = make_identity("vllm", _compat.identity_fields(offloading_spec))
            self._group = self._store.group(identity, self._row_bytes)
        except BaseException:
            self._store.close()
            raise
        self._jobs: dict[int, _Job] = {}
        # By request: keys that a load did not find although a lookup had.
        self._lost: dict[str, set[bytes]] = {}
        self._lookups = _Lookups(self._group, tier_type)
        _logger.info("kvtier: chunks of %d bytes as %s", self._row_bytes, identity)

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        if key in self._lost.setdefault(req_context.req_id, set()):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lost.pop(req_context.req_id, None)
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: Any) -> None:
        keys, rows = self._of(job_metadata)
        self._begin(job_metadata.job_id, keys, None, self._group.put(keys, rows))

    def submit_load(self, job_metadata: Any) -> None:
        keys, rows = self._of(job_metadata)
        request = job_metadata.req_context.req_id
        self._begin(job_metadata.job_id, keys, request, self._group.get(keys, rows))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended = [(job_id, job) for job_id, job in self._jobs.items() if job.done.done()]
        results = []
        for job_id, job in ended:
            del self._jobs[job_id]
            good = job.done.result()
            moved = [key for key, each in zip(job.keys, good) if each]
            if job.request in self._lost:
                self._lost[job.request].update(set(job.keys).difference(moved))
            self._note(job, moved)
            results.append(
                _compat.make_result(
                    job_id,
                    all(good),
                    loaded=None if job.request is None or all(good) else tuple(moved),
                    seconds=(job.ended or time.monotonic()) - job.begun,
                    nbytes=len(moved) * self._row_bytes,
                )
            )
        return results

    def take_events(self) -> Iterable[Any]:
        """Returns the events since the last call."""
        if self._events is None:
            return ()
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return _compat.metric_definitions(_COUNTERS)

    def get_stats(self) -> Any:
        """Returns what the counters have grown by since the last call; None for nothing."""
        now, before = self._store.statistics(), self._counted
        self._counted = now
        increases = [
            (counter, (outcome,), getattr(now, field) - getattr(before, field))
            for counter, outcomes in _OUTCOMES.items()
            for outcome, field in outcomes.items()
            if getattr(now, field) > getattr(before, field)
        ]
        return _compat.make_stats(increases) if increases else None

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Waits for all transfers, each of which has a deadline."""
        wait([job.done for job in self._jobs.values()])

    def shutdown(self) -> None:
        """Ends threads and the connection, and lets go of the primary tier's memory."""
        self._lookups.shutdown()
        self._store.close()
        self._jobs.clear()
        self._rows = np.empty((0, self._row_bytes), np.uint8)

    def _note(self, job: _Job, moved: Sequence[bytes]) -> None:
        """Publishes a transfer: chunks that are stored, or that were gone when they were wanted."""
        if self._events is None:
            return
        changed = moved if job.request is None else list(set(job.keys).difference(moved))
        if changed:
            self._events.append(_compat.make_event(changed, removed=job.request is not None))

    def _of(self, job: Any) -> tuple[list[bytes], list[Any]]:
        keys: Collection[bytes] = job.keys
        return list(keys), [self._rows[row] for row in _compat.rows_of(job)]

    def _begin(
        self, job_id: int, keys: Sequence[bytes], request: str | None, done: Future[list[bool]]
    ) -> None:
        job = _Job(keys, request, done, time.monotonic())
        done.add_done_callback(job.end)
        self._jobs[job_id] = job
