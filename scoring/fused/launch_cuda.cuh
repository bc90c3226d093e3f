#pragma once

#include "hashing/append.h"
#include "scoring/fused/attention_cuda.cuh"
#include "scoring/fused/tables_cuda.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/kv/convert_cuda.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// Host functions for launches of the kernels that select on chip.
namespace kvtier::scoring::cuda {

/// Most bytes of dynamic shared memory of a block, beside the static arrays of these kernels.
inline int most_bytes(int block_bytes) { return block_bytes - 11 * 1024; }
static_assert(sizeof(FusedShared) + sizeof(FusedQueries) <= 10 * 1024);
/// The same, with room for a block of one of the kernels before, 48 KiB at most, as an append of
/// few tokens has, and 1 KiB of the system, so that sketches are read while those run.
inline int roomy_bytes(int block_bytes) { return most_bytes(block_bytes) - 49 * 1024; }

/// Lets the kernel have as much shared memory as there is: its launches, which may be of several
/// threads, want different amounts.
template <typename Kernel>
void allow_shape(Kernel kernel) {
  cudaFuncAttributes of_kernel{};
  KVTIER_CUDA_CHECK(cudaFuncGetAttributes(&of_kernel, kernel));
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) -
                                             static_cast<int>(of_kernel.sharedSizeBytes)));
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared));
}

/// Tokens of a block, in whole units; at most more than any block has room for.
inline int tokens_of_block(std::int64_t tokens, unsigned blocks) {
  constexpr std::int64_t kTooMany = std::int64_t{1} << 20;
  const std::int64_t units = (tokens + kFusedUnit - 1) / kFusedUnit;
  return static_cast<int>(std::min((units + blocks - 1) / blocks * kFusedUnit, kTooMany));
}

/// The launch of a plan. Sketches may be read before the wait where the plan's rule allows it and
/// the kernel before is an append: after another one everything waits for all before.
inline FusedShape fused_shape(const FilterArgs& args, const FusedInput& input,
                              const SelectionPlan& plan) {
  const bool early = args.request.rule.recent_tokens >= hashing::kMostOverlappedTokens;
  return {.blocks = plan.blocks,
          .capacity = plan.capacity,
          .stages = plan.stages,
          .early = early && input.after_append};
}

/// The queries of a request, as fp32 where none are given as the caller has them.
inline FusedInput fused_input(const SelectRequest& request) {
  if (request.input != nullptr) {
    return {.items = request.input->items,
            .queries = request.packed,
            .after_append = request.input->after_append};
  }
  return {.items = transfer::cuda::packed_items(request.queries, request.query_batch.count,
                                                request.kv.query_heads(), request.planes.head_dim),
          .queries = nullptr,
          .after_append = false};
}

/// Rows that a block which attends through the row cache can list.
inline int most_listed(int block_bytes, int group) {
  const int room =
      rows_listed_in(most_bytes(block_bytes) - fused_attention_bytes(kFusedWarps, group));
  return std::min(room, static_cast<int>(kMostCachedRows));
}

/// What a kernel needs for attention that is to have `bytes` of dynamic shared memory, which
/// grow if that needs more.
inline FusedAttention fused_attention(const FilterArgs& args, int& bytes) {
  const SelectRequest& request = args.request;
  FusedAttention attention{};
  if (request.attend == nullptr) return attention;
  const int group = request.kv.group;
  // Always the same in an engine: what an earlier launch has posted for another (query, KV head)
  // may have the tag that this one expects.
  attention.id_stride = request.cached != nullptr
                            ? std::min(args.selection.capacity, kMostCachedRows)
                            : args.selection.capacity;
  if (request.cached != nullptr) {
    // A block may have all tokens: they are dealt out by their sets.
    attention.cache = {
        .sequences = *request.cached,
        .listed = static_cast<int>(max_per_query(request.params, request.max_length))};
  }
  const int list_bytes = cached_rows_bytes(attention.cache.listed);
  bytes = std::max(bytes, fused_attention_bytes(kFusedWarps, group) + list_bytes);
  attention.targets = *request.attend;
  attention.tiles = std::min(
      (bytes - list_bytes - fused_attention_bytes(0, group)) / AttendTile::kBytes, 2 * kFusedWarps);
  return attention;
}

}  // namespace kvtier::scoring::cuda
