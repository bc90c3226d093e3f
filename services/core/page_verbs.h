#pragma once

#include "kvtier/v1/page.pb.h"

#include "services/page_cache/page_lease.h"

#include <cstdint>
#include <functional>

/// What calls do to the pages of one lease, on its strand. They throw with nothing changed; what
/// fails of one item is in that item's answer.
namespace kvtier::services {

/// Most pages of one batch.
inline constexpr int kMaxBatchPages = 4096;

/// Returns the bytes of the pages that a lease is asked for, given as such or by a geometry.
[[nodiscard]] std::int64_t page_bytes_of(const v1::OpenLeaseRequest& request);

void execute(PageLease& lease, const v1::LookupPrefixRequest& request,
             v1::LookupPrefixResponse& response);
void execute(PageLease& lease, const v1::BatchLookupPagesRequest& request,
             v1::BatchLookupPagesResponse& response);
void execute(PageLease& lease, const v1::BatchReservePagesRequest& request,
             v1::BatchReservePagesResponse& response);
void execute(PageLease& lease, const v1::BatchCommitPagesRequest& request,
             v1::BatchCommitPagesResponse& response);
void execute(PageLease& lease, const v1::BatchAbortPagesRequest& request,
             v1::BatchAbortPagesResponse& response);
void execute(PageLease& lease, const v1::BatchDeletePagesRequest& request,
             v1::BatchDeletePagesResponse& response);
void execute(PageLease& lease, const v1::BatchPinPagesRequest& request,
             v1::BatchPinPagesResponse& response);
void execute(PageLease& lease, const v1::BatchUnpinPagesRequest& request,
             v1::BatchUnpinPagesResponse& response);

/// Calls `act` when what was done is settled, as `TenantPages::when_settled`, and `response` says
/// what is durable. `lease` and `response` must live until then.
void settle(PageLease& lease, v1::BatchCommitPagesResponse& response, std::function<void()> act);
void settle(PageLease& lease, v1::BatchDeletePagesResponse& response, std::function<void()> act);

}  // namespace kvtier::services
