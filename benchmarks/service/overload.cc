#include "kvtier/client.h"
#include "kvtier/v1/attention.grpc.pb.h"

#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

namespace kvtier::bench {
namespace {

using Clock = std::chrono::steady_clock;

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

/// How the calls of one round ended.
struct Outcomes {
  std::vector<double> admitted, rejected;  ///< Seconds of each call.
  std::string failure;                     ///< Of a call that ended in any other way.
};

/// Attend calls on a few sessions, at any time and rate.
class Load {
 public:
  Load(const std::string& endpoint, std::vector<v1::AttendRequest> requests)
      : requests_(std::move(requests)) {
    grpc::ChannelArguments apart;
    apart.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    for (int i = 0; i < kConnections; ++i) {
      stubs_.push_back(v1::AttentionService::NewStub(
          grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), apart)));
    }
  }

  /// As many calls as the server completes with `kOutstanding` at a time.
  Outcomes closed() {
    const Clock::time_point end = Clock::now() + kRound;
    for (int i = 0; i < kOutstanding; ++i) send(end);
    return finish();
  }
  /// Calls at a fixed rate, whatever becomes of those before.
  Outcomes open(double per_second) {
    const Clock::time_point start = Clock::now();
    const std::chrono::duration<double> interval(1 / per_second);
    for (int i = 0;; ++i) {
      const auto due = start + std::chrono::duration_cast<Clock::duration>(interval * i);
      if (due >= start + kRound) break;
      std::this_thread::sleep_until(due);
      send({});
    }
    return finish();
  }

 private:
  struct Sent {
    grpc::ClientContext context;
    v1::AttendResponse response;
    Clock::time_point at = Clock::now();
  };

  /// Sends a call, and before `again_until` another when it is answered.
  void send(Clock::time_point again_until) {
    auto* call = new Sent;  // owned by its callback
    call->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    std::size_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      ++outstanding_;
      number = next_++;
    }
    // Every session over every connection.
    stubs_[number / requests_.size() % stubs_.size()]->async()->Attend(
        &call->context, &requests_[number % requests_.size()], &call->response,
        [this, call, again_until](const grpc::Status& status) {
          ended(std::unique_ptr<Sent>(call), status, again_until);
        });
  }
  void ended(std::unique_ptr<Sent> call, const grpc::Status& status,
             Clock::time_point again_until) {
    const Clock::time_point now = Clock::now();
    if (now < again_until) send(again_until);
    const double seconds = std::chrono::duration<double>(now - call->at).count();
    const std::lock_guard lock(mutex_);
    if (status.ok()) {
      outcomes_.admitted.push_back(seconds);
    } else if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) {
      outcomes_.rejected.push_back(seconds);
    } else {
      outcomes_.failure = status.error_message() + ", code " + std::to_string(status.error_code());
    }
    if (--outstanding_ == 0) idle_.notify_all();
  }
  Outcomes finish() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return outstanding_ == 0; });
    return std::exchange(outcomes_, {});
  }

  std::vector<std::unique_ptr<v1::AttentionService::Stub>> stubs_;
  const std::vector<v1::AttendRequest> requests_;
  std::mutex mutex_;  ///< Guards all below.
  std::condition_variable idle_;
  Outcomes outcomes_;
  std::size_t next_ = 0;
  int outstanding_ = 0;
};

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
  std::vector<v1::AttendRequest> requests;
  const auto tokens = static_cast<std::size_t>(settings.tokens);
  std::string rows = random_bf16(random, tokens * kKvHeads * kHeadDim);
  for (int i = 0; i < kSessions; ++i) {
    RemoteSessionConfig config;
    config.model = {
        .layers = 1, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    sessions.push_back(client.open(config));
    const TensorView view{rows.data(), DType::kBFloat16, {settings.tokens, kKvHeads, kHeadDim}};
    sessions.back().append(0, view, view);
    v1::AttendRequest& request = requests.emplace_back();
    request.set_session(sessions.back().name());
    v1::Tensor& query = *request.mutable_query();
    query.set_dtype(v1::DATA_TYPE_BFLOAT16);
    for (const std::int64_t extent : {std::int64_t{1}, kQueryHeads, kHeadDim}) {
      query.add_shape(extent);
    }
    query.set_data(random_bf16(random, kQueryHeads * kHeadDim));
  }
  Load load(server.endpoint(), std::move(requests));
  (void)load.closed();  // warm

  const double seconds = std::chrono::duration<double>(kRound).count();
  std::vector<double> peaks, goodputs, shares, admitted, rejected;
  std::size_t num_admitted = 0, num_rejected = 0;
  for (int round = 0; round < settings.rounds; ++round) {
    const Outcomes peak = load.closed();
    peaks.push_back(static_cast<double>(peak.admitted.size()) / seconds);
    const Outcomes over = load.open(kFactor * peaks.back());
    for (const Outcomes* round_of : {&peak, &over}) {
      if (round_of->failure.empty()) continue;
      throw std::runtime_error("expected OK or RESOURCE_EXHAUSTED, found " + round_of->failure);
    }
    const auto slowest = std::max_element(over.admitted.begin(), over.admitted.end());
    // The last of them ended after the round.
    goodputs.push_back(static_cast<double>(over.admitted.size()) /
                       (seconds + (slowest == over.admitted.end() ? 0 : *slowest)));
    shares.push_back(goodputs.back() / peaks.back());
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
       {"admitted", num_admitted},
       {"rejected", num_rejected},
       {"admitted_p99_ms", median(admitted) * 1e3},
       {"rejected_p99_ms", median(rejected) * 1e3},
       {"rejected_p99_ms_most", *std::max_element(rejected.begin(), rejected.end()) * 1e3}});
  return report;
}

}  // namespace kvtier::bench
