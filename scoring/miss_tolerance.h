#pragma once

#include "scoring/recall_params.h"
#include "transfer/device/host_device.h"

#include <cstdint>

namespace kvtier::scoring {

/// How much of the attention a selection may miss, by its number of tokens: a share `missed` from
/// `few` tokens on, and in proportion to them before. Where few tokens have nearly all that is
/// wanted, each of the next ones has more of the rest than one more of many would have. It grows
/// with the tokens, so there is a smallest selection that misses no more.
struct MissTolerance {
  double missed;
  double of_one;     ///< Share that a selection of one token may miss.
  std::int32_t few;  ///< Tokens are counted in 32 bits, as their ids are.

  /// Of a selection of at most `most` of `eligible` tokens: half of these are not few.
  KVTIER_HOST_DEVICE MissTolerance(double share, std::int64_t eligible, std::int64_t most)
      : missed(share),
        of_one(share),
        few(static_cast<std::int32_t>(most < eligible / 2 ? most : eligible / 2)) {
    if (few > 0) of_one /= static_cast<double>(few);
  }

  [[nodiscard]] KVTIER_HOST_DEVICE double of(std::int32_t tokens) const {
    return tokens < few ? of_one * static_cast<double>(tokens) : missed;
  }
};

/// When a selection is enough for a recall target: it has `most` tokens, or both `least` and what
/// leaves out no more than is allowed. Masses are integers, `units` of the attention.
struct MassTarget {
  MissTolerance tolerance;
  std::uint32_t most;
  std::uint32_t least;
  std::uint64_t all;  ///< Of the eligible tokens.

  /// Of a selection of at most `most_tokens` of `eligible`.
  KVTIER_HOST_DEVICE MassTarget(const RecallParams& params, double units, std::int64_t eligible,
                                std::int64_t most_tokens, std::uint64_t all_mass)
      : tolerance(params.missed * units, eligible, most_tokens),
        most(static_cast<std::uint32_t>(most_tokens)),
        least(static_cast<std::uint32_t>(params.least)),
        all(all_mass) {}

  [[nodiscard]] KVTIER_HOST_DEVICE bool reached(std::uint32_t tokens, std::uint64_t mass) const {
    if (tokens >= most) return true;
    const double spare = tolerance.of(static_cast<std::int32_t>(tokens));
    return tokens >= least && mass + static_cast<std::uint64_t>(spare) >= all;
  }
  /// The fewest of `ties` tokens of equal score that are enough with `tokens` better ones, of
  /// `mass`. They count with their mean mass; all of them are enough.
  [[nodiscard]] KVTIER_HOST_DEVICE std::uint32_t fewest(std::uint32_t tokens, std::uint64_t mass,
                                                        std::uint32_t ties,
                                                        std::uint64_t of_ties) const {
    const std::uint64_t mean = of_ties / ties;
    const std::uint64_t each = mean > 0 ? mean : 1;
    std::uint32_t taken = 1;
    for (std::uint32_t last = ties; taken < last;) {
      const std::uint32_t middle = (taken + last) / 2;
      if (reached(tokens + middle, mass + middle * each)) {
        last = middle;
      } else {
        taken = middle + 1;
      }
    }
    return taken;
  }
};

}  // namespace kvtier::scoring
