#pragma once

#include "services/evaluation/dense_reference.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// Token selectors of the literature behind one interface, to compare kvtier's with. Each works on
/// one KV head at a time and chooses for one query head; none is fast, and nothing of the library
/// uses them.
namespace kvtier::quality {

using services::StepSpans;

/// Keys and values of one KV head, fp32 `[tokens, head_dim]`, decode steps included. Outlives the
/// selectors.
struct KvHead {
  const float* keys = nullptr;
  const float* values = nullptr;
  std::int64_t head_dim = 0;
  std::uint64_t seed = 0;

  [[nodiscard]] const float* key(std::int64_t token) const { return keys + token * head_dim; }
  [[nodiscard]] const float* value(std::int64_t token) const { return values + token * head_dim; }
};

/// One query of one query head.
struct Query {
  const float* values = nullptr;  ///< `[head_dim]`
  int head_in_group = 0;
  std::int64_t step = 0;
};

/// Tokens chosen among the eligible. A sampled token's logit is raised by the logarithm of how many
/// it stands for; without such weights all stand for themselves.
struct Choice {
  std::vector<std::int32_t> ids;  ///< By falling score, no token twice.
  std::vector<float> log_weights;
};

class Selector {
 public:
  virtual ~Selector() = default;

  /// Shows queries `[count, head_dim]` that are not evaluated, before `build`. Most ignore them.
  virtual void calibrate(std::span<const float> /*queries*/) {}
  /// Indexes tokens [0, tokens) of a KV head.
  virtual void build(const KvHead& head, std::int64_t tokens) = 0;
  /// Indexes one more token, the next.
  virtual void append(std::int64_t token) = 0;
  /// Forgets queries seen since `build`, for a selector that learns from them.
  virtual void restart() {}
  /// Chooses for each of several sizes, at most `sizes[i]` tokens each (Quest: at least a page).
  [[nodiscard]] virtual std::vector<Choice> select(const Query& query, const StepSpans& spans,
                                                   std::span<const std::int64_t> sizes) = 0;
  /// Returns the bits that the index keeps per token of one KV head, counted from its arrays;
  /// what does not grow with the tokens (centroids, planes) is left out.
  [[nodiscard]] virtual double bits_per_token() const = 0;
};

/// A selector that scores every eligible token and takes the best.
class ScoringSelector : public Selector {
 public:
  [[nodiscard]] std::vector<Choice> select(const Query& query, const StepSpans& spans,
                                           std::span<const std::int64_t> sizes) override;
  /// Writes a score per eligible token, from `spans.sink_end` on.
  virtual void score(const Query& query, const StepSpans& spans, std::span<float> scores) const = 0;
};

/// Returns the eligible tokens by falling score, the first `count` of them; ties by rising id.
[[nodiscard]] std::vector<std::int32_t> best_tokens(const StepSpans& spans,
                                                    std::span<const float> scores,
                                                    std::int64_t count);

[[nodiscard]] float dot(const float* a, const float* b, std::int64_t count);

/// sqrt(d) ln ||v||, on the scale of q.k.
[[nodiscard]] float value_score(const KvHead& head, std::int64_t token);

/// A selector as a comparison names it.
struct NamedSelector {
  std::string name;      ///< For example "quest".
  std::string settings;  ///< For example "pages of 16".
  std::string source;    ///< Whose idea it is.
  std::unique_ptr<Selector> selector;
};

/// Returns every selector of the comparison, ready for `build`. `capacity`: tokens that they will
/// hold. `variants`: after them those that show what a sketch of 128 planes loses, and where.
[[nodiscard]] std::vector<NamedSelector> make_selectors(std::int64_t capacity,
                                                        bool variants = false);

}  // namespace kvtier::quality
