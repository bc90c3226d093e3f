#pragma once

#include "attention/flash_decode.h"

#include <cstddef>

/// The two implementations behind attention/flash_decode.h. `memory` has `workspace_bytes`, zero
/// before the first call.
namespace kvtier::attention {

namespace cpu {
[[nodiscard]] std::size_t workspace_bytes(const FlashDecodeLimits& limits);
/// `max_tokens` bounds the always-attended tokens of a query, `max_selected` the selected ones.
/// `source` brings the rows in; nullptr: all are there.
void attend(const AttendRequest& request, const transfer::SelectionView& selection,
            const FlashDecodeLimits& limits, std::byte* memory, std::int64_t max_tokens,
            std::int64_t max_selected, const OutputBatch& outputs, RowSource* source);
void merge_results(const MergeBatch& parts, std::int64_t num_heads_total, int head_dim, void* out,
                   DType out_dtype, float* lse);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
[[nodiscard]] std::size_t workspace_bytes(const FlashDecodeLimits& limits);
void attend(void* stream, const AttendRequest& request, const transfer::SelectionView& selection,
            const FlashDecodeLimits& limits, std::byte* memory, const OutputBatch& outputs);
void merge_results(void* stream, const MergeBatch& parts, std::int64_t num_heads_total,
                   int head_dim, void* out, DType out_dtype, float* lse);
}  // namespace cuda

}  // namespace kvtier::attention
