#pragma once

#include "transfer/device/host_device.h"

#include <cstdint>

/// The words that a row's check is the sum of (transfer/kv/row_checks.h).
namespace kvtier::transfer {

KVTIER_HOST_DEVICE inline std::uint32_t mix_word(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  return x ^ (x >> 16);
}

/// What word `index` of a row adds.
KVTIER_HOST_DEVICE inline std::uint32_t check_of_word(std::uint32_t word, std::uint32_t index) {
  return mix_word(word ^ ((index + 1) * 0x9E3779B9U));
}

/// What a row's place adds.
KVTIER_HOST_DEVICE inline std::uint32_t check_of_place(std::int64_t token, int kv_head) {
  return mix_word(static_cast<std::uint32_t>(token) * 0x9E3779B1U +
                  static_cast<std::uint32_t>(kv_head));
}

}  // namespace kvtier::transfer
