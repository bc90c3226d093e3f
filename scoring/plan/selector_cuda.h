#pragma once

#include "scoring/recall_params.h"
#include "scoring/selector_kernels.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Internal to the CUDA half of the selector: the stages of a selection, each a few launches.
///
/// Every stage is stream-ordered, allocates nothing and reads nothing on the host. What depends on
/// a sequence's length is in `QueryPlan`, which `enqueue_plan` writes on the device from the
/// counters; grids cover `request.max_length` and blocks outside a query's range return at once.
namespace kvtier::scoring::cuda {

/// Tokens that a warp, and a block of 8 warps, handles in the stages after scoring.
inline constexpr int kSegmentTokens = 256;
inline constexpr int kTileTokens = 2048;
inline constexpr int kTileThreads = kTileTokens / kSegmentTokens * 32;

/// Bins of one radix pass over 32-bit keys, of 11, 11 and 10 bits.
inline constexpr int kRadixBins = 2048;

/// A query: the tokens [begin, end) that may be selected, how many to select, its sketch
/// blocks, which are those of all sequences where there are slots.
struct QueryPlan {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t k = 0;
  const std::byte* const* blocks = nullptr;
  const std::int32_t* slots = nullptr;  ///< Block table of the sequence, where there are slots.
};

/// Progress of one set's radix select, and the tickets of the launches over it.
struct SetState {
  std::uint32_t threshold = 0;  ///< Bits known so far of the key of the last token that is taken.
  std::uint32_t sought = 0;     ///< How many are taken, unless a recall target says it.
  std::uint32_t above = 0;      ///< Tokens whose keys are above those bits.
  std::uint64_t mass = 0;       ///< Of these, for a recall target (generic/top_k_cuda.cu),
  std::uint64_t all = 0;        ///< and of all tokens of the set.
  std::uint32_t remaining = 0;  ///< Of the keys equal to the threshold, how many to take.
  std::uint32_t all_ties = 0;   ///< 1: every key equal to the threshold is taken.
  std::uint32_t ticket = 0;     ///< Blocks of the present launch that are done; 0 between launches.
  std::uint32_t wanted = 0;     ///< Tokens that the set is to have, of those eligible.
  /// Of a selection by priority: the largest that is not taken, or the threshold.
  float cut = 0.0F;
};

/// Per (query, query head), of a selection for a recall target (generic/recall_cuda.cuh).
struct HeadEstimate;

struct Mailbox;
struct StreamGroup;

/// Views of the memory of the paths that are not generic. Lists of tokens that do not fit on chip
/// are in `SelectorWorkspace::combined` (as int32) and `scores`.
struct FilterScratch {
  std::uint32_t* masses;       // [queries][kv_heads][max_tokens] of tokens of a recall target
  Mailbox* mailboxes;          // [queries][kv_heads], zero at first (fused/block_exchange_cuda.cuh)
  std::uint64_t* fused_parts;  // [first_part(groups)][words of a part], zero at first
  std::uint64_t* fused_ids;    // [queries][kv_heads][max_selected][2], zero at first
  float2* fused_sums;  // [queries][kv_heads][parts][group] parts of normalisers, as maximum and sum
  // Of a selection by a stream of keys (stream/stream_cuda.cuh):
  std::uint16_t* stream_keys;  // [queries][kv_heads][max_tokens], in memory of `token_mask`
  StreamGroup* stream_groups;  // [queries][kv_heads]
  float2* stream_sums;  // [groups + blocks of the pass][kMaxGroup] parts of normalisers, as maximum
                        // and sum
  std::uint32_t* stream_counts;  // [groups + blocks of the pass][2][kFusedBins] tokens by bins of
                                 // approximate keys; of scores, where these are priorities
  float* stream_recall;          // [groups + blocks of the pass][kFusedHeads][kRecallSums]
};

/// Views of `SelectorWorkspace::scratch`. A *set* is what gets its own k tokens: a KV head or a
/// query head; arrays per set have the stride of query heads in both cases.
struct Scratch {
  QueryPlan* plans;          // [queries]
  SetState* states;          // [queries][query_heads]
  std::uint32_t* histogram;  // [queries][query_heads][kRadixBins], zero between launches
  std::uint32_t* ties;    // [queries][query_heads][segments] counts, then counts before the segment
  std::uint32_t* chosen;  // [queries][kv_heads][segments], the same
  float2* partials;       // [queries][query_heads][tiles] max and sum of a `LogSum`
  float* normalisers;     // [queries][query_heads] log-sum-exp, or sum of collisions
  HeadEstimate* estimates;  // [queries][query_heads]
  std::uint64_t*
      masses;  // [queries][query_heads][kRadixBins], in memory of `FilterScratch::masses`
  FilterScratch filter;
  std::int64_t segments;
  std::int64_t tiles;
};

/// Lays the arrays out in `base`; `bytes`, when given, receives the size of all of them, `zeroed`
/// that of the first ones, which are zero before the first launch.
Scratch scratch_layout(const SelectorLimits& limits, std::byte* base, std::size_t* bytes = nullptr,
                       std::size_t* zeroed = nullptr);

/// The arguments that all stages share.
struct Stage {
  cudaStream_t stream;
  const SelectRequest& request;
  const SelectorWorkspace& workspace;
  Scratch scratch;

  int num_queries() const { return request.query_batch.count; }
  bool prioritised() const { return request.params.rule == SelectionRule::kPriority; }
  bool shared() const { return request.params.shared(); }
  bool per_sequence() const { return request.params.selection == Selection::kPerSequence; }
  /// The selection of a sequence is found once for each KV head, side by side.
  int num_sets() const { return shared() ? request.kv.kv_heads : request.kv.query_heads(); }
  /// Scores that order the tokens of a selection, `[queries][sets][max_tokens]`. Normalising one
  /// head keeps its order, but not every last bit of it.
  const float* order() const {
    const bool combines = per_sequence() || (shared() && request.kv.group > 1);
    return combines ? workspace.combined : workspace.scores;
  }
  unsigned num_tiles() const {
    return static_cast<unsigned>((request.max_length + kTileTokens - 1) / kTileTokens);
  }
};

/// Bytes of the estimates of so many (query, query head).
[[nodiscard]] std::size_t estimates_bytes(std::int64_t count);

/// Returns an attribute of the current device.
[[nodiscard]] int device_attribute(cudaDeviceAttr attribute);

/// What a plan is for: the eligible tokens, counted in `flags->tokens_scored`, or all tokens that
/// are not always attended, which a sliding window has and a caller may name.
enum class PlanPurpose { kScore, kAdopt };
/// Writes the plans and clears the states and the counts of the selection.
void enqueue_plan(const Stage& stage, PlanPurpose purpose);
/// Writes the scores of the eligible tokens, per query head.
void enqueue_scores(const Stage& stage);
/// Writes the combined scores, per KV head; those of a sequence for each KV head.
void enqueue_combine(const Stage& stage);
/// Adds up how much attention the tokens have, after `enqueue_normalisers`.
void enqueue_weights(const Stage& stage);
/// Finds the least of the fewest best tokens of every set that the recall target wants: instead of
/// `enqueue_top_k` when it has a share.
void enqueue_top_of_recall(const Stage& stage, const RecallParams& recall_params);
/// Finds the least of the k best tokens of every set.
void enqueue_top_k(const Stage& stage);
/// By priority, instead of `enqueue_top_k`: the k + 1 best, of which the last is the cut, or what
/// the threshold lets through. `counted`: as many tokens as `enqueue_top_of_recall` has found.
void enqueue_priorities(const Stage& stage, bool counted);
/// Writes the log-sum-exp of the scores of every query head, with the always-attended tokens where
/// there is a threshold, and for a recall target what weighs a token of the head.
void enqueue_normalisers(const Stage& stage, const RecallParams& recall_params = {});
/// Clears the estimates of all heads.
void clear_estimates(const Stage& stage);
/// Writes `HeadEstimate::log_static`, with value norms as in the scores or without.
void enqueue_static(const Stage& stage, bool with_values);
/// Writes `token_mask` and the counts per segment of what has been found.
void enqueue_marks(const Stage& stage);
/// Writes the shares that the selection misses, after `enqueue_weights`.
void enqueue_missed(const Stage& stage, const MissedBatch& batch);
/// The same after a selection by a stream of keys.
void enqueue_missed_of_stream(const Stage& stage, const MissedBatch& batch);
/// Writes `token_mask` and the counts per segment from the caller's ids.
void enqueue_adopt(const Stage& stage, const IdTensor& ids, const IdFloats& bias);
/// What the biases of a selection are made from.
enum class BiasSource { kNone, kPriorities, kGiven };
/// Writes the selection from `token_mask` and the counts per segment.
void enqueue_compact(const Stage& stage, BiasSource biases);
/// All stages of a selection in two phases.
void enqueue_two_phases(cudaStream_t stream, const SelectRequest& request,
                        const SelectorWorkspace& workspace);

}  // namespace kvtier::scoring::cuda
