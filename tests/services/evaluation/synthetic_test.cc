#include "services/evaluation/synthetic.h"

#include "include/types/float16.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtier::services {
namespace {

using Bits = std::vector<std::uint16_t>;

SyntheticShape small_shape(int head_dim = 128) {
  return {.query_heads = 8, .kv_heads = 2, .head_dim = head_dim, .tokens = 4096, .seed = 11};
}

LayerSource make_source(const SyntheticShape& shape, int sequence = 0, int layer = 0) {
  return {shape, sequence, layer, std::make_shared<NoiseTable>(shape.seed)};
}

struct Rows {
  Bits keys;
  Bits values;
  friend bool operator==(const Rows&, const Rows&) = default;
};

Rows rows_of(const LayerSource& source, const SyntheticShape& shape, std::int64_t begin,
             std::int64_t count, int threads = 1) {
  const auto size = static_cast<std::size_t>(count * shape.kv_heads * shape.head_dim);
  Rows rows{Bits(size), Bits(size)};
  source.fill(begin, count, rows.keys.data(), rows.values.data(), threads);
  return rows;
}

/// Mean length of rows of bf16.
double mean_length(const Bits& bits, std::size_t dim) {
  double sum = 0.0;
  for (std::size_t begin = 0; begin < bits.size(); begin += dim) {
    double squares = 0.0;
    for (std::size_t i = begin; i < begin + dim; ++i) {
      const auto x = static_cast<double>(BFloat16{bits[i]}.to_float());
      squares += x * x;
    }
    sum += std::sqrt(squares);
  }
  return sum / static_cast<double>(bits.size() / dim);
}

TEST(Synthetic, MakesTheSameRowsInAnyChunksOnAnyThreads) {
  const SyntheticShape shape = small_shape();
  const LayerSource source = make_source(shape);
  const Rows whole = rows_of(source, shape, 60, 300);

  EXPECT_EQ(rows_of(source, shape, 60, 300, 7), whole);
  Rows pieces;
  for (std::int64_t begin = 60; begin < 360; begin += 37) {
    const Rows piece = rows_of(source, shape, begin, std::min<std::int64_t>(37, 360 - begin));
    pieces.keys.insert(pieces.keys.end(), piece.keys.begin(), piece.keys.end());
    pieces.values.insert(pieces.values.end(), piece.values.begin(), piece.values.end());
  }
  EXPECT_EQ(pieces, whole);
}

TEST(Synthetic, DependsOnSeedSequenceLayerAndHead) {
  const SyntheticShape shape = small_shape();
  const Rows rows = rows_of(make_source(shape), shape, 0, 4);
  SyntheticShape other = shape;
  other.seed = 12;

  EXPECT_EQ(rows_of(make_source(shape), shape, 0, 4), rows);
  EXPECT_NE(rows_of(make_source(other), other, 0, 4).keys, rows.keys);
  EXPECT_NE(rows_of(make_source(shape, 1, 0), shape, 0, 4).keys, rows.keys);
  EXPECT_NE(rows_of(make_source(shape, 0, 1), shape, 0, 4).keys, rows.keys);
  EXPECT_FALSE(std::equal(rows.keys.begin(), rows.keys.begin() + 128, rows.keys.begin() + 128));
}

TEST(Synthetic, HasLengthsOfTheRecordedTrace) {
  for (const int dim : {64, 96, 128, 256}) {
    const SyntheticShape shape = small_shape(dim);
    const Rows rows = rows_of(make_source(shape), shape, 0, 512);
    const double root = std::sqrt(dim);
    // |k| = 19.2 and |v| = 9.2 at head_dim 128; a layer's mean key varies its keys' length.
    EXPECT_NEAR(mean_length(rows.keys, static_cast<std::size_t>(dim)), 1.7 * root, 0.15 * root);
    EXPECT_NEAR(mean_length(rows.values, static_cast<std::size_t>(dim)), 0.81 * root, 0.05 * root);
  }
}

TEST(Synthetic, SpreadsValueNormsAsTheRecordedTrace) {
  const SyntheticShape shape = small_shape();
  const Rows rows = rows_of(make_source(shape), shape, 0, 4096);
  std::vector<double> logs;
  for (std::size_t begin = 0; begin < rows.values.size(); begin += 128) {
    const Bits value(rows.values.begin() + static_cast<std::ptrdiff_t>(begin),
                     rows.values.begin() + static_cast<std::ptrdiff_t>(begin + 128));
    logs.push_back(std::log(mean_length(value, 128)));
  }
  const auto n = static_cast<double>(logs.size());
  const double mean = std::accumulate(logs.begin(), logs.end(), 0.0) / n;
  double squares = 0.0;
  for (const double x : logs) squares += (x - mean) * (x - mean);

  EXPECT_NEAR(std::sqrt(squares / n), 0.15, 0.03);  // 0.14 of the trace, and the sampling of |v|
}

TEST(Synthetic, KeepsSegmentsTogether) {
  // Tokens of a segment share their topic more often than tokens of different ones do.
  const SyntheticShape shape = small_shape();
  const LayerSource source = make_source(shape);
  const Rows rows = rows_of(source, shape, 0, 2048);
  const auto dot = [&](std::int64_t a, std::int64_t b) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < 128; ++i) {
      sum += static_cast<double>(
                 BFloat16{rows.keys[static_cast<std::size_t>(a * 256 + i)]}.to_float()) *
             static_cast<double>(
                 BFloat16{rows.keys[static_cast<std::size_t>(b * 256 + i)]}.to_float());
    }
    return sum;
  };
  double near = 0.0;
  double far = 0.0;
  for (std::int64_t t = 0; t < 1024; ++t) {
    const std::int64_t base = t / 64 * 64;
    near += dot(t, base + (t + 17) % 64);
    far += dot(t, (t + 1024 + 17) % 2048);
  }

  EXPECT_GT(near / 1024, far / 1024 + 8.0);  // a quarter of the tokens pairs, |a|^2 = 92
}

TEST(Synthetic, PlantsNeedlesInWhateverChunkHoldsThem) {
  const SyntheticShape shape = small_shape();
  LayerSource source = make_source(shape);
  const Rows before = rows_of(source, shape, 100, 50);
  const Bits key(128, BFloat16::from_float(3.0F).bits);
  source.plant({.kv_head = 1, .step = 0, .token = 100, .key = key});
  source.plant({.kv_head = 0, .step = 1, .token = 149, .key = key});
  const Rows after = rows_of(source, shape, 100, 50, 3);

  EXPECT_EQ(after.values, before.values);
  Rows expected = before;
  std::copy(key.begin(), key.end(), expected.keys.begin() + 128);
  std::copy(key.begin(), key.end(), expected.keys.begin() + 49 * 256);
  EXPECT_EQ(after.keys, expected.keys);
  EXPECT_EQ(rows_of(source, shape, 101, 48).keys,
            Bits(before.keys.begin() + 256, before.keys.begin() + 49 * 256));
}

TEST(Synthetic, MakesSingleKeysAsInRows) {
  const SyntheticShape shape = small_shape();
  const LayerSource source = make_source(shape);
  const std::vector<std::int64_t> tokens = {0, 63, 64, 4095};
  Bits keys(tokens.size() * 128);
  source.fill_keys(1, tokens, keys.data());

  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const Rows row = rows_of(source, shape, tokens[i], 1);
    EXPECT_TRUE(std::equal(row.keys.begin() + 128, row.keys.end(),
                           keys.begin() + static_cast<std::ptrdiff_t>(i * 128)))
        << tokens[i];
  }
}

TEST(Synthetic, CorrelatesQueriesOfSuccessiveSteps) {
  const SyntheticShape shape = small_shape();
  QuerySource source(shape, 0, 0, {.correlation = 0.6, .norm = 10.0});
  std::vector<float> before;
  double products = 0.0;
  double squares = 0.0;
  for (int step = 0; step < 60; ++step) {
    std::vector<float> now;
    for (const std::uint16_t bits : source.next()) now.push_back(BFloat16{bits}.to_float());
    for (std::size_t i = 0; i < before.size(); ++i) {
      products += static_cast<double>(now[i]) * static_cast<double>(before[i]);
    }
    for (const float x : now) squares += static_cast<double>(x) * static_cast<double>(x);
    before = std::move(now);
  }

  EXPECT_NEAR(squares / (60 * 8), 100.0, 15.0);  // 480 queries, 87 % shared by 4
  EXPECT_NEAR(products / squares, 0.6 * 59 / 60, 0.06);
}

}  // namespace
}  // namespace kvtier::services
