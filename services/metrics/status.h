#pragma once

#include "services/metrics/families.h"
#include "services/metrics/http_server.h"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace kvtier::services {

class ServerMetrics;

enum class ServerState : std::uint8_t { kStarting, kServing, kDraining, kDegraded };

/// Adds kvtier_server_state, 1 for the state that is, and kvtier_build_info.
void add_server_state(ServerState state, Families& families);

/// Returns when the first certificate of a PEM text ends, in seconds since 1970; 0 when there is
/// none.
[[nodiscard]] double certificate_expiry(const std::string& pem);

/// Returns the families as JSON, what the status page reads:
/// {"time": seconds since 1970, "metrics": {NAME: [{"labels": {...}, "value": 1}, ...]}}.
/// A histogram has "count", "sum" and, unless it is empty, "buckets": [[upper bound, cumulative
/// count], ...] instead of "value"; the last upper bound, infinity, is null.
[[nodiscard]] std::string status_json(const std::vector<prometheus::MetricFamily>& families,
                                      double time);

/// As above, of all metrics at the time of the call.
[[nodiscard]] std::string status_json(const ServerMetrics& metrics);

/// Returns what the operators' HTTP server answers: "/", "/status.json", "/metrics", "/healthz".
/// `metrics` must outlive it; `state` is called on its thread.
[[nodiscard]] std::map<std::string, std::function<HttpResponse()>> status_routes(
    const ServerMetrics& metrics, std::function<ServerState()> state);

}  // namespace kvtier::services
