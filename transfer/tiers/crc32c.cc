#include "transfer/tiers/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvtier {
namespace {

// A CRC is a polynomial over GF(2) modulo this one; bit 31 is the coefficient of x^0.
constexpr std::uint32_t kPolynomial = 0x82F63B78;

constexpr std::uint32_t times_x(std::uint32_t a) {
  return (a & 1U) != 0 ? a >> 1U ^ kPolynomial : a >> 1U;
}

constexpr std::array<std::uint32_t, 256> make_byte_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    table[i] = value;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kByteTable = make_byte_table();

std::uint32_t update_by_bytes(std::uint32_t state, const std::byte* data, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) {
    state = state >> 8U ^ kByteTable[(state ^ std::to_integer<std::uint32_t>(data[i])) & 255U];
  }
  return state;
}

#if defined(__x86_64__)

// The instruction takes one operand a cycle and answers after three: three lanes keep it busy. A
// lane's state is moved over the bytes of another by multiplying it with x^(8 * bytes).
constexpr std::size_t kLaneBytes = 1024;

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 1U << 31U; bit != 0; bit >>= 1U) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

using ShiftTable = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ShiftTable make_shift_table() {
  std::uint32_t power = 1U << 31U;
  for (std::size_t bit = 0; bit < 8 * kLaneBytes; ++bit) power = times_x(power);
  ShiftTable table{};
  for (std::uint32_t byte = 0; byte < 4; ++byte) {
    for (std::uint32_t value = 0; value < 256; ++value) {
      table[byte][value] = multiply(value << 8U * byte, power);
    }
  }
  return table;
}

constexpr ShiftTable kShift = make_shift_table();

std::uint32_t over_a_lane(std::uint32_t state) {
  return kShift[0][state & 255U] ^ kShift[1][state >> 8U & 255U] ^ kShift[2][state >> 16U & 255U] ^
         kShift[3][state >> 24U];
}

std::uint64_t load(const std::byte* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) std::uint32_t update_by_lanes(std::uint32_t state,
                                                                const std::byte* data,
                                                                std::size_t size) {
  while (size >= 3 * kLaneBytes) {
    std::uint64_t first = state;
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      first = _mm_crc32_u64(first, load(data + i));
      second = _mm_crc32_u64(second, load(data + kLaneBytes + i));
      third = _mm_crc32_u64(third, load(data + 2 * kLaneBytes + i));
    }
    state = over_a_lane(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    state = over_a_lane(state) ^ static_cast<std::uint32_t>(third);
    data += 3 * kLaneBytes;
    size -= 3 * kLaneBytes;
  }
  std::uint64_t wide = state;
  for (; size >= 8; data += 8, size -= 8) wide = _mm_crc32_u64(wide, load(data));
  return update_by_bytes(static_cast<std::uint32_t>(wide), data, size);
}

#endif

}  // namespace

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return ~update_by_lanes(~crc, bytes.data(), bytes.size());
#endif
  return ~update_by_bytes(~crc, bytes.data(), bytes.size());
}

}  // namespace kvtier
