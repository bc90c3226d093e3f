#include "runtime/paging/page_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace kvtier::runtime {
namespace {

using Id = PageOrder::Id;
using Ids = std::vector<Id>;

constexpr PagePolicy kAll[] = {PagePolicy::kClock, PagePolicy::kLru, PagePolicy::kS3Fifo,
                               PagePolicy::kScore};

Ids take(PageOrder& order, std::size_t count) {
  Ids chosen = order.choose(count, [](Id) { return true; });
  for (const Id page : chosen) order.leave(page);
  return chosen;
}

void enter_all(PageOrder& order, const Ids& pages) {
  for (const Id page : pages) order.enter(page);
}

TEST(PageOrder, OfTheClockSparesOnceWhatWasUsedSinceTheHandPassed) {
  const auto order = make_page_order(PagePolicy::kClock, 4);
  enter_all(*order, {1, 2, 3, 4});
  EXPECT_EQ(take(*order, 1), Ids({1}));  // the hand has been around, and all were new

  order->use(2, 1);
  EXPECT_EQ(take(*order, 3), Ids({3, 4, 2}));
}

TEST(PageOrder, OfLruIsThatOfTheLastUses) {
  const auto order = make_page_order(PagePolicy::kLru, 4);
  enter_all(*order, {1, 2, 3, 4});
  order->use(1, 1);
  order->use(3, 1);
  EXPECT_EQ(take(*order, 9), Ids({2, 4, 1, 3}));
}

TEST(PageOrder, OfS3FifoKeepsWhatIsUsedAgainThroughAScan) {
  const auto order = make_page_order(PagePolicy::kS3Fifo, 20);
  enter_all(*order, {1, 2});
  for (int i = 0; i < 2; ++i) {
    order->use(1, 1);
    order->use(2, 1);
  }
  std::set<Id> gone;
  for (Id page = 3; page < 500; ++page) {
    if (page > 20) gone.merge(std::set<Id>({take(*order, 1).at(0)}));
    order->enter(page);
  }
  EXPECT_EQ(gone.count(1) + gone.count(2), 0U);
  EXPECT_EQ(gone.size(), 479U);
}

TEST(PageOrder, OfS3FifoKeepsWhatComesBackSoon) {
  const auto order = make_page_order(PagePolicy::kS3Fifo, 10);
  enter_all(*order, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  EXPECT_EQ(take(*order, 2), Ids({1, 2}));
  order->enter(1);   // it is remembered
  order->enter(11);  // new
  EXPECT_EQ(take(*order, 8), Ids({3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(take(*order, 1), Ids({1}));  // a tenth is for new ones
  EXPECT_EQ(take(*order, 1), Ids({11}));
}

TEST(PageOrder, OfScoreIsThatOfTheRowsThatWereRead) {
  const auto order = make_page_order(PagePolicy::kScore, 4);
  enter_all(*order, {1, 2, 3, 4});
  order->use(1, 50);
  order->use(2, 7);
  order->use(4, 40);
  order->use(2, 7);
  EXPECT_EQ(take(*order, 3), Ids({3, 2, 4}));

  order->enter(2);  // with what was read of it before
  order->enter(5);
  EXPECT_EQ(take(*order, 3), Ids({5, 2, 1}));
}

TEST(PageOrder, OfScoreForgets) {
  const auto order = make_page_order(PagePolicy::kScore, 2);
  enter_all(*order, {1, 2});
  order->use(1, 1000);
  for (int i = 0; i < 100; ++i) order->use(2, 1);
  EXPECT_EQ(take(*order, 1), Ids({1}));
}

TEST(PageOrder, OfScoreComparesAShareOfManyPagesAndAllInTurn) {
  constexpr Id kPages = 8192;
  const auto order = make_page_order(PagePolicy::kScore, kPages);
  for (Id page = 1; page <= kPages; ++page) {
    order->enter(page);
    order->use(page, page % 64 == 0 ? 1 : 1000);
  }
  std::set<Id> gone;
  for (int i = 0; i < 8; ++i) {
    for (const Id page : take(*order, 16)) {
      EXPECT_EQ(page % 64, 0U);  // 16 of 1,024
      gone.insert(page);
    }
  }
  EXPECT_EQ(gone.size(), kPages / 64);
}

/// What an order should be, by the plainest means: all pages looked at each time.
class Model {
 public:
  Model(PagePolicy policy, std::size_t num_frames) : policy_(policy), frames_(num_frames) {}

  void enter(Id page) {
    touch(page);
    const auto ghost = std::ranges::find(ghosts_, page);
    const bool seen = ghost != ghosts_.end();
    if (seen) ghosts_.erase(ghost);
    (policy_ == PagePolicy::kS3Fifo && !seen ? small_ : main_).push_back(page);
    counts_[page] = 0;
  }
  void use(Id page, std::uint32_t rows) {
    const float before = mass(page);
    touch(page);
    masses_[page] = before + static_cast<float>(rows);
    counts_[page] = std::min(counts_[page] + 1, 3);
    if (policy_ == PagePolicy::kLru && std::erase(main_, page) > 0) main_.push_back(page);
  }
  void leave(Id page) {
    if (std::erase(small_, page) > 0) {
      ghosts_.push_back(page);
      if (ghosts_.size() > frames_) ghosts_.pop_front();
    }
    std::erase(main_, page);
  }
  void forget(Id page) {
    std::erase(small_, page);
    std::erase(main_, page);
    std::erase(ghosts_, page);
    masses_.erase(page);
  }
  Ids choose(std::size_t count, const std::set<Id>& may_go) {
    if (policy_ == PagePolicy::kS3Fifo) return choose_s3(count, may_go);
    Ids order;
    for (const Id page : main_) {
      if (may_go.count(page) > 0) order.push_back(page);
    }
    if (policy_ == PagePolicy::kScore) {
      std::ranges::sort(order, {}, [&](Id page) { return std::pair(mass(page), last_[page]); });
    }
    order.resize(std::min(order.size(), count));
    return order;
  }

 private:
  void touch(Id page) { last_[page] = ++uses_; }
  float mass(Id page) const {
    const auto found = masses_.find(page);
    if (found == masses_.end()) return 0.0F;
    const auto age = static_cast<double>(uses_ - last_.at(page)) / static_cast<double>(frames_);
    return found->second * static_cast<float>(std::exp2(-age / 2.0));
  }
  Ids choose_s3(std::size_t count, const std::set<Id>& may_go) {
    std::deque<Id> small, main;
    for (const Id page : small_) {
      if (may_go.count(page) > 0) small.push_back(page);
    }
    for (const Id page : main_) {
      if (may_go.count(page) > 0) main.push_back(page);
    }
    std::size_t num_small = small_.size();
    Ids chosen;
    while (chosen.size() < count && small.size() + main.size() > 0) {
      const bool from_small = !small.empty() && (main.empty() || num_small > frames_ / 10);
      std::deque<Id>& from = from_small ? small : main;
      const Id page = from.front();
      from.pop_front();
      if (from_small) --num_small;
      if (counts_[page] <= (from_small ? 1 : 0)) {
        chosen.push_back(page);
        continue;
      }
      counts_[page] = from_small ? 0 : counts_[page] - 1;
      std::erase(from_small ? small_ : main_, page);
      main_.push_back(page);
      main.push_back(page);
    }
    return chosen;
  }

  PagePolicy policy_;
  std::size_t frames_;
  std::deque<Id> small_, main_, ghosts_;
  std::map<Id, int> counts_;
  std::map<Id, float> masses_;
  std::map<Id, std::uint64_t> last_;
  std::uint64_t uses_ = 0;
};

TEST(PageOrder, IsThatOfAPlainModelInRandomCalls) {
  constexpr std::size_t kRoom = 30;
  for (const PagePolicy policy : kAll) {
    if (policy == PagePolicy::kClock) continue;  // its hand is compared above
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      std::mt19937_64 random(seed);
      const auto order = make_page_order(policy, kRoom);
      Model model(policy, kRoom);
      std::set<Id> resident, evicted;
      for (int call = 0; call < 20'000; ++call) {
        const Id page = 1 + random() % 60;
        if (random() % 100 == 0) {
          if (resident.erase(page) + evicted.erase(page) == 0) continue;
          order->forget(page);
          model.forget(page);
          continue;
        }
        const auto rows = static_cast<std::uint32_t>(random() % 65);
        if (resident.count(page) + evicted.count(page) > 0) {
          order->use(page, rows);
          model.use(page, rows);
        }
        if (resident.count(page) > 0) continue;
        if (resident.size() == kRoom) {
          std::set<Id> may_go;
          for (const Id candidate : resident) {
            if (random() % 4 != 0) may_go.insert(candidate);
          }
          const std::size_t count = 1 + random() % 8;
          const Ids chosen = order->choose(count, [&](Id id) { return may_go.count(id) > 0; });
          ASSERT_EQ(chosen, model.choose(count, may_go))
              << "policy " << static_cast<int>(policy) << ", seed " << seed << ", call " << call;
          for (const Id gone : chosen) {
            if (random() % 5 == 0) continue;  // it was refused, and stays
            order->leave(gone);
            model.leave(gone);
            resident.erase(gone);
            evicted.insert(gone);
          }
        }
        if (resident.size() == kRoom) continue;
        evicted.erase(page);
        resident.insert(page);
        order->enter(page);
        model.enter(page);
      }
    }
  }
}

TEST(PageOrder, ChoosesEachPageOnceAndOnlyThoseThatMayGo) {
  for (const PagePolicy policy : kAll) {
    const auto order = make_page_order(policy, 8);
    enter_all(*order, {1, 2, 3, 4, 5, 6, 7, 8});
    for (const Id page : {2U, 4U, 6U}) order->use(page, 3);
    Ids chosen = order->choose(100, [](Id page) { return page > 3; });
    std::ranges::sort(chosen);
    EXPECT_EQ(chosen, Ids({4, 5, 6, 7, 8})) << static_cast<int>(policy);
    EXPECT_TRUE(order->choose(3, [](Id) { return false; }).empty());
  }
}

}  // namespace
}  // namespace kvtier::runtime
