#pragma once

#include "services/evaluation/synthetic.h"
#include "services/tools/stress/options.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace kvtier::services {

/// What a run takes, in bytes; and how that came about, one line each.
struct MemoryNeed {
  std::size_t pages = 0;      ///< KV rows, in host memory.
  std::size_t sketches = 0;   ///< On the device.
  std::size_t workspace = 0;  ///< On the device.
  std::size_t tables = 0;     ///< On the device: page tables, sinks and recent tokens of sessions.
  std::size_t row_cache = 0;  ///< On the device: cached rows.
  /// On the device: factors of int8 rows, and the spare sketches without which there are none.
  std::size_t row_factors = 0;
  std::size_t dense = 0;   ///< On the device: one layer's KV again, for the dense comparison.
  std::size_t source = 0;  ///< In host memory: the data under way.
  Backend backend = Backend::kCpu;  ///< That it was computed for.

  [[nodiscard]] std::size_t host() const { return pages + source; }
  [[nodiscard]] std::size_t device() const {
    return sketches + workspace + tables + row_cache + row_factors + dense;
  }
};

/// Returns the shape of the data of a run.
[[nodiscard]] SyntheticShape synthetic_shape(const StressOptions& options);

/// Tokens that a session must hold: the context, and one per decode step.
[[nodiscard]] std::int64_t session_tokens(const StressOptions& options);

/// Returns the engine's configuration for a run, with memory for exactly what it needs, or the
/// device budget where one is given. `options` are resolved.
[[nodiscard]] Config engine_config(const StressOptions& options, const MemoryNeed& need);

/// Returns the configuration of the engine of the dense comparison: one layer, KV on the device.
[[nodiscard]] Config dense_config(const StressOptions& options, const MemoryNeed& need);

/// Computes what the tokens of a run take alone: pages, sketches and tables.
[[nodiscard]] MemoryNeed stored_need(const StressOptions& options);

/// Returns the row cache of the sequences of a run at its largest by the rule of docs/memory.md.
[[nodiscard]] std::size_t most_row_cache(const StressOptions& options);

/// Computes the need of a run by `kvtier/memory.h`, for the backend in use: a small engine is
/// started where that is automatic.
[[nodiscard]] MemoryNeed memory_need(const StressOptions& options);

/// Memory that is there; nothing where it is not known.
struct MemoryAvailable {
  std::optional<std::size_t> host;
  std::optional<std::size_t> device;
};

/// Throws `kResourceExhausted` with the arithmetic when a run does not fit the budgets or the
/// machine.
void check_memory(const StressOptions& options, const MemoryNeed& need,
                  const MemoryAvailable& available);

/// Returns the arithmetic of a run, one line per tier.
[[nodiscard]] std::string show_memory(const StressOptions& options, const MemoryNeed& need);

}  // namespace kvtier::services
