#pragma once

#include <google/protobuf/message.h>

#include <cstddef>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

namespace kvtier::services {

/// Replies to requests that carry a request_id, so that a repeated one is answered and not
/// executed. Keeps the last `capacity` replies, and no more than `max_bytes` of them besides the
/// last. Thread-safe.
class ReplayCache {
 public:
  explicit ReplayCache(std::size_t capacity = 1024, std::size_t max_bytes = std::size_t{8} << 20)
      : capacity_(capacity), max_bytes_(max_bytes) {}

  /// Registers the execution of a request whose body is `body`. Returns the reply of the one
  /// executed before, or nothing when this is the first: then `finish` or `abandon` must follow.
  /// Throws INVALID_ARGUMENT (REQUEST_ID_CONFLICT) for another body under the same id, ABORTED
  /// while the first is being executed, RESOURCE_EXHAUSTED when all entries are being executed.
  [[nodiscard]] std::optional<std::string> begin(const std::string& id, const std::string& body);
  void finish(const std::string& id, std::string reply);
  /// Forgets a request that failed and changed nothing.
  void abandon(const std::string& id);

 private:
  struct Entry {
    std::string body;
    std::optional<std::string> reply;
    std::list<std::string>::iterator age;
  };

  const std::size_t capacity_, max_bytes_;
  std::mutex mutex_;  ///< Guards all below.
  std::unordered_map<std::string, Entry> entries_;
  std::list<std::string> by_age_;  ///< Oldest first.
  std::size_t bytes_ = 0;          ///< Of replies.
};

/// Throws unless `text` is empty or a UUID.
void check_request_id(const std::string& text);

/// Returns what a request_id is bound to.
[[nodiscard]] std::string body_digest(const google::protobuf::Message& request);

/// Remembers the reply of a request that was executed; without memory for it, a repeated request is
/// executed again.
void keep_reply(ReplayCache& replies, const std::string& id,
                const google::protobuf::Message& response);

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
