#pragma once

#include "kvtier/stats.h"
#include "kvtier/v1/admin.pb.h"

#include "services/base/tenants.h"
#include "services/page_cache/page_store.h"

/// Figures of the library and of the page cache as messages of kvtier.v1.
namespace kvtier::services {

void fill(const Tenant& tenant, v1::Tenant& message);
void fill(const Stats& from, v1::GetStatsResponse& to);
void fill(const PageStats& from, v1::PageCacheStats& to);

}  // namespace kvtier::services
