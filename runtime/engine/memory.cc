#include "kvtier/memory.h"

#include "kvtier/error.h"

#include "hashing/sketch.h"
#include "include/types/failure.h"
#include "runtime/engine/memory_plan.h"
#include "runtime/sequence/sequence_memory.h"
#include "transfer/device/device.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtier {
namespace {

void check_backend(Backend backend) {
  if (backend == Backend::kCpu || (backend == Backend::kCuda && transfer::has_cuda_half())) return;
  if (backend == Backend::kCuda) {
    throw Error(ErrorCode::kUnimplemented,
                "backend: expected cpu in a build without CUDA, found cuda");
  }
  throw_invalid("backend", "cpu or cuda", "auto");
}

void check_tokens(const Config& config, std::int64_t tokens) {
  if (tokens >= 1 && tokens <= config.memory.max_session_tokens) return;
  throw_invalid("tokens",
                join("1..", config.memory.max_session_tokens, " (memory.max_session_tokens)"),
                tokens);
}

std::size_t bytes_of(std::int64_t tokens, std::size_t each) {
  return static_cast<std::size_t>(tokens) * each;
}

/// Tokens of the slabs that hold `tokens` tokens in all layers.
std::int64_t slab_tokens(const Config& config, std::int64_t tokens) {
  return config.model.layers * runtime::ceil_div(tokens, hashing::kBlockTokens) *
         hashing::kBlockTokens;
}

}  // namespace

SessionMemory session_memory(const Config& config, std::int64_t tokens, int row_cache_rows) {
  (void)validated(config);
  check_tokens(config, tokens);
  const transfer::KvGeometry kv = runtime::geometry_of(config);
  const auto layers = static_cast<std::size_t>(config.model.layers);
  const std::size_t num_sketches = runtime::carried_sketches(config).size();
  SessionMemory memory{.tokens = tokens};
  memory.pages = layers * bytes_of(runtime::ceil_div(tokens, kv.page_tokens),
                                   static_cast<std::size_t>(kv.page_bytes()));
  memory.sketches = bytes_of(slab_tokens(config, tokens), runtime::sketch_token_bytes(config));
  memory.tables = layers * runtime::LayerBytes(kv, num_sketches, tokens).total;
  if (row_cache_rows > 0) {
    memory.row_cache =
        bytes_of(runtime::num_sparse_layers(config),
                 transfer::row_cache_bytes(kv, transfer::row_cache_sets(row_cache_rows)));
  }
  return memory;
}

EngineMemory engine_memory(const Config& config, Backend backend) {
  (void)validated(config);
  check_backend(backend);
  const transfer::KvGeometry kv = runtime::geometry_of(config);
  const runtime::WorkspacePlan workspace = runtime::plan_workspace(config, backend);
  const std::size_t checks = runtime::frame_check_bytes(config, backend);
  const bool keeps_checks = checks <= (config.memory.device_bytes - workspace.bytes) / 2;
  const runtime::DevicePools pools = runtime::plan_pools(
      config, backend, workspace, workspace.bytes + (keeps_checks ? checks : 0));
  return {.workspace = workspace.bytes,
          .sketches = bytes_of(pools.sketch_tokens, runtime::sketch_token_bytes(config)),
          .pages = bytes_of(pools.page_tokens / kv.page_tokens,
                            static_cast<std::size_t>(kv.page_bytes())),
          .row_cache = pools.row_cache_bytes,
          .row_cache_rows = pools.row_cache_rows,
          .row_factors = pools.factor_bytes};
}

std::size_t device_bytes_for(const Config& given, Backend backend, std::int64_t tokens,
                             int sessions) {
  Config config = validated(given);
  check_backend(backend);
  check_tokens(config, tokens);
  if (sessions < 1) throw_invalid("sessions", "at least 1", sessions);
  config.memory.device_bytes = SIZE_MAX / 2;
  const transfer::KvGeometry kv = runtime::geometry_of(config);
  const runtime::WorkspacePlan workspace = runtime::plan_workspace(config, backend);
  const runtime::DevicePools pools =
      runtime::plan_pools(config, backend, workspace, workspace.bytes);
  std::size_t token_bytes = runtime::sketch_token_bytes(config);
  if (config.memory.placement == KvPlacement::kDevice) {
    token_bytes += static_cast<std::size_t>(kv.page_bytes() / kv.page_tokens);
  }
  const std::int64_t kept = std::max(pools.first_tokens, sessions * slab_tokens(config, tokens));
  const std::size_t checks = runtime::frame_check_bytes(config, backend);
  const std::size_t bytes = workspace.bytes + checks + bytes_of(kept, token_bytes) +
                            pools.row_cache_budget + pools.factor_bytes;
  // The workspace takes at most half, and checks are kept where they take at most half of the rest.
  return std::max({bytes, 2 * scoring::Selector::workspace_bytes(backend, workspace.selector),
                   workspace.bytes + 2 * checks});
}

std::string describe(const SessionMemory& memory, KvPlacement placement) {
  using runtime::show_bytes;
  const bool host = placement == KvPlacement::kHost;
  std::string text = show_bytes(memory.pages) + " of pages in " + (host ? "host" : "device") +
                     " memory, " + show_bytes(memory.sketches) + " of sketches";
  text += memory.row_cache > 0 ? ", " + show_bytes(memory.tables) + " of tables and " +
                                     show_bytes(memory.row_cache) + " of row cache"
                               : " and " + show_bytes(memory.tables) + " of tables";
  return text + " on the device";
}

}  // namespace kvtier
