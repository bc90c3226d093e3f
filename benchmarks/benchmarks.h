#pragma once

#include "kvtier/config.h"

#include "benchmarks/harness_cuda.h"
#include "services/tools/stress/options.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// The benchmarks, one file each; every one adds rows to the run.
namespace kvtier::bench {

/// Dense decode attention: cuDNN's over plain tensors, kvtier's over pages, and their difference.
struct DenseCase {
  std::int64_t tokens = 131072;
  int batch = 1;
  int query_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
};
/// A shape by name, "128K", "32Kx16" or "131072x8:64/8" for
/// TOKENS[xSEQUENCES][:QUERY_HEADS/KV_HEADS]; K is 1,024 tokens and M 1,024 K. Throws
/// `Error(kInvalidArgument)` for anything else.
[[nodiscard]] DenseCase parse_shape(const std::string& text);
/// The name of a shape, as short as it can be.
[[nodiscard]] std::string name_of(const DenseCase& shape);
void bench_dense_cudnn(Run& run, const DenseCase& dense);
/// Compares the outputs of both over the same keys and values.
void check_dense(Run& run, const DenseCase& dense);

/// One layer's decode step through the public API.
struct StepCase {
  std::int64_t tokens = 131072;
  int batch = 1;
  int query_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int layers =
      0;  ///< Layers of the graph; 0: enough that the L2 cache does not hold what they read.
  bool dense = false;
  KvPlacement placement = KvPlacement::kDevice;
  PageFormat page_format = PageFormat::kModel;
  bool verify_rows = false;
  RetrievalConfig retrieval{};
  double recall = 0.0;                  ///< A recall target; `retrieval` says the most rows then.
  bool stages = false;                  ///< Adds the time of each kernel.
  std::int64_t replayed_tokens = 1000;  ///< Room for them; replays past it drop theirs.
  /// Cached rows per KV head of the step below, and the share of the rows selected that it is to
  /// find among them.
  int row_cache_rows = 4096;
  double row_cache_share = 0.8;

  [[nodiscard]] DenseCase shape() const { return {tokens, batch, query_heads, kv_heads, head_dim}; }
  void set_shape(const DenseCase& shape) {
    tokens = shape.tokens;
    batch = shape.batch;
    query_heads = shape.query_heads;
    kv_heads = shape.kv_heads;
  }
};
void bench_decode_step(Run& run, const StepCase& step);
/// The same over a paged cache of the caller, of blocks of 16 tokens: `store` of a token of each
/// sequence, then `attend`.
void bench_paged_step(Run& run, const StepCase& step);
/// One layer's step with pages on the host and cached rows, of one sequence: queries go round a
/// circle in as many steps as make the share of rows found the one wanted. Beside it, steps of
/// which every row is found, which differ by the fetching alone, and the same steps with pages on
/// the device.
void bench_row_cache_step(Run& run, const StepCase& step);
/// One layer's step of a sequence that is all here, by an engine with tiers over the same by one
/// without, in turn: pages on the device with a row cache allowed, or on the host with a disk
/// cache. Replays of a graph, and calls.
void bench_resident_step(Run& run, const StepCase& step);
/// The steps of `bench_row_cache_step`, timed apart from prefetches after each: of what the step's
/// own query selects beyond k, and of what guesses of the next query select; and without.
void bench_prefetch(Run& run, const StepCase& step);

/// Append of new tokens: pack, store, sketch, and the length.
void bench_ingest(Run& run, int batch, std::int64_t tokens, int bits, KvPlacement placement);
/// Sketches of a whole prompt, against reading K once and against a bf16 product of the same size.
void bench_prefill(Run& run, std::int64_t tokens, int bits);
/// Append of a whole prompt to pages in pinned memory, through the public API.
void bench_prefill_append(Run& run, std::int64_t tokens);
/// Tables of a query.
void bench_tables(Run& run, int batch, const RetrievalConfig& retrieval);
/// Tables, scores and choice of the k best, and the time of each kernel.
void bench_select(Run& run, std::int64_t tokens, int batch, const RetrievalConfig& retrieval);
/// Fetch of random rows into staging, for each number of rows per KV head; row sets rotate over
/// `region_gib` GiB of pages.
void bench_gather(Run& run, const std::vector<std::int64_t>& rows_per_head, KvPlacement placement,
                  std::int64_t region_gib, PageFormat format);
/// Attention over random rows, and over a run of tokens.
void bench_flash_decode(Run& run, std::int64_t tokens, std::int64_t rows_per_head);
/// How much of the exact selection the fast paths choose.
void bench_overlap(Run& run, std::int64_t tokens, const RetrievalConfig& fast,
                   const RetrievalConfig& exact);

/// Fork of a session with pages in host memory: time on the host, bytes until a child is used, and
/// the time that a child's first use adds, copies of its last pages included.
struct ForkCase {
  std::int64_t tokens = 1 << 20;
  int layers = 32;
  int kv_heads = 1;
  int children = 64;
};
void bench_fork(Run& run, const ForkCase& fork);
/// Decode of a token of each sequence by a whole decoder with random bf16 weights, cuBLAS's
/// products. Default: Llama-3.1-8B.
struct ModelCase {
  std::string name;
  int layers = 32;
  std::int64_t hidden = 4096;
  std::int64_t inner = 14336;  ///< Of one expert, where there are some.
  int query_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  std::int64_t vocabulary = 128256;
  int experts = 0;  ///< Of a layer; 0: none.
  int active_experts = 0;
  std::int64_t window = 0;  ///< Last tokens that layers 0, 2, 4 ... attend to; 0: no such layers.
  int tensor_parallel = 1;  ///< Ranks of which this is one; the sizes above are its own.
  std::vector<std::int64_t> contexts = {32768, 70000, 100000, 140000};
  std::vector<int> batches = {1};
  RetrievalConfig retrieval{};
  std::vector<int> top_ks{};  ///< In place of the number in `retrieval`, a row each.
  std::vector<KvPlacement> placements = {KvPlacement::kDevice, KvPlacement::kHost};
  PageFormat page_format = PageFormat::kModel;
  HostAllocation host_allocation = HostAllocation::kAuto;
  /// Rows per KV head that stay on the GPU where KV is on the host, an engine each; empty: as the
  /// library has it.
  std::vector<int> row_cache_rows{};
  /// Whose queries those of attention drift like; none: normal keys, and the projections' queries.
  std::optional<services::DriftModel> drift{};
  bool dense = true;
  bool stages = false;  ///< Adds the time of each kernel of one layer.
};
/// One row of it.
struct ModelTime {
  std::int64_t tokens = 0;
  int batch = 1;
  std::string attention{};         ///< "dense, cuDNN 9.19.0", "k 2048, KV on the device"
  Times times{};                   ///< Of a token of each sequence, as the next one.
  double us_p99 = 0.0;             ///< By nearest rank.
  double tokens_per_second = 0.0;  ///< Of all sequences.
  std::optional<double> found{};   ///< Share of the rows looked for that were on the GPU.
  std::size_t gpu_bytes = 0;       ///< In use on the GPU, this program's and others'.
  bool dense = false;
  double over_dense = 0.0;  ///< 0: no dense row of this case.
  std::string error{};      ///< Why there are no times: memory does not suffice.
};
/// Of each case: with cuDNN's dense attention, and with kvtier's for each placement and number of
/// rows. Contexts are appended, not computed by a prefill. Every token is a replay of one CUDA
/// graph.
std::vector<ModelTime> bench_model(Run& run, const ModelCase& shape);
/// Prefill of a prompt by layers of the decoder: alone, with its keys sketched and its rows stored
/// on another stream while the next layer computes, and k-means over the same keys.
void bench_ttft(Run& run, const ModelCase& shape, std::int64_t tokens);

/// Names of options, as `decode_step` takes them and the rows have them.
[[nodiscard]] std::string name_of(Estimator estimator);
[[nodiscard]] std::string name_of(Selection selection);
[[nodiscard]] std::string name_of(SelectionRule rule);
[[nodiscard]] std::string name_of(SketchCode code);
[[nodiscard]] std::string name_of(KvPlacement placement);
/// Estimator, selection, bits and number of rows, as a row's parameters.
[[nodiscard]] json retrieval_parameters(const RetrievalConfig& retrieval, int head_dim = 128);

/// Every row of docs/performance.md, or those whose name (kind, shape, options) has one of the
/// words `only` in it.
void bench_all(Run& run, const std::vector<std::string>& only);

}  // namespace kvtier::bench
