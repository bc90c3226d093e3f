#pragma once

#include "attention/flash_decode.h"

/// The two implementations behind attention/flash_decode.h.
namespace kvtier::attention {

/// Partial results of one part (0: spans, 1: selected rows). Unnormalised accumulators.
struct PartialView {
  float* out = nullptr;           ///< `[rows][query_heads][kMaxSplits][head_dim]`
  SoftmaxState* state = nullptr;  ///< `[rows][query_heads][kMaxSplits]`
};

/// Both parts, as the merge reads them.
struct PartialParts {
  PartialView parts[2];
  int splits[2] = {0, 0};  ///< Splits of each part in use.
};

namespace cpu {
[[nodiscard]] int num_splits(const AttendRequest& request, std::int64_t tokens);
void spans(const AttendRequest& request, const PartialView& partial, int splits);
void selected(const AttendRequest& request, const transfer::SelectionView& selection,
              const PartialView& partial, int splits);
void merge(const AttendRequest& request, const PartialParts& parts, const OutputBatch& outputs);
void merge_results(const MergeBatch& parts, std::int64_t num_heads_total, int head_dim, void* out,
                   DType out_dtype, float* lse);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
[[nodiscard]] int num_splits(const AttendRequest& request, std::int64_t tokens);
void spans(void* stream, const AttendRequest& request, const PartialView& partial, int splits);
void selected(void* stream, const AttendRequest& request, const transfer::SelectionView& selection,
              const PartialView& partial, int splits);
void merge(void* stream, const AttendRequest& request, const PartialParts& parts,
           const OutputBatch& outputs);
void merge_results(void* stream, const MergeBatch& parts, std::int64_t num_heads_total,
                   int head_dim, void* out, DType out_dtype, float* lse);
}  // namespace cuda

}  // namespace kvtier::attention
