#pragma once

#include "transfer/row_cache/row_cache.h"

#include <cuda_runtime.h>

#include <cstdint>

/// How attention, which runs beside a gather, learns from its blocks where rows are, for `*_cuda.*`
/// files only.
namespace kvtier::transfer::cuda {

/// Places that a lane orders together.
inline constexpr int kOrderedTogether = 16;

/// Nothing is known of the lists of one (sequence, KV head). By the threads of one block of them,
/// before it lets attention start.
__device__ inline void forget_places(const KvGeometry& geometry, const RowCacheGather& gather,
                                     int head, int sequence) {
  for (int r = static_cast<int>(threadIdx.x); r < gather.query_batch.count;
       r += static_cast<int>(blockDim.x)) {
    if (gather.query_batch[r].sequence != sequence) continue;
    gather.places.lists[r * geometry.kv_heads + head].known = 0;
    __threadfence();  // it is seen by kernels that start after this one allows it
  }
  __syncthreads();  // all lists are forgotten
}

/// Orders the `count` places of a list, and returns how many were found. By a warp.
__device__ inline int order_places(const FoundRow* unordered, RowPlace* places, int count) {
  const auto* const from = reinterpret_cast<const int2*>(unordered);
  auto* const to = reinterpret_cast<int4*>(places);
  const int lane = static_cast<int>(threadIdx.x % 32);
  int found = 0;
  for (int first = lane; first < count + lane; first += 32 * kOrderedTogether) {
    int2 rows[kOrderedTogether];
#pragma unroll
    for (int j = 0; j < kOrderedTogether; ++j) {
      const int i = first + 32 * j;
      rows[j] = i < count ? __ldcg(from + i) : int2{-1, 0};
    }
#pragma unroll
    for (int j = 0; j < kOrderedTogether; ++j) {
      const int i = first + 32 * j;
      const unsigned hits = __ballot_sync(0xFFFFFFFFU, rows[j].x >= 0);
      const int before = found + __popc(hits & ((1U << lane) - 1));
      found += __popc(hits);
      if (i >= count) continue;
      if (rows[j].x >= 0) {
        to[before] = {rows[j].x, rows[j].y, i, 0};
      } else {
        to[count - 1 - (i - before)] = {-1 - i, rows[j].y, i, 0};
      }
    }
  }
  return found;
}

/// The last block of a (sequence, KV head) to call it, when all have looked for their rows, makes
/// the places known. By a warp of each.
__device__ inline void publish_places(const KvGeometry& geometry, const RowCacheGather& gather,
                                      int head, int sequence) {
  const RowCachePlaces& places = gather.places;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int last = 0;
  if (lane == 0) {
    __threadfence();  // what this block has found is seen by the block that sees its ticket
    std::uint32_t* const ticket = places.tickets + sequence * geometry.kv_heads + head;
    last = atomicAdd(ticket, 1U) + 1 == gridDim.x ? 1 : 0;
    if (last != 0) *ticket = 0;
    __threadfence();
  }
  if (__shfl_sync(0xFFFFFFFFU, last, 0) == 0) return;
  const SelectionView& selection = gather.selection;
  const RowCache& row_cache = gather.row_cache[sequence];
  for (int r = 0; r < gather.query_batch.count; ++r) {
    if (gather.query_batch[r].sequence != sequence) continue;
    const std::int64_t number = std::int64_t{r} * geometry.kv_heads + head;
    const std::int64_t first = number * selection.staged_capacity;
    const auto count =
        static_cast<int>(min(std::int64_t{selection.counts[number]}, selection.staged_capacity));
    const int found = order_places(places.unordered + first, places.places + first, count);
    __threadfence();  // the places are seen by the block that sees that they are known
    __syncwarp();
    if (lane != 0) continue;
    PlacedList& list = places.lists[number];
    const std::int64_t slots = std::int64_t{head} * gather.shape.num_sets * kSetWays;
    list.slots =
        row_cache.sets == nullptr ? nullptr : row_cache.slots + slots * geometry.row_bytes();
    list.num_found = found;
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(&list.known), "r"(1U) : "memory");
  }
}

/// Returns when the places of `count` lists are known to all threads of the block, which call it. A
/// kernel that starts before the gather has ended may call it once all blocks of that have allowed
/// its start.
__device__ inline void wait_for_places(const PlacedList* lists, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    for (;;) {
      std::uint32_t known = 0;
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(known)
                   : "l"(&lists[i].known)
                   : "memory");
      if (known != 0) break;
      __nanosleep(50);
    }
  }
  __syncthreads();  // what one thread has seen, all see
}

}  // namespace kvtier::transfer::cuda
