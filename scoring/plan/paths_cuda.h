#pragma once

#include "scoring/plan/selector_cuda.h"

#include <cstddef>
#include <cstdint>

/// Internal to the CUDA half of the selector: selection without a score matrix.
///
/// One pass over the sketches keeps only *candidates*, tokens whose score may be among the k best:
///
/// 1. `sample`: scores some thousand tokens spread over the sequence; from them a reference that
///    normalises each head, and a threshold that a little more than k tokens should reach.
/// 2. `pass`: scores every eligible token once; writes the tokens that reach the threshold, and
///    what their heads' exact normalisers need.
/// 3. `choose`: exact top-k among the candidates, by a cluster of blocks for each (query, KV head),
///    with a proof that no other token belongs to it. Where the proof fails, it sets a threshold
///    that cannot fail, and
/// 4. `pass` and `choose` run once more for those sets; for all others they return at once.
///
/// The result is that of the full path (docs/algorithm.md, section "Select"), ties included, but
/// for rounding of scores; and normalisers of soft-collision selections per KV head come in part
/// from the sample, and from more tokens as far as it takes, so that none moves further than three
/// quarters of a near-tie (candidates/collision_sums_cuda.cu).
namespace kvtier::scoring::cuda {

/// Per (query, query head). Values are in the estimator's domain: base-2 logits for logit-like
/// scores, weighted collisions otherwise.
struct FilterHead {
  /// The share of a token with value t is 2^(t - reference + kShareShift), or t * reference.
  float reference;
  float threshold;  ///< Per query head: least share of a candidate.
};

/// Shares are kept this many octaves above 1, so that they do not underflow before 2^-186. One of
/// more than 2^kShareLimit may stand for itself, for the limit or be infinite: it passes every
/// threshold, and a sum with it is no normaliser. A share of 0 passes a threshold of 0 only.
inline constexpr float kShareShift = 60.0F;
inline constexpr float kShareLimit = 100.0F;

/// Per (query, KV head).
struct FilterGroup {
  float threshold;      ///< Per KV head: least sum of shares of a candidate.
  std::uint32_t again;  ///< 1: the second pass is for this one.
};

/// What a block of the sample tells, per query head, of its tokens below the threshold.
struct SampleRest {
  float count;
  float sum;     ///< Of shares.
  float square;  ///< Of differences between the head's share and the mean of its group.
  float least;   ///< Sums of shares of tokens, of any in the block's sample.
  float most;
};

/// Fills `workspace.selection` by a path that is not the generic one. Everything, the plan of the
/// rows included.
void enqueue_path(const Stage& stage, const SelectionPlan& plan, const RecallParams& recall_params);
struct FilterArgs;
[[nodiscard]] FilterArgs path_args(const Stage& stage, const RecallParams& recall_params);

/// Shared memory, in bytes, that the stages' tables need.
[[nodiscard]] int sample_bytes(const ScoreParams& params, int group);
[[nodiscard]] int collision_pass_bytes(const ScoreParams& params, int group);
/// Bytes of what blocks exchange (fused/block_exchange_cuda.cuh), of all (query, KV head) pairs.
[[nodiscard]] std::size_t mailboxes_bytes(std::int64_t groups);
/// Words that the blocks of a selection which attends tell one another of their parts, of groups
/// of query heads, too.
[[nodiscard]] std::int64_t fused_parts_words(std::int64_t groups, int group);
/// head_dim of such a selection.
inline constexpr int kAttendDim = 128;
/// Most (query, KV head) pairs of such a selection: more are balanced better by a kernel that
/// shares out all of their rows.
inline constexpr std::int64_t kAttendedGroups = 16;
/// Most query heads of a KV head of it, and of one whose scores stay on chip.
inline constexpr int kFusedHeads = 8;
/// Most blocks that choose the tokens of one (query, KV head) together, and wait for one another.
inline constexpr unsigned kFusedBlocks = 16;
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
  QueryPlan* plans;
  FilterScratch filter;
  HeadEstimate* estimates;
  std::int32_t* ids;
  float* values;
  transfer::SelectionView selection;
  std::int64_t max_tokens;
  std::int64_t segments;
};

/// Whether the heads of a group share a set.
[[nodiscard]] inline bool one_set(const SelectShape& shape) {
  return shape.params.selection == Selection::kPerKvHead || shape.group == 1;
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
/// The same for soft collisions of which all values fit in L2 (soft/l2_cuda.cu).
[[nodiscard]] bool plan_soft_in_l2(const SelectShape& shape, const DeviceLimits& device,
                                   SelectionPlan& plan);
void enqueue_soft_in_l2(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan);
void enqueue_sample(cudaStream_t stream, const FilterArgs& args);
void enqueue_collision_pass(cudaStream_t stream, const FilterArgs& args, bool again);
void enqueue_choose(cudaStream_t stream, const FilterArgs& args, bool again);

}  // namespace kvtier::scoring::cuda
