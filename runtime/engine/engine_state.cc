#include "runtime/engine/engine_state.h"

#include "kvtier/calibration.h"
#include "kvtier/error.h"

#include "runtime/engine/page_prefetch.h"
#include "runtime/sequence/prefix_key.h"
#include "runtime/sequence/prefix_store.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

namespace kvtier::runtime {

namespace {

constexpr std::size_t kMaxSessions = 16384;
constexpr std::size_t kFlagBytes = 128;      // one StepFlags, alone on its cache lines
constexpr std::size_t kLargePool = 4 * GiB;  // the log tells how far it is

static_assert(sizeof(transfer::StepFlags) <= kFlagBytes);

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
  kv = geometry_of(config);
  config.retrieval.top_k = static_cast<int>(
      std::min<std::int64_t>(config.retrieval.top_k, config.memory.max_session_tokens));

  const WorkspacePlan workspace = plan_workspace(config, device->backend());
  make_workspace(workspace);
  if (on_host) make_pages();
  if (kv.row_checks) make_frame_checks();
  const DevicePools pools = plan_pools(config, device->backend(), workspace, fixed_device_bytes_,
                                       on_host ? tokens_of_pages() : 0);
  make_sketches(pools);
  make_row_cache(pools, workspace);
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
  if (config.memory.page_prefetch && pages->has_tiers()) {
    page_prefetch = std::make_unique<PagePrefetch>(*this);
  }
  log(LogLevel::kInfo, "engine ready on " + std::string(device->name()) + ": " +
                           std::to_string(pages->num_frames()) + " pages of " +
                           std::to_string(kv.page_bytes() >> 10) + " KiB, " +
                           show_mebibytes(fixed_device_bytes_) + " on the device");
}

EngineState::~EngineState() {
  page_prefetch.reset();  // its thread submits calls
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
  PagePool::Owner& owner = *this;
  pages = tiers == nullptr
              ? std::make_unique<PagePool>(*device, transfer::Space::kPinnedHost, page_bytes,
                                           config.memory.host_bytes, page_pool_options())
              : std::make_unique<PagePool>(*device, page_bytes, config.memory.host_bytes,
                                           page_pool_options(), *tiers, owner,
                                           config.memory.page_policy);
}

void EngineState::restored(const std::byte* frame) {
  if (frame_checks.checks == nullptr) return;
  transfer::load_frame_checks(scope_->stream(), kv, frame_checks, frame);
}

void EngineState::make_frame_checks() {
  const std::size_t bytes = sizeof(std::uint32_t) * pages->num_frames() *
                            static_cast<std::size_t>(kv.kv_heads) *
                            static_cast<std::size_t>(kv.page_tokens);
  if (device->backend() != Backend::kCuda || bytes == 0) return;
  if (bytes > (config.memory.device_bytes - fixed_device_bytes_) / 2) {
    log(LogLevel::kInfo, "checks of rows are read from host memory: no room for " +
                             show_mebibytes(bytes) + " on the device");
    return;
  }
  frame_check_memory_ = device->allocate(transfer::Space::kDevice, bytes);
  fixed_device_bytes_ += bytes;
  frame_checks = {pages->first_frame(), frame_check_memory_.as<std::uint32_t>()};
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
        "page pool: " + show_mebibytes(ready) + " of " + show_mebibytes(all) + " are pinned");
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

std::int64_t EngineState::tokens_of_pages() const {
  std::size_t most = pages->num_frames();
  if (tiers) most += tiers->capacity_pages(pages->page_bytes());
  return static_cast<std::int64_t>(most) * kv.page_tokens;
}

void EngineState::make_workspace(const WorkspacePlan& plan) {
  batch_rows = plan.selector.rows;
  staged_rows = plan.selector.staged_rows;
  append_tokens = plan.append_tokens;
  selector = std::make_unique<scoring::Selector>(*device, plan.selector);
  flash = std::make_unique<attention::FlashDecode>(*device, plan.flash);
  packed = device->allocate(transfer::Space::kDevice, plan.packed_bytes);
  queries = device->allocate(transfer::Space::kDevice, plan.query_bytes);
  fixed_device_bytes_ = plan.bytes;
}

void EngineState::make_sketches(const DevicePools& pools) {
  for (const SketchConfig& sketch : carried_sketches(config)) {
    sketches.push_back({.config = sketch,
                        .planes = hashing::Planes(*device, sketch, kv.head_dim),
                        .geometry = {kv.kv_heads, sketch.num_planes},
                        .blocks = nullptr});
  }
  const std::size_t left = config.memory.device_bytes - fixed_device_bytes_;
  if (!pages) {
    const auto page_bytes = static_cast<std::size_t>(kv.page_bytes());
    pages = std::make_unique<PagePool>(
        *device, transfer::Space::kDevice, page_bytes,
        static_cast<std::size_t>(pools.page_tokens / kv.page_tokens) * page_bytes);
    fixed_device_bytes_ += pages->num_frames() * pages->page_bytes();
  }
  const auto blocks = static_cast<std::size_t>(pools.sketch_tokens / hashing::kBlockTokens);
  if (blocks < 1) {
    throw Error(ErrorCode::kResourceExhausted,
                "memory.device_bytes: expected room for at least one sketch block (" +
                    std::to_string(sketch_token_bytes(config) * hashing::kBlockTokens) +
                    " bytes) beside the workspace of " + show_mebibytes(fixed_device_bytes_) +
                    ", found " + std::to_string(left) + " bytes of " +
                    show_mebibytes(config.memory.device_bytes));
  }
  for (SketchStore& sketch : sketches) {
    const auto block_bytes = static_cast<std::size_t>(sketch.geometry.block_bytes());
    sketch.blocks = std::make_unique<PagePool>(*device, transfer::Space::kDevice, block_bytes,
                                               blocks * block_bytes);
    fixed_device_bytes_ += blocks * block_bytes;
  }
}

void EngineState::make_row_cache(const DevicePools& pools, const WorkspacePlan& workspace) {
  if (pools.row_cache_rows == 0) {
    const bool off = config.memory.row_cache_bytes == 0 || config.memory.row_cache_rows == 0;
    log(LogLevel::kInfo, std::string("no row cache: ") +
                             (off                ? "it is turned off"
                              : staged_rows == 0 ? "rows are read where they are"
                                                 : "memory.device_bytes has no room for it"));
    return;
  }
  row_cache_shape = {.num_sets = transfer::row_cache_sets(pools.row_cache_rows),
                     .policy = config.memory.row_cache_policy};
  const std::size_t bytes = transfer::row_cache_bytes(kv, row_cache_shape.num_sets);
  row_cache = std::make_unique<transfer::FramePool>(*device, transfer::Space::kDevice, bytes,
                                                    pools.row_cache_bytes);
  row_cache_totals = device->allocate(transfer::Space::kDevice, sizeof(transfer::RowCacheTotals));
  main->fill(row_cache_totals.data(), 0, row_cache_totals.bytes());
  fixed_device_bytes_ += row_cache->num_frames() * bytes;
  log(LogLevel::kInfo, "row cache: " + show_mebibytes(row_cache->num_frames() * bytes) + ", " +
                           std::to_string(pools.row_cache_rows) + " rows per KV head in each of " +
                           std::to_string(row_cache->num_frames()) + " layers of sessions");
  if (!places_rows(config, device->backend(), workspace)) return;
  row_cache_places_ = device->allocate(
      transfer::Space::kDevice, transfer::row_cache_places_bytes(kv, batch_rows, staged_rows));
  main->fill(row_cache_places_.data(), 0, row_cache_places_.bytes());
  fixed_device_bytes_ += row_cache_places_.bytes();
}

transfer::RowCachePlaces EngineState::row_cache_places() const {
  return transfer::row_cache_places_in(kv, batch_rows, staged_rows, row_cache_places_.data());
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
  sum.pages_evicted = pages->counters().evicted;
  sum.pages_restored = pages->counters().restored;
  sum.tier_bytes_written = counted.written * pages->page_bytes();
  sum.tier_bytes_read = counted.hits * pages->page_bytes();
  sum.tier_hits = counted.hits;
  sum.tier_misses = counted.misses;
  sum.tier_corrupt = counted.corrupt;
  sum.tier_refused = counted.refused;
  sum.tier_unavailable = counted.unavailable;
  sum.pages_lost = counted.lost;
  sum.pages_repaired = counted.repaired;
  sum.cold_steps = cold_steps;
  const PagePool::Counters& moved = pages->counters();
  sum.pages_prefetched = moved.prefetched;
  sum.pages_prefetched_useful = moved.prefetched_useful;
  sum.pages_prefetched_wasted = moved.prefetched_wasted;
  stats.snapshot.pages_prefetched_waiting =
      moved.prefetched - moved.prefetched_useful - moved.prefetched_wasted;
  sum.tier_nanoseconds = counted.wait_nanoseconds;
  stats.snapshot.pages_in_tiers = pages->num_evicted();
  stats.tiers = tiers->uses();
}

void EngineState::add_row_cache_stats(Stats& stats) const {
  Stats::Cumulative& sum = stats.cumulative;
  for (std::size_t i = 0; i < sketches.size(); ++i) {
    transfer::StepFlags& step = *step_flags(i);
    sum.row_cache_hits += load(step.row_cache_hits);
    sum.row_cache_misses += load(step.row_cache_misses);
    sum.row_cache_admissions += load(step.row_cache_admissions);
    sum.row_cache_evictions += load(step.row_cache_evictions);
    sum.rows_prefetched += load(step.rows_prefetched);
    sum.rows_prefetched_useful += load(step.rows_prefetched_useful);
    sum.rows_prefetched_wasted += load(step.rows_prefetched_wasted);
  }
  stats.snapshot.row_cache_rows = row_cache_shape.num_sets * transfer::kSetWays;
  stats.snapshot.row_cache_bytes = row_cache->num_frames() * row_cache->frame_bytes();
  stats.snapshot.row_cache_bytes_used = row_cache->num_used() * row_cache->frame_bytes();
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
    sum.bytes_host_to_device += (fetched + load(step.rows_prefetched)) * row_bytes;
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
    now.host_page_bytes = now.pages * pages->page_bytes();
    now.host_page_bytes_used = now.pages_used * pages->page_bytes();
  }
  stats.tenants = quotas->stats();
  if (tiers) add_tier_stats(stats);
  if (row_cache) add_row_cache_stats(stats);
  now.device_bytes = fixed_device_bytes_ + session_device_bytes;
  for (const SketchStore& sketch : sketches) {
    now.sketch_bytes_used += sketch.blocks->num_used() * sketch.blocks->page_bytes();
  }
  return stats;
}

}  // namespace kvtier::runtime
