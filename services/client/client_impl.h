#pragma once

#include "kvtier/client.h"
#include "kvtier/v1/session.grpc.pb.h"

#include "services/client/channel_pool.h"
#include "services/client/connection.h"
#include "services/client/request_tensors.h"
#include "services/wire/grpc_time.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace kvtier {

/// The connection, and the thread that renews leases.
class Client::Impl {
 public:
  explicit Impl(const ClientOptions& options)
      : connection(options),
        channels(connection),
        sessions_(v1::SessionService::NewStub(connection.channel().shared_from_this())),
        renewer_([this](const std::stop_token& ending) { renew_now_and_then(ending); }) {}
  Impl(const Impl&) = delete;  // owns a thread
  Impl& operator=(const Impl&) = delete;

  void add(const std::string& name, std::chrono::milliseconds ttl) {
    {
      const std::lock_guard lock(mutex_);
      names_.insert(name);
      interval_ = std::min(interval_, ttl / 3);
    }
    wake_.notify_all();
  }
  void remove(const std::string& name) {
    if (connection.is_forked()) return;
    const std::lock_guard lock(mutex_);
    names_.erase(name);
  }

  /// Null for a session that was moved from.
  [[nodiscard]] static RemoteSession::Impl* impl_of(const RemoteSession& session) noexcept {
    return session.impl_.get();
  }

  /// Makes a call that may be repeated, over the data plane or over gRPC.
  template <typename Response, typename Request>
  [[nodiscard]] Response run(const Request& request, const services::RequestTensors& tensors) {
    Response response;
    if (run_over_plane(request, tensors, response)) return response;
    tensors.fill();
    return connection.call<Response>(request);
  }
  /// Returns false when the call must be made over gRPC, which is safe for one that may be
  /// repeated: there was no channel, the tensors did not fit, or the server could not take it.
  template <typename Request, typename Response>
  [[nodiscard]] bool run_over_plane(const Request& request, const services::RequestTensors& tensors,
                                    Response& response) {
    const services::ChannelPool::Lent channel = channels.borrow();
    if (!channel) return false;
    try {
      return services::call_over(*channel, request, tensors, response);
    } catch (const ClientError& error) {
      if (error.code() == ErrorCode::kUnavailable ||
          error.code() == ErrorCode::kResourceExhausted || error.reason() == "REPLY_TOO_LARGE") {
        return false;
      }
      throw;
    }
  }

  services::Connection connection;
  services::ChannelPool channels;
  services::DeviceMemories memories;

 private:
  static constexpr std::size_t kNamesPerRenewal = 1024;

  const std::unique_ptr<v1::SessionService::Stub> sessions_;  ///< For the stream of renewals.

  void renew_now_and_then(const std::stop_token& ending) {
    std::unique_lock lock(mutex_);
    while (!ending.stop_requested()) {
      const auto interval = interval_;
      wake_.wait_for(lock, ending, interval, [&] { return interval_ < interval; });
      if (ending.stop_requested() || names_.empty()) continue;
      const std::vector<std::string> names(names_.begin(), names_.end());
      lock.unlock();
      grpc::ClientContext context;
      const std::stop_callback cancel(ending, [&context] { context.TryCancel(); });
      renew(context, names);
      lock.lock();
    }
  }

  /// A renewal that fails is tried again with the next; what is lost, the next call says.
  void renew(grpc::ClientContext& context, const std::vector<std::string>& names) {
    context.set_deadline(services::grpc_deadline(connection.options().timeout));
    connection.authorize(context);
    const auto stream = sessions_->KeepAlive(&context);
    for (std::size_t first = 0; first < names.size(); first += kNamesPerRenewal) {
      v1::KeepAliveRequest request;
      const std::size_t end = std::min(names.size(), first + kNamesPerRenewal);
      for (std::size_t i = first; i < end; ++i) request.add_names(names[i]);
      v1::KeepAliveResponse response;
      if (!stream->Write(request) || !stream->Read(&response)) break;
    }
    stream->WritesDone();
    (void)stream->Finish();
  }

  std::mutex mutex_;  ///< Guards all below but the thread.
  std::condition_variable_any wake_;
  std::set<std::string> names_;
  std::chrono::milliseconds interval_{20'000};
  std::jthread renewer_;  ///< Ends first.
};

}  // namespace kvtier
