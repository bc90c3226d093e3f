#include "services/base/from_message.h"

#include "services/base/service_error.h"
#include "services/wire/enums.h"

#include <charconv>
#include <cmath>

namespace kvtier::services {
namespace {

constexpr int kMaxLayers = 1024;
constexpr int kMaxHeads = 1024;
/// Kernels read and write device memory in vectors of this many bytes.
constexpr std::int64_t kDeviceAlignment = 16;

std::string shape_text(const v1::Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.shape_size() && i < kMaxTensorRank + 1; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(tensor.shape(i));
  }
  return text + (tensor.shape_size() > kMaxTensorRank ? ", ...]" : "]");
}

/// Proto3 keeps numbers that it does not know: none of them is taken for a default.
template <typename Enum, typename Message>
Enum known(Message message, const char* expected, const std::string& field) {
  if (const std::optional<Enum> value = enum_of<Enum>(message)) return *value;
  throw ServiceError::invalid(field, expected, std::to_string(message));
}

int in_range(int value, int low, int high, const std::string& field) {
  check_within(field, value, low, high);
  return value;
}

std::optional<LayerMode> mode_of(v1::LayerMode mode, const std::string& field) {
  if (mode == v1::LAYER_MODE_UNSPECIFIED) return std::nullopt;
  return known<LayerMode>(mode, "a LayerMode", field);
}

PlaneKind plane_kind_of(v1::PlaneKind kind, const std::string& field) {
  return known<PlaneKind>(kind, "a PlaneKind", field);
}

/// A tensor's dtype, shape and dense strides, without its memory.
struct Described {
  TensorView view;
  std::int64_t bytes = 0;
};

Described describe(const v1::Tensor& tensor, const std::string& field) {
  const DType dtype = known<DType>(tensor.dtype(), "a DataType", field + ".dtype");
  const int rank = tensor.shape_size();
  if (rank < 1 || rank > kMaxTensorRank) {
    throw ServiceError::invalid(field + ".shape", "1 to 4 extents", std::to_string(rank));
  }
  std::optional<std::int64_t> bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (int i = 0; i < rank && bytes; ++i) bytes = checked_product(*bytes, tensor.shape(i));
  if (!bytes) {
    throw ServiceError::invalid(field + ".shape", "extents of at least 0 whose product is a size",
                                shape_text(tensor));
  }
  Described described{.view = TensorView(nullptr, dtype, {}), .bytes = *bytes};
  TensorView& view = described.view;
  view.rank = rank;
  // An empty tensor may have extents whose partial products do not fit: no one follows its strides.
  std::optional<std::int64_t> stride = 1;
  for (int i = rank; i-- > 0;) {
    const auto dim = static_cast<std::size_t>(i);
    view.shape[dim] = tensor.shape(i);
    view.strides[dim] = stride.value_or(0);
    if (stride) stride = checked_product(*stride, tensor.shape(i));
  }
  return described;
}

LayerConfig layer_of(const v1::LayerOptions& options, const std::string& field) {
  LayerConfig layer;
  layer.mode = mode_of(options.mode(), field + ".mode").value_or(LayerMode::kSparse);
  layer.window_tokens = options.window_tokens();
  if (options.has_softmax_scale()) layer.softmax_scale = options.softmax_scale();
  layer.logit_softcap = options.logit_softcap();
  return layer;
}

}  // namespace

std::optional<std::int64_t> checked_product(std::int64_t a, std::int64_t b) noexcept {
  std::int64_t product = 0;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

TensorView view_of(const v1::Tensor& tensor, const std::string& field) {
  Described found = describe(tensor, field);
  if (static_cast<std::uint64_t>(found.bytes) != tensor.data().size()) {
    throw ServiceError::invalid(field + ".data",
                                std::to_string(found.bytes) + " bytes of " + shape_text(tensor),
                                std::to_string(tensor.data().size()));
  }
  found.view.data = tensor.data().data();
  return found.view;
}

std::uint64_t bytes_of(const v1::Tensor& tensor, const std::string& field) {
  if (!tensor.has_memory()) return tensor.data().size();
  return static_cast<std::uint64_t>(describe(tensor, field).bytes);
}

std::byte* UsedRegions::at(const v1::DeviceMemory& place, std::int64_t bytes,
                           const std::string& field) {
  std::shared_ptr<const DeviceRegion> region = regions_.find(place.region());
  const std::int64_t offset = place.offset();
  const auto size = static_cast<std::int64_t>(region->bytes);
  if (offset < 0 || offset % kDeviceAlignment != 0 || offset > size || bytes > size - offset) {
    throw ServiceError::invalid(
        field + ".offset",
        "a multiple of 16, with " + std::to_string(bytes) + " bytes behind it within the region",
        std::to_string(offset));
  }
  used_.push_back(std::move(region));
  return used_.back()->memory.get() + offset;
}

TensorView view_of(const v1::Tensor& tensor, const std::string& field, UsedRegions& regions) {
  if (!tensor.has_memory()) return view_of(tensor, field);
  if (!tensor.data().empty()) throw ServiceError::invalid(field, "data or memory", "both");
  Described found = describe(tensor, field);
  found.view.data = regions.at(tensor.memory(), found.bytes, field + ".memory");
  found.view.space = MemorySpace::kDevice;
  return found.view;
}

TensorView tokens_of(const v1::Tensor& tensor, const std::string& field, int heads, int head_dim,
                     std::int64_t max_tokens, UsedRegions& regions) {
  const TensorView view = view_of(tensor, field, regions);
  if (view.dtype == DType::kInt32) {
    throw ServiceError::invalid(field + ".dtype", "fp32, fp16 or bf16", "int32");
  }
  if (view.rank != 3 || view.shape[1] != heads || view.shape[2] != head_dim) {
    throw ServiceError::invalid(
        field + ".shape",
        "[tokens, " + std::to_string(heads) + ", " + std::to_string(head_dim) + "]",
        shape_text(tensor));
  }
  check_within(field + ".shape", view.shape[0], 1, max_tokens, " tokens");
  return view;
}

TensorView ids_of(const v1::Tensor& tensor, const std::string& field, int heads) {
  const TensorView view = view_of(tensor, field);
  if (view.dtype != DType::kInt32) {
    throw ServiceError::invalid(field + ".dtype", "int32", std::string(dtype_name(view.dtype)));
  }
  if (view.rank != 2 || view.shape[0] != heads || view.shape[1] < 1) {
    throw ServiceError::invalid(field + ".shape",
                                "[" + std::to_string(heads) + ", n] with n of at least 1",
                                shape_text(tensor));
  }
  return view;
}

MutableTensorView make_tensor(v1::Tensor& tensor, DType dtype,
                              std::initializer_list<std::int64_t> shape) {
  tensor.set_dtype(enum_message(dtype));
  std::size_t bytes = dtype_bytes(dtype);
  for (const std::int64_t extent : shape) {
    tensor.add_shape(extent);
    bytes *= static_cast<std::size_t>(extent);
  }
  tensor.mutable_data()->resize(bytes);
  return {tensor.mutable_data()->data(), dtype, shape};
}

MutableTensorView place_tensor(v1::Tensor& tensor, const v1::DeviceMemory& place, DType dtype,
                               std::initializer_list<std::int64_t> shape, const std::string& field,
                               UsedRegions& regions) {
  auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (const std::int64_t extent : shape) bytes *= extent;
  void* const data = regions.at(place, bytes, field);
  tensor.set_dtype(enum_message(dtype));
  for (const std::int64_t extent : shape) tensor.add_shape(extent);
  *tensor.mutable_memory() = place;
  return {data, dtype, shape, MemorySpace::kDevice};
}

ModelConfig model_of(const v1::Geometry& geometry, const std::string& field) {
  ModelConfig model;
  model.layers = in_range(geometry.layers(), 1, kMaxLayers, field + ".layers");
  model.query_heads = in_range(geometry.query_heads(), 1, kMaxHeads, field + ".query_heads");
  model.kv_heads = in_range(geometry.kv_heads(), 1, kMaxHeads, field + ".kv_heads");
  model.head_dim = geometry.head_dim();
  model.kv_dtype = geometry.kv_dtype() == v1::DATA_TYPE_UNSPECIFIED
                       ? DType::kBFloat16
                       : enum_of<DType>(geometry.kv_dtype()).value_or(DType::kInt32);
  if (model.kv_dtype != DType::kBFloat16 && model.kv_dtype != DType::kFloat16) {
    throw ServiceError::invalid(field + ".kv_dtype", "bfloat16 or float16",
                                std::to_string(geometry.kv_dtype()));
  }
  if (geometry.layer_options_size() != 0 && geometry.layer_options_size() != model.layers) {
    throw ServiceError::invalid(field + ".layer_options",
                                "none, or " + std::to_string(model.layers),
                                std::to_string(geometry.layer_options_size()));
  }
  for (int i = 0; i < geometry.layer_options_size(); ++i) {
    model.layer_options.push_back(
        layer_of(geometry.layer_options(i), field + ".layer_options[" + std::to_string(i) + "]"));
  }
  return model;
}

SketchConfig sketch_of(const v1::Sketch& sketch, const std::string& field) {
  return {.kind = plane_kind_of(sketch.kind(), field + ".kind"),
          .num_planes = in_range(sketch.num_planes(), 1, 1024, field + ".num_planes"),
          .seed = sketch.seed(),
          .code = sketch.code() == v1::SKETCH_CODE_UNSPECIFIED
                      ? SketchCode::kSign
                      : known<SketchCode>(sketch.code(), "a SketchCode", field + ".code")};
}

RetrievalConfig retrieval_of(const v1::RetrievalOptions& options, const RetrievalConfig& base,
                             const std::string& field) {
  RetrievalConfig result = base;
  if (options.estimator() != v1::ESTIMATOR_UNSPECIFIED) {
    result.estimator = known<Estimator>(options.estimator(), "an Estimator", field + ".estimator");
    result.value_weighting = ValueWeighting::kDefault;
    result.plane_kind.reset();
    result.rule = SelectionRule::kTopK;
    result.code = SketchCode::kSign;
    result.error_target = 0.0;
    result.coarse_bits = 0;
  }
  if (options.value_weighting() != v1::VALUE_WEIGHTING_UNSPECIFIED) {
    result.value_weighting = known<ValueWeighting>(options.value_weighting(), "a ValueWeighting",
                                                   field + ".value_weighting");
  }
  if (options.selection() != v1::SELECTION_UNSPECIFIED) {
    result.selection = known<Selection>(options.selection(), "a Selection", field + ".selection");
  }
  switch (options.size().size_case()) {
    case v1::SelectionSize::kTopK:
      result.top_k = options.size().top_k();
      result.sparsity = 0.0;
      break;
    case v1::SelectionSize::kSparsity:
      if (!(options.size().sparsity() >= 1.0 && std::isfinite(options.size().sparsity()))) {
        throw ServiceError::invalid(field + ".size.sparsity", "a finite number of at least 1",
                                    std::to_string(options.size().sparsity()));
      }
      result.sparsity = options.size().sparsity();
      break;
    case v1::SelectionSize::SIZE_NOT_SET:
      break;
  }
  if (options.plane_kind() != v1::PLANE_KIND_UNSPECIFIED) {
    result.plane_kind = plane_kind_of(options.plane_kind(), field + ".plane_kind");
  }
  if (options.rule() != v1::SELECTION_RULE_UNSPECIFIED) {
    result.rule = known<SelectionRule>(options.rule(), "a SelectionRule", field + ".rule");
  }
  if (options.code() != v1::SKETCH_CODE_UNSPECIFIED) {
    result.code = known<SketchCode>(options.code(), "a SketchCode", field + ".code");
  }
  if (options.has_error_target()) result.error_target = options.error_target();
  if (options.has_coarse_bits()) result.coarse_bits = options.coarse_bits();
  if (options.has_candidates()) result.candidates = options.candidates();
  if (options.has_tau()) result.tau = options.tau();
  if (options.has_query_bits()) result.query_bits = options.query_bits();
  if (options.has_seed()) result.seed = options.seed();
  if (options.has_planes_per_table()) result.planes_per_table = options.planes_per_table();
  if (options.has_tables()) result.tables = options.tables();
  if (options.has_num_planes()) result.num_planes = options.num_planes();
  if (options.has_sink_tokens()) result.sink_tokens = options.sink_tokens();
  if (options.has_recent_tokens()) result.recent_tokens = options.recent_tokens();

  const std::vector<std::string> problems = result.validate();
  if (!problems.empty()) {
    std::string found = std::to_string(problems.size()) + " problems";
    for (const std::string& problem : problems) found += "\n  " + problem;
    throw ServiceError::invalid(field, "settings that go together", found);
  }
  return result;
}

CallOptions::CallOptions(const v1::AttendOptions& message, const RetrievalConfig& session_default)
    : retrieval(retrieval_of(message.retrieval(), session_default, "options.retrieval")) {
  options.retrieval = &retrieval;
  options.mode = mode_of(message.mode(), "options.mode");
  if (message.has_softmax_scale()) options.softmax_scale = message.softmax_scale();
  if (message.has_logit_softcap()) options.logit_softcap = message.logit_softcap();
  if (message.has_dense_from()) options.dense_from = message.dense_from();
  if (!message.has_recall_target()) return;
  const v1::RecallTarget& given = message.recall_target();
  RecallTarget& target = options.recall_target.emplace();
  if (given.has_recall()) target.recall = given.recall();
  if (given.has_min_top_k()) target.min_top_k = given.min_top_k();
  if (given.has_noise_share()) target.noise_share = given.noise_share();
}

void set_status(const ServiceError& error, v1::ItemStatus& status) {
  status.set_code(static_cast<int>(error.code()));
  status.set_reason(error.reason());
  status.set_message(sanitized_message(error));
}

int page_size_of(int asked) {
  constexpr int kDefault = 100;
  constexpr int kMax = 1000;
  check_within("page_size", asked, 0, kMax);
  return asked == 0 ? kDefault : asked;
}

std::uint32_t page_start_of(const std::string& token) {
  std::uint32_t start = 0;
  const char* end = token.data() + token.size();
  const auto [stop, error] = std::from_chars(token.data(), end, start);
  if (!token.empty() && (error != std::errc() || stop != end)) {
    throw ServiceError::invalid("page_token", "next_page_token of the reply before",
                                "something else");
  }
  return start;
}

}  // namespace kvtier::services
