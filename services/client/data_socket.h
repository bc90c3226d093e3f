#pragma once

#include "services/wire/descriptor.h"

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <sys/uio.h>
#include <vector>

namespace kvtier::services {

/// The client's end of a socket of the data plane. Every operation has a deadline. Used by one
/// thread at a time. Throws `ClientError`: `kUnavailable` when the other end is gone or cannot be
/// reached, `kDeadlineExceeded`; the socket is of no more use then.
class DataSocket {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  struct Tls {
    std::string server_ca, certificate, key;  ///< Files in PEM; all empty: none.
  };

  DataSocket() = default;
  virtual ~DataSocket() = default;
  DataSocket(const DataSocket&) = delete;  // owns a socket
  DataSocket& operator=(const DataSocket&) = delete;

  /// Writes all pieces.
  virtual void write(std::span<const iovec> pieces, Deadline deadline) = 0;
  /// Reads at least one byte, and takes the descriptors that come with it over a Unix socket. Asks
  /// without waiting for `spin` at first, but over TLS: that costs time of a core, and less than to
  /// be woken.
  virtual std::size_t read(std::span<std::byte> into, Deadline deadline,
                           std::chrono::microseconds spin,
                           std::vector<Descriptor>* descriptors) = 0;
};

/// Connects to "unix:PATH" or "tcp:HOST:PORT". TLS is for TCP. Throws as `DataSocket`;
/// `kInvalidArgument` for another endpoint, `kNotFound` for files that cannot be used.
[[nodiscard]] std::unique_ptr<DataSocket> connect_data_socket(const std::string& endpoint,
                                                              const DataSocket::Tls& tls,
                                                              DataSocket::Deadline deadline);

}  // namespace kvtier::services
