#include "transfer/kv/page_rows.h"

#include "support/oracle.h"
#include "transfer/kv/int8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace kvtier::transfer {
namespace {

TEST(Int8, RoundsHalfToEven) {
  for (int x = -127; x <= 127; ++x) {
    const auto whole = static_cast<float>(x);
    EXPECT_EQ(to_int8(whole, 1.0F), x);
    if (x == 127) continue;
    EXPECT_EQ(to_int8(whole + 0.5F, 1.0F), x % 2 == 0 ? x : x + 1);
    EXPECT_EQ(to_int8(whole + 0.498F, 1.0F), x);
    EXPECT_EQ(to_int8(whole + 0.502F, 1.0F), x + 1);
  }
}

TEST(Int8, KeepsTheLargestMagnitudeOfAnyBf16) {
  std::mt19937_64 random(3);
  std::uniform_int_distribution<unsigned> magnitudes(0x0D80, 0x7F7F);  // from 2^-100 on
  for (int i = 0; i < 20'000; ++i) {
    const auto bits = static_cast<std::uint16_t>(magnitudes(random));
    const auto largest = static_cast<float>(oracle::from_bf16(bits));
    const float scale = int8_scale(largest);
    ASSERT_EQ(to_int8(largest, 1.0F / scale), 127) << std::hexfloat << largest;
    ASSERT_EQ(to_int8(-largest, 1.0F / scale), -127) << std::hexfloat << largest;
    ASSERT_EQ(oracle::to_bf16(127.0 * static_cast<double>(scale)), bits);
  }
}

TEST(Int8, HasAFactorForEveryRow) {
  EXPECT_EQ(int8_scale(254.0F), 2.0F);
  EXPECT_EQ(int8_scale(0.0F), 0x1p-100F / 127.0F);
  EXPECT_EQ(int8_scale(1e-38F), 0x1p-100F / 127.0F);
  EXPECT_TRUE(std::isnan(int8_scale(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(int8_scale(std::numeric_limits<float>::quiet_NaN())));
}

constexpr int kDim = 96;

/// Rows of two heads in one page, and what reads them.
struct Page {
  explicit Page(bool int8)
      : kv{.kv_heads = 2, .head_dim = kDim, .page_tokens = 16, .int8_pages = int8},
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

TEST(PageRows, AreHalfAsLargeInInt8) {
  EXPECT_EQ(Page(false).kv.page_bytes(), 2 * 16 * 4 * kDim);
  EXPECT_EQ(Page(true).kv.page_bytes(), 2 * 16 * (2 * kDim + 8));
  EXPECT_EQ(Page(true).kv.row_bytes(), 4 * kDim) << "of rows that are not in pages";
}

TEST(PageRows, AreReadAsTheyAreKept) {
  for (const bool int8 : {false, true}) {
    Page page(int8);
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
        if (!int8) {
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
    const double scale = largest / 127.0;
    for (std::size_t x = half * kDim; x < (half + 1) * kDim; ++x) {
      const double value = oracle::from_bf16(row[x]), found = oracle::from_bf16(kept[x]);
      // Half a step, and the rounding of the product to bf16.
      ASSERT_LE(std::fabs(found - value), 0.50001 * scale + 0x1p-9 * std::fabs(value)) << x;
      if (std::fabs(value) == largest) {
        ASSERT_EQ(kept[x], row[x]);
      }
    }
  }
}

TEST(PageRows, AreTheSameWhenTheyAreStoredAgain) {
  Page page(true);
  std::mt19937_64 random(8);
  for (int token = 0; token < 16; ++token) {
    const std::vector<std::uint16_t> row = random_row(random, std::pow(10.0, token - 8));
    std::vector<std::uint16_t> once(row.size()), twice(row.size());
    cpu::store_page_row(page.kv, page.bytes.data(), 0, token,
                        reinterpret_cast<const std::byte*>(row.data()),
                        reinterpret_cast<std::byte*>(once.data()));
    cpu::store_page_row(page.kv, page.bytes.data(), 1, token,
                        reinterpret_cast<const std::byte*>(once.data()),
                        reinterpret_cast<std::byte*>(twice.data()));
    EXPECT_EQ(twice, once);
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
