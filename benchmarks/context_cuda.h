#pragma once

#include "kvtier/engine.h"

#include "benchmarks/harness_cuda.h"
#include "services/evaluation/synthetic.h"
#include "services/tools/stress/needles.h"
#include "transfer/device/device.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace kvtier::bench {

struct ContextShape {
  int layers = 1;
  int batch = 1;  ///< Sequences.
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  std::int64_t tokens = 0;  ///< Of each sequence.
};

/// The contexts of a batch, and the queries of its steps: keys, values and queries of `kvtier
/// stress` (docs/stress.md), whose best tokens overlap from step to step as those of a trained
/// model; or, without a drift, normal keys and values and no queries. The layers of a sequence have
/// the same keys and values, and queries of their own.
class Context {
 public:
  Context(Run& run, const ContextShape& shape, std::optional<services::DriftModel> drift);
  Context(const Context&) = delete;  // copies may be under way from its memory
  Context& operator=(const Context&) = delete;

  /// Appends the context to every layer of one sequence. It is there when this returns.
  void fill(Session& session, int sequence);
  /// Makes the queries of the next `steps` steps. Nothing without a drift.
  void make_queries(int steps);
  /// Enqueues the copy of those of step `step`, counted from the last `make_queries`, to where
  /// `queries` finds them.
  void load_queries(int step);
  /// Returns the queries of a layer, bf16 `[batch, query_heads, head_dim]` in device memory;
  /// nullptr without a drift.
  [[nodiscard]] const __nv_bfloat16* queries(int layer) const;

  /// Returns the model and the overlaps reached, for a row; null without a drift.
  [[nodiscard]] json describe() const;

 private:
  [[nodiscard]] std::int64_t query_values() const {
    return std::int64_t{shape_.query_heads} * shape_.head_dim;
  }

  Run& run_;
  ContextShape shape_;
  std::optional<services::DriftModel> drift_;
  services::DriftFit calibration_;
  std::vector<services::LayerSource> sources_;    ///< Of each sequence.
  std::vector<services::QuerySource> queries_;    ///< `[layers, batch]`
  transfer::Buffer host_queries_;                 ///< Pinned, `[steps, layers, batch]`
  std::unique_ptr<DeviceTensor> device_queries_;  ///< `[layers, batch]`
};

}  // namespace kvtier::bench
