#pragma once

#include "scoring/recall_params.h"
#include "scoring/selector.h"
#include "transfer/kv/sequence.h"

#include <cstdint>
#include <vector>

/// Selections for a recall target on the CPU backend.
namespace kvtier::scoring::cpu {

/// A query head of the group of a KV head.
struct HeadIndex {
  int query_index = 0;
  int kv_head = 0;
  int head = 0;  ///< Of the group.
};

/// Returns ln of the sum over the always-attended tokens of e^logit, exact, each times its value
/// norm unless the weighting is `kNone`; -infinity for none.
[[nodiscard]] double log_of_static(const SelectRequest& request, const HeadIndex& at,
                                   const transfer::AttendedSpans& spans, ValueWeighting weighting);

/// The norm-aware scores of one (query, KV head). Refers to the request and the recall
/// parameters.
struct RecallGroup {
  const SelectRequest& request;
  const RecallParams& recall_params;
  const QueryScalars* scalars = nullptr;  ///< `[group]`
  int query_index = 0;
  int kv_head = 0;
  transfer::AttendedSpans spans;
  const float* scores = nullptr;  ///< Of the eligible tokens, head h at `h * head_stride`.
  std::int64_t head_stride = 0;
};

/// The attention of every eligible token as estimated from its score, and exactly that of the
/// tokens which are always attended.
class EstimatedMass {
 public:
  explicit EstimatedMass(const RecallGroup& group);

  /// Returns the fewest of the tokens best by `order` (a score per eligible token) that leave out
  /// no more than the wanted share, the mean over `heads` query heads from `first_head`; at least
  /// the fewest tokens wanted and at most `most`. Without a share: `most`.
  [[nodiscard]] std::int64_t num_to_keep(const float* order, int first_head, int heads,
                                         std::int64_t most) const;

  /// Returns ln of the sum of e^logit over the eligible tokens that are not among those `count`
  /// ascending ids which `head` attends; -infinity for none.
  [[nodiscard]] float log_of_rest(int head, const std::int32_t* ids, const std::uint16_t* masks,
                                  std::int64_t count) const;

 private:
  struct Head {
    std::vector<float> weights;  ///< e^(logit - max) of each eligible token.
    double max = 0.0;
    double log_total = 0.0;  ///< Of all visible tokens.
  };
  void estimate(const RecallGroup& group, int head);

  const RecallParams& recall_params_;
  std::int64_t first_token_;
  std::int64_t num_eligible_;
  std::vector<Head> heads_;
};

/// Writes rest / (rest + e^lse) of each query head, with rest_logs `[queries][query_heads]`.
void export_missed(const MissedBatch& batch, int query_heads, const float* rest_logs);

}  // namespace kvtier::scoring::cpu
