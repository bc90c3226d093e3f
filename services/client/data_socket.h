#pragma once

#include "services/wire/descriptor.h"

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <sys/uio.h>
#include <vector>

struct ssl_st;
struct ssl_ctx_st;

namespace kvtier::services {

/// The client's end of a socket of the data plane. Every operation has a deadline. Used by one
/// thread at a time. Throws `ClientError`: `kUnavailable` when the other end is gone or cannot be
/// reached, `kDeadlineExceeded`.
class DataSocket {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  struct Tls {
    std::string server_ca, certificate, key;  ///< Files in PEM; all empty: none.
  };

  /// `endpoint` is "unix:PATH" or "tcp:HOST:PORT". TLS is for TCP.
  DataSocket(const std::string& endpoint, const Tls& tls, Deadline deadline);
  ~DataSocket();
  DataSocket(const DataSocket&) = delete;  // owns a socket
  DataSocket& operator=(const DataSocket&) = delete;

  /// Writes all pieces. They are used up.
  void write(std::span<iovec> pieces, Deadline deadline);
  /// Reads at least one byte, and takes the descriptors that come with it. Asks without waiting for
  /// `spin` at first: that costs time of a core, and less than to be woken.
  std::size_t read(std::span<std::byte> into, Deadline deadline, std::chrono::microseconds spin,
                   std::vector<Descriptor>* descriptors);

 private:
  void connect_unix(const std::string& path);
  void connect_tcp(const std::string& host, const std::string& port, Deadline deadline);
  void handshake(const std::string& host, const Tls& tls, Deadline deadline);
  void wait(short events, Deadline deadline) const;
  [[nodiscard]] std::ptrdiff_t receive(std::span<std::byte> into,
                                       std::vector<Descriptor>* descriptors);

  Descriptor socket_;
  bool is_unix_ = false;
  std::unique_ptr<ssl_ctx_st, void (*)(ssl_ctx_st*)> context_;
  std::unique_ptr<ssl_st, void (*)(ssl_st*)> ssl_;
};

}  // namespace kvtier::services
