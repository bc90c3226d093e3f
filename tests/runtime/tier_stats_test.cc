#include "runtime/paging/page_tiers.h"
#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace kvtier::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

TEST(LatencyHistogram, CountsByTheFirstBoundThatIsNotExceeded) {
  LatencyHistogram times;
  times.add(nanoseconds(0));
  times.add(microseconds(50));
  times.add(nanoseconds(50'001));
  times.add(microseconds(100));
  times.add(std::chrono::hours(1));
  EXPECT_EQ(times.counts[0], 2U);
  EXPECT_EQ(times.counts[1], 2U);
  EXPECT_EQ(times.counts.back(), 1U);
  EXPECT_EQ(times.total(), 5U);
  EXPECT_EQ(times.nanoseconds, 3'600'000'200'001U);
  LatencyHistogram twice = times;
  twice += times;
  EXPECT_EQ(twice.total(), 10U);
  EXPECT_EQ(twice.counts[1], 4U);
  EXPECT_EQ(twice.nanoseconds, 2 * times.nanoseconds);
}

/// Every page that a tier is asked for, or offered, is in one counter, and in none of another tier.
void expect_sums(const Stats& stats, std::uint64_t page_bytes) {
  const Stats::Cumulative& sum = stats.cumulative;
  std::uint64_t hits = 0, misses = 0, corrupt = 0, read = 0, repaired = 0;
  std::uint64_t asked = stats.tiers.front().gets;
  for (const TierStats& tier : stats.tiers) {
    EXPECT_EQ(tier.gets,
              tier.hits + tier.misses + tier.corrupt + tier.get_timeouts + tier.get_failures);
    EXPECT_EQ(tier.puts, tier.stored + tier.refused + tier.put_timeouts + tier.put_failures);
    EXPECT_EQ(tier.bytes_read, tier.hits * page_bytes);
    EXPECT_EQ(tier.bytes_written, tier.stored * page_bytes);
    EXPECT_LE(tier.get_time.total(), tier.gets);
    EXPECT_LE(tier.put_time.total(), tier.puts);
    EXPECT_EQ(tier.gets, asked) << "what one has not is asked of the next";
    asked -= tier.hits;
    hits += tier.hits;
    misses += tier.misses;
    corrupt += tier.corrupt;
    read += tier.bytes_read;
    if (&tier != &stats.tiers.front()) {
      repaired += tier.hits;
      EXPECT_EQ(tier.puts, stats.tiers.front().stored) << "copies are of what the first has taken";
    }
  }
  EXPECT_EQ(asked, sum.pages_lost + sum.tier_unavailable);
  EXPECT_EQ(hits, sum.tier_hits);
  EXPECT_EQ(hits, sum.pages_restored);
  EXPECT_EQ(misses, sum.tier_misses);
  EXPECT_EQ(corrupt, sum.tier_corrupt);
  EXPECT_EQ(read, sum.tier_bytes_read);
  EXPECT_EQ(repaired, sum.pages_repaired);
  EXPECT_EQ(stats.tiers.front().bytes_written, sum.tier_bytes_written);
  EXPECT_EQ(stats.tiers.front().puts, stats.tiers.front().stored + sum.tier_refused);
}

class TierStatsTest : public EngineTest {};

TEST_P(TierStatsTest, CountersOfTiersAddUpWhateverFails) {
  const auto first = std::make_shared<FaultTier>();
  const auto copies = std::make_shared<FaultTier>(false);
  Config config = tiered_config(GetParam(), 44, first);
  config.memory.tiers.push_back(copies);
  Engine engine(config);
  const ModelConfig& model = engine.config().model;
  const std::uint64_t page_bytes = std::uint64_t{4} * 64 * 2 * kPageTokens;
  std::mt19937_64 random(7);
  const std::vector<FaultTier::Faults> faults{{},
                                              {},
                                              {.get = TierStatus::kUnavailable},
                                              {.flip = true},
                                              {.flip = true},
                                              {.get = TierStatus::kMiss},
                                              {.half = true},
                                              {.put = TierStatus::kUnavailable},
                                              {.put = TierStatus::kFull}};
  std::uint64_t failed = 0;
  for (int round = 0; round < 4; ++round) {
    std::vector<Session> sessions;
    sessions.push_back(engine.open());
    sessions.push_back(engine.open());
    for (std::uint64_t call = 0; call < 60; ++call) {
      first->set(faults[random() % faults.size()]);
      copies->set(faults[random() % faults.size()]);
      Session& session = sessions[random() % 2];
      const int layer = static_cast<int>(random() % 2);
      const auto error = error_of([&] {
        if (call % 2 == 0) return append_random(session, model, layer, 48, call);
        CallTensors tensors(model, 2, call);
        session.decode(layer, tensors.inputs(), tensors.outputs());
      });
      if (error) ++failed;
    }
    expect_sums(engine.stats(), page_bytes);
  }
  const Stats stats = engine.stats();
  ASSERT_EQ(stats.tiers.size(), 2U);
  EXPECT_EQ(stats.tiers[0].kind, "custom");
  EXPECT_GT(failed, 0U);
  // None of the counters is one that stands still.
  EXPECT_GT(stats.cumulative.pages_repaired, 0U);
  EXPECT_GT(stats.cumulative.pages_lost, 0U);
  EXPECT_GT(stats.tiers[0].hits, 0U);
  const TierStats& one = stats.tiers[0];
  const TierStats& other = stats.tiers[1];
  EXPECT_GT(one.corrupt + other.corrupt, 0U);
  EXPECT_GT(one.misses + other.misses, 0U);
  EXPECT_GT(one.get_failures + other.get_failures, 0U);
  EXPECT_GT(one.refused + other.refused, 0U);
  EXPECT_GT(one.put_failures + other.put_failures, 0U);
}

KVTIER_INSTANTIATE_BACKENDS(TierStatsTest);

/// Answers with one bit of each page turned, the page told of what it answers.
class TurningTier final : public PageTier {
 public:
  void put(std::span<TierPut> pages, Deadline deadline) override { pages_.put(pages, deadline); }
  void get(std::span<TierGet> pages, Deadline deadline) override {
    pages_.get(pages, deadline);
    for (TierGet& page : pages) {
      const std::size_t bit = random_() % (8 * page.bytes.size());
      page.bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      if (random_() % 2 == 0) page.crc = crc32c(page.bytes);
    }
  }
  void remove(std::span<const PageKey> keys, Deadline deadline) override {
    pages_.remove(keys, deadline);
  }
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override { return 1U << 24U; }
  [[nodiscard]] bool retains() const noexcept override { return true; }
  [[nodiscard]] TierStats stats() const override { return {}; }
  [[nodiscard]] std::string describe() const override { return "turning tier"; }

 private:
  FaultTier pages_;
  std::mt19937_64 random_{11};
};

TEST(PageTiersTest, TenThousandBitsThatTurnOnTheWayBackAreFoundAndNoneIsServed) {
  constexpr std::size_t kPageBytes = 4096;
  constexpr std::uint64_t kPages = 10'000;
  runtime::PageTiers tiers({std::make_shared<TurningTier>()}, kPageBytes, std::chrono::seconds(60),
                           {});
  std::vector<std::byte> bytes(kPageBytes), back(kPageBytes);
  std::mt19937_64 random(12);
  for (std::uint64_t i = 0; i < kPages; ++i) {
    bytes[random() % kPageBytes] = static_cast<std::byte>(random());
    runtime::PageOut out{.version = {.page = 1 + i % 50, .generation = i}, .bytes = bytes};
    tiers.write({&out, 1});
    ASSERT_TRUE(out.stored);
    runtime::PageIn in{.version = out.version, .bytes = back, .crc = out.crc};
    tiers.read({&in, 1});
    ASSERT_EQ(in.outcome, runtime::PageIn::Outcome::kLost) << "page " << i;
    tiers.remove({&out.version, 1});
  }
  Stats stats;
  tiers.add_to(stats);
  EXPECT_EQ(stats.cumulative.tier_corrupt, kPages);
  EXPECT_EQ(stats.cumulative.tier_hits, 0U);
}

}  // namespace
}  // namespace kvtier::testing
