"""An engine in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple, Optional, Sequence

import numpy as np
from kvtier.config import AttendOptions, ModelConfig, RetrievalConfig, SketchConfig, check_member
from kvtier.engine_config import Backend, MemoryConfig
from kvtier.lease import Closing
from kvtier.session import check_ids
from numpy.typing import NDArray

from kvtier_engine import _native
from kvtier_engine.arrays import Array, like, native, shape_of, torch_fields
from kvtier_engine.session import AttendResult, Session, native_options


@dataclass(frozen=True)
class BatchItem:
    """Arguments of one `Session.decode` of a batch."""

    session: Session
    query: Array
    key: Array
    value: Array
    options: AttendOptions = AttendOptions()
    selected: Optional[Array] = None
    bias: Optional[Array] = None
    with_missed: bool = False
    with_selected: bool = False
    out: Optional[Array] = None
    lse: Optional[Array] = None
    tokens_after: int = 0


class Stats(NamedTuple):
    """Counters by the names of kvtier/stats.h. `cumulative` only grows. `seconds`: by stage, with
    `time_stages`. `tiers` and `tenants`: one mapping each."""

    cumulative: Mapping[str, int]
    snapshot: Mapping[str, int]
    seconds: Mapping[str, float]
    tiers: Sequence[Mapping[str, Any]]
    tenants: Sequence[Mapping[str, Any]]


class Engine(Closing):
    """Owns the device, the pages of keys and values, and the workspaces; allocates when it is made
    all that steps use. As `kvtier::Engine`. Thread-safe. Sessions keep what they need of it alive.

    `retrieval`: how calls select unless they say otherwise. `extra_sketches`: what calls with other
    retrieval settings need. `reject_nonfinite`: NaN and infinity in host tensors raise, in device
    tensors they make the session's next call raise; False: such tokens score lowest.
    `time_stages`: measures stages of calls without a stream, for `Stats.seconds`.
    `dense_when_faster`: with KV on the GPU, sparse layers attend to all tokens where that is
    expected to be faster; `dense_queries` of `Stats.cumulative` counts such queries.

    Raises `InvalidArgumentError` with all problems of the settings, `ResourceExhaustedError` when
    memory cannot be had, `UnimplementedError` when CUDA is asked for and cannot be used. Messages
    of the library go to the logger "kvtier.engine"."""

    def __init__(
        self,
        model: ModelConfig,
        retrieval: RetrievalConfig = RetrievalConfig(),
        memory: MemoryConfig = MemoryConfig(),
        *,
        extra_sketches: Sequence[SketchConfig] = (),
        backend: Backend = Backend.AUTO,
        reject_nonfinite: bool = True,
        time_stages: bool = False,
        dense_when_faster: bool = True,
    ) -> None:
        check_member("backend", backend, Backend)
        self.model = model
        self.retrieval = retrieval
        self.memory = memory
        self._native = _native.Engine(
            *(model, memory, retrieval, extra_sketches, backend, reject_nonfinite, time_stages),
            dense_when_faster,
        )

    @property
    def backend(self) -> Backend:
        """Where kernels run: `CPU` or `CUDA`."""
        return Backend[self._native.backend().name]

    def open(
        self,
        *,
        capacity_tokens: int = 0,
        token_ids: Sequence[int] | NDArray[np.int32] = (),
        tenant_secret: bytes = b"",
        model_fingerprint: str = "",
        max_page_bytes: int = 0,
        tenant: str = "",
        whole: bool = False,
    ) -> Session:
        """Opens a session. `capacity_tokens` 0: `MemoryConfig.max_session_tokens`.

        `token_ids`: ids of the first tokens. The session begins with the longest run of whole pages
        of them that is stored (`Session.publish`) under the same secret and fingerprint, as
        `length` says. `max_page_bytes`: most bytes of its pages, 0: no limit. `tenant`: whose
        quota (`set_quota`) they count against as well. `whole`: the session is opened only where all
        that it takes at its capacity (`session_memory`) is there, and then has it; else
        `ResourceExhaustedError` has the arithmetic."""
        return Session(
            self,
            self._native.open(
                *(capacity_tokens, check_ids(token_ids), tenant_secret, model_fingerprint),
                *(max_page_bytes, tenant, whole),
            ),
        )

    def set_quota(self, tenant: str, page_bytes: Optional[int]) -> None:
        """Limits the bytes of pages that the sessions of a tenant hold together; None: no limit."""
        self._native.set_quota(tenant, page_bytes)

    def batch_decode(
        self, layer: int, items: Sequence[BatchItem], *, stream: Optional[int] = None
    ) -> list[AttendResult]:
        """As `Session.decode` for each item, in one step; every session at most once. All items are
        checked before any changes."""
        results = []
        calls = []
        for item in items:
            result = item.session.outputs(
                *(layer, item.query, item.options, shape_of("key", item.key)[0]),
                *(item.with_missed, item.with_selected, item.out, item.lse),
            )
            results.append(result)
            call = (
                *(item.session.native, native("query", item.query), native("key", item.key)),
                *(native("value", item.value), native("selected", item.selected)),
                *(native("bias", item.bias), native("out", result.out), native("lse", result.lse)),
                *(result.selected, result.missed),
                native_options(item.options, item.tokens_after),
            )
            calls.append(call)
        self._native.decode(layer, calls, stream)
        return results

    def decode_rows(
        self,
        layer: int,
        sessions: Sequence[Session],
        query: Array,
        key: Array,
        value: Array,
        options: AttendOptions = AttendOptions(),
        *,
        stream: Optional[int] = None,
    ) -> Array:
        """As `batch_decode` of tensors of torch as models have them, with less work of the host:
        `query` [batch, query_heads, tokens, head_dim], `key` and `value` [batch, kv_heads, tokens,
        head_dim], one row for each session, of any strides, the last dimension dense. Returns
        `out` alone, [batch, tokens, query_heads, head_dim], of the query's dtype."""
        device = query.device
        fields = (
            torch_fields("query", query, device),
            torch_fields("key", key, device),
            torch_fields("value", value, device),
        )
        batch, heads, tokens, head_dim = query.shape if query.ndim == 4 else (0, 0, 0, 0)
        out = query.new_empty((batch, tokens, heads, head_dim))
        self._native.decode_rows(
            *(layer, [session.native for session in sessions], *fields, out.data_ptr()),
            *(device.index if query.is_cuda else -1, stream, native_options(options, 0)),
        )
        return out

    def merge(
        self,
        parts: Sequence[tuple[Array, Array]],
        *,
        out: Optional[Array] = None,
        lse: Optional[Array] = None,
        stream: Optional[int] = None,
    ) -> AttendResult:
        """Merges attention over disjoint sets of tokens by log-sum-exp. `parts`: pairs of `out`
        [tokens, query_heads, head_dim] and `lse` [tokens, query_heads], all float32, as the
        result."""
        shape = shape_of("parts", parts[0][0]) if parts else (0, 0, 0)
        first = parts[0][0] if parts else np.empty(shape, np.float32)
        result = AttendResult(
            like("out", first, shape) if out is None else out,
            like("lse", first, shape[:2]) if lse is None else lse,
        )
        arrays = [(native("parts", each), native("parts", its_lse)) for each, its_lse in parts]
        self._native.merge(arrays, native("out", result.out), native("lse", result.lse), stream)
        return result

    def stats(self) -> Stats:
        """Returns the counters."""
        return Stats(**self._native.stats())

    def close(self) -> None:
        """Lets go of the memory that no session holds. Calls of the engine raise from now on."""
        self._native.close()
