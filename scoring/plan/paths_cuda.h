#pragma once

#include "scoring/plan/selector_cuda.h"

#include <cstddef>
#include <cstdint>

/// Internal to the CUDA half of the selector: the paths that write no score of every query head.
/// Their results are those of the generic path (docs/algorithm.md, section "Select"), ties
/// included, but for rounding of scores.
namespace kvtier::scoring::cuda {

/// Fills `workspace.selection` by a path that is not the generic one. Everything, the plan of the
/// rows included.
void enqueue_path(const Stage& stage, const SelectionPlan& plan, const QueryPart& part,
                  const RecallParams& recall_params);
struct FilterArgs;
[[nodiscard]] FilterArgs path_args(const Stage& stage, const RecallParams& recall_params);

/// Bytes of what blocks exchange (fused/block_exchange_cuda.cuh), of all (query, KV head) pairs.
[[nodiscard]] std::size_t mailboxes_bytes(std::int64_t groups);
/// Words that the blocks of a selection which attends post with their parts, of groups
/// of query heads, too.
[[nodiscard]] std::int64_t fused_parts_words(std::int64_t groups, int group);
/// Words of the ids that such blocks post, of `max_selected` for each (query, KV head) at most.
[[nodiscard]] std::int64_t fused_ids_words(std::int64_t groups, std::int64_t max_selected);
/// head_dim of such a selection.
inline constexpr int kAttendDim = 128;
/// Most (query, KV head) pairs of such a selection: more are balanced better by a kernel that
/// shares out all of their rows.
inline constexpr std::int64_t kAttendedGroups = 16;
/// The same through the row cache, where the link takes longer than an uneven share. Of more, a
/// part of the batch has half as many.
inline constexpr std::int64_t kCachedGroups = 128;
/// Most rows that a query attends to so: they are shared out by `small_quotient`.
inline constexpr std::int64_t kMostAttended = 1 << 19;
/// Most tokens that a query selects for attention through the row cache.
inline constexpr std::int64_t kMostCachedRows = 8192;
/// Most query heads of a KV head that the stream of keys attends, or has recall targets of.
inline constexpr int kFusedHeads = 8;
/// Most blocks that choose the tokens of one (query, KV head) together, and wait for one another.
inline constexpr unsigned kFusedBlocks = 32;
/// The same where the kernel is not that of fused/select_cuda.cu: counts of so many blocks are in
/// the way of its memory.
inline constexpr unsigned kChoiceBlocks = 16;
/// Most blocks that score queries which are chosen from on chip, where (query, KV head) pairs are
/// fewer.
inline constexpr int kFusedParts = 256;
/// Most blocks of the pass of a selection by a stream of keys (stream/stream_cuda.cuh).
inline constexpr int kMostStreamBlocks = 256;
/// Bins that tokens are counted by, of their keys.
inline constexpr int kFusedBins = 512;
/// Floats of what a block of it sums of a head for a recall target.
inline constexpr int kRecallSums = 8;
/// Bytes of what it keeps of a (query, KV head).
[[nodiscard]] std::int64_t stream_group_bytes();
/// Most bytes that the static shared memory of a kernel has which takes what a block may have.
inline constexpr int kStaticBytes = 19 * 1024;
/// Most bytes of dynamic shared memory of such a kernel.
inline int most_table_bytes(int block_bytes) { return block_bytes - kStaticBytes; }

/// The arguments of the stages.
struct FilterArgs {
  SelectRequest request;
  RecallParams recall;
  QueryTables tables;
  FilterScratch filter;
  HeadEstimate* estimates;
  std::int32_t* ids;
  float* values;
  transfer::SelectionView selection;
  std::int64_t max_tokens;
  QueryPart part;       ///< The queries of the launch, by a stream of keys,
  int first_block = 0;  ///< and the number of its pass's first block.

  /// Where the blocks of a (query, KV head) exchange data.
  KVTIER_HOST_DEVICE [[nodiscard]] std::int64_t place_of(std::int64_t group_index) const {
    return group_index + std::int64_t{part.first_place - part.first} * request.kv.kv_heads;
  }
};

/// Whether the heads of a group share a set.
[[nodiscard]] inline bool one_set(const SelectShape& shape) {
  return shape.params.selection == Selection::kPerKvHead || shape.group == 1;
}

/// Whether the rows of always-attended tokens, of which an error target needs the exact mass, are
/// of 16 bits each. Of rows in int8 that have no copies in 16 bits, `row_address` knows nothing.
[[nodiscard]] inline bool static_readable(const SelectShape& shape) {
  return shape.params.threshold == 0.0F || !shape.int8_rows || shape.fp16_sinks;
}

/// Norm-aware selections per KV head of which all scores fit in shared memory, in one kernel
/// (fused/select_cuda.cuh). Writes the plan and returns true if it serves a shape.
[[nodiscard]] bool plan_fused(const SelectShape& shape, const DeviceLimits& device,
                              SelectionPlan& plan);
void enqueue_fused(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan);
/// The same for soft collisions of which all values fit on chip, in one kernel
/// (soft/smem_cuda.cu).
[[nodiscard]] bool plan_soft(const SelectShape& shape, const DeviceLimits& device,
                             SelectionPlan& plan);
void enqueue_soft(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan);
/// Soft collisions with a selection per query head (soft/heads_cuda.cu).
[[nodiscard]] bool plan_soft_heads(const SelectShape& shape, const DeviceLimits& device,
                                   SelectionPlan& plan);
void enqueue_soft_heads(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan);

}  // namespace kvtier::scoring::cuda
