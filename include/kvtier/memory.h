#pragma once

#include "kvtier/config.h"
#include "kvtier/export.h"

#include <cstddef>
#include <cstdint>
#include <string>

/// What engines and sessions take, by the formulas of docs/memory.md: those by which an engine
/// sizes its pools, without an engine. All in bytes.
namespace kvtier {

/// What one session takes when it has all its tokens, in all layers.
struct SessionMemory {
  std::int64_t tokens = 0;
  /// Of the host page pool, or of a tier below it; with `KvPlacement::kDevice` of `device_bytes`.
  std::size_t pages = 0;
  std::size_t sketches = 0;   ///< On the device, of `device_bytes`.
  std::size_t tables = 0;     ///< On the device, beside `device_bytes`.
  std::size_t row_cache = 0;  ///< On the device, of the row cache, as far as that has it.

  bool operator==(const SessionMemory&) const = default;
};

/// What an engine takes on the device when it is made.
struct EngineMemory {
  std::size_t workspace = 0;  ///< Of one call: scores, queries, staging, attention's parts.
  std::size_t sketches = 0;   ///< The pool of sketch slabs.
  std::size_t pages = 0;      ///< The page pool, with `KvPlacement::kDevice`.
  std::size_t row_cache = 0;  ///< 0: none.
  int row_cache_rows = 0;     ///< Rows per KV head of a session's layer.
  /// Copies of the factors of int8 rows in the page pool, on CUDA; 0 where they are read there.
  std::size_t row_factors = 0;
};

/// Returns what a session of `tokens` tokens takes in an engine of `config` whose row cache has
/// `row_cache_rows` rows per KV head of a layer; no budget of `config` matters. Throws
/// `kInvalidArgument` with all problems of a configuration that is not valid, and for a number of
/// tokens that is not in 1..`max_session_tokens`.
///
/// ```cpp
/// kvtier::Config config;
/// config.model = {.layers = 32, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
/// const kvtier::SessionMemory memory = kvtier::session_memory(config, 131072);
/// std::puts(kvtier::describe(memory, config.memory.placement).c_str());
/// ```
[[nodiscard]] KVTIER_EXPORT SessionMemory session_memory(const Config& config, std::int64_t tokens,
                                                         int row_cache_rows = 0);

/// Returns what an engine of `config` takes on `backend`, `kCpu` or `kCuda`. Throws
/// `kInvalidArgument` for a configuration that is not valid and `Backend::kAuto`, `kUnimplemented`
/// for `kCuda` in a build without it, `kResourceExhausted` for budgets without room for a workspace
/// or, in `row_cache_bytes`, for one layer.
[[nodiscard]] KVTIER_EXPORT EngineMemory engine_memory(const Config& config, Backend backend);

/// Returns the least `device_bytes` with which an engine of `config` has its workspace, the
/// sketches of `sessions` sessions of `tokens` tokens (and their pages, with
/// `KvPlacement::kDevice`), and as much row cache as they can use. Throws what `session_memory`
/// throws, and `kUnimplemented` as `engine_memory`.
[[nodiscard]] KVTIER_EXPORT std::size_t device_bytes_for(const Config& config, Backend backend,
                                                         std::int64_t tokens, int sessions);

/// Returns the tiers of a session in words: "128.0 GiB of pages in host memory, 9.0 GiB ...".
[[nodiscard]] KVTIER_EXPORT std::string describe(const SessionMemory& memory,
                                                 KvPlacement placement);

}  // namespace kvtier
