#pragma once

#include "services/metrics/metrics_reading.h"

#include <string>

namespace kvtier::services {

/// Reads the text format of Prometheus, version 0.0.4. Throws `kInvalidArgument`, with the number
/// of the line, for other text.
[[nodiscard]] MetricsReading read_exposition(const std::string& text);

}  // namespace kvtier::services
