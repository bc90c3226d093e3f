#include "transfer/row_cache/row_cache_set.h"

#include "support/model_calls.h"
#include "tests/transfer/row_cache/row_cache_set_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace kvtier::transfer {
namespace {

RowCacheSet empty_set() {
  RowCacheSet set;
  std::memset(&set, kEmptySetByte, sizeof(set));
  return set;
}

std::vector<std::int32_t> tokens_of(const RowCacheSet& set) {
  return {std::begin(set.tokens), std::end(set.tokens)};
}

struct Use {
  std::int32_t token;
  std::uint32_t heads;
};

/// Up to 40 tokens of 60, each once, by up to 16 query heads.
std::vector<Use> random_step(std::mt19937& random) {
  std::vector<Use> step;
  for (std::int32_t token = 0; token < 60; ++token) {
    step.push_back({token, 1 + static_cast<std::uint32_t>(random() % 16)});
  }
  std::shuffle(step.begin(), step.end(), random);
  step.resize(random() % 40);
  return step;
}

TEST(RowCacheSet, ChoosesAsThePlainModelDoes) {
  constexpr int kSeeds = 20;
  const int num_steps = testing::num_model_calls(2'000) / kSeeds;  // of a policy
  for (const RowCachePolicy policy :
       {RowCachePolicy::kClock, RowCachePolicy::kLru, RowCachePolicy::kScore}) {
    for (unsigned seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(policy)) + ", seed " +
                   std::to_string(seed));
      std::mt19937 random(seed);
      RowCacheSet set = empty_set();
      ModelSet model(policy);
      int evictions = 0, prefetched_rows = 0, useful = 0, wasted = 0;
      for (int i = 0; i < num_steps; ++i) {
        const bool prefetched = i % 3 == 2;
        OpenSet open(set, prefetched);
        model.begin(prefetched);
        std::vector<Use> missing;
        for (const Use& use : random_step(random)) {
          const int way = open.find(use.token, use.heads);
          ASSERT_EQ(way, model.find(use.token, use.heads).value_or(-1)) << "step " << i;
          if (way < 0) missing.push_back(use);
        }
        if (!prefetched) {
          const int now = model.end_of_finding();
          ASSERT_EQ(open.count_uses(policy), now) << "step " << i;
          useful += now;
        }
        for (const Use& use : missing) {
          RowCacheChange change, model_change;
          const int way = open.admit(policy, use.token, use.heads, change);
          ASSERT_EQ(way, model.admit(use.token, use.heads, model_change).value_or(-1));
          ASSERT_EQ(change.evicts, model_change.evicts);
          ASSERT_EQ(change.wastes, model_change.wastes);
          evictions += change.evicts ? 1 : 0;
          wasted += change.wastes ? 1 : 0;
          prefetched_rows += prefetched && way >= 0 ? 1 : 0;
        }
        ASSERT_EQ(tokens_of(set), model.tokens()) << "step " << i;
      }
      EXPECT_GT(evictions, 100);
      EXPECT_GT(useful, 0);
      EXPECT_EQ(prefetched_rows, useful + wasted + model.num_prefetched());
    }
  }
}

TEST(RowCacheSet, GivesUpNoRowThatTheStepUses) {
  RowCacheSet set = empty_set();
  std::vector<std::int32_t> first;
  RowCacheChange change;
  {
    OpenSet open(set);
    for (std::int32_t token = 0; token < kSetWays; ++token) {
      first.push_back(open.admit(RowCachePolicy::kLru, token, 1, change));
      EXPECT_FALSE(change.evicts);
    }
    EXPECT_EQ(open.admit(RowCachePolicy::kLru, 100, 1, change), -1);
  }
  OpenSet open(set);
  for (std::int32_t token = 0; token + 1 < kSetWays; ++token) {
    EXPECT_EQ(open.find(token, 1), first[static_cast<std::size_t>(token)]);
  }
  EXPECT_EQ(open.admit(RowCachePolicy::kLru, 100, 1, change), first.back());
  EXPECT_TRUE(change.evicts);
  EXPECT_EQ(open.admit(RowCachePolicy::kLru, 101, 1, change), -1);
}

TEST(RowCacheSet, PrefetchedRowsTakeNoPlaceOfTheLastStep) {
  RowCacheSet set = empty_set();
  RowCacheChange change;
  int place = -1;  // of token 7
  {
    OpenSet open(set);
    for (std::int32_t token = 0; token < kSetWays; ++token) {
      const int way = open.admit(RowCachePolicy::kScore, token, 4, change);
      if (token == 7) place = way;
    }
  }
  EXPECT_EQ(OpenSet(set, true).admit(RowCachePolicy::kScore, 100, 16, change), -1);
  {
    OpenSet open(set);
    for (std::int32_t token = 0; token < kSetWays; ++token) {
      if (token != 7) (void)open.find(token, 1);
    }
    (void)open.count_uses(RowCachePolicy::kScore);
  }
  const std::uint32_t hand = set.hand;
  {
    OpenSet open(set, true);
    EXPECT_EQ(open.admit(RowCachePolicy::kScore, 100, 2, change), place);
    EXPECT_TRUE(change.evicts);
    EXPECT_FALSE(change.wastes);
    EXPECT_EQ(open.admit(RowCachePolicy::kScore, 101, 16, change), -1) << "100 is wanted as well";
  }
  EXPECT_EQ(OpenSet(set, true).admit(RowCachePolicy::kScore, 102, 1, change), place);
  EXPECT_TRUE(change.wastes);
  EXPECT_EQ(set.hand, hand);
  {
    OpenSet open(set);
    EXPECT_EQ(open.find(102, 1), place);
    EXPECT_EQ(open.count_uses(RowCachePolicy::kScore), 1);
  }
  OpenSet open(set);
  EXPECT_EQ(open.find(102, 1), place);
  EXPECT_EQ(open.count_uses(RowCachePolicy::kScore), 0);
}

TEST(RowCacheSet, TokensSpreadOverAllSets) {
  for (const int num_sets : {1, 3, 128, 2047}) {
    std::vector<int> counts(static_cast<std::size_t>(num_sets));
    for (std::int32_t token = 0; token < 64 * num_sets; ++token) {
      const int set = row_cache_set(token, num_sets);
      ASSERT_GE(set, 0);
      ASSERT_LT(set, num_sets);
      ++counts[static_cast<std::size_t>(set)];
    }
    EXPECT_GT(*std::min_element(counts.begin(), counts.end()), 48);
    EXPECT_LT(*std::max_element(counts.begin(), counts.end()), 80);
  }
  EXPECT_EQ(row_cache_sets(1), 1);
  EXPECT_EQ(row_cache_sets(32), 1);
  EXPECT_EQ(row_cache_sets(33), 2);
}

}  // namespace
}  // namespace kvtier::transfer
