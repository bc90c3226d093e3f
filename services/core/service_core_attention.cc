#include "services/base/from_message.h"
#include "services/core/service_core.h"
#include "services/core/session_verbs.h"

#include <memory>
#include <new>
#include <string_view>
#include <unordered_set>

namespace kvtier::services {
namespace {

/// What is left of a message for tensors.
constexpr std::int64_t kReplyBytes = kMaxMessageBytes - (std::int64_t{64} << 10);

}  // namespace

void ServiceCore::append(const Call& call, const std::string& session,
                         const v1::AppendRequest& request, v1::AppendResponse& response,
                         Done done) {
  on_session(
      call, "AttentionService/Append", session, request.ByteSizeLong(),
      [&request, &response](SessionEntry& entry) { append_to(entry, request, response); },
      std::move(done));
}

void ServiceCore::select(const Call& call, const v1::SelectRequest& request,
                         v1::SelectResponse& response, Done done) {
  on_session(
      call, "AttentionService/Select", request.session(), request.ByteSizeLong(),
      [&request, &response, grant = call.grant](SessionEntry& entry) {
        ReplyBudget budget(kReplyBytes, grant);
        return select_in(entry, request, budget, response);
      },
      std::move(done));
}

void ServiceCore::attend(const Call& call, const v1::AttendRequest& request,
                         v1::AttendResponse& response, Done done) {
  on_session(
      call, "AttentionService/Attend", request.session(), request.ByteSizeLong(),
      [&request, &response, grant = call.grant](SessionEntry& entry) {
        ReplyBudget budget(kReplyBytes, grant);
        return attend_in(entry, request, budget, response);
      },
      std::move(done));
}

void ServiceCore::decode(const Call& call, const std::string& session,
                         const v1::DecodeRequest& request, v1::DecodeResponse& response,
                         Done done) {
  on_session(
      call, "AttentionService/Decode", session, request.ByteSizeLong(),
      [&request, &response, grant = call.grant](SessionEntry& entry) {
        ReplyBudget budget(kReplyBytes, grant);
        return decode_in(entry, request, budget, response);
      },
      std::move(done));
}

void ServiceCore::fetch(const Call& call, const v1::FetchRequest& request,
                        v1::FetchResponse& response, Done done) {
  on_session(
      call, "AttentionService/Fetch", request.session(), request.ByteSizeLong(),
      [&request, &response, grant = call.grant](SessionEntry& entry) {
        ReplyBudget budget(kReplyBytes, grant);
        fetch_in(entry, request, budget, response);
      },
      std::move(done));
}

template <typename Request, typename Response, typename Verb>
void ServiceCore::batch(const Call& call, std::string_view method, const Request& request,
                        Response& response, Verb verb, Done done) {
  const int count = request.items_size();
  if (count > kMaxBatchItems) {
    const ServiceError error = ServiceError::invalid(
        "items", "at most " + std::to_string(kMaxBatchItems), std::to_string(count));
    done(&error);
    return;
  }
  struct Join {
    explicit Join(std::shared_ptr<InflightReservation> grant)
        : budget(kReplyBytes, std::move(grant)) {}
    ReplyBudget budget;
    Done done{};
    std::atomic<int> left{0};
  };
  // One more than there are items, so that the last of them cannot end the call before all are
  // queued.
  std::shared_ptr<Join> join;
  try {
    join = std::make_shared<Join>(call.grant);
    for (int i = 0; i < count; ++i) response.add_items();
  } catch (...) {
    const ServiceError error = to_service_error(std::current_exception());
    done(&error);
    return;
  }
  join->left = count + 1;
  join->done = std::move(done);
  const auto arrive = [join] {
    if (--join->left == 0) join->done(nullptr);
  };
  std::unordered_set<std::string_view> queued;  // sessions
  for (int i = 0; i < count; ++i) {
    auto& item = *response.mutable_items(i);
    const auto end = [&item, arrive](const ServiceError* error) {
      if (error != nullptr) {
        item.clear_response();
        set_status(*error, *item.mutable_status());
      }
      arrive();
    };
    Done told;
    try {
      told = end;
    } catch (...) {
      const ServiceError error = to_service_error(std::current_exception());
      end(&error);
      continue;
    }
    const std::string& session = request.items(i).session();
    const bool is_first = !queued.contains(session);
    const bool is_queued =
        on_session(call, method, session, request.items(i).ByteSizeLong(),
                   [&request, i, &item, verb, join](SessionEntry& entry) {
                     return verb(entry, request.items(i), join->budget, *item.mutable_response());
                   },
                   std::move(told), {.counts = is_first});
    if (!is_first || !is_queued) continue;
    try {
      queued.insert(session);
    } catch (const std::bad_alloc&) {
      // The next item counts as a call of its own.
    }
  }
  arrive();
}

void ServiceCore::batch_select(const Call& call, const v1::BatchSelectRequest& request,
                               v1::BatchSelectResponse& response, Done done) {
  batch(call, "AttentionService/BatchSelect", request, response, select_in, std::move(done));
}

void ServiceCore::batch_attend(const Call& call, const v1::BatchAttendRequest& request,
                               v1::BatchAttendResponse& response, Done done) {
  batch(call, "AttentionService/BatchAttend", request, response, attend_in, std::move(done));
}

void ServiceCore::batch_decode(const Call& call, const v1::BatchDecodeRequest& request,
                               v1::BatchDecodeResponse& response, Done done) {
  batch(call, "AttentionService/BatchDecode", request, response, decode_in, std::move(done));
}

void ServiceCore::batch_fetch(const Call& call, const v1::BatchFetchRequest& request,
                              v1::BatchFetchResponse& response, Done done) {
  batch(call, "AttentionService/BatchFetch", request, response, fetch_in, std::move(done));
}

}  // namespace kvtier::services
