#include "services/base/from_message.h"
#include "services/base/paging.h"
#include "services/core/replay_once.h"
#include "services/core/service_core.h"

#include <new>

namespace kvtier::services {

void ServiceCore::get_session(const Call& call, const v1::GetSessionRequest& request,
                              v1::GetSessionResponse& response, Done done) {
  on_session(
      call, "SessionService/GetSession", request.name(), request.ByteSizeLong(),
      [this, &response](SessionEntry& entry) { describe(entry, *response.mutable_session()); },
      std::move(done), {.start = Strand::Start::kNowIfIdle});
}

void ServiceCore::truncate_session(const Call& call, const v1::TruncateSessionRequest& request,
                                   v1::TruncateSessionResponse& response, Done done) {
  const auto work = [this, &request, &response](SessionEntry& entry) {
    execute_once(entry.tenant.replies(), request, response, [&] {
      describe(entry, *response.mutable_session());  // what may fail comes first
      truncate_to(entry, request.tokens());
      describe_length(entry, *response.mutable_session());
    });
  };
  on_session(call, "SessionService/TruncateSession", request.name(), request.ByteSizeLong(), work,
             std::move(done));
}

void ServiceCore::fork_session(const Call& call, const v1::ForkSessionRequest& request,
                               v1::ForkSessionResponse& response, Done done) {
  const auto work = [this, &request, &response](SessionEntry& entry) {
    execute_once(entry.tenant.replies(), request, response, [&] {
      const std::vector<std::shared_ptr<SessionEntry>> children = fork(entry, request.count());
      std::size_t inserted = 0;
      try {
        for (const auto& child : children) {
          sessions_.insert(child);
          ++inserted;
          describe(*child, *response.add_sessions());
        }
      } catch (...) {
        for (std::size_t i = 0; i < inserted; ++i) {
          static_cast<void>(sessions_.remove(entry.tenant, children[i]->name));
        }
        throw;
      }
      created_ += children.size();
    });
  };
  on_session(call, "SessionService/ForkSession", request.name(), request.ByteSizeLong(), work,
             std::move(done));
}

void ServiceCore::publish_prefix(const Call& call, const v1::PublishPrefixRequest& request,
                                 v1::PublishPrefixResponse& response, Done done) {
  on_session(
      call, "SessionService/PublishPrefix", request.name(), request.ByteSizeLong(),
      [&request, &response](SessionEntry& entry) { publish_from(entry, request, response); },
      std::move(done));
}

void ServiceCore::release_session(const Call& call, const v1::ReleaseSessionRequest& request,
                                  Done done) {
  const CallRecord arrival = arrive(call, "SessionService/ReleaseSession");
  std::shared_ptr<SessionEntry> entry;
  try {
    check_request_id(request.request_id());
    ReplayCache& replies = call.tenant->replies();
    const std::string& id = request.request_id();
    if (!id.empty() && replies.begin(id, body_digest(request))) {
      ++admitted_;
      finish(arrival, {}, nullptr, done);
      return;
    }
    try {
      entry = sessions_.remove(*call.tenant, request.name());
    } catch (...) {
      if (!id.empty()) replies.abandon(id);
      throw;
    }
    if (!id.empty()) keep_reply(replies, id, v1::ReleaseSessionResponse());
  } catch (...) {
    refuse(arrival, done);
    return;
  }
  ++admitted_;
  ++released_;
  try {
    entry->strand->post([this, arrival, entry, done] {
      const TimePoint started = options_.now();
      entry->close();
      finish(arrival, started, nullptr, done);
    });
  } catch (const std::bad_alloc&) {
    finish(arrival, {}, nullptr, done);  // it ends with the last of its tasks
  }
}

void ServiceCore::list_sessions(const Call& call, const v1::ListSessionsRequest& request,
                                v1::ListSessionsResponse& response) {
  check_serving();
  const auto [names, next] =
      sessions_.list(*call.tenant, page_start_of(request.page_token()),
                     static_cast<std::size_t>(page_size_of(request.page_size())));
  for (const std::string& name : names) response.add_names(name);
  if (next) response.set_next_page_token(std::to_string(*next));
}

void ServiceCore::keep_alive(const Call& call, const v1::KeepAliveRequest& request,
                             v1::KeepAliveResponse& response) {
  check_serving();
  if (request.names_size() > kMaxBatchItems) {
    throw ServiceError::invalid("names", "at most " + std::to_string(kMaxBatchItems),
                                std::to_string(request.names_size()));
  }
  for (const std::string& name : request.names()) {
    v1::ItemStatus& status = *response.add_statuses();
    try {
      if (std::string_view(name).starts_with("leases/")) {
        static_cast<void>(pages_.find(*call.tenant, name));  // renews it
      } else {
        renew_for_client(*sessions_.find(*call.tenant, name));
      }
    } catch (const ServiceError& error) {
      set_status(error, status);
    }
  }
}

}  // namespace kvtier::services
