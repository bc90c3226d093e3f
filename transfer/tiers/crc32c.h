#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

/// Returns the CRC-32C (Castagnoli, reflected, as in iSCSI and SSE 4.2) of `bytes`. To go on with
/// more bytes, pass what was returned as `crc`.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes,
                                   std::uint32_t crc = 0) noexcept;

/// Copies `from` to `to`, which holds as many bytes and does not overlap it, in one pass with the
/// CRC of what it has written, which it returns, going on from `crc`.
[[nodiscard]] std::uint32_t crc32c_copy(std::span<std::byte> to, std::span<const std::byte> from,
                                        std::uint32_t crc = 0) noexcept;

/// Returns the CRC of bytes and the `second_size` bytes after them from the CRC of each.
[[nodiscard]] std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second,
                                        std::size_t second_size) noexcept;

/// One way to compute it. `to` is where the bytes are copied, or null.
struct Crc32cPath {
  const char* name;
  std::uint32_t (*run)(std::uint32_t crc, const std::byte* from, std::size_t size, std::byte* to);
};
/// Returns those that this machine can go, the one that is used first.
[[nodiscard]] std::span<const Crc32cPath> crc32c_paths() noexcept;

}  // namespace kvtier
