#include "runtime/paging/page_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

namespace kvtier::runtime {
namespace {

using Id = PageOrder::Id;
constexpr Id kNone = std::numeric_limits<Id>::max();

template <typename State>
State& grown(std::vector<State>& states, Id page) {
  if (page >= states.size()) states.resize(std::max<std::size_t>(page + 1, 2 * states.size()));
  return states[page];
}

/// Counts the uses of all pages, and when each page was used last.
class Uses {
 public:
  explicit Uses(std::size_t num_frames) : num_frames_(num_frames) {}
  void add(Id page) { grown(last_, page) = ++count_; }
  [[nodiscard]] std::uint64_t last(Id page) const { return last_[page]; }
  /// Uses since the last one of this page, in those of as many pages as there are frames.
  [[nodiscard]] double age(Id page) const {
    return static_cast<double>(count_ - last_[page]) / static_cast<double>(num_frames_);
  }

 private:
  std::uint64_t num_frames_;
  std::uint64_t count_ = 0;
  std::vector<std::uint64_t> last_;  ///< By page.
};

/// Pages in frames, each in the place of one that has left.
class Ring {
 public:
  void add(Id page) {
    std::size_t place = pages_.size();
    if (free_.empty()) {
      free_.reserve(pages_.size() + 1);  // so that `remove` does not fail
      pages_.push_back(page);
    } else {
      place = free_.back();
      free_.pop_back();
      pages_[place] = page;
    }
    grown(places_, page) = place + 1;
  }
  void remove(Id page) {
    const std::size_t place = std::exchange(places_[page], 0) - 1;
    pages_[place] = kNone;
    free_.push_back(place);
  }
  [[nodiscard]] bool has(Id page) const { return page < places_.size() && places_[page] != 0; }
  [[nodiscard]] std::size_t size() const { return pages_.size(); }
  /// The page at a place, or `kNone`.
  [[nodiscard]] Id operator[](std::size_t place) const { return pages_[place]; }

 private:
  std::vector<Id> pages_;
  std::vector<std::size_t> places_;  ///< By page, from 1; 0: not resident.
  std::vector<std::size_t> free_;
};

class Clock final : public PageOrder {
 public:
  void enter(Id page) override {
    ring_.add(page);
    grown(marks_, page) = Mark::kUsed;
  }
  void use(Id page, std::uint32_t /*rows*/) override { grown(marks_, page) = Mark::kUsed; }
  void leave(Id page) override { ring_.remove(page); }
  void forget(Id page) override {
    if (ring_.has(page)) ring_.remove(page);
  }
  [[nodiscard]] std::vector<Id> choose(std::size_t count, const MayGo& may_go) override {
    std::vector<Id> chosen;
    chosen.reserve(count);
    // Twice around: the first time takes the marks of use away.
    const std::size_t most = 2 * ring_.size();
    for (std::size_t steps = 0; steps < most && chosen.size() < count; ++steps) {
      if (hand_ >= ring_.size()) hand_ = 0;
      const Id page = ring_[hand_++];
      if (page == kNone || !may_go(page)) continue;
      if (marks_[page] == Mark::kUsed) {
        marks_[page] = Mark::kUnused;
      } else if (std::exchange(marks_[page], Mark::kChosen) == Mark::kUnused) {
        chosen.push_back(page);
      }
    }
    for (const Id page : chosen) marks_[page] = Mark::kUnused;
    return chosen;
  }

 private:
  enum class Mark : std::uint8_t { kUnused, kUsed, kChosen };

  Ring ring_;
  std::vector<Mark> marks_;  ///< By page: used since the hand passed.
  std::size_t hand_ = 0;
};

/// Pages in rows, first in first, each in one at most.
class Queues {
 public:
  struct Queue {
    Id first = kNone, last = kNone;
    std::size_t size = 0;
  };
  void push(Queue& queue, Id page) {
    grown(nodes_, page) = {queue.last, kNone, &queue};
    (queue.last == kNone ? queue.first : nodes_[queue.last].next) = page;
    queue.last = page;
    ++queue.size;
  }
  void remove(Id page) {
    const Node node = std::exchange(nodes_[page], {});
    Queue& queue = *node.queue;
    (node.before == kNone ? queue.first : nodes_[node.before].next) = node.next;
    (node.next == kNone ? queue.last : nodes_[node.next].before) = node.before;
    --queue.size;
  }
  /// The queue of a page, or null.
  [[nodiscard]] const Queue* of(Id page) const {
    return page < nodes_.size() ? nodes_[page].queue : nullptr;
  }
  [[nodiscard]] Id next(Id page) const { return nodes_[page].next; }

 private:
  struct Node {
    Id before = kNone, next = kNone;
    Queue* queue = nullptr;
  };
  std::vector<Node> nodes_;  ///< By page.
};

class Lru final : public PageOrder {
 public:
  void enter(Id page) override { queues_.push(here_, page); }
  void use(Id page, std::uint32_t /*rows*/) override {
    if (queues_.of(page) == nullptr) return;
    queues_.remove(page);
    queues_.push(here_, page);
  }
  void leave(Id page) override { queues_.remove(page); }
  void forget(Id page) override {
    if (queues_.of(page) != nullptr) queues_.remove(page);
  }
  [[nodiscard]] std::vector<Id> choose(std::size_t count, const MayGo& may_go) override {
    std::vector<Id> chosen;
    for (Id page = here_.first; page != kNone && chosen.size() < count; page = queues_.next(page)) {
      if (may_go(page)) chosen.push_back(page);
    }
    return chosen;
  }

 private:
  Queues queues_;
  Queues::Queue here_;  ///< The one used the longest ago first.
};

/// Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
class S3Fifo final : public PageOrder {
 public:
  explicit S3Fifo(std::size_t num_frames) : num_frames_(num_frames) {}
  void enter(Id page) override {
    const bool seen = queues_.of(page) == &ghosts_;
    if (seen) queues_.remove(page);
    queues_.push(seen ? main_ : small_, page);
    grown(counts_, page) = 0;
  }
  void use(Id page, std::uint32_t /*rows*/) override {
    std::uint8_t& count = grown(counts_, page);
    count = std::min<std::uint8_t>(count + 1, kMostCounted);
  }
  void leave(Id page) override {
    const bool was_small = queues_.of(page) == &small_;
    queues_.remove(page);
    if (!was_small) return;
    queues_.push(ghosts_, page);
    if (ghosts_.size > num_frames_) queues_.remove(ghosts_.first);
  }
  void forget(Id page) override {
    if (queues_.of(page) != nullptr) queues_.remove(page);
  }
  [[nodiscard]] std::vector<Id> choose(std::size_t count, const MayGo& may_go) override {
    std::vector<Id> chosen;
    std::size_t num_small = small_.size;
    Id small = small_.first;
    Id main = main_.first;
    while (chosen.size() < count && (small != kNone || main != kNone)) {
      if (small != kNone && (main == kNone || num_small > num_frames_ / kSmallShare)) {
        const Id page = std::exchange(small, queues_.next(small));
        if (!may_go(page)) continue;
        --num_small;
        if (counts_[page] > 1) {
          requeue(page);
          if (main == kNone) main = page;
        } else {
          chosen.push_back(page);
        }
      } else {
        const Id page = std::exchange(main, queues_.next(main));
        if (!may_go(page)) continue;
        if (counts_[page] == 0) {
          chosen.push_back(page);
          continue;
        }
        const std::uint8_t left = counts_[page] - 1;
        requeue(page);
        counts_[page] = left;
        if (main == kNone) main = page;
      }
    }
    return chosen;
  }

 private:
  static constexpr std::uint8_t kMostCounted = 3;
  static constexpr std::size_t kSmallShare = 10;  // of the frames, for pages that came once

  void requeue(Id page) {
    queues_.remove(page);
    queues_.push(main_, page);
    counts_[page] = 0;
  }

  std::size_t num_frames_;
  Queues queues_;
  Queues::Queue small_, main_, ghosts_;
  std::vector<std::uint8_t> counts_;  ///< By page: uses since it came or was looked at.
};

class Score final : public PageOrder {
 public:
  explicit Score(std::size_t num_frames) : uses_(num_frames) {}
  void enter(Id page) override {
    add(page, 0);
    ring_.add(page);
  }
  void use(Id page, std::uint32_t rows) override { add(page, rows); }
  void leave(Id page) override { ring_.remove(page); }
  void forget(Id page) override {
    if (ring_.has(page)) ring_.remove(page);
    grown(masses_, page) = 0.0F;
  }
  [[nodiscard]] std::vector<Id> choose(std::size_t count, const MayGo& may_go) override {
    const std::size_t most = std::max(kLeastSample, kSampleShare * count);
    std::vector<std::tuple<float, std::uint64_t, Id>> all;
    for (std::size_t i = 0; i < ring_.size() && all.size() < most; ++i) {
      if (hand_ >= ring_.size()) hand_ = 0;
      const Id page = ring_[hand_++];
      if (page != kNone && may_go(page)) all.emplace_back(mass(page), uses_.last(page), page);
    }
    const auto end = all.begin() + static_cast<std::ptrdiff_t>(std::min(count, all.size()));
    std::partial_sort(all.begin(), end, all.end());
    std::vector<Id> chosen;
    for (auto next = all.begin(); next != end; ++next) chosen.push_back(std::get<2>(*next));
    return chosen;
  }

 private:
  /// Uses of all pages, in those of as many pages as there are frames, after which half is left.
  static constexpr double kHalfLife = 2.0;
  /// Pages that are compared, of large pools the next ones on a round: as many for each that is
  /// chosen, and at least so many. A million would take 20 ms, longer than a batch takes to write.
  static constexpr std::size_t kSampleShare = 16;
  static constexpr std::size_t kLeastSample = 1024;

  [[nodiscard]] float mass(Id page) const {
    return masses_[page] * static_cast<float>(std::exp2(-uses_.age(page) / kHalfLife));
  }
  void add(Id page, std::uint32_t rows) {
    float& sum = grown(masses_, page);
    if (sum > 0.0F) sum = mass(page);
    sum += static_cast<float>(rows);
    uses_.add(page);
  }

  Uses uses_;
  Ring ring_;
  std::size_t hand_ = 0;
  std::vector<float> masses_;  ///< By page: rows that calls have needed, at its last use.
};

}  // namespace

std::unique_ptr<PageOrder> make_page_order(PagePolicy policy, std::size_t num_frames) {
  num_frames = std::max<std::size_t>(num_frames, 1);
  switch (policy) {
    case PagePolicy::kLru:
      return std::make_unique<Lru>();
    case PagePolicy::kS3Fifo:
      return std::make_unique<S3Fifo>(num_frames);
    case PagePolicy::kScore:
      return std::make_unique<Score>(num_frames);
    default:
      return std::make_unique<Clock>();
  }
}

}  // namespace kvtier::runtime
