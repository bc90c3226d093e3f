#pragma once

#include "benchmarks/benchmarks.h"
#include "benchmarks/decoder_cuda.h"
#include "benchmarks/harness_cuda.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/// What the rows of `bench_model` share: their names, and the times of a token.
namespace kvtier::bench {

inline constexpr int kWarmupTokens = 24;  // until the row cache has what the queries ask for

/// Sequences and their context.
struct CaseOfModel {
  std::int64_t tokens = 0;
  int batch = 1;
};

/// Whether a layer attends to the last `window` tokens alone.
[[nodiscard]] inline bool slides(const ModelCase& shape, int layer) {
  return shape.window > 0 && layer % 2 == 0;
}

/// The GPU's memory now.
struct GpuMemory {
  std::size_t free = 0, total = 0;
  GpuMemory();
  [[nodiscard]] std::size_t used() const { return total - free; }
};

/// A token's graph, replayed back to back, so that no launch is waited for.
class TokenGraph {
 public:
  /// `load(i)` is enqueued before replay i, and is no part of its time.
  TokenGraph(Run& run, const std::function<void()>& token, std::function<void(int)> load = {});

  /// Returns the microseconds of each of the replays [first, first + count).
  [[nodiscard]] std::vector<double> replay(int first, int count) const;
  void launch() const { graph_.launch(run_.stream()); }

 private:
  Run& run_;
  Graph graph_;
  std::function<void(int)> load_;
};

/// Sets the times of a row from those of its tokens.
void summarize(std::vector<double> us, ModelTime& time);

/// What a row says of its case.
[[nodiscard]] json model_parameters(const ModelCase& shape, const CaseOfModel& at,
                                    const std::string& attention);
/// Adds a row of times, with what else was measured.
void add_model_row(Run& run, const ModelCase& shape, const std::string& attention,
                   const ModelTime& time, const json& measured);

/// The row of dense attention, by the fastest of cuDNN's plans. Throws `kResourceExhausted` where
/// the caches do not fit on the GPU.
[[nodiscard]] ModelTime bench_dense_model(Run& run, const ModelCase& shape,
                                          const RandomDecoder& model, const CaseOfModel& at);

}  // namespace kvtier::bench
