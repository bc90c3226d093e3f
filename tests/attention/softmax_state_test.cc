#include "attention/softmax_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace kvtier::attention {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// exp, log and three products of fp32, each within 2^-23.
constexpr float kTolerance = 1e-6F;

SoftmaxState of(const std::vector<float>& logits) {
  SoftmaxState state;
  for (const float x : logits) state.max = std::max(state.max, x);
  for (const float x : logits) state.sum += std::exp(x - state.max);
  return state;
}

double direct_lse(const std::vector<float>& logits) {
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  return std::log(sum);
}

std::vector<float> random_logits(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal(0.0F, 8.0F);
  std::vector<float> logits(count);
  for (float& x : logits) x = normal(engine);
  return logits;
}

TEST(SoftmaxState, MergesToTheStateOfTheUnion) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::vector<float> a = random_logits(seed, 1 + seed);
    const std::vector<float> b = random_logits(seed + 100, 30 - seed);
    const SoftmaxState merged = merge(of(a), of(b)).state;
    a.insert(a.end(), b.begin(), b.end());

    EXPECT_NEAR(static_cast<double>(merged.lse()), direct_lse(a), 1e-5);
  }
}

TEST(SoftmaxState, ScalesAccumulatorsWithTheSum) {
  const SoftmaxState a = of({1.0F, 2.0F});
  const SoftmaxState b = of({5.0F});
  const MergeWeights w = merge(a, b);

  EXPECT_NEAR(w.state.sum, a.sum * w.a + b.sum * w.b, kTolerance);
  EXPECT_NEAR(w.a, std::exp(-3.0F), kTolerance);
  EXPECT_EQ(w.b, 1.0F);
}

TEST(SoftmaxState, MergeIsCommutative) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const SoftmaxState a = of(random_logits(seed, 7));
    const SoftmaxState b = of(random_logits(seed + 50, 5));
    const MergeWeights ab = merge(a, b);
    const MergeWeights ba = merge(b, a);

    EXPECT_EQ(ab.state.max, ba.state.max);
    EXPECT_EQ(ab.state.sum, ba.state.sum);
    EXPECT_EQ(ab.a, ba.b);
    EXPECT_EQ(ab.b, ba.a);
  }
}

TEST(SoftmaxState, MergeIsAssociativeWithinRounding) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const SoftmaxState a = of(random_logits(seed, 7));
    const SoftmaxState b = of(random_logits(seed + 50, 5));
    const SoftmaxState c = of(random_logits(seed + 90, 3));
    const SoftmaxState left = merge(merge(a, b).state, c).state;
    const SoftmaxState right = merge(a, merge(b, c).state).state;

    EXPECT_EQ(left.max, right.max);
    EXPECT_NEAR(left.sum, right.sum, 4 * kTolerance * left.sum);
  }
}

TEST(SoftmaxState, EmptySetIsTheIdentity) {
  const SoftmaxState a = of({-3.0F, 200.0F, 7.0F});
  for (const MergeWeights& w : {merge(a, {}), merge({}, a)}) {
    EXPECT_EQ(w.state.max, a.max);
    EXPECT_EQ(w.state.sum, a.sum);
  }
  EXPECT_EQ(merge(a, {}).a, 1.0F);
  EXPECT_EQ(merge(a, {}).b, 0.0F);
}

TEST(SoftmaxState, EmptySetMakesNoNaN) {
  const MergeWeights w = merge({}, {});

  EXPECT_EQ(w.a, 0.0F);
  EXPECT_EQ(w.b, 0.0F);
  EXPECT_EQ(w.state.sum, 0.0F);
  EXPECT_EQ(w.state.lse(), -kInfinity);
  EXPECT_EQ(w.state.inverse_sum(), 0.0F);
}

// A logit of NaN, or of infinity, which has no weight of its own.
TEST(SoftmaxState, KeepsANaNOfTheSum) {
  for (const SoftmaxState& bad : {of({1.0F, std::nanf("")}), of({1.0F, kInfinity})}) {
    for (const SoftmaxState& state : {bad, merge(bad, of({2.0F})).state, merge({}, bad).state}) {
      EXPECT_TRUE(std::isnan(state.sum));
      EXPECT_TRUE(std::isnan(state.lse()));
      EXPECT_TRUE(std::isnan(state.inverse_sum()));
    }
  }
}

TEST(SoftCap, BoundsLogitsAndKeepsThemWithoutACap) {
  EXPECT_EQ(soft_cap(1234.5F, 0.0F), 1234.5F);
  EXPECT_NEAR(soft_cap(1000.0F, 30.0F), 30.0F, 1e-5F);
  EXPECT_NEAR(soft_cap(-10.0F, 30.0F), 30.0F * std::tanh(-1.0F / 3.0F), 1e-5F);
}

}  // namespace
}  // namespace kvtier::attention
