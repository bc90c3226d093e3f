#pragma once

#include "services/base/endpoint.h"

#include <memory>
#include <string>

namespace kvtier::services::testing {

struct Reply {
  int status = 0;  ///< 0: none came.
  std::string head, body;

  /// Returns the value of a header field; empty when there is none.
  [[nodiscard]] std::string field(const std::string& name) const;
};

/// A connection to an HTTP server, with Boost.Beast's client side.
class HttpClient {
 public:
  explicit HttpClient(const Endpoint& endpoint);
  ~HttpClient();
  HttpClient(HttpClient&&) noexcept;

  Reply get(const std::string& target, const std::string& host = "localhost");
  /// Sends bytes as they are and reads a reply to a request of `method`.
  Reply send(const std::string& bytes, const std::string& method = "GET");
  void write(const std::string& bytes);
  /// Waits until the server has closed the connection; false if it sent something instead.
  bool closed_by_peer();

 private:
  struct Connection;
  std::unique_ptr<Connection> connection_;
};

}  // namespace kvtier::services::testing
