"""The storage backend of SGLang's hierarchical cache."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any, Callable, Sequence

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvtier.chunk_options import ChunkOptions
from kvtier.chunks import ChunkStore
from kvtier.errors import invalid
from kvtier.identity import Field
from kvtier.sglang import _compat as _compat  # refuses releases that were not tested
from kvtier.sglang.pools import StoredPool

# What SGLang itself reads of the extra configuration, or adds to it.
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")

_logger = logging.getLogger("kvtier")


class KvtierStorage(HiCacheStorage):
    """Keeps pages of host pools in the page cache of `kvtier serve`. Called by SGLang's storage
    threads; a call ends within the deadlines of `ChunkOptions`, whatever the server does, and what
    did not come is False."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """`storage_config.extra_config`: what the dynamic backend needs, with `interface_v1`, and
        options of `ChunkOptions`. Raises InvalidArgumentError for options that are no use."""
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise invalid(
                'extra config: expected "interface_v1": 1, without which SGLang copies page by '
                f"page, found {extra.get('interface_v1')!r}"
            )
        if storage_config.dcp_size != 1:
            raise invalid(
                "decode context parallel size: expected 1, the pages of which have been tested, "
                f"found {storage_config.dcp_size}"
            )
        options = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
        self._config = storage_config
        self._store = ChunkStore(ChunkOptions.parse(options))
        self._pools: dict[str, StoredPool] = {}
        self._counting = threading.Lock()
        self._metrics = StorageMetrics()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the pool of keys and values. Raises what the server has against the connection; a
        server that cannot be reached is logged."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Returns how many leading pages of keys and values are stored."""
        return self._pools[str(PoolName.KV)].group.count_prefix(_encode(keys))

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        pool = self._pools[str(PoolName.KV)]
        return self._timed("prefetch", pool, lambda: pool.load(_encode(keys), host_indices))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        pool = self._pools[str(PoolName.KV)]
        return self._timed("backup", pool, lambda: pool.save(_encode(keys), host_indices))

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Returns the longest prefix of which every pool has what its policy asks for."""
        pages = self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        usable = set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # such a pool does not limit the prefix, and none of its pages are found
            pool = self._pools.get(str(transfer.name))
            there = (
                [False] * pages if pool is None else pool.group.contains(_encode(keys[:pages]))
            )
            window = pages
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            lengths = _usable_prefixes(there, window)
            if lengths:
                hits[transfer.name] = max(lengths)
            usable &= lengths
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._move("prefetch", transfers, StoredPool.load)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._move("backup", transfers, StoredPool.save)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise _no_tensors("get")

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise _no_tensors("batch_get")

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        raise _no_tensors("set")

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise _no_tensors("batch_set")

    def clear(self) -> None:
        """Raises: what is stored stays with the server, where others use it. SGLang logs that."""
        raise NotImplementedError(
            "kvtier: pages stay with the server, and are found for the same name of the model; "
            "serve other weights under another name, or with another server"
        )

    def get_stats(self) -> StorageMetrics:
        """Returns pages and GB/s of every batch since the last call that moved a page, for SGLang's
        own metrics; lookups and their hits SGLang counts itself."""
        with self._counting:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def _timed(
        self, what: str, pool: StoredPool, move: Callable[[], list[bool]]
    ) -> list[bool]:
        begun = time.perf_counter()
        moved = move()
        seconds = time.perf_counter() - begun
        pages = sum(moved)
        if pages > 0:
            with self._counting:
                getattr(self._metrics, f"{what}_pgs").append(pages)
                getattr(self._metrics, f"{what}_bandwidth").append(
                    pages * pool.group.chunk_bytes / seconds / 1e9
                )
        return moved

    def close(self) -> None:
        """Ends threads and the connection; what is stored stays with the server."""
        self._store.close()

    def _register(self, name: Any, pool: Any) -> None:
        stored = StoredPool(self._store, pool, self._identity(name, pool))
        self._pools[str(name)] = stored
        _logger.info("kvtier: pages of %d bytes of the pool %s", stored.group.chunk_bytes, name)

    def _identity(self, name: Any, pool: Any) -> dict[str, Field]:
        config = self._config
        # Pages of latent attention are the same on all tensor-parallel ranks, and the first writes
        # them; states, and a draft model's heads, differ.
        replicated = (
            config.is_mla_model
            and str(name) != str(PoolName.MAMBA)
            and not isinstance(pool, MHATokenToKVPoolHost)
        )
        return {
            "model": config.model_name,
            "pool": str(name),
            "tp": None if replicated else [config.tp_rank, config.tp_size],
            "pp": [config.pp_rank, config.pp_size],
            "attention_cp": [config.attn_cp_rank, config.attn_cp_size],
        }

    def _move(self, what: str, transfers: Any, move: Any) -> dict[Any, list[bool]]:
        results: dict[Any, list[bool]] = {}
        for transfer in transfers:
            keys = _encode(transfer.keys or ())
            pool = self._pools.get(str(transfer.name))
            if pool is None or transfer.host_indices is None:
                _logger.error(
                    "kvtier: expected a registered pool and host indices, found %s", transfer.name
                )
                results[transfer.name] = [False] * len(keys)
            else:
                work = partial(move, pool, keys, transfer.host_indices)
                results[transfer.name] = self._timed(what, pool, work)
        return results


def _usable_prefixes(there: Sequence[bool], window: int) -> set[int]:
    """Returns the lengths of prefixes whose last `window` pages, or all of fewer, are there."""
    lengths = set()
    run = 0
    for length, page in enumerate(there, 1):
        run = run + 1 if page else 0
        if run >= min(window, length):
            lengths.add(length)
    return lengths


def _encode(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _no_tensors(method: str) -> NotImplementedError:
    return NotImplementedError(
        f"{method}: expected batch_get_v1 and batch_set_v1, which SGLang calls with interface_v1"
    )
