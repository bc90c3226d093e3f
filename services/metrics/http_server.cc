#include "services/metrics/http_server.h"

#include "kvtier/error.h"

#include "services/base/listener.h"

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/core/basic_stream.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>

#include <netinet/in.h>
#include <optional>
#include <regex>
#include <sys/socket.h>
#include <thread>

namespace kvtier::services {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::system::error_code;
using Stream = beast::basic_stream<asio::generic::stream_protocol>;
using Request = http::request<http::empty_body>;
using Response = http::response<http::string_body>;

/// Returns the host of "host", "host:port" and "[v6]:port"; empty for anything else.
std::string host_of(const std::string& authority) {
  static const std::regex form(R"((?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z.-]+))(?::[0-9]{1,5})?)");
  std::smatch parts;
  if (authority.size() > 300 || !std::regex_match(authority, parts, form)) return "";
  return parts[1].matched ? parts[1].str() : parts[2].str();
}

bool is_local(const std::string& authority) {
  Endpoint endpoint;
  endpoint.is_unix = false;
  endpoint.host = host_of(authority);
  return endpoint.is_loopback();
}

}  // namespace

void check_http_endpoint(const Endpoint& endpoint) {
  if (endpoint.is_unix || endpoint.is_loopback()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "metrics: expected a loopback address or unix:PATH, found " + endpoint.text());
}

class HttpServer::Impl {
 public:
  explicit Impl(HttpOptions options) : options_(std::move(options)) {
    check_http_endpoint(options_.endpoint);
    listener_.add(options_.endpoint, options_.bound.get(), [this](Descriptor socket) {
      asio::post(loop_, [this, socket = std::move(socket)]() mutable { open(std::move(socket)); });
    });
    listener_.start();
    thread_ = std::thread([this] { loop_.run(); });
  }
  ~Impl() {
    listener_.stop();
    asio::post(loop_, [this] {
      work_.reset();
      for (const auto& [number, connection] : connections_) connection->close();
    });
    thread_.join();
  }
  Impl(const Impl&) = delete;  // its address is held by connections
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] const Endpoint& endpoint() const noexcept { return options_.endpoint; }

 private:
  /// One client: reads a request, answers it, and so on. Lives in its handlers.
  class Connection : public std::enable_shared_from_this<Connection> {
   public:
    Connection(Impl& server, asio::generic::stream_protocol::socket socket)
        : server_(server), stream_(std::move(socket)), number_(++server.last_number_) {
      server_.connections_.emplace(number_, this);
    }
    ~Connection() { server_.connections_.erase(number_); }
    Connection(const Connection&) = delete;  // its address is held by handlers
    Connection& operator=(const Connection&) = delete;

    void read() {
      parser_.emplace();
      parser_->header_limit(static_cast<std::uint32_t>(server_.options_.max_request_bytes));
      parser_->body_limit(0);
      stream_.expires_after(server_.options_.timeout);
      http::async_read(stream_, buffer_, *parser_,
                       [self = shared_from_this()](const error_code& error, std::size_t) {
                         self->on_read(error);
                       });
    }
    void close() { stream_.close(); }
    [[nodiscard]] bool was_asked() const noexcept { return was_asked_; }

   private:
    void on_read(const error_code& error) {
      if (error == http::error::header_limit || error == http::error::buffer_overflow) {
        return write(make(431, "the request is too large"), false);
      }
      if (error == http::error::body_limit) return write(make(413, "no body is taken"), false);
      if (error.category() == make_error_code(http::error::end_of_stream).category() &&
          error != http::error::end_of_stream && error != http::error::partial_message) {
        return write(make(400, "not a request"), false);
      }
      if (error) return;  // the client has gone, or took too long
      const Request& request = parser_->get();
      write(answer(request), request.keep_alive());
    }

    HttpResponse answer(const Request& request) const {
      const std::string host(request[http::field::host]);
      const bool is_one = request.count(http::field::host) == 1;
      if (!server_.options_.endpoint.is_unix && !(is_one && is_local(host))) {
        return make(403, "expected a loopback host");
      }
      if (request.method() != http::verb::get) return make(405, "GET only");
      std::string path(request.target());
      path.resize(std::min(path.size(), path.find('?')));
      const auto route = server_.options_.routes.find(path);
      if (route == server_.options_.routes.end()) return make(404, "no such page");
      try {
        return route->second();
      } catch (const std::exception&) {
        return make(500, "the answer could not be made");
      }
    }

    static HttpResponse make(int status, const char* text) {
      return {.status = status, .body = std::string(text) + '\n'};
    }

    void write(HttpResponse answer, bool keep_alive) {
      was_asked_ = true;
      response_.emplace();
      response_->result(static_cast<unsigned>(answer.status));
      response_->set(http::field::content_type, answer.type);
      response_->set(http::field::cache_control, "no-store");
      response_->set("X-Content-Type-Options", "nosniff");
      response_->set("Content-Security-Policy",
                     "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                     "connect-src 'self'; img-src data:; frame-ancestors 'none'");
      if (answer.status == 405) response_->set(http::field::allow, "GET");
      response_->body() = std::move(answer.body);
      response_->keep_alive(keep_alive);
      response_->prepare_payload();
      stream_.expires_after(server_.options_.timeout);
      http::async_write(
          stream_, *response_,
          [self = shared_from_this(), keep_alive](const error_code& error, std::size_t) {
            if (error) return;
            if (keep_alive) return self->read();
            error_code ignored;
            self->stream_.socket().shutdown(asio::socket_base::shutdown_send, ignored);
          });
    }

    Impl& server_;
    Stream stream_;
    const std::uint64_t number_;
    bool was_asked_ = false;
    beast::flat_buffer buffer_{16384};
    std::optional<http::request_parser<http::empty_body>> parser_;
    std::optional<Response> response_;
  };

  void open(Descriptor accepted) {
    const int family = options_.endpoint.is_unix ? AF_UNIX : address_family(accepted.get());
    asio::generic::stream_protocol::socket socket(loop_);
    error_code error;
    socket.assign(asio::generic::stream_protocol(family, 0), accepted.get(), error);
    if (error) return;
    static_cast<void>(accepted.release());  // from here on it is `socket`'s
    if (connections_.size() >= options_.max_connections && !make_room()) return;
    std::make_shared<Connection>(*this, std::move(socket))->read();
  }

  /// Ends the oldest connection that has sent no request yet.
  bool make_room() {
    for (const auto& [number, connection] : connections_) {
      if (connection->was_asked()) continue;
      const auto ended = connection->shared_from_this();
      connections_.erase(std::uint64_t{number});
      ended->close();
      return true;
    }
    return false;
  }

  static int address_family(int fd) {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    (void)::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
    return address.ss_family;
  }

  HttpOptions options_;
  asio::io_context loop_{1};
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work_{
      asio::make_work_guard(loop_)};
  std::map<std::uint64_t, Connection*> connections_;  ///< Oldest first; used by `thread_` only.
  std::uint64_t last_number_ = 0;
  Listener listener_;
  std::thread thread_;
};

HttpServer::HttpServer(HttpOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
HttpServer::~HttpServer() = default;
const Endpoint& HttpServer::endpoint() const noexcept { return impl_->endpoint(); }

}  // namespace kvtier::services
