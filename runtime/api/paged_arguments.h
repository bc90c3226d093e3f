#pragma once

#include "kvtier/paged.h"

#include <cstdint>

/// Checks of the arguments of `PagedSketches`. Each throws `kInvalidArgument` before anything has
/// changed, with expected and found.
namespace kvtier::runtime {

/// What the checks need to know of a `PagedSketches`.
struct PagedShape {
  const PagedConfig& config;
  Backend backend = Backend::kCpu;

  /// Checks the stream: the CPU has none.
  void check_stream(StreamRef stream) const;
  /// Checks keys, values and slots of a `store`; returns the tokens.
  [[nodiscard]] std::int64_t check_store(const TensorView& keys, const TensorView& values,
                                         const TensorView& slots) const;
  /// Checks tables and query; returns the sequences.
  [[nodiscard]] std::int64_t check_batch(const PagedBatch& batch, const TensorView& query) const;
  /// `bound`: most tokens that a query attends.
  void check_select(std::int64_t sequences, const PagedSelectOutputs& outputs,
                    std::int64_t bound) const;
  void check_attend(std::int64_t sequences, const PagedLayer& cache,
                    const PagedAttendOutputs& outputs) const;

  [[nodiscard]] std::int64_t max_length(const PagedBatch& batch) const {
    return batch.max_length > 0 ? batch.max_length : config.max_tokens;
  }
};

}  // namespace kvtier::runtime
