#pragma once

#include "hashing/planes.h"
#include "scoring/selector.h"
#include "support/backend_fixture.h"
#include "support/oracle.h"
#include "support/retrieval.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace kvtier::scoring {

/// Random unsigned bits, uniform and normal numbers from a seed, the same on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double normal();

 private:
  std::mt19937_64 engine_;
};

/// Bits, 0 or 1.
[[nodiscard]] std::vector<std::uint8_t> random_signs(std::uint64_t seed, int count);
[[nodiscard]] std::vector<float> random_queries(std::uint64_t seed, std::size_t count,
                                                double scale = 3.0);

/// Sketches of one sequence, made up rather than computed from keys, in `[kv_heads][length]`; norms
/// are fp16 values.
struct TokenSet {
  std::vector<std::vector<oracle::Sketch>> heads;
  std::int64_t length = 0;
};
/// Token t agrees with `signs` in a share of its bits that varies between tokens, so that scores
/// spread and hard collisions occur.
[[nodiscard]] TokenSet random_tokens(std::uint64_t seed, int kv_heads, std::int64_t length,
                                     const std::vector<std::uint8_t>& signs);

/// A token set in device memory, in the block layout of hashing/sketch.h.
struct DeviceTokens {
  transfer::Buffer blocks;
  transfer::Buffer table;
  transfer::Buffer counters;
};

inline constexpr std::int64_t kNoDense = std::numeric_limits<std::int64_t>::max();

/// One problem for the selector: sequences, queries and parameters.
struct Problem {
  const hashing::Planes* planes = nullptr;
  RetrievalConfig config = testing::top_k_of_signs();
  int kv_heads = 1;
  int group = 1;
  float softmax_scale = 0.1F;
  std::vector<const TokenSet*> sequences{};
  std::vector<transfer::QueryToken> query_tokens{};
  std::vector<float> queries{};  ///< `[queries, query_heads, head_dim]`
  LayerMode mode = LayerMode::kSparse;
  std::int64_t longest = 0;  ///< The bound of lengths that the selector is told, if above them.
  /// Tokens of a block of a paged cache by whose slots sketches are addressed; 0: they are not.
  int slot_block = 0;

  /// Asks for the last token of each sequence.
  void query_each(std::uint64_t seed);
  /// Makes queries for `query_tokens`.
  void make_queries(std::uint64_t seed);

  [[nodiscard]] int query_heads() const { return kv_heads * group; }
  [[nodiscard]] int num_sets() const {
    return ModelConfig{.query_heads = query_heads(), .kv_heads = kv_heads}.num_sets(
        config.selection);
  }
  [[nodiscard]] oracle::ScoreSpec spec() const;
  [[nodiscard]] oracle::VisibleRule rule(int query_index) const;
  [[nodiscard]] oracle::Visible visible(int query_index) const;
  [[nodiscard]] std::int64_t k(int query_index) const;
};

/// What the selector returned, on the host.
struct Selected {
  int heads = 0;
  std::int64_t n = 0;
  std::vector<std::int32_t> ids;                 ///< `[rows, heads, n]`
  std::vector<std::int32_t> ids_without_scores;  ///< Of a call that kept no scores.
  std::vector<float> scores;
  std::vector<std::int32_t> counts;  ///< `[queries, kv_heads]`
  std::vector<std::int32_t> union_ids;
  std::vector<std::uint16_t> masks;
  std::int64_t capacity = 0;
  std::uint64_t tokens_scored = 0;

  /// Ids of one (query, head), without the padding.
  [[nodiscard]] std::vector<std::int64_t> of(int query_index, int head) const {
    return of(query_index, head, ids);
  }
  [[nodiscard]] std::vector<std::int64_t> of(int query_index, int head,
                                             const std::vector<std::int32_t>& all) const;
};

/// Scores of the eligible tokens by the oracle, of the set of a query head, KV head or sequence.
[[nodiscard]] oracle::HeadScores expected_scores(const Problem& problem, int query_index, int head);

class SelectorTest : public testing::BackendTest {
 protected:
  std::unique_ptr<hashing::Planes> make_planes(PlaneKind kind, int num_planes, int head_dim);
  DeviceTokens place(const TokenSet& tokens, const hashing::SketchGeometry& geometry);
  /// Places the tokens of all sequences in one cache, block by block in a mixed order.
  void place_in_slots(const Problem& problem, SelectRequest& request);
  /// A request over uploaded sequences; keeps what it refers to alive in the fixture.
  SelectRequest make_request(const Problem& problem);
  SelectorLimits make_limits(const Problem& problem, std::int64_t max_selected);
  /// Selects, exports ids and scores, downloads everything.
  Selected run(const Problem& problem);
  Selected download_selection(const Problem& problem, const SelectRequest& request,
                              Selector& selector, const transfer::SelectionView& view, int heads,
                              std::int64_t n, bool with_scores);
  /// Compares ids and exported scores with the oracle.
  void expect_oracle(const Problem& problem, const Selected& found);

 private:
  std::vector<transfer::Buffer> kept_;
};

}  // namespace kvtier::scoring
