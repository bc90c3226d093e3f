#pragma once

#include "services/tools/stress/stress.h"

#include <ostream>
#include <string>

namespace kvtier::services {

/// Times of steps, in seconds; NaN of none.
struct StepTimes {
  double mean = 0, min = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;
};

/// Percentiles by nearest rank.
[[nodiscard]] StepTimes step_times(std::vector<double> seconds);

/// Writes what a run measured, for a reader. After an interruption: what there is.
void write_report(std::ostream& out, const StressOptions& options, const StressReport& report);

/// Returns the report as JSON (docs/stress.md names the keys).
[[nodiscard]] std::string to_json(const StressOptions& options, const StressReport& report);

}  // namespace kvtier::services
