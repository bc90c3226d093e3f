#pragma once

#include "services/base/tenants.h"
#include "services/dataplane/data_plane.h"
#include "services/metrics/families.h"

namespace kvtier::services {

/// What the data plane has carried and shares with clients; all at 0 for a null `plane`.
void add_plane_metrics(DataPlane* plane, const Tenants& tenants, Families& families);

}  // namespace kvtier::services
