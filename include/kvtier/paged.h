#pragma once

#include "kvtier/config.h"
#include "kvtier/export.h"
#include "kvtier/tensor.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier {

/// Of a `PagedSketches`.
struct PagedConfig {
  ModelConfig model{};  ///< All layers sparse; `kv_dtype` is that of the cache.
  /// Norm-aware with query_bits 4 or 8 and one phase, selections per sequence or per KV head, and
  /// no error target: `RetrievalConfig::kDefaultTopK` tokens where no number is given.
  RetrievalConfig retrieval{.selection = Selection::kPerSequence};
  Backend backend = Backend::kAuto;
  std::int64_t num_blocks = 0;  ///< Blocks of the caller's cache, the same in all layers.
  int block_tokens = 16;        ///< Tokens of a block: 16, 32, 64, 128, 256, 512 or 1024.
  std::int64_t max_tokens = 0;  ///< Most tokens of a sequence.
  /// Sequences of a launch, 1..64; calls with more have several. The workspace grows with it.
  int max_batch_rows = 16;
  std::function<void(LogLevel, std::string_view)> log{};

  /// Returns every problem, empty when valid.
  [[nodiscard]] KVTIER_EXPORT std::vector<std::string> validate() const;
};

/// Where the tokens of a batch of sequences are in the cache. `blocks`: int32 `[sequences, n]`,
/// token t of a sequence is in block `blocks[t / block_tokens]`. `lengths`: int32 `[sequences]`,
/// the tokens of each, the one that the query belongs to included. `max_length`: what the lengths
/// stay below or reach while this call, or a graph that it is captured in, is used; it sizes
/// grids, and n is at least as many blocks; 0: `PagedConfig::max_tokens`. Values are read on the
/// device when the stream gets there.
struct PagedBatch {
  TensorView blocks{};
  TensorView lengths{};
  std::int64_t max_length = 0;
};

/// A layer of the caller's cache: `keys`, `values` `[num_blocks, block_tokens, kv_heads, head_dim]`
/// each, of `ModelConfig::kv_dtype`. Strides are free but for the last, which is 1: both halves may
/// lie in one tensor, and heads before tokens. Addresses are multiples of 16 bytes, strides of 8
/// elements.
struct PagedLayer {
  TensorView keys{};
  TensorView values{};
};

/// `ids`: int32 `[sequences, heads, n]` with heads = 1 for `kPerSequence`, kv_heads for
/// `kPerKvHead`: every token to attend, ascending, padded with -1; n >= `attended_bound`. `bias`
/// (optional, with `SelectionRule::kPriority`): fp32, same shape, what to add to the logit of each,
/// 0 for tokens that are always attended and where padded.
struct PagedSelectOutputs {
  MutableTensorView ids{};
  MutableTensorView bias{};
};

/// `out`: fp32, fp16 or bf16 `[sequences, query_heads, head_dim]`. `lse` (optional): fp32
/// `[sequences, query_heads]`, natural log of the softmax denominator.
struct PagedAttendOutputs {
  MutableTensorView out{};
  MutableTensorView lse{};
};

/// Sparse decode over a paged KV cache that the caller owns: the sketches of its slots, and the
/// workspace to select from them and to attend. The caller keeps blocks, block tables and the
/// lives of sequences; a slot's sketch is written with the slot, and simply written over when the
/// slot is used again.
///
/// All tensors are device memory on CUDA and host memory on the CPU. Completion is that of
/// `StreamRef`: with a stream a call is enqueued and returns, tensors stay valid until the stream
/// has passed it; without one it returns when its outputs are written. A call allocates nothing and
/// waits for nothing on the host, so it can be captured in a CUDA graph; replays read block tables
/// and lengths anew. Calls use one workspace: the caller orders them, on one stream or by events.
/// Thread-safe otherwise.
///
/// ```cpp
/// kvtier::PagedConfig config;
/// config.model = {.layers = 32, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
/// config.num_blocks = 4096;
/// config.max_tokens = 131072;
/// kvtier::PagedSketches sketches(config);
/// sketches.store(0, keys, values, slots);  // what the caller has written to these slots
/// sketches.attend(0, batch, query, cache, {.out = out});
/// ```
class KVTIER_EXPORT PagedSketches {
 public:
  /// Allocates sketches of all slots and the workspace. Throws `kInvalidArgument` with all problems
  /// of `config`, `kResourceExhausted` when memory is short, `kUnimplemented` when CUDA is asked
  /// for and cannot be used.
  explicit PagedSketches(const PagedConfig& config);
  ~PagedSketches();
  PagedSketches(PagedSketches&&) noexcept;
  PagedSketches& operator=(PagedSketches&&) noexcept;

  /// Sketches new tokens: `keys`, `values` `[tokens, kv_heads, head_dim]`, any float dtype, rotary
  /// embedding applied; `slots` int32 `[tokens]`, block * block_tokens + offset of each; a slot
  /// below 0 or outside the cache is passed over. Of a slot given twice either may count. A token
  /// with NaN or infinity scores below all others. The cache itself is the caller's to write.
  void store(int layer, const TensorView& keys, const TensorView& values, const TensorView& slots,
             StreamRef stream = {});

  /// Returns how many tokens a query attends at most, of a sequence of `length` tokens.
  [[nodiscard]] std::int64_t attended_bound(std::int64_t length) const;

  /// Scores the eligible tokens of each sequence by its query, `[sequences, query_heads, head_dim]`
  /// of any float dtype, and lists what to attend. Sketches of all its tokens must have been stored
  /// before, on the stream.
  void select(int layer, const PagedBatch& batch, const TensorView& query,
              const PagedSelectOutputs& outputs, StreamRef stream = {});

  /// Selects and attends to the rows of `cache`: exact softmax attention over the tokens that
  /// `select` lists, with their biases. An empty sequence gives zeros and -infinity.
  void attend(int layer, const PagedBatch& batch, const TensorView& query, const PagedLayer& cache,
              const PagedAttendOutputs& outputs, StreamRef stream = {});

  /// Throws `kInvalidArgument` when a call or a replay that is done has met a block id outside the
  /// cache, which was read as block 0, or a length below 0 or above `max_length`, which was
  /// clamped; then forgets it. Every call does this first, and at its end when it had no stream.
  void check();

  [[nodiscard]] Backend backend() const noexcept;
  /// As of `Engine`.
  [[nodiscard]] int device_index() const noexcept;
  /// Returns the configuration in force, with the number of tokens.
  [[nodiscard]] const PagedConfig& config() const noexcept;
  /// Returns the device memory of the sketches, and of everything.
  [[nodiscard]] std::size_t sketch_bytes() const noexcept;
  [[nodiscard]] std::size_t device_bytes() const noexcept;

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier
