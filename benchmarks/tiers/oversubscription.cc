#include "kvtier/engine.h"

#include "benchmarks/service/measure.h"
#include "benchmarks/tiers/bench_folder.h"
#include "benchmarks/tiers/benchmarks.h"
#include "services/evaluation/synthetic.h"
#include "services/tools/stress/needles.h"
#include "transfer/tiers/crc32c.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace kvtier::bench {
namespace {

using services::LayerSource;
using services::NoiseTable;
using services::QueryDrift;
using services::QuerySource;
using services::SyntheticShape;

constexpr int kLayers = 4;
constexpr int kQueryHeads = 32;
constexpr int kKvHeads = 8;
constexpr int kHeadDim = 128;
constexpr std::int64_t kTokenBytes = 2 * kKvHeads * kHeadDim * 2;  // of a layer, bf16
constexpr int kFittingSessions = 4;                                // sessions that the budget holds
constexpr int kSessionCounts[] = {4, 6, 8, 12};                    // 1, 1.5, 2 and 3 budgets
/// How the sessions decode.
struct Schedule {
  int turn_tokens;              ///< That a session decodes before the next one does.
  int clients;                  ///< Threads that decode, each another session.
  std::size_t model_bytes = 0;  ///< Read between two layers, in the place of a model's weights.

  /// Of each session in a round: so many that a round has at least 16 tokens of each.
  [[nodiscard]] constexpr int turns() const { return std::max(16 / turn_tokens, 1); }
};
constexpr Schedule kSchedules[] = {{1, 1}, {16, 1}, {16, 2}, {1, 1, 96 * MiB}, {16, 1, 96 * MiB}};

/// Inputs of one step of one layer, bf16.
struct StepInputs {
  std::vector<std::uint16_t> query, key, value;
};

/// The decoding of one session: its context, and inputs of all steps.
struct Workload {
  std::vector<LayerSource> layers;
  std::vector<std::vector<StepInputs>> steps;  ///< `[step][layer]`
};

TensorView rows(const std::vector<std::uint16_t>& values, int heads) {
  return {values.data(),
          DType::kBFloat16,
          {static_cast<std::int64_t>(values.size()) / heads / kHeadDim, heads, kHeadDim}};
}

/// Makes sessions whose queries drift like those of SmolLM2, and their steps as they are needed.
class Workloads {
 public:
  explicit Workloads(std::int64_t tokens) : shape_(shape(tokens)) {
    const LayerSource sample(shape_, 0, 0, noise_);
    drift_ = services::calibrate_drift(shape_, sample, 1, services::DriftModel::kSmolLm2).drift;
    for (int i = 0; i < std::ranges::max(kSessionCounts); ++i) {
      Workload& workload = workloads_.emplace_back();
      queries_.emplace_back();
      for (int layer = 0; layer < kLayers; ++layer) {
        workload.layers.emplace_back(shape_, i, layer, noise_);
        queries_.back().emplace_back(shape_, i, layer, drift_);
      }
    }
  }
  /// Makes the inputs of the first `count` steps of the first `sessions` sessions.
  void prepare(int sessions, std::int64_t count) {
    for (int i = 0; i < sessions; ++i) {
      Workload& workload = workloads_[static_cast<std::size_t>(i)];
      while (std::ssize(workload.steps) < count) {
        std::vector<StepInputs>& step = workload.steps.emplace_back(kLayers);
        const std::int64_t token = shape_.tokens + std::ssize(workload.steps) - 1;
        for (std::size_t layer = 0; layer < kLayers; ++layer) {
          const std::span<const std::uint16_t> query =
              queries_[static_cast<std::size_t>(i)][layer].next();
          step[layer].query.assign(query.begin(), query.end());
          step[layer].key.resize(kKvHeads * kHeadDim);
          step[layer].value.resize(kKvHeads * kHeadDim);
          workload.layers[layer].fill(token, 1, step[layer].key.data(), step[layer].value.data(),
                                      1);
        }
      }
    }
  }
  [[nodiscard]] const Workload& operator[](std::size_t i) const { return workloads_[i]; }
  [[nodiscard]] std::int64_t tokens() const { return shape_.tokens; }

 private:
  static SyntheticShape shape(std::int64_t tokens) {
    return {
        .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim, .tokens = tokens};
  }

  SyntheticShape shape_;
  std::shared_ptr<const NoiseTable> noise_ = std::make_shared<NoiseTable>(0);
  QueryDrift drift_;
  std::vector<Workload> workloads_;
  std::vector<std::vector<QuerySource>> queries_;
};

enum class Memory { kAll, kBudget };

/// An engine that decodes some sessions, one turn after the other.
class Decoding {
 public:
  Decoding(const TierSettings& settings, const Workloads& workloads, int sessions,
           std::int64_t steps, Memory memory)
      : folder_(settings.folder), workloads_(workloads), engine_(config(sessions, steps, memory)) {
    constexpr std::int64_t kPiece = 2048;
    std::vector<std::uint16_t> keys, values;
    for (int i = 0; i < sessions; ++i) {
      sessions_.push_back(engine_.open());
      for (int layer = 0; layer < kLayers; ++layer) {
        for (std::int64_t done = 0; done < workloads.tokens(); done += kPiece) {
          const std::int64_t count = std::min(kPiece, workloads.tokens() - done);
          keys.resize(static_cast<std::size_t>(count * kKvHeads * kHeadDim));
          values.resize(keys.size());
          workloads[static_cast<std::size_t>(i)].layers[static_cast<std::size_t>(layer)].fill(
              done, count, keys.data(), values.data(), 2);
          sessions_.back().append(layer, rows(keys, kKvHeads), rows(values, kKvHeads));
        }
      }
    }
    next_step_.resize(sessions_.size());
    ::sync();
  }

  /// Each session has its turn; the clients take the sessions in their order.
  void run(const Schedule& schedule) {
    std::atomic<std::size_t> next{0};
    const auto client = [&] {
      std::vector<float> out(kQueryHeads * kHeadDim);
      for (std::size_t i = next++; i < sessions_.size(); i = next++) {
        for (int step = 0; step < schedule.turn_tokens; ++step) {
          const std::vector<StepInputs>& inputs = workloads_[i].steps[next_step_[i]++];
          for (int layer = 0; layer < kLayers; ++layer) {
            const StepInputs& in = inputs[static_cast<std::size_t>(layer)];
            sessions_[i].decode(layer,
                                {.query = rows(in.query, kQueryHeads),
                                 .key = rows(in.key, kKvHeads),
                                 .value = rows(in.value, kKvHeads),
                                 .selected = {}},
                                {.out = {out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim}}});
            sum_ ^= crc32c(std::span(model_).first(schedule.model_bytes));
          }
        }
      }
    };
    std::vector<std::jthread> others;
    for (int i = 1; i < schedule.clients; ++i) others.emplace_back(client);
    client();
  }
  [[nodiscard]] Stats::Cumulative counted() const { return engine_.stats().cumulative; }

 private:
  [[nodiscard]] Config config(int sessions, std::int64_t steps, Memory memory) const {
    Config config;
    config.backend = Backend::kCpu;
    config.model = {
        .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    config.retrieval.sparsity = 33.0;
    const std::int64_t page = config.memory.page_tokens;
    config.memory.max_session_tokens = (workloads_.tokens() + steps + page) / page * page;
    const auto session_bytes =
        static_cast<std::size_t>(config.memory.max_session_tokens * kTokenBytes * kLayers);
    const std::size_t all = session_bytes * static_cast<std::size_t>(sessions);
    config.memory.device_bytes = GiB + all / 4;
    config.memory.host_bytes = memory == Memory::kAll ? all : session_bytes * kFittingSessions;
    if (memory != Memory::kAll) {
      config.memory.disk_cache = (folder_.path() / "cache").string();
      config.memory.disk_cache_bytes = 2 * all;
    }
    return config;
  }

  BenchFolder folder_;
  const Workloads& workloads_;
  Engine engine_;
  std::vector<Session> sessions_;
  std::vector<std::size_t> next_step_;
  std::vector<std::byte> model_ = std::vector<std::byte>(96 * MiB, std::byte{1});
  std::atomic<std::uint32_t> sum_{0};
};

/// Rounds of one engine. Others at work on the machine make some longer: the shortest counts.
struct Rounds {
  std::vector<double> seconds;
  [[nodiscard]] double least() const { return std::ranges::min(seconds); }
};

double seconds_of_turns(Decoding& decoding, const Schedule& schedule) {
  return seconds_of([&] {
    for (int turn = 0; turn < schedule.turns(); ++turn) decoding.run(schedule);
  });
}

}  // namespace

void add_oversubscription(const TierSettings& settings, RunReport& report) {
  const auto tokens =
      static_cast<std::int64_t>(settings.bytes) / kFittingSessions / kLayers / kTokenBytes;
  Workloads workloads(tokens);
  std::int64_t steps = 0;
  for (const Schedule& schedule : kSchedules)
    steps += schedule.turns() * schedule.turn_tokens * (settings.rounds + 1);
  for (const int sessions : kSessionCounts) {
    workloads.prepare(sessions, steps);
    Decoding all(settings, workloads, sessions, steps, Memory::kAll);
    Decoding budget(settings, workloads, sessions, steps, Memory::kBudget);
    for (const Schedule& schedule : kSchedules) {
      Rounds in_memory, budgeted;
      Stats::Cumulative before;
      for (int round = 0; round <= settings.rounds; ++round) {
        in_memory.seconds.push_back(seconds_of_turns(all, schedule));
        budgeted.seconds.push_back(seconds_of_turns(budget, schedule));
        if (round > 0) continue;
        for (Rounds* rounds : {&in_memory, &budgeted}) rounds->seconds.clear();
        before = budget.counted();  // all are warm
      }
      const Stats::Cumulative counted = budget.counted() - before;
      const double decoded =
          static_cast<double>(schedule.turns() * schedule.turn_tokens) * sessions;
      const auto per_token = [&](std::uint64_t pages) {
        return static_cast<double>(pages) / decoded / settings.rounds;
      };
      report.add(nlohmann::json::array(
          {{{"what", "oversubscription"},
            {"context_tokens", tokens},
            {"layers", kLayers},
            {"sessions", sessions},
            {"budgets", static_cast<double>(sessions) / kFittingSessions},
            {"turn_tokens", schedule.turn_tokens},
            {"clients", schedule.clients},
            {"model_mib_per_layer", schedule.model_bytes / MiB},
            {"memory_tokens_per_s", decoded / in_memory.least()},
            {"share", in_memory.least() / budgeted.least()},
            {"share_median", median(in_memory.seconds) / median(budgeted.seconds)},
            {"restored_pages_per_token", per_token(counted.pages_restored)},
            {"tier_wait_s_per_token",
             static_cast<double>(counted.tier_nanoseconds) / 1e9 / decoded / settings.rounds}}}));
    }
  }
}

}  // namespace kvtier::bench
