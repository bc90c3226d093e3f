#pragma once

#include "kvtier/config.h"

#include "transfer/device/host_device.h"

#include <cstdint>

/// How a set of the row cache chooses the row to give up: the one of the least value, of several
/// the first from the set's hand on, which then stands behind it. What a policy knows of a row is
/// one word; a set's `step` counts how often it has been looked at.
namespace kvtier::transfer {

inline constexpr std::uint32_t kMaxCachedRowValue = (1U << 26) - 1;
/// Uses that the clock remembers: a row used so often survives as many passes of the hand.
inline constexpr std::uint32_t kClockUses = 3;
/// Steps after which half of a score is left. Of 4 to 128 the best on recorded decodes of
/// needle-llama (docs/quality.md): in 8192 slots .898 of Belady's hits, .881 with 8.
inline constexpr std::uint32_t kScoreHalfLife = 32;
/// What a choice by one query head adds: 16 heads in every step stay below 2^16.
inline constexpr std::uint32_t kScoreUnit = 64;

/// The score policy's word: how often and by how many query heads the row was chosen, halved every
/// `kScoreHalfLife` steps, and the low 16 bits of the step when that was computed.
KVTIER_HOST_DEVICE inline std::uint32_t cached_row_score(std::uint32_t state, std::uint32_t step) {
  const std::uint32_t age = (step - state) & 0xFFFFU;
  const std::uint32_t halvings = age / kScoreHalfLife;
  if (halvings >= 16) return 0;
  const std::uint32_t score = (state >> 16) >> halvings;
  return score - score * (age % kScoreHalfLife) / (2 * kScoreHalfLife);
}

/// The word of a row that is used: `state` that it had, 0 when it is new. `heads`: query heads that
/// chose it.
KVTIER_HOST_DEVICE inline std::uint32_t cached_row_used(RowCachePolicy policy, std::uint32_t state,
                                                        bool is_new, std::uint32_t step,
                                                        std::uint32_t heads) {
  switch (policy) {
    case RowCachePolicy::kLru:
      return step;
    case RowCachePolicy::kScore: {
      const std::uint32_t score = (is_new ? 0 : cached_row_score(state, step)) + heads * kScoreUnit;
      return ((score < 0xFFFFU ? score : 0xFFFFU) << 16) | (step & 0xFFFFU);
    }
    default:
      return is_new ? 0 : state < kClockUses ? state + 1 : kClockUses;
  }
}

/// What a row is worth, at most `kMaxCachedRowValue`.
KVTIER_HOST_DEVICE inline std::uint32_t cached_row_value(RowCachePolicy policy, std::uint32_t state,
                                                         std::uint32_t step) {
  switch (policy) {
    case RowCachePolicy::kLru: {
      const std::uint32_t age = step - state;
      return age < kMaxCachedRowValue ? kMaxCachedRowValue - age : 0;
    }
    case RowCachePolicy::kScore:
      return cached_row_score(state, step);
    default:
      return state;
  }
}

/// The word of a row that stays when one of value `least` goes. `passed`: it lies between the hand
/// and that one. The clock's hand has gone round `least` times, taking one use of every row that it
/// passed.
KVTIER_HOST_DEVICE inline std::uint32_t cached_row_spared(RowCachePolicy policy,
                                                          std::uint32_t state, std::uint32_t least,
                                                          bool passed) {
  if (policy != RowCachePolicy::kClock) return state;
  const std::uint32_t taken = least + (passed ? 1 : 0);
  return state > taken ? state - taken : 0;
}

}  // namespace kvtier::transfer
