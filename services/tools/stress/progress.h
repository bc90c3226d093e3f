#pragma once

#include "services/tools/stress/stress.h"

#include <chrono>
#include <ostream>
#include <string>

namespace kvtier::services {

/// Shows the phases of a run with rate and time left: on a terminal a bar that overwrites itself,
/// elsewhere a line per tenth.
class ProgressWriter {
 public:
  using Clock = std::chrono::steady_clock;

  ProgressWriter(std::ostream& err, bool terminal) : err_(err), terminal_(terminal) {}

  /// `now`: when `progress` was true.
  void show(const StressProgress& progress, Clock::time_point now = Clock::now());
  /// Ends a bar that is not full, so that other text can follow.
  void finish();

 private:
  std::ostream& err_;
  bool terminal_;
  std::string phase_;
  Clock::time_point start_;
  Clock::time_point shown_at_;
  double done_at_start_ = 0.0;  // the rate is of what came after the first call
  int tenth_ = 0;
  bool open_ = false;
};

}  // namespace kvtier::services
