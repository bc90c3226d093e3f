#pragma once

namespace kvtier {

/// How much of the attention a call is to keep, instead of how many tokens: each selection takes
/// the fewest tokens whose estimated share of the attention, with that of the tokens that are
/// always attended, reaches `recall`, or more where they are fewer than half of the eligible ones
/// and of the most. The estimate is of the norm-aware scores (docs/algorithm.md, section 3).
///
/// ```cpp
/// kvtier::AttendOptions options;
/// options.recall_target = kvtier::RecallTarget{.recall = 0.95};
/// session.attend(0, {.query = query}, {.out = out}, {}, options);
/// ```
struct RecallTarget {
  /// Share of the attention of the visible tokens, above 0 and below 1; the mean over the query
  /// heads that share a selection.
  double recall = 0.99;
  /// Fewest tokens selected; the most is what `RetrievalConfig` says (`top_k` or `sparsity`), and
  /// `kDefaultTopK` where it says nothing. The default is a quarter of that: where few tokens seem
  /// to have all that is wanted, the next ones still bring answers nearer to those of dense
  /// attention (docs/quality.md).
  int min_top_k = 512;
  /// Share of the variance of the scores' noise that the estimate takes out: 0 trusts the scores, 1
  /// suits logits that are normally distributed. The default is calibrated on needle-llama
  /// (docs/quality.md).
  float noise_share = 0.5F;
};

}  // namespace kvtier
