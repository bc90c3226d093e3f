#include "runtime/engine_state.h"

#include "kvtier/calibration.h"
#include "kvtier/error.h"

#include "runtime/prefix_key.h"
#include "runtime/prefix_store.h"
#include "runtime/read_ahead.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

namespace kvtier::runtime {

namespace {

constexpr std::size_t kMaxSessions = 16384;
constexpr std::size_t kFlagBytes = 128;  // one StepFlags, alone on its cache lines
/// Rows packed at a time: enough that launches do not count (H200, 128K tokens of 8 KV heads: 8 MiB
/// at a time take 2.2 ms, 32 MiB 1.2 ms), and little beside sketches.
constexpr std::int64_t kAppendBytes = std::int64_t{32} << 20;
constexpr std::int64_t kMinAppendTokens = 256, kMaxAppendTokens = 8192;
/// Rows of a list up to which hot ones are attended in their slots, beside the gather, which leaves
/// attention half of the blocks. H200, 1,048,576 tokens, .8 found, against copying: 180 us and 188
/// for 2,048 rows, 885 and 850 for 31,776.
constexpr std::int64_t kMostPlacedRows = 8192;
constexpr std::size_t kLargePool = 4 * GiB;  // the log tells how far it is

static_assert(sizeof(transfer::StepFlags) <= kFlagBytes);

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

const Config& validated(const Config& config) {
  const std::vector<std::string> problems = config.validate();
  if (problems.empty()) return config;
  std::string message = "configuration: expected valid values, found " +
                        std::to_string(problems.size()) + " problem" +
                        (problems.size() == 1 ? "" : "s");
  for (const std::string& problem : problems) message += "\n  " + problem;
  throw Error(ErrorCode::kInvalidArgument, message);
}

/// Returns a configuration whose messages come one at a time: calls that wait for pages, and
/// threads that do, have some beside the call under way.
Config with_ordered_log(Config config) {
  if (!config.log) return config;
  config.log = [sink = std::move(config.log), order = std::make_shared<std::mutex>()](
                   LogLevel level, std::string_view message) {
    const std::lock_guard lock(*order);
    sink(level, message);
  };
  return config;
}

std::string describe_sketch(const SketchConfig& sketch) {
  const std::string code = sketch.code == SketchCode::kScalar ? "scalar, " : "";
  return code + (sketch.kind == PlaneKind::kGaussian ? "gaussian" : "orthogonal") + " x " +
         std::to_string(sketch.num_planes) + ", seed " + std::to_string(sketch.seed);
}

}  // namespace

EngineState::EngineState(const Config& config_in)
    : config(with_ordered_log(validated(config_in))),
      device(transfer::make_device(config.backend, config.log)),
      main(device->make_stream()) {
  const bool on_host = config.memory.placement == KvPlacement::kHost;
  kv = {.kv_heads = config.model.kv_heads,
        .query_heads = config.model.query_heads,
        .head_dim = config.model.head_dim,
        .page_tokens = config.memory.page_tokens,
        .sink_capacity = on_host ? config.retrieval.sink_tokens : 0,
        .recent_capacity =
            on_host ? config.retrieval.recent_tokens + config.memory.max_batch_rows : 0,
        .dtype = config.model.kv_dtype,
        .float8_pages = config.memory.page_format == PageFormat::kFloat8,
        .row_checks = on_host && config.memory.verify_rows};
  config.retrieval.top_k = static_cast<int>(
      std::min<std::int64_t>(config.retrieval.top_k, config.memory.max_session_tokens));

  size_workspace();
  if (on_host) make_pages();
  if (kv.row_checks) make_frame_checks();
  make_sketches();
  make_hot_rows();
  session_flags = std::make_unique<transfer::FramePool>(*device, transfer::Space::kPinnedHost,
                                                        kFlagBytes, kFlagBytes * kMaxSessions);
  flags = device->allocate(transfer::Space::kPinnedHost,
                           sizeof(transfer::StepFlags) * (sketches.size() + 2));
  for (std::size_t i = 0; i <= sketches.size() + 1; ++i) {
    new (step_flags(i)) transfer::StepFlags{};
  }
  staging = std::make_unique<HostStaging>(*device);
  quotas = std::make_unique<PageQuotas>(static_cast<std::size_t>(kv.page_bytes()));
  prefixes = std::make_unique<PrefixStore>(*this);
  std::vector<SketchConfig> carried;
  for (const SketchStore& sketch : sketches) carried.push_back(sketch.config);
  prefix_key = engine_key(config, kv, carried);
  if (config.memory.read_ahead && page_pool != nullptr) {
    read_ahead = std::make_unique<ReadAhead>(*this);
  }
  log(LogLevel::kInfo, "engine ready on " + std::string(device->name()) + ": " +
                           std::to_string(pages->num_frames()) + " pages of " +
                           std::to_string(kv.page_bytes() >> 10) + " KiB, " +
                           mebibytes(fixed_device_bytes_) + " on the device");
}

EngineState::~EngineState() {
  read_ahead.reset();  // its thread takes turns
  try {
    main->synchronize();
    for (Retired& retired : retired_) retired.last_use.wait();
  } catch (...) {
    // A failed device has nothing left to wait for.
  }
}

void EngineState::make_pages() {
  const auto page_bytes = static_cast<std::size_t>(kv.page_bytes());
  tiers = make_page_tiers(config.memory, page_bytes, config.log);
  if (tiers == nullptr) {
    pages = std::make_unique<transfer::FramePool>(*device, transfer::Space::kPinnedHost, page_bytes,
                                                  config.memory.host_bytes, page_pool_options());
    return;
  }
  auto pool = std::make_unique<PagePool>(
      *device, page_bytes, config.memory.host_bytes, page_pool_options(), *tiers,
      PagePool::Waits{
          .for_work = [this](transfer::Stream& stream) { wait(stream); },
          .aside = [this](const auto& work) { turn_->step_aside(work); },
          .arrived =
              [this](const std::byte* frame) {
                if (frame_checks.checks == nullptr) return;
                transfer::load_frame_checks(turn_->stream(), kv, frame_checks, frame);
              },
      },
      config.memory.page_policy);
  page_pool = pool.get();
  pages = std::move(pool);
}

void EngineState::make_frame_checks() {
  const std::size_t bytes = sizeof(std::uint32_t) * pages->num_frames() *
                            static_cast<std::size_t>(kv.kv_heads) *
                            static_cast<std::size_t>(kv.page_tokens);
  if (device->backend() != Backend::kCuda || bytes == 0) return;
  if (bytes > (config.memory.device_bytes - fixed_device_bytes_) / 2) {
    log(LogLevel::kInfo, "checks of rows are read from host memory: no room for " +
                             mebibytes(bytes) + " on the device");
    return;
  }
  frame_check_memory_ = device->allocate(transfer::Space::kDevice, bytes);
  fixed_device_bytes_ += bytes;
  frame_checks = {pages->first(), frame_check_memory_.as<std::uint32_t>()};
}

transfer::PinOptions EngineState::page_pool_options() const {
  const MemoryConfig& memory = config.memory;
  transfer::PinOptions options{.allocation = memory.host_allocation,
                               .only = memory.host_allocation != HostAllocation::kAuto,
                               .threads = memory.pin_threads,
                               .log = config.log};
  options.progress = [this, quarter = std::size_t{1}](std::size_t ready, std::size_t all) mutable {
    if (config.memory.progress) config.memory.progress(ready, all);
    if (all < kLargePool || ready < all / 4 * quarter) return;
    while (quarter < 4 && ready >= all / 4 * quarter) ++quarter;
    log(LogLevel::kInfo,
        "page pool: " + mebibytes(ready) + " of " + mebibytes(all) + " are pinned");
  };
  if (device->backend() != Backend::kCuda || memory.calibration_file.empty()) return options;

  const Calibration calibration = read_calibration(memory.calibration_file);
  if (calibration.device != device->name()) {
    throw Error(ErrorCode::kFailedPrecondition,
                memory.calibration_file + ": expected a calibration of this machine's " +
                    std::string(device->name()) + ", found one of " + calibration.device);
  }
  options.allocation = calibration.best;
  return options;
}

void EngineState::size_workspace() {
  const std::int64_t max_tokens = config.memory.max_session_tokens;
  const auto row_bytes = static_cast<std::size_t>(kv.row_bytes());
  const int group = kv.group();
  const RetrievalConfig& retrieval = config.retrieval;
  const bool per_head = retrieval.selection == Selection::kPerQueryHead;

  std::int64_t default_k = retrieval.top_k;
  if (retrieval.sparsity > 0.0) {
    default_k = static_cast<std::int64_t>(static_cast<double>(max_tokens) / retrieval.sparsity) + 1;
  }
  const std::int64_t default_selected = std::min(max_tokens, default_k * (per_head ? group : 1));
  staged_rows = config.memory.staging_rows;
  if (staged_rows < 0) staged_rows = device->backend() == Backend::kCuda ? default_selected : 0;
  if (config.memory.placement == KvPlacement::kDevice) staged_rows = 0;
  staged_rows = std::min(staged_rows, max_tokens);

  scoring::SelectorLimits limits{.rows = config.memory.max_batch_rows,
                                 .query_heads = kv.query_heads,
                                 .kv_heads = kv.kv_heads,
                                 .max_tokens = max_tokens,
                                 .max_selected = max_tokens,
                                 .staged_rows = staged_rows,
                                 .row_bytes = kv.row_bytes()};
  const std::size_t share = config.memory.device_bytes / 2;
  while (limits.rows > 1 && scoring::Selector::workspace_bytes(limits) > share) --limits.rows;
  while (limits.staged_rows > 0 && scoring::Selector::workspace_bytes(limits) > share) {
    limits.staged_rows /= 2;  // rows beyond the staging area are read in place
  }
  staged_rows = limits.staged_rows;
  batch_rows = limits.rows;
  const attention::FlashDecodeLimits flash_limits{
      .rows = batch_rows, .query_heads = kv.query_heads, .head_dim = kv.head_dim};

  append_tokens = std::min(
      std::clamp(kAppendBytes / (kv.kv_heads * kv.row_bytes()), kMinAppendTokens, kMaxAppendTokens),
      max_tokens);
  const std::size_t packed_bytes = static_cast<std::size_t>(append_tokens * kv.kv_heads) *
                                   (row_bytes + sizeof(transfer::RowSquares));
  const std::size_t query_bytes = sizeof(float) * static_cast<std::size_t>(batch_rows) *
                                  static_cast<std::size_t>(kv.query_heads * kv.head_dim);
  const std::size_t wanted =
      scoring::Selector::workspace_bytes(limits) +
      attention::FlashDecode::workspace_bytes(device->backend(), flash_limits) + packed_bytes +
      query_bytes;
  if (wanted > config.memory.device_bytes) {
    throw Error(ErrorCode::kResourceExhausted,
                "memory.device_bytes: expected at least " + mebibytes(wanted + MiB - 1) +
                    " for the workspace of one query over " + std::to_string(max_tokens) +
                    " tokens (memory.max_session_tokens) and the sketches beside it, found " +
                    mebibytes(config.memory.device_bytes));
  }
  selector = std::make_unique<scoring::Selector>(*device, limits);
  flash = std::make_unique<attention::FlashDecode>(*device, flash_limits);
  packed = device->allocate(transfer::Space::kDevice, packed_bytes);
  queries = device->allocate(transfer::Space::kDevice, query_bytes);
  fixed_device_bytes_ = wanted;
}

void EngineState::make_sketches() {
  std::vector<SketchConfig> wanted{config.retrieval.sketch(config.model.head_dim)};
  for (const SketchConfig& extra : config.extra_sketches) {
    if (std::find(wanted.begin(), wanted.end(), extra) == wanted.end()) wanted.push_back(extra);
  }
  std::size_t token_bytes = 0;
  for (const SketchConfig& sketch : wanted) {
    const hashing::SketchGeometry geometry{kv.kv_heads, sketch.num_planes};
    token_bytes += static_cast<std::size_t>(geometry.block_bytes()) / hashing::kBlockTokens;
    sketches.push_back({.config = sketch,
                        .planes = hashing::Planes(*device, sketch, kv.head_dim),
                        .geometry = geometry,
                        .blocks = nullptr});
  }

  const std::size_t left = config.memory.device_bytes - fixed_device_bytes_;
  const auto page_token_bytes = static_cast<std::size_t>(kv.page_bytes() / kv.page_tokens);
  std::size_t tokens = 0;
  if (pages) {
    // Blocks for every token that the pages hold, and a part-filled block for many short layers.
    std::size_t most_pages = pages->num_frames();
    if (tiers) most_pages += tiers->capacity_pages(pages->frame_bytes());
    const std::size_t page_tokens = most_pages * static_cast<std::size_t>(kv.page_tokens);
    tokens = std::min(left / token_bytes, 2 * page_tokens + 64 * 1024);
  } else {
    tokens = left / (token_bytes + page_token_bytes);
    pages = std::make_unique<transfer::FramePool>(*device, transfer::Space::kDevice,
                                                  static_cast<std::size_t>(kv.page_bytes()),
                                                  tokens * page_token_bytes);
    fixed_device_bytes_ += pages->num_frames() * pages->frame_bytes();
  }
  const std::size_t blocks = tokens / hashing::kBlockTokens;
  if (blocks < 1) {
    throw Error(ErrorCode::kResourceExhausted,
                "memory.device_bytes: expected room for at least one sketch block (" +
                    std::to_string(token_bytes * hashing::kBlockTokens) +
                    " bytes) beside the workspace of " + mebibytes(fixed_device_bytes_) +
                    ", found " + std::to_string(left) + " bytes of " +
                    mebibytes(config.memory.device_bytes));
  }
  for (SketchStore& sketch : sketches) {
    const auto block_bytes = static_cast<std::size_t>(sketch.geometry.block_bytes());
    sketch.blocks = std::make_unique<transfer::FramePool>(*device, transfer::Space::kDevice,
                                                          block_bytes, blocks * block_bytes);
    fixed_device_bytes_ += blocks * block_bytes;
  }
}

void EngineState::make_hot_rows() {
  const std::size_t budget = config.memory.hot_bytes;
  if (budget == 0) return;
  if (staged_rows == 0) {
    log(LogLevel::kInfo, "no hot rows are kept: rows are read where they are");
    return;
  }
  hot_shape = {.num_sets = transfer::hot_sets(config.memory.hot_rows),
               .policy = config.memory.hot_policy};
  const std::size_t bytes = transfer::hot_rows_bytes(kv, hot_shape.num_sets);
  if (budget < bytes) {
    throw Error(ErrorCode::kResourceExhausted,
                "memory.hot_bytes: expected at least " + std::to_string(bytes) +
                    " for the hot rows of one layer of a session (memory.hot_rows), found " +
                    std::to_string(budget));
  }
  hot = std::make_unique<transfer::FramePool>(*device, transfer::Space::kDevice, bytes, budget);
  hot_totals = device->allocate(transfer::Space::kDevice, sizeof(transfer::HotTotals));
  main->fill(hot_totals.data(), 0, hot_totals.bytes());
  fixed_device_bytes_ += hot->num_frames() * bytes;
  if (device->backend() == Backend::kCpu || kv.row_checks || staged_rows > kMostPlacedRows) return;
  hot_places_ = device->allocate(transfer::Space::kDevice,
                                 transfer::hot_places_bytes(kv, batch_rows, staged_rows));
  main->fill(hot_places_.data(), 0, hot_places_.bytes());
  fixed_device_bytes_ += hot_places_.bytes();
}

transfer::HotPlaces EngineState::hot_places() const {
  return transfer::hot_places_in(kv, batch_rows, staged_rows, hot_places_.data());
}

transfer::Stream* EngineState::adopted(StreamRef stream) {
  std::unique_ptr<transfer::Stream>& slot = adopted_[stream.handle()];
  if (!slot) slot = device->adopt(stream);
  return slot.get();
}

void EngineState::wait(transfer::Stream& stream) {
  try {
    stream.synchronize();
  } catch (const std::exception& error) {
    failure_ = error.what();
    log(LogLevel::kError, "engine failed: " + failure_);
    throw Error(ErrorCode::kInternal, failure_);
  }
}

void EngineState::check_alive() const {
  if (!failure_.empty()) throw Error(ErrorCode::kInternal, "the engine has failed: " + failure_);
}

void EngineState::retire(transfer::Event last_use, transfer::Buffer memory) {
  retired_.push_back({std::move(last_use), std::move(memory)});
}

void EngineState::collect_retired() {
  std::erase_if(retired_, [](const Retired& retired) { return retired.last_use.done(); });
}

void EngineState::copy_page(transfer::Stream& stream, const transfer::CopyRun& page) const {
  if (device->backend() != Backend::kCuda || config.memory.placement == KvPlacement::kDevice) {
    stream.copy({&page, 1});
    return;
  }
  for (std::size_t at = 0; at < page.bytes; at += packed.bytes()) {
    const std::size_t bytes = std::min(packed.bytes(), page.bytes - at);
    const transfer::CopyRun runs[] = {
        {packed.data(), static_cast<const std::byte*>(page.from) + at, bytes},
        {static_cast<std::byte*>(page.to) + at, packed.data(), bytes}};
    stream.copy(runs);
  }
  if (frame_checks.checks == nullptr) return;
  transfer::load_frame_checks(stream, kv, frame_checks, static_cast<const std::byte*>(page.to));
}

void EngineState::log(LogLevel level, const std::string& message) const {
  if (config.log) config.log(level, message);
}

std::size_t EngineState::fitting_sketch(const RetrievalConfig& retrieval) const {
  const SketchConfig wanted = retrieval.sketch(config.model.head_dim);
  for (std::size_t i = 0; i < sketches.size(); ++i) {
    if (sketches[i].config.serves(wanted)) return i;
  }
  std::string found;
  for (const SketchStore& sketch : sketches) {
    found += (found.empty() ? "" : "; ") + describe_sketch(sketch.config);
  }
  throw Error(ErrorCode::kFailedPrecondition, "sketch: expected one that the estimator can read (" +
                                                  describe_sketch(wanted) + "), found " + found);
}

void EngineState::add_tier_stats(Stats& stats) const {
  Stats::Cumulative& sum = stats.cumulative;
  const PageTierCounters counted = tiers->counters();
  sum.pages_spilled = page_pool->counters().spilled;
  sum.pages_restored = page_pool->counters().restored;
  sum.tier_bytes_written = counted.written * pages->frame_bytes();
  sum.tier_bytes_read = counted.hits * pages->frame_bytes();
  sum.tier_hits = counted.hits;
  sum.tier_misses = counted.misses;
  sum.tier_corrupt = counted.corrupt;
  sum.tier_refused = counted.refused;
  sum.tier_unavailable = counted.unavailable;
  sum.pages_lost = counted.lost;
  sum.pages_repaired = counted.repaired;
  sum.cold_steps = cold_steps;
  const PagePool::Counters& moved = page_pool->counters();
  sum.pages_ahead = moved.ahead;
  sum.pages_ahead_useful = moved.ahead_useful;
  sum.pages_ahead_wasted = moved.ahead_wasted;
  stats.snapshot.pages_ahead_waiting = moved.ahead - moved.ahead_useful - moved.ahead_wasted;
  sum.tier_nanoseconds = counted.wait_nanoseconds;
  stats.snapshot.pages_away = page_pool->num_away();
  stats.tiers = tiers->uses();
}

void EngineState::add_hot_stats(Stats& stats) const {
  Stats::Cumulative& sum = stats.cumulative;
  for (std::size_t i = 0; i < sketches.size(); ++i) {
    transfer::StepFlags& step = *step_flags(i);
    sum.hot_hits += load(step.hot_hits);
    sum.hot_misses += load(step.hot_misses);
    sum.hot_admissions += load(step.hot_admissions);
    sum.hot_evictions += load(step.hot_evictions);
    sum.rows_ahead += load(step.rows_ahead);
    sum.rows_ahead_useful += load(step.rows_ahead_useful);
    sum.rows_ahead_wasted += load(step.rows_ahead_wasted);
  }
  stats.snapshot.hot_bytes = hot->num_frames() * hot->frame_bytes();
  stats.snapshot.hot_bytes_used = hot->num_used() * hot->frame_bytes();
}

Stats EngineState::stats() const {
  const std::lock_guard lock(mutex);
  Stats stats;
  stats.seconds = seconds;
  Stats::Cumulative& sum = stats.cumulative;
  sum.tokens_appended = tokens_appended.load(std::memory_order_relaxed);
  sum.queries = query_tokens.load(std::memory_order_relaxed);
  const auto row_bytes = static_cast<std::uint64_t>(kv.page_bytes()) /
                         static_cast<std::uint64_t>(kv.kv_heads * kv.page_tokens);
  for (std::size_t i = 0; i <= sketches.size(); ++i) {
    transfer::StepFlags& step = *step_flags(i);
    const std::uint64_t fetched = load(step.rows_fetched_host);
    const std::uint64_t resident = load(step.rows_resident);
    sum.rows_selected += load(step.rows_selected);
    sum.rows_attended += fetched + resident;
    sum.bytes_host_to_device += (fetched + load(step.rows_ahead)) * row_bytes;
    sum.bytes_device_resident += resident * static_cast<std::uint64_t>(kv.row_bytes());
    if (i < sketches.size()) {
      sum.bytes_sketch_read += load(step.tokens_scored) *
                                   static_cast<std::uint64_t>(sketches[i].geometry.token_bytes()) +
                               load(step.sketch_bytes);
    }
  }
  if (config.memory.placement == KvPlacement::kHost) {
    sum.bytes_device_to_host =
        sum.tokens_appended * static_cast<std::uint64_t>(kv.kv_heads) * row_bytes;
  }
  sum.nonfinite_tokens = closed_nonfinite;
  sum.rows_corrupt = closed_corrupt;
  for (transfer::StepFlags* session : live_flags) {
    sum.nonfinite_tokens += load(session->nonfinite_tokens);
    sum.rows_corrupt += load(session->rows_corrupt);
  }

  const auto page_tokens = static_cast<std::size_t>(kv.page_tokens);
  sum.prefix_tokens_asked = prefix_tokens_asked;
  sum.prefix_tokens_attached = prefix_tokens_attached;
  sum.prefix_tokens_evicted = prefixes->evicted() * page_tokens;

  Stats::Snapshot& now = stats.snapshot;
  now.prefix_tokens = prefixes->size() * page_tokens;
  now.sessions = num_sessions;
  now.pages = pages->num_frames();
  now.pages_used = pages->num_used();
  now.pages_shared = pages->num_shared();
  if (config.memory.placement == KvPlacement::kHost) {
    now.host_page_bytes = now.pages * pages->frame_bytes();
    now.host_page_bytes_used = now.pages_used * pages->frame_bytes();
  }
  stats.tenants = quotas->stats();
  if (tiers) add_tier_stats(stats);
  if (hot) add_hot_stats(stats);
  now.device_bytes = fixed_device_bytes_ + session_device_bytes;
  for (const SketchStore& sketch : sketches) {
    now.sketch_bytes_used += sketch.blocks->num_used() * sketch.blocks->frame_bytes();
  }
  return stats;
}

}  // namespace kvtier::runtime
