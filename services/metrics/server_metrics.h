#pragma once

#include "services/base/service_core_observer.h"
#include "services/metrics/families.h"
#include "services/metrics/rpc_metrics.h"

#include <functional>
#include <map>
#include <prometheus/registry.h>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::services {

/// Tenants that have series of their own; the others share the label "other".
inline constexpr std::size_t kMaxTenantSeries = 64;

/// Returns the label of the tenant with this index.
[[nodiscard]] std::string tenant_label(const Tenant& tenant);

/// All metrics of a server. Events are counted here; states come from sources, which are read with
/// each scrape. Thread-safe, once the sources are added.
class ServerMetrics final : public ServiceCoreObserver {
 public:
  /// Adds what it knows. Must not throw.
  using Source = std::function<void(Families&)>;

  /// Of a core with these tenants; without any, with the one for all.
  explicit ServerMetrics(const std::vector<TenantConfig>& tenants);

  void add_source(Source source) { sources_.push_back(std::move(source)); }
  [[nodiscard]] RpcMetrics& rpc() noexcept { return rpc_; }

  void finished(const Operation& operation) noexcept override;
  void lease_renewed(std::chrono::nanoseconds remaining) noexcept override;
  void device_failed() noexcept override;

  [[nodiscard]] std::vector<prometheus::MetricFamily> collect() const;
  /// Returns all in the text format of Prometheus, version 0.0.4.
  [[nodiscard]] std::string text() const;

 private:
  prometheus::Registry registry_;
  RpcMetrics rpc_;
  std::map<std::string, prometheus::Counter*, std::less<>> rejected_by_reason_;
  std::vector<prometheus::Counter*> rejected_by_tenant_;
  prometheus::Histogram* lease_remaining_;
  prometheus::Counter* device_errors_;
  std::vector<Source> sources_;
};

/// Returns why an operation that failed with `reason` was not admitted: "quota", "overload",
/// "draining" or "limit"; empty for other failures.
[[nodiscard]] std::string_view rejection_of(std::string_view reason);

}  // namespace kvtier::services
