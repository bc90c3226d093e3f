#include "tests/transfer/tiers/file_tier_support.h"
#include "transfer/tiers/file_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <thread>

namespace kvtier::tiers::testing {
namespace {

constexpr std::array<std::size_t, 3> kSizes{100, 5000, 9000};

class FileTierModel : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, FileTierModel, ::testing::Values(1, 2, 3));

// With room for everything, a page is there when the model has it, and only then.
TEST_P(FileTierModel, AgreesWithAMapOverRestarts) {
  const TestFolder folder;
  FaultOps ops;
  FileTierOptions options = small_tier(folder, &ops);
  options.capacity_bytes = 512 * options.segment_bytes;
  auto tier = std::make_unique<FileTier>(options);
  std::map<std::uint64_t, std::size_t> model;
  std::mt19937_64 random(GetParam());
  for (int step = 0; step < 2000; ++step) {
    const std::uint64_t id = random() % 60;
    const std::size_t size = kSizes[random() % kSizes.size()];
    const std::uint64_t choice = random() % 100;
    if (choice < 1) {
      tier.reset();
      tier = std::make_unique<FileTier>(options);
    } else if (choice < 31) {
      const auto ids = ids_from(id, 1 + random() % 6);
      ASSERT_THAT(put_pages(*tier, ids, size), ::testing::Each(TierStatus::kOk)) << step;
      for (const std::uint64_t each : ids) model[each] = size;
    } else if (choice < 46) {
      remove_pages(*tier, {id, id + 1});
      model.erase(id);
      model.erase(id + 1);
    } else {
      const auto found = model.find(id);
      const bool there = found != model.end() && found->second == size;
      ASSERT_EQ(get_page(*tier, id, size), there ? TierStatus::kOk : TierStatus::kMiss) << step;
    }
    std::uint64_t bytes = 0;
    for (const auto& [each, held] : model) bytes += held;
    ASSERT_EQ(tier->stats().pages, model.size()) << step;
    ASSERT_EQ(tier->stats().used_bytes, bytes) << step;
  }
}

// Of a model that knows no eviction as many pages are missing as the tier says that it evicted.
TEST_P(FileTierModel, EvictsOnlyWhatItCounts) {
  const TestFolder folder;
  FaultOps ops;
  FileTierOptions options = small_tier(folder, &ops);
  options.capacity_bytes = 4 * options.segment_bytes;
  FileTier tier(options);
  std::map<std::uint64_t, std::size_t> model;
  std::uint64_t stored = 0;
  std::uint64_t evicted = 0;
  std::mt19937_64 random(GetParam());
  for (int step = 0; step < 2000; ++step) {
    const std::uint64_t id = random() % 300;
    const std::size_t size = kSizes[id % kSizes.size()];
    const std::uint64_t choice = random() % 10;
    if (choice < 1) {
      remove_pages(tier, {id});
      model.erase(id);
    } else if (choice < 5) {
      if (!tier.contains(key_of(id), size)) ++stored;
      ASSERT_EQ(put_page(tier, id, size), TierStatus::kOk);
      model[id] = size;
    } else {
      const TierStatus found = get_page(tier, id, size);
      ASSERT_TRUE(found == TierStatus::kMiss || (found == TierStatus::kOk && model.contains(id)))
          << step;
      if (found == TierStatus::kMiss) evicted += model.erase(id);
    }
  }
  for (std::uint64_t id = 0; id < 300; ++id) {
    if (get_page(tier, id, kSizes[id % kSizes.size()]) == TierStatus::kMiss) {
      evicted += model.erase(id);
    }
  }
  const TierStats stats = tier.stats();
  EXPECT_EQ(stats.pages, model.size());
  EXPECT_EQ(stored, stats.pages + stats.removed + stats.evicted);
  EXPECT_LE(evicted, stats.evicted);  // a page that was put again had been evicted unseen
  EXPECT_GT(evicted, 0U);
}

TEST(FileTierThreads, ShareATierThatEvicts) {
  for (const bool uring : {false, true}) {
    const TestFolder folder;
    FileTierOptions options = small_tier(folder);
    options.capacity_bytes = 4 * options.segment_bytes;
    options.uring = uring;
    FileTier tier(options);
    std::atomic<std::uint64_t> put = 0, found = 0;
    std::vector<std::thread> threads;
    for (std::uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937_64 random(thread);
        for (int step = 0; step < 120; ++step) {
          const auto ids = ids_from(random() % 100, 1 + random() % 8);
          const std::uint64_t choice = random() % 8;
          if (choice < 1) {
            remove_pages(tier, ids);
          } else if (choice < 4) {
            EXPECT_THAT(put_pages(tier, ids, 5000), ::testing::Each(TierStatus::kOk));
            put += ids.size();
          } else {
            const auto statuses = get_pages(tier, ids, 5000);
            EXPECT_THAT(statuses,
                        ::testing::Each(::testing::AnyOf(TierStatus::kOk, TierStatus::kMiss)));
            found += static_cast<std::uint64_t>(std::ranges::count(statuses, TierStatus::kOk));
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const TierStats stats = tier.stats();
    EXPECT_LE(stats.pages + stats.removed + stats.evicted, put);
    EXPECT_GT(stats.evicted, 0U);
    EXPECT_GT(found, 0U);
  }
}

}  // namespace
}  // namespace kvtier::tiers::testing
