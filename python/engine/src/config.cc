#include "config.h"

#include "arguments.h"

#include <chrono>
#include <cmath>
#include <nanobind/stl/string.h>
#include <string>
#include <string_view>
#include <utility>

namespace kvtier_engine {

namespace {

template <typename E>
using Names = std::initializer_list<std::pair<std::string_view, E>>;

template <typename T>
constexpr std::string_view expected_type() {
  if constexpr (std::is_same_v<T, bool>) return "a bool";
  if constexpr (std::is_floating_point_v<T>) return "a number";
  if constexpr (std::is_unsigned_v<T>) return "an integer of at least 0";
  if constexpr (std::is_integral_v<T>) return "an integer";
  return "a str";
}

std::string text(nb::handle value) { return nb::cast<std::string>(nb::repr(value)); }

/// Returns what a member of an enumeration of Python means, by its name.
template <typename E>
E member_of(const std::string& path, nb::handle value, Names<E> names) {
  std::string found;
  const nb::object name = nb::getattr(value, "name", nb::none());
  const bool named = nb::try_cast(name, found);
  std::string expected;
  for (const auto& [known, meaning] : names) {
    if (named && known == found) return meaning;
    expected += (expected.empty() ? "" : ", ") + std::string(known);
  }
  invalid(path, expected, text(value));
}

/// The fields of one dataclass.
class Fields {
 public:
  Fields(nb::handle object, std::string_view scope) : object_(object), scope_(scope) {}

  [[nodiscard]] nb::object get(const char* name) const {
    nb::object value = nb::getattr(object_, name, nb::handle());
    if (value.is_valid()) return value;
    invalid(scope_, "an attribute " + std::string(name), text(object_));
  }

  template <typename T>
  void read(const char* name, T& to) const {
    const nb::object value = get(name);
    if (!nb::try_cast(value, to)) invalid(path(name), expected_type<T>(), text(value));
  }

  /// A field that may be None.
  template <typename T>
  void read(const char* name, std::optional<T>& to) const {
    if (get(name).is_none()) return;
    T value{};
    read(name, value);
    to = value;
  }

  /// A member of an enumeration, by its name.
  template <typename E>
  void read(const char* name, E& to, Names<E> names) const {
    to = member_of(path(name), get(name), names);
  }

  [[nodiscard]] std::string path(const char* name) const { return scope_ + "." + name; }

 private:
  nb::handle object_;
  std::string scope_;
};

const Names<kvtier::PlaneKind> kPlaneKinds{{"GAUSSIAN", kvtier::PlaneKind::kGaussian},
                                           {"ORTHOGONAL", kvtier::PlaneKind::kOrthogonal}};
const Names<kvtier::SketchCode> kCodes{{"SIGN", kvtier::SketchCode::kSign},
                                       {"SCALAR", kvtier::SketchCode::kScalar}};
const Names<kvtier::LayerMode> kModes{{"SPARSE", kvtier::LayerMode::kSparse},
                                      {"DENSE", kvtier::LayerMode::kDense},
                                      {"SLIDING_WINDOW", kvtier::LayerMode::kSlidingWindow}};

kvtier::RetrievalConfig retrieval_of(nb::handle object) {
  using namespace kvtier;
  const Fields fields(object, "retrieval");
  RetrievalConfig c;
  fields.read("estimator", c.estimator,
              {{"SOFT_COLLISION", Estimator::kSoftCollision},
               {"HARD_COLLISION", Estimator::kHardCollision},
               {"NORM_AWARE", Estimator::kNormAware}});
  fields.read("value_weighting", c.value_weighting,
              {{"DEFAULT", ValueWeighting::kDefault},
               {"LINEAR", ValueWeighting::kLinear},
               {"CALIBRATED", ValueWeighting::kCalibrated},
               {"LOGIT", ValueWeighting::kLogit},
               {"NONE", ValueWeighting::kNone}});
  fields.read("selection", c.selection,
              {{"PER_QUERY_HEAD", Selection::kPerQueryHead},
               {"PER_KV_HEAD", Selection::kPerKvHead},
               {"PER_SEQUENCE", Selection::kPerSequence}});
  fields.read("rule", c.rule,
              {{"TOP_K", SelectionRule::kTopK}, {"PRIORITY", SelectionRule::kPriority}});
  fields.read("code", c.code, kCodes);
  if (!fields.get("plane_kind").is_none()) {
    PlaneKind kind{};
    fields.read("plane_kind", kind, kPlaneKinds);
    c.plane_kind = kind;
  }
  fields.read("seed", c.seed);
  fields.read("planes_per_table", c.planes_per_table);
  fields.read("tables", c.tables);
  fields.read("tau", c.tau);
  fields.read("num_planes", c.num_planes);
  fields.read("query_bits", c.query_bits);
  fields.read("top_k", c.top_k);
  fields.read("sparsity", c.sparsity);
  fields.read("error_target", c.error_target);
  fields.read("coarse_bits", c.coarse_bits);
  fields.read("candidates", c.candidates);
  fields.read("sink_tokens", c.sink_tokens);
  fields.read("recent_tokens", c.recent_tokens);
  return c;
}

kvtier::ModelConfig model_of(nb::handle object) {
  using namespace kvtier;
  const Fields fields(object, "model");
  ModelConfig c;
  fields.read("layers", c.layers);
  fields.read("query_heads", c.query_heads);
  fields.read("kv_heads", c.kv_heads);
  fields.read("head_dim", c.head_dim);
  fields.read("kv_dtype", c.kv_dtype,
              {{"FLOAT16", DType::kFloat16}, {"BFLOAT16", DType::kBFloat16}});
  for (nb::handle each : nb::iter(fields.get("layer_options"))) {
    const Fields layer(each, "model.layer_options");
    LayerConfig& to = c.layer_options.emplace_back();
    layer.read("mode", to.mode, kModes);
    layer.read("window_tokens", to.window_tokens);
    layer.read("softmax_scale", to.softmax_scale);
    layer.read("logit_softcap", to.logit_softcap);
  }
  return c;
}

kvtier::Backend backend_of(nb::handle backend) {
  return member_of<kvtier::Backend>("backend", backend,
                                    {{"AUTO", kvtier::Backend::kAuto},
                                     {"CPU", kvtier::Backend::kCpu},
                                     {"CUDA", kvtier::Backend::kCuda}});
}

kvtier::MemoryConfig memory_of(nb::handle object) {
  using namespace kvtier;
  const Fields fields(object, "memory");
  MemoryConfig c;
  fields.read("device_bytes", c.device_bytes);
  fields.read("host_bytes", c.host_bytes);
  fields.read("placement", c.placement,
              {{"HOST", KvPlacement::kHost}, {"DEVICE", KvPlacement::kDevice}});
  fields.read("page_format", c.page_format,
              {{"MODEL", PageFormat::kModel}, {"INT8", PageFormat::kInt8}});
  fields.read("verify_rows", c.verify_rows);
  fields.read("page_tokens", c.page_tokens);
  fields.read("max_session_tokens", c.max_session_tokens);
  fields.read("max_batch_rows", c.max_batch_rows);
  fields.read("staging_rows", c.staging_rows);
  fields.read("row_cache_bytes", c.row_cache_bytes);
  fields.read("row_cache_rows", c.row_cache_rows);
  fields.read("row_cache_policy", c.row_cache_policy,
              {{"CLOCK", RowCachePolicy::kClock},
               {"LRU", RowCachePolicy::kLru},
               {"SCORE", RowCachePolicy::kScore}});
  fields.read("pin_threads", c.pin_threads);
  fields.read("host_allocation", c.host_allocation,
              {{"AUTO", HostAllocation::kAuto},
               {"MANAGED", HostAllocation::kManaged},
               {"REGISTERED", HostAllocation::kRegistered},
               {"DRIVER", HostAllocation::kDriver}});
  fields.read("calibration_file", c.calibration_file);
  fields.read("disk_cache", c.disk_cache);
  fields.read("disk_cache_bytes", c.disk_cache_bytes);
  fields.read("prefetch_rows", c.prefetch_rows);
  double seconds = 0.0;
  fields.read("tier_deadline", seconds);
  constexpr double kMostSeconds = 1e6;
  if (!(seconds > 0.0 && seconds <= kMostSeconds)) {
    invalid("memory.tier_deadline", "seconds above 0, at most 1e6", std::to_string(seconds));
  }
  c.tier_deadline = std::chrono::milliseconds(std::llround(std::ceil(seconds * 1e3)));
  return c;
}

}  // namespace

kvtier::Config config_of(nb::handle model, nb::handle memory, nb::handle retrieval,
                         nb::handle extra_sketches, nb::handle backend) {
  kvtier::Config config;
  config.model = model_of(model);
  config.memory = memory_of(memory);
  config.retrieval = retrieval_of(retrieval);
  for (nb::handle each : nb::iter(extra_sketches)) {
    const Fields fields(each, "extra_sketches");
    kvtier::SketchConfig& sketch = config.extra_sketches.emplace_back();
    fields.read("kind", sketch.kind, kPlaneKinds);
    fields.read("num_planes", sketch.num_planes);
    fields.read("seed", sketch.seed);
    fields.read("code", sketch.code, kCodes);
  }
  config.backend = backend_of(backend);
  return config;
}

kvtier::PagedConfig paged_config_of(nb::handle model, nb::handle retrieval, nb::handle backend) {
  kvtier::PagedConfig config;
  config.model = model_of(model);
  config.retrieval = retrieval_of(retrieval);
  config.backend = backend_of(backend);
  return config;
}

Options::Options(nb::handle options, std::int64_t tokens_after) {
  const Fields fields(options, "options");
  fields.read("softmax_scale", options_.softmax_scale);
  fields.read("logit_softcap", options_.logit_softcap);
  if (!fields.get("mode").is_none()) {
    kvtier::LayerMode mode{};
    fields.read("mode", mode, kModes);
    options_.mode = mode;
  }
  fields.read("dense_from", options_.dense_from);
  options_.tokens_after = tokens_after;
  if (const nb::object retrieval = fields.get("retrieval"); !retrieval.is_none()) {
    retrieval_ = retrieval_of(retrieval);
    options_.retrieval = &*retrieval_;
  }
  if (const nb::object target = fields.get("recall_target"); !target.is_none()) {
    const Fields of(target, "options.recall_target");
    kvtier::RecallTarget& to = options_.recall_target.emplace();
    of.read("recall", to.recall);
    of.read("min_top_k", to.min_top_k);
    of.read("noise_share", to.noise_share);
  }
}

}  // namespace kvtier_engine
