#include "transfer/device/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::transfer {
namespace {

using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// The ranges of one call, in ascending order.
Ranges ranges_of(std::int64_t count, std::int64_t grain) {
  std::mutex mutex;
  Ranges ranges;
  parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
    const std::lock_guard lock(mutex);
    ranges.emplace_back(begin, end);
  });
  std::ranges::sort(ranges);
  return ranges;
}

TEST(ParallelFor, CoversEachIndexOnceInRangesOfTheGrain) {
  for (const std::int64_t count : {0, 1, 2, 7, 63, 64, 65, 1000, 4097}) {
    for (const std::int64_t grain : {1, 2, 64, 1000, 100000}) {
      SCOPED_TRACE("count " + std::to_string(count) + ", grain " + std::to_string(grain));
      std::int64_t next = 0;
      for (const auto& [begin, end] : ranges_of(count, grain)) {
        EXPECT_EQ(begin, next);
        EXPECT_GT(end, begin);
        if (end != count) {
          EXPECT_GE(end - begin, grain);
        }
        next = end;
      }
      EXPECT_EQ(next, count);
    }
  }
}

TEST(ParallelFor, TakesNoIndexOfNothing) {
  EXPECT_TRUE(ranges_of(0, 1).empty());
  EXPECT_TRUE(ranges_of(-5, 1).empty());
}

TEST(ParallelFor, TakesGrainsBelowOneAsOne) {
  EXPECT_EQ(ranges_of(3, 0).back().second, 3);
  EXPECT_EQ(ranges_of(3, -7).back().second, 3);
}

TEST(ParallelFor, CountsBeyond32Bits) {
  constexpr std::int64_t kCount = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kGrain = kCount / 3;

  const Ranges ranges = ranges_of(kCount, kGrain);

  EXPECT_EQ(ranges.front().first, 0);
  EXPECT_EQ(ranges.back().second, kCount);
}

TEST(ParallelFor, RethrowsWhatABodyThrows) {
  for (const std::int64_t grain : {1, 1000}) {
    try {
      parallel_for(1000, grain, [](std::int64_t begin, std::int64_t end) {
        if (begin <= 500 && 500 < end) throw std::runtime_error("at 500");
      });
      FAIL() << "expected an exception, grain " << grain;
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "at 500");
    }
  }
}

TEST(ParallelFor, RethrowsOneOfSeveral) {
  EXPECT_THROW(parallel_for(1000, 1,
                            [](std::int64_t begin, std::int64_t) {
                              throw std::runtime_error(std::to_string(begin));
                            }),
               std::runtime_error);
  EXPECT_EQ(ranges_of(10, 1).back().second, 10);  // usable afterwards
}

TEST(ParallelFor, Nests) {
  constexpr std::int64_t kOuter = 37;
  constexpr std::int64_t kInner = 53;
  std::vector<std::atomic<int>> counts(kOuter * kInner);

  parallel_for(kOuter, 1, [&](std::int64_t outer_begin, std::int64_t outer_end) {
    for (std::int64_t outer = outer_begin; outer < outer_end; ++outer) {
      parallel_for(kInner, 3, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t inner = begin; inner < end; ++inner) {
          ++counts[static_cast<std::size_t>(outer * kInner + inner)];
        }
      });
    }
  });

  for (const std::atomic<int>& count : counts) EXPECT_EQ(count.load(), 1);
}

TEST(ParallelFor, NestedCallRethrows) {
  EXPECT_THROW(parallel_for(8, 1,
                            [](std::int64_t, std::int64_t) {
                              parallel_for(8, 1, [](std::int64_t begin, std::int64_t end) {
                                if (begin <= 3 && 3 < end) throw std::runtime_error("inner");
                              });
                            }),
               std::runtime_error);
}

TEST(ParallelThreads, IsAtLeastOne) { EXPECT_GE(parallel_threads(), 1); }

}  // namespace
}  // namespace kvtier::transfer
