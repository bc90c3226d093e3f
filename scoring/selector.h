#pragma once

#include "attention/flash_decode.h"
#include "hashing/sketch.h"
#include "scoring/estimator.h"
#include "scoring/exchange_lease.h"
#include "scoring/recall_params.h"
#include "scoring/selection_plan.h"
#include "transfer/device/arena.h"
#include "transfer/device/device.h"
#include "transfer/kv/sequence.h"
#include "transfer/kv/slots.h"
#include "transfer/row_cache/row_cache.h"

#include <cstdint>
#include <memory>

namespace kvtier::scoring {

/// Block tables of the sequences of a batch, index for index.
using SketchTables = transfer::Batch<std::byte* const*>;

/// One call of the selector. All pointers are device memory.
struct SelectRequest {
  ScoreParams params;
  transfer::SpanRule rule;
  transfer::KvGeometry kv;
  hashing::SketchGeometry sketch;
  hashing::PlanesView planes;
  transfer::SequenceBatch sequences;
  SketchTables sketches;
  /// Where given, the sketches of every sequence are at its slots, of all of which `sketches` has
  /// the blocks. Of norm-aware with integer weights alone, with neither a threshold, two phases nor
  /// a budget; with `keep_scores`.
  transfer::SlotTables slots{};
  transfer::QueryBatch query_batch;
  const float* queries = nullptr;  ///< fp32 `[queries, query_heads, head_dim]`.
  std::int64_t max_length = 0;     ///< Upper bound of the lengths; sizes grids and strides.
  transfer::StepFlags* flags = nullptr;
  /// False when `export_scores` will not be called: the CUDA backend then need not write scores.
  bool keep_scores = true;
  /// True when `read_queries` has built the tables, with these parameters and planes.
  bool tables_built = false;
  /// The caller's queries, where the plan says `reads_queries`, or nullptr; `packed` then receives
  /// them as fp32, as `read_queries` would. Its tensors must stay valid until the stream has passed
  /// the selection.
  const QueryInput* input = nullptr;
  float* packed = nullptr;
  /// Where attention over the always-attended tokens and the selection goes, where the plan says
  /// `attends`; or nullptr. Rows are counted as `FlashDecode::attend` does.
  const attention::AttendTargets* attend = nullptr;
  /// With `attend`, where the plan's `cached_rows` are enough: rows in pages are in host memory and
  /// read through the row cache, and counted as `gather_cached_rows` does. Or nullptr.
  const transfer::CachedSequences* cached = nullptr;
};

/// An int32 tensor `[queries, heads, n]` of ids; the strides count elements.
struct IdTensor {
  std::int32_t* data = nullptr;
  std::int64_t query_stride = 0;
  std::int64_t head_stride = 0;
  int heads = 0;  ///< query_heads, kv_heads, or 1: the same ids for all heads.
  std::int64_t n = 0;
};

/// An fp32 tensor beside an `IdTensor`, of its shape; the strides count elements. Null: none.
struct IdFloats {
  float* data = nullptr;
  std::int64_t query_stride = 0;
  std::int64_t head_stride = 0;
};

struct SelectorWorkspace;

/// Where the missed attention of one query goes, and the log-sum-exp of what was attended.
struct MissedItem {
  const float* lse = nullptr;  ///< `[query_heads]`
  std::int64_t lse_stride = 0;
  float* missed = nullptr;  ///< `[query_heads]`, or nullptr.
  std::int64_t missed_stride = 0;
};
using MissedBatch = transfer::Batch<MissedItem>;

struct SelectorLimits {
  int num_queries = 1;
  int query_heads = 1;
  int kv_heads = 1;
  std::int64_t max_tokens = 0;  ///< Longest sequence.
  std::int64_t max_selected =
      0;  ///< Most ids per (query, KV head): G * k for per-query-head sets, <= max_tokens.
  std::int64_t staged_rows = 0;  ///< Rows per (query, KV head) of the staging area; 0: none.
  std::int64_t row_bytes = 0;
};

/// Scores every eligible token from its sketch and keeps the k best of each query; owns the
/// workspace.
///
/// Definitions: sections "Score" and "Select" of docs/algorithm.md. Selection is deterministic:
/// ties go to the lower token index, judged on the fp32 score as stored. Used by one step at a
/// time.
class Selector {
 public:
  /// Throws `kResourceExhausted` when the workspace does not fit.
  Selector(transfer::Device& device, const SelectorLimits& limits);

  /// Bytes that `Selector` allocates for these limits.
  [[nodiscard]] static std::size_t workspace_bytes(Backend backend, const SelectorLimits& limits);

  /// How `select` will serve such a request, of which the memory may still be missing; `recall`:
  /// with active recall parameters. The plan of the last shape is kept: asking again costs nothing.
  const SelectionPlan& plan(const SelectRequest& request, bool recall = false);

  /// Limits of the CUDA device; of the CPU all are 0.
  [[nodiscard]] const DeviceLimits& device() const { return device_; }

  /// Converts the caller's queries to fp32 `queries` and builds their tables for the next `select`.
  void read_queries(transfer::Stream& stream, const ScoreParams& params,
                    const hashing::PlanesView& planes, const QueryInput& input, float* queries);

  /// Enqueues scoring and selection, of as many tokens as active recall parameters say. The result
  /// is valid until the next call.
  transfer::SelectionView select(transfer::Stream& stream, const SelectRequest& request,
                                 const RecallParams& recall_params = {});
  /// Writes the estimated share of the attention that the last selection missed, after `select`
  /// with a recall target.
  void export_missed(transfer::Stream& stream, const SelectRequest& request,
                     const MissedBatch& batch);
  /// Device memory for the log-sum-exp of a query, `[query_heads]`, when a caller wants none.
  [[nodiscard]] float* lse(int query_index) const {
    return at_.lse + std::int64_t{query_index} * limits_.query_heads;
  }

  /// Makes a selection of the caller's ids: those in [0, visible) that are not in an
  /// always-attended span, duplicates once; others are ignored. `bias` (or none) is added to their
  /// logits; of an id given twice the larger counts.
  transfer::SelectionView adopt(transfer::Stream& stream, const SelectRequest& request,
                                const IdTensor& ids, const IdFloats& bias = {});

  /// Writes the ids of the last selection per head, ascending, padded with -1 (the lowest `n` ids
  /// when there are more), and to `bias` (or not) what is added to their logits, 0 where padded;
  /// its heads are then those of the sets.
  void export_ids(transfer::Stream& stream, const SelectRequest& request, const IdTensor& out,
                  const IdFloats& bias = {});

  /// Writes the scores of the ids that `export_ids` wrote to `ids`, -infinity where padded. Only
  /// after `select`.
  void export_scores(transfer::Stream& stream, const SelectRequest& request, const IdTensor& ids,
                     const IdFloats& out);

 private:
  /// The arrays in `memory_`, in the order in which they lie; selector_kernels.h gives the shapes.
  struct Arrays {
    float* entries = nullptr;         // [queries][query_heads][kMaxEntriesPerHead]
    QueryScalars* scalars = nullptr;  // [queries][query_heads]
    float* scores = nullptr;
    float* combined = nullptr;
    std::uint16_t* token_mask = nullptr;
    std::byte* scratch = nullptr;
    float* rest_logs = nullptr;         // [queries][query_heads]
    float* lse = nullptr;               // [queries][query_heads]
    float* bias = nullptr;              // [queries][kv_heads][max_selected][group]
    transfer::SelectionView selection;  // its arrays, but the staging area, are before the biases
  };
  [[nodiscard]] static Arrays place(transfer::Arena& arena, const SelectorLimits& limits,
                                    std::size_t scratch_bytes);
  [[nodiscard]] SelectorWorkspace workspace(const ScoreParams& params) const;
  /// Biases are per KV head or per query head.
  [[nodiscard]] transfer::SelectionView biased_selection(bool per_query_head) const;

  SelectorLimits limits_;
  ExchangeLease exchange_;
  std::unique_ptr<transfer::Stream> aside_;  ///< Where every second part of a batch runs; of CUDA.
  DeviceLimits device_;
  SelectShape planned_;  // what `plan_` is the plan of
  SelectionPlan plan_;
  transfer::Buffer memory_;
  Arrays at_;
};

}  // namespace kvtier::scoring
