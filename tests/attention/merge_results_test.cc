#include "attention/flash_decode.h"
#include "support/backend_fixture.h"
#include "support/oracle.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace kvtier::attention {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Partial results of random token sets, and the attention over all sets together, in double.
struct Parts {
  int head_dim = 0;
  std::size_t heads = 0;
  std::vector<std::vector<float>> outs;
  std::vector<std::vector<float>> lses;
  std::vector<double> out;
  std::vector<double> lse;
};

Parts make_parts(std::uint64_t seed, std::size_t count, std::size_t heads, int head_dim) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  Parts parts{.head_dim = head_dim, .heads = heads, .outs = {}, .lses = {}, .out = {}, .lse = {}};
  const auto d = static_cast<std::size_t>(head_dim);
  for (std::size_t p = 0; p < count; ++p) {
    std::vector<float> out(heads * d);
    std::vector<float> lse(heads);
    for (float& x : out) x = normal(engine);
    for (float& x : lse) x = 5.0F * normal(engine);
    for (std::size_t h = 0; h < heads; ++h) {
      if ((h + p) % 5 != 0) continue;  // an empty set
      lse[h] = -kInfinity;
      std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(h * d), d, 0.0F);
    }
    parts.outs.push_back(std::move(out));
    parts.lses.push_back(std::move(lse));
  }
  for (std::size_t h = 0; h < heads; ++h) {
    double sum = 0.0;
    std::vector<double> out(d, 0.0);
    for (std::size_t p = 0; p < count; ++p) {
      const double weight = std::exp(static_cast<double>(parts.lses[p][h]));
      sum += weight;
      for (std::size_t x = 0; x < d; ++x) {
        out[x] += weight * static_cast<double>(parts.outs[p][h * d + x]);
      }
    }
    for (double& x : out) x = sum > 0.0 ? x / sum : 0.0;
    parts.out.insert(parts.out.end(), out.begin(), out.end());
    parts.lse.push_back(std::log(sum));
  }
  return parts;
}

class MergeResultsTest : public testing::BackendTest {
 protected:
  void expect_merged(const Parts& parts, DType dtype, bool with_lse = true) {
    MergeBatch batch;
    std::vector<transfer::Buffer> kept;
    for (std::size_t p = 0; p < parts.outs.size(); ++p) {
      kept.push_back(upload(parts.outs[p]));
      const auto* out = kept.back().as<float>();
      kept.push_back(upload(parts.lses[p]));
      batch.push({out, kept.back().as<float>()});
    }
    const std::size_t count = parts.out.size();
    const transfer::Buffer out = allocate<std::byte>(count * dtype_bytes(dtype));
    const transfer::Buffer lse = allocate<float>(parts.heads);
    merge_results(*stream_, batch, static_cast<std::int64_t>(parts.heads), parts.head_dim,
                  out.data(), dtype, with_lse ? lse.as<float>() : nullptr);
    std::vector<float> found;
    if (dtype == DType::kFloat32) {
      found = download<float>(out.data(), count);
    } else {
      for (const std::uint16_t bits : download<std::uint16_t>(out.data(), count)) {
        found.push_back(static_cast<float>(dtype == DType::kFloat16 ? oracle::from_fp16(bits)
                                                                    : oracle::from_bf16(bits)));
      }
    }
    const std::vector<float> found_lse = download<float>(lse.data(), parts.heads);
    // Weights from log-sum-exps of up to 20 in fp32, then the rounding of the output.
    const double tolerance = dtype == DType::kFloat32   ? 1e-5
                             : dtype == DType::kFloat16 ? 0x1p-10
                                                        : 0x1p-7;
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_NEAR(static_cast<double>(found[i]), parts.out[i],
                  tolerance * (1.0 + std::abs(parts.out[i])))
          << "element " << i;
    }
    for (std::size_t h = 0; h < parts.heads; ++h) {
      if (!with_lse) {
        EXPECT_EQ(std::bit_cast<std::uint32_t>(found_lse[h]), 0xA5A5A5A5U);
      } else if (std::isinf(parts.lse[h])) {
        EXPECT_EQ(found_lse[h], -kInfinity);
      } else {
        EXPECT_NEAR(static_cast<double>(found_lse[h]), parts.lse[h], 1e-5);
      }
    }
  }
};
KVTIER_INSTANTIATE_BACKENDS(MergeResultsTest);

TEST_P(MergeResultsTest, EqualsAttentionOverTheUnion) {
  for (const std::size_t count : {1U, 2U, 3U, 16U}) {
    for (const int head_dim : {64, 96, 128, 256}) {
      SCOPED_TRACE(std::to_string(count) + " parts, head_dim " + std::to_string(head_dim));
      expect_merged(make_parts(count, count, 37, head_dim), DType::kFloat32);
    }
  }
}

TEST_P(MergeResultsTest, WritesEveryDType) {
  expect_merged(make_parts(31, 3, 40, 128), DType::kFloat16);
  expect_merged(make_parts(32, 3, 40, 128), DType::kBFloat16);
}

TEST_P(MergeResultsTest, LeavesOutTheLogSumExp) {
  expect_merged(make_parts(33, 2, 9, 64), DType::kFloat32, false);
}

TEST_P(MergeResultsTest, GivesTheEmptySetForEmptyParts) {
  Parts parts = make_parts(34, 2, 1, 64);
  for (std::size_t p = 0; p < 2; ++p) {
    parts.lses[p] = {-kInfinity};
    // What stands in the output of an empty part does not matter.
    parts.outs[p].assign(64, std::numeric_limits<float>::quiet_NaN());
  }
  parts.out.assign(64, 0.0);
  parts.lse = {-std::numeric_limits<double>::infinity()};
  expect_merged(parts, DType::kFloat32);
}

TEST_P(MergeResultsTest, MergesNothing) {
  const transfer::Buffer out = allocate<float>(1);
  merge_results(*stream_, {}, 0, 64, out.data(), DType::kFloat32, nullptr);

  EXPECT_EQ(download<std::uint32_t>(out.data(), 1)[0], 0xA5A5A5A5U);
}

}  // namespace
}  // namespace kvtier::attention
