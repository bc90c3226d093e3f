#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

namespace kvtier::services {

/// Replies to requests that carry a request_id, so that a repeated one is answered and not
/// executed. Keeps the last `capacity` replies. Thread-safe.
class ReplayCache {
 public:
  explicit ReplayCache(std::size_t capacity = 1024) : capacity_(capacity) {}

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

  const std::size_t capacity_;
  std::mutex mutex_;  ///< Guards both below.
  std::unordered_map<std::string, Entry> entries_;
  std::list<std::string> by_age_;  ///< Oldest first.
};

}  // namespace kvtier::services
