#include "services/metrics/server_metrics.h"

#include "services/metrics/state_metrics.h"

#include <algorithm>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/text_serializer.h>

namespace kvtier::services {
namespace {

constexpr std::array<const char*, 4> kRejections = {"quota", "overload", "draining", "limit"};
constexpr const char* kOtherTenants = "other";

}  // namespace

std::string tenant_label(const Tenant& tenant) {
  return tenant.index() < kMaxTenantSeries ? tenant.name() : kOtherTenants;
}

std::string_view rejection_of(std::string_view reason) {
  static const std::map<std::string_view, std::string_view> reasons = {
      {"QUOTA_EXCEEDED", "quota"},       {"OVERLOADED", "overload"},
      {"TENANT_OVERLOADED", "overload"}, {"QUEUE_FULL", "overload"},
      {"QUEUE_TIMEOUT", "overload"},     {"OUT_OF_MEMORY", "overload"},
      {"DRAINING", "draining"},          {"CACHE_FULL", "limit"},
      {"SESSION_FULL", "limit"},         {"TOO_MANY_MODELS", "limit"},
      {"TOO_MANY_SESSIONS", "limit"},    {"SESSION_MEMORY_FULL", "limit"},
      {"TOO_MANY_REQUESTS", "limit"},    {"TOO_MANY_LEASES", "limit"},
      {"TOO_MANY_ATTACHMENTS", "limit"}, {"TOO_MANY_REGIONS", "limit"},
      {"PAGES_FULL", "limit"},           {"TIERS_BUSY", "limit"}};
  const auto it = reasons.find(reason);
  return it == reasons.end() ? std::string_view() : it->second;
}

ServerMetrics::ServerMetrics(const std::vector<TenantConfig>& tenants)
    : registry_(prometheus::Registry::InsertBehavior::Throw), rpc_(registry_) {
  auto& by_reason =
      register_family(prometheus::BuildCounter(), registry_, "kvtier_admission_rejected_total",
                      "Operations that were refused to keep the server within its bounds.");
  for (const char* reason : kRejections) {
    rejected_by_reason_[reason] = &by_reason.Add({{"reason", reason}});
  }
  auto& by_tenant =
      register_family(prometheus::BuildCounter(), registry_, "kvtier_tenant_rejected_total",
                      "Operations of a tenant that were refused, for the same reasons.");
  const std::string default_tenant = "default";
  for (std::size_t i = 0; i < std::clamp<std::size_t>(tenants.size(), 1, kMaxTenantSeries); ++i) {
    const std::string& name = tenants.empty() ? default_tenant : tenants[i].name;
    rejected_by_tenant_.push_back(&by_tenant.Add({{"tenant", name}}));
  }
  rejected_by_tenant_.push_back(&by_tenant.Add({{"tenant", kOtherTenants}}));
  lease_remaining_ =
      &register_family(prometheus::BuildHistogram(), registry_, "kvtier_lease_remaining_seconds",
                       "How long a lease would have lasted when it was renewed.")
           .Add({}, std::vector<double>{0, 1, 2, 5, 10, 20, 40, 60, 120, 300, 600});
  device_errors_ =
      &register_family(prometheus::BuildCounter(), registry_, "kvtier_device_errors_total",
                       "Engines that failed by a fault of their device.")
           .Add({});
}

void ServerMetrics::finished(const Operation& operation) noexcept {
  RpcMetrics::operation(rpc_.find(operation.method), operation.queued, operation.duration);
  if (operation.error == nullptr) return;
  const auto it = rejected_by_reason_.find(rejection_of(operation.error->reason()));
  if (it == rejected_by_reason_.end()) return;
  it->second->Increment();
  const std::size_t last = rejected_by_tenant_.size() - 1;
  rejected_by_tenant_[std::min<std::size_t>(operation.tenant.index(), last)]->Increment();
}

void ServerMetrics::lease_renewed(std::chrono::nanoseconds remaining) noexcept {
  lease_remaining_->Observe(std::chrono::duration<double>(remaining).count());
}

void ServerMetrics::device_failed() noexcept { device_errors_->Increment(); }

std::vector<prometheus::MetricFamily> ServerMetrics::collect() const {
  Families families;
  for (const Source& source : sources_) source(families);
  add_process_stats(families);
  for (prometheus::MetricFamily& family : registry_.Collect()) families.merge(std::move(family));
  return families.take();
}

std::string ServerMetrics::text() const {
  return prometheus::TextSerializer().Serialize(collect());
}

}  // namespace kvtier::services
