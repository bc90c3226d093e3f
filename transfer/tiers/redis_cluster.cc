#include "transfer/tiers/redis_cluster.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <hiredis/hiredis.h>
#include <poll.h>
#include <sys/socket.h>
#include <utility>

namespace kvtier::tiers {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kReadBytes = std::size_t{256} << 10;
constexpr int kMaxElements =
    16;  ///< Of an array that a server answers with; the longest asked for has 5.

struct FreeContext {
  void operator()(redisContext* context) const { redisFree(context); }
};
using Reply = std::shared_ptr<redisReply>;
using Arguments = std::vector<std::string_view>;

std::string_view text_of(const redisReply& reply) { return {reply.str, reply.len}; }

/// Arrays are allocated before their elements have come: a length out of all proportion is refused.
redisReplyObjectFunctions* bounded_functions(const redisReader& reader) {
  static const auto create_array = reader.fn->createArray;
  static redisReplyObjectFunctions functions = [&] {
    redisReplyObjectFunctions bounded = *reader.fn;
    bounded.createArray = [](const redisReadTask* task, int elements) -> void* {
      return elements > kMaxElements ? nullptr : create_array(task, elements);
    };
    return bounded;
  }();
  return &functions;
}

/// A socket with Redis's protocol on it, every wait bounded.
class RedisSocket {
 public:
  RedisSocket(const RemoteEndpoint& endpoint, std::chrono::milliseconds io_timeout,
              Deadline deadline)
      : io_timeout_(io_timeout),
        context_(endpoint.path.empty() ? redisConnectNonBlock(endpoint.host.c_str(), endpoint.port)
                                       : redisConnectUnixNonBlock(endpoint.path.c_str())) {
    if (!context_) throw std::bad_alloc();
    if (context_->err != 0) throw RemoteFailure(context_->errstr);
    context_->reader->fn = bounded_functions(*context_->reader);
    (void)wait(POLLOUT, deadline);
    int error = 0;
    socklen_t size = sizeof error;
    if (::getsockopt(context_->fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
      throw RemoteFailure(std::string("connect: ") + std::strerror(error));
    }
  }

  /// Adds a command to what `exchange` sends.
  void append(const Arguments& arguments) {
    std::vector<const char*> texts;
    std::vector<std::size_t> sizes;
    for (const std::string_view argument : arguments) {
      texts.push_back(argument.data());
      sizes.push_back(argument.size());
    }
    char* command = nullptr;
    const int size = redisFormatCommandArgv(&command, static_cast<int>(texts.size()), texts.data(),
                                            sizes.data());
    if (size < 0) throw std::bad_alloc();
    commands_.push_back({{command, redisFreeCommand}, static_cast<std::size_t>(size)});
  }

  /// Sends the commands and returns a reply to each; they may have `max_bytes` together.
  std::vector<Reply> exchange(std::size_t max_bytes, Deadline deadline) {
    std::vector<Reply> replies;
    const std::size_t num_commands = commands_.size();
    std::size_t command = 0, offset = 0, received = 0;
    while (replies.size() < num_commands) {
      const bool sending = command < num_commands;
      const int ready = wait(sending ? POLLIN | POLLOUT : POLLIN, deadline);
      if (sending && (ready & POLLOUT) != 0) {
        offset += send(commands_[command], offset);
        if (offset == commands_[command].size) {
          commands_[command].bytes.reset();
          ++command;
          offset = 0;
        }
      }
      if ((ready & ~POLLOUT) == 0) continue;
      received += receive();
      if (received > max_bytes) {
        throw RemoteFailure("an answer of more than " + std::to_string(max_bytes) + " bytes");
      }
      parse(replies);
    }
    if (replies.size() > num_commands) throw RemoteFailure("an answer without a command");
    commands_.clear();
    return replies;
  }

  /// One command with a short answer.
  Reply ask(const Arguments& arguments, Deadline deadline) {
    append(arguments);
    return exchange(std::size_t{64} << 10, deadline).front();
  }

 private:
  struct Command {
    std::unique_ptr<char, void (*)(char*)> bytes;
    std::size_t size;
  };

  /// Returns what the socket is ready for.
  int wait(int events, Deadline deadline) {
    for (;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) throw RemoteFailure("no answer before the deadline", /*silent=*/true);
      pollfd one{.fd = context_->fd, .events = static_cast<short>(events), .revents = 0};
      const int count = ::poll(&one, 1, static_cast<int>(std::min(left, io_timeout_).count()));
      if (count > 0) return one.revents;
      if (count == 0) {
        throw RemoteFailure("silent for " + std::to_string(io_timeout_.count()) + " ms", true);
      }
      if (errno != EINTR) throw RemoteFailure(std::string("poll: ") + std::strerror(errno));
    }
  }

  std::size_t send(const Command& command, std::size_t offset) {
    const ssize_t sent = ::send(context_->fd, command.bytes.get() + offset, command.size - offset,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (errno == EAGAIN || errno == EINTR) return 0;
    throw RemoteFailure(std::string("send: ") + std::strerror(errno));
  }

  std::size_t receive() {
    if (!buffer_) buffer_ = std::make_unique<char[]>(kReadBytes);
    const ssize_t got = ::recv(context_->fd, buffer_.get(), kReadBytes, MSG_DONTWAIT);
    if (got == 0) throw RemoteFailure("the server closed the connection");
    if (got < 0) {
      if (errno == EAGAIN || errno == EINTR) return 0;
      throw RemoteFailure(std::string("recv: ") + std::strerror(errno));
    }
    if (redisReaderFeed(context_->reader, buffer_.get(), static_cast<std::size_t>(got)) !=
        REDIS_OK) {
      throw RemoteFailure(context_->reader->errstr);
    }
    return static_cast<std::size_t>(got);
  }

  void parse(std::vector<Reply>& replies) {
    for (;;) {
      void* reply = nullptr;
      if (redisReaderGetReply(context_->reader, &reply) != REDIS_OK) {
        throw RemoteFailure(context_->reader->errstr);
      }
      if (reply == nullptr) return;
      replies.emplace_back(static_cast<redisReply*>(reply), freeReplyObject);
    }
  }

  const std::chrono::milliseconds io_timeout_;
  std::unique_ptr<redisContext, FreeContext> context_;
  std::vector<Command> commands_;
  std::unique_ptr<char[]> buffer_;
};

/// An error reply that says something of one value; all others say something of the server.
TierStatus status_of_error(const redisReply& reply) {
  const std::string_view text = text_of(reply);
  if (text.starts_with("OOM ")) return TierStatus::kFull;
  if (text.starts_with("WRONGTYPE ")) return TierStatus::kCorrupt;
  throw RemoteFailure(std::string(text));
}

class RedisConnection final : public RemoteConnection {
 public:
  RedisConnection(RedisSocket socket, const RemoteOptions& options)
      : socket_(std::move(socket)), options_(options), ttl_(std::to_string(options.ttl.count())) {}

  void run(RemoteVerb verb, std::span<RemoteOp> ops, Deadline deadline) override {
    if (verb == RemoteVerb::kProbe) {
      const Reply reply = socket_.ask({"PING"}, deadline);
      if (reply->type != REDIS_REPLY_STATUS) throw RemoteFailure(std::string(text_of(*reply)));
      return;
    }
    for (RemoteOp& op : ops) {
      const std::string_view value(reinterpret_cast<const char*>(op.value.data()), op.value.size());
      if (verb == RemoteVerb::kGet) socket_.append({"GET", op.name});
      if (verb == RemoteVerb::kSet) socket_.append({"SET", op.name, value, "EX", ttl_});
      if (verb == RemoteVerb::kRemove) socket_.append({"DEL", op.name});
    }
    const std::size_t each = verb == RemoteVerb::kGet ? 2 * options_.value_limit : 0;
    const std::vector<Reply> replies =
        socket_.exchange(ops.size() * each + (std::size_t{1} << 20), deadline);
    for (std::size_t i = 0; i < ops.size(); ++i) answer(verb, ops[i], replies[i]);
  }

 private:
  static void answer(RemoteVerb verb, RemoteOp& op, const Reply& reply) {
    if (reply->type == REDIS_REPLY_ERROR) {
      op.status = status_of_error(*reply);
    } else if (verb == RemoteVerb::kGet && reply->type == REDIS_REPLY_STRING) {
      op.found = {reply, std::as_bytes(std::span(reply->str, reply->len))};
      op.status = TierStatus::kOk;
    } else if (verb == RemoteVerb::kGet && reply->type == REDIS_REPLY_NIL) {
      op.status = TierStatus::kMiss;
    } else if (verb == RemoteVerb::kSet && reply->type == REDIS_REPLY_STATUS) {
      op.status = TierStatus::kOk;
    } else if (verb == RemoteVerb::kRemove && reply->type == REDIS_REPLY_INTEGER) {
      op.status = reply->integer > 0 ? TierStatus::kOk : TierStatus::kMiss;
    } else {
      throw RemoteFailure("an answer of type " + std::to_string(reply->type));
    }
  }

  RedisSocket socket_;
  const RemoteOptions options_;
  const std::string ttl_;
};

RemoteEndpoint ask_sentinels(const RedisOptions& options, Deadline deadline) {
  std::string failure;
  for (const std::string& sentinel : options.sentinels) {
    try {
      RedisSocket socket(RemoteEndpoint::parse(sentinel), options.remote.io_timeout, deadline);
      const Reply reply =
          socket.ask({"SENTINEL", "get-master-addr-by-name", options.master}, deadline);
      if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
          reply->element[0]->type == REDIS_REPLY_STRING &&
          reply->element[1]->type == REDIS_REPLY_STRING) {
        RemoteEndpoint endpoint;
        endpoint.host = text_of(*reply->element[0]);
        const std::string_view port = text_of(*reply->element[1]);
        const auto parsed = std::from_chars(port.data(), port.data() + port.size(), endpoint.port);
        if (parsed.ec == std::errc{} && endpoint.port != 0) return endpoint;
      }
      failure = sentinel + ": names no master '" + options.master + "'";
    } catch (const RemoteFailure& error) {
      failure = sentinel + ": " + error.what();
    }
  }
  throw RemoteFailure("sentinels: " + failure);
}

std::unique_ptr<RemoteConnection> connect(const RedisOptions& options, Deadline deadline) {
  const bool by_sentinel = !options.sentinels.empty();
  RedisSocket socket(
      by_sentinel ? ask_sentinels(options, deadline) : RemoteEndpoint::parse(options.server),
      options.remote.io_timeout, deadline);
  if (!options.password.empty()) {
    Arguments arguments{"AUTH"};
    if (!options.user.empty()) arguments.push_back(options.user);
    arguments.push_back(options.password);
    const Reply reply = socket.ask(arguments, deadline);
    if (reply->type == REDIS_REPLY_ERROR) throw RemoteFailure(std::string(text_of(*reply)));
  }
  if (by_sentinel) {
    // A sentinel may still name a master that has been replaced.
    const Reply role = socket.ask({"ROLE"}, deadline);
    if (role->type != REDIS_REPLY_ARRAY || role->elements == 0 ||
        role->element[0]->type != REDIS_REPLY_STRING || text_of(*role->element[0]) != "master") {
      throw RemoteFailure("the server that the sentinels name is no master");
    }
  }
  return std::make_unique<RedisConnection>(std::move(socket), options.remote);
}

class OneServer final : public RemoteRouter {
 public:
  std::size_t route(std::string_view /*name*/, const std::vector<bool>& /*alive*/) override {
    return 0;
  }
};

}  // namespace

std::shared_ptr<RemoteCluster> make_redis_cluster(const RedisOptions& options) {
  const bool by_sentinel = !options.sentinels.empty();
  if (options.server.empty() != by_sentinel || options.master.empty() == by_sentinel) {
    throw_error(ErrorCode::kInvalidArgument,
                "redis: expected a server, or sentinels and a master's name, found server '",
                options.server, "', ", options.sentinels.size(), " sentinels, master '",
                options.master, "'");
  }
  if (!options.user.empty() && options.password.empty()) {
    throw_error(ErrorCode::kInvalidArgument, "redis: expected a password with user '", options.user,
                "', found none");
  }
  if (!by_sentinel) (void)RemoteEndpoint::parse(options.server);
  std::string name = by_sentinel ? options.master + " by" : options.server;
  for (const std::string& sentinel : options.sentinels) {
    (void)RemoteEndpoint::parse(sentinel);
    name += " " + sentinel;
  }
  std::vector<RemoteCluster::Server> servers;
  servers.push_back({name, [options](Deadline deadline) { return connect(options, deadline); }});
  return std::make_shared<RemoteCluster>("redis", options.remote, std::move(servers),
                                         std::make_unique<OneServer>());
}

}  // namespace kvtier::tiers
