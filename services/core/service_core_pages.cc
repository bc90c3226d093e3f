#include "services/base/from_message.h"
#include "services/core/replay_once.h"
#include "services/core/service_core.h"
#include "services/page_cache/page_transfer.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

namespace kvtier::services {
namespace {

void fill(std::chrono::milliseconds from, google::protobuf::Duration& to) {
  to.set_seconds(from.count() / 1000);
  to.set_nanos(static_cast<int>(from.count() % 1000 * 1'000'000));
}

std::int64_t dtype_bytes_of(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
    case v1::DATA_TYPE_INT32:
      return 4;
    case v1::DATA_TYPE_FLOAT16:
    case v1::DATA_TYPE_BFLOAT16:
      return 2;
    default:
      throw ServiceError::invalid("geometry.dtype", "a DataType", std::to_string(dtype));
  }
}

std::int64_t page_bytes_of(const v1::OpenLeaseRequest& request) {
  if (request.size_case() == v1::OpenLeaseRequest::kPageBytes) return request.page_bytes();
  if (request.size_case() != v1::OpenLeaseRequest::kGeometry) {
    throw ServiceError::invalid("size", "geometry or page_bytes", "neither");
  }
  const v1::PageGeometry& geometry = request.geometry();
  const auto at_least_one = [](const char* field, std::int64_t value) {
    if (value >= 1) return value;
    throw ServiceError::invalid(field, "at least 1", std::to_string(value));
  };
  const std::int64_t heads = at_least_one("geometry.kv_heads", geometry.kv_heads());
  const std::int64_t dim = at_least_one("geometry.head_dim", geometry.head_dim());
  const std::int64_t tokens = at_least_one("geometry.page_tokens", geometry.page_tokens());
  std::optional<std::int64_t> bytes = 2 * dtype_bytes_of(geometry.dtype());
  for (const std::int64_t factor : {heads, dim, tokens}) {
    if (bytes) bytes = checked_product(*bytes, factor);
  }
  if (!bytes) throw ServiceError::invalid("geometry", "extents whose product is a size", "more");
  return *bytes;
}

void check_count(const char* field, std::int64_t count) {
  if (count <= kMaxBatchPages) return;
  throw ServiceError::invalid(field, "at most " + std::to_string(kMaxBatchPages),
                              std::to_string(count));
}

std::uint32_t layer_of(std::int32_t layer, const char* field) {
  if (layer < 0) throw ServiceError::invalid(field, "at least 0", std::to_string(layer));
  return static_cast<std::uint32_t>(layer);
}

/// Hashes and layers of a lookup. Valid as long as the request.
struct Asked {
  template <typename Request>
  explicit Asked(const Request& request)
      : hashes(request.hashes().begin(), request.hashes().end()) {
    check_count("hashes", request.hashes_size());
    check_count("layers", request.layers_size());
    check_count("hashes", std::int64_t{request.hashes_size()} * request.layers_size());
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
  try {
    act();
  } catch (...) {
    set_status(to_service_error(std::current_exception()), status);
  }
}

/// As `attempt`, of an item with a page; one that succeeds has no status.
template <typename Act>
void attempt_page(v1::PageResult& result, Act act) {
  try {
    fill_page(act(), *result.mutable_page());
  } catch (...) {
    set_status(to_service_error(std::current_exception()), *result.mutable_status());
  }
}

}  // namespace

std::shared_ptr<InflightReservation> ServiceCore::admit(Tenant& tenant, std::size_t bytes) {
  return std::make_shared<InflightReservation>(inflight_, options_.max_inflight_bytes, tenant,
                                               2 * static_cast<std::int64_t>(bytes));
}

std::shared_ptr<InflightReservation> ServiceCore::admit_call(const Call& call, std::size_t bytes) {
  if (!call.grant) return admit(*call.tenant, bytes);
  call.grant->take(2 * static_cast<std::int64_t>(bytes));
  return call.grant;
}

std::shared_ptr<PageLease> ServiceCore::lease(const Call& call, const std::string& name) {
  check_serving();
  return pages_.find(*call.tenant, name);
}

template <typename Request, typename Verb>
void ServiceCore::on_lease(const Call& call, const Request& request, Verb verb, Done done) {
  CallRecord arrival = arrive(call, "PageService");
  try {
    const std::string& type = Request::descriptor()->name();
    static const std::string method =
        "PageService/" + type.substr(0, type.size() - std::string_view("Request").size());
    arrival.method = method;
    const std::shared_ptr<PageLease> found = lease(call, request.lease());
    std::shared_ptr<InflightReservation> grant = admit_call(call, request.ByteSizeLong());
    Call queued = call;
    if (found->queued.fetch_add(1) >= options_.max_queued_per_session) {
      --found->queued;
      throw ServiceError::overloaded("QUEUE_FULL", "too many calls of this lease are waiting");
    }
    queued.deadline = deadline_of(call);
    ++admitted_;
    try {
      found->strand->post([this, arrival, found, done, grant = std::move(grant),
                           queued = std::move(queued), verb]() mutable {
        const TimePoint started = options_.now();
        std::optional<ServiceError> failure;
        try {
          if (started > queued.deadline) {
            throw ServiceError::unavailable("QUEUE_TIMEOUT", "the call waited past its deadline");
          }
          if (queued.cancelled && queued.cancelled()) {
            throw ServiceError(Code::kAborted, "CANCELLED", "the caller has gone");
          }
          verb(*found);
        } catch (...) {
          failure = to_service_error(std::current_exception());
        }
        --found->queued;
        grant.reset();
        finish(arrival, started, failure ? &*failure : nullptr, done);
      });
    } catch (...) {
      --admitted_;
      --found->queued;
      throw;
    }
  } catch (...) {
    refuse(arrival, done);
  }
}

void ServiceCore::open_lease(const Call& call, const v1::OpenLeaseRequest& request,
                             v1::OpenLeaseResponse& response, Done done) {
  ++received_;
  std::optional<ServiceError> failure;
  try {
    check_serving();
    const std::shared_ptr<InflightReservation> grant = admit_call(call, request.ByteSizeLong());
    execute_once(call.tenant->replies(), request, response, [&] {
      const auto opened = pages_.open(
          *call.tenant, {.model = request.model(), .page_bytes = page_bytes_of(request)},
          executor_.make_strand());
      v1::PageLease& lease = *response.mutable_lease();
      lease.set_name(opened->name);
      lease.set_page_bytes(opened->config.page_bytes);
      fill(options_.lease_ttl, *lease.mutable_ttl());
      v1::PageLimits& limits = *response.mutable_limits();
      limits.set_max_batch_pages(kMaxBatchPages);
      limits.set_max_hash_bytes(kMaxPageHash);
      limits.set_max_transfer_bytes(kMaxTransferBytes);
      fill(pages_.options().reservation_ttl, *limits.mutable_reservation_ttl());
      response.set_server_epoch(pages_.epoch());
    });
  } catch (...) {
    failure = to_service_error(std::current_exception());
  }
  ++(failure ? rejected_ : admitted_);
  done(failure ? &*failure : nullptr);
}

void ServiceCore::close_lease(const Call& call, const v1::CloseLeaseRequest& request, Done done) {
  ++received_;
  std::optional<ServiceError> failure;
  try {
    v1::CloseLeaseResponse response;
    execute_once(call.tenant->replies(), request, response,
                 [&] { pages_.close(*call.tenant, request.name()); });
  } catch (...) {
    failure = to_service_error(std::current_exception());
  }
  ++(failure ? rejected_ : admitted_);
  done(failure ? &*failure : nullptr);
}

void ServiceCore::lookup_prefix(const Call& call, const v1::LookupPrefixRequest& request,
                                v1::LookupPrefixResponse& response, Done done) {
  const auto work = [this, &tenant = *call.tenant, &request, &response](PageLease& lease) {
    execute_once(tenant.replies(), request, response, [&] {
      const Asked asked(request);
      const FoundPages found = pages_.lookup(
          lease, {asked.layers, asked.hashes, /*prefix=*/true, request.pin(), /*pages=*/true});
      for (const PageInfo& page : found.pages) fill_page(page, *response.add_pages());
      response.set_hits(static_cast<std::int32_t>(std::ranges::count(found.hits, true)));
    });
  };
  on_lease(call, request, work, std::move(done));
}

void ServiceCore::batch_lookup_pages(const Call& call, const v1::BatchLookupPagesRequest& request,
                                     v1::BatchLookupPagesResponse& response, Done done) {
  const auto work = [this, &tenant = *call.tenant, &request, &response](PageLease& lease) {
    execute_once(tenant.replies(), request, response, [&] {
      if (request.pin() && request.hits_only()) {
        throw ServiceError::invalid("hits_only", "false for pages that are pinned", "true");
      }
      const Asked asked(request);
      const FoundPages found =
          pages_.lookup(lease, {asked.layers, asked.hashes, /*prefix=*/false, request.pin(),
                                /*pages=*/!request.hits_only()});
      for (const bool hit : found.hits) response.add_hits(hit);
      for (const PageInfo& page : found.pages) fill_page(page, *response.add_pages());
    });
  };
  on_lease(call, request, work, std::move(done));
}

void ServiceCore::batch_reserve_pages(const Call& call, const v1::BatchReservePagesRequest& request,
                                      v1::BatchReservePagesResponse& response, Done done) {
  const auto work = [this, &tenant = *call.tenant, &request, &response](PageLease& lease) {
    execute_once(tenant.replies(), request, response, [&] {
      check_count("keys", request.keys_size());
      check_each_once(request);
      for (const v1::PageKey& key : request.keys()) {
        attempt_page(*response.add_items(), [&] {
          return pages_.reserve(lease,
                                {.layer = layer_of(key.layer(), "keys.layer"), .hash = key.hash()});
        });
      }
    });
  };
  on_lease(call, request, work, std::move(done));
}

void ServiceCore::batch_commit_pages(const Call& call, const v1::BatchCommitPagesRequest& request,
                                     v1::BatchCommitPagesResponse& response, Done done) {
  const auto work = [this, &request, &response](PageLease& lease) {
    check_count("items", request.items_size());
    for (const auto& item : request.items()) {
      attempt_page(*response.add_items(), [&] {
        std::optional<std::uint32_t> crc;
        if (item.has_crc32c()) crc = item.crc32c();
        return pages_.commit(lease, item.handle(), crc);
      });
    }
    settle_pages(pages_, lease.tenant, *response.mutable_items());
  };
  on_lease(call, request, work, std::move(done));
}

void ServiceCore::batch_abort_pages(const Call& call, const v1::BatchAbortPagesRequest& request,
                                    v1::BatchAbortPagesResponse& response, Done done) {
  const auto work = [this, &tenant = *call.tenant, &request, &response](PageLease& lease) {
    execute_once(tenant.replies(), request, response, [&] {
      check_count("handles", request.handles_size());
      for (const std::string& handle : request.handles()) {
        attempt(*response.add_statuses(), [&] { pages_.abort(lease, handle); });
      }
    });
  };
  on_lease(call, request, work, std::move(done));
}

void ServiceCore::batch_delete_pages(const Call& call, const v1::BatchDeletePagesRequest& request,
                                     v1::BatchDeletePagesResponse& response, Done done) {
  const auto work = [this, &tenant = *call.tenant, &request, &response](PageLease& lease) {
    execute_once(tenant.replies(), request, response, [&] {
      check_count("handles", request.handles_size());
      for (const std::string& handle : request.handles()) {
        attempt(*response.add_statuses(), [&] { pages_.remove(lease, handle); });
      }
      pages_.settle(lease.tenant);
    });
  };
  on_lease(call, request, work, std::move(done));
}

void ServiceCore::batch_pin_pages(const Call& call, const v1::BatchPinPagesRequest& request,
                                  v1::BatchPinPagesResponse& response, Done done) {
  const auto work = [this, &tenant = *call.tenant, &request, &response](PageLease& lease) {
    execute_once(tenant.replies(), request, response, [&] {
      check_count("handles", request.handles_size());
      for (const std::string& handle : request.handles()) {
        attempt_page(*response.add_items(), [&] { return pages_.pin(lease, handle); });
      }
    });
  };
  on_lease(call, request, work, std::move(done));
}

void ServiceCore::batch_unpin_pages(const Call& call, const v1::BatchUnpinPagesRequest& request,
                                    v1::BatchUnpinPagesResponse& response, Done done) {
  const auto work = [this, &tenant = *call.tenant, &request, &response](PageLease& lease) {
    execute_once(tenant.replies(), request, response, [&] {
      check_count("handles", request.handles_size());
      for (const std::string& handle : request.handles()) {
        attempt(*response.add_statuses(), [&] { pages_.unpin(lease, handle); });
      }
    });
  };
  on_lease(call, request, work, std::move(done));
}

}  // namespace kvtier::services
