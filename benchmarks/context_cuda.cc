#include "benchmarks/context_cuda.h"

#include "services/evaluation/threads.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <array>
#include <future>

namespace kvtier::bench {
namespace {

constexpr std::int64_t kChunk = 16384;

services::SyntheticShape synthetic(const ContextShape& shape) {
  return {.query_heads = shape.query_heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .tokens = shape.tokens};
}

}  // namespace

Context::Context(Run& run, const ContextShape& shape, std::optional<services::DriftModel> drift)
    : run_(run), shape_(shape), drift_(drift) {
  if (!drift) return;
  const auto noise = std::make_shared<services::NoiseTable>(0);
  for (int sequence = 0; sequence < shape.batch; ++sequence) {
    sources_.emplace_back(synthetic(shape), sequence, 0, noise);
  }
  calibration_ = services::calibrate_drift(synthetic(shape), sources_.front(),
                                           services::num_threads(), *drift);
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int sequence = 0; sequence < shape.batch; ++sequence) {
      queries_.emplace_back(synthetic(shape), sequence, layer, calibration_.drift);
    }
  }
  device_queries_ =
      std::make_unique<DeviceTensor>(std::int64_t{shape.layers} * shape.batch * query_values(), 51);
}

void Context::fill(Session& session, int sequence) {
  const std::int64_t row = std::int64_t{shape_.kv_heads} * shape_.head_dim;
  const std::int64_t chunk = std::min(kChunk, shape_.tokens);
  const DeviceTensor keys(chunk * row, 41), values(chunk * row, 42);
  const std::size_t bytes = 2 * static_cast<std::size_t>(chunk * row);
  struct Host {
    transfer::Buffer keys, values;
  };
  std::array<Host, 2> host;
  if (drift_) {
    for (Host& one : host) {
      one.keys = run_.device().allocate(transfer::Space::kPinnedHost, bytes);
      one.values = run_.device().allocate(transfer::Space::kPinnedHost, bytes);
    }
  }
  const auto count_at = [&](std::int64_t begin) { return std::min(chunk, shape_.tokens - begin); };
  const auto make = [&](std::int64_t begin) {
    const Host& to = host[static_cast<std::size_t>(begin / chunk % 2)];
    sources_[static_cast<std::size_t>(sequence)].fill(
        begin, count_at(begin), to.keys.as<std::uint16_t>(), to.values.as<std::uint16_t>(),
        services::num_threads());
  };
  std::future<void> next;
  if (drift_) next = std::async(std::launch::async, make, 0);
  for (std::int64_t begin = 0; begin < shape_.tokens; begin += chunk) {
    const std::int64_t count = count_at(begin);
    if (drift_) {
      next.get();
      const Host& from = host[static_cast<std::size_t>(begin / chunk % 2)];
      const auto size = 2 * static_cast<std::size_t>(count * row);
      const std::array<transfer::CopyRun, 2> runs{
          {{keys.data(), from.keys.data(), size}, {values.data(), from.values.data(), size}}};
      run_.queue().copy(runs);
      if (begin + chunk < shape_.tokens) {
        next = std::async(std::launch::async, make, begin + chunk);
      }
    } else {
      const auto seed = static_cast<std::uint64_t>(1000 + begin / chunk * 2 + sequence * 100000);
      fill_normal(run_.stream(), keys.data(), chunk * row, seed, 1.0F);
      fill_normal(run_.stream(), values.data(), chunk * row, seed + 1, 1.0F);
    }
    const auto view = [&](const DeviceTensor& tensor) {
      return TensorView{tensor.data(),
                        DType::kBFloat16,
                        {count, shape_.kv_heads, shape_.head_dim},
                        MemorySpace::kDevice};
    };
    for (int layer = 0; layer < shape_.layers; ++layer) {
      session.append(layer, view(keys), view(values), StreamRef::of(run_.stream()));
    }
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run_.stream()));  // the tensors are made anew
  }
}

void Context::make_queries(int steps) {
  if (!drift_) return;
  const auto sources = static_cast<std::int64_t>(queries_.size());
  const std::int64_t step_values = sources * query_values();
  host_queries_ = {};
  host_queries_ = run_.device().allocate(transfer::Space::kPinnedHost,
                                         2 * static_cast<std::size_t>(steps * step_values));
  auto* const to = host_queries_.as<std::uint16_t>();
  services::for_each_part(services::num_threads(), sources,
                          [&](std::int64_t first, std::int64_t last) {
                            for (std::int64_t i = first; i < last; ++i) {
                              for (int step = 0; step < steps; ++step) {
                                std::ranges::copy(queries_[static_cast<std::size_t>(i)].next(),
                                                  to + step * step_values + i * query_values());
                              }
                            }
                          });
}

void Context::load_queries(int step) {
  if (!drift_) return;
  const std::int64_t values = device_queries_->count();
  const transfer::CopyRun copy{device_queries_->data(),
                               host_queries_.as<std::uint16_t>() + step * values,
                               2 * static_cast<std::size_t>(values)};
  run_.queue().copy({&copy, 1});
}

const __nv_bfloat16* Context::queries(int layer) const {
  if (!drift_) return nullptr;
  return device_queries_->data() + std::int64_t{layer} * shape_.batch * query_values();
}

json Context::describe() const {
  if (!drift_) return nullptr;
  return {{"model", *drift_ == services::DriftModel::kSmolLm2 ? "smollm2" : "needle-llama"},
          {"correlation", calibration_.drift.correlation},
          {"overlap_n_100", calibration_.overlap.per_100},
          {"overlap_n_33", calibration_.overlap.per_33}};
}

}  // namespace kvtier::bench
