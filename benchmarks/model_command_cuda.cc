#include "benchmarks/benchmarks.h"
#include "llama/bench.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdio>

/// `kvtier-llama bench` on a GPU.
namespace kvtier::llama {

bool has_gpu_bench() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

std::vector<BenchRow> bench_on_gpu(const ModelConfig& model, const BenchOptions& options,
                                   const Method& sparse) {
  bench::ModelCase shape{.layers = model.layers,
                         .hidden = model.hidden_size,
                         .inner = model.intermediate_size,
                         .query_heads = model.query_heads,
                         .kv_heads = model.kv_heads,
                         .head_dim = model.head_dim,
                         .vocabulary = model.vocab_size,
                         .contexts = options.contexts,
                         .retrieval = sparse.retrieval};
  shape.retrieval.sparsity = sparse.sparsity;
  bench::Run run(options.json, options.command, options.cuda_libs, options.steps, false);
  std::array<char, 32> sparsity{};
  std::snprintf(sparsity.data(), sparsity.size(), "%gx, ", sparse.sparsity);

  std::vector<BenchRow> rows;
  double dense = 0.0;
  for (const bench::ModelTime& time : bench::measure_model(run, shape)) {
    const double us = time.times.median;
    if (time.dense) dense = us;
    rows.push_back({.context = time.tokens,
                    .attention = (time.dense ? "" : sparsity.data()) + time.attention,
                    .us = us,
                    .us_min = time.times.min,
                    .us_max = time.times.max,
                    .over_dense = time.dense ? 0.0 : dense / us});
  }
  return rows;
}

}  // namespace kvtier::llama
