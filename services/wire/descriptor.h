#pragma once

#include <cstddef>
#include <span>
#include <sys/types.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace kvtier::services {

/// Owns a file descriptor; -1 for none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] explicit operator bool() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
  void reset() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

struct Received {
  ssize_t bytes = 0;  ///< As recvmsg(2) returns; below 0, `errno` says why.
  std::vector<Descriptor> descriptors{};
  bool lost_descriptors = false;  ///< More came than there was room for.
};
/// Receives what has come on a connected socket, without waiting, and the descriptors beside it.
[[nodiscard]] Received receive_now(int socket, std::span<std::byte> into);

}  // namespace kvtier::services
