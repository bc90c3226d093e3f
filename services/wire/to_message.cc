#include "services/wire/to_message.h"

#include "services/wire/enums.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace kvtier::services {
namespace {

/// Calls `copy(offset in the view, offset in the dense bytes, bytes)` for every run of memory: the
/// last dimension, with those before it that it is dense in.
template <typename View, typename Copy>
void for_each_run(const View& view, Copy copy) {
  const auto rank = static_cast<std::size_t>(view.rank);
  std::size_t last = rank - 1;
  std::int64_t elements = view.shape[last];
  for (; last > 0 && (view.shape[last - 1] == 1 || view.strides[last - 1] == elements); --last) {
    elements *= view.shape[last - 1];
  }
  const std::size_t run = static_cast<std::size_t>(elements) * dtype_bytes(view.dtype);
  std::int64_t runs = 1;
  for (std::size_t i = 0; i < last; ++i) runs *= view.shape[i];
  for (std::int64_t index = 0; index < runs; ++index) {
    std::int64_t offset = 0;
    std::int64_t rest = index;
    for (std::size_t i = last; i-- > 0;) {
      offset += rest % view.shape[i] * view.strides[i];
      rest /= view.shape[i];
    }
    copy(static_cast<std::size_t>(offset) * dtype_bytes(view.dtype),
         static_cast<std::size_t>(index) * run, run);
  }
}

void copy_bytes(const CopyBytes& copy, void* to, const void* from, std::size_t bytes) {
  if (copy) {
    copy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

v1::Geometry geometry_of(const ModelConfig& model) {
  v1::Geometry geometry;
  geometry.set_layers(model.layers);
  geometry.set_query_heads(model.query_heads);
  geometry.set_kv_heads(model.kv_heads);
  geometry.set_head_dim(model.head_dim);
  geometry.set_kv_dtype(enum_message(model.kv_dtype));
  for (const LayerConfig& layer : model.layer_options) {
    v1::LayerOptions& options = *geometry.add_layer_options();
    options.set_mode(enum_message(layer.mode));
    options.set_window_tokens(layer.window_tokens);
    if (layer.softmax_scale) options.set_softmax_scale(*layer.softmax_scale);
    options.set_logit_softcap(layer.logit_softcap);
  }
  return geometry;
}

v1::Sketch message_of(const SketchConfig& sketch) {
  v1::Sketch message;
  message.set_kind(enum_message(sketch.kind));
  message.set_num_planes(sketch.num_planes);
  message.set_seed(sketch.seed);
  message.set_code(enum_message(sketch.code));
  return message;
}

v1::RetrievalOptions message_of(const RetrievalConfig& retrieval) {
  v1::RetrievalOptions message;
  message.set_estimator(enum_message(retrieval.estimator));
  message.set_value_weighting(enum_message(retrieval.value_weighting));
  message.set_selection(enum_message(retrieval.selection));
  if (retrieval.sparsity > 0.0) {
    message.mutable_size()->set_sparsity(retrieval.sparsity);
  } else {
    message.mutable_size()->set_top_k(retrieval.top_k);
  }
  if (retrieval.plane_kind) message.set_plane_kind(enum_message(*retrieval.plane_kind));
  message.set_seed(retrieval.seed);
  message.set_planes_per_table(retrieval.planes_per_table);
  message.set_tables(retrieval.tables);
  message.set_tau(retrieval.tau);
  message.set_num_planes(retrieval.num_planes);
  message.set_query_bits(retrieval.query_bits);
  message.set_sink_tokens(retrieval.sink_tokens);
  message.set_recent_tokens(retrieval.recent_tokens);
  message.set_rule(enum_message(retrieval.rule));
  message.set_code(enum_message(retrieval.code));
  message.set_error_target(retrieval.error_target);
  message.set_coarse_bits(retrieval.coarse_bits);
  message.set_candidates(retrieval.candidates);
  return message;
}

v1::SessionMemory message_of(const SessionMemory& memory) {
  v1::SessionMemory message;
  message.set_page_bytes(static_cast<std::int64_t>(memory.pages));
  message.set_sketch_bytes(static_cast<std::int64_t>(memory.sketches));
  message.set_table_bytes(static_cast<std::int64_t>(memory.tables));
  message.set_row_cache_bytes(static_cast<std::int64_t>(memory.row_cache));
  return message;
}

v1::AttendOptions message_of(const AttendOptions& options) {
  v1::AttendOptions message;
  if (options.softmax_scale) message.set_softmax_scale(*options.softmax_scale);
  if (options.logit_softcap) message.set_logit_softcap(*options.logit_softcap);
  if (options.mode) message.set_mode(enum_message(*options.mode));
  if (options.dense_from) message.set_dense_from(*options.dense_from);
  if (options.retrieval != nullptr) *message.mutable_retrieval() = message_of(*options.retrieval);
  if (options.recall_target) {
    v1::RecallTarget& target = *message.mutable_recall_target();
    target.set_recall(options.recall_target->recall);
    target.set_min_top_k(options.recall_target->min_top_k);
    target.set_noise_share(options.recall_target->noise_share);
  }
  return message;
}

std::size_t tensor_bytes(const TensorView& view) {
  std::size_t bytes = dtype_bytes(view.dtype);
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) {
    bytes *= static_cast<std::size_t>(view.shape[i]);
  }
  return bytes;
}

std::size_t describe_tensor(const TensorView& view, v1::Tensor& message) {
  message.set_dtype(enum_message(view.dtype));
  message.mutable_shape()->Assign(view.shape.begin(), view.shape.begin() + view.rank);
  return tensor_bytes(view);
}

void copy_tensor(const TensorView& view, std::byte* to, const CopyBytes& copy) {
  for_each_run(view, [&](std::size_t from, std::size_t at, std::size_t size) {
    copy_bytes(copy, to + at, static_cast<const std::byte*>(view.data) + from, size);
  });
}

void copy_tensor(const TensorView& view, v1::Tensor& message, const CopyBytes& copy) {
  std::string& data = *message.mutable_data();
  data.resize(describe_tensor(view, message));
  if (data.empty()) return;
  copy_tensor(view, reinterpret_cast<std::byte*>(data.data()), copy);
}

bool copy_back(const v1::Tensor& message, const MutableTensorView& view, const CopyBytes& copy) {
  if (message.dtype() != enum_message(view.dtype) ||
      !std::ranges::equal(message.shape(),
                          std::span(view.shape).first(static_cast<std::size_t>(view.rank))) ||
      message.data().size() != tensor_bytes(view)) {
    return false;
  }
  if (message.data().empty()) return true;
  for_each_run(view, [&](std::size_t to, std::size_t from, std::size_t size) {
    copy_bytes(copy, static_cast<std::byte*>(view.data) + to, message.data().data() + from, size);
  });
  return true;
}

}  // namespace kvtier::services
