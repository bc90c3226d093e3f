#pragma once

#include "benchmarks/service/message_reader.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <sys/types.h>
#include <vector>

namespace kvtier::bench {

/// Most streams that read at a time.
inline constexpr int kMaxStreams = 2;

/// Pages of one size.
struct PageSet {
  std::size_t page_bytes = 0;
  std::string lease;
  std::vector<std::string> handles;
};

/// `kvtier serve` in a process of its own, with pages in it, an empty gRPC call and one for
/// pages in messages beside its own, and a thread that does nothing but write pages to a Unix
/// socket.
class ServerProcess {
 public:
  /// Forks: before this process has threads. 1/8 of `bytes` in pages of 2 MiB, the rest in pages of
  /// 64 KiB.
  explicit ServerProcess(std::size_t bytes);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;  // owns a process
  ServerProcess& operator=(const ServerProcess&) = delete;

  [[nodiscard]] std::string endpoint() const {
    return "unix:" + (folder_ / "kvtier.sock").string();
  }
  [[nodiscard]] std::string bare_socket() const { return (folder_ / "bare.sock").string(); }
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  /// Seconds of CPU that the process has taken.
  [[nodiscard]] double cpu_seconds() const;
  /// `kMaxStreams` of them, made with it: a process cannot be forked once this one has threads.
  [[nodiscard]] const MessageReader& messages(int reader) const {
    return *messages_[static_cast<std::size_t>(reader)];
  }
  [[nodiscard]] const PageSet& small() const { return small_; }
  [[nodiscard]] const PageSet& large() const { return large_; }

 private:
  std::filesystem::path folder_;
  pid_t child_ = -1;
  int stop_ = -1;  ///< The child ends when this is closed.
  PageSet small_, large_;
  std::vector<std::unique_ptr<MessageReader>> messages_;
};

/// Bytes of page number `index`.
void fill_page(std::size_t index, std::byte* page, std::size_t bytes);

/// What a benchmark calls beside the service: method, taken and answered empty.
inline constexpr const char* kEchoMethod = "/kvtier.benchmark.EchoService/Echo";
/// As TransferService.ReadPages, in messages of protobuf.
inline constexpr const char* kMessagesMethod = "/kvtier.benchmark.EchoService/ReadPages";
/// A message of 1 MiB for each handle of a ReadPagesRequest, the same bytes each time.
inline constexpr const char* kBareMethod = "/kvtier.benchmark.EchoService/SendBytes";

}  // namespace kvtier::bench
