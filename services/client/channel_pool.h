#pragma once

#include "kvtier/v1/shared_memory.pb.h"

#include "services/client/connection.h"
#include "services/client/data_channel.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvtier::services {

/// Channels to the data plane of one server, made when they are needed and lent to one thread at a
/// time. A server without a data plane, or one that refuses or cannot be reached, is asked again
/// after a few seconds. Thread-safe.
class ChannelPool {
 public:
  using Clock = std::chrono::steady_clock;
  explicit ChannelPool(
      Connection& connection, std::function<Clock::time_point()> now = [] { return Clock::now(); });

  struct GiveBack {
    ChannelPool* pool = nullptr;
    void operator()(DataChannel* channel) const {
      pool->give_back(std::unique_ptr<DataChannel>(channel));
    }
  };
  /// A channel, until it is destroyed; null when calls must go over gRPC.
  using Lent = std::unique_ptr<DataChannel, GiveBack>;
  /// Waits when all channels are lent. Never throws.
  [[nodiscard]] Lent borrow();

  /// A connection of its own.
  struct Attached {
    std::unique_ptr<DataChannel> channel;  ///< Null: there is none to be had.
    std::string attachment;                ///< Its resource name.
  };
  /// `staging_bytes` 0: the server's default. Never throws.
  [[nodiscard]] Attached attach(std::int64_t staging_bytes) const;

 private:
  [[nodiscard]] std::string endpoint_of(const v1::CreateAttachmentResponse& response) const;
  void give_back(std::unique_ptr<DataChannel> channel);

  Connection& connection_;
  const std::function<Clock::time_point()> now_;
  std::mutex mutex_;  ///< Guards all below.
  std::condition_variable returned_;
  std::vector<std::unique_ptr<DataChannel>> idle_;
  std::size_t made_ = 0;
  Clock::time_point ask_again_ = Clock::time_point::min();
};

}  // namespace kvtier::services
