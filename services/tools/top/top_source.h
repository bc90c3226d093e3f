#pragma once

#include <functional>
#include <string>

namespace kvtier::services {

/// Reads a server's metrics, in the JSON that `MetricsReading` reads. Throws `Error` when there is
/// no answer within two seconds.
using TopSource = std::function<std::string()>;

/// From AdminService, at unix:PATH.
[[nodiscard]] TopSource admin_source(const std::string& address);
/// From the HTTP listener, at unix:PATH, tcp:HOST:PORT or http://HOST:PORT.
[[nodiscard]] TopSource http_source(const std::string& address);

}  // namespace kvtier::services
