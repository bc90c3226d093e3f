#pragma once

#include "transfer/row_cache/row_cache_set.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Sets of the row cache during a step, on a GPU.
namespace kvtier::transfer::cuda {

/// The way of a token in a set, or -1. A thread's.
__device__ inline int way_of(const RowCacheSet& set, std::int32_t token) {
  constexpr int kPieces = kSetWays / 4;
  static_assert(sizeof(RowCacheSet) % sizeof(int4) == 0 && offsetof(RowCacheSet, tokens) == 0);
  int4 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) pieces[i] = reinterpret_cast<const int4*>(set.tokens)[i];
  int way = -1;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (pieces[i].x == token) way = 4 * i;
    if (pieces[i].y == token) way = 4 * i + 1;
    if (pieces[i].z == token) way = 4 * i + 2;
    if (pieces[i].w == token) way = 4 * i + 3;
  }
  return way;
}

/// Of a step that uses no row of a set. A thread's.
__device__ inline void count_step(RowCacheSet& set) {
  ++set.steps;
  set.last_used = 0;
}

/// Asks L1 for a set. A warp's.
__device__ inline void prefetch(const RowCacheSet& set) {
  constexpr unsigned kLine = 128;
  const unsigned at = threadIdx.x % 32 * kLine;
  if (at < sizeof(RowCacheSet)) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(
        __cvta_generic_to_global(reinterpret_cast<const std::byte*>(&set) + at)));
  }
}

/// One set: `OpenSet`, by a warp whose lanes have a way each. Every function is called by all
/// lanes, with the same arguments.
class WarpSet {
 public:
  static constexpr unsigned kAllLanes = 0xFFFFFFFFU;
  static_assert(kSetWays == 32, "a way per lane");

  /// Without a set every token is missing and none is admitted.
  __device__ WarpSet(RowCacheSet* set, RowCachePolicy policy, bool prefetched)
      : set_(set), policy_(policy), prefetching_(prefetched), lane_(threadIdx.x % 32) {
    if (set == nullptr) return;
    token_ = set->tokens[lane_];
    state_ = set->states[lane_];
    hand_ = set->hand;
    steps_ = set->steps + (prefetched ? 0 : 1);
    last_used_ = has(set->last_used);
    prefetched_ = has(set->prefetched);
  }

  /// The way of a token, or -1.
  __device__ int find(std::int32_t token, std::uint32_t heads) {
    const unsigned found = __ballot_sync(kAllLanes, token_ == token);
    use(found, heads);
    return __ffs(static_cast<int>(found)) - 1;
  }
  /// The rows in these ways were found.
  __device__ void use(std::uint32_t ways, std::uint32_t heads) {
    if (!has(ways)) return;
    used_ = true;
    heads_ = max(heads_, heads);
  }

  /// Of a step. Returns how many of the rows found were prefetched, and are used for the first
  /// time.
  __device__ int count_uses() {
    if (used_) state_ = cached_row_used(policy_, state_, false, steps_, heads_);
    const int useful = __popc(__ballot_sync(kAllLanes, used_ && prefetched_));
    if (used_) prefetched_ = false;
    last_used_ = used_;
    return useful;
  }

  [[nodiscard]] __device__ bool holds(std::int32_t token) const {
    return __any_sync(kAllLanes, token_ == token) != 0;
  }

  /// The way that a missing token gets, or -1 when there is none for it. `evicts`: it was
  /// another's.
  __device__ int admit(std::int32_t token, std::uint32_t heads, bool& evicts) {
    constexpr unsigned kNone = 0xFFFFFFFFU;
    const std::uint32_t distance = (lane_ - hand_) % kSetWays;
    const std::uint32_t value = token_ < 0 ? 0 : cached_row_value(policy_, state_, steps_) + 1;
    const bool stays = used_ || (prefetching_ && token_ >= 0 && last_used_);
    const std::uint32_t rank = stays ? kNone : value * kSetWays + distance;
    const std::uint32_t best_rank = __reduce_min_sync(kAllLanes, rank);
    if (best_rank == kNone) return -1;
    const auto way = static_cast<unsigned>((best_rank + hand_) % kSetWays);
    evicts = best_rank >= kSetWays;
    if (evicts && !prefetching_) {
      if (!used_ && lane_ != way) {
        state_ = cached_row_spared(policy_, state_, best_rank / kSetWays - 1,
                                   distance < best_rank % kSetWays);
      }
      hand_ = (way + 1) % kSetWays;
    }
    if (lane_ == way) {
      wasted_ = evicts && prefetched_;
      token_ = token;
      state_ = cached_row_used(policy_, 0, true, steps_, heads);
      used_ = true;
      last_used_ = !prefetching_;
      prefetched_ = prefetching_;
    }
    return static_cast<int>(way);
  }
  /// Prefetched rows, unused, in whose ways others are now.
  [[nodiscard]] __device__ int num_wasted() const {
    return __popc(__ballot_sync(kAllLanes, wasted_));
  }

  /// Stores what has changed.
  __device__ void close() const {
    if (set_ == nullptr) return;
    set_->tokens[lane_] = token_;
    set_->states[lane_] = state_;
    const unsigned last_used = __ballot_sync(kAllLanes, last_used_);
    const unsigned prefetched = __ballot_sync(kAllLanes, prefetched_);
    if (lane_ != 0) return;
    set_->hand = hand_;
    set_->steps = steps_;
    set_->last_used = last_used;
    set_->prefetched = prefetched;
  }

 private:
  [[nodiscard]] __device__ bool has(std::uint32_t ways) const { return (ways >> lane_ & 1U) != 0; }

  RowCacheSet* set_;
  RowCachePolicy policy_;
  bool prefetching_;
  unsigned lane_;
  std::int32_t token_ = -1;
  std::uint32_t state_ = 0;
  std::uint32_t heads_ = 0;
  bool used_ = false;
  bool last_used_ = false;
  bool prefetched_ = false;
  bool wasted_ = false;
  std::uint32_t hand_ = 0;
  std::uint32_t steps_ = 0;
};

}  // namespace kvtier::transfer::cuda
