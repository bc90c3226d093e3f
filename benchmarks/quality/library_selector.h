#pragma once

#include "kvtier/engine.h"

#include "benchmarks/quality/selector.h"

#include <cstdint>
#include <optional>

namespace kvtier::quality {

/// kvtier's own scores, through `Session::select` of an engine of one head, on the CPU.
class LibrarySelector final : public ScoringSelector {
 public:
  /// `retrieval` names estimator, planes and weights; what is eligible comes with each call.
  /// `capacity`: tokens, decode steps included.
  LibrarySelector(const RetrievalConfig& retrieval, std::int64_t capacity);
  void build(const KvHead& head, std::int64_t tokens) override;
  void append(std::int64_t token) override;
  void score(const Query& query, const StepSpans& spans, std::span<float> scores) const override;
  /// Sketch bytes that scoring has read per token scored; 0 before.
  [[nodiscard]] double bits_per_token() const override;

 private:
  void append(std::int64_t first, std::int64_t count);

  RetrievalConfig retrieval_;
  std::int64_t capacity_;
  KvHead head_;
  std::optional<Engine> engine_;
  mutable std::optional<Session> session_;
  mutable double tokens_scored_ = 0.0;
};

}  // namespace kvtier::quality
