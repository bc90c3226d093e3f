#pragma once

#include "services/metrics/metrics_reading.h"

#include <cstddef>
#include <string>
#include <vector>

namespace kvtier::services {

/// Two readings of a server's metrics, and the seconds between them.
struct TopInterval {
  const MetricsReading& before;
  const MetricsReading& now;
  double seconds;
};

struct FrameStyle {
  std::size_t columns = 80;
  std::size_t rows = 0;  ///< 0: as many as there is to show.
  bool color = false;    ///< ANSI escapes.
};

/// Returns the lines of one frame, ASCII, none wider than `columns`: state, rates, tiers, latencies
/// of the methods that were ever called, tenants. Quantiles are upper bounds.
[[nodiscard]] std::vector<std::string> top_frame(const TopInterval& interval,
                                                 const FrameStyle& style);

}  // namespace kvtier::services
