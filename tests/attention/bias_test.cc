#include "tests/attention/attention_fixture.h"

#include <algorithm>
#include <cmath>

namespace kvtier::attention {
namespace {

class BiasTest : public AttentionTest {};
KVTIER_INSTANTIATE_BACKENDS(BiasTest);

TEST_P(BiasTest, IsAddedToTheLogitsForEveryShape) {
  std::uint64_t seed = 500;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int head_dim : {64, 96, 128, 256}) {
      for (const int group : {1, 3, 4, 8, 16}) {
        for (const int heads : {1, group}) {
          ++seed;
          SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(dtype_name(dtype)) +
                       ", head_dim " + std::to_string(head_dim) + ", group " +
                       std::to_string(group) + ", biases of " + std::to_string(heads));
          Problem problem = make_problem(seed, dtype, head_dim, 2, group, {75, 131}, {0, 3});
          select_at_random(problem, seed, 0.6);
          bias_at_random(problem, seed, heads);
          problem.staged_capacity = static_cast<std::int64_t>(seed % 3) * 16;
          expect_oracle(problem);
        }
      }
    }
  }
}

TEST_P(BiasTest, GoesWithRowsThatAreSplitAndMerged) {
  for (const int heads : {1, 4}) {
    for (const std::int64_t staged : {0, 100, 3000}) {
      Problem problem = make_problem(3, DType::kBFloat16, 64, 1, 4, {3500, 40, 900}, {0});
      select_at_random(problem, 4, 0.7);
      bias_at_random(problem, 5, heads);
      problem.staged_capacity = staged;
      expect_oracle(problem);
      problem.pages_on_device = true;
      expect_oracle(problem);
    }
  }
}

TEST_P(BiasTest, ComesAfterTheSoftCap) {
  Problem problem = make_problem(8, DType::kBFloat16, 128, 2, 4, {200}, {0, 1});
  select_at_random(problem, 4, 0.7);
  bias_at_random(problem, 5, 4);
  problem.logit_softcap = 1.5F;
  expect_oracle(problem);
}

TEST_P(BiasTest, OfZeroChangesNoBit) {
  Problem problem = make_problem(9, DType::kBFloat16, 64, 2, 4, {300}, {0, 1});
  select_at_random(problem, 4, 0.7);
  const Outcome without = run(problem);
  for (const int heads : {1, 4}) {
    bias_at_random(problem, 5, heads);
    for (auto& list : problem.selected) {
      for (SelectedRow& row : list) std::fill(row.biases.begin(), row.biases.end(), 0.0F);
    }
    const Outcome with = run(problem);
    EXPECT_EQ(with.bytes, without.bytes);
    EXPECT_EQ(with.lse, without.lse);
  }
}

/// A token of chance 2^-n counts 2^n times: large biases stay finite and take over.
TEST_P(BiasTest, MayBeLarge) {
  Problem problem = make_problem(10, DType::kBFloat16, 64, 1, 2, {120}, {0});
  problem.selected = {{{.id = 30, .mask = 3, .biases = {80.0F}},
                       {.id = 60, .mask = 3, .biases = {79.5F}},
                       {.id = 90, .mask = 3, .biases = {0.0F}}}};
  problem.bias_heads = 1;
  expect_oracle(problem);
}

}  // namespace
}  // namespace kvtier::attention
