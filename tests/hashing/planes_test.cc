#include "hashing/planes.h"

#include "hashing/philox.h"
#include "support/backend_fixture.h"
#include "support/oracle.h"

#include <cmath>
#include <set>

namespace kvtier::hashing {

namespace {

TEST(Philox, MatchesTheKnownAnswersOfRandom123) {
  constexpr std::uint32_t kOnes = 0xFFFFFFFF;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(GeneratePlanes, PrefixDoesNotDependOnTheTotal) {
  for (const PlaneKind kind : {PlaneKind::kGaussian, PlaneKind::kOrthogonal}) {
    for (const int head_dim : {64, 96, 128, 256}) {
      const auto all = generate_planes({.kind = kind, .num_planes = 300, .seed = 5}, head_dim);
      for (const int count : {1, 31, 64, 129, 299}) {
        auto some = generate_planes({.kind = kind, .num_planes = count, .seed = 5}, head_dim);
        ASSERT_EQ(some.size(), static_cast<std::size_t>(count * head_dim));
        EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()))
            << "head_dim " << head_dim << ", planes " << count;
      }
    }
  }
}

TEST(GeneratePlanes, SeedsAndTheirHighWordsGiveDifferentPlanes) {
  std::set<std::vector<std::uint16_t>> seen;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32}) {
    seen.insert(generate_planes({.num_planes = 2, .seed = seed}, 64));
  }
  EXPECT_EQ(seen.size(), 3U);
}

TEST(GeneratePlanes, GaussianEntriesHaveStandardMoments) {
  const auto planes = oracle::planes_from_bf16(generate_planes({.num_planes = 1024}, 128), 128,
                                               /*orthogonal=*/false);
  double sum = 0.0;
  double squares = 0.0;
  double fourth = 0.0;
  for (const double x : planes.values) {
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  const auto n = static_cast<double>(planes.values.size());
  // Four standard deviations of each mean over n = 131072 samples: 1, sqrt(2), sqrt(96) / sqrt(n).
  EXPECT_NEAR(sum / n, 0.0, 4.0 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1.0, 4.0 * std::sqrt(2.0 / n));
  EXPECT_NEAR(fourth / n, 3.0, 4.0 * std::sqrt(96.0 / n));
}

TEST(GeneratePlanes, OrthogonalRowsOfABlockAreOrthogonalAndOfEqualLength) {
  for (const int head_dim : {64, 96, 128, 256}) {
    const int count = 2 * head_dim + head_dim / 2;
    const auto planes = oracle::planes_from_bf16(
        generate_planes({.kind = PlaneKind::kOrthogonal, .num_planes = count, .seed = 9}, head_dim),
        head_dim, /*orthogonal=*/true);
    for (int i = 0; i < count; ++i) {
      for (int j = i; j < count && j / head_dim == i / head_dim; ++j) {
        double dot = 0.0;
        for (int x = 0; x < head_dim; ++x) dot += planes.row(i)[x] * planes.row(j)[x];
        // bf16 rounds each product's factors by at most 2^-9 relative: the error of a dot of rows
        // of length sqrt(d) is a random walk far below 2 * 2^-9 * d.
        ASSERT_NEAR(dot, i == j ? head_dim : 0.0, head_dim * 0x1p-8)
            << "rows " << i << ", " << j << ", head_dim " << head_dim;
      }
    }
  }
}

class PlanesTest : public testing::BackendTest {};

/// FNV-1a, 64 bits, of the planes and head_dim, little endian.
std::uint64_t hash_of(const Planes& planes, int head_dim) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  const auto add = [&hash](std::uint32_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) hash = (hash ^ (value >> (8 * i) & 0xFFU)) * 0x100000001B3U;
  };
  for (const std::uint16_t bits : planes.host_bits()) add(bits, 2);
  add(static_cast<std::uint32_t>(head_dim), 4);
  return hash;
}

TEST_P(PlanesTest, BitsAreGolden) {
  const Planes gaussian(*device_, {.kind = PlaneKind::kGaussian, .num_planes = 600, .seed = 0},
                        128);
  const Planes orthogonal(*device_, {.kind = PlaneKind::kOrthogonal, .num_planes = 256, .seed = 0},
                          128);

  EXPECT_EQ(hash_of(gaussian, 128), 0xbea9141b3e57c571U);
  EXPECT_EQ(hash_of(orthogonal, 128), 0x2aa6fa07cdbff7a9U);
}

TEST_P(PlanesTest, BitsTellSeedKindCountAndHeadDimApart) {
  std::set<std::uint64_t> seen;
  for (const PlaneKind kind : {PlaneKind::kGaussian, PlaneKind::kOrthogonal}) {
    for (const std::uint64_t seed : {0U, 1U}) {
      for (const int count : {64, 128}) {
        for (const int head_dim : {64, 128}) {
          seen.insert(hash_of(Planes(*device_, {kind, count, seed}, head_dim), head_dim));
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), 16U);
}

TEST_P(PlanesTest, DeviceHoldsTheBitsAndTheirPaddedTranspose) {
  for (const int count : {1, 16, 17, 600}) {
    const Planes planes(*device_, {.num_planes = count, .seed = 3}, 96);
    const PlanesView view = planes.view();
    ASSERT_EQ(view.num_planes, count);
    ASSERT_EQ(view.head_dim, 96);
    ASSERT_EQ(view.stride, (count + 15) / 16 * 16);

    const auto bits = download<std::uint16_t>(view.bf16, static_cast<std::size_t>(count) * 96);
    const auto transposed =
        download<float>(view.transposed, static_cast<std::size_t>(view.stride) * 96);

    EXPECT_EQ(bits, planes.host_bits());
    for (int x = 0; x < 96; ++x) {
      for (int plane = 0; plane < view.stride; ++plane) {
        const double expected =
            plane < count ? oracle::from_bf16(bits[static_cast<std::size_t>(plane * 96 + x)]) : 0.0;
        const float found = transposed[static_cast<std::size_t>(x * view.stride + plane)];
        ASSERT_EQ(static_cast<double>(found), expected) << "plane " << plane << ", x " << x;
      }
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(PlanesTest);

}  // namespace

}  // namespace kvtier::hashing
