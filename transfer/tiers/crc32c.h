#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

/// Returns the CRC-32C (Castagnoli, reflected, as in iSCSI and SSE 4.2) of `bytes`. To go on with
/// more bytes, pass what was returned as `crc`.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes,
                                   std::uint32_t crc = 0) noexcept;

/// Copies `from` to `to`, which holds as many bytes and does not overlap it, and returns the CRC of
/// what it has written, going on from `crc`.
[[nodiscard]] std::uint32_t crc32c_copy(std::span<std::byte> to, std::span<const std::byte> from,
                                        std::uint32_t crc = 0) noexcept;

}  // namespace kvtier
