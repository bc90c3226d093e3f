#pragma once

#include "transfer/device/host_device.h"

#include <cstdint>

namespace kvtier::transfer {

/// Where the tokens of sequences are in a paged cache of the caller: token t of sequence s has the
/// slot `blocks[s][t / block_tokens] * block_tokens + t % block_tokens`.
struct SlotTables {
  const std::int32_t* blocks = nullptr;  ///< `[sequences][stride]`, device; nullptr: no tables.
  std::int64_t stride = 0;
  int block_tokens = 0;  ///< A multiple of 16 that divides a sketch block.

  [[nodiscard]] KVTIER_HOST_DEVICE const std::int32_t* of(std::int64_t sequence) const {
    return blocks == nullptr ? nullptr : blocks + sequence * stride;
  }
};

/// Returns the slot of a token by the block table of its sequence.
KVTIER_HOST_DEVICE inline std::int64_t slot_of(const std::int32_t* table, int block_tokens,
                                               std::int64_t token) {
  return std::int64_t{table[token / block_tokens]} * block_tokens + token % block_tokens;
}

}  // namespace kvtier::transfer
