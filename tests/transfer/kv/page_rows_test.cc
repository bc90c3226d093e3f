#include "transfer/kv/page_rows.h"

#include "support/oracle.h"
#include "transfer/kv/float8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace kvtier::transfer {
namespace {

/// What a pattern means, by its definition: 1.mmm * 2^(eeee - 7), or 0.mmm * 2^-6.
double float8_value(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 3 & 15U);
  const double mantissa = (bits & 7U) / 8.0;
  const double magnitude =
      exponent == 0 ? mantissa * 0x1p-6 : (1.0 + mantissa) * std::ldexp(1.0, exponent - 7);
  return (bits & 0x80U) != 0 ? -magnitude : magnitude;
}

/// The nearest of all patterns, the even one of two.
double nearest_float8(double x) {
  double best = 0.0;
  unsigned best_bits = 0;
  double gap = std::numeric_limits<double>::infinity();
  for (unsigned bits = 0; bits < 0x7F; ++bits) {
    const double value = float8_value(bits);
    const double distance = std::fabs(std::fabs(x) - value);
    if (distance < gap || (distance == gap && bits % 2 == 0 && best_bits % 2 == 1)) {
      best = value;
      best_bits = bits;
      gap = distance;
    }
  }
  return std::copysign(best, x);
}

TEST(Float8, WidensEveryNumber) {
  for (unsigned bits = 0; bits < 256; ++bits) {
    if ((bits & 0x7FU) == 0x7FU) continue;  // NaN
    EXPECT_EQ(static_cast<double>(Float8{static_cast<std::uint8_t>(bits)}.to_float()),
              float8_value(bits))
        << bits;
  }
}

TEST(Float8, RoundsToTheNearestHalfToEven) {
  std::vector<float> values = {0.0F,    -0.0F,    448.0F,    -448.0F,
                               0x1p-9F, 0x1p-10F, 0x1.8p-9F, 0x1p-30F};
  for (unsigned bits = 0; bits < 0x7E; ++bits) {
    const auto low = static_cast<float>(float8_value(bits));
    const auto high = static_cast<float>(float8_value(bits + 1));
    const float middle = (low + high) / 2.0F;
    values.insert(values.end(), {low, -low, middle, -middle, std::nextafter(middle, low),
                                 std::nextafter(middle, high)});
  }
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0.0F, 60.0F);
  for (int i = 0; i < 2000; ++i) values.push_back(std::clamp(normal(random), -448.0F, 448.0F));
  for (const float x : values) {
    const float found = Float8::from_float(x).to_float();
    ASSERT_EQ(static_cast<double>(found), nearest_float8(static_cast<double>(x)))
        << std::hexfloat << x;
    ASSERT_EQ(std::signbit(found), std::signbit(x));
  }
}

TEST(Float8, ScalesByTheLeastPowerOfTwoThatFits) {
  for (const float largest : {448.0F, 449.0F, 224.0F, 225.0F, 1.0F, 3.4e38F, 1e-20F}) {
    const float scale = float8_scale(largest);
    int exponent = 0;
    EXPECT_EQ(std::frexp(scale, &exponent), 0.5F) << largest;
    EXPECT_LE(largest / scale, 448.0F) << largest;
    EXPECT_GT(largest / scale, 224.0F) << largest;
  }
  EXPECT_EQ(float8_scale(0.0F), 0x1p-110F);
  EXPECT_EQ(float8_scale(1e-38F), 0x1p-110F);
  EXPECT_TRUE(std::isnan(float8_scale(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(float8_scale(std::numeric_limits<float>::quiet_NaN())));
}

constexpr int kDim = 96;

/// Rows of two heads in one page, and what reads them.
struct Page {
  explicit Page(bool float8)
      : kv{.kv_heads = 2,
           .query_heads = 2,
           .head_dim = kDim,
           .page_tokens = 16,
           .float8_pages = float8},
        bytes(static_cast<std::size_t>(kv.page_bytes()), std::byte{0xEE}),
        address(bytes.data()),
        sequence{&address, nullptr, nullptr, nullptr} {}

  KvGeometry kv;
  std::vector<std::byte> bytes;
  const std::byte* address;
  SequenceView sequence;
};

std::vector<std::uint16_t> random_row(std::mt19937_64& random, double scale) {
  std::normal_distribution<double> normal(0.0, scale);
  std::vector<std::uint16_t> row;
  for (int i = 0; i < 2 * kDim; ++i) row.push_back(oracle::to_bf16(normal(random)));
  return row;
}

TEST(PageRows, AreHalfAsLargeInFloat8) {
  EXPECT_EQ(Page(false).kv.page_bytes(), 2 * 16 * 4 * kDim);
  EXPECT_EQ(Page(true).kv.page_bytes(), 2 * 16 * (2 * kDim + 8));
  EXPECT_EQ(Page(true).kv.row_bytes(), 4 * kDim) << "of rows that are not in pages";
}

TEST(PageRows, AreReadAsTheyAreKept) {
  for (const bool float8 : {false, true}) {
    Page page(float8);
    std::mt19937_64 random(5);
    std::vector<std::vector<std::uint16_t>> rows, kept;
    for (int head = 0; head < 2; ++head) {
      for (int token = 0; token < 16; ++token) {
        rows.push_back(random_row(random, std::pow(10.0, token - 8)));
        kept.emplace_back(rows.back().size());
        cpu::store_page_row(page.kv, page.bytes.data(), head, token,
                            reinterpret_cast<const std::byte*>(rows.back().data()),
                            reinterpret_cast<std::byte*>(kept.back().data()));
      }
    }
    for (int head = 0; head < 2; ++head) {
      for (int token = 0; token < 16; ++token) {
        const std::size_t i = static_cast<std::size_t>(head * 16 + token);
        if (!float8) {
          EXPECT_EQ(kept[i], rows[i]);
        }
        std::vector<std::uint16_t> bits(2 * kDim);
        cpu::read_row(page.kv, page.sequence, 0, head, token,
                      reinterpret_cast<std::byte*>(bits.data()));
        EXPECT_EQ(bits, kept[i]);
        std::vector<float> values(2 * kDim);
        cpu::read_row(page.kv, page.sequence, 0, head, token, values.data());
        for (std::size_t x = 0; x < values.size(); ++x) {
          ASSERT_EQ(static_cast<double>(values[x]), oracle::from_bf16(bits[x]));
        }
      }
    }
  }
}

TEST(PageRows, AreRoundedByTheirOwnFactors) {
  Page page(true);
  std::mt19937_64 random(6);
  std::vector<std::uint16_t> row = random_row(random, 3.0);
  for (int x = kDim; x < 2 * kDim; ++x) {  // values far smaller than keys
    const double value = oracle::from_bf16(row[static_cast<std::size_t>(x)]);
    row[static_cast<std::size_t>(x)] = oracle::to_bf16(value * 1e-4);
  }
  std::vector<std::uint16_t> kept(row.size());
  cpu::store_page_row(page.kv, page.bytes.data(), 1, 3,
                      reinterpret_cast<const std::byte*>(row.data()),
                      reinterpret_cast<std::byte*>(kept.data()));
  for (std::size_t half = 0; half < 2; ++half) {
    double largest = 0.0;
    for (std::size_t x = half * kDim; x < (half + 1) * kDim; ++x) {
      largest = std::max(largest, std::fabs(oracle::from_bf16(row[x])));
    }
    double scale = 1.0;
    while (largest > 448.0 * scale) scale *= 2.0;
    while (largest <= 224.0 * scale) scale /= 2.0;
    for (std::size_t x = half * kDim; x < (half + 1) * kDim; ++x) {
      const double value = oracle::from_bf16(row[x]);
      ASSERT_EQ(oracle::from_bf16(kept[x]), nearest_float8(value / scale) * scale) << x;
    }
  }
}

TEST(PageRows, KeepWhatIsNotFinite) {
  Page page(true);
  std::mt19937_64 random(7);
  for (const auto bad : std::vector<std::uint16_t>{0x7F80, 0xFF80, 0x7FC0}) {
    std::vector<std::uint16_t> row = random_row(random, 1.0);
    row[5] = bad;
    std::vector<std::uint16_t> kept(row.size());
    cpu::store_page_row(page.kv, page.bytes.data(), 0, 0,
                        reinterpret_cast<const std::byte*>(row.data()),
                        reinterpret_cast<std::byte*>(kept.data()));
    EXPECT_TRUE(std::isnan(oracle::from_bf16(kept[0]))) << "a key is one or is not";
    EXPECT_TRUE(std::isfinite(oracle::from_bf16(kept[kDim])));
  }
}

}  // namespace
}  // namespace kvtier::transfer
