#pragma once

#include "scoring/fused/attention_cuda.cuh"
#include "scoring/fused/tables_cuda.cuh"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

/// Host functions for launches of the kernels that select on chip.
namespace kvtier::scoring::cuda {

/// Shared memory of a block that leaves room for one of the kernels before, an append of scalar
/// codes with 48 KiB too, so that sketches are read while those run.
inline constexpr int kRoomyBytes = 177 * 1024;
inline constexpr int kMostBytes = 216 * 1024;

template <typename Kernel>
void allow_shape(Kernel kernel, int bytes = kMostBytes) {
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared));
}

/// Blocks of the kernel that the device runs at a time. Asked once: every step needs it.
template <typename Kernel>
int blocks_at_once(Kernel kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, std::uintptr_t, int>, int> known;
  int device = 0;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  const std::tuple key(device, reinterpret_cast<std::uintptr_t>(kernel), bytes);
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  allow_shape(kernel);
  int blocks = 0;
  KVTIER_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kFusedThreads,
                                                                  static_cast<std::size_t>(bytes)));
  blocks *= device_attribute(cudaDevAttrMultiProcessorCount);
  known.emplace(key, blocks);
  return blocks;
}

inline int tokens_of_block(std::int64_t tokens, unsigned blocks) {
  const std::int64_t units = (tokens + kFusedUnit - 1) / kFusedUnit;
  const std::int64_t each = (units + blocks - 1) / blocks * kFusedUnit;
  return static_cast<int>(std::min<std::int64_t>(each, kMostBytes));
}

/// The queries of a request, as fp32 where nobody has given others.
inline FusedInput fused_input(const SelectRequest& request) {
  if (request.input != nullptr) {
    return {.items = request.input->items,
            .queries = request.packed,
            .after_append = request.input->after_append};
  }
  FusedInput input{.items = {}, .queries = nullptr, .after_append = false};
  const std::int64_t dim = request.planes.head_dim;
  for (int row = 0; row < request.rows.count; ++row) {
    input.items.push({.query = {.data = request.queries,
                                .dtype = DType::kFloat32,
                                .token_stride = request.kv.query_heads * dim,
                                .head_stride = dim},
                      .token = row});
  }
  return input;
}

/// What a kernel is told about attention that is to have `bytes` of dynamic shared memory, which
/// grow if that needs more.
inline FusedAttention fused_attention(const SelectRequest& request, int& bytes) {
  FusedAttention attention{};
  if (request.attend == nullptr) return attention;
  bytes = std::max(bytes, fused_attention_bytes(kFusedWarps));
  attention.targets = *request.attend;
  attention.tiles =
      std::min((bytes - fused_attention_bytes(0)) / AttendTile::kBytes, 2 * kFusedWarps);
  return attention;
}

}  // namespace kvtier::scoring::cuda
