#include "transfer/tiers/crc32c.h"

#include <gtest/gtest.h>

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

TEST(Crc32c, AgreesWithDivisionForEveryLengthAndAlignment) {
  const PageBytes bytes = random_bytes(7000, 1);
  for (const std::size_t size :
       {1UL, 7UL, 8UL, 9UL, 63UL, 1023UL, 1024UL, 3071UL, 3072UL, 3073UL, 6143UL, 6144UL, 6150UL}) {
    for (std::size_t offset = 0; offset < 9; ++offset) {
      const auto part = std::span(bytes).subspan(offset, size);
      EXPECT_EQ(crc32c(part), slow_crc32c(part)) << size << " bytes at " << offset;
    }
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
