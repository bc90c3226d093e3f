#pragma once

#include "services/base/from_message.h"
#include "services/base/replay_cache.h"

#include <new>
#include <string>

namespace kvtier::services {

/// Remembers the reply of a request that was executed; without memory for it, a repeated request is
/// executed again.
template <typename Response>
void keep_reply(ReplayCache& replies, const std::string& id, const Response& response) {
  try {
    replies.finish(id, response.SerializeAsString());
  } catch (const std::bad_alloc&) {
    replies.abandon(id);
  }
}

/// Runs `work`, which fills `response`, unless a request with this id was executed before: then
/// `response` is that one's. Without an id it always runs. Throws INVALID_ARGUMENT for an id that
/// is no UUID, and what `ReplayCache::begin` and `work` throw.
template <typename Request, typename Response, typename Work>
void execute_once(ReplayCache& replies, const Request& request, Response& response, Work work) {
  const std::string& id = request.request_id();
  check_request_id(id);
  if (id.empty()) return work();
  if (const auto reply = replies.begin(id, body_digest(request))) {
    response.ParseFromString(*reply);
    return;
  }
  try {
    work();
  } catch (...) {
    replies.abandon(id);
    throw;
  }
  keep_reply(replies, id, response);
}

}  // namespace kvtier::services
