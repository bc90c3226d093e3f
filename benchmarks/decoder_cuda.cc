#include "benchmarks/decoder_cuda.h"

#include "benchmarks/model_kernels_cuda.h"

#include <algorithm>

namespace kvtier::bench {
namespace {

constexpr float kWeightScale = 0.02F;

}  // namespace

RandomDecoder::RandomDecoder(Run& run, const ModelCase& shape, int most_batch)
    : run_(run),
      shape_(shape),
      blas_(run.cuda_libs(), run.stream()),
      head_(shape.vocabulary * shape.hidden, 1, kWeightScale),
      hidden_(most_batch * shape.hidden, 2),
      normed_(most_batch * shape.hidden, 3),
      qkv_(most_batch * qkv_columns(), 4),
      query_(most_batch * q_columns(), 5),
      key_(most_batch * kv_columns(), 6),
      value_(most_batch * kv_columns(), 7),
      context_(most_batch * q_columns(), 8),
      routed_(most_batch * std::max(shape.experts, 1), 9),
      gate_up_(most_batch * 2 * inner(), 10),
      gated_(most_batch * inner(), 11),
      logits_(most_batch * shape.vocabulary, 12) {
  std::uint64_t seed = 20;
  const auto weight = [&](std::int64_t rows, std::int64_t columns) {
    weight_bytes_ += 2.0 * static_cast<double>(rows * columns);
    return std::make_unique<DeviceTensor>(rows * columns, seed++, kWeightScale);
  };
  weight_bytes_ = 2.0 * static_cast<double>(head_.count());
  for (int i = 0; i < shape.layers; ++i) {
    Layer& layer = layers_.emplace_back();
    layer.qkv = weight(qkv_columns(), shape.hidden);
    layer.out = weight(shape.hidden, q_columns());
    if (shape.experts > 0) layer.router = weight(shape.experts, shape.hidden);
    layer.gate_up = weight(groups() * 2 * inner(), shape.hidden);
    layer.down = weight(groups() * shape.hidden, inner());
  }
}

double RandomDecoder::weight_bytes_read(int batch) const {
  const double group = 2.0 * static_cast<double>(3 * inner() * shape_.hidden);
  return weight_bytes_ - shape_.layers * group * (groups() - std::min(batch, groups()));
}

void RandomDecoder::feed_forward(const Layer& layer, int index, int batch) const {
  const std::int64_t h = shape_.hidden;
  if (layer.router) {
    blas_.multiply(normed_.data(), layer.router->data(), batch, shape_.experts, h, routed_.data());
  }
  const int parts = std::min(batch, groups());
  for (int part = 0; part < parts; ++part) {
    const std::int64_t first = std::int64_t{part} * batch / parts;
    const std::int64_t rows = std::int64_t{part + 1} * batch / parts - first;
    const std::int64_t group = (part + index) % groups();
    __nv_bfloat16* const gate_up = gate_up_.data() + first * 2 * inner();
    __nv_bfloat16* const gated_rows = gated_.data() + first * inner();
    blas_.multiply(normed_.data() + first * h, layer.gate_up->data() + group * 2 * inner() * h,
                   rows, 2 * inner(), h, gate_up);
    gated(run_.stream(), gate_up, rows, inner(), gated_rows);
    blas_.multiply(gated_rows, layer.down->data() + group * h * inner(), rows, h, inner(),
                   hidden_.data() + first * h, 1.0F);
  }
}

void RandomDecoder::decode(int batch, std::int64_t position,
                           const std::function<Caches(int)>& caches,
                           const std::function<void(int)>& attend) const {
  const std::int64_t h = shape_.hidden;
  cudaStream_t stream = run_.stream();
  for (int i = 0; i < shape_.layers; ++i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    rms_norm(stream, hidden_.data(), batch, h, normed_.data());
    blas_.multiply(normed_.data(), layer.qkv->data(), batch, qkv_columns(), h, qkv_.data());
    const Caches to = caches(i);
    rotate_and_store(stream, {.qkv = qkv_.data(),
                              .query = query_.data(),
                              .key = key_.data(),
                              .value = value_.data(),
                              .batch = batch,
                              .query_heads = shape_.query_heads,
                              .kv_heads = shape_.kv_heads,
                              .head_dim = shape_.head_dim,
                              .position = position,
                              .cached_keys = to.keys,
                              .cached_values = to.values,
                              .cached_tokens = to.tokens});
    attend(i);
    blas_.multiply(context(), layer.out->data(), batch, h, q_columns(), hidden_.data(), 1.0F);
    rms_norm(stream, hidden_.data(), batch, h, normed_.data());
    feed_forward(layer, i, batch);
  }
  rms_norm(stream, hidden_.data(), batch, h, normed_.data());
  blas_.multiply(normed_.data(), head_.data(), batch, shape_.vocabulary, h, logits_.data());
}

}  // namespace kvtier::bench
