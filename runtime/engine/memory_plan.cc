#include "runtime/engine/memory_plan.h"

#include "kvtier/error.h"

#include "hashing/sketch.h"
#include "include/types/failure.h"
#include "runtime/paging/page_tiers.h"
#include "transfer/kv/frame_factors.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace kvtier::runtime {
namespace {

/// Rows packed at a time: enough that launches do not count (H200, 128K tokens of 8 KV heads: 8 MiB
/// at a time take 2.2 ms, 32 MiB 1.2 ms), and little beside sketches.
constexpr std::int64_t kAppendBytes = std::int64_t{32} << 20;
constexpr std::int64_t kMinAppendTokens = 256, kMaxAppendTokens = 8192;
/// Rows that the cache has for each row of a step, where there is room. With the drift of SmolLM2
/// an LRU cache of 2 and of 4 times the rows finds .81 and .92 (docs/quality.md).
constexpr std::int64_t kRowsPerSelected = 4;
constexpr std::int64_t kMaxCachedRows = std::int64_t{1} << 20;
/// Part-filled slabs for which there is room before the row cache: of so many sessions in each
/// layer for each that the pages hold at full length, and at least so many tokens.
constexpr std::int64_t kSpareSlabs = 4, kSpareTokens = 64 * 1024;

bool pages_on_host(const Config& config) { return config.memory.placement == KvPlacement::kHost; }

/// Most rows per KV head of which `bytes` hold a layer's.
std::int64_t rows_in(const transfer::KvGeometry& kv, std::size_t bytes) {
  constexpr int kSets = 16;  // whose states are whole regions
  const std::size_t size =
      (transfer::row_cache_bytes(kv, kSets + 1) - transfer::row_cache_bytes(kv, 1)) / kSets;
  const std::size_t most = std::min<std::size_t>(bytes / size, kMaxCachedRows);
  int sets = static_cast<int>(most);
  while (sets > 0 && transfer::row_cache_bytes(kv, sets) > bytes) --sets;
  return std::int64_t{sets} * transfer::kSetWays;
}

/// Gives the row cache of `layers` layers of sessions what it has a use for of `room` bytes, all of
/// them where `row_cache_bytes` says so: the rows asked for; else as many as steps have a use for,
/// fewer where all layers then have some, but not fewer than one step selects.
void give_row_cache(const Config& config, const WorkspacePlan& workspace, std::size_t room,
                    std::int64_t layers, DevicePools& pools) {
  const transfer::KvGeometry kv = geometry_of(config);
  const bool all = config.memory.row_cache_bytes.has_value();
  layers = std::max<std::int64_t>(layers, 1);
  std::int64_t rows = config.memory.row_cache_rows;
  if (rows < 0) {
    const std::int64_t most = std::min({kRowsPerSelected * workspace.selected_rows,
                                        config.memory.max_session_tokens, kMaxCachedRows});
    std::int64_t least = std::min(workspace.selected_rows, most);
    if (all) least = std::min(least, rows_in(kv, room));
    rows = std::clamp(rows_in(kv, room / static_cast<std::size_t>(layers)), least, most);
    rows = std::max<std::int64_t>(rows, 1);
  }
  const int sets = transfer::row_cache_sets(static_cast<int>(rows));
  const std::size_t layer_bytes = transfer::row_cache_bytes(kv, sets);
  std::size_t frames = room / layer_bytes;
  if (frames == 0 && all) {
    throw_error(
        ErrorCode::kResourceExhausted, "memory.row_cache_bytes: expected at least ", layer_bytes,
        " for the row cache of one layer of a session (memory.row_cache_rows), found ", room);
  }
  if (!all) frames = std::min(frames, static_cast<std::size_t>(layers));
  if (frames == 0) return;
  pools.row_cache_rows = sets * transfer::kSetWays;
  pools.row_cache_bytes = frames * layer_bytes;
}

/// Bytes of the factors of int8 rows that CUDA keeps on the device. With checks of rows there are
/// none, so that what is compared is what is in the pages.
std::size_t factor_bytes(const Config& config, Backend backend) {
  const transfer::KvGeometry kv = geometry_of(config);
  if (!kv.int8_pages || kv.row_checks || backend != Backend::kCuda) return 0;
  const std::size_t frames = config.memory.host_bytes / static_cast<std::size_t>(kv.page_bytes());
  return transfer::frame_factor_bytes(kv, frames);
}

}  // namespace

transfer::KvGeometry geometry_of(const Config& config) {
  const bool host = pages_on_host(config);
  return {
      .kv_heads = config.model.kv_heads,
      .group = config.model.query_heads / config.model.kv_heads,
      .head_dim = config.model.head_dim,
      .page_tokens = config.memory.page_tokens,
      .sink_capacity = host ? config.retrieval.sink_tokens : 0,
      .recent_capacity = host ? config.retrieval.recent_tokens + config.memory.max_batch_rows : 0,
      .dtype = config.model.kv_dtype,
      .int8_pages = config.memory.page_format == PageFormat::kInt8,
      .row_checks = host && config.memory.verify_rows};
}

std::vector<SketchConfig> carried_sketches(const Config& config) {
  std::vector<SketchConfig> carried{config.retrieval.sketch(config.model.head_dim)};
  for (const SketchConfig& extra : config.extra_sketches) {
    if (std::ranges::find(carried, extra) == carried.end()) carried.push_back(extra);
  }
  return carried;
}

std::int64_t num_sparse_layers(const Config& config) {
  if (config.model.layer_options.empty()) return config.model.layers;
  return std::ranges::count(config.model.layer_options, LayerMode::kSparse, &LayerConfig::mode);
}

std::size_t sketch_token_bytes(const Config& config) {
  std::size_t bytes = 0;
  for (const SketchConfig& sketch : carried_sketches(config)) {
    const hashing::SketchGeometry geometry{config.model.kv_heads, sketch.num_planes};
    bytes += static_cast<std::size_t>(geometry.block_bytes()) / hashing::kBlockTokens;
  }
  return bytes;
}

std::size_t frame_check_bytes(const Config& config, Backend backend) {
  const transfer::KvGeometry kv = geometry_of(config);
  if (!kv.row_checks || backend != Backend::kCuda) return 0;
  const std::size_t pages = config.memory.host_bytes / static_cast<std::size_t>(kv.page_bytes());
  return sizeof(std::uint32_t) * pages * static_cast<std::size_t>(kv.kv_heads * kv.page_tokens);
}

WorkspacePlan plan_workspace(const Config& config, Backend backend) {
  const transfer::KvGeometry kv = geometry_of(config);
  const std::int64_t max_tokens = config.memory.max_session_tokens;
  const RetrievalConfig& retrieval = config.retrieval;
  const bool per_head = retrieval.selection == Selection::kPerQueryHead;

  const std::int64_t k = retrieval.most_selected(max_tokens);
  WorkspacePlan plan;
  plan.selected_rows = std::min(max_tokens, k * (per_head ? kv.group : 1));
  std::int64_t staged_rows = config.memory.staging_rows;
  if (staged_rows < 0) staged_rows = backend == Backend::kCuda ? plan.selected_rows : 0;
  if (!pages_on_host(config)) staged_rows = 0;

  scoring::SelectorLimits& limits = plan.selector;
  limits = {.num_queries = config.memory.max_batch_rows,
            .query_heads = kv.query_heads(),
            .kv_heads = kv.kv_heads,
            .max_tokens = max_tokens,
            .max_selected = max_tokens,
            .staged_rows = std::min(staged_rows, max_tokens),
            .row_bytes = kv.row_bytes()};
  const std::size_t share = config.memory.device_bytes / 2;
  while (limits.num_queries > 1 && scoring::Selector::workspace_bytes(backend, limits) > share)
    --limits.num_queries;
  while (limits.staged_rows > 0 && scoring::Selector::workspace_bytes(backend, limits) > share) {
    limits.staged_rows /= 2;  // rows beyond the staging area are read in place
  }
  plan.flash = {
      .num_queries = limits.num_queries, .query_heads = kv.query_heads(), .head_dim = kv.head_dim};
  plan.append_tokens = std::min(
      std::clamp(kAppendBytes / (kv.kv_heads * kv.row_bytes()), kMinAppendTokens, kMaxAppendTokens),
      max_tokens);
  plan.packed_bytes = static_cast<std::size_t>(plan.append_tokens * kv.kv_heads) *
                      (static_cast<std::size_t>(kv.row_bytes()) + sizeof(transfer::RowSquares));
  plan.query_bytes = sizeof(float) * static_cast<std::size_t>(limits.num_queries) *
                     static_cast<std::size_t>(kv.query_heads() * kv.head_dim);
  plan.bytes = scoring::Selector::workspace_bytes(backend, limits) +
               attention::FlashDecode::workspace_bytes(backend, plan.flash) + plan.packed_bytes +
               plan.query_bytes;
  if (plan.bytes <= config.memory.device_bytes) return plan;
  throw_error(ErrorCode::kResourceExhausted, "memory.device_bytes: expected at least ",
              show_mebibytes(plan.bytes + MiB - 1), " for the workspace of one query over ",
              max_tokens, " tokens (memory.max_session_tokens) and the sketches beside it, found ",
              show_mebibytes(config.memory.device_bytes));
}

bool places_rows(const Config& config, Backend backend, const WorkspacePlan& workspace) {
  return backend == Backend::kCuda && !config.memory.verify_rows &&
         workspace.selector.staged_rows <= kMostPlacedRows;
}

DevicePools plan_pools(const Config& config, Backend backend, const WorkspacePlan& workspace,
                       std::size_t fixed) {
  const transfer::KvGeometry kv = geometry_of(config);
  const std::size_t token_bytes = sketch_token_bytes(config);
  const std::size_t left = config.memory.device_bytes - std::min(config.memory.device_bytes, fixed);
  const auto whole_slabs = [](std::size_t tokens) {
    const auto count = static_cast<std::int64_t>(tokens);
    return count / hashing::kBlockTokens * hashing::kBlockTokens;
  };
  DevicePools pools;
  if (!pages_on_host(config)) {
    const auto page_token_bytes = static_cast<std::size_t>(kv.page_bytes() / kv.page_tokens);
    const std::size_t tokens = left / (token_bytes + page_token_bytes);
    pools.page_tokens = static_cast<std::int64_t>(tokens);
    pools.sketch_tokens = whole_slabs(tokens);
    return pools;
  }
  const auto page_bytes = static_cast<std::size_t>(kv.page_bytes());
  const std::size_t pages =
      config.memory.host_bytes / page_bytes + tier_room(config.memory, page_bytes).most;
  const std::int64_t host_tokens = static_cast<std::int64_t>(pages) * kv.page_tokens;
  const std::int64_t full = config.memory.max_session_tokens * config.model.layers;
  const std::int64_t sessions = std::max<std::int64_t>(1, (host_tokens + full / 2) / full);
  const std::int64_t most = 2 * host_tokens + kSpareTokens;
  const std::int64_t spare =
      std::max(kSpareTokens, kSpareSlabs * hashing::kBlockTokens * config.model.layers * sessions);
  pools.first_tokens = std::min(host_tokens + spare, most);
  const std::int64_t layers = sessions * num_sparse_layers(config);
  const bool cached = workspace.selector.staged_rows > 0 && config.memory.row_cache_rows != 0 &&
                      config.memory.row_cache_bytes.value_or(1) > 0;
  if (cached && config.memory.row_cache_bytes) {
    give_row_cache(config, workspace, *config.memory.row_cache_bytes, layers, pools);
  } else if (cached && layers > 0) {
    std::size_t beside = sizeof(transfer::RowCacheTotals);
    if (places_rows(config, backend, workspace)) {
      beside += transfer::row_cache_places_bytes(kv, workspace.selector.num_queries,
                                                 workspace.selector.staged_rows);
    }
    const std::size_t taken = static_cast<std::size_t>(pools.first_tokens) * token_bytes + beside;
    give_row_cache(config, workspace, left - std::min(left, taken), layers, pools);
    if (pools.row_cache_bytes > 0) pools.row_cache_budget = pools.row_cache_bytes + beside;
  }
  std::size_t rest = left - pools.row_cache_budget;
  if (pools.row_cache_rows > 0) {
    const std::size_t factors = factor_bytes(config, backend);
    if (static_cast<std::size_t>(pools.first_tokens) * token_bytes + factors <= rest) {
      pools.factor_bytes = factors;
      rest -= factors;
    }
  }
  pools.sketch_tokens = whole_slabs(std::min(rest / token_bytes, static_cast<std::size_t>(most)));
  return pools;
}

std::string show_mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string show_bytes(std::size_t bytes) {
  constexpr std::array kUnits{"bytes", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text.data();
}

}  // namespace kvtier::runtime
