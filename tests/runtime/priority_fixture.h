#pragma once

#include "runtime/engine_fixture.h"
#include "support/priority_oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace kvtier::testing {

/// What `Session::select` returns, of `[tokens, heads, n]`.
struct Picked {
  Picked(std::int64_t tokens, int heads, std::int64_t n)
      : ids(tokens, heads, n), scores(ids.data.size(), -7.0F), biases(ids.data.size(), -7.0F) {}

  [[nodiscard]] SelectOutputs outputs(bool with_biases = true) {
    SelectOutputs result{.ids = ids.view(), .scores = floats(scores), .bias = {}};
    if (with_biases) result.bias = floats(biases);
    return result;
  }
  [[nodiscard]] TensorView ids_view() const {
    return {ids.data.data(), DType::kInt32, {ids.tokens, ids.heads, ids.n}};
  }
  [[nodiscard]] TensorView bias_view() const {
    return {biases.data(), DType::kFloat32, {ids.tokens, ids.heads, ids.n}};
  }
  /// The first entry of a head.
  [[nodiscard]] std::size_t at(std::int64_t token, int head) const {
    return static_cast<std::size_t>((token * ids.heads + head) * ids.n);
  }
  friend bool operator==(const Picked& a, const Picked& b) {
    return a.ids.data == b.ids.data && a.scores == b.scores && a.biases == b.biases;
  }

  HostIds ids;
  std::vector<float> scores, biases;

 private:
  [[nodiscard]] MutableTensorView floats(std::vector<float>& values) const {
    return {values.data(), DType::kFloat32, {ids.tokens, ids.heads, ids.n}};
  }
};

/// The estimators that priority selection takes.
inline std::vector<RetrievalConfig> priority_estimators() {
  RetrievalConfig base = top_k_of_signs();
  base.rule = SelectionRule::kPriority;
  base.sink_tokens = 12;
  base.recent_tokens = 20;
  base.top_k = 40;
  RetrievalConfig sign = base;
  sign.estimator = Estimator::kNormAware;
  sign.num_planes = 128;
  RetrievalConfig scalar = sign;
  scalar.code = SketchCode::kScalar;
  RetrievalConfig calibrated = base;
  calibrated.value_weighting = ValueWeighting::kCalibrated;
  calibrated.planes_per_table = 6;
  calibrated.tables = 20;
  return {sign, scalar, calibrated};
}

/// The scalar code read in two phases.
inline RetrievalConfig two_phases() {
  RetrievalConfig retrieval = priority_estimators()[1];
  retrieval.coarse_bits = 1;
  retrieval.candidates = 3;
  return retrieval;
}

/// All that priority selection has.
inline std::vector<RetrievalConfig> priority_methods() {
  std::vector<RetrievalConfig> methods = priority_estimators();
  methods.push_back(two_phases());
  return methods;
}

/// The sets that a method can have: two phases have none for a sequence.
inline std::vector<Selection> kinds_of_sets(const RetrievalConfig& retrieval) {
  std::vector<Selection> kinds = {Selection::kPerKvHead, Selection::kPerQueryHead};
  if (retrieval.coarse_bits == 0) kinds.push_back(Selection::kPerSequence);
  return kinds;
}

inline std::string name_of(const RetrievalConfig& retrieval) {
  const std::string code = retrieval.coarse_bits > 0                      ? "two phases"
                           : retrieval.estimator != Estimator::kNormAware ? "calibrated"
                           : retrieval.code == SketchCode::kScalar        ? "scalar"
                                                                          : "sign";
  return code + (retrieval.selection == Selection::kPerSequence ? ", per sequence"
                 : retrieval.selection == Selection::kPerKvHead ? ", per KV head"
                                                                : ", per query head");
}

/// A session of one engine, and what the oracle has to know of it.
class PriorityTest : public EngineTest {
 protected:
  [[nodiscard]] Config config_of(const RetrievalConfig& retrieval, int group,
                                 int kv_heads = 2) const {
    Config config = this->config();
    config.retrieval = retrieval;
    config.model.kv_heads = kv_heads;
    config.model.query_heads = kv_heads * group;
    return config;
  }
  /// Queries with logits of standard deviation 2.
  static HostTensor queries(const ModelConfig& model, std::int64_t tokens, std::uint64_t seed) {
    return HostTensor::random(tokens, model.query_heads, model.head_dim, DType::kFloat32, seed,
                              2.0F);
  }
  static Picked pick(Session& session, const ModelConfig& model, const HostTensor& query,
                     const RetrievalConfig& retrieval, int layer = 0, AttendOptions options = {}) {
    Picked picked(query.tokens(), model.num_sets(retrieval.selection), session.length(layer));
    options.retrieval = &retrieval;
    session.select(layer, query.view(), picked.outputs(retrieval.rule == SelectionRule::kPriority),
                   {}, options);
    return picked;
  }

  static oracle::Visible visible(const RetrievalConfig& retrieval, std::int64_t length,
                                 std::int64_t lag) {
    return oracle::visible_tokens(
        {.sink = retrieval.sink_tokens, .recent = retrieval.recent_tokens}, length, lag);
  }
  /// Scores of each query head for all eligible tokens, `[query_heads][eligible]`, of one query.
  static std::vector<std::vector<double>> all_scores(Session& session, const ModelConfig& model,
                                                     const HostTensor& query, std::int64_t token,
                                                     RetrievalConfig retrieval, int layer) {
    retrieval.rule = SelectionRule::kTopK;
    retrieval.selection = Selection::kPerQueryHead;
    retrieval.top_k = 1 << 20;
    retrieval.sparsity = retrieval.error_target = 0.0;
    const Picked all = pick(session, model, query, retrieval, layer);
    std::vector<std::vector<double>> scores(static_cast<std::size_t>(model.query_heads));
    for (int head = 0; head < model.query_heads; ++head) {
      const std::size_t count = all.ids.ids(token, head).size();
      for (std::size_t i = 0; i < count; ++i) {
        scores[static_cast<std::size_t>(head)].push_back(
            static_cast<double>(all.scores[all.at(token, head) + i]));
      }
    }
    return scores;
  }

  /// Keys and values as stored, `[kv_heads][length][head_dim]`.
  struct Stored {
    std::vector<float> keys, values;
    std::int64_t length = 0;
    int head_dim = 0;

    [[nodiscard]] oracle::KvView of(int kv_head) const {
      const std::int64_t offset = kv_head * length * head_dim;
      return {keys.data() + offset, values.data() + offset, head_dim, head_dim};
    }
  };
  static Stored fetch_all(Session& session, const ModelConfig& model, int layer) {
    Stored stored{
        .keys = {}, .values = {}, .length = session.length(layer), .head_dim = model.head_dim};
    const std::int64_t n = stored.length;
    std::vector<std::int32_t> ids;
    for (int head = 0; head < model.kv_heads; ++head) {
      for (std::int64_t t = 0; t < n; ++t) ids.push_back(static_cast<std::int32_t>(t));
    }
    HostTensor keys(model.kv_heads, static_cast<int>(n), model.head_dim, model.kv_dtype);
    HostTensor values = keys;
    session.fetch(layer, {ids.data(), DType::kInt32, {model.kv_heads, n}},
                  {keys.mutable_view(), values.mutable_view()});
    for (std::size_t i = 0; i < keys.values().size(); ++i) {
      stored.keys.push_back(keys.get(i));
      stored.values.push_back(values.get(i));
    }
    return stored;
  }

  /// Shares and selection of a set by the oracle, from scores.
  struct Expected {
    std::vector<double> log_shares;
    oracle::PrioritySelection selection;
  };
  /// ln of the attention of the always-attended tokens, each times its value norm.
  static double log_of_static(const Stored& stored, const std::vector<float>& query, int kv_head,
                              const std::vector<std::int64_t>& static_tokens) {
    const oracle::KvView kv = stored.of(kv_head);
    double sum = -INFINITY;
    for (const std::int64_t t : static_tokens) {
      const double scale = 1.0 / std::sqrt(static_cast<double>(stored.head_dim));
      const oracle::Attention one = oracle::attend(query, kv, {&t, 1}, scale);
      double square = 0.0;
      for (const double v : one.out) square += v * v;
      sum = oracle::log_add(sum, one.lse + 0.5 * std::log(square));
    }
    return sum;
  }
  static Expected expected_of(Session& session, const ModelConfig& model, const HostTensor& query,
                              std::int64_t token, const RetrievalConfig& retrieval, int layer,
                              int set, std::int64_t k) {
    const auto scores = all_scores(session, model, query, token, retrieval, layer);
    const std::int64_t lag = query.tokens() - 1 - token;
    const oracle::Visible tokens = visible(retrieval, session.length(layer), lag);
    const int group = model.query_heads / model.kv_heads;
    const double target = retrieval.error_target * retrieval.error_target;
    // ln of what scores are shares of.
    const Stored stored = target > 0.0 ? fetch_all(session, model, layer) : Stored{};
    const auto total = [&](int head) {
      double sum = -INFINITY;
      for (const double s : scores[static_cast<std::size_t>(head)]) sum = oracle::log_add(sum, s);
      if (target == 0.0) return sum;
      return oracle::log_add(
          sum, log_of_static(stored, query.row(token, head), head / group, tokens.static_tokens));
    };
    Expected expected;
    double log_least = target > 0.0 ? std::log(target) : -INFINITY;
    if (retrieval.selection == Selection::kPerQueryHead) {
      expected.log_shares = scores[static_cast<std::size_t>(set)];
      if (target > 0.0) log_least += total(set);
    } else {
      expected.log_shares.assign(tokens.eligible.size(), -INFINITY);
      const int sharing = model.query_heads / model.num_sets(retrieval.selection);
      for (int head = set * sharing; head < (set + 1) * sharing; ++head) {
        const double whole = total(head) + std::log(sharing);
        for (std::size_t i = 0; i < expected.log_shares.size(); ++i) {
          expected.log_shares[i] = oracle::log_add(
              expected.log_shares[i], scores[static_cast<std::size_t>(head)][i] - whole);
        }
      }
    }
    std::vector<double> u;
    for (const std::int64_t t : tokens.eligible) {
      u.push_back(
          oracle::priority_uniform({.seed = retrieval.seed, .layer = layer, .head = set}, t));
    }
    expected.selection = oracle::select_by_priority(expected.log_shares, u, k, log_least);
    return expected;
  }
  static std::int64_t size_of(const RetrievalConfig& retrieval, const oracle::Visible& tokens) {
    int most = retrieval.top_k;
    if (retrieval.error_target > 0.0) {
      // A quarter more than the threshold lets through on average.
      const double through = 1.25 / (retrieval.error_target * retrieval.error_target);
      most = static_cast<int>(std::min<double>(most, std::ceil(through)));
    }
    return oracle::selection_size(most, retrieval.sparsity, tokens.count,
                                  static_cast<std::int64_t>(tokens.eligible.size()));
  }

  /// Selects, and compares ids, scores and biases of every query and set with the oracle. `sizes`:
  /// tokens of each set where they are known otherwise.
  static void expect_oracle(Session& session, const ModelConfig& model, const HostTensor& query,
                            const RetrievalConfig& retrieval, int layer = 0,
                            const AttendOptions& options = {},
                            const std::vector<std::int64_t>& sizes = {}) {
    const Picked picked = pick(session, model, query, retrieval, layer, options);
    for (std::int64_t token = 0; token < query.tokens(); ++token) {
      const oracle::Visible tokens =
          visible(retrieval, session.length(layer), query.tokens() - 1 - token);
      for (int set = 0; set < picked.ids.heads; ++set) {
        SCOPED_TRACE(::testing::Message() << name_of(retrieval) << ", query " << token << ", set "
                                          << set << ", top_k " << retrieval.top_k);
        const auto at = static_cast<std::size_t>(token * picked.ids.heads + set);
        const std::int64_t k = sizes.empty() ? size_of(retrieval, tokens) : sizes[at];
        const Expected expected =
            expected_of(session, model, query, token, retrieval, layer, set, k);
        expect_set(picked, token, set, tokens, expected);
      }
    }
  }
  static void expect_set(const Picked& picked, std::int64_t token, int set,
                         const oracle::Visible& tokens, const Expected& expected) {
    const std::vector<std::int64_t> ids = picked.ids.ids(token, set);
    const std::int64_t first = tokens.eligible.empty() ? 0 : tokens.eligible.front();
    std::vector<std::int64_t> positions;
    for (const std::int64_t id : ids) positions.push_back(id - first);
    ASSERT_EQ(oracle::compare_priority(expected.selection, positions), "");
    // fp32 scores, and normalisers that are sums of some thousand of them.
    double largest = 1.0;
    for (const double s : expected.log_shares) {
      if (std::isfinite(s)) largest = std::max(largest, std::fabs(s));
    }
    const double tolerance = 1e-5 * (10.0 + largest);
    const double cut = expected.selection.cut;
    const std::size_t begin = picked.at(token, set);
    for (std::size_t i = 0; i < static_cast<std::size_t>(picked.ids.n); ++i) {
      const auto score = static_cast<double>(picked.scores[begin + i]);
      const auto bias = static_cast<double>(picked.biases[begin + i]);
      if (i >= ids.size()) {
        ASSERT_EQ(picked.ids.data[begin + i], -1);
        ASSERT_EQ(score, -INFINITY);
        ASSERT_EQ(bias, 0.0);
        continue;
      }
      const double share = expected.log_shares[static_cast<std::size_t>(positions[i])];
      ASSERT_NEAR(score, share, tolerance) << "token " << ids[i];
      ASSERT_NEAR(bias, std::max(0.0, cut - share), 2.0 * tolerance) << "token " << ids[i];
      ASSERT_GE(bias, 0.0);
    }
  }
};

}  // namespace kvtier::testing
