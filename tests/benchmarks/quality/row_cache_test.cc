#include "benchmarks/quality/row_cache.h"

#include "tests/services/evaluation/trace_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace kvtier::quality {
namespace {

using Tokens = std::set<std::int32_t>;

/// Most hits of `capacity` rows, by trying all: after each step, any of those kept and of the step.
std::int64_t most_hits(const SelectedSteps& steps, std::size_t at, const Tokens& kept,
                       std::size_t capacity,
                       std::map<std::pair<std::size_t, Tokens>, std::int64_t>& seen) {
  if (at == steps.size()) return 0;
  const auto known = seen.find({at, kept});
  if (known != seen.end()) return known->second;
  Tokens all = kept;
  all.insert(steps[at].begin(), steps[at].end());
  const std::vector<std::int32_t> candidates(all.begin(), all.end());
  std::int64_t best = 0;
  for (unsigned choice = 0; choice < 1U << candidates.size(); ++choice) {
    Tokens next;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (((choice >> i) & 1U) != 0) next.insert(candidates[i]);
    }
    if (next.size() <= capacity) {
      best = std::max(best, most_hits(steps, at + 1, next, capacity, seen));
    }
  }
  for (const std::int32_t token : steps[at]) best += kept.contains(token) ? 1 : 0;
  seen[{at, kept}] = best;
  return best;
}

TEST(RowCache, BeladyIsTheMostThatAnyChoiceGives) {
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    SelectedSteps steps;
    for (int i = 0; i < 7; ++i) {
      Tokens ids;
      const std::size_t count = 1 + random() % 3;
      while (ids.size() < count) ids.insert(static_cast<std::int32_t>(random() % 6));
      steps.emplace_back(ids.begin(), ids.end());
    }
    for (const int capacity : {1, 2, 3}) {
      std::map<std::pair<std::size_t, Tokens>, std::int64_t> seen;
      ASSERT_EQ(belady_hits(steps, capacity),
                most_hits(steps, 0, {}, static_cast<std::size_t>(capacity), seen))
          << "round " << round << ", capacity " << capacity;
    }
  }
}

TEST(RowCache, PoliciesHitWhatTheyHold) {
  SelectedSteps steps(3);
  for (std::int32_t token = 0; token < 20; ++token) {
    steps[0].push_back(token);
    steps[1].push_back(2 * token);
    steps[2].push_back(token);
  }
  EXPECT_EQ(num_selected(steps), 60);
  EXPECT_DOUBLE_EQ(step_overlap(steps), 0.5);
  for (const RowCachePolicy policy :
       {RowCachePolicy::kClock, RowCachePolicy::kLru, RowCachePolicy::kScore}) {
    EXPECT_EQ(policy_hits(steps, 64, policy, 4), 10 + 20);  // more room than ids
  }
  EXPECT_EQ(belady_hits(steps, 64), 30);
  EXPECT_EQ(belady_hits({}, 4), 0);
}

class RowCacheTraceTest : public services::FolderTest {};

TEST_F(RowCacheTraceTest, SelectsLikeStepsOfTheirOwn) {
  const services::TraceShape shape{.context = 400, .steps = 40, .head_dim = 64};
  services::write_trace(file("trace.safetensors"), services::make_layer(shape, 3));
  const services::Trace trace = services::Trace::open(file("trace.safetensors"));
  RetrievalConfig retrieval;
  retrieval.estimator = Estimator::kNormAware;
  retrieval.sparsity = 20;
  retrieval.sink_tokens = retrieval.recent_tokens = 16;
  const std::vector<SelectedSteps> selected = select_steps(trace, retrieval);

  ASSERT_EQ(std::ssize(selected), trace.kv_heads());
  for (const SelectedSteps& steps : selected) {
    ASSERT_EQ(steps.size(), 40U);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto visible = static_cast<std::int32_t>(400 + i + 1);
      EXPECT_EQ(std::ssize(steps[i]), visible / 20);
      EXPECT_TRUE(std::ranges::is_sorted(steps[i]));
      EXPECT_GE(steps[i].front(), 16);
      EXPECT_LT(steps[i].back(), visible - 16);
    }
    for (const RowCachePolicy policy :
         {RowCachePolicy::kClock, RowCachePolicy::kLru, RowCachePolicy::kScore}) {
      EXPECT_LE(policy_hits(steps, 32, policy, 4), belady_hits(steps, 32));
      EXPECT_GT(policy_hits(steps, 64, policy, 4), 0);
    }
  }
}

}  // namespace
}  // namespace kvtier::quality
