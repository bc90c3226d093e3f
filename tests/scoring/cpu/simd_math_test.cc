#include "scoring/cpu/simd_math.h"

#include "scoring/estimator.h"
#include "support/oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace kvtier::scoring {

namespace {

TEST(SimdMath, ExpIsWithinItsErrorOverTheWholeRange) {
  for (double x = -87.0; x <= 88.0; x += 0.00317) {
    const auto argument = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(argument));
    ASSERT_NEAR(static_cast<double>(simd::exp(argument)), exact, 3e-7 * exact) << x;
  }
  EXPECT_EQ(simd::exp(0.0F), 1.0F);
}

TEST(SimdMath, ExpClampsItsArgument) {
  EXPECT_EQ(simd::exp(-1000.0F), simd::exp(-87.0F));
  EXPECT_EQ(simd::exp(kLowestScore), simd::exp(-87.0F));
  EXPECT_EQ(simd::exp(1000.0F), simd::exp(88.0F));
}

TEST(SimdMath, LogIsWithinItsErrorOverAllExponents) {
  for (double exponent = -126.0; exponent < 127.9; exponent += 0.00231) {
    const auto argument = static_cast<float>(std::exp2(exponent));
    const double exact = std::log(static_cast<double>(argument));
    ASSERT_NEAR(static_cast<double>(simd::log(argument)), exact,
                2e-7 * std::max(1.0, std::fabs(exact)))
        << argument;
  }
  EXPECT_EQ(simd::log(1.0F), 0.0F);
}

TEST(SimdMath, SinOfQuarterTurnsIsWithinItsError) {
  for (double y = -1.0; y <= 1.0; y += 0.000317) {
    const auto argument = static_cast<float>(y);
    ASSERT_NEAR(static_cast<double>(simd::sin_quarter_turns(argument)),
                std::sin(std::numbers::pi / 2.0 * static_cast<double>(argument)), 3e-7)
        << y;
  }
}

TEST(SimdMath, ReadsEveryFiniteHalf) {
  for (int bits = 0; bits < 0x7C00; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    ASSERT_EQ(static_cast<double>(simd::from_fp16_magnitude(half)), oracle::from_fp16(half));
  }
}

}  // namespace

}  // namespace kvtier::scoring
