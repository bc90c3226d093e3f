"""The connector of vLLM for releases, or set-ups, without tiers: KV goes between the GPU and the server
layer by layer."""

from __future__ import annotations

import logging
import sys
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Iterable, Sequence

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvtier.chunk_options import ChunkOptions
from kvtier.chunks import ChunkGroup, ChunkStore
from kvtier.errors import invalid
from kvtier.identity import make_identity
from kvtier.vllm import _compat as _compat  # refuses releases that were not tested

_MAX_STAGED_BYTES = 1 << 30  # of stores that the server has not taken yet; more are dropped

_KEPT = (
    "blocks stay with the server, and are found for the same name of the model; "
    "serve other weights under another name, or with another server"
)

_logger = logging.getLogger("kvtier")


@dataclass
class KvtierHandshake(KVConnectorHandshakeMetadata):
    """What the scheduler looks up for a worker: the chunks of its blocks, a segment for each layer."""

    identity: str
    block_bytes: int
    layers: int


@dataclass
class Transfer:
    """Blocks of a request: their hashes, and where they are in the KV cache."""

    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def add(self, other: Transfer) -> None:
        self.hashes += other.hashes
        self.blocks += other.blocks


@dataclass
class KvtierMetadata(KVConnectorMetadata):
    """Of a step, from the scheduler to the workers."""

    load: Transfer = field(default_factory=Transfer)
    store: Transfer = field(default_factory=Transfer)


class KvtierConnector(KVConnectorBase_V1):
    """Keeps blocks of prompts in the page cache of `kvtier serve`. In the scheduler no method waits
    for the server. In a worker the forward pass waits for the layers that it loads, within the
    `timeout` of the options; blocks that have not come by then are reported to vLLM, which computes
    them where `kv_load_failure_policy` is "recompute"."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """`kv_connector_extra_config`: of `ChunkOptions`. Raises InvalidArgumentError for options
        that are no use, and for models and parallel sizes that this connector does not have."""
        super().__init__(vllm_config, role, kv_cache_config)
        options = ChunkOptions.parse(self._kv_transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        for name in ("pipeline", "decode_context", "prefill_context"):
            size = getattr(parallel, f"{name}_parallel_size", 1)
            if size != 1:
                raise invalid(f"{name}_parallel_size: expected 1, which was tested, found {size}")
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise invalid(f"KV cache: expected one group of layers, found {len(groups)}")
        spec = groups[0].kv_cache_spec
        # Layers of one kind whose shapes differ have a spec each.
        for each in getattr(spec, "kv_cache_specs", {"": spec}).values():
            if not isinstance(each, FullAttentionSpec) or hasattr(each, "rswa_window"):
                raise invalid(
                    "KV cache: expected FullAttentionSpec, with which a request keeps its blocks "
                    f"while it runs, found {type(each).__name__}"
                )
        self._block_tokens = int(spec.block_size)
        self._side: _Scheduler | _Worker
        store = ChunkStore(options)
        if role == KVConnectorRole.SCHEDULER:
            self._side = _Scheduler(store, self._block_tokens)
        else:
            self._side = _Worker(store, vllm_config, kv_cache_config)

    @property
    def _scheduler(self) -> _Scheduler:
        assert isinstance(self._side, _Scheduler)
        return self._side

    @property
    def _worker(self) -> _Worker:
        assert isinstance(self._side, _Worker)
        return self._side

    def shutdown(self) -> None:
        """Ends threads and the connection; what is stored stays with the server."""
        self._side.close()

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KvtierHandshake:
        return self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_load(self._metadata().load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.end_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.stage(layer_name, self._metadata().store)

    def wait_for_save(self) -> None:
        # vLLM calls this, too, while an exception ends the pass: some layers have no KV of the blocks then.
        raised = sys.exc_info()[0] is not None
        self._worker.end_step(Transfer() if raised else self._metadata().store)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not stored is computed: no request has to wait for its own

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # a whole graph would leave the calls for single layers out

    def _metadata(self) -> KvtierMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvtierMetadata)
        return metadata

    # ---- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._scheduler.set_groups(metadata.values())

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.count_matched(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvtierMetadata:
        return self._scheduler.end_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.loads_failed(connector_output.invalid_block_ids or ())

    def reset_cache(self) -> bool:
        """Returns False: what is stored stays with the server, where others use it."""
        _logger.warning("kvtier: %s", _KEPT)
        return False

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request.request_id)
        return False, None


@dataclass
class _Request:
    hashes: list[bytes]  # of the full blocks of its prompt
    blocks: list[int] = field(default_factory=list)
    stored: int = 0  # blocks that need not be stored any more


@dataclass
class _Lookup:
    first: int  # block
    answers: list[Future[list[bool]]]


class _Scheduler:
    def __init__(self, store: ChunkStore, block_tokens: int) -> None:
        self._store = store
        self._block_tokens = block_tokens
        self._groups: list[ChunkGroup] = []  # of the workers
        self._lookups: dict[str, _Lookup] = {}
        self._requests: dict[str, _Request] = {}
        self._load = Transfer()
        # Of the last step and this one. vLLM prepares a step before the result of the last one is known, not
        # before that of the one before it.
        self._loading: deque[set[int]] = deque([set()], maxlen=2)

    def close(self) -> None:
        self._store.close()

    def set_groups(self, handshakes: Iterable[KvtierHandshake]) -> None:
        self._groups = [
            self._store.group(each.identity, each.block_bytes * each.layers, each.layers)
            for each in handshakes
        ]

    def count_matched(self, request: Any, computed_tokens: int) -> int | None:
        """Returns how many tokens beyond those computed all workers can load; None: not known yet."""
        first = computed_tokens // self._block_tokens
        # One token at least must be computed.
        end = (request.num_tokens - 1) // self._block_tokens
        hashes = _hashes_of(request, end)[first:]
        if not hashes or not self._groups or computed_tokens % self._block_tokens != 0:
            return 0
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0  # logprobs of its prompt, or its whole embedding, are asked for
        lookup = self._lookups.get(request.request_id)
        if lookup is None or lookup.first != first:
            lookup = _Lookup(first, [each.start_contains(hashes) for each in self._groups])
            self._lookups[request.request_id] = lookup
        if not all(each.done() for each in lookup.answers):
            return None
        found = [each.result() for each in lookup.answers if not each.cancelled()]
        counts = [each.index(False) if False in each else len(each) for each in found]
        blocks = min(counts) if len(counts) == len(self._groups) else 0
        return min(blocks, len(hashes)) * self._block_tokens

    def allocated(self, request: Any, blocks: Sequence[int], external_tokens: int) -> None:
        lookup = self._lookups.pop(request.request_id, None)
        hashes = _hashes_of(request, request.num_prompt_tokens // self._block_tokens)
        state = _Request(hashes, list(blocks))
        self._requests[request.request_id] = state
        if external_tokens == 0:
            return
        assert lookup is not None
        end = lookup.first + external_tokens // self._block_tokens
        found = _hashes_of(request, end)[lookup.first :]
        self._load.add(Transfer(found, list(blocks[lookup.first : end])))
        state.stored = end

    def end_step(self, output: Any) -> KvtierMetadata:
        """Returns what the workers do in this step: loads of requests that were allocated for, and
        stores of blocks that it fills. Blocks behind ones that are being loaded are stored by a later
        step: where a load fails on any worker, what was computed from it is wrong on all."""
        metadata = KvtierMetadata(load=self._load)
        self._loading.append(set(self._load.blocks))
        self._load = Transfer()
        for each in output.scheduled_new_reqs:
            self._fill(output, metadata.store, each.req_id, each.block_ids, each.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            state = self._requests.get(request)
            new = cached.new_block_ids[i]
            if state is not None and new is not None:
                resumed = request in getattr(cached, "resumed_req_ids", ())
                state.blocks = list(new[0]) if resumed else state.blocks + list(new[0])
            self._fill(output, metadata.store, request, None, cached.num_computed_tokens[i])
        return metadata

    def loads_failed(self, blocks: Iterable[int]) -> None:
        """Stores nothing more of requests that hold one of these blocks, which other requests may share."""
        failed = set(blocks)
        if failed:
            held = {name: each.blocks for name, each in self._requests.items()}
            for name in [name for name, own in held.items() if not failed.isdisjoint(own)]:
                del self._requests[name]

    def finished(self, request: str) -> None:
        self._requests.pop(request, None)
        self._lookups.pop(request, None)

    def _fill(
        self, output: Any, store: Transfer, request: str, blocks: Any, computed_tokens: int
    ) -> None:
        state = self._requests.get(request)
        if state is None:
            return
        if blocks is not None:
            state.blocks = list(blocks[0])
            state.stored = max(state.stored, computed_tokens // self._block_tokens)
        tokens = computed_tokens + output.num_scheduled_tokens[request]
        end = min(tokens // self._block_tokens, len(state.hashes), len(state.blocks))
        if end > state.stored and all(each.isdisjoint(state.blocks) for each in self._loading):
            part = slice(state.stored, end)
            store.add(Transfer(state.hashes[part], state.blocks[part]))
            state.stored = end


def _hashes_of(request: Any, end: int) -> list[bytes]:
    return [bytes(each) for each in request.block_hashes[:end]]


@dataclass
class _Staged:
    """Blocks of one layer in host memory, [blocks, ...]."""

    tensor: Any
    moved: Future[list[bool]] | None = None

    def rows(self) -> list[Any]:
        raw = self.tensor.view(torch.uint8).numpy()
        return list(raw.reshape(len(raw), -1))


class _Worker:
    def __init__(self, store: ChunkStore, vllm_config: Any, kv_cache_config: Any) -> None:
        self._store = store
        self._config = vllm_config
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._names = list(kv_cache_config.kv_cache_groups[0].layer_names)
        self._caches: dict[str, Any] = {}  # [blocks, ...]
        self._group: ChunkGroup | None = None
        self._made: KvtierHandshake | None = None
        self._loading: Transfer = Transfer()
        self._loads: dict[str, _Staged] = {}
        self._failed: set[int] = set()
        self._staged: dict[str, _Staged] = {}
        self._staged_bytes = 0

    def close(self) -> None:
        self._store.close()

    def register(self, caches: dict[str, Any]) -> None:
        """Takes the KV caches of all layers. Raises InvalidArgumentError for shapes that it does not
        know, and what the server has against the connection."""
        self._names = [name for name in self._names if name in caches]
        if not self._names:
            raise invalid(f"KV caches: expected layers of the KV cache group, found {list(caches)}")
        self._caches = {name: self._by_block(name, caches[name]) for name in self._names}
        first = self._caches[self._names[0]]
        for name, each in self._caches.items():
            if each[0].shape != first[0].shape or each.dtype != first.dtype:
                raise invalid(
                    f"KV caches: expected blocks of one shape, found {tuple(each[0].shape)} in {name} "
                    f"and {tuple(first[0].shape)} before"
                )
        block_bytes = first[0].numel() * first.element_size()
        parallel = self._config.parallel_config
        cache_config = self._config.cache_config
        attention = getattr(self._config, "attention_config", None)
        model = self._config.model_config
        # The model may be a folder, which has other weights on another machine.
        served = getattr(model, "served_model_name", None) or model.model
        named = {} if served == model.model else {"served_model_name": str(served)}
        identity = make_identity(
            "vllm-v1",
            {
                **named,
                "model": str(model.model),
                "dtype": str(first.dtype),
                "cache_dtype": str(getattr(cache_config, "cache_dtype", None)),
                "backend": str(getattr(attention, "backend", None)),
                "block_tokens": int(cache_config.block_size),
                "block_shape": [int(size) for size in first[0].shape],
                "layers": self._names,
                "tp_size": int(parallel.tensor_parallel_size),
                "rank": int(parallel.rank),
            },
        )
        layers = len(self._names)
        self._made = KvtierHandshake(identity, block_bytes, layers)
        self._group = self._store.group(identity, block_bytes * layers, layers)
        _logger.info("kvtier: blocks of %d layers of %d bytes as %s", layers, block_bytes, identity)

    def handshake(self) -> KvtierHandshake:
        assert self._made is not None, "KV caches are registered before"
        return self._made

    def begin_step(self) -> None:
        """Forgets what a step that was not ended has copied."""
        self._staged = {}

    def start_load(self, load: Transfer) -> None:
        """Starts to read blocks to host memory, layer by layer."""
        self._loading = load
        self._loads = {}
        if not load.blocks:
            return
        assert self._group is not None
        for index, name in enumerate(self._names):
            staged = self._stage_room(name, len(load.blocks))
            staged.moved = self._group.segment(index).get(load.hashes, staged.rows())
            self._loads[name] = staged

    def end_load(self, name: str) -> None:
        """Waits for a layer, and starts the copy of its blocks to the KV cache; those that did not
        come are failed."""
        staged = self._loads.pop(name, None)
        if staged is None or staged.moved is None:
            return
        good = staged.moved.result()
        blocks = self._loading.blocks
        self._failed.update(block for block, each in zip(blocks, good) if not each)
        rows = [i for i, each in enumerate(good) if each]
        if not rows:
            return
        cache = self._caches[name]
        where = torch.tensor([blocks[i] for i in rows], device=cache.device)
        source = staged.tensor if len(rows) == len(blocks) else staged.tensor[rows]
        cache[where] = source.to(cache.device, non_blocking=True)

    def stage(self, name: str, store: Transfer) -> None:
        """Starts the copy of a layer's blocks to host memory, again where the layer runs more than
        once: with microbatches no block need be whole before the last time."""
        if not store.blocks or name not in self._caches:
            return
        staged = self._staged.get(name)
        if staged is None:
            if self._staged_bytes > _MAX_STAGED_BYTES:
                return
            staged = self._staged[name] = self._stage_room(name, len(store.blocks))
        cache = self._caches[name]
        where = torch.tensor(store.blocks, device=cache.device)
        staged.tensor.copy_(cache[where], non_blocking=True)

    def end_step(self, store: Transfer) -> None:
        """Waits for copies from the GPU, and gives the blocks of the step to threads that store
        them. Layers that no call was made for are copied now."""
        for name in list(self._loads):
            self.end_load(name)
        if not store.blocks:
            return
        for name in self._names:
            if name not in self._staged:
                self.stage(name, store)
        staged, self._staged = self._staged, {}
        if len(staged) < len(self._names):
            self._store.count(unstored_chunks=len(store.blocks))  # the server is too slow
            return
        if any(each.tensor.is_pinned() for each in staged.values()):
            torch.cuda.current_stream().synchronize()
        assert self._group is not None
        rows = [staged[name].rows() for name in self._names]
        segments = [layer[i] for i in range(len(store.blocks)) for layer in rows]
        nbytes = sum(each.tensor.nbytes for each in staged.values())
        self._staged_bytes += nbytes

        def end(_: Future[list[bool]]) -> None:
            self._staged_bytes -= nbytes
            staged.clear()

        self._group.put(store.hashes, segments).add_done_callback(end)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def _by_block(self, name: str, cache: Any) -> Any:
        """Returns a view [blocks, ...] of a layer's cache."""
        for dim in (0, 1):
            if cache.ndim > dim and cache.shape[dim] == self._num_blocks:
                return cache.movedim(dim, 0)
        raise invalid(
            f"{name}: expected a KV cache of {self._num_blocks} blocks in its first or second "
            f"dimension, found {tuple(cache.shape)}"
        )

    def _stage_room(self, name: str, blocks: int) -> _Staged:
        cache = self._caches[name]
        shape = (blocks, *cache.shape[1:])
        return _Staged(torch.empty(shape, dtype=cache.dtype, pin_memory=cache.is_cuda))
