#include "kvtier/client.h"
#include "kvtier/v1/attention.pb.h"

#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"
#include "benchmarks/service/raw_load.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <thread>

namespace kvtier::bench {
namespace {

constexpr int kSessions = 4;
constexpr int kOutstanding = 8;  ///< Of the closed loop.
constexpr int kFactor = 5;
/// Each takes 128 calls at once; together more than the queues of the sessions, so that it is the
/// server that refuses and not the client that waits.
constexpr int kConnections = 4;
constexpr std::chrono::seconds kRound{4};
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kQueryHeads = 8;
constexpr std::int64_t kHeadDim = 128;

double p99(std::vector<double> seconds) {
  if (seconds.empty()) return 0;
  const auto at = seconds.begin() + static_cast<std::ptrdiff_t>((seconds.size() - 1) * 99 / 100);
  std::nth_element(seconds.begin(), at, seconds.end());
  return *at;
}

std::string random_bf16(std::mt19937& random, std::size_t count) {
  std::string bytes(2 * count, '\0');
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = static_cast<std::uint16_t>(0x3E00U | (random() & 0x80FFU));
    bytes[2 * i] = static_cast<char>(value & 0xFFU);
    bytes[2 * i + 1] = static_cast<char>(value >> 8U);
  }
  return bytes;
}

}  // namespace

nlohmann::json overload_rows(const ServerProcess& server, const Settings& settings) {
  Client client({.server = server.endpoint()});
  std::mt19937 random(4);
  std::vector<RemoteSession> sessions;
  std::vector<std::string> requests;
  const auto tokens = static_cast<std::size_t>(settings.tokens);
  std::string rows = random_bf16(random, tokens * kKvHeads * kHeadDim);
  for (int i = 0; i < kSessions; ++i) {
    RemoteSessionConfig config;
    config.model = {
        .layers = 1, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    config.retrieval.top_k = 2048;
    sessions.push_back(client.open(config));
    const TensorView view{rows.data(), DType::kBFloat16, {settings.tokens, kKvHeads, kHeadDim}};
    sessions.back().append(0, view, view);
    v1::AttendRequest request;
    request.set_session(sessions.back().name());
    v1::Tensor& query = *request.mutable_query();
    query.set_dtype(v1::DATA_TYPE_BFLOAT16);
    for (const std::int64_t extent : {std::int64_t{1}, kQueryHeads, kHeadDim}) {
      query.add_shape(extent);
    }
    query.set_data(random_bf16(random, kQueryHeads * kHeadDim));
    requests.push_back(request.SerializeAsString());
  }
  RawLoad load(server.folder() / "kvtier.sock", kConnections, "/kvtier.v1.AttentionService/Attend",
               requests);
  (void)load.closed(kOutstanding, kRound);  // warm

  const double seconds = std::chrono::duration<double>(kRound).count();
  const double cores = std::thread::hardware_concurrency();
  std::vector<double> peaks, goodputs, shares, admitted, rejected, client_shares;
  std::size_t num_admitted = 0, num_rejected = 0;
  for (int round = 0; round < settings.rounds; ++round) {
    const Outcomes peak = load.closed(kOutstanding, kRound);
    peaks.push_back(static_cast<double>(peak.in_time) / seconds);
    const Outcomes over = load.open(kFactor * peaks.back(), kRound);
    for (const Outcomes* round_of : {&peak, &over}) {
      if (round_of->failure.empty()) continue;
      throw std::runtime_error("expected OK or RESOURCE_EXHAUSTED, found " + round_of->failure);
    }
    // Not those answered later: without new calls there is no overload.
    goodputs.push_back(static_cast<double>(over.in_time) / seconds);
    shares.push_back(goodputs.back() / peaks.back());
    client_shares.push_back(over.client_cpu_seconds / (seconds * cores));
    admitted.push_back(p99(over.admitted));
    rejected.push_back(p99(over.rejected));
    num_admitted += over.admitted.size();
    num_rejected += over.rejected.size();
  }
  nlohmann::json report = nlohmann::json::array();
  report.push_back(
      {{"what", "overload_over_peak"},
       {"factor", kFactor},
       {"call", "Attend"},
       {"tokens", settings.tokens},
       {"calls_per_second", median(goodputs)},
       {"baseline_calls_per_second", median(peaks)},
       {"share", median(shares)},
       {"share_least", *std::min_element(shares.begin(), shares.end())},
       {"share_most", *std::max_element(shares.begin(), shares.end())},
       {"client_share_of_cpu", median(client_shares)},
       {"admitted", num_admitted},
       {"rejected", num_rejected},
       {"admitted_p99_ms", median(admitted) * 1e3},
       {"rejected_p99_ms", median(rejected) * 1e3},
       {"rejected_p99_ms_most", *std::max_element(rejected.begin(), rejected.end()) * 1e3}});
  return report;
}

}  // namespace kvtier::bench
