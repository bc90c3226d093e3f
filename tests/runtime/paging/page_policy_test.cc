#include "runtime/paging/page_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace kvtier::runtime {
namespace {

using Id = PageOrder::Id;
using Ids = std::vector<Id>;

Ids take(PageOrder& order, std::size_t count) {
  Ids chosen = order.choose(count, [](Id) { return true; });
  for (const Id page : chosen) order.leave(page);
  return chosen;
}

void enter_all(PageOrder& order, const Ids& pages) {
  for (const Id page : pages) order.enter(page);
}

TEST(PageOrder, IsThatOfTheRowsThatWereRead) {
  PageOrder order(4);
  enter_all(order, {1, 2, 3, 4});
  order.use(1, 50);
  order.use(2, 7);
  order.use(4, 40);
  order.use(2, 7);
  EXPECT_EQ(take(order, 3), Ids({3, 2, 4}));

  order.enter(2);  // with what was read of it before
  order.enter(5);
  EXPECT_EQ(take(order, 3), Ids({5, 2, 1}));
}

TEST(PageOrder, Forgets) {
  PageOrder order(2);
  enter_all(order, {1, 2});
  order.use(1, 1000);
  for (int i = 0; i < 100; ++i) order.use(2, 1);
  EXPECT_EQ(take(order, 1), Ids({1}));
}

TEST(PageOrder, ComparesAShareOfManyPagesAndAllInTurn) {
  constexpr Id kPages = 8192;
  PageOrder order(kPages);
  for (Id page = 1; page <= kPages; ++page) {
    order.enter(page);
    order.use(page, page % 64 == 0 ? 1 : 1000);
  }
  std::set<Id> gone;
  for (int i = 0; i < 8; ++i) {
    for (const Id page : take(order, 16)) {
      EXPECT_EQ(page % 64, 0U);  // 16 of 1,024
      gone.insert(page);
    }
  }
  EXPECT_EQ(gone.size(), kPages / 64);
}

/// What the order should be, by the plainest means: all pages looked at each time.
class Model {
 public:
  explicit Model(std::size_t num_frames) : frames_(num_frames) {}

  void enter(Id page) {
    use(page, 0);
    resident_.insert(page);
  }
  void use(Id page, std::uint32_t rows) {
    const float before = mass(page);
    last_[page] = ++uses_;
    masses_[page] = before + static_cast<float>(rows);
  }
  void leave(Id page) { resident_.erase(page); }
  void forget(Id page) {
    resident_.erase(page);
    masses_.erase(page);
  }
  Ids choose(std::size_t count, const std::set<Id>& may_go) {
    Ids order;
    std::ranges::set_intersection(resident_, may_go, std::back_inserter(order));
    std::ranges::sort(order, {}, [&](Id page) { return std::pair(mass(page), last_[page]); });
    order.resize(std::min(order.size(), count));
    return order;
  }

 private:
  float mass(Id page) const {
    const auto found = masses_.find(page);
    if (found == masses_.end()) return 0.0F;
    const auto age = static_cast<double>(uses_ - last_.at(page)) / static_cast<double>(frames_);
    return found->second * static_cast<float>(std::exp2(-age / 2.0));
  }

  std::size_t frames_;
  std::set<Id> resident_;
  std::map<Id, float> masses_;
  std::map<Id, std::uint64_t> last_;
  std::uint64_t uses_ = 0;
};

TEST(PageOrder, IsThatOfAPlainModelInRandomCalls) {
  constexpr std::size_t kRoom = 30;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    std::mt19937_64 random(seed);
    PageOrder order(kRoom);
    Model model(kRoom);
    std::set<Id> resident, evicted;
    for (int call = 0; call < 20'000; ++call) {
      const Id page = 1 + random() % 60;
      if (random() % 100 == 0) {
        if (resident.erase(page) + evicted.erase(page) == 0) continue;
        order.forget(page);
        model.forget(page);
        continue;
      }
      const auto rows = static_cast<std::uint32_t>(random() % 65);
      if (resident.count(page) + evicted.count(page) > 0) {
        order.use(page, rows);
        model.use(page, rows);
      }
      if (resident.count(page) > 0) continue;
      if (resident.size() == kRoom) {
        std::set<Id> may_go;
        for (const Id candidate : resident) {
          if (random() % 4 != 0) may_go.insert(candidate);
        }
        const std::size_t count = 1 + random() % 8;
        const Ids chosen = order.choose(count, [&](Id id) { return may_go.count(id) > 0; });
        ASSERT_EQ(chosen, model.choose(count, may_go)) << "seed " << seed << ", call " << call;
        for (const Id gone : chosen) {
          if (random() % 5 == 0) continue;  // it was refused, and stays
          order.leave(gone);
          model.leave(gone);
          resident.erase(gone);
          evicted.insert(gone);
        }
      }
      if (resident.size() == kRoom) continue;
      evicted.erase(page);
      resident.insert(page);
      order.enter(page);
      model.enter(page);
    }
  }
}

TEST(PageOrder, ChoosesEachPageOnceAndOnlyThoseThatMayGo) {
  PageOrder order(8);
  enter_all(order, {1, 2, 3, 4, 5, 6, 7, 8});
  for (const Id page : {2U, 4U, 6U}) order.use(page, 3);
  Ids chosen = order.choose(100, [](Id page) { return page > 3; });
  std::ranges::sort(chosen);
  EXPECT_EQ(chosen, Ids({4, 5, 6, 7, 8}));
  EXPECT_TRUE(order.choose(3, [](Id) { return false; }).empty());
}

}  // namespace
}  // namespace kvtier::runtime
