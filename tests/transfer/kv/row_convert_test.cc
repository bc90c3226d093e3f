#include "transfer/kv/row_convert.h"

#include "tests/transfer/device/reference_round.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace kvtier::transfer::cpu {
namespace {

using testing::reference_bits;
using testing::reference_value;

std::vector<std::uint16_t> all_patterns() {
  std::vector<std::uint16_t> patterns(0x10000);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  return patterns;
}

/// Stored bits of a value by definition, with one pattern for all NaN.
void expect_stored(std::uint16_t found, double value, DType dtype) {
  if (std::isnan(value)) {
    ASSERT_TRUE(std::isnan(reference_value(found, dtype))) << "NaN";
  } else {
    ASSERT_EQ(found, reference_bits(value, dtype)) << std::hexfloat << value;
  }
}

class ConvertTest : public ::testing::TestWithParam<DType> {
 protected:
  [[nodiscard]] DType other() const {
    return GetParam() == DType::kFloat16 ? DType::kBFloat16 : DType::kFloat16;
  }
};
INSTANTIATE_TEST_SUITE_P(, ConvertTest, ::testing::Values(DType::kFloat16, DType::kBFloat16),
                         [](const auto& each) { return std::string(dtype_name(each.param)); });

TEST_P(ConvertTest, WidensEveryPattern) {
  const std::vector<std::uint16_t> in = all_patterns();
  std::vector<float> out(in.size());

  EXPECT_TRUE(convert_to_float(in.data(), GetParam(), out.data(), std::ssize(in)));

  for (std::size_t i = 0; i < in.size(); ++i) {
    const double expected = reference_value(in[i], GetParam());
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(out[i])) << i;
    } else {
      ASSERT_EQ(static_cast<double>(out[i]), expected) << i;
      ASSERT_EQ(std::signbit(out[i]), std::signbit(expected)) << i;
    }
  }
}

TEST_P(ConvertTest, KeepsEveryPatternOfItsOwnKind) {
  const std::vector<std::uint16_t> in = all_patterns();
  std::vector<std::uint16_t> out(in.size());

  EXPECT_TRUE(convert_to_storage(in.data(), GetParam(), out.data(), GetParam(), std::ssize(in)));

  EXPECT_EQ(out, in);
}

TEST_P(ConvertTest, RoundsEveryPatternOfTheOtherKind) {
  const std::vector<std::uint16_t> in = all_patterns();
  std::vector<std::uint16_t> out(in.size());

  EXPECT_TRUE(convert_to_storage(in.data(), other(), out.data(), GetParam(), std::ssize(in)));

  for (std::size_t i = 0; i < in.size(); ++i) {
    expect_stored(out[i], reference_value(in[i], other()), GetParam());
  }
}

TEST_P(ConvertTest, RoundsMidpointsAndTheirNeighbours) {
  std::vector<float> in;
  for (std::uint32_t i = 0; i < 0xFFFF; ++i) {
    const double low = reference_value(static_cast<std::uint16_t>(i), GetParam());
    const double high = reference_value(static_cast<std::uint16_t>(i + 1), GetParam());
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const auto middle = static_cast<float>((low + high) / 2);
    in.insert(in.end(),
              {middle, std::nextafter(middle, -INFINITY), std::nextafter(middle, INFINITY)});
  }
  std::vector<std::uint16_t> out(in.size());

  convert_to_storage(in.data(), DType::kFloat32, out.data(), GetParam(), std::ssize(in));

  for (std::size_t i = 0; i < in.size(); ++i) {
    expect_stored(out[i], static_cast<double>(in[i]), GetParam());
  }
}

TEST_P(ConvertTest, RoundsRandomFloats) {
  constexpr unsigned kSeed = 5;
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  std::vector<float> in(500'000);
  for (float& value : in) value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  std::vector<std::uint16_t> out(in.size());

  convert_to_storage(in.data(), DType::kFloat32, out.data(), GetParam(), std::ssize(in));

  for (std::size_t i = 0; i < in.size(); ++i) {
    expect_stored(out[i], static_cast<double>(in[i]), GetParam());
  }
}

TEST_P(ConvertTest, FindsNonfiniteAtEveryPlaceOfEveryLength) {
  for (std::int64_t n = 0; n <= 70; ++n) {
    std::vector<float> in(static_cast<std::size_t>(n), 1.5F);
    std::vector<std::uint16_t> out(in.size() + 1, 0xA5A5);
    ASSERT_FALSE(convert_to_storage(in.data(), DType::kFloat32, out.data(), GetParam(), n));
    ASSERT_EQ(out.back(), 0xA5A5) << "written past the end, length " << n;
    for (std::size_t i = 0; i < in.size(); ++i) {
      for (const float bad : {NAN, INFINITY, -INFINITY, std::numeric_limits<float>::max()}) {
        in[i] = bad;
        ASSERT_TRUE(convert_to_storage(in.data(), DType::kFloat32, out.data(), GetParam(), n))
            << "length " << n << ", place " << i;
      }
      in[i] = 1.5F;
    }
  }
}

}  // namespace
}  // namespace kvtier::transfer::cpu
