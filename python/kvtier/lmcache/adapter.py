"""The adapter of LMCache's second level, in its process of its own (MP mode)."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Sequence

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvtier.chunk_options import ChunkOptions
from kvtier.lmcache import _compat as _compat  # refuses releases that were not tested
from kvtier.lmcache.objects import ObjectStore

_TASKS = 4

_logger = logging.getLogger("kvtier")


class KvtierL2AdapterConfig(L2AdapterConfigBase):
    """The options of the adapter; LMCache finds it by its name."""

    def __init__(self, options: ChunkOptions) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, object]) -> KvtierL2AdapterConfig:
        """Raises InvalidArgumentError for an option that is unknown or of another type."""
        return cls(ChunkOptions.parse(d))

    @classmethod
    def help(cls) -> str:
        return (
            "kvtier L2 adapter config fields, all optional: server, token_file, tls_server_ca, "
            "tls_certificate, tls_key, insecure_tcp, data_plane, timeout, lookup_timeout, "
            "retry_after, io_threads, batch_bytes (docs/engines/README.md)"
        )


class KvtierL2Adapter(L2AdapterInterface):
    """Keeps objects in the page cache of `kvtier serve`. Thread-safe. Tasks run in threads and end
    within their deadlines, whatever the server does; locks are pins of the server."""

    def __init__(self, config: KvtierL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        """Raises what the server has against the connection; a server that cannot be reached is logged."""
        super().__init__()
        self._objects = ObjectStore("lmcache", config.options)
        self._threads = ThreadPoolExecutor(_TASKS, "kvtier-lmcache")
        self._changing = threading.Lock()
        self._last_task = 0
        self._open = True
        self._store_event = create_event_notifier()
        self._lookup_event = create_event_notifier()
        self._load_event = create_event_notifier()
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        names, buffers = _names(keys), [each.byte_array for each in objects]

        def store() -> Any:
            stored = self._objects.put(names, buffers)
            nbytes = sum(each.nbytes for each, good in zip(buffers, stored) if good)
            return L2StoreResult(all(stored), nbytes)

        return self._begin(store, L2StoreResult(False, 0), self._stored, self._store_event)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._changing:
            stored = dict(self._stored)
            self._stored.clear()
            return stored

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any) -> int:
        names = _names(keys)
        return self._begin(
            lambda: _bitmap(self._objects.lock(names)),
            Bitmap(len(names)),
            self._found,
            self._lookup_event,
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._changing:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        names = _names(keys)
        with self._changing:
            if self._open:
                self._threads.submit(self._logged, lambda: self._objects.unlock(names), None)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        names, buffers = _names(keys), [each.byte_array for each in objects]
        return self._begin(
            lambda: _bitmap(self._objects.get(names, buffers)),
            Bitmap(len(names)),
            self._loaded,
            self._load_event,
        )

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._changing:
            return self._loaded.pop(task_id, None)

    def report_status(self) -> dict[str, Any]:
        """Returns counts since the start. An adapter without a server is healthy: it has misses."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "locked_key_count": self._objects.count_locked(),
            **vars(self._objects.statistics()),
        }

    def close(self) -> None:
        """Waits for tasks, which have deadlines, and closes the event fds. Tasks that have not
        begun fail."""
        with self._changing:
            if not self._open:
                return
            self._open = False
        self._objects.close()  # what is left ends at once, as misses
        self._threads.shutdown(wait=True)
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    def _begin(
        self, work: Callable[[], Any], otherwise: Any, results: dict[int, Any], event: Any
    ) -> int:
        """Runs `work` in a thread; returns the task, whose result is `otherwise` when it fails."""

        def run() -> None:
            result = self._logged(work, otherwise)
            with self._changing:
                results[task] = result
            event.notify()

        with self._changing:
            self._last_task += 1
            task = self._last_task
            if self._open:
                self._threads.submit(run)
            else:
                results[task] = otherwise
        return task

    @staticmethod
    def _logged(work: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return work()
        except Exception:
            _logger.exception("kvtier: a task failed")
            return otherwise


def _names(keys: Sequence[Any]) -> list[bytes]:
    """Returns the keys of the server: of all that an object's key has."""
    return [
        hashlib.sha256(
            json.dumps(
                [
                    key.model_name,
                    key.kv_rank,
                    key.object_group_id,
                    key.cache_salt,
                    key.chunk_hash.hex(),
                ]
            ).encode()
        ).digest()
        for key in keys
    ]


def _bitmap(good: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(good))
    bitmap.batched_set([i for i, each in enumerate(good) if each])
    return bitmap
