#include "services/base/minimum_rate.h"

#include <gtest/gtest.h>

#include <random>

namespace kvtier::services {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr MinimumRate kRate{.window = seconds(10), .bytes_per_second = 1000};
const RateWindow::TimePoint kStart{std::chrono::hours(1)};

TEST(RateWindowTest, CutsOffWhoMovesNothingWhenTheWindowIsOver) {
  RateWindow window;
  window.wait(kStart);
  EXPECT_FALSE(window.too_slow(kStart + milliseconds(9'999), kRate));
  EXPECT_TRUE(window.too_slow(kStart + seconds(10), kRate));
}

TEST(RateWindowTest, AsksForTheRateInEveryWindow) {
  RateWindow window;
  window.wait(kStart);
  window.moved(10'000);
  EXPECT_FALSE(window.too_slow(kStart + seconds(10), kRate));
  window.moved(9'999);
  EXPECT_TRUE(window.too_slow(kStart + seconds(20), kRate)) << "what came before does not count";
}

TEST(RateWindowTest, TimeThatTheServerTakesDoesNotCount) {
  RateWindow window;
  for (int i = 0; i < 100; ++i) {
    window.wait(kStart + seconds(i));
    window.go_on(kStart + seconds(i) + milliseconds(99));
  }
  EXPECT_FALSE(window.too_slow(kStart + seconds(1000), kRate));
  window.wait(kStart + seconds(1000));
  EXPECT_TRUE(window.too_slow(kStart + seconds(1001), kRate)) << "9.9 s and 1 s";
}

TEST(RateWindowTest, ClockThatIsBehindIsNoReason) {
  RateWindow window;
  window.wait(kStart);
  EXPECT_FALSE(window.too_slow(kStart - std::chrono::hours(1), kRate));
  EXPECT_FALSE(window.too_slow(kStart + seconds(9), kRate));
}

TEST(RateWindowTest, KeepsWhoeverIsAsFastAndCutsOffWhoeverIsHalfAsFast) {
  const auto seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (const bool fast : {true, false}) {
    RateWindow window;
    window.wait(kStart);
    auto now = kStart;
    auto checked = kStart;
    bool cut = false;
    while (now < kStart + seconds(300)) {
      const milliseconds step(1 + static_cast<std::int64_t>(random() % 100));
      now += step;
      window.moved(fast ? step.count() : step.count() / 2);
      if (now - checked < seconds(1)) continue;
      checked = now;
      cut = cut || window.too_slow(now, kRate);
    }
    EXPECT_EQ(cut, !fast) << "seed " << seed;
  }
}

}  // namespace
}  // namespace kvtier::services
