#include "kvtier/engine.h"

#include "benchmarks/benchmarks.h"
#include "benchmarks/cudnn_attention_cuda.h"
#include "benchmarks/steps_cuda.h"
#include "include/types/float16.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

namespace kvtier::bench {
namespace {

constexpr std::int64_t kRotatedBytes = std::int64_t{1} << 30;

json parameters(const DenseCase& dense) {
  return {{"tokens", dense.tokens},
          {"batch", dense.batch},
          {"query_heads", dense.query_heads},
          {"kv_heads", dense.kv_heads},
          {"head_dim", dense.head_dim}};
}

CudnnAttention::Shape shape_of(const DenseCase& dense, bool heads_first) {
  return {.tokens = dense.tokens,
          .batch = dense.batch,
          .query_heads = dense.query_heads,
          .kv_heads = dense.kv_heads,
          .head_dim = dense.head_dim,
          .heads_first = heads_first};
}

std::vector<float> on_host(const DeviceTensor& tensor) {
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(tensor.count()));
  KVTIER_CUDA_CHECK(cudaMemcpy(bits.data(), tensor.data(), bits.size() * 2, cudaMemcpyDefault));
  std::vector<float> values(bits.size());
  std::ranges::transform(bits, values.begin(),
                         [](std::uint16_t each) { return BFloat16{each}.to_float(); });
  return values;
}

}  // namespace

void bench_dense_cudnn(Run& run, const DenseCase& dense) {
  const auto library = CudnnLibrary::load(run.cuda_libs());
  const std::int64_t row = std::int64_t{dense.batch} * dense.query_heads * dense.head_dim;
  const std::int64_t cache =
      std::int64_t{dense.batch} * dense.tokens * dense.kv_heads * dense.head_dim;
  const int layers = static_cast<int>(
      std::clamp<std::int64_t>((kRotatedBytes + 4 * cache - 1) / (4 * cache), 1, 16));
  const DeviceTensor queries(row * layers, 21, 2.0F);
  const DeviceTensor keys(cache * layers, 22);
  const DeviceTensor values(cache * layers, 23);
  const DeviceTensor out(row, 24);

  const std::array<CudnnAttention, 2> layouts{CudnnAttention(library, shape_of(dense, true)),
                                              CudnnAttention(library, shape_of(dense, false))};
  const auto time = [&](const CudnnAttention& attention, int plan, int replays, int passes) {
    const auto run_layer = [&](int layer) {
      attention.run(run.stream(), plan, queries.data() + layer * row, keys.data() + layer * cache,
                    values.data() + layer * cache, out.data());
    };
    run_layer(0);
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
    return time_graph(
        run.stream(), layers, replays,
        [&] {
          for (int layer = 0; layer < layers; ++layer) run_layer(layer);
        },
        passes);
  };
  // A few short replays find the fastest plan, which is then measured as steps are.
  std::size_t layout = 0;
  int plan = 0;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    for (int j = 0; j < layouts[i].num_plans(); ++j) {
      const double us = time(layouts[i], j, 5, 1).median;
      if (us >= least) continue;
      least = us;
      layout = i;
      plan = j;
    }
  }
  const int passes = graph_passes(layers);
  run.add_bytes("dense_cudnn", parameters(dense),
                time(layouts[layout], plan, run.replays(), passes), static_cast<double>(4 * cache),
                {{"plan", plan},
                 {"layout", layout == 0 ? "heads first" : "tokens first"},
                 {"layers", layers},
                 {"graph_steps", layers * passes},
                 {"library", library->name()}});
}

void check_dense(Run& run, const DenseCase& dense) {
  const auto library = CudnnLibrary::load(run.cuda_libs());
  const std::int64_t row = std::int64_t{dense.query_heads} * dense.head_dim;  // of a sequence
  const std::int64_t cache = dense.tokens * dense.kv_heads * dense.head_dim;
  const std::int64_t all = row * dense.batch;
  const DeviceTensor query(all, 31, 2.0F), keys(cache * dense.batch, 32),
      values(cache * dense.batch, 33), ours(all, 34), theirs(all, 35);

  Config config;
  config.backend = Backend::kCuda;
  config.model = {.layers = 1,
                  .query_heads = dense.query_heads,
                  .kv_heads = dense.kv_heads,
                  .head_dim = dense.head_dim,
                  .layer_options = {{.mode = LayerMode::kDense}}};
  config.memory.placement = KvPlacement::kDevice;
  config.memory.max_session_tokens = dense.tokens;
  config.memory.host_bytes = static_cast<std::size_t>(4 * cache) + 64 * MiB;
  config.memory.device_bytes = config.memory.host_bytes * 2 + 4 * GiB;
  Engine engine(config);
  for (int b = 0; b < dense.batch; ++b) {  // a sequence at a time
    Session session = engine.open();
    const auto cache_of = [&](const DeviceTensor& tensor) {
      return view(tensor.data() + b * cache, dense.tokens, dense.kv_heads, dense.head_dim);
    };
    session.append(0, cache_of(keys), cache_of(values));
    session.attend(0, {.query = view(query.data() + b * row, 1, dense.query_heads, dense.head_dim)},
                   {.out = {ours.data() + b * row,
                            DType::kBFloat16,
                            {1, dense.query_heads, dense.head_dim},
                            MemorySpace::kDevice}});
  }
  const std::vector<float> expected = on_host(ours);
  const CudnnAttention attention(library, shape_of(dense, false));
  for (int plan = 0; plan < attention.num_plans(); ++plan) {
    fill_normal(run.stream(), theirs.data(), all, 36, 1.0F);
    attention.run(run.stream(), plan, query.data(), keys.data(), values.data(), theirs.data());
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
    const std::vector<float> found = on_host(theirs);
    double difference = 0.0, norm = 0.0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const double apart = static_cast<double>(found[i]) - static_cast<double>(expected[i]);
      difference += apart * apart;
      norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
    }
    const double error = std::sqrt(difference / norm);
    run.note("check_dense", parameters(dense),
             {{"plan", plan}, {"relative_difference", error}, {"library", library->name()}});
    // Two bf16 results, each rounded once (2^-9), theirs from weights rounded to bf16.
    if (!(error < 2e-2)) {
      throw Error(ErrorCode::kInternal,
                  "cuDNN against kvtier: expected a relative difference below 2e-2, found " +
                      std::to_string(error));
    }
  }
}

}  // namespace kvtier::bench
