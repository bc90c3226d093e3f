#pragma once

#include "kvtier/engine.h"

#include "runtime/engine/engine_state.h"
#include "scoring/estimator.h"
#include "scoring/recall_params.h"
#include "transfer/kv/sequence.h"

#include <cstdint>

namespace kvtier::runtime {

/// `Config` and `AttendOptions` merged for one layer.
struct ResolvedOptions {
  transfer::SpanRule rule;
  scoring::ScoreParams params;
  scoring::RecallParams recall_params;
  float softmax_scale = 0.0F;
  float logit_softcap = 0.0F;
  std::int64_t dense_from = 0;
  std::int64_t tokens_after = 0;
  /// Whether a sparse layer may attend to all tokens (`Config::dense_when_faster`).
  bool may_be_dense = false;

  /// True when rows of both calls may share launches; `dense_from` and
  /// `tokens_after` are per row.
  [[nodiscard]] bool same_launch(const ResolvedOptions& other) const;
};
[[nodiscard]] ResolvedOptions resolve_options(const EngineState& engine, int layer,
                                              const AttendOptions& options);

}  // namespace kvtier::runtime
