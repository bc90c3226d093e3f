"""Settings of a session and of a call, as in kvtier/config.h, and their messages."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

from kvtier.errors import invalid
from kvtier.v1 import retrieval_pb2, session_pb2

__all__ = [
    "AttendOptions",
    "DType",
    "Estimator",
    "LayerConfig",
    "LayerMode",
    "ModelConfig",
    "PlaneKind",
    "RecallTarget",
    "RetrievalConfig",
    "Selection",
    "SelectionRule",
    "SessionMemory",
    "SketchCode",
    "SketchConfig",
    "ValueWeighting",
]


def check_member(name: str, value: object, kind: type[enum.Enum]) -> None:
    """Raises `InvalidArgumentError` unless `value` is a member of `kind`."""
    if not isinstance(value, kind):
        members = ", ".join(f"kvtier.{kind.__name__}.{each}" for each in kind.__members__)
        raise invalid(f"{name}: expected one of {members}, found {value!r}")


@dataclass(frozen=True)
class Settings:
    """Raises `InvalidArgumentError` where a field whose default is a member of an enumeration is
    given anything else, such as the name of a member."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if isinstance(each.default, enum.Enum):
                name = f"{type(self).__name__}.{each.name}"
                check_member(name, getattr(self, each.name), type(each.default))


class DType(enum.Enum):
    """How the server stores keys and values."""

    FLOAT16 = "DATA_TYPE_FLOAT16"
    BFLOAT16 = "DATA_TYPE_BFLOAT16"


class Estimator(enum.Enum):
    """How a token is scored from its sketch."""

    SOFT_COLLISION = "ESTIMATOR_SOFT_COLLISION"
    HARD_COLLISION = "ESTIMATOR_HARD_COLLISION"
    NORM_AWARE = "ESTIMATOR_NORM_AWARE"


class ValueWeighting(enum.Enum):
    """How the value norm enters a score. `DEFAULT`: the estimator's own."""

    DEFAULT = "VALUE_WEIGHTING_UNSPECIFIED"
    LINEAR = "VALUE_WEIGHTING_LINEAR"
    CALIBRATED = "VALUE_WEIGHTING_CALIBRATED"
    LOGIT = "VALUE_WEIGHTING_LOGIT"
    NONE = "VALUE_WEIGHTING_NONE"


class Selection(enum.Enum):
    """Which heads share a selection. `PER_SEQUENCE`: one set for all heads of a sequence."""

    PER_QUERY_HEAD = "SELECTION_PER_QUERY_HEAD"
    PER_KV_HEAD = "SELECTION_PER_KV_HEAD"
    PER_SEQUENCE = "SELECTION_PER_SEQUENCE"


class SelectionRule(enum.Enum):
    """Which tokens are taken by their scores. `PRIORITY`: a sample of which each token counts one
    over its chance of being taken, so that attention has the expectation of dense attention; with
    norm-aware, or calibrated soft collision."""

    TOP_K = "SELECTION_RULE_TOP_K"
    PRIORITY = "SELECTION_RULE_PRIORITY"


class SketchCode(enum.Enum):
    """How the bits of a sketch are made from a key. `SCALAR`: the rotated and normalised key, rounded
    to `num_planes / head_dim` bits for each coordinate; with norm-aware."""

    SIGN = "SKETCH_CODE_SIGN"
    SCALAR = "SKETCH_CODE_SCALAR"


class PlaneKind(enum.Enum):
    """Kind of hyperplanes."""

    GAUSSIAN = "PLANE_KIND_GAUSSIAN"
    ORTHOGONAL = "PLANE_KIND_ORTHOGONAL"


class LayerMode(enum.Enum):
    """What a layer's attention sees."""

    SPARSE = "LAYER_MODE_SPARSE"
    DENSE = "LAYER_MODE_DENSE"
    SLIDING_WINDOW = "LAYER_MODE_SLIDING_WINDOW"


@dataclass(frozen=True)
class SketchConfig(Settings):
    """The bits kept of each key."""

    kind: PlaneKind = PlaneKind.GAUSSIAN
    num_planes: int = 600
    seed: int = 0
    code: SketchCode = SketchCode.SIGN

    def message(self) -> retrieval_pb2.Sketch:
        return retrieval_pb2.Sketch(
            kind=self.kind.value,
            num_planes=self.num_planes,
            seed=self.seed,
            code=self.code.value,
        )


@dataclass(frozen=True)
class RetrievalConfig(Settings):
    """How tokens are scored and chosen. The defaults measure nearest to dense attention for the
    bytes and rows that they cost, unless rows are few (docs/choosing.md); `socket` has the paper's.
    Without `top_k`, `sparsity` and `error_target` the priority rule in one phase aims at
    `DEFAULT_ERROR_TARGET`; the other rule, two phases and calls with a recall target take
    `DEFAULT_TOP_K` tokens."""

    DEFAULT_ERROR_TARGET: ClassVar[float] = 0.03
    DEFAULT_TOP_K: ClassVar[int] = 2048

    estimator: Estimator = Estimator.NORM_AWARE
    value_weighting: ValueWeighting = ValueWeighting.DEFAULT
    selection: Selection = Selection.PER_KV_HEAD
    #: None: gaussian for the collision estimators, orthogonal for norm-aware.
    plane_kind: PlaneKind | None = None
    seed: int = 0
    planes_per_table: int = 10
    tables: int = 60
    tau: float = 0.4
    #: Of norm-aware: 64..1024, of a scalar code 1 to 8 times head_dim. 0: 256 of a sign code; of a
    #: scalar code the least multiple of head_dim from 256 on, and at least 2 bits a coordinate.
    num_planes: int = 0
    query_bits: int = 4
    #: Tokens to select; 0: not given.
    top_k: int = 0
    #: In place of `top_k`, visible tokens over those selected; 0: not given.
    sparsity: float = 0.0
    sink_tokens: int = 64
    recent_tokens: int = 64
    #: TOP_K where scores are no logits.
    rule: SelectionRule = SelectionRule.PRIORITY
    #: SIGN with the collision estimators.
    code: SketchCode = SketchCode.SCALAR
    #: With the priority rule: the standard error of the softmax denominator that is aimed at,
    #: relative to it, above 0 and below 1; 0: not given. `top_k` or `sparsity` is the most tokens.
    error_target: float = 0.0
    #: With the priority rule over a scalar code: bits of a coordinate that are read of every token,
    #: the whole code being read of `candidates` times k tokens; 0: all bits of every token.
    coarse_bits: int = 0
    candidates: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plane_kind is not None:
            check_member("RetrievalConfig.plane_kind", self.plane_kind, PlaneKind)

    @staticmethod
    def of(estimator: Estimator, **fields: Any) -> RetrievalConfig:
        """Returns the defaults with another estimator: its own rule and code, which are top-k and
        signs of the collision estimators, and P = 2, L = 300 of hard collision. `fields` replace
        them."""
        own: dict[str, Any] = {"estimator": estimator}
        if estimator != Estimator.NORM_AWARE:
            own.update(rule=SelectionRule.TOP_K, code=SketchCode.SIGN)
        if estimator == Estimator.HARD_COLLISION:
            own.update(planes_per_table=2, tables=300)
        return RetrievalConfig(**{**own, **fields})

    @staticmethod
    def socket() -> RetrievalConfig:
        """Returns the method of the SOCKET paper."""
        return RetrievalConfig.of(
            Estimator.SOFT_COLLISION,
            value_weighting=ValueWeighting.LINEAR,
            selection=Selection.PER_QUERY_HEAD,
            plane_kind=PlaneKind.GAUSSIAN,
        )

    def error_in_force(self) -> float:
        """Returns the error target in force, 0 where the number of tokens is fixed."""
        may_aim = self.rule == SelectionRule.PRIORITY and self.coarse_bits == 0
        return self.DEFAULT_ERROR_TARGET if may_aim and self._gives_no_size() else self.error_target

    def most_selected(self, visible: int) -> int:
        """Returns the most tokens of a set of a query that sees `visible` tokens."""
        if self.sparsity > 0.0:
            return min(visible, max(1, int(visible / self.sparsity)))
        error = self.error_in_force()
        most = self.top_k or (visible if error > 0.0 else self.DEFAULT_TOP_K)
        if error * error * visible > 1.25:
            most = min(most, math.ceil(1.25 / (error * error)))
        return min(visible, most)

    def with_fixed_k(self) -> RetrievalConfig:
        """Returns these settings with `DEFAULT_TOP_K` tokens where none of `top_k`, `sparsity` and
        `error_target` is given."""
        return replace(self, top_k=self.DEFAULT_TOP_K) if self._gives_no_size() else self

    def _gives_no_size(self) -> bool:
        return self.top_k == 0 and self.sparsity == 0.0 and self.error_target == 0.0

    def sketch(self, head_dim: int) -> SketchConfig:
        """Returns the smallest sketch that the estimator can read, of keys of `head_dim` numbers."""
        norm_aware = self.estimator == Estimator.NORM_AWARE
        own = PlaneKind.ORTHOGONAL if norm_aware else PlaneKind.GAUSSIAN
        planes = self.num_planes
        if not norm_aware:
            planes = self.planes_per_table * self.tables
        elif planes == 0:
            scalar = self.code == SketchCode.SCALAR
            planes = max(2, -(-256 // head_dim)) * head_dim if scalar else 256
        kind = own if self.plane_kind is None else self.plane_kind
        return SketchConfig(kind, planes, self.seed, self.code)

    def message(self) -> retrieval_pb2.RetrievalOptions:
        size = retrieval_pb2.SelectionSize()
        if self.sparsity > 0.0:
            size.sparsity = self.sparsity
        else:
            size.top_k = self.top_k
        return retrieval_pb2.RetrievalOptions(
            estimator=self.estimator.value,
            value_weighting=self.value_weighting.value,
            selection=self.selection.value,
            size=size,
            plane_kind=None if self.plane_kind is None else self.plane_kind.value,
            seed=self.seed,
            planes_per_table=self.planes_per_table,
            tables=self.tables,
            tau=self.tau,
            num_planes=self.num_planes,
            query_bits=self.query_bits,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            rule=self.rule.value,
            code=self.code.value,
            error_target=self.error_target,
            coarse_bits=self.coarse_bits,
            candidates=self.candidates,
        )


@dataclass(frozen=True)
class LayerConfig(Settings):
    """Attention of one layer. `softmax_scale` None: 1 / sqrt(head_dim)."""

    mode: LayerMode = LayerMode.SPARSE
    window_tokens: int = 0
    softmax_scale: float | None = None
    logit_softcap: float = 0.0

    def message(self) -> session_pb2.LayerOptions:
        return session_pb2.LayerOptions(
            mode=self.mode.value,
            window_tokens=self.window_tokens,
            softmax_scale=self.softmax_scale,
            logit_softcap=self.logit_softcap,
        )


@dataclass(frozen=True)
class ModelConfig(Settings):
    """Shape of a model's KV. `layer_options`: empty, or one per layer."""

    layers: int = 1
    query_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    kv_dtype: DType = DType.BFLOAT16
    layer_options: tuple[LayerConfig, ...] = ()

    def message(self) -> session_pb2.Geometry:
        return session_pb2.Geometry(
            layers=self.layers,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            kv_dtype=self.kv_dtype.value,
            layer_options=[layer.message() for layer in self.layer_options],
        )


class SessionMemory(NamedTuple):
    """Bytes that one session takes when it has all its tokens, in all layers."""

    tokens: int
    #: Of the host page pool, or of a tier below it; with `KvPlacement.DEVICE` of `device_bytes`.
    pages: int
    #: On the device, of `device_bytes`.
    sketches: int
    #: On the device, beside `device_bytes`.
    tables: int
    #: On the device, of the row cache, as far as that has it.
    row_cache: int


@dataclass(frozen=True)
class RecallTarget:
    """How much of the attention a call is to keep, instead of how many tokens: the fewest tokens
    whose estimated share of the attention reaches `recall`, at most `top_k` or `sparsity`, or
    `RetrievalConfig.DEFAULT_TOP_K` where neither is given."""

    recall: float = 0.99
    min_top_k: int = 512
    #: Share of the variance of the scores' noise that the estimate takes out.
    noise_share: float = 0.5

    def message(self) -> retrieval_pb2.RecallTarget:
        return retrieval_pb2.RecallTarget(
            recall=self.recall, min_top_k=self.min_top_k, noise_share=self.noise_share
        )


@dataclass(frozen=True)
class AttendOptions:
    """Changes of a layer's attention for one call. None keeps the session's."""

    softmax_scale: float | None = None
    logit_softcap: float | None = None
    mode: LayerMode | None = None
    #: Tokens at or after this index are always attended.
    dense_from: int | None = None
    retrieval: RetrievalConfig | None = None
    #: Only with a norm-aware estimator and without a logit softcap.
    recall_target: RecallTarget | None = None

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_member("AttendOptions.mode", self.mode, LayerMode)

    def message(self) -> retrieval_pb2.AttendOptions:
        return retrieval_pb2.AttendOptions(
            softmax_scale=self.softmax_scale,
            logit_softcap=self.logit_softcap,
            mode=None if self.mode is None else self.mode.value,
            dense_from=self.dense_from,
            retrieval=None if self.retrieval is None else self.retrieval.message(),
            recall_target=None if self.recall_target is None else self.recall_target.message(),
        )
