#include "scoring/exchange_lease.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

namespace kvtier::scoring {
namespace {

constexpr int kDevice = 1000;  // no device that an engine of this program has
constexpr int kMost = 3;

TEST(ExchangeLeaseTest, HoldsUpToTheLimit) {
  std::vector<ExchangeLease> leases;
  for (int i = 0; i < kMost; ++i) EXPECT_TRUE(leases.emplace_back(kDevice, kMost).held());
  EXPECT_FALSE(ExchangeLease(kDevice, kMost).held());
  EXPECT_TRUE(ExchangeLease(kDevice + 1, kMost).held()) << "devices count apart";
  leases.pop_back();
  EXPECT_TRUE(ExchangeLease(kDevice, kMost).held()) << "one was given back";
}

TEST(ExchangeLeaseTest, MovesWithItsOwner) {
  std::optional<ExchangeLease> first(std::in_place, kDevice, 1);
  ExchangeLease second(std::move(*first));
  EXPECT_FALSE(first->held());
  EXPECT_TRUE(second.held());
  first.reset();
  EXPECT_FALSE(ExchangeLease(kDevice, 1).held()) << "the moved-from one gives nothing back";
  second = ExchangeLease();
  EXPECT_TRUE(ExchangeLease(kDevice, 1).held());
}

TEST(ExchangeLeaseTest, IsNotHeldByDefault) {
  EXPECT_FALSE(ExchangeLease().held());
  EXPECT_FALSE(ExchangeLease(kDevice, 0).held());
}

}  // namespace
}  // namespace kvtier::scoring
