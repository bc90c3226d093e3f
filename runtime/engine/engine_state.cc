#include "runtime/engine/engine_state.h"

#include "kvtier/calibration.h"
#include "kvtier/error.h"

#include "include/types/failure.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

namespace kvtier::runtime {

namespace {

constexpr std::size_t kLargePool = 4 * GiB;  // the log shows how far it is

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

Config prepared(const Config& given) {
  Config config = with_ordered_log(validated(given));
  config.retrieval.top_k = static_cast<int>(
      std::min<std::int64_t>(config.retrieval.top_k, config.memory.max_session_tokens));
  return config;
}

}  // namespace

EngineState::EngineState(const Config& config_in)
    : config(prepared(config_in)),
      kv(geometry_of(config)),
      device(transfer::make_device(config.backend, config.log)),
      plan(plan_workspace(config, device->backend())),
      workspace(*device, kv, plan),
      submission(*device, workspace, config),
      statistics(*device, carried_sketches(config).size()),
      pools{.device = *device,
            .kv = kv,
            .layers = config.model.layers,
            .pages_on_device = config.memory.placement == KvPlacement::kDevice},
      quotas(static_cast<std::size_t>(kv.page_bytes())),
      prefixes(pools),
      prefix_key(engine_key(config, kv, carried_sketches(config))),
      fixed_device_bytes_(plan.bytes) {
  if (!pools.pages_on_device) make_pages();
  make_frame_checks();
  const DevicePools sizes = plan_pools(config, device->backend(), plan, fixed_device_bytes_);
  make_sketches(sizes);
  make_row_cache(sizes);
  make_frame_factors(sizes);
  log(LogLevel::kInfo, "engine ready on " + std::string(device->name()) + ": " +
                           std::to_string(pools.pages->num_frames()) + " pages of " +
                           std::to_string(kv.page_bytes() >> 10) + " KiB, " +
                           show_mebibytes(fixed_device_bytes_) + " on the device");
}

EngineState::~EngineState() {
  try {
    submission.main().synchronize();
    for (Pools::Retired& retired : pools.retired) retired.last_use.wait();
  } catch (...) {
    // A failed device has nothing left to wait for.
  }
  try {
    // The disk cache ends with the engine; a tier of the caller's does not.
    if (tiers && config.memory.disk_cache.empty()) pools.pages->remove_stored();
  } catch (...) {
    // They stay, and nothing finds them.
  }
}

void EngineState::make_pages() {
  const auto page_bytes = static_cast<std::size_t>(kv.page_bytes());
  const std::size_t host_bytes = config.memory.host_bytes;
  if (host_bytes > 0 && host_bytes < page_bytes) {
    throw_error(ErrorCode::kResourceExhausted, "memory.host_bytes: expected 0 or at least ",
                page_bytes, " for one page of ", kv.page_tokens, " tokens of ", kv.kv_heads,
                " KV heads, found ", host_bytes);
  }
  tiers = make_page_tiers(config.memory, page_bytes, config.log);
  PagePool::Owner& owner = *this;
  pools.pages = tiers == nullptr
                    ? std::make_unique<PagePool>(*device, transfer::Space::kPinnedHost, page_bytes,
                                                 host_bytes, page_pool_options())
                    : std::make_unique<PagePool>(*device, page_bytes, host_bytes,
                                                 page_pool_options(), *tiers, owner);
}

void EngineState::restored(const std::byte* frame) {
  load_frame(submission.scope().stream(), frame);
}

void EngineState::load_frame(transfer::Stream& stream, const std::byte* frame) const {
  if (pools.frame_checks.checks != nullptr) {
    transfer::load_frame_checks(stream, kv, pools.frame_checks, frame);
  }
  if (pools.frame_factors.factors != nullptr) {
    transfer::load_frame_factors(stream, kv, pools.frame_factors, frame);
  }
}

void EngineState::make_frame_checks() {
  const std::size_t bytes = frame_check_bytes(config, device->backend());
  if (bytes == 0) return;
  if (bytes > (config.memory.device_bytes - fixed_device_bytes_) / 2) {
    log(LogLevel::kInfo, "checks of rows are read from host memory: no room for " +
                             show_mebibytes(bytes) + " on the device");
    return;
  }
  pools.frame_check_memory = device->allocate(transfer::Space::kDevice, bytes);
  fixed_device_bytes_ += bytes;
  pools.frame_checks = {pools.pages->first_frame(), pools.frame_check_memory.as<std::uint32_t>()};
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
    throw_error(ErrorCode::kFailedPrecondition, memory.calibration_file,
                ": expected a calibration of this machine's ", device->name(), ", found one of ",
                calibration.device);
  }
  options.allocation = calibration.best;
  return options;
}

void EngineState::make_sketches(const DevicePools& sizes) {
  for (const SketchConfig& sketch : carried_sketches(config)) {
    pools.sketches.push_back({.config = sketch,
                              .planes = hashing::Planes(*device, sketch, kv.head_dim),
                              .geometry = {kv.kv_heads, sketch.num_planes},
                              .slabs = nullptr});
  }
  const std::size_t left = config.memory.device_bytes - fixed_device_bytes_;
  if (!pools.pages) {
    const auto page_bytes = static_cast<std::size_t>(kv.page_bytes());
    pools.pages = std::make_unique<PagePool>(
        *device, transfer::Space::kDevice, page_bytes,
        static_cast<std::size_t>(sizes.page_tokens / kv.page_tokens) * page_bytes);
    fixed_device_bytes_ += pools.pages->num_frames() * pools.pages->page_bytes();
  }
  const auto slabs = static_cast<std::size_t>(sizes.sketch_tokens / hashing::kBlockTokens);
  if (slabs < 1) {
    throw_error(ErrorCode::kResourceExhausted,
                "memory.device_bytes: expected room for at least one sketch block (",
                sketch_token_bytes(config) * hashing::kBlockTokens,
                " bytes) beside the workspace of ", show_mebibytes(fixed_device_bytes_), ", found ",
                left, " bytes of ", show_mebibytes(config.memory.device_bytes));
  }
  for (SketchStore& sketch : pools.sketches) {
    const auto slab_bytes = static_cast<std::size_t>(sketch.geometry.block_bytes());
    sketch.slabs = std::make_unique<PagePool>(*device, transfer::Space::kDevice, slab_bytes,
                                              slabs * slab_bytes);
    fixed_device_bytes_ += slabs * slab_bytes;
  }
}

void EngineState::make_row_cache(const DevicePools& sizes) {
  if (sizes.row_cache_rows == 0) {
    const bool off = config.memory.row_cache_bytes == 0 || config.memory.row_cache_rows == 0;
    log(LogLevel::kInfo,
        std::string("no row cache: ") + (off ? "it is turned off"
                                         : workspace.staged_rows == 0
                                             ? "rows are read where they are"
                                             : "memory.device_bytes has no room for it"));
    return;
  }
  const transfer::RowCacheShape shape{.num_sets = transfer::row_cache_sets(sizes.row_cache_rows),
                                      .policy = config.memory.row_cache_policy};
  const std::size_t bytes = transfer::row_cache_bytes(kv, shape.num_sets);
  pools.row_cache.reset(new RowCachePool{
      .frames = {*device, transfer::Space::kDevice, bytes, sizes.row_cache_bytes}, .shape = shape});
  RowCachePool& cache = *pools.row_cache;
  cache.flags = statistics.of_sketch(0);
  const auto zeros = [this](std::size_t size) {
    transfer::Buffer buffer = device->allocate(transfer::Space::kDevice, size);
    submission.main().fill(buffer.data(), 0, size);
    return buffer;
  };
  cache.totals = zeros(sizeof(transfer::RowCacheTotals));
  const std::size_t num_frames = cache.frames.num_frames();
  fixed_device_bytes_ += num_frames * bytes;
  log(LogLevel::kInfo, "row cache: " + show_mebibytes(num_frames * bytes) + ", " +
                           std::to_string(sizes.row_cache_rows) + " rows per KV head in each of " +
                           std::to_string(num_frames) + " layers of sessions");
  if (!places_rows(config, device->backend(), plan)) return;
  cache.place_memory =
      zeros(transfer::row_cache_places_bytes(kv, workspace.batch_queries, workspace.staged_rows));
  cache.places = transfer::row_cache_places_in(kv, workspace.batch_queries, workspace.staged_rows,
                                               cache.place_memory.data());
  fixed_device_bytes_ += cache.place_memory.bytes();
}

void EngineState::make_frame_factors(const DevicePools& sizes) {
  if (sizes.factor_bytes == 0) return;
  pools.frame_factor_memory = device->allocate(transfer::Space::kDevice, sizes.factor_bytes);
  fixed_device_bytes_ += sizes.factor_bytes;
  pools.frame_factors = {pools.pages->first_frame(), pools.frame_factor_memory.as<float>()};
  log(LogLevel::kInfo, "factors of int8 rows: " + show_mebibytes(sizes.factor_bytes));
}

void EngineState::copy_page(transfer::Stream& stream, const transfer::CopyRun& page) const {
  if (device->backend() != Backend::kCuda || pools.pages_on_device) {
    stream.copy({&page, 1});
    return;
  }
  const transfer::Buffer& packed = workspace.packed;
  for (std::size_t at = 0; at < page.bytes; at += packed.bytes()) {
    const std::size_t bytes = std::min(packed.bytes(), page.bytes - at);
    const transfer::CopyRun runs[] = {
        {packed.data(), static_cast<const std::byte*>(page.from) + at, bytes},
        {static_cast<std::byte*>(page.to) + at, packed.data(), bytes}};
    stream.copy(runs);
  }
  load_frame(stream, static_cast<const std::byte*>(page.to));
}

void EngineState::log(LogLevel level, const std::string& message) const {
  if (config.log) config.log(level, message);
}

Stats EngineState::stats() {
  const std::lock_guard lock(submission.mutex());
  Stats stats;
  statistics.add_to(stats, pools);
  const auto page_tokens = static_cast<std::size_t>(kv.page_tokens);
  stats.cumulative.prefix_tokens_evicted = prefixes.evicted() * page_tokens;
  stats.snapshot.prefix_tokens = prefixes.size() * page_tokens;
  stats.snapshot.device_bytes = fixed_device_bytes_ + pools.session_bytes;
  stats.tenants = quotas.stats();
  if (tiers) tiers->add_to(stats);
  return stats;
}

}  // namespace kvtier::runtime
