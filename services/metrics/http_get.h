#pragma once

#include "services/base/endpoint.h"

#include <chrono>
#include <string>

namespace kvtier::services {

/// Returns the body of a page. Throws `kUnavailable` when there is none within `timeout`, or any
/// other status than 200.
[[nodiscard]] std::string http_get(const Endpoint& endpoint, const std::string& target,
                                   std::chrono::milliseconds timeout);

}  // namespace kvtier::services
