#pragma once

#include "services/base/bound_sockets.h"
#include "services/base/endpoint.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace kvtier::services {

struct HttpResponse {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
};

struct HttpOptions {
  Endpoint endpoint;
  std::shared_ptr<const BoundSockets> bound{};  ///< Has its socket; null: none does.
  /// What answers a GET of a path, on the server's thread.
  std::map<std::string, std::function<HttpResponse()>> routes;
  std::size_t max_connections = 32;
  std::size_t max_request_bytes = 8192;
  /// For a request to arrive whole, and for an answer to be taken.
  std::chrono::milliseconds timeout{10'000};
};

/// Throws `kInvalidArgument` for an address that is not of this machine alone.
void check_http_endpoint(const Endpoint& endpoint);

/// A small HTTP/1.1 server for the operators of this machine: GET only, no bodies, loopback or a
/// Unix socket. On loopback a request must name a loopback host, so that no web page elsewhere can
/// read it by a name of its own. A connection too many is closed at once.
class HttpServer {
 public:
  /// Begins to serve. Throws `kInvalidArgument` for an address that is not of this machine alone,
  /// `kFailedPrecondition` and `kUnavailable` for one that cannot be had.
  explicit HttpServer(HttpOptions options);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;  // owns a socket and threads
  HttpServer& operator=(const HttpServer&) = delete;

  /// With the port that the system chose.
  [[nodiscard]] const Endpoint& endpoint() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier::services
