#include "tests/services/metrics/http_client.h"

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>

#include <sstream>
#include <strings.h>

namespace kvtier::services::testing {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using Socket = asio::generic::stream_protocol::socket;

struct HttpClient::Connection {
  asio::io_context loop;
  Socket socket{loop};
  boost::beast::flat_buffer buffer;
};

std::string Reply::field(const std::string& name) const {
  std::istringstream lines(head);
  for (std::string line; std::getline(lines, line);) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.size() > name.size() && line[name.size()] == ':' &&
        ::strncasecmp(line.c_str(), name.c_str(), name.size()) == 0) {
      return line.substr(line.find_first_not_of(' ', name.size() + 1));
    }
  }
  return "";
}

HttpClient::HttpClient(const Endpoint& endpoint) : connection_(std::make_unique<Connection>()) {
  if (endpoint.is_unix) {
    connection_->socket.connect(asio::local::stream_protocol::endpoint(endpoint.path));
  } else {
    connection_->socket.connect(asio::ip::tcp::endpoint(
        asio::ip::make_address(endpoint.host), static_cast<unsigned short>(endpoint.port)));
  }
}
HttpClient::~HttpClient() = default;
HttpClient::HttpClient(HttpClient&&) noexcept = default;

void HttpClient::write(const std::string& bytes) {
  boost::system::error_code error;  // the server may answer, and close, before it has read all
  asio::write(connection_->socket, asio::buffer(bytes), error);
}

Reply HttpClient::send(const std::string& bytes, const std::string& method) {
  write(bytes);
  http::response_parser<http::string_body> parser;
  parser.skip(method == "HEAD");
  boost::system::error_code error;
  http::read(connection_->socket, connection_->buffer, parser, error);
  if (error) return {};
  std::ostringstream head;
  head << parser.get().base();
  return {.status = static_cast<int>(parser.get().result_int()),
          .head = head.str(),
          .body = parser.get().body()};
}

Reply HttpClient::get(const std::string& target, const std::string& host) {
  return send("GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n");
}

bool HttpClient::closed_by_peer() {
  char byte = 0;
  boost::system::error_code error;
  return connection_->socket.read_some(asio::buffer(&byte, 1), error) == 0;
}

}  // namespace kvtier::services::testing
