"""The remote connector of LMCache inside an engine's process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from concurrent.futures import Future
from typing import Any, Iterator, List, Sequence

from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvtier.chunk_options import ChunkOptions
from kvtier.chunks import ChunkGroup, ChunkStore
from kvtier.identity import make_identity
from kvtier.lmcache import _compat as _compat  # refuses releases that were not tested

_PLUGIN = "kvtier"
_ALLOCATE_AGAIN_AFTER = 0.01

_logger = logging.getLogger("kvtier")


class KvtierConnectorAdapter(ConnectorAdapter):
    """Makes the connector for the storage plugin "kvtier", or "kvtier.NAME"; LMCache finds it by its
    configuration (docs/engines/lmcache.md)."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{_PLUGIN}")

    def create_connector(self, context: Any) -> KvtierConnector:
        """Raises InvalidArgumentError for an option that is unknown or of another type, and what
        the server has against the connection; a server that cannot be reached is logged."""
        prefix = f"remote_storage_plugin.{context.plugin_name or _PLUGIN}."
        given = {
            name.removeprefix(prefix): value
            for name, value in (context.config.extra_config or {}).items()
            if name.startswith(prefix)
        }
        for of_lmcache in ("module_path", "class_name"):
            given.pop(of_lmcache, None)
        return KvtierConnector(ChunkOptions.parse(given), context)


class KvtierConnector(RemoteConnector):
    """Keeps objects in the page cache of `kvtier serve`. Beside each object LMCache's description of
    it is stored, written last. Objects go straight to and from LMCache's memory, by threads and
    within the deadlines of the options; what does not come in time is a miss."""

    def __init__(self, options: ChunkOptions, context: Any) -> None:
        super().__init__(context.config, context.metadata)
        self._memory = context.local_cpu_backend
        self._store = ChunkStore(options)
        self._identity = make_identity("lmcache", {"kind": "in process"})
        self._groups: dict[int, ChunkGroup] = {}
        try:
            self._descriptions = self._store.group(
                make_identity("lmcache", {"kind": "descriptions"}), self.remote_metadata_bytes
            )
        except BaseException:
            self._store.close()
            raise

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Returns for how many leading keys there are objects."""
        names = [_name(key) for key in keys]
        there = [False] * len(names)
        for size, at in _by_size(self._describe(names)):
            for i, each in zip(at, self._group(size).contains([names[i] for i in at])):
                there[i] = each
        return there.index(False) if False in there else len(there)

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        loop = asyncio.get_running_loop()  # its threads, since those of the store are waited for
        return await loop.run_in_executor(None, self.batched_contains, keys)

    async def get(self, key: Any) -> Any:
        (found,) = await self.batched_get([key])
        return found

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> List[Any]:
        """Returns an object for each key, or None."""
        loading = asyncio.ensure_future(self._load([_name(key) for key in keys]))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_let_go)  # threads write to the memory until then
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> List[Any]:
        """Returns the objects of the leading keys that have one."""
        found = await self.batched_get(keys)
        end = found.index(None) if None in found else len(found)
        _release(found[end:])
        return found[:end]

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        names = [_name(key) for key in keys]
        buffers = [memoryview(each.byte_array).cast("B") for each in memory_objs]
        begun = [
            (at, self._group(size).put([names[i] for i in at], [buffers[i] for i in at]))
            for size, at in _by_size([each.nbytes for each in buffers])
        ]
        good: List[int] = []
        for at, future in begun:
            moved = await asyncio.wrap_future(future)
            good.extend(i for i, each in zip(at, moved) if each)
        descriptions = [
            RemoteMetadata(
                buffers[i].nbytes,
                memory_objs[i].get_shapes(),
                memory_objs[i].get_dtypes(),
                memory_objs[i].get_memory_format(),
            ).serialize()
            for i in good
        ]
        put = self._descriptions.put([names[i] for i in good], descriptions)
        described = await asyncio.wrap_future(put)
        lost = len(names) - sum(described)
        if lost > 0:
            _logger.warning("kvtier: %d of %d objects were not stored", lost, len(names))

    async def list(self) -> List[str]:
        """Returns nothing: the server does not list its pages."""
        return []

    async def close(self) -> None:
        """Ends threads and the connection; what is stored stays with the server."""
        await asyncio.get_running_loop().run_in_executor(None, self._store.close)

    def _group(self, size: int) -> ChunkGroup:
        group = self._groups.get(size)
        if group is None:
            group = self._groups[size] = ChunkGroup(self._store, self._identity, size)
        return group

    def _describe(self, names: Sequence[bytes]) -> List[int]:
        """Returns the size of each object, 0 for one that is not there."""
        descriptions, read = self._start_describing(names)
        found = [
            _parse(each) if good else None for each, good in zip(descriptions, read.result())
        ]
        return [0 if each is None else each.length for each in found]

    def _start_describing(self, names: Sequence[bytes]) -> tuple[List[bytearray], Future[List[bool]]]:
        descriptions = [bytearray(self.remote_metadata_bytes) for _ in names]
        return descriptions, self._descriptions.get(names, descriptions)

    async def _load(self, names: Sequence[bytes]) -> List[Any]:
        descriptions, reading = self._start_describing(names)
        there = await asyncio.wrap_future(reading)
        found = [_parse(each) if good else None for each, good in zip(descriptions, there)]
        objects = await self._allocate(found)
        sizes = [
            0 if each is None or made is None else each.length
            for each, made in zip(found, objects)
        ]
        begun = []
        for size, at in _by_size(sizes):
            into = [memoryview(objects[i].byte_array).cast("B") for i in at]
            fitting = [k for k, each in enumerate(into) if each.nbytes == size]
            begun.append(
                (
                    [at[k] for k in fitting],
                    self._group(size).get(
                        [names[at[k]] for k in fitting], [into[k] for k in fitting]
                    ),
                )
            )
        whole = [False] * len(names)
        for at, future in begun:
            moved = await asyncio.wrap_future(future)
            for i, each in zip(at, moved):
                whole[i] = each
        for i, each in enumerate(objects):
            if each is not None and not whole[i]:
                each.ref_count_down()
                objects[i] = None
        return objects

    async def _allocate(self, descriptions: Sequence[Any]) -> List[Any]:
        """Returns memory for each object that is described, or None from where it does not suffice.
        Only the first is waited for, since the others may wait for what this batch itself has; and
        not in LMCache, which would hold up the event loop."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._store.options.timeout
        objects: List[Any] = [None] * len(descriptions)
        try:
            for i, each in enumerate(descriptions):
                while each is not None and objects[i] is None:
                    objects[i] = self._memory.allocate(
                        each.shapes, each.dtypes, each.fmt, busy_loop=False
                    )
                    if objects[i] is None:
                        if any(made is not None for made in objects) or loop.time() >= end:
                            return objects
                        await asyncio.sleep(_ALLOCATE_AGAIN_AFTER)
        except BaseException:
            _release(objects)
            raise
        return objects


def _release(objects: Sequence[Any]) -> None:
    for each in objects:
        if each is not None:
            each.ref_count_down()


def _parse(description: bytearray) -> Any:
    """Returns a description of LMCache; None for one that this release does not know, as another may
    have written it."""
    try:
        return RemoteMetadata.deserialize(description)
    except (KeyError, ValueError) as failure:
        _logger.warning("kvtier: expected a description of an object, found %s", failure)
        return None


def _let_go(loading: asyncio.Future[list[Any]]) -> None:
    if loading.cancelled() or loading.exception() is not None:
        return
    _release(loading.result())


def _name(key: Any) -> bytes:
    """Returns the key of the server: of all that an object's key has."""
    return hashlib.sha256(key.to_string().encode()).digest()


def _by_size(sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Returns where each size above 0 is."""
    for size in sorted(set(sizes) - {0}):
        yield size, [i for i, each in enumerate(sizes) if each == size]
