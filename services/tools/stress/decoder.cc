#include "services/tools/stress/decoder.h"

#include "services/tools/stress/memory.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvtier::services {
namespace {

std::size_t tensor_bytes(const StressOptions& options, int layers, int heads, DType dtype) {
  return static_cast<std::size_t>(layers) * static_cast<std::size_t>(options.batch) *
         static_cast<std::size_t>(heads * *options.head_dim) * dtype_bytes(dtype);
}

}  // namespace

Decoder::Decoder(const StressOptions& options, const QueryDrift& drift, int layers, Setup setup)
    : options_(options),
      layers_(layers),
      setup_(std::move(setup)),
      next_token_(options.tokens),
      query_(setup_.device.allocate(
          tensor_bytes(options, layers, *options.query_heads, DType::kBFloat16))),
      key_(setup_.device.allocate(
          tensor_bytes(options, layers, *options.kv_heads, DType::kBFloat16))),
      value_(setup_.device.allocate(key_.bytes)),
      output_(setup_.device.allocate(
          tensor_bytes(options, layers, *options.query_heads, DType::kFloat32))) {
  const SyntheticShape shape = synthetic_shape(options);
  queries_.resize(static_cast<std::size_t>(options.batch));
  for (int sequence = 0; sequence < options.batch; ++sequence) {
    for (int layer = 0; layer < layers; ++layer) {
      queries_[static_cast<std::size_t>(sequence)].emplace_back(shape, sequence, layer, drift);
    }
  }
}

MutableTensorView Decoder::view(const Mirror& mirror, DType dtype, int layer, int sequence,
                                int heads) const {
  const std::size_t bytes = mirror.bytes / static_cast<std::size_t>(layers_ * options_.batch);
  const auto at = static_cast<std::size_t>(layer * options_.batch + sequence);
  return {mirror.device + at * bytes, dtype, {1, heads, *options_.head_dim}, setup_.device.space()};
}

void Decoder::skip_queries(int steps) {
  for (std::vector<QuerySource>& layers : queries_) {
    for (QuerySource& queries : layers) {
      for (int i = 0; i < steps && !setup_.interrupted(); ++i) static_cast<void>(queries.next());
    }
  }
}

void Decoder::prepare() {
  const auto query_values = static_cast<std::size_t>(*options_.query_heads * *options_.head_dim);
  const auto row_values = static_cast<std::size_t>(*options_.kv_heads * *options_.head_dim);
  auto* query = reinterpret_cast<std::uint16_t*>(query_.host);
  auto* key = reinterpret_cast<std::uint16_t*>(key_.host);
  auto* value = reinterpret_cast<std::uint16_t*>(value_.host);
  for (std::size_t layer = 0; layer < static_cast<std::size_t>(layers_); ++layer) {
    for (std::size_t sequence = 0; sequence < queries_.size(); ++sequence) {
      std::ranges::copy(queries_[sequence][layer].next(), query);
      setup_.sources[sequence][layer].fill(next_token_, 1, key, value, 1);
      query += query_values;
      key += row_values;
      value += row_values;
    }
  }
  ++next_token_;
  setup_.device.upload(query_, query_.bytes);
  setup_.device.upload(key_, key_.bytes);
  setup_.device.upload(value_, value_.bytes);
  setup_.device.synchronize();
}

void Decoder::prefetch_selected(int rows) {
  RetrievalConfig retrieval = options_.retrieval();
  retrieval.top_k = rows;
  AttendOptions attend;
  attend.retrieval = &retrieval;
  for (int layer = 0; layer < layers_ && !setup_.interrupted(); ++layer) {
    for (int sequence = 0; sequence < options_.batch; ++sequence) {
      setup_.sessions[static_cast<std::size_t>(sequence)].prefetch(
          layer, view(query_, DType::kBFloat16, layer, sequence, *options_.query_heads),
          setup_.device.stream(), attend);
    }
  }
  setup_.device.synchronize();
}

void Decoder::decode_layers() {
  AttendOptions attend;
  attend.mode = setup_.mode;
  for (int layer = 0; layer < layers_; ++layer) {
    if (setup_.interrupted()) {
      abandoned_ = true;
      return;
    }
    std::vector<BatchItem> items;
    for (int sequence = 0; sequence < options_.batch; ++sequence) {
      const int query_heads = *options_.query_heads;
      const int kv_heads = *options_.kv_heads;
      items.push_back(
          {.session = &setup_.sessions[static_cast<std::size_t>(sequence)],
           .inputs = {.query = view(query_, DType::kBFloat16, layer, sequence, query_heads),
                      .key = view(key_, DType::kBFloat16, layer, sequence, kv_heads),
                      .value = view(value_, DType::kBFloat16, layer, sequence, kv_heads)},
           .outputs = {.out = view(output_, DType::kFloat32, layer, sequence, query_heads)},
           .options = attend});
    }
    setup_.engine.decode(layer, items, setup_.device.stream());
  }
}

double Decoder::run() {
  TensorDevice& device = setup_.device;
  const bool direct = steps_run_ == 0;  // so that kernels are loaded before a capture
  if (steps_run_ == 1) device.set_step([this] { decode_layers(); });
  const auto start = std::chrono::steady_clock::now();
  direct ? decode_layers() : device.run_step();
  device.synchronize();
  const auto end = std::chrono::steady_clock::now();
  if (abandoned_) return -1.0;
  ++steps_run_;
  if (device.replays() && !direct) {
    for (Session& session : setup_.sessions) {
      for (int layer = 0; layer < layers_; ++layer) session.advance(layer, 1);
    }
  }
  return std::chrono::duration<double>(end - start).count();
}

std::span<const float> Decoder::first_output() {
  setup_.device.download(output_, output_.bytes / static_cast<std::size_t>(layers_));
  setup_.device.synchronize();
  return {reinterpret_cast<const float*>(output_.host),
          output_.bytes / static_cast<std::size_t>(layers_) / sizeof(float)};
}

std::vector<std::vector<std::int32_t>> Decoder::selected(int sequence, int layer) {
  const int kv_heads = *options_.kv_heads;
  const auto k = static_cast<std::size_t>(options_.top_k);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(kv_heads) * k);
  const std::size_t bytes = query_.bytes / static_cast<std::size_t>(layers_ * options_.batch);
  const std::byte* const query =
      query_.host + static_cast<std::size_t>(layer * options_.batch + sequence) * bytes;
  setup_.sessions[static_cast<std::size_t>(sequence)].select(
      layer, {query, DType::kBFloat16, {1, *options_.query_heads, *options_.head_dim}},
      {.ids = {ids.data(), DType::kInt32, {1, kv_heads, options_.top_k}}});
  std::vector<std::vector<std::int32_t>> lists;
  for (int head = 0; head < kv_heads; ++head) {
    const auto begin =
        ids.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(head) * k);
    std::vector<std::int32_t> list(begin, begin + options_.top_k);
    std::erase_if(list, [](std::int32_t id) { return id < 0; });
    lists.push_back(std::move(list));
  }
  return lists;
}

}  // namespace kvtier::services
