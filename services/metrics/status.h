#pragma once

#include "services/metrics/families.h"
#include "services/metrics/http_server.h"

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace kvtier::services {

class ServerMetrics;

enum class ServerState : std::uint8_t { kStarting, kServing, kDraining, kDegraded };

/// Adds kvtier_server_state, 1 for the state that is, and kvtier_build_info.
void add_server_state(ServerState state, Families& families);

/// Returns when the first certificate of a PEM text ends, in seconds since 1970; 0 when there is
/// none.
[[nodiscard]] double certificate_expiry(const std::string& pem);

/// Returns the metrics as JSON, at the time of the call.
[[nodiscard]] std::string status_json(const ServerMetrics& metrics);

/// Returns what the operators' HTTP server answers: "/", "/status.json", "/metrics", "/healthz".
/// `metrics` must outlive it; `state` is called on its thread.
[[nodiscard]] std::map<std::string, std::function<HttpResponse()>> status_routes(
    const ServerMetrics& metrics, std::function<ServerState()> state);

}  // namespace kvtier::services
