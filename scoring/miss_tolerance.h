#pragma once

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

}  // namespace kvtier::scoring
