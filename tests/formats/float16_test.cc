#include "formats/float16.h"

#include "tests/support/oracle.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

namespace kvtier::formats {
namespace {

TEST(Float16, WidensEveryNumberThatThereIs) {
  for (std::uint32_t bits = 0; bits <= 0xFFFFU; ++bits) {
    const auto stored = static_cast<std::uint16_t>(bits);
    for (const auto& [found, expected] :
         {std::pair{from_bfloat16(stored), oracle::from_bf16(stored)},
          std::pair{from_float16(stored), oracle::from_fp16(stored)}}) {
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(found)) << bits;
      } else {
        ASSERT_EQ(static_cast<double>(found), expected) << bits;
        ASSERT_EQ(std::signbit(found), std::signbit(expected)) << bits;
      }
    }
  }
}

TEST(Float16, RoundsToBfloat16ToNearestEven) {
  EXPECT_EQ(to_bfloat16(1.0F), 0x3f80);
  EXPECT_EQ(to_bfloat16(-2.5F), 0xc020);
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x3f808000U)), 0x3f80);  // tie, even below
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x3f818000U)), 0x3f82);  // tie, even above
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x3f808001U)), 0x3f81);
  EXPECT_EQ(to_bfloat16(-std::numeric_limits<float>::infinity()), 0xff80);
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x7f800001U)), 0x7fc0);  // quiet now
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0xffffffffU)), 0xffff);
}

}  // namespace
}  // namespace kvtier::formats
