#pragma once

#include "kvtier/config.h"

#include "llama/model_config.h"
#include "llama/runtime_options.h"

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace kvtier::llama {

/// Decoding with random weights, which change no time: a whole model of a published shape, dense
/// and sparse in one run.
struct BenchOptions {
  std::string shape = "llama-3.1-8b";  ///< One of `bench_shapes()`.
  int layers = 0;                      ///< In place of the shape's; 0: those.
  std::vector<std::int64_t> contexts{32768, 70000, 100000, 140000};
  int steps = 20;  ///< Tokens that are timed for each row.
  /// `kAuto`: the GPU where the build has `bench_on_gpu` and there is one.
  Backend backend = Backend::kAuto;
  int threads = 0;                     ///< Of the CPU's arithmetic; 0: all.
  std::vector<std::string> cuda_libs;  ///< Folders of libcublas and libcudnn.
  /// One of each, and one sparsity.
  RetrievalOptions retrieval{.sparsities = {33.0}, .shared = {}};
  std::string json;     ///< File of the rows; empty: none.
  std::string command;  ///< That it names.
};

/// Microseconds of a token, from its embedding to its logits, its append included.
struct BenchRow {
  std::int64_t context = 0;
  std::string attention;  ///< "dense, cuDNN 9.19.0", "33x, KV on the device"
  double us = 0.0;        ///< The median.
  double us_min = 0.0;
  double us_max = 0.0;
  double over_dense = 0.0;  ///< The dense row's median over this one's; 0: it is the dense row.
};

/// Returns the names of the shapes.
[[nodiscard]] const std::vector<std::string>& bench_shapes();
/// Returns a shape. Throws `kNotFound` for an unknown name.
[[nodiscard]] ModelConfig bench_shape(const std::string& name, int layers);

/// Measures and prints a table, and writes the JSON file. Throws `kInvalidArgument` for options
/// that do not fit each other, `kUnavailable` for a file that cannot be written, both before
/// anything is measured; what the two functions below throw.
void run_bench(std::ostream& out, const BenchOptions& options);

/// By this decoder, fp32 weights, kvtier's CPU backend, dense and sparse. Throws
/// `kResourceExhausted` with what it needs when weights and KV are above the available memory.
[[nodiscard]] std::vector<BenchRow> bench_on_cpu(const ModelConfig& model,
                                                 const BenchOptions& options, const Method& sparse);

/// Tells whether `bench_on_gpu` can run: a build with CUDA and the benchmarks, and a GPU.
[[nodiscard]] bool has_gpu_bench();
/// bf16 weights, cuBLAS's products, each token a CUDA graph; dense attention by cuDNN, then
/// kvtier's with KV on the device and in host memory. Writes the JSON file itself, row by row.
/// Throws `kNotFound` without these libraries, `kUnimplemented` where `has_gpu_bench` is false.
[[nodiscard]] std::vector<BenchRow> bench_on_gpu(const ModelConfig& model,
                                                 const BenchOptions& options, const Method& sparse);

}  // namespace kvtier::llama
