#pragma once

#include "benchmarks/service/server_process.h"
#include "services/client/data_channel.h"

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

namespace kvtier::bench {

/// Attaches to the data plane of the server.
[[nodiscard]] std::unique_ptr<services::DataChannel> attach(const ServerProcess& server);

/// Pages in a random order, read to a buffer that holds `kBatch` of them.
class PageReader {
 public:
  static constexpr std::size_t kBatch = 256;

  PageReader(services::DataChannel& channel, const PageSet& pages, std::size_t count,
             std::uint64_t seed);

  [[nodiscard]] const std::vector<std::uint32_t>& order() const { return order_; }
  [[nodiscard]] std::size_t bytes() const { return order_.size() * pages_.page_bytes; }
  /// Where page number `i` of the order goes.
  [[nodiscard]] std::span<std::byte> destination(std::size_t i);

  /// Copies them from the arena, as the client library does; checksums are not compared.
  void read_shared();
  /// Receives them from the socket.
  void read_framed();
  /// Whether `destination` has what the pages have, for those of the last batch.
  [[nodiscard]] bool last_batch_is_right() const;

 private:
  std::uint64_t ask(std::size_t first, std::uint32_t flags);

  services::DataChannel& channel_;
  const PageSet& pages_;
  std::vector<std::uint32_t> order_;
  std::vector<std::byte> buffer_;
};

}  // namespace kvtier::bench
