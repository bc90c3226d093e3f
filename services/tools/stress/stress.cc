#include "services/tools/stress/stress.h"

#include "include/types/host_memory.h"
#include "services/console/text.h"
#include "services/evaluation/replay_metrics.h"
#include "services/evaluation/threads.h"
#include "services/tools/stress/decoder.h"
#include "services/tools/stress/ingest.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>
#include <utility>

namespace kvtier::services {
namespace {

using Clock = std::chrono::steady_clock;

/// Ends the construction of an engine, out of its progress callback.
struct Interruption {};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::size_t row_bytes(const StressOptions& options) {
  return static_cast<std::size_t>(2 * *options.kv_heads * *options.head_dim) *
         dtype_bytes(options.model().kv_dtype);
}

/// Adds what has been counted between `before` and `now`. Unsigned numbers wrap.
void add(Stats::Cumulative& to, const Stats::Cumulative& before, const Stats::Cumulative& now) {
  to = to - (before - now);
}

using Lists = std::vector<std::vector<std::int32_t>>;

void add_overlap(Mean& mean, const Lists& before, const Lists& after) {
  for (std::size_t i = 0; i < before.size() && i < after.size(); ++i) {
    if (after[i].empty()) continue;
    std::vector<std::int32_t> both;
    std::ranges::set_intersection(before[i], after[i], std::back_inserter(both));
    mean.add(static_cast<double>(both.size()) / static_cast<double>(after[i].size()));
  }
}

/// Adds ||y - y_dense|| / ||y_dense|| of every query head.
void add_errors(Mean& mean, std::span<const float> found, std::span<const float> dense,
                std::size_t head_dim) {
  for (std::size_t begin = 0; begin + head_dim <= found.size(); begin += head_dim) {
    const auto own = dense.subspan(begin, head_dim);
    mean.add(relative_error(found.subspan(begin, head_dim),
                            std::vector<double>(own.begin(), own.end())));
  }
}

}  // namespace

double found_share(const Stats::Cumulative& moved) {
  const auto hits = static_cast<double>(moved.row_cache_hits);
  const double all = hits + static_cast<double>(moved.row_cache_misses);
  return all > 0.0 ? hits / all : std::numeric_limits<double>::quiet_NaN();
}

StressRun::StressRun(StressOptions options, StressHooks hooks)
    : options_(std::move(options)), hooks_(std::move(hooks)) {
  options_.resolve();
  report_.need = memory_need(options_);
  device_ = make_tensor_device(report_.need.backend);
  check_memory(options_, report_.need,
               {.host = available_host_bytes(), .device = device_->free_bytes()});
}

StressRun::~StressRun() = default;

void StressRun::progress(const StressProgress& progress) const {
  if (hooks_.progress) hooks_.progress(progress);
}

Engine StressRun::make_engine(Config config) {
  config.log = hooks_.log;
  config.memory.progress = [this](std::size_t ready, std::size_t all) {
    progress({.phase = "memory",
              .done = static_cast<double>(ready),
              .total = static_cast<double>(all),
              .bytes = true});
    if (interrupted()) throw Interruption{};
  };
  return Engine(config);
}

void StressRun::run() {
  report_.selected_overlap = std::numeric_limits<double>::quiet_NaN();
  try {
    const Clock::time_point start = Clock::now();
    engine_.emplace(make_engine(engine_config(options_, report_.need)));
    report_.engine_seconds = seconds_since(start);

    noise_ = std::make_shared<NoiseTable>(options_.seed);
    sources_.resize(static_cast<std::size_t>(options_.batch));
    const Clock::time_point ingest_start = Clock::now();
    const Appended appended = fill(*engine_, *options_.layers, "ingest", sessions_);
    report_.ingest_seconds = seconds_since(ingest_start);
    report_.append_seconds = appended.seconds;
    report_.ingested_tokens = appended.tokens;
    report_.ingested_bytes = static_cast<double>(engine_->stats().cumulative.bytes_device_to_host);
    if (!report_.interrupted) decode();
    if (!report_.interrupted && report_.need.row_cache > 0) impose_shares();
    if (!report_.interrupted && options_.compare_dense) compare_dense();
  } catch (const Interruption&) {
    report_.interrupted = true;
  }
  if (engine_) report_.memory = engine_->stats().snapshot;
}

void StressRun::make_source(int sequence, int layer) {
  const SyntheticShape shape = synthetic_shape(options_);
  const RetrievalConfig retrieval = options_.retrieval();
  std::vector<LayerSource>& sources = sources_[static_cast<std::size_t>(sequence)];
  sources.emplace_back(shape, sequence, layer, noise_);
  if (sequence == 0 && layer == 0) {
    report_.calibration = calibrate_drift(shape, sources.back(), num_threads(), options_.drift,
                                          options_.step_overlap);
  }
  const NeedleRequest request{.sequence = sequence,
                              .layer = layer,
                              .drift = report_.calibration.drift,
                              .first_step = kWarmupSteps,
                              .steps = std::min(options_.steps, kMaxProbes),
                              .top_k = options_.top_k,
                              .eligible_begin = retrieval.sink_tokens,
                              .eligible_end = options_.tokens - retrieval.recent_tokens};
  plant_needles(
      shape, request, num_threads(), [this] { return interrupted(); }, sources.back());
}

StressRun::Appended StressRun::fill(Engine& engine, int layers, std::string_view phase,
                                    std::vector<Session>& sessions) {
  for (int i = 0; i < options_.batch; ++i) {
    sessions.push_back(engine.open());
    sessions.back().reserve(session_tokens(options_));
  }
  Ingest ingest(options_, *device_);
  const auto row = static_cast<double>(row_bytes(options_));
  const double total = static_cast<double>(options_.tokens) * layers * options_.batch * row;
  Appended appended;
  for (int i = 0; i < options_.batch * layers && !report_.interrupted; ++i) {
    const auto sequence = static_cast<std::size_t>(i / layers);
    const auto layer = static_cast<std::size_t>(i % layers);
    if (sources_[sequence].size() == layer) make_source(i / layers, i % layers);
    const Clock::time_point start = Clock::now();
    ingest.append(sessions[sequence], i % layers, sources_[sequence][layer],
                  [&](std::int64_t tokens) {
                    appended.tokens += tokens;
                    progress({.phase = phase,
                              .done = static_cast<double>(appended.tokens) * row,
                              .total = total,
                              .bytes = true});
                    report_.interrupted = interrupted();
                    return !report_.interrupted;
                  });
    appended.seconds += seconds_since(start);
  }
  return appended;
}

Decoder StressRun::decoder_of(Engine& engine, std::vector<Session>& sessions, int layers,
                              LayerMode mode) {
  return Decoder(options_, report_.calibration.drift, layers,
                 {.engine = engine,
                  .sessions = sessions,
                  .sources = sources_,
                  .device = *device_,
                  .mode = mode,
                  .interrupted = [this] { return interrupted(); }});
}

std::optional<double> StressRun::run_step(Decoder& decoder) {
  const double seconds = interrupted() ? -1.0 : decoder.run();
  report_.interrupted = seconds < 0.0;
  return report_.interrupted ? std::nullopt : std::optional(seconds);
}

void StressRun::decode() {
  Decoder decoder = decoder_of(*engine_, sessions_, *options_.layers);
  const int probes = std::min(options_.steps, kMaxProbes);
  Mean overlap;
  std::vector<Lists> before;  // of each (sequence, layer)
  for (int step = 0; step < kWarmupSteps + options_.steps; ++step) {
    const int measured = step - kWarmupSteps;
    decoder.prepare();
    const Stats::Cumulative stats = engine_->stats().cumulative;
    const std::optional<double> seconds = run_step(decoder);
    if (!seconds) break;
    if (measured < 0) continue;
    add(report_.moved, stats, engine_->stats().cumulative);
    report_.step_seconds.push_back(*seconds);
    progress({.phase = "decode",
              .done = static_cast<double>(measured + 1),
              .total = static_cast<double>(options_.steps)});
    if (measured >= probes) continue;

    if (options_.compare_dense) {
      const std::span<const float> output = decoder.first_output();
      outputs_.emplace_back(output.begin(), output.end());
    }
    std::vector<Lists> now;
    for (int i = 0; i < options_.batch * *options_.layers && !interrupted(); ++i) {
      const int sequence = i / *options_.layers;
      const int layer = i % *options_.layers;
      now.push_back(decoder.selected(sequence, layer));
      const auto at = static_cast<std::size_t>(i);
      if (at < before.size()) add_overlap(overlap, before[at], now[at]);
      const LayerSource& source =
          sources_[static_cast<std::size_t>(sequence)][static_cast<std::size_t>(layer)];
      for (const Needle& needle : source.needles()) {
        if (needle.step != step) continue;
        const std::vector<std::int32_t>& ids = now[at][static_cast<std::size_t>(needle.kv_head)];
        ++report_.needles;
        const auto token = static_cast<std::int32_t>(needle.token);
        if (std::ranges::binary_search(ids, token)) ++report_.needles_found;
      }
    }
    before = std::move(now);
  }
  report_.selected_overlap = overlap.value();
}

void StressRun::impose_shares() {
  for (const double wanted : kImposedShares) {
    for (Session& session : sessions_) session.truncate(options_.tokens);
    ImposedShare& share = report_.imposed.emplace_back();
    share.wanted = wanted;
    if (wanted > 0.0) {
      repeat_steps(sessions_, share);
    } else {
      // The sessions have taken the memory of all row caches, so that children fetch every row.
      std::vector<Session> children;
      for (Session& session : sessions_) {
        children.push_back(std::move(session.fork(1).front()));
      }
      repeat_steps(children, share);
    }
    if (report_.interrupted) return;
  }
}

void StressRun::repeat_steps(std::vector<Session>& sessions, ImposedShare& share) {
  for (Session& session : sessions) session.reserve(kWarmupSteps + options_.steps);
  const std::string phase = format("decode, %.0f %% found", 100.0 * share.wanted);
  Decoder decoder = decoder_of(*engine_, sessions, *options_.layers);
  // Queries that the real steps have not had: their rows are not there from then.
  decoder.skip_queries(kWarmupSteps + options_.steps);
  double ahead = share.wanted * options_.top_k;
  for (int step = 0; step < kWarmupSteps + options_.steps; ++step) {
    decoder.prepare();
    const auto rows = static_cast<int>(std::lround(ahead));
    if (rows > 0) decoder.prefetch_selected(rows);
    const Stats::Cumulative stats = engine_->stats().cumulative;
    const std::optional<double> seconds = run_step(decoder);
    if (!seconds) return;
    const Stats::Cumulative now = engine_->stats().cumulative;
    if (share.wanted > 0.0) {
      // The others are found or not as ever, which the next step's number makes up for.
      ahead += (share.wanted - found_share(now - stats)) * options_.top_k;
      ahead = std::clamp(ahead, 0.0, static_cast<double>(options_.top_k));
    }
    if (step < kWarmupSteps) continue;
    add(share.moved, stats, now);
    share.step_seconds.push_back(*seconds);
    progress({.phase = phase,
              .done = static_cast<double>(share.step_seconds.size()),
              .total = static_cast<double>(options_.steps)});
  }
}

void StressRun::compare_dense() {
  Engine engine = make_engine(dense_config(options_, report_.need));
  std::vector<Session> sessions;
  static_cast<void>(fill(engine, 1, "dense ingest", sessions));
  if (report_.interrupted) return;
  Decoder decoder = decoder_of(engine, sessions, 1, LayerMode::kDense);
  DenseComparison dense;
  Mean errors;
  for (std::size_t step = 0; step < kWarmupSteps + outputs_.size(); ++step) {
    decoder.prepare();
    const std::optional<double> seconds = run_step(decoder);
    if (!seconds) break;
    if (step < kWarmupSteps) continue;
    dense.step_seconds.push_back(*seconds);
    add_errors(errors, outputs_[step - kWarmupSteps], decoder.first_output(),
               static_cast<std::size_t>(*options_.head_dim));
    progress({.phase = "dense decode",
              .done = static_cast<double>(dense.step_seconds.size()),
              .total = static_cast<double>(outputs_.size())});
  }
  dense.output_error = errors.value();
  if (!dense.step_seconds.empty()) report_.dense = std::move(dense);
}

void StressRun::release(const std::function<void(std::string_view, double)>& freeing) {
  const Stats::Snapshot& memory = report_.memory;
  if (!sessions_.empty()) {
    freeing("sessions", static_cast<double>(memory.host_page_bytes_used));
    sessions_.clear();
  }
  sources_.clear();
  if (engine_) {
    freeing("host pages and device memory",
            static_cast<double>(memory.host_page_bytes) + static_cast<double>(memory.device_bytes));
    engine_.reset();
  }
  device_.reset();
}

}  // namespace kvtier::services
