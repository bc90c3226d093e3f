#pragma once

#include <cstddef>
#include <string>
#include <sys/types.h>
#include <vector>

namespace kvtier::bench {

/// A process that reads pages in messages of protobuf, as a client without a library of its own
/// would: with a channel as it comes, and nothing else on its heap.
class MessageReader {
 public:
  /// Forks: before this process has threads. `endpoint`: of the server that has `kMessagesMethod`.
  explicit MessageReader(const std::string& endpoint);
  ~MessageReader();
  MessageReader(const MessageReader&) = delete;  // owns a process
  MessageReader& operator=(const MessageReader&) = delete;

  /// Reads pages of `page_bytes`, each to its place, and compares their checksums. Throws
  /// `std::runtime_error` unless all were there.
  void read(const std::string& lease, std::size_t page_bytes,
            const std::vector<std::string>& handles) const;
  /// Seconds of CPU that the process has taken.
  [[nodiscard]] double cpu_seconds() const;

 private:
  pid_t child_ = -1;
  int fd_ = -1;  ///< The child ends when this is closed.
};

}  // namespace kvtier::bench
