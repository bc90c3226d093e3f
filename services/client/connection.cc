#include "services/client/connection.h"

#include "include/types/failure.h"
#include "services/client/error_details.h"
#include "services/client/peer.h"
#include "services/wire/grpc_lifetime.h"

#include <boost/uuid/random_generator.hpp>
#include <boost/uuid/uuid_io.hpp>
#include <grpcpp/create_channel.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <random>
#include <sstream>
#include <string_view>
#include <thread>
#include <unistd.h>

namespace kvtier::services {
namespace {

constexpr int kMaxPageStreams = 16;
constexpr int kMaxMessageBytes = 4 << 20;
/// What a stream may send ahead, and the longest frame. ReadPages of 64-KiB and 2-MiB pages over a
/// Unix socket of an EPYC 7003 with 2 cores: 1.9 and 2.2 GB/s, 1.6 and 1.9 with a window of one
/// message and frames of 16 KiB.
constexpr int kWindowBytes = 4 << 20;
/// The time that it ends must be one, in nanoseconds.
constexpr std::chrono::hours kLongestTimeout{365 * 24};
constexpr std::chrono::milliseconds kFirstBackoff{100};
constexpr std::chrono::milliseconds kLongestBackoff{1000};

template <typename... Parts>
[[noreturn]] void bad(const Parts&... parts) {
  throw_error(ErrorCode::kInvalidArgument, "client: ", parts...);
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) throw Error(ErrorCode::kNotFound, "client: expected a readable file, found " + path);
  return text.str();
}

std::shared_ptr<grpc::ChannelCredentials> credentials_of(const ClientOptions& options) {
  const bool any_tls = !options.tls_server_ca.empty() || !options.tls_certificate.empty() ||
                       !options.tls_key.empty();
  if (options.server.starts_with("unix:")) {
    check_owner(options.server.substr(std::string_view("unix:").size()));
    return grpc::InsecureChannelCredentials();
  }
  if (!options.server.starts_with("tcp:")) {
    bad("server: expected unix:PATH or tcp:HOST:PORT, found \"" + options.server + "\"");
  }
  if (any_tls) {
    if (options.tls_server_ca.empty() || options.tls_certificate.empty() ||
        options.tls_key.empty()) {
      bad("TLS: expected server CA, certificate and key together, found some of them");
    }
    grpc::SslCredentialsOptions ssl;
    ssl.pem_root_certs = read_file(options.tls_server_ca);
    ssl.pem_cert_chain = read_file(options.tls_certificate);
    ssl.pem_private_key = read_file(options.tls_key);
    return grpc::SslCredentials(ssl);
  }
  if (!options.insecure_tcp) bad("expected TLS files for TCP, or insecure_tcp, found neither");
  return grpc::InsecureChannelCredentials();
}

std::string target_of(const std::string& server) {
  return server.starts_with("unix:") ? server : server.substr(std::string_view("tcp:").size());
}

/// How long to wait before another attempt; below 0: none is worth it.
std::chrono::milliseconds delay_before(const grpc::Status& status, int attempt) {
  // A client cancels nothing itself: a server that shuts down does.
  const bool unavailable = status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                           status.error_code() == grpc::StatusCode::CANCELLED;
  const auto hint = parse_error_details(status.error_details()).retry_after;
  const bool overloaded = status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && hint;
  if (!unavailable && !overloaded) return std::chrono::milliseconds(-1);
  thread_local std::minstd_rand random{std::random_device{}()};
  std::chrono::milliseconds delay =
      std::min(kFirstBackoff * (1 << std::min(attempt, 4)), kLongestBackoff);
  if (hint) delay = std::clamp(*hint, delay, kLongestBackoff);
  std::uniform_int_distribution<std::int64_t> jitter(delay.count() / 2, delay.count());
  return std::chrono::milliseconds(jitter(random));
}

/// Returns what to say where a server has another of its sockets; empty: it has not.
std::string wrong_socket(const grpc::Status& status, const std::string& server, bool is_admin) {
  const bool unknown_method =
      status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty();
  const bool no_http2 = status.error_message().find("Failed parsing HTTP/2") != std::string::npos;
  if (!server.starts_with("unix:") || !(unknown_method || no_http2)) return {};
  std::string other = server;
  for (const std::string_view suffix : {".data", ".admin"}) {
    if (other.ends_with(suffix)) other.resize(other.size() - suffix.size());
  }
  // Beside this one it has its own name.
  if (is_admin && !other.ends_with("/kvtier.sock")) other += ".admin";
  return std::string("server: expected ") + (is_admin ? "an admin socket" : "a socket of clients") +
         ", found another at " + server + (other == server ? "" : ": try " + other);
}

/// Says what was expected where gRPC found no server. Its own text, which only names the error of
/// the socket, follows where there may be one: over TCP, or where the socket may not be opened.
grpc::Status explained(const grpc::Status& status, const std::string& server, bool is_admin) {
  if (const std::string wrong = wrong_socket(status, server, is_admin); !wrong.empty()) {
    return {status.error_code(), wrong, status.error_details()};
  }
  const std::string& found = status.error_message();
  const bool unreached = status.error_code() == grpc::StatusCode::UNAVAILABLE &&
                         found.starts_with("failed to connect");
  if (!unreached) return status;
  std::string text =
      "server: expected kvtier serve at " + server + ", found none (start it: kvtier serve)";
  constexpr std::string_view kUnix = "unix:";
  const bool is_unix = server.starts_with(kUnix);
  const bool denied =
      is_unix && ::access(server.c_str() + kUnix.size(), W_OK) != 0 && errno == EACCES;
  if (!is_unix || denied) text += ": " + found;
  return {status.error_code(), text, status.error_details()};
}

const ClientOptions& checked(const ClientOptions& options) {
  if (options.timeout.count() <= 0 || options.timeout > kLongestTimeout) {
    bad("timeout: expected above 0 ms and at most a year, found ", options.timeout.count(), " ms");
  }
  if (options.attempts < 1) {
    bad("attempts: expected at least 1, found ", options.attempts);
  }
  if (!std::ranges::all_of(options.token, [](char c) { return c >= '!' && c <= '~'; })) {
    bad("token: expected printable ASCII without white space, found other characters");
  }
  if (options.page_streams < 0 || options.page_streams > kMaxPageStreams) {
    bad("page_streams: expected 0 to ", kMaxPageStreams, ", found ", options.page_streams);
  }
  return options;
}

}  // namespace

Connection::Connection(const ClientOptions& options, bool is_admin)
    : options_(checked(options)),
      is_admin_(is_admin),
      credentials_(credentials_of(options)),
      channel_(make_channel()) {}

std::shared_ptr<grpc::Channel> Connection::make_channel() const {
  keep_grpc();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kWindowBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);  // the server takes one in 20 s
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A pool of its own: channels do not share a connection, nor its limit of streams.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  return grpc::CreateCustomChannel(target_of(options_.server), credentials_, arguments);
}

std::vector<grpc::Channel*> Connection::channels(std::size_t most) {
  std::vector<grpc::Channel*> channels{channel_.get()};
  const std::lock_guard lock(more_mutex_);
  while (more_channels_.size() + 1 < most) more_channels_.push_back(make_channel());
  for (const auto& channel : more_channels_) {
    if (channels.size() == most) break;
    if (channel->GetState(true) == GRPC_CHANNEL_READY) channels.push_back(channel.get());
  }
  return channels;
}

void Connection::authorize(grpc::ClientContext& context) const {
  if (!options_.token.empty()) context.AddMetadata("authorization", "Bearer " + options_.token);
}

void Connection::prepare(grpc::ClientContext& context) const {
  context.set_deadline(grpc_deadline(options_.timeout));
  authorize(context);
}

grpc::Status Connection::start(const std::string& path, grpc::ClientContext& context,
                               const google::protobuf::MessageLite& request,
                               google::protobuf::MessageLite& response) const {
  using google::protobuf::MessageLite;
  using grpc::internal::RpcMethod;
  return grpc::internal::BlockingUnaryCall<MessageLite, MessageLite>(
      channel_.get(), RpcMethod(path.c_str(), RpcMethod::NORMAL_RPC), &context, request, &response);
}

void Connection::check_process() const {
  if (!is_forked()) return;
  throw ClientError(ErrorCode::kFailedPrecondition,
                    "client: expected the process that made it, found a fork of that process", "");
}

void Connection::retry(const std::function<grpc::Status()>& attempt) const {
  check_process();
  for (int i = 0;; ++i) {
    const grpc::Status status = attempt();
    if (status.ok()) return;
    const std::chrono::milliseconds delay = delay_before(status, i);
    if (delay.count() < 0 || i + 1 >= options_.attempts) {
      throw_status(explained(status, options_.server, is_admin_));
    }
    std::this_thread::sleep_for(delay);
  }
}

void Connection::call_once(const std::function<grpc::Status(grpc::ClientContext&)>& attempt) const {
  check_process();
  grpc::ClientContext context;
  prepare(context);
  throw_status(explained(attempt(context), options_.server, is_admin_));
}

void throw_status(const grpc::Status& status) {
  if (status.ok()) return;
  throw ClientError(code_of(status.error_code()), status.error_message(), reason_of(status));
}

std::string reason_of(const grpc::Status& status) {
  return parse_error_details(status.error_details()).reason;
}

std::string make_request_id() {
  try {
    return to_string(boost::uuids::random_generator()());
  } catch (const boost::uuids::entropy_error&) {
    throw Error(ErrorCode::kUnavailable, "client: expected random bytes from the system");
  }
}

}  // namespace kvtier::services
