#include "services/metrics/rpc_metrics.h"

#include "kvtier/stats.h"

#include <algorithm>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>

namespace kvtier::services {
namespace {

constexpr const char* kOther = "other";
/// Operators' messages are small and few, their sizes are not published.
constexpr std::string_view kOperators = "AdminService/";
/// ALREADY_EXISTS, PERMISSION_DENIED and OUT_OF_RANGE are never sent, so they have no series of
/// their own.
constexpr std::array<const char*, RpcMetrics::kNumCodes> kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",       "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "UNKNOWN",        "UNKNOWN",       "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "UNKNOWN",        "UNIMPLEMENTED", "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
constexpr std::size_t kUnknown = 2;

/// Buckets of whole calls are powers of a hundred, as there are many methods; of operations finer.
const std::vector<double>& call_buckets() {
  static const std::vector<double> buckets = {1e-3, 1e-1, 10};
  return buckets;
}

/// Buckets of waits are powers of ten.
const std::vector<double>& queue_buckets() {
  static const std::vector<double> buckets = {1e-4, 1e-3, 1e-2, 1e-1, 1};
  return buckets;
}

/// Control, or rows of keys and values.
const std::vector<double>& message_buckets() {
  static const std::vector<double> buckets = {65536};
  return buckets;
}

double seconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

const std::vector<double>& duration_buckets() {
  static const std::vector<double> buckets = [] {
    std::vector<double> bounds;
    for (std::size_t i = 0; i < LatencyHistogram::kBounds; ++i) {
      bounds.push_back(std::chrono::duration<double>(LatencyHistogram::bound(i)).count());
    }
    return bounds;
  }();
  return buckets;
}

RpcMetrics::RpcMetrics(prometheus::Registry& registry, const std::vector<std::string>& methods,
                       const std::vector<std::string>& operations) {
  using prometheus::BuildCounter;
  using prometheus::BuildGauge;
  using prometheus::BuildHistogram;
  auto& started = BuildCounter()
                      .Name("kvtier_rpc_started_total")
                      .Help("Calls that arrived; a stream is one.")
                      .Register(registry);
  auto& finished = BuildCounter()
                       .Name("kvtier_rpc_requests_total")
                       .Help("Calls that ended, by status code.")
                       .Register(registry);
  auto& inflight = BuildGauge()
                       .Name("kvtier_rpc_inflight")
                       .Help("Calls that have started and not ended.")
                       .Register(registry);
  auto& duration = BuildHistogram()
                       .Name("kvtier_rpc_duration_seconds")
                       .Help("From the arrival of a call to its status; streams included.")
                       .Register(registry);
  auto& operation = BuildHistogram()
                        .Name("kvtier_operation_seconds")
                        .Help("Time of a call, a message of a stream or an item of a batch.")
                        .Register(registry);
  auto& queued = BuildHistogram()
                     .Name("kvtier_rpc_queue_seconds")
                     .Help("Time that an operation waited before it ran.")
                     .Register(registry);
  auto& bytes = BuildHistogram()
                    .Name("kvtier_rpc_message_bytes")
                    .Help("Size of messages.")
                    .Register(registry);
  const auto add = [&](const std::string& name) {
    Method method{};
    const prometheus::Labels labels{{"method", name}};
    method.started = &started.Add(labels);
    for (std::size_t code = 0; code < kNumCodes; ++code) {
      method.finished[code] = &finished.Add({{"method", name}, {"code", kCodeNames[code]}});
    }
    method.inflight = &inflight.Add(labels);
    method.duration = &duration.Add(labels, call_buckets());
    if (std::find(operations.begin(), operations.end(), name) != operations.end()) {
      method.operation = &operation.Add(labels, duration_buckets());
      method.queued = &queued.Add(labels, queue_buckets());
    }
    if (!name.starts_with(kOperators)) {
      method.bytes = {&bytes.Add({{"method", name}, {"direction", "received"}}, message_buckets()),
                      &bytes.Add({{"method", name}, {"direction", "sent"}}, message_buckets())};
    }
    methods_.emplace(name, method);
  };
  for (const std::string& name : methods) add(name);
  add(kOther);
}

RpcMetrics::Method& RpcMetrics::find(std::string_view name) {
  const auto it = methods_.find(name);
  return it != methods_.end() ? it->second : methods_.find(kOther)->second;
}

void RpcMetrics::started(Method& method) {
  method.started->Increment();
  method.inflight->Increment();
}

void RpcMetrics::finished(Method& method, int code, std::chrono::nanoseconds duration) {
  const auto index = static_cast<std::size_t>(code);
  method.finished[index < kNumCodes ? index : kUnknown]->Increment();
  method.inflight->Decrement();
  method.duration->Observe(seconds(duration));
}

void RpcMetrics::message(Method& method, Direction direction, std::size_t bytes) {
  prometheus::Histogram* const sizes = method.bytes[static_cast<std::size_t>(direction)];
  if (sizes != nullptr) sizes->Observe(static_cast<double>(bytes));
}

void RpcMetrics::operation(Method& method, std::optional<std::chrono::nanoseconds> queued,
                           std::chrono::nanoseconds duration) {
  if (method.operation == nullptr) return;
  method.operation->Observe(seconds(duration));
  if (queued) method.queued->Observe(seconds(*queued));
}

}  // namespace kvtier::services
