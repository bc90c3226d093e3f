#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

/// Returns the CRC-32C (Castagnoli, reflected, as in iSCSI and SSE 4.2) of `bytes`. To go on with
/// more bytes, pass what was returned as `crc`.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes,
                                   std::uint32_t crc = 0) noexcept;

}  // namespace kvtier
