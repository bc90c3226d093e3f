#pragma once

#include "kvtier/client.h"
#include "kvtier/v1/status.pb.h"

#include "services/wire/durations.h"
#include "services/wire/grpc_time.h"
#include "services/wire/rpc.h"

#include <google/protobuf/message_lite.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <unistd.h>
#include <vector>

namespace kvtier::services {

/// What the end of a session or a lease may take, whose caller does not wait for it to succeed.
inline constexpr std::chrono::seconds kCloseTime{1};

/// A channel, and how calls over it are made: with a deadline, with credentials, again when the
/// server could not take them. Thread-safe.
class Connection {
 public:
  /// Throws `kInvalidArgument`.
  explicit Connection(const ClientOptions& options, bool is_admin = false);

  [[nodiscard]] const ClientOptions& options() const noexcept { return options_; }
  /// Whether this process is a fork of the one that made the connection: its sockets are those of
  /// the other, and it has none of its threads. Calls throw `kFailedPrecondition` then.
  [[nodiscard]] bool is_forked() const noexcept { return ::getpid() != process_; }
  [[nodiscard]] grpc::Channel& channel() noexcept { return *channel_; }
  /// Returns channels for `most` streams at a time, a connection each: that of all calls, and those
  /// of the others that are connected; the rest begin to connect, for the next time. They live as
  /// long as this.
  [[nodiscard]] std::vector<grpc::Channel*> channels(std::size_t most);

  /// Adds the token.
  void authorize(grpc::ClientContext& context) const;

  /// Makes a call with one response, until it is taken or the attempts are used up. Throws
  /// `ClientError`.
  template <typename Response, typename Request>
  [[nodiscard]] Response call(const Request& request) const {
    Response response;
    retry([&] {
      grpc::ClientContext context;
      prepare(context);
      return start(rpc_path<Request>(), context, request, response);
    });
    return response;
  }
  /// As `call`, of a call that must not be repeated.
  template <typename Response, typename Request>
  [[nodiscard]] Response call_once(const Request& request) const {
    Response response;
    call_once([&](grpc::ClientContext& context) {
      return start(rpc_path<Request>(), context, request, response);
    });
    return response;
  }
  /// Ends a session or a lease, waiting a second at most. When this fails, it runs out. In a fork
  /// it is the other process's.
  template <typename Response, typename Request>
  void end(const Request& request) const {
    if (is_forked()) return;
    grpc::ClientContext context;
    context.set_deadline(grpc_deadline(kCloseTime));
    authorize(context);
    Response response;
    (void)start(rpc_path<Request>(), context, request, response);
  }
  /// Makes a call, whose context is ready, that must not be repeated. Throws `ClientError`.
  void call_once(const std::function<grpc::Status(grpc::ClientContext&)>& attempt) const;
  /// Runs `attempt`, which makes its own context, until it is taken or the attempts are used up.
  /// Throws `ClientError`.
  void retry(const std::function<grpc::Status()>& attempt) const;

 private:
  void check_process() const;
  void prepare(grpc::ClientContext& context) const;
  [[nodiscard]] grpc::Status start(const std::string& path, grpc::ClientContext& context,
                                   const google::protobuf::MessageLite& request,
                                   google::protobuf::MessageLite& response) const;
  [[nodiscard]] std::shared_ptr<grpc::Channel> make_channel() const;

  const pid_t process_ = ::getpid();
  const ClientOptions options_;
  const bool is_admin_;  ///< For AdminService: errors name the socket that has it.
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const std::shared_ptr<grpc::Channel> channel_;
  std::mutex more_mutex_;
  std::vector<std::shared_ptr<grpc::Channel>> more_channels_;  ///< Guarded by the mutex.
};

/// Throws what `status` says, unless it is OK.
void throw_status(const grpc::Status& status);
/// Returns the reason of the error; empty when the server gave none.
[[nodiscard]] std::string reason_of(const grpc::Status& status);
/// Returns a random UUID.
[[nodiscard]] std::string make_request_id();

}  // namespace kvtier::services
