#pragma once

#include "kvtier/stats.h"

#include <nanobind/nanobind.h>

namespace kvtier_engine {

/// Returns the counters by the names of kvtier/stats.h: dicts "cumulative", "snapshot" and
/// "seconds", lists of dicts "tiers" and "tenants".
[[nodiscard]] nanobind::dict dict_of(const kvtier::Stats& stats);

}  // namespace kvtier_engine
