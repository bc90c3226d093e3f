from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
ESTIMATOR_HARD_COLLISION: Estimator
ESTIMATOR_NORM_AWARE: Estimator
ESTIMATOR_SOFT_COLLISION: Estimator
ESTIMATOR_UNSPECIFIED: Estimator
LAYER_MODE_DENSE: LayerMode
LAYER_MODE_SLIDING_WINDOW: LayerMode
LAYER_MODE_SPARSE: LayerMode
LAYER_MODE_UNSPECIFIED: LayerMode
PLANE_KIND_GAUSSIAN: PlaneKind
PLANE_KIND_ORTHOGONAL: PlaneKind
PLANE_KIND_UNSPECIFIED: PlaneKind
SELECTION_PER_KV_HEAD: Selection
SELECTION_PER_QUERY_HEAD: Selection
SELECTION_PER_SEQUENCE: Selection
SELECTION_RULE_PRIORITY: SelectionRule
SELECTION_RULE_TOP_K: SelectionRule
SELECTION_RULE_UNSPECIFIED: SelectionRule
SELECTION_UNSPECIFIED: Selection
SKETCH_CODE_SCALAR: SketchCode
SKETCH_CODE_SIGN: SketchCode
SKETCH_CODE_UNSPECIFIED: SketchCode
VALUE_WEIGHTING_CALIBRATED: ValueWeighting
VALUE_WEIGHTING_LINEAR: ValueWeighting
VALUE_WEIGHTING_LOGIT: ValueWeighting
VALUE_WEIGHTING_NONE: ValueWeighting
VALUE_WEIGHTING_UNSPECIFIED: ValueWeighting

class AttendOptions(_message.Message):
    __slots__ = ["dense_from", "logit_softcap", "mode", "recall_target", "retrieval", "softmax_scale"]
    DENSE_FROM_FIELD_NUMBER: _ClassVar[int]
    LOGIT_SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    RECALL_TARGET_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    SOFTMAX_SCALE_FIELD_NUMBER: _ClassVar[int]
    dense_from: int
    logit_softcap: float
    mode: LayerMode
    recall_target: RecallTarget
    retrieval: RetrievalOptions
    softmax_scale: float
    def __init__(self, softmax_scale: _Optional[float] = ..., logit_softcap: _Optional[float] = ..., mode: _Optional[_Union[LayerMode, str]] = ..., dense_from: _Optional[int] = ..., retrieval: _Optional[_Union[RetrievalOptions, _Mapping]] = ..., recall_target: _Optional[_Union[RecallTarget, _Mapping]] = ...) -> None: ...

class RecallTarget(_message.Message):
    __slots__ = ["min_top_k", "noise_share", "recall"]
    MIN_TOP_K_FIELD_NUMBER: _ClassVar[int]
    NOISE_SHARE_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    min_top_k: int
    noise_share: float
    recall: float
    def __init__(self, recall: _Optional[float] = ..., min_top_k: _Optional[int] = ..., noise_share: _Optional[float] = ...) -> None: ...

class RetrievalOptions(_message.Message):
    __slots__ = ["candidates", "coarse_bits", "code", "error_target", "estimator", "num_planes", "plane_kind", "planes_per_table", "query_bits", "recent_tokens", "rule", "seed", "selection", "sink_tokens", "size", "tables", "tau", "value_weighting"]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    COARSE_BITS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_TARGET_FIELD_NUMBER: _ClassVar[int]
    ESTIMATOR_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANES_FIELD_NUMBER: _ClassVar[int]
    PLANES_PER_TABLE_FIELD_NUMBER: _ClassVar[int]
    PLANE_KIND_FIELD_NUMBER: _ClassVar[int]
    QUERY_BITS_FIELD_NUMBER: _ClassVar[int]
    RECENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    VALUE_WEIGHTING_FIELD_NUMBER: _ClassVar[int]
    candidates: int
    coarse_bits: int
    code: SketchCode
    error_target: float
    estimator: Estimator
    num_planes: int
    plane_kind: PlaneKind
    planes_per_table: int
    query_bits: int
    recent_tokens: int
    rule: SelectionRule
    seed: int
    selection: Selection
    sink_tokens: int
    size: SelectionSize
    tables: int
    tau: float
    value_weighting: ValueWeighting
    def __init__(self, estimator: _Optional[_Union[Estimator, str]] = ..., value_weighting: _Optional[_Union[ValueWeighting, str]] = ..., selection: _Optional[_Union[Selection, str]] = ..., size: _Optional[_Union[SelectionSize, _Mapping]] = ..., tau: _Optional[float] = ..., query_bits: _Optional[int] = ..., plane_kind: _Optional[_Union[PlaneKind, str]] = ..., seed: _Optional[int] = ..., planes_per_table: _Optional[int] = ..., tables: _Optional[int] = ..., num_planes: _Optional[int] = ..., sink_tokens: _Optional[int] = ..., recent_tokens: _Optional[int] = ..., rule: _Optional[_Union[SelectionRule, str]] = ..., code: _Optional[_Union[SketchCode, str]] = ..., error_target: _Optional[float] = ..., coarse_bits: _Optional[int] = ..., candidates: _Optional[int] = ...) -> None: ...

class SelectionSize(_message.Message):
    __slots__ = ["sparsity", "top_k"]
    SPARSITY_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    sparsity: float
    top_k: int
    def __init__(self, top_k: _Optional[int] = ..., sparsity: _Optional[float] = ...) -> None: ...

class Sketch(_message.Message):
    __slots__ = ["code", "kind", "num_planes", "seed"]
    CODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    code: SketchCode
    kind: PlaneKind
    num_planes: int
    seed: int
    def __init__(self, kind: _Optional[_Union[PlaneKind, str]] = ..., num_planes: _Optional[int] = ..., seed: _Optional[int] = ..., code: _Optional[_Union[SketchCode, str]] = ...) -> None: ...

class Estimator(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class ValueWeighting(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Selection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class SelectionRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class SketchCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class PlaneKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class LayerMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
