#include "services/client/channel_pool.h"

#include <unistd.h>

namespace kvtier::services {
namespace {

constexpr std::size_t kMaxChannels = 4;
constexpr std::chrono::microseconds kSpin{50};
/// What kept a server from giving a channel, such as another client's, may have gone by then.
constexpr std::chrono::seconds kAskAgainAfter{5};

}  // namespace

ChannelPool::ChannelPool(Connection& connection, std::function<Clock::time_point()> now)
    : connection_(connection), now_(std::move(now)) {}

ChannelPool::Lent ChannelPool::borrow() {
  if (!connection_.options().data_plane || connection_.is_forked()) return {};
  std::unique_lock lock(mutex_);
  returned_.wait(lock,
                 [this] { return now_() < ask_again_ || !idle_.empty() || made_ < kMaxChannels; });
  if (now_() < ask_again_ && idle_.empty()) return {};
  if (!idle_.empty()) {
    Lent lent(idle_.back().release(), GiveBack{this});
    idle_.pop_back();
    return lent;
  }
  ++made_;
  lock.unlock();
  Lent made(attach(0).channel.release(), GiveBack{this});
  if (made) return made;
  lock.lock();
  --made_;
  ask_again_ = now_() + kAskAgainAfter;
  returned_.notify_all();
  return {};
}

void ChannelPool::give_back(std::unique_ptr<DataChannel> channel) {
  {
    const std::lock_guard lock(mutex_);
    if (channel->broken()) {
      // The others are likely broken too, and new ones are soon made.
      made_ -= 1 + idle_.size();
      idle_.clear();
    } else {
      idle_.push_back(std::move(channel));
    }
  }
  returned_.notify_all();
}

ChannelPool::Attached ChannelPool::attach(std::int64_t staging_bytes) const {
  if (!connection_.options().data_plane) return {};
  try {
    v1::CreateAttachmentRequest request;
    request.set_process_id(::getpid());
    request.set_staging_bytes(staging_bytes);
    const auto response = connection_.call_once<v1::CreateAttachmentResponse>(request);
    const ClientOptions& options = connection_.options();
    const std::string endpoint = endpoint_of(response);
    if (endpoint.empty()) return {};
    return {std::make_unique<DataChannel>(DataChannelOptions{
                .endpoint = endpoint,
                .token = response.token(),
                .tls = {options.tls_server_ca, options.tls_certificate, options.tls_key},
                .timeout = options.timeout,
                .spin = kSpin}),
            response.attachment().name()};
  } catch (const Error&) {
    return {};  // every call can go over gRPC
  }
}

/// A Unix socket for a server that is reached by one; the TCP port of the others.
std::string ChannelPool::endpoint_of(const v1::CreateAttachmentResponse& response) const {
  const std::string& server = connection_.options().server;
  const bool is_unix = server.starts_with("unix:");
  for (const std::string& endpoint : response.endpoints()) {
    if (is_unix && endpoint.starts_with("unix:")) return endpoint;
    if (!is_unix && endpoint.starts_with("tcp:")) {
      return server.substr(0, server.rfind(':')) + endpoint.substr(endpoint.rfind(':'));
    }
  }
  return "";
}

}  // namespace kvtier::services
