#include "benchmarks/benchmarks.h"
#include "llama/bench.h"

#include <cuda_runtime_api.h>

#include <algorithm>

/// `kvtier-llama bench` on a GPU.
namespace kvtier::llama {

bool has_gpu_bench() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

std::vector<BenchRow> bench_on_gpu(const BenchShape& shape, const BenchOptions& options,
                                   const Method& sparse) {
  const ModelConfig& model = shape.model;
  bench::ModelCase what{.name = options.shape,
                        .layers = model.layers,
                        .hidden = model.hidden_size,
                        .inner = model.intermediate_size,
                        .query_heads = model.query_heads,
                        .kv_heads = model.kv_heads,
                        .head_dim = model.head_dim,
                        .vocabulary = model.vocab_size,
                        .experts = shape.experts,
                        .active_experts = shape.active_experts,
                        .window = shape.window,
                        .tensor_parallel = options.tensor_parallel,
                        .contexts = options.contexts,
                        .batches = options.batches,
                        .retrieval = sparse.retrieval,
                        .top_ks = options.top_ks,
                        .placements = options.placements,
                        .page_format = options.page_format,
                        .host_allocation = options.host_allocation,
                        .row_cache_rows = options.row_cache_rows};
  what.retrieval.sparsity = sparse.sparsity;
  // The ring on the device holds what sliding layers attend to.
  what.retrieval.recent_tokens =
      std::max(what.retrieval.recent_tokens, static_cast<int>(shape.window));
  if (options.locality != "none") {
    what.drift = options.locality == "smollm2" ? services::DriftModel::kSmolLm2
                                               : services::DriftModel::kNeedleLlama;
  }
  what.dense = options.dense;
  what.stages = options.stages;
  bench::Run run(options.json, options.command, options.cuda_libs, options.steps, false);
  std::vector<BenchRow> rows;
  for (const bench::ModelTime& time : bench::bench_model(run, what)) {
    rows.push_back({.context = time.tokens,
                    .batch = time.batch,
                    .attention = time.attention,
                    .us = time.times.median,
                    .us_min = time.times.min,
                    .us_max = time.times.max,
                    .us_p99 = time.us_p99,
                    .tokens_per_second = time.tokens_per_second,
                    .over_dense = time.over_dense,
                    .found = time.found,
                    .gpu_bytes = time.gpu_bytes,
                    .error = time.error});
  }
  return rows;
}

}  // namespace kvtier::llama
