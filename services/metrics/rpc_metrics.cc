#include "services/metrics/rpc_metrics.h"

#include "kvtier/stats.h"
#include "kvtier/v1/admin.pb.h"
#include "kvtier/v1/transfer.pb.h"

#include "services/wire/rpc.h"

#include <google/protobuf/descriptor.h>

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

std::array<const google::protobuf::FileDescriptor*, 5> service_files() {
  return {v1::CreateSessionRequest::descriptor()->file(), v1::AppendRequest::descriptor()->file(),
          v1::GetStatsRequest::descriptor()->file(), v1::OpenLeaseRequest::descriptor()->file(),
          v1::ReadPagesRequest::descriptor()->file()};
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

std::vector<std::string> rpc_methods() {
  std::vector<std::string> names;
  for (const auto* file : service_files()) {
    for (int s = 0; s < file->service_count(); ++s) {
      const auto* service = file->service(s);
      for (int m = 0; m < service->method_count(); ++m) {
        names.push_back(service->name() + "/" + service->method(m)->name());
      }
    }
  }
  return names;
}

std::vector<std::string> operation_methods() {
  std::vector<std::string> names;
  const auto add = [&names](auto rpc) {
    names.emplace_back(rpc_name<typename decltype(rpc)::Request>());
  };
  each_rpc<SessionRpcs>(add);
  each_rpc<AttentionRpcs>(add);
  add(Rpc<v1::AppendRequest, v1::AppendResponse>());
  add(Rpc<v1::DecodeRequest, v1::DecodeResponse>());
  return names;
}

RpcMetrics::RpcMetrics(prometheus::Registry& registry) {
  using prometheus::BuildCounter;
  using prometheus::BuildGauge;
  using prometheus::BuildHistogram;
  auto& started = register_family(BuildCounter(), registry, "kvtier_rpc_started_total",
                                  "Calls that arrived; a stream is one.");
  auto& finished = register_family(BuildCounter(), registry, "kvtier_rpc_requests_total",
                                   "Calls that ended, by status code.");
  auto& inflight = register_family(BuildGauge(), registry, "kvtier_rpc_inflight",
                                   "Calls that have started and not ended.");
  auto& duration = register_family(BuildHistogram(), registry, "kvtier_rpc_duration_seconds",
                                   "From the arrival of a call to its status; streams included.");
  auto& operation = register_family(BuildHistogram(), registry, "kvtier_operation_seconds",
                                    "Time of a call, a message of a stream or an item of a batch.");
  auto& queued = register_family(BuildHistogram(), registry, "kvtier_rpc_queue_seconds",
                                 "Time that an operation waited before it ran.");
  auto& bytes =
      register_family(BuildHistogram(), registry, "kvtier_rpc_message_bytes", "Size of messages.");
  // Whole calls: powers of a hundred, as there are many methods. Waits: powers of ten. Messages:
  // control, or rows of keys and values.
  const std::vector<double> call_buckets{1e-3, 1e-1, 10}, queue_buckets{1e-4, 1e-3, 1e-2, 1e-1, 1},
      message_buckets{65536};
  const std::vector<std::string> operations = operation_methods();
  const auto add = [&](const std::string& name) {
    Method method{};
    const prometheus::Labels labels{{"method", name}};
    method.started = &started.Add(labels);
    for (std::size_t code = 0; code < kNumCodes; ++code) {
      method.finished[code] = &finished.Add({{"method", name}, {"code", kCodeNames[code]}});
    }
    method.inflight = &inflight.Add(labels);
    method.duration = &duration.Add(labels, call_buckets);
    if (std::find(operations.begin(), operations.end(), name) != operations.end()) {
      method.operation = &operation.Add(labels, duration_buckets());
      method.queued = &queued.Add(labels, queue_buckets);
    }
    if (!name.starts_with(kOperators)) {
      method.bytes = {&bytes.Add({{"method", name}, {"direction", "received"}}, message_buckets),
                      &bytes.Add({{"method", name}, {"direction", "sent"}}, message_buckets)};
    }
    methods_.emplace(name, method);
  };
  for (const std::string& name : rpc_methods()) add(name);
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
