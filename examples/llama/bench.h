#pragma once

#include "kvtier/config.h"

#include "llama/model_config.h"
#include "llama/runtime_options.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace kvtier::llama {

/// Decoding with random weights, which change no time: a whole model of a published shape, dense
/// and sparse in one run. The contexts are appended, not computed by a prefill.
struct BenchOptions {
  std::string shape = "llama-3.1-8b";  ///< One of `bench_shapes()`.
  int layers = 0;                      ///< In place of the shape's; 0: those.
  /// Ranks of which one is measured: it has so much of the heads, the inner columns and the
  /// vocabulary. What ranks exchange is not measured.
  int tensor_parallel = 1;
  std::vector<std::int64_t> contexts{32768, 70000, 100000, 140000};
  int steps = 20;  ///< Tokens that are timed for each row.
  /// `kAuto`: the GPU where the build has `bench_on_gpu` and there is one.
  Backend backend = Backend::kAuto;
  int threads = 0;                     ///< Of the CPU's arithmetic; 0: all.
  std::vector<std::string> cuda_libs;  ///< Folders of libcublas and libcudnn.
  PageFormat page_format = PageFormat::kModel;
  HostAllocation host_allocation = HostAllocation::kAuto;
  // On a GPU only; the CPU measures one sequence with KV in host memory, and copies no rows.
  std::vector<KvPlacement> placements{KvPlacement::kDevice, KvPlacement::kHost};
  std::vector<int> batches{1};  ///< Sequences that decode together, rows for each.
  /// Rows per KV head that stay on the GPU with KV on the host, rows for each number; empty: as
  /// the library has it.
  std::vector<int> row_cache_rows;
  /// Whose queries those of the attention drift like from token to token: "smollm2",
  /// "needle-llama", or "none": normal keys, and the queries of the projections.
  std::string locality = "smollm2";
  bool stages = false;  ///< Time of each kernel of one layer, in the JSON file.

  bool dense = true;  ///< Whether dense attention is measured.
  /// One of each, and one sparsity.
  RetrievalOptions retrieval{.sparsities = {33.0}, .shared = {}};
  std::vector<int> top_ks;  ///< Rows that are selected per KV head, in place of the sparsity.
  std::string json;         ///< File of the rows; empty: none.
  std::string command;      ///< That it names.
};

/// A published shape. With experts `model.intermediate_size` is that of one.
struct BenchShape {
  ModelConfig model;
  int experts = 0;  ///< Of a layer; 0: none.
  int active_experts = 0;
  std::int64_t window = 0;  ///< Last tokens that layers 0, 2, 4 ... attend to; 0: no such layers.
};

/// Microseconds of a token of each sequence, from its embedding to its logits, its append included.
struct BenchRow {
  std::int64_t context = 0;
  int batch = 1;
  std::string attention;  ///< "dense, cuDNN 9.19.0", "33x, KV on the device"
  double us = 0.0;        ///< The median.
  double us_min = 0.0;
  double us_max = 0.0;
  double us_p99 = 0.0;             ///< By nearest rank.
  double tokens_per_second = 0.0;  ///< Of all sequences.
  double over_dense = 0.0;         ///< The dense row's median over this one's; 0: there is none.
  std::optional<double> found{};   ///< Share of the rows looked for that were on the GPU.
  std::size_t gpu_bytes = 0;       ///< In use on the GPU; 0 on the CPU.
  std::string error{};             ///< Why there are no times: memory does not suffice.
};

/// Returns the names of the shapes.
[[nodiscard]] const std::vector<std::string>& bench_shapes();
/// Returns the shape of `options`. Throws `kNotFound` for an unknown name, `kInvalidArgument` for
/// ranks among which it cannot be divided.
[[nodiscard]] BenchShape bench_shape(const BenchOptions& options);

/// Measures and prints a table, and writes the JSON file. Throws `kInvalidArgument` for options
/// that do not fit each other, `kUnavailable` for a file that cannot be written, both before
/// anything is measured; what the two functions below throw.
void run_bench(std::ostream& out, const BenchOptions& options);

/// By this decoder, fp32 weights, kvtier's CPU backend, dense and sparse. Throws
/// `kInvalidArgument` for what only a GPU measures, `kResourceExhausted` with what it needs when
/// weights and KV are above the available memory.
[[nodiscard]] std::vector<BenchRow> bench_on_cpu(const ModelConfig& model,
                                                 const BenchOptions& options, const Method& sparse);

/// Returns whether `bench_on_gpu` can run: a build with CUDA and the benchmarks, and a GPU.
[[nodiscard]] bool has_gpu_bench();
/// bf16 weights, cuBLAS's products, each token a CUDA graph; dense attention by cuDNN, then
/// kvtier's for each placement and number of rows. Writes the JSON file itself, row by row. Where
/// memory does not suffice a row says so. Throws `kNotFound` without these libraries,
/// `kUnimplemented` where `has_gpu_bench` is false.
[[nodiscard]] std::vector<BenchRow> bench_on_gpu(const BenchShape& shape,
                                                 const BenchOptions& options, const Method& sparse);

}  // namespace kvtier::llama
