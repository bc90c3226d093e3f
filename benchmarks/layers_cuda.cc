#include "benchmarks/layers_cuda.h"

#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <cmath>

namespace kvtier::bench {
namespace {

constexpr int kResident = 128;  // rows per head of the sink buffer and of the ring

std::int64_t round_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

/// Uploads `count` addresses `step` bytes apart.
transfer::Buffer address_table(Run& run, std::byte* first, std::int64_t step, std::int64_t count) {
  std::vector<std::byte*> addresses(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    addresses[static_cast<std::size_t>(i)] = first + i * step;
  const std::size_t bytes = addresses.size() * sizeof(std::byte*);
  transfer::Buffer table = run.device().allocate(transfer::Space::kDevice, bytes);
  KVTIER_CUDA_CHECK(cudaMemcpy(table.data(), addresses.data(), bytes, cudaMemcpyDefault));
  return table;
}

}  // namespace

json LayerShape::parameters() const {
  json values = {{"tokens", tokens},     {"batch", batch},       {"query_heads", query_heads},
                 {"kv_heads", kv_heads}, {"head_dim", head_dim}, {"layers", layers}};
  if (num_planes > 0) values["bits"] = num_planes;
  if (pages) values["placement"] = page_space == transfer::Space::kDevice ? "device" : "host";
  return values;
}

Layers::Layers(Run& run, const LayerShape& shape) : run_(run), shape_(shape) {
  transfer::Device& device = run.device();
  const auto all = static_cast<std::int64_t>(shape.layers) * shape.batch;
  capacity_ = round_up(shape.tokens + shape.spare_tokens, hashing::kBlockTokens);
  const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count); };

  flags_ = device.allocate(transfer::Space::kPinnedHost, sizeof(transfer::StepFlags));
  *flags() = {};
  resident_ = device.allocate(transfer::Space::kDevice,
                              bytes(2 * all * shape.kv_heads * kResident * kv().row_bytes()));
  fill_normal(run.stream(), resident_.as<__nv_bfloat16>(),
              static_cast<std::int64_t>(resident_.bytes() / 2), 5, 1.0F);
  std::vector<transfer::SequenceCounters> counters(
      bytes(all), {.length = shape.tokens,
                   .resident_begin = std::max<std::int64_t>(shape.tokens - kResident, 0),
                   .capacity = capacity_});
  counters_ = device.allocate(transfer::Space::kDevice, counters.size() * sizeof counters[0]);
  KVTIER_CUDA_CHECK(cudaMemcpy(counters_.data(), counters.data(),
                               counters.size() * sizeof counters[0], cudaMemcpyDefault));
  const std::int64_t query_values = all * shape.query_heads * shape.head_dim;
  queries_ = device.allocate(transfer::Space::kDevice, bytes(query_values) * sizeof(float));
  const DeviceTensor queries(query_values, 6, 2.0F);
  widen(run.stream(), queries.data(), query_values, queries_.as<float>());
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  if (shape.pages) fill_pages();
  if (shape.num_planes > 0) fill_sketches();
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
}

void Layers::fill_pages() {
  const std::int64_t count = capacity_ / kPageTokens * shape_.layers * shape_.batch;
  const std::int64_t page_bytes = kv().page_bytes();
  // Host pages as an engine takes them.
  pages_ = run_.device().allocate(shape_.page_space, static_cast<std::size_t>(count * page_bytes),
                                  {.allocation = HostAllocation::kAuto});
  fill_normal(run_.stream(), pages_.as<__nv_bfloat16>(), count * page_bytes / 2, 7, 1.0F);
  page_tables_ = address_table(run_, pages_.data(), page_bytes, count);
}

void Layers::fill_sketches() {
  transfer::Stream& queue = run_.queue();
  planes_ = std::make_unique<hashing::Planes>(
      run_.device(), SketchConfig{.kind = shape_.kind, .num_planes = shape_.num_planes},
      shape_.head_dim);
  const auto all = static_cast<std::int64_t>(shape_.layers) * shape_.batch;
  const std::int64_t count = capacity_ / hashing::kBlockTokens * all;
  const std::int64_t block_bytes = sketch().block_bytes();
  blocks_ = run_.device().allocate(transfer::Space::kDevice,
                                   static_cast<std::size_t>(count * block_bytes));
  block_tables_ = address_table(run_, blocks_.data(), block_bytes, count);
  constexpr std::int64_t kChunk = 32768;
  const std::int64_t values = std::min(kChunk, shape_.tokens) * kv().kv_heads * 2 * kv().head_dim;
  const DeviceTensor packed(values, 8);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (std::int64_t begin = 0; begin < shape_.tokens; begin += kChunk) {
      const std::int64_t tokens = std::min(kChunk, shape_.tokens - begin);
      set_lengths(begin);
      for (int item = 0; item < shape_.batch; ++item) {
        fill_normal(run_.stream(), packed.data(), values,
                    static_cast<std::uint64_t>((layer * 64 + item) * 1024 + begin / kChunk + 9),
                    1.0F);
        hashing::SketchBatch batch;
        batch.push({.blocks = sketch_blocks(layer, item),
                    .counters = sequence(layer, item).counters,
                    .tokens = static_cast<std::int32_t>(tokens)});
        hashing::sketch_keys(queue, planes(), kv(), sketch(), batch,
                             reinterpret_cast<const std::byte*>(packed.data()));
      }
    }
  }
  set_lengths(shape_.tokens);
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run_.stream()));
}

transfer::KvGeometry Layers::kv() const {
  return {.kv_heads = shape_.kv_heads,
          .group = shape_.query_heads / shape_.kv_heads,
          .head_dim = shape_.head_dim,
          .page_tokens = kPageTokens,
          .sink_capacity = kResident,
          .recent_capacity = kResident,
          .dtype = DType::kBFloat16,
          .int8_pages = shape_.page_format == PageFormat::kInt8};
}

transfer::SequenceView Layers::sequence(int layer, int item) const {
  const auto index = static_cast<std::int64_t>(at(layer, item));
  const std::int64_t resident_bytes = shape_.kv_heads * kResident * kv().row_bytes();
  return {.pages = page_tables_.data() == nullptr
                       ? nullptr
                       : page_tables_.as<const std::byte*>() + index * (capacity_ / kPageTokens),
          .sink_rows = resident_.data() + 2 * index * resident_bytes,
          .recent_rows = resident_.data() + (2 * index + 1) * resident_bytes,
          .counters = counters_.as<transfer::SequenceCounters>() + index};
}

transfer::SequenceBatch Layers::sequences(int layer) const {
  transfer::SequenceBatch batch;
  for (int item = 0; item < shape_.batch; ++item) batch.push(sequence(layer, item));
  return batch;
}

std::byte* const* Layers::sketch_blocks(int layer, int item) const {
  return block_tables_.as<std::byte*>() +
         static_cast<std::int64_t>(at(layer, item)) * (capacity_ / hashing::kBlockTokens);
}

transfer::QueryBatch Layers::query_batch() const {
  transfer::QueryBatch query_batch;
  for (int item = 0; item < shape_.batch; ++item) {
    query_batch.push({.sequence = item, .dense_from = INT64_MAX});
  }
  return query_batch;
}

const float* Layers::queries(int layer) const {
  return queries_.as<float>() +
         std::int64_t{layer} * shape_.batch * shape_.query_heads * shape_.head_dim;
}

scoring::SelectRequest Layers::select_request(int layer, const RetrievalConfig& retrieval) const {
  scoring::SelectRequest request;
  request.params = scoring::score_params(retrieval, shape_.head_dim,
                                         1.0F / std::sqrt(static_cast<float>(shape_.head_dim)));
  request.rule = {.mode = LayerMode::kSparse,
                  .sink_tokens = retrieval.sink_tokens,
                  .recent_tokens = retrieval.recent_tokens};
  request.kv = kv();
  request.sketch = sketch();
  request.planes = planes();
  request.sequences = sequences(layer);
  request.query_batch = query_batch();
  request.queries = queries(layer);
  request.max_length = shape_.tokens + shape_.spare_tokens;
  request.flags = flags();
  request.keep_scores = false;
  for (int item = 0; item < shape_.batch; ++item) {
    request.sketches.push(sketch_blocks(layer, item));
  }
  return request;
}

void Layers::set_lengths(std::int64_t length) {
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int item = 0; item < shape_.batch; ++item) {
      transfer::set_length(run_.queue(), sequence(layer, item).counters, length, capacity_);
    }
  }
}

transfer::AppendBatch append_batch(const Layers& layers, int layer, int items,
                                   const DeviceTensor& keys, const DeviceTensor& values,
                                   std::int64_t tokens) {
  const transfer::KvGeometry kv = layers.kv();
  const auto tensor = [&](const DeviceTensor& source, std::int64_t token) {
    const std::int64_t stride = std::int64_t{kv.kv_heads} * kv.head_dim;
    return transfer::TokenTensor{source.data() + token * stride, DType::kBFloat16, stride,
                                 kv.head_dim};
  };
  transfer::AppendBatch batch;
  for (int item = 0; item < items; ++item) {
    const std::int64_t first = item * tokens;
    batch.push({.sequence = layers.sequence(layer, item),
                .keys = tensor(keys, first),
                .values = tensor(values, first),
                .tokens = static_cast<std::int32_t>(tokens),
                .packed_offset = first,
                .flags = layers.flags()});
  }
  return batch;
}

}  // namespace kvtier::bench
