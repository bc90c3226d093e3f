#include "services/base/replay_cache.h"

#include "services/base/secrets.h"
#include "services/base/service_error.h"

#include <algorithm>
#include <cctype>
#include <new>

namespace kvtier::services {

std::optional<std::string> ReplayCache::begin(const std::string& id, const std::string& body) {
  const std::lock_guard lock(mutex_);
  if (const auto it = entries_.find(id); it != entries_.end()) {
    if (it->second.body != body) {
      throw ServiceError(Code::kInvalidArgument, "REQUEST_ID_CONFLICT",
                         "request_id: expected the request that it was used for, found another");
    }
    if (!it->second.reply) {
      throw ServiceError(Code::kAborted, "REQUEST_IN_PROGRESS",
                         "request_id: the first request with it is not answered yet");
    }
    return it->second.reply;
  }
  if (entries_.size() >= capacity_) {
    const auto done = std::find_if(by_age_.begin(), by_age_.end(), [this](const std::string& old) {
      return entries_.at(old).reply.has_value();
    });
    if (done == by_age_.end()) {
      throw ServiceError::overloaded("TOO_MANY_REQUESTS", "too many requests are in progress");
    }
    bytes_ -= entries_.at(*done).reply->size();
    entries_.erase(*done);
    by_age_.erase(done);
  }
  by_age_.push_back(id);
  try {
    entries_.emplace(id, Entry{body, std::nullopt, std::prev(by_age_.end())});
  } catch (...) {
    by_age_.pop_back();
    throw;
  }
  return std::nullopt;
}

void ReplayCache::finish(const std::string& id, std::string reply) {
  const std::lock_guard lock(mutex_);
  bytes_ += reply.size();
  entries_.at(id).reply = std::move(reply);
  for (auto it = by_age_.begin(); it != by_age_.end() && bytes_ > max_bytes_;) {
    const auto entry = entries_.find(*it);
    if (*it == id || !entry->second.reply) {
      ++it;
      continue;
    }
    bytes_ -= entry->second.reply->size();
    entries_.erase(entry);
    it = by_age_.erase(it);
  }
}

void ReplayCache::abandon(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  by_age_.erase(it->second.age);
  entries_.erase(it);
}

void check_request_id(const std::string& text) {
  if (text.empty()) return;
  constexpr std::string_view kForm = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
  const bool is_uuid = std::ranges::equal(text, kForm, [](unsigned char c, char form) {
    return form == '-' ? c == '-' : std::isxdigit(c) != 0;
  });
  if (!is_uuid) {
    throw ServiceError::invalid("request_id", "a UUID of 36 characters",
                                std::to_string(text.size()) + " characters that are none");
  }
}

std::string body_digest(const google::protobuf::Message& request) {
  return sha256(request.GetTypeName() + ' ' + request.SerializeAsString());
}

void keep_reply(ReplayCache& replies, const std::string& id,
                const google::protobuf::Message& response) {
  try {
    replies.finish(id, response.SerializeAsString());
  } catch (const std::bad_alloc&) {
    replies.abandon(id);
  }
}

}  // namespace kvtier::services
