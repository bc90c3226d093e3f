#include "runtime/paging/page_policy.h"

#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

namespace kvtier::runtime {
namespace {

constexpr PageOrder::Id kNone = std::numeric_limits<PageOrder::Id>::max();

/// Uses of all pages, in those of as many pages as there are frames, after which half is left.
constexpr double kHalfLife = 2.0;

/// Pages that are compared, of large pools the next ones on a round: as many for each that is
/// chosen, and at least so many. A million would take 20 ms, longer than a batch takes to write.
constexpr std::size_t kSampleShare = 16;
constexpr std::size_t kLeastSample = 1024;

}  // namespace

PageOrder::State& PageOrder::state(Id page) {
  if (page >= states_.size()) states_.resize(std::max<std::size_t>(page + 1, 2 * states_.size()));
  return states_[page];
}

void PageOrder::reserve(Id last) {
  static_cast<void>(state(last));
  ring_.reserve(num_frames_);
  free_places_.reserve(num_frames_);
}

float PageOrder::mass(const State& state) const {
  const double age =
      static_cast<double>(num_uses_ - state.last_use) / static_cast<double>(num_frames_);
  return state.mass * static_cast<float>(std::exp2(-age / kHalfLife));
}

void PageOrder::use(Id page, std::uint32_t rows) {
  State& used = state(page);
  if (used.mass > 0.0F) used.mass = mass(used);
  used.mass += static_cast<float>(rows);
  used.last_use = ++num_uses_;
}

void PageOrder::enter(Id page) {
  use(page, 0);
  std::size_t place = ring_.size();
  if (free_places_.empty()) {
    free_places_.reserve(ring_.size() + 1);  // so that `leave` does not fail
    ring_.push_back(page);
  } else {
    place = free_places_.back();
    free_places_.pop_back();
    ring_[place] = page;
  }
  state(page).place = place + 1;
}

void PageOrder::leave(Id page) {
  const std::size_t place = std::exchange(states_[page].place, 0) - 1;
  ring_[place] = kNone;
  free_places_.push_back(place);
}

void PageOrder::forget(Id page) {
  State& forgotten = state(page);
  if (forgotten.place != 0) leave(page);
  forgotten.mass = 0.0F;
}

std::vector<PageOrder::Id> PageOrder::choose(std::size_t count, const MayGo& may_go) {
  const std::size_t most = std::max(kLeastSample, kSampleShare * count);
  std::vector<std::tuple<float, std::uint64_t, Id>> all;
  for (std::size_t i = 0; i < ring_.size() && all.size() < most; ++i) {
    if (hand_ >= ring_.size()) hand_ = 0;
    const Id page = ring_[hand_++];
    if (page == kNone || !may_go(page)) continue;
    all.emplace_back(mass(states_[page]), states_[page].last_use, page);
  }
  const auto end = all.begin() + static_cast<std::ptrdiff_t>(std::min(count, all.size()));
  std::partial_sort(all.begin(), end, all.end());
  std::vector<Id> chosen;
  for (auto next = all.begin(); next != end; ++next) chosen.push_back(std::get<2>(*next));
  return chosen;
}

}  // namespace kvtier::runtime
