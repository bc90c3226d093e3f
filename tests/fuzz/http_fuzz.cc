// The operators' HTTP server: whatever bytes arrive, it answers with responses of its own or
// closes, and serves the next one.

#include "services/metrics/http_server.h"
#include "tests/fuzz/fuzz.h"

#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace {

using kvtier::fuzz::require;
using namespace kvtier::services;  // NOLINT(google-build-using-namespace): a program

constexpr std::size_t kMaxInput = 1 << 16;  // what a socket takes at once
const std::string kPage = "the page";

/// A server on a socket that no other process looks for.
class Served {
 public:
  Served() : path_("/tmp/kvtier-http-fuzz-" + std::to_string(::getpid())), server_(options()) {}

  /// Sends all bytes, says that there are no more, and returns what comes back.
  [[nodiscard]] std::string exchange(std::string_view bytes) const {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    require(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0,
            "the server listens");
    // It may close before it has read all.
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) break;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    (void)::shutdown(fd, SHUT_WR);
    std::string reply;
    char buffer[4096];
    for (ssize_t got = 0; (got = ::recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
      reply.append(buffer, static_cast<std::size_t>(got));
    }
    ::close(fd);
    return reply;
  }

 private:
  [[nodiscard]] HttpOptions options() const {
    HttpOptions options;
    options.endpoint = parse_endpoint("unix:" + path_);
    options.routes["/"] = [] { return HttpResponse{.body = kPage}; };
    options.max_request_bytes = 1024;
    return options;
  }

  const std::string path_;
  const HttpServer server_;
};

/// Takes a response from the front; its code, or 0 when there is none left.
int take_response(std::string_view& text) {
  if (text.empty()) return 0;
  const std::size_t end = text.find("\r\n\r\n");
  require(text.starts_with("HTTP/1.") && end != text.npos, "a reply has a status and a head");
  const std::string_view head = text.substr(0, end + 2);
  require(head.find("\r\nX-Content-Type-Options: nosniff\r\n") != head.npos, "a reply is guarded");
  const std::string_view label = "\r\nContent-Length: ";
  const std::size_t at = head.find(label);
  require(at != head.npos, "a reply states its length");
  const auto length = std::stoul(std::string(head.substr(at + label.size(), 8)));
  const std::string_view body = text.substr(end + 4, length);
  require(body.size() == length, "a reply is whole");
  const int code = std::stoi(std::string(head.substr(9, 3)));
  require(code != 200 || body == kPage, "a page is what its path says");
  text.remove_prefix(end + 4 + length);
  return code;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Served served;
  const std::string reply =
      served.exchange({reinterpret_cast<const char*>(data), std::min(size, kMaxInput)});
  std::string_view left = reply;
  for (int code = take_response(left); code != 0; code = take_response(left)) {
    require(code == 200 || code == 400 || code == 403 || code == 404 || code == 405 ||
                code == 413 || code == 431,
            "a reply has a code of the server's");
  }
  const std::string next = served.exchange("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  left = next;
  require(take_response(left) == 200, "the next request is served");
  return 0;
}
