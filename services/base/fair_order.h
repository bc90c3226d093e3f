#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace kvtier::services {

/// One tenant's part of something that several share.
struct FairShare {
  double weight = 1.0;
  double served = 0.0;           ///< The order's time up to which it has been served.
  std::uint64_t last_start = 0;  ///< Decides between equals.
};

/// The order in which several share something: start-time fair queueing (Goyal, Vin, Cheng
/// 1996), with costs that are known when the work is done. One that has not asked for a while is
/// owed nothing for that time.
class FairOrder {
 public:
  using Rank = std::pair<double, std::uint64_t>;

  /// The lowest of those that wait is next.
  [[nodiscard]] Rank rank(const FairShare& share) const {
    return {std::max(share.served, now_), share.last_start};
  }
  void start(FairShare& share) {
    now_ = share.served = std::max(share.served, now_);
    share.last_start = ++starts_;
  }
  void end(FairShare& share, double cost) const { share.served += cost / share.weight; }

 private:
  double now_ = 0.0;  ///< When the work that started last did, in units of cost.
  std::uint64_t starts_ = 0;
};

}  // namespace kvtier::services
