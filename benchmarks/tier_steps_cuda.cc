#include "benchmarks/benchmarks.h"
#include "benchmarks/steps_cuda.h"
#include "benchmarks/tiers/bench_folder.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <numbers>
#include <random>
#include <string>
#include <vector>

namespace kvtier::bench {
namespace {

/// Decodes of one sequence whose queries go round a circle between two random ones: the fewer
/// steps there are, the fewer tokens do neighbours share. Or all queries are the first.
class CircleOfSteps {
 public:
  CircleOfSteps(Run& run, const StepCase& step, Engine& engine, Session& session, int num_steps,
                bool stands_still = false)
      : run_(run),
        step_(step),
        engine_(engine),
        session_(session),
        row_(std::int64_t{step.query_heads} * step.head_dim),
        num_steps_(num_steps),
        queries_(num_steps * row_, 77),
        new_kv_(std::int64_t{step.kv_heads} * step.head_dim, 78),
        out_(row_, 79) {
    std::mt19937_64 random(80);
    std::normal_distribution<float> normal(0.0F, 2.0F);
    std::vector<float> first(static_cast<std::size_t>(row_)), second(first.size());
    for (float& x : first) x = normal(random);
    for (float& x : second) x = normal(random);
    std::vector<__nv_bfloat16> values;
    for (int i = 0; i < num_steps; ++i) {
      const double angle = stands_still ? 0.0 : 2.0 * std::numbers::pi * i / num_steps;
      const auto a = static_cast<float>(std::cos(angle));
      const auto b = static_cast<float>(std::sin(angle));
      for (std::size_t j = 0; j < first.size(); ++j) {
        values.push_back(__float2bfloat16(a * first[j] + b * second[j]));
      }
    }
    KVTIER_CUDA_CHECK(
        cudaMemcpy(queries_.data(), values.data(), values.size() * 2, cudaMemcpyHostToDevice));
  }

  [[nodiscard]] int num_steps() const { return num_steps_; }
  [[nodiscard]] const DeviceTensor& queries() const { return queries_; }
  [[nodiscard]] TensorView query(int i) const {
    return view(queries_.data() + i * row_, 1, step_.query_heads, step_.head_dim);
  }
  void run(int i) const {
    const TensorView kv = view(new_kv_.data(), 1, step_.kv_heads, step_.head_dim);
    session_.decode(0, {.query = query(i), .key = kv, .value = kv},
                    {.out = {out_.data(),
                             DType::kBFloat16,
                             {1, step_.query_heads, step_.head_dim},
                             MemorySpace::kDevice}},
                    StreamRef::of(run_.stream()));
  }
  void run_all() const {
    for (int i = 0; i < num_steps_; ++i) run(i);
  }

  /// What a round counts, after one that does not count.
  [[nodiscard]] Stats::Cumulative counted_round() const {
    run_all();
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run_.stream()));
    const Stats before = engine_.stats();
    run_all();
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run_.stream()));
    return engine_.stats().cumulative - before.cumulative;
  }
  /// Time of a step.
  [[nodiscard]] Times time() const {
    return time_graph(
        run_.stream(), num_steps_, run_.replays(), [this] { run_all(); }, graph_passes(num_steps_));
  }

 private:
  Run& run_;
  const StepCase& step_;
  Engine& engine_;
  Session& session_;
  std::int64_t row_;
  int num_steps_;
  DeviceTensor queries_, new_kv_, out_;
};

double found_share(const Stats::Cumulative& counted) {
  return static_cast<double>(counted.row_cache_hits) /
         static_cast<double>(
             std::max<std::uint64_t>(counted.row_cache_hits + counted.row_cache_misses, 1));
}

/// The number of steps with the share nearest to the one wanted; it grows with them.
int steps_for_share(Run& run, const StepCase& step, Engine& engine, Session& session) {
  int best = 0;
  double best_error = 2.0;
  for (int least = 3, most = 200; least <= most;) {
    const int middle = (least + most) / 2;
    const double share =
        found_share(CircleOfSteps(run, step, engine, session, middle).counted_round());
    const double error = std::abs(share - step.row_cache_share);
    if (error < best_error) {
      best = middle;
      best_error = error;
    }
    (share < step.row_cache_share ? least : most) =
        share < step.row_cache_share ? middle + 1 : middle - 1;
  }
  return best;
}

}  // namespace

void bench_row_cache_step(Run& run, const StepCase& given) {
  StepCase step = given;
  step.batch = step.layers = 1;
  step.replayed_tokens = 4000;
  json parameters;
  json measured;
  Times times;
  int num_steps = 0;
  {
    step.placement = KvPlacement::kHost;
    Config config = engine_config(step, 1);
    config.memory.row_cache_rows = step.row_cache_rows;
    config.memory.row_cache_bytes = GiB;
    Engine engine(config);
    std::vector<Session> sessions = open_sessions(run, engine, step, 1);
    num_steps = steps_for_share(run, step, engine, sessions[0]);
    const CircleOfSteps circle(run, step, engine, sessions[0], num_steps);
    const Stats::Cumulative counted = circle.counted_round();
    times = circle.time();
    const double still =
        CircleOfSteps(run, step, engine, sessions[0], num_steps, true).time().median;
    parameters = step_parameters(step, 1);
    parameters["row_cache_rows"] = step.row_cache_rows;
    parameters["row_cache_share"] = step.row_cache_share;
    measured["steps"] = num_steps;
    measured["found"] = found_share(counted);
    measured["bytes_host"] = static_cast<double>(counted.bytes_host_to_device) / num_steps;
    measured["found_all_us"] = still;
    measured["exposed"] = 1.0 - still / times.median;
    measured["evictions"] = static_cast<double>(counted.row_cache_evictions) / num_steps;
  }
  step.placement = KvPlacement::kDevice;
  Engine engine(engine_config(step, 1));
  std::vector<Session> sessions = open_sessions(run, engine, step, 1);
  measured["resident_us"] = CircleOfSteps(run, step, engine, sessions[0], num_steps).time().median;
  run.add("row_cache_step", parameters, times, measured);
}

namespace {

/// Host time of a step that is not captured, the device's included.
double called_us(const Run& run, const CircleOfSteps& circle, int num_steps) {
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  const auto start = std::chrono::steady_clock::now();
  circle.run_all();
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
  return time.count() / num_steps;
}

}  // namespace

void bench_resident_step(Run& run, const StepCase& given) {
  constexpr int kRounds = 9;
  constexpr int kSteps = 16;
  StepCase step = given;
  step.batch = step.layers = 1;
  step.replayed_tokens = 4000;
  Config plain = engine_config(step, 1);
  Config tiered = plain;
  const BenchFolder folder(std::filesystem::temp_directory_path());
  if (step.placement == KvPlacement::kHost) {
    tiered.memory.disk_cache = (folder.path() / "tier").string();
    tiered.memory.disk_cache_bytes = 16 * GiB;
  } else {
    tiered.memory.row_cache_bytes = GiB;
  }
  Engine without(plain);
  Engine with(tiered);
  std::vector<Session> sessions = open_sessions(run, without, step, 1);
  std::vector<Session> other = open_sessions(run, with, step, 1);
  const CircleOfSteps bare(run, step, without, sessions[0], kSteps);
  const CircleOfSteps full(run, step, with, other[0], kSteps);
  bare.run_all();
  full.run_all();
  std::vector<double> called, replayed, called_us_of, bare_us_of, full_us_of;
  for (int round = 0; round < kRounds; ++round) {  // in turn, so that both see the same clocks
    const double first = called_us(run, bare, kSteps), second = called_us(run, full, kSteps);
    called.push_back(second / first);
    called_us_of.push_back(second);
  }
  for (int round = 0; round < kRounds; ++round) {
    bare_us_of.push_back(bare.time().median);
    full_us_of.push_back(full.time().median);
    replayed.push_back(full_us_of.back() / bare_us_of.back());
  }
  const auto middle = [](std::vector<double>& values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
  };
  const double us = middle(full_us_of);
  json measured = {{"over_bare", middle(replayed)},
                   {"over_bare_least", replayed.front()},
                   {"over_bare_most", replayed.back()},
                   {"bare_us", middle(bare_us_of)},
                   {"called_over_bare", middle(called)},
                   {"called_us", middle(called_us_of)},
                   {"pages_evicted", with.stats().cumulative.pages_evicted}};
  run.add("resident_step", step_parameters(step, 1),
          {.median = us, .min = full_us_of.front(), .max = full_us_of.back()}, measured);
}

namespace {

/// What is prefetched after a step: what a guess of the next query selects, or the step's own.
struct Guess {
  const char* name;
  double cosine;  ///< Between the guess and the next query; 0: the step's own.
  double rows;    ///< Selected by it, over k.
};

/// The circle with a prefetch after every step.
class GuessedSteps {
 public:
  GuessedSteps(Run& run, const StepCase& step, const CircleOfSteps& circle, Session& session,
               const Guess* guess)
      : run_(run),
        circle_(circle),
        session_(session),
        guess_(guess),
        retrieval_(step.retrieval),
        shape_({1, step.query_heads, step.head_dim}),
        guesses_(circle.queries().count(), 81),
        marks_(static_cast<std::size_t>(2 * circle.num_steps() + 1)) {
    for (cudaEvent_t& mark : marks_) KVTIER_CUDA_CHECK(cudaEventCreate(&mark));
    if (guess == nullptr) return;
    retrieval_.top_k = static_cast<int>(guess->rows * retrieval_.top_k);
    const auto count = static_cast<std::size_t>(guesses_.count());
    std::vector<__nv_bfloat16> values(count);
    KVTIER_CUDA_CHECK(
        cudaMemcpy(values.data(), circle.queries().data(), count * 2, cudaMemcpyDeviceToHost));
    std::mt19937_64 random(82);
    std::normal_distribution<float> normal(0.0F, 2.0F);
    const auto part = static_cast<float>(guess->cosine);
    const float rest = std::sqrt(1.0F - part * part);
    for (__nv_bfloat16& x : values) {
      x = __float2bfloat16(part * __bfloat162float(x) + rest * normal(random));
    }
    KVTIER_CUDA_CHECK(
        cudaMemcpy(guesses_.data(), values.data(), count * 2, cudaMemcpyHostToDevice));
  }
  GuessedSteps(const GuessedSteps&) = delete;  // owns the events
  GuessedSteps& operator=(const GuessedSteps&) = delete;
  ~GuessedSteps() {
    for (cudaEvent_t mark : marks_) cudaEventDestroy(mark);
  }

  void run_all(bool marked) const {
    const auto mark = [&](int i) {
      if (!marked) return;
      KVTIER_CUDA_CHECK(cudaEventRecordWithFlags(marks_[static_cast<std::size_t>(i)], run_.stream(),
                                                 cudaEventRecordExternal));
    };
    for (int i = 0; i < circle_.num_steps(); ++i) {
      mark(2 * i);
      circle_.run(i);
      mark(2 * i + 1);
      if (guess_ != nullptr) prefetch(i);
    }
    mark(2 * circle_.num_steps());
  }

  struct Measured {
    Times step;
    double prefetch_us = 0.0;  ///< Of a prefetch.
  };
  [[nodiscard]] Measured time() const {
    const Graph graph(run_.stream(), [this] { run_all(true); });
    std::vector<double> steps, gaps;
    for (int i = -1; i < run_.replays(); ++i) {
      graph.launch(run_.stream());
      KVTIER_CUDA_CHECK(cudaStreamSynchronize(run_.stream()));
      double step = 0.0, gap = 0.0;
      for (std::size_t j = 0; j + 1 < marks_.size(); ++j) {
        float ms = 0.0F;
        KVTIER_CUDA_CHECK(cudaEventElapsedTime(&ms, marks_[j], marks_[j + 1]));
        (j % 2 == 0 ? step : gap) += 1e3 * static_cast<double>(ms) / circle_.num_steps();
      }
      if (i < 0) continue;  // warms up
      steps.push_back(step);
      gaps.push_back(gap);
    }
    std::sort(steps.begin(), steps.end());
    std::sort(gaps.begin(), gaps.end());
    return {{.median = steps[steps.size() / 2], .min = steps.front(), .max = steps.back()},
            gaps[gaps.size() / 2]};
  }

 private:
  void prefetch(int i) const {
    const int next = (i + 1) % circle_.num_steps();
    const std::int64_t row = shape_[1] * shape_[2];
    AttendOptions options;
    options.retrieval = &retrieval_;
    const TensorView guess(guesses_.data() + next * row, DType::kBFloat16,
                           {shape_[0], shape_[1], shape_[2]}, MemorySpace::kDevice);
    session_.prefetch(0, guess_->cosine > 0.0 ? guess : circle_.query(i),
                      StreamRef::of(run_.stream()), options);
  }

  Run& run_;
  const CircleOfSteps& circle_;
  Session& session_;
  const Guess* guess_;
  RetrievalConfig retrieval_;
  std::array<std::int64_t, 3> shape_;
  DeviceTensor guesses_;
  std::vector<cudaEvent_t> marks_;  ///< Before and after each step, and at the end.
};

}  // namespace

void bench_prefetch(Run& run, const StepCase& given) {
  StepCase step = given;
  step.batch = step.layers = 1;
  step.replayed_tokens = 4000;
  step.placement = KvPlacement::kHost;
  Config config = engine_config(step, 1);
  config.memory.row_cache_rows = step.row_cache_rows;
  config.memory.row_cache_bytes = GiB;
  Engine engine(config);
  std::vector<Session> sessions = open_sessions(run, engine, step, 1);
  const int num_steps = steps_for_share(run, step, engine, sessions[0]);
  const CircleOfSteps circle(run, step, engine, sessions[0], num_steps);
  constexpr Guess kGuesses[] = {{"own", 0.0, 1.5},       {"own", 0.0, 2.0},
                                {"cosine .8", 0.8, 1.0}, {"cosine .9", 0.9, 1.0},
                                {"cosine .9", 0.9, 1.5}, {"cosine .97", 0.97, 1.0},
                                {"exact", 1.0, 1.0}};
  for (int i = -1; i < static_cast<int>(std::size(kGuesses)); ++i) {
    const Guess* const guess = i < 0 ? nullptr : &kGuesses[i];
    const GuessedSteps guessed(run, step, circle, sessions[0], guess);
    const auto count = [&] {
      guessed.run_all(false);
      KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
      return engine.stats().cumulative;
    };
    const Stats::Cumulative before = count();
    const Stats::Cumulative counted = count() - before;
    const GuessedSteps::Measured measured = guessed.time();
    json parameters = step_parameters(step, 1);
    parameters["row_cache_rows"] = step.row_cache_rows;
    parameters["row_cache_share"] = step.row_cache_share;
    parameters["guess"] = guess == nullptr ? "none" : guess->name;
    if (guess != nullptr) parameters["guess_rows"] = guess->rows;
    run.add("prefetch", parameters, measured.step,
            {{"steps", num_steps},
             {"found", found_share(counted)},
             {"prefetch_us", measured.prefetch_us},
             {"rows_missing", static_cast<double>(counted.row_cache_misses) / num_steps},
             {"rows_prefetched", static_cast<double>(counted.rows_prefetched) / num_steps},
             {"rows_useful", static_cast<double>(counted.rows_prefetched_useful) / num_steps},
             {"bytes_host", static_cast<double>(counted.bytes_host_to_device) / num_steps}});
  }
}

}  // namespace kvtier::bench
