#pragma once

#include <prometheus/metric_family.h>
#include <string>
#include <vector>

namespace kvtier::services {

/// Returns the families as JSON, what the status page reads:
/// {"time": seconds since 1970, "metrics": {NAME: [{"labels": {...}, "value": 1}, ...]}}.
/// A histogram has "count", "sum" and, unless it is empty, "buckets": [[upper bound, cumulative
/// count], ...] instead of "value"; the last upper bound, infinity, is null.
[[nodiscard]] std::string status_json(const std::vector<prometheus::MetricFamily>& families,
                                      double time);

}  // namespace kvtier::services
