#pragma once

#include "attention/softmax_state.h"
#include "transfer/device/batch.h"
#include "transfer/device/device.h"
#include "transfer/kv/rows.h"
#include "transfer/kv/sequence.h"
#include "transfer/row_cache/row_cache_places.h"

#include <cstdint>
#include <span>

namespace kvtier::attention {

/// Where the results of one query go.
struct OutputItem {
  void* out = nullptr;  ///< `[query_heads, head_dim]`, last stride 1.
  DType dtype = DType::kFloat32;
  std::int64_t head_stride = 0;  ///< In elements.
  float* lse = nullptr;          ///< `[query_heads]`, or nullptr.
  std::int64_t lse_stride = 0;
};
using OutputBatch = transfer::Batch<OutputItem>;

/// What attention needs beside rows and queries where the kernel that selects attends too
/// (scoring/selection_plan.h).
struct AttendTargets {
  float softmax_scale = 0.0F;
  float logit_softcap = 0.0F;
  OutputBatch outputs;
};

/// One attention call. All pointers are device memory.
struct AttendRequest {
  transfer::KvGeometry kv;
  transfer::SpanRule rule;
  transfer::SequenceBatch sequences;
  transfer::QueryBatch query_batch;
  const float* queries = nullptr;  ///< fp32 `[queries, query_heads, head_dim]`.
  /// On CUDA, in place of `queries`: where the caller has them. Those with NaN or infinity are
  /// counted. Read before the launch returns.
  const transfer::QueryItems* items = nullptr;
  /// Not 0: the kernel before this one is an append of at most so many tokens of a sequence, which
  /// lets this one start after its own wait, and all rows of a dense layer before these tokens are
  /// in device memory. They are then read while the append runs.
  int appending_tokens = 0;
  float softmax_scale = 0.0F;
  float logit_softcap = 0.0F;
  std::int64_t max_length = 0;  ///< Upper bound of the lengths.
  transfer::StepFlags* flags = nullptr;
  bool pages_on_device = false;  ///< On which link rows read in place are counted.
  /// Whether every count of the selection is `num_to_select` of its query, and the kernel before
  /// this one lets it start only after its own wait (transfer/device/launch_cuda.cuh): which rows
  /// there are is then found out before the selection is there.
  bool k_known = false;
  int top_k = 0;  ///< Of `num_to_select`.
  double sparsity = 0.0;
  /// Where the staged entries are, when the kernel before this one is the gather that says it
  /// (transfer/row_cache/row_cache.h): rows that it has found are attended while the others come.
  transfer::RowCachePlaces places;
};

/// Brings rows into memory that are not there all at once. CPU backend only.
class RowSource {
 public:
  RowSource() = default;
  RowSource(const RowSource&) = delete;  // a view of what holds the rows
  RowSource& operator=(const RowSource&) = delete;
  virtual ~RowSource() = default;

  /// Makes the rows of these tokens, of all KV heads, be where `row_address` says until the next
  /// call. Returns false, and nothing is said, when these are too many; one token never is. Throws
  /// when the rows cannot be had.
  virtual bool hold(int sequence, std::span<const std::int64_t> tokens) = 0;
};

struct FlashDecodeLimits {
  int num_queries = 1;
  int query_heads = 1;
  int head_dim = 128;
};

/// Exact softmax attention over sets of rows, split over many workers (flash-decode): partial
/// results over parts of the rows, merged in a fixed order, so that results repeat bit for bit.
///
/// Owns the workspace of partial results. Used by one step at a time.
class FlashDecode {
 public:
  /// Throws `kResourceExhausted`.
  FlashDecode(transfer::Device& device, const FlashDecodeLimits& limits);
  [[nodiscard]] static std::size_t workspace_bytes(Backend backend,
                                                   const FlashDecodeLimits& limits);

  /// Enqueues attention over the always-attended tokens, [0, sink_end) and [tail_begin, visible),
  /// and the selected rows, and writes `outputs`: staged rows are read from the staging area, all
  /// others in place. `selection.ids` is nullptr when there is no selection; `max_selected` bounds
  /// its counts. On CUDA one launch, which shares the rows out by the counts on the device.
  ///
  /// Counts the rows read in place by where they are, and the selected ones when there is no
  /// staging area (otherwise `gather_rows` has counted them).
  void attend(transfer::Stream& stream, const AttendRequest& request,
              const transfer::SelectionView& selection, std::int64_t max_selected,
              const OutputBatch& outputs);

  /// The same, bit for bit, on the calling thread while the stream is idle, for rows that `source`
  /// brings a part at a time. Nothing is staged. CPU backend only.
  void attend_in_parts(const AttendRequest& request, const transfer::SelectionView& selection,
                       std::int64_t max_selected, const OutputBatch& outputs, RowSource& source);

 private:
  FlashDecodeLimits limits_;
  transfer::Buffer memory_;
};

/// A merged set of partial results, `[tokens, query_heads, head_dim]` fp32 with `[tokens,
/// query_heads]` lse, contiguous, normalised outputs. Merges by log-sum-exp in the order given.
struct MergeInput {
  const float* out = nullptr;
  const float* lse = nullptr;
};
using MergeBatch = transfer::Batch<MergeInput, 16>;
void merge_results(transfer::Stream& stream, const MergeBatch& parts, std::int64_t num_heads_total,
                   int head_dim, void* out, DType out_dtype, float* lse);

}  // namespace kvtier::attention
