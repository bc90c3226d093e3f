#include "services/metrics/status.h"

#include "kvtier/version.h"

#include "services/metrics/revision.h"
#include "services/metrics/server_metrics.h"
#include "services/metrics/status_page.h"

#include <nlohmann/json.hpp>

#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <memory>
#include <openssl/asn1.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

namespace kvtier::services {
namespace {

using nlohmann::json;

json series_of(const prometheus::ClientMetric& metric, prometheus::MetricType type) {
  json series;
  series["labels"] = json::object();
  for (const auto& label : metric.label) series["labels"][label.name] = label.value;
  if (type == prometheus::MetricType::Counter) {
    series["value"] = metric.counter.value;
  } else if (type == prometheus::MetricType::Histogram) {
    series["count"] = metric.histogram.sample_count;
    series["sum"] = metric.histogram.sample_sum;
    if (metric.histogram.sample_count == 0) return series;
    for (const auto& bucket : metric.histogram.bucket) {
      series["buckets"].push_back(
          {std::isinf(bucket.upper_bound) ? json() : json(bucket.upper_bound),
           bucket.cumulative_count});
    }
  } else {
    series["value"] = metric.gauge.value;
  }
  return series;
}

constexpr std::array<const char*, 4> kStates = {"starting", "serving", "draining", "degraded"};

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

void add_server_state(ServerState state, Families& families) {
  for (std::size_t i = 0; i < kStates.size(); ++i) {
    families.gauge("kvtier_server_state", "1 for the state that the server is in.",
                   i == static_cast<std::size_t>(state) ? 1 : 0, {{"state", kStates[i]}});
  }
#ifdef KVTIER_WITH_CUDA
  const char* features = "cuda";
#else
  const char* features = "cpu";
#endif
  families.gauge("kvtier_build_info", "What was built; always 1.", 1,
                 {{"version", KVTIER_VERSION}, {"git", KVTIER_REVISION}, {"features", features}});
}

double certificate_expiry(const std::string& pem) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> text(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), &BIO_free);
  if (!text) return 0;
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr), &X509_free);
  std::tm end{};
  if (!certificate || ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &end) != 1) return 0;
  return static_cast<double>(::timegm(&end));
}

std::string status_json(const std::vector<prometheus::MetricFamily>& families, double time) {
  json status;
  status["time"] = time;
  json& metrics = status["metrics"] = json::object();
  for (const auto& family : families) {
    json& all = metrics[family.name] = json::array();
    for (const auto& metric : family.metric) all.push_back(series_of(metric, family.type));
  }
  return status.dump();
}

std::string status_json(const ServerMetrics& metrics) {
  return status_json(metrics.collect(), now());
}

std::map<std::string, std::function<HttpResponse()>> status_routes(
    const ServerMetrics& metrics, std::function<ServerState()> state) {
  return {{"/",
           [] {
             return HttpResponse{.type = "text/html; charset=utf-8",
                                 .body = std::string(kStatusPage)};
           }},
          {"/status.json",
           [&metrics] {
             return HttpResponse{.type = "application/json", .body = status_json(metrics)};
           }},
          {"/metrics",
           [&metrics] {
             return HttpResponse{.type = "text/plain; version=0.0.4; charset=utf-8",
                                 .body = metrics.text()};
           }},
          {"/healthz", [state = std::move(state)] {
             const ServerState current = state();
             const bool up = current == ServerState::kServing || current == ServerState::kDegraded;
             return HttpResponse{
                 .status = up ? 200 : 503,
                 .body = std::string(kStates[static_cast<std::size_t>(current)]) + '\n'};
           }}};
}

}  // namespace kvtier::services
