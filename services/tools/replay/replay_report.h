#pragma once

#include "services/evaluation/trace.h"
#include "services/tools/replay/replay.h"

#include <ostream>
#include <string>

namespace kvtier::services {

/// Writes the report as an aligned table, means over layers.
void write_table(std::ostream& out, const Trace& trace, const ReplayReport& report);

/// Returns the report as JSON: `dense` and `rows`, each with `mean` and `layers`. A metric that no
/// step could measure is null.
[[nodiscard]] std::string to_json(const Trace& trace, const ReplayOptions& options,
                                  const ReplayReport& report);

}  // namespace kvtier::services
