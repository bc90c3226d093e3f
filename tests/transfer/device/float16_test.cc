#include "include/types/float16.h"

#include "tests/transfer/device/reference_round.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>

namespace kvtier::transfer {
namespace {

using testing::reference_bits;
using testing::reference_value;

template <typename T>
class Float16Test : public ::testing::Test {
 protected:
  static constexpr DType kDType = std::is_same_v<T, Float16> ? DType::kFloat16 : DType::kBFloat16;

  static void expect_rounded(float value) {
    const std::uint16_t found = T::from_float(value).bits;
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(reference_value(found, kDType))) << std::hexfloat << value;
      return;
    }
    EXPECT_EQ(found, reference_bits(value, kDType)) << std::hexfloat << value;
  }
};

TEST(BFloat16, KeepsSignAndPayloadOfNaN) {
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0x7f800001U)).bits, 0x7fc0);  // quiet now
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0xffffffffU)).bits, 0xffff);
}

using Types = ::testing::Types<Float16, BFloat16>;
TYPED_TEST_SUITE(Float16Test, Types);

TYPED_TEST(Float16Test, EveryPatternHasItsValue) {
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const double expected = reference_value(bits, TestFixture::kDType);
    const float found = TypeParam{bits}.to_float();
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(found)) << i;
    } else {
      ASSERT_EQ(static_cast<double>(found), expected) << i;
      ASSERT_EQ(std::signbit(found), std::signbit(expected)) << i;
    }
  }
}

TYPED_TEST(Float16Test, EveryPatternSurvivesTheRoundTrip) {
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const TypeParam value{static_cast<std::uint16_t>(i)};
    const float wide = value.to_float();
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(TypeParam::from_float(wide).to_float())) << i;
    } else {
      ASSERT_EQ(TypeParam::from_float(wide).bits, value.bits) << i;
    }
  }
}

TYPED_TEST(Float16Test, RoundsRandomPatternsToNearestEven) {
  constexpr unsigned kSeed = 7;
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  for (int i = 0; i < 1'000'000 && !this->HasFailure(); ++i) {
    this->expect_rounded(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
}

TYPED_TEST(Float16Test, RoundsMidpointsAndTheirNeighboursToNearestEven) {
  for (std::uint32_t i = 0; i < 0xFFFF && !this->HasFailure(); ++i) {
    const double low = reference_value(static_cast<std::uint16_t>(i), TestFixture::kDType);
    const double high = reference_value(static_cast<std::uint16_t>(i + 1), TestFixture::kDType);
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const auto middle = static_cast<float>((low + high) / 2);
    this->expect_rounded(middle);
    this->expect_rounded(std::nextafter(middle, -INFINITY));
    this->expect_rounded(std::nextafter(middle, INFINITY));
  }
}

TYPED_TEST(Float16Test, RoundsTheEndsOfTheRange) {
  const double largest =
      reference_value(std::is_same_v<TypeParam, Float16> ? 0x7BFF : 0x7F7F, TestFixture::kDType);
  const auto edge = static_cast<float>(largest);
  for (const float value : {0.0F, -0.0F, edge, std::nextafter(edge, INFINITY), edge * 1.0003F,
                            edge * 1.0019F, edge * 1.002F, edge * 1.01F, INFINITY, NAN, 0x1p-149F,
                            0x1p-25F, 0x1.000002p-25F, 0x1p-24F, 0x1p-14F, 0x1.FFFFFEp-15F}) {
    this->expect_rounded(value);
    this->expect_rounded(-value);
  }
}

}  // namespace
}  // namespace kvtier::transfer
