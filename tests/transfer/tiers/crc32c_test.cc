#include "transfer/tiers/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

namespace kvtier {
namespace {

using PageBytes = std::vector<std::byte>;

PageBytes random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  PageBytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// Division by the polynomial, bit by bit.
std::uint32_t slow_crc32c(std::span<const std::byte> bytes) {
  std::uint32_t state = 0xFFFFFFFF;
  for (const std::byte byte : bytes) {
    state ^= std::to_integer<std::uint32_t>(byte);
    for (int i = 0; i < 8; ++i) state = state >> 1U ^ (0x82F63B78U & (0U - (state & 1U)));
  }
  return ~state;
}

TEST(Crc32c, IsThatOfTheStandard) {
  EXPECT_EQ(crc32c({}), 0U);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283U);
  EXPECT_EQ(crc32c(PageBytes(32)), 0x8A9136AAU);                   // RFC 3720, B.4
  EXPECT_EQ(crc32c(PageBytes(32, std::byte{0xFF})), 0x62A8AB43U);  // likewise
}

constexpr std::size_t kSizes[] = {0,   1,   7,    8,    9,    63,   255,  256,  511,  512,  513,
                                  767, 768, 1023, 1024, 3071, 3072, 3073, 6143, 6144, 6150, 9000};

TEST(Crc32c, AgreesWithDivisionForEveryLengthAndAlignment) {
  const PageBytes bytes = random_bytes(10'000, 1);
  for (const std::size_t size : kSizes) {
    for (std::size_t offset = 0; offset < 9; ++offset) {
      const auto part = std::span(bytes).subspan(offset, size);
      EXPECT_EQ(crc32c(part), slow_crc32c(part)) << size << " bytes at " << offset;
    }
  }
}

TEST(Crc32c, CopiesNeitherMoreNorLess) {
  constexpr std::byte kUntouched{0xA5};
  const PageBytes bytes = random_bytes(10'000, 3);
  for (const std::size_t size : kSizes) {
    const auto from = std::span<const std::byte>(bytes).subspan(5, size);
    PageBytes to(size + 200, kUntouched);
    EXPECT_EQ(crc32c_copy(std::span(to).subspan(100, size), from, 0x1234567),
              crc32c(from, 0x1234567))
        << size << " bytes";
    PageBytes expected(size + 200, kUntouched);
    std::ranges::copy(from, expected.begin() + 100);
    EXPECT_EQ(to, expected) << size << " bytes";
  }
  PageBytes to(bytes.size());
  EXPECT_EQ(crc32c_copy(to, bytes), slow_crc32c(bytes));
  EXPECT_EQ(to, bytes);
}

TEST(Crc32c, CopiesPagesWhateverTheirAlignment) {
  constexpr std::byte kUntouched{0xA5};
  constexpr std::size_t kLine = 64;
  const PageBytes bytes = random_bytes(140'000, 5);
  for (const std::size_t size : {32'767UL, 32'768UL, 65'536UL, 66'047UL, 131'072UL}) {
    for (const std::size_t offset : {0UL, 1UL, 32UL, 64UL}) {
      const auto from = std::span<const std::byte>(bytes).subspan(offset * 3, size);
      PageBytes memory(size + 4 * kLine, kUntouched);
      const std::size_t aligned = kLine - reinterpret_cast<std::uintptr_t>(memory.data()) % kLine;
      const std::size_t at = aligned + offset;
      PageBytes expected = memory;
      std::ranges::copy(from, expected.begin() + static_cast<std::ptrdiff_t>(at));
      EXPECT_EQ(crc32c_copy(std::span(memory).subspan(at, size), from, 77), crc32c(from, 77))
          << size << " bytes to " << offset;
      EXPECT_EQ(memory, expected) << size << " bytes to " << offset;
    }
    const auto all = std::span<const std::byte>(bytes).first(size);
    EXPECT_EQ(crc32c(all), slow_crc32c(all)) << size << " bytes";
  }
}

TEST(Crc32c, GoesOnWhereItStopped) {
  const PageBytes bytes = random_bytes(10'000, 2);
  const auto all = std::span<const std::byte>(bytes);
  for (const std::size_t cut : {0UL, 1UL, 3072UL, 5000UL, 10000UL}) {
    EXPECT_EQ(crc32c(all.subspan(cut), crc32c(all.first(cut))), crc32c(all)) << cut;
  }
}

}  // namespace
}  // namespace kvtier
