#include "services/metrics/http_get.h"

#include "kvtier/error.h"

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/beast/core/basic_stream.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>

namespace kvtier::services {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using Protocol = asio::generic::stream_protocol;

constexpr std::uint64_t kMaxBytes = 16 << 20;

Protocol::endpoint address_of(asio::io_context& loop, const Endpoint& endpoint, error_code& error) {
  if (endpoint.is_unix) return asio::local::stream_protocol::endpoint(endpoint.path);
  const auto found =
      asio::ip::tcp::resolver(loop).resolve(endpoint.host, std::to_string(endpoint.port), error);
  return error || found.empty() ? Protocol::endpoint()
                                : Protocol::endpoint(found.begin()->endpoint());
}

}  // namespace

std::string http_get(const Endpoint& endpoint, const std::string& target,
                     std::chrono::milliseconds timeout) {
  asio::io_context loop;
  boost::beast::basic_stream<Protocol> stream(loop);
  http::request<http::empty_body> request(http::verb::get, target, 11);
  request.set(http::field::host, endpoint.is_unix ? "localhost" : endpoint.grpc_target());
  boost::beast::flat_buffer buffer;
  http::response_parser<http::string_body> parser;
  parser.body_limit(kMaxBytes);
  error_code failure;
  const Protocol::endpoint address = address_of(loop, endpoint, failure);
  if (!failure) {
    stream.expires_after(timeout);
    stream.async_connect(address, [&](const error_code& connected) {
      failure = connected;
      if (failure) return;
      http::async_write(stream, request, [&](const error_code& written, std::size_t) {
        failure = written;
        if (failure) return;
        http::async_read(stream, buffer, parser,
                         [&](const error_code& read, std::size_t) { failure = read; });
      });
    });
    loop.run();
  }
  if (failure || parser.get().result() != http::status::ok) {
    throw Error(ErrorCode::kUnavailable,
                endpoint.text() + target + ": expected a page, found " +
                    (failure ? failure.message() : std::to_string(parser.get().result_int())));
  }
  return std::move(parser.get().body());
}

}  // namespace kvtier::services
