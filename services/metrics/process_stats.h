#pragma once

#include "services/metrics/families.h"

namespace kvtier::services {

/// Adds the standard metrics of a process, process_cpu_seconds_total and so on, as /proc has
/// it.
void add_process_stats(Families& families);

}  // namespace kvtier::services
