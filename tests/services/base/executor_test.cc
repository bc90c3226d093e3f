#include "services/base/executor.h"

#include "tests/support/eventually.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <string>
#include <vector>

namespace kvtier::services::testing {
namespace {

using kvtier::testing::await;
using kvtier::testing::kPatience;
using Clock = std::chrono::steady_clock;

/// One thread, and a clock that only the tasks move: whose piece is next follows from the queueing.
class FairPoolTest : public ::testing::Test {
 protected:
  FairPoolTest()
      : pool_(
            make_thread_pool(1, [this] { return Clock::time_point(std::chrono::seconds(now_)); })),
        gate_(pool_->make_strand({.tenant = 99})) {
    gate_->post([this] {
      closed_.set_value();
      await(open_);
    });
    // Else the thread might take what is posted next before it.
    await(closed_);
  }
  std::unique_ptr<Strand> strand(std::uint32_t tenant, const void* engine = nullptr,
                                 int weight = 1) {
    return pool_->make_strand({.tenant = tenant, .weight = weight, .engine = engine});
  }
  /// A task of so many pieces of one length each.
  Strand::Task pieces(char name, int count, std::int64_t seconds) {
    return [this, name, count, seconds, did = 0]() mutable {
      order_ += name;
      now_ += seconds;
      return ++did == count;
    };
  }
  const std::string& run() {
    open_.set_value();
    pool_->finish();
    return order_;
  }

  std::atomic<std::int64_t> now_{1};
  std::promise<void> closed_, open_;
  std::string order_;
  std::unique_ptr<Executor> pool_;
  std::unique_ptr<Strand> gate_;
};

TEST_F(FairPoolTest, ManyStrandsOfOneTenantCountAsOne) {
  std::vector<std::unique_ptr<Strand>> strands;
  for (int i = 0; i < 4; ++i) {
    strands.push_back(strand(1));
    strands.back()->post(pieces('b', 2, 1));
  }
  strands.push_back(strand(2));
  strands.back()->post(pieces('a', 4, 1));
  EXPECT_EQ(run(),
            "babababab"
            "bbb");
}

TEST_F(FairPoolTest, SharesTimeAndNotPieces) {
  const auto slow = strand(1);
  const auto quick = strand(2);
  slow->post(pieces('b', 3, 4));
  quick->post(pieces('a', 12, 1));
  EXPECT_EQ(run(),
            "b"
            "aaaa"
            "ba"
            "aaa"
            "ba"
            "aaa");
}

TEST_F(FairPoolTest, FollowsWeights) {
  const auto light = strand(1);
  const auto heavy = strand(2, nullptr, 3);
  light->post(pieces('b', 3, 3));
  heavy->post(pieces('a', 9, 3));
  const std::string order = run();
  EXPECT_EQ(order.size(), 12U);
  for (std::size_t end = 4; end <= order.size(); end += 4) {
    const auto part = order.substr(0, end);
    EXPECT_EQ(std::count(part.begin(), part.end(), 'a'), static_cast<std::ptrdiff_t>(3 * end / 4));
  }
}

TEST_F(FairPoolTest, OwesNothingForTimeInWhichNobodyAsked) {
  const auto busy = strand(1);
  const auto late = strand(2);
  busy->post([this, did = 0, &late]() mutable {
    order_ += 'b';
    now_ += 10;
    if (++did == 5) late->post(pieces('a', 20, 1));
    return did == 8;
  });
  EXPECT_EQ(run(),
            "bbbbb"
            "aaaaaaaaaa"
            "b"
            "aaaaaaaaaa"
            "bb");
}

TEST_F(FairPoolTest, EnginesAreSharedOutApart) {
  const int first = 0;
  const int second = 0;
  const auto b1 = strand(1, &first);
  const auto b2 = strand(1, &second);
  const auto a = strand(2, &second);
  b1->post(pieces('x', 2, 1));
  b2->post(pieces('y', 2, 1));
  a->post(pieces('a', 2, 1));
  const std::string order = run();
  EXPECT_LE(order.find('a'), 2U);
  EXPECT_LT(order.rfind('a'), order.size() - 1);
}

TEST_F(FairPoolTest, StrandsOfATenantTakeTurns) {
  const auto one = strand(1);
  const auto two = strand(1);
  one->post(pieces('a', 3, 1));
  two->post(pieces('b', 3, 1));
  EXPECT_EQ(run(), "ababab");
}

TEST(EngineGateTest, RunsOnePieceAtATimeAndBlocksNoThreads) {
  const std::unique_ptr<Executor> pool = make_thread_pool(2);
  const int engine = 0;
  std::vector<std::unique_ptr<Strand>> strands;
  std::promise<void> holds, go, other;
  strands.push_back(pool->make_strand({.tenant = 1, .engine = &engine}));
  strands.back()->post([&] {
    holds.set_value();
    await(go);
  });
  await(holds);
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  for (int i = 0; i < 4; ++i) {
    strands.push_back(pool->make_strand({.tenant = 1, .engine = &engine}));
    strands.back()->post([&] {
      if (++inside != 1) overlapped = true;
      --inside;
    });
  }
  strands.push_back(pool->make_strand());
  strands.back()->post([&] { other.set_value(); });
  await(other);
  go.set_value();
  pool->finish();
  EXPECT_FALSE(overlapped);
}

TEST(EngineGateTest, ATaskThatStepsAsideLetsOthersHaveItsEngine) {
  const std::unique_ptr<Executor> pool = make_thread_pool(2);
  const int engine = 0;
  const auto first = pool->make_strand({.tenant = 1, .engine = &engine});
  const auto second = pool->make_strand({.tenant = 1, .engine = &engine});
  std::promise<void> holds, passed;
  std::future_status status = std::future_status::timeout;
  first->post([&] {
    holds.set_value();
    pool->on_tier_wait(true);
    status = passed.get_future().wait_for(kPatience);
    pool->on_tier_wait(false);
  });
  await(holds);
  second->post([&] { passed.set_value(); });
  pool->finish();
  EXPECT_EQ(status, std::future_status::ready);
}

}  // namespace
}  // namespace kvtier::services::testing
