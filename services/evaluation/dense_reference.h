#pragma once

#include "services/evaluation/trace.h"

#include <cstdint>
#include <span>
#include <vector>

namespace kvtier::services {

/// The tokens that one decode step sees, and which of them it attends whatever their score
/// (docs/algorithm.md, section 3): [0, sink_end), then [eligible_end, visible).
struct StepSpans {
  std::int64_t visible = 0;
  std::int64_t sink_end = 0;
  std::int64_t eligible_end = 0;

  [[nodiscard]] std::int64_t num_eligible() const { return eligible_end - sink_end; }
  [[nodiscard]] bool eligible(std::int64_t token) const {
    return token >= sink_end && token < eligible_end;
  }
};

/// Returns the spans of a step that sees `visible` tokens. Nothing is eligible, and everything is
/// attended, when sink and window cover it all.
[[nodiscard]] StepSpans step_spans(std::int64_t visible, std::int64_t sink, std::int64_t window);

/// Dense attention of one query head at one step, in double.
struct HeadReference {
  std::vector<double> weights;      ///< `[visible]` softmax weights; their sum is 1.
  std::vector<double> output;       ///< `[head_dim]`
  std::vector<std::int32_t> order;  ///< Eligible tokens by falling q.k, ties by rising id.
  std::vector<std::int32_t> rank;   ///< `[visible]` position in `order`, -1 when not eligible.
};

/// Dense attention of one layer of a trace, computed step by step from the recorded tensors with
/// nothing of kvtier's kernels: what a replay is judged against.
class DenseReference {
 public:
  DenseReference(const Trace& trace, const TraceLayer& layer);

  /// Computes `[query_heads]` references of one step on `threads` threads.
  [[nodiscard]] std::vector<HeadReference> step(std::int64_t step, const StepSpans& spans,
                                                int threads) const;

  /// Returns the recorded attention output of (query head, step), `[head_dim]`.
  [[nodiscard]] std::span<const float> recorded(std::int64_t head, std::int64_t step) const;

 private:
  void compute(std::int64_t head, std::int64_t step, const StepSpans& spans,
               HeadReference& reference) const;

  std::int64_t head_dim_;
  std::int64_t tokens_;
  std::int64_t steps_;
  std::int64_t query_heads_;
  std::int64_t group_;
  std::vector<float> keys_;
  std::vector<float> values_;
  std::vector<float> queries_;
  std::vector<float> attention_;
};

/// Returns the eligible tokens of a step in the order in which the exact selector of a KV head
/// takes them: by the mean over its query heads of the softmax weight among the eligible.
[[nodiscard]] std::vector<std::int32_t> shared_order(std::span<const HeadReference> group,
                                                     const StepSpans& spans);

}  // namespace kvtier::services
