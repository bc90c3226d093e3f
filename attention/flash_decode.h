#pragma once

#include "attention/softmax_state.h"
#include "transfer/batch.h"
#include "transfer/device.h"
#include "transfer/rows.h"
#include "transfer/sequence.h"

#include <cstdint>
#include <span>

namespace kvtier::attention {

/// Where the results of one query row go.
struct OutputItem {
  void* out = nullptr;  ///< `[query_heads, head_dim]`, last stride 1.
  DType dtype = DType::kFloat32;
  std::int64_t head_stride = 0;  ///< In elements.
  float* lse = nullptr;          ///< `[query_heads]`, or nullptr.
  std::int64_t lse_stride = 0;
};
using OutputBatch = transfer::Batch<OutputItem>;

/// What all parts of one attention call share. All pointers are device memory.
struct AttendRequest {
  transfer::KvGeometry kv;
  transfer::SpanRule rule;
  transfer::SequenceBatch sequences;
  transfer::QueryBatch rows;
  const float* queries = nullptr;  ///< fp32 `[rows, query_heads, head_dim]`.
  float softmax_scale = 0.0F;
  float logit_softcap = 0.0F;
  std::int64_t max_length = 0;  ///< Upper bound of the lengths; decides the number of splits.
  transfer::StepFlags* flags = nullptr;
  bool pages_on_device = false;  ///< On which link rows read in place are counted.
};

struct FlashDecodeLimits {
  int rows = 1;
  int query_heads = 1;
  int head_dim = 128;
};

/// Exact softmax attention over sets of rows, split over many workers (flash-decode): partial
/// results over the always-attended spans and over the selected rows, then one merge.
///
/// Owns the workspace of partial results. Used by one step at a time; `spans` and `selected` write
/// disjoint parts and may run on two streams.
class FlashDecode {
 public:
  /// Throws `kResourceExhausted`.
  FlashDecode(transfer::Device& device, const FlashDecodeLimits& limits);
  [[nodiscard]] static std::size_t workspace_bytes(const FlashDecodeLimits& limits);

  /// Enqueues partial attention over [0, sink_end) and [tail_begin, visible).
  void spans(transfer::Stream& stream, const AttendRequest& request);

  /// Enqueues partial attention over the selected rows: staged ones from the staging area, the
  /// others in place. `max_selected` bounds the counts; it decides the number of splits.
  void selected(transfer::Stream& stream, const AttendRequest& request,
                const transfer::SelectionView& selection, std::int64_t max_selected);

  /// Enqueues the merge of what was enqueued since the last merge; join the streams first.
  void merge(transfer::Stream& stream, const AttendRequest& request, const OutputBatch& outputs);

  /// Splits of one part; partial results are `[parts][rows][query_heads][kMaxSplits]`.
  static constexpr int kMaxSplits = 32;

 private:
  FlashDecodeLimits limits_;
  transfer::Buffer memory_;
  float* partial_out_ = nullptr;           // [2][rows][query_heads][kMaxSplits][head_dim]
  SoftmaxState* partial_state_ = nullptr;  // [2][rows][query_heads][kMaxSplits]
  int splits_[2] = {0, 0};
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
