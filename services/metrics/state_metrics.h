#pragma once

#include "services/base/tenants.h"
#include "services/core/service_core.h"
#include "services/dataplane/data_plane.h"
#include "services/metrics/families.h"

namespace kvtier::services {

/// Adds the state of a core: sessions, tenants, admission, engines and their memory.
void add_core_metrics(const ServiceCore& core, Families& families);

/// What the data plane has carried and shares with clients; all at 0 for a null `plane`.
void add_plane_metrics(DataPlane* plane, const Tenants& tenants, Families& families);

/// Adds the standard metrics of a process, process_cpu_seconds_total and so on, as /proc has
/// it.
void add_process_stats(Families& families);

}  // namespace kvtier::services
