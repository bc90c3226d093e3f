#include "services/core/page_verbs.h"

#include "services/base/from_message.h"
#include "services/base/replay_cache.h"
#include "services/base/service_error.h"
#include "services/page_cache/page_transfer.h"
#include "services/page_cache/tenant_pages.h"
#include "services/wire/enums.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

namespace kvtier::services {
namespace {

std::uint32_t layer_of(std::int32_t layer, const char* field) {
  check_at_least(field, layer, 0);
  return static_cast<std::uint32_t>(layer);
}

/// Hashes and layers of a lookup. Valid as long as the request.
struct Asked {
  template <typename Request>
  explicit Asked(const Request& request)
      : hashes(request.hashes().begin(), request.hashes().end()) {
    check_at_most("hashes", request.hashes_size(), kMaxBatchPages);
    check_at_most("layers", request.layers_size(), kMaxBatchPages);
    check_at_most("hashes", std::int64_t{request.hashes_size()} * request.layers_size(),
                  kMaxBatchPages);
    for (const std::int32_t layer : request.layers()) layers.push_back(layer_of(layer, "layers"));
  }

  std::vector<std::string_view> hashes;
  std::vector<std::uint32_t> layers;
};

void check_each_once(const v1::BatchReservePagesRequest& request) {
  std::set<std::pair<std::int32_t, std::string_view>> seen;
  for (const v1::PageKey& key : request.keys()) {
    if (key.hash().empty() || seen.emplace(key.layer(), key.hash()).second) continue;
    throw ServiceError::invalid("keys", "each hash and layer once", "one twice");
  }
}

/// Runs `act`, and says in `status` how that ended.
template <typename Act>
void attempt(v1::ItemStatus& status, Act act) {
  if (const auto error = failure_of(act)) set_status(*error, status);
}

/// As `attempt`, of an item with a page; one that succeeds has no status.
template <typename Act>
void attempt_page(v1::PageResult& result, Act act) {
  const auto fill = [&] { fill_page(act(), *result.mutable_page()); };
  if (const auto error = failure_of(fill)) set_status(*error, *result.mutable_status());
}

/// Calls `act` with each handle of a request that may be repeated.
template <typename Request, typename Response, typename Act>
void each_handle(PageLease& lease, const Request& request, Response& response, Act act) {
  execute_once(lease.tenant.replies(), request, response, [&] {
    check_at_most("handles", request.handles_size(), kMaxBatchPages);
    for (const std::string& handle : request.handles()) act(handle);
  });
}

}  // namespace

std::int64_t page_bytes_of(const v1::OpenLeaseRequest& request) {
  if (request.size_case() == v1::OpenLeaseRequest::kPageBytes) return request.page_bytes();
  if (request.size_case() != v1::OpenLeaseRequest::kGeometry) {
    throw ServiceError::invalid("size", "geometry or page_bytes", "neither");
  }
  const v1::PageGeometry& geometry = request.geometry();
  check_at_least("geometry.kv_heads", geometry.kv_heads(), 1);
  check_at_least("geometry.head_dim", geometry.head_dim(), 1);
  check_at_least("geometry.page_tokens", geometry.page_tokens(), 1);
  const std::optional<DType> dtype = enum_of<DType>(geometry.dtype());
  if (!dtype) {
    throw ServiceError::invalid("geometry.dtype", "a DataType", std::to_string(geometry.dtype()));
  }
  std::optional<std::int64_t> bytes = 2 * static_cast<std::int64_t>(dtype_bytes(*dtype));
  for (const std::int64_t factor :
       {std::int64_t{geometry.kv_heads()}, std::int64_t{geometry.head_dim()},
        std::int64_t{geometry.page_tokens()}}) {
    if (bytes) bytes = checked_product(*bytes, factor);
  }
  if (!bytes) throw ServiceError::invalid("geometry", "extents whose product is a size", "more");
  return *bytes;
}

void execute(PageLease& lease, const v1::LookupPrefixRequest& request,
             v1::LookupPrefixResponse& response) {
  execute_once(lease.tenant.replies(), request, response, [&] {
    const Asked asked(request);
    const FoundPages found = lease.pages.lookup(
        lease, {asked.layers, asked.hashes, /*prefix=*/true, request.pin(), /*pages=*/true});
    for (const PageInfo& page : found.pages) fill_page(page, *response.add_pages());
    response.set_hits(static_cast<std::int32_t>(std::ranges::count(found.hits, true)));
  });
}

void execute(PageLease& lease, const v1::BatchLookupPagesRequest& request,
             v1::BatchLookupPagesResponse& response) {
  execute_once(lease.tenant.replies(), request, response, [&] {
    if (request.pin() && request.hits_only()) {
      throw ServiceError::invalid("hits_only", "false for pages that are pinned", "true");
    }
    const Asked asked(request);
    const FoundPages found =
        lease.pages.lookup(lease, {asked.layers, asked.hashes, /*prefix=*/false, request.pin(),
                                   /*pages=*/!request.hits_only()});
    for (const bool hit : found.hits) response.add_hits(hit);
    for (const PageInfo& page : found.pages) fill_page(page, *response.add_pages());
  });
}

void execute(PageLease& lease, const v1::BatchReservePagesRequest& request,
             v1::BatchReservePagesResponse& response) {
  execute_once(lease.tenant.replies(), request, response, [&] {
    check_at_most("keys", request.keys_size(), kMaxBatchPages);
    check_each_once(request);
    for (const v1::PageKey& key : request.keys()) {
      attempt_page(*response.add_items(), [&] {
        return lease.pages.reserve(
            lease, {.layer = layer_of(key.layer(), "keys.layer"), .hash = key.hash()});
      });
    }
  });
}

void execute(PageLease& lease, const v1::BatchCommitPagesRequest& request,
             v1::BatchCommitPagesResponse& response) {
  check_at_most("items", request.items_size(), kMaxBatchPages);
  for (const auto& item : request.items()) {
    attempt_page(*response.add_items(), [&] {
      std::optional<std::uint32_t> crc;
      if (item.has_crc32c()) crc = item.crc32c();
      return lease.pages.commit(lease, item.handle(), crc);
    });
  }
}

void execute(PageLease& lease, const v1::BatchAbortPagesRequest& request,
             v1::BatchAbortPagesResponse& response) {
  each_handle(lease, request, response, [&](const std::string& handle) {
    attempt(*response.add_statuses(), [&] { lease.pages.abort(lease, handle); });
  });
}

void execute(PageLease& lease, const v1::BatchDeletePagesRequest& request,
             v1::BatchDeletePagesResponse& response) {
  each_handle(lease, request, response, [&](const std::string& handle) {
    attempt(*response.add_statuses(), [&] { lease.pages.remove(lease, handle); });
  });
}

void execute(PageLease& lease, const v1::BatchPinPagesRequest& request,
             v1::BatchPinPagesResponse& response) {
  each_handle(lease, request, response, [&](const std::string& handle) {
    attempt_page(*response.add_items(), [&] { return lease.pages.pin(lease, handle); });
  });
}

void execute(PageLease& lease, const v1::BatchUnpinPagesRequest& request,
             v1::BatchUnpinPagesResponse& response) {
  each_handle(lease, request, response, [&](const std::string& handle) {
    attempt(*response.add_statuses(), [&] { lease.pages.unpin(lease, handle); });
  });
}

void settle(PageLease& lease, v1::BatchCommitPagesResponse& response, std::function<void()> act) {
  lease.pages.when_settled([&lease, &response, act = std::move(act)] {
    // Without memory to ask they are not durable for all that is known.
    (void)failure_of([&] { set_durable(lease.pages, *response.mutable_items()); });
    act();
  });
}

void settle(PageLease& lease, v1::BatchDeletePagesResponse& /*response*/,
            std::function<void()> act) {
  lease.pages.when_settled(std::move(act));
}

}  // namespace kvtier::services
