#include "runtime/priority_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

/// Outputs of one call.
struct Results {
  Results(const ModelConfig& model, std::int64_t tokens)
      : out(tokens, model.query_heads, model.head_dim, DType::kFloat32),
        lse(tokens, 1, model.query_heads, DType::kFloat32) {}
  [[nodiscard]] AttendOutputs outputs() {
    return {.out = out.mutable_view(),
            .lse = {lse.mutable_view().data, DType::kFloat32, {lse.tokens(), lse.n()}}};
  }
  HostTensor out, lse;
};

double tolerance(Backend backend) { return backend == Backend::kCuda ? 1e-3 : 5e-5; }

class PriorityAttendTest : public PriorityTest {
 protected:
  static Results attend(Session& session, const ModelConfig& model, const HostTensor& query,
                        const RetrievalConfig& retrieval, const Picked* given = nullptr,
                        int layer = 0, AttendOptions options = {}) {
    Results results(model, query.tokens());
    options.retrieval = &retrieval;
    AttendInputs inputs{.query = query.view()};
    if (given != nullptr) {
      inputs.selected = given->ids_view();
      inputs.bias = given->bias_view();
    }
    session.attend(layer, inputs, results.outputs(), {}, options);
    return results;
  }
  /// The same selection was attended: on the CPU by the same sums.
  static void expect_same(const Results& a, const Results& b) {
    if (GetParam() == Backend::kCpu) {
      EXPECT_EQ(a.out.bytes(), b.out.bytes());
      EXPECT_EQ(a.lse.bytes(), b.lse.bytes());
    }
    expect_near(a, b);
  }
  static void expect_near(const Results& a, const Results& b) {
    for (std::size_t i = 0; i < a.out.values().size(); ++i) {
      ASSERT_NEAR(a.out.get(i), b.out.get(i), tolerance(GetParam())) << i;
    }
    for (std::size_t i = 0; i < a.lse.values().size(); ++i) {
      ASSERT_NEAR(a.lse.get(i), b.lse.get(i), tolerance(GetParam())) << i;
    }
  }
  /// Compares with attention over the always-attended tokens and those of `picked`.
  static void expect_attended(Session& session, const ModelConfig& model, const HostTensor& query,
                              const RetrievalConfig& retrieval, const Picked& picked,
                              const Results& found) {
    const Stored stored = fetch_all(session, model, 0);
    const int group = model.query_heads / model.kv_heads;
    for (std::int64_t token = 0; token < query.tokens(); ++token) {
      std::vector<std::int64_t> static_tokens =
          visible(retrieval, stored.length, query.tokens() - 1 - token).static_tokens;
      for (int head = 0; head < model.query_heads; ++head) {
        const int set = head / (model.query_heads / picked.ids.heads);
        std::vector<std::int64_t> tokens = static_tokens;
        std::vector<double> biases(static_tokens.size(), 0.0);
        for (const std::int64_t id : picked.ids.ids(token, set)) tokens.push_back(id);
        for (std::size_t i = 0; i < tokens.size() - static_tokens.size(); ++i) {
          biases.push_back(static_cast<double>(picked.biases[picked.at(token, set) + i]));
        }
        const oracle::Attention expected = oracle::attend_with_biases(
            query.row(token, head), stored.of(head / group), tokens, biases,
            1.0 / std::sqrt(static_cast<double>(model.head_dim)));
        const std::vector<float> out = found.out.row(token, head);
        EXPECT_LE(oracle::relative_error(out, expected.out), tolerance(GetParam()))
            << "query " << token << ", head " << head;
        const auto at = static_cast<std::size_t>(token * model.query_heads + head);
        EXPECT_NEAR(static_cast<double>(found.lse.get(at)), expected.lse, tolerance(GetParam()));
      }
    }
  }
  /// Of one query over enough tokens for three blocks, with rows on the device.
  void expect_rows_counted(const RetrievalConfig& retrieval, int group,
                           const AttendOptions& options) const {
    Config config = config_of(retrieval, group);
    config.model.head_dim = 128;
    config.memory.placement = KvPlacement::kDevice;
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, 2600, 3);
    const HostTensor query = queries(config.model, 1, 4);
    const Picked picked = pick(session, config.model, query, retrieval, 0, options);
    std::uint64_t selected = 0;
    std::size_t fewest = 2600, most = 0;
    for (int head = 0; head < config.model.kv_heads; ++head) {
      const std::size_t of_head = picked.ids.ids(0, head).size();
      selected += of_head;
      fewest = std::min(fewest, of_head);
      most = std::max(most, of_head);
    }
    if (options.recall_target) {
      ASSERT_LT(fewest, most);
      ASSERT_LT(most, static_cast<std::size_t>(retrieval.top_k));
    }
    const Stats before = engine.stats();
    const Results results = attend(session, config.model, query, retrieval, nullptr, 0, options);
    const Stats after = engine.stats();
    EXPECT_EQ(after.cumulative.rows_selected - before.cumulative.rows_selected, selected);
    expect_attended(session, config.model, query, retrieval, picked, results);
  }
};
KVTIER_INSTANTIATE_BACKENDS(PriorityAttendTest);

TEST_P(PriorityAttendTest, CountsEachTokenAsItsBiasSaysWhereverItsRowIs) {
  struct Case {
    DType dtype = DType::kBFloat16;
    PageFormat format = PageFormat::kModel;
    int staging_rows = -1;
    KvPlacement placement = KvPlacement::kHost;
    int group = 4;
  };
  for (const Case& c : {Case{}, Case{.staging_rows = 0}, Case{.staging_rows = 16, .group = 1},
                        Case{.dtype = DType::kFloat16, .staging_rows = 512},
                        Case{.format = PageFormat::kInt8, .group = 8},
                        Case{.format = PageFormat::kInt8, .staging_rows = 512},
                        Case{.placement = KvPlacement::kDevice}}) {
    for (RetrievalConfig retrieval : priority_methods()) {
      for (const Selection selection : kinds_of_sets(retrieval)) {
        SCOPED_TRACE(::testing::Message() << name_of(retrieval) << ", staged " << c.staging_rows
                                          << ", format " << static_cast<int>(c.format));
        retrieval.selection = selection;
        retrieval.top_k = 70;
        Config config = config_of(retrieval, c.group);
        config.model.kv_dtype = c.dtype;
        config.memory.page_format = c.format;
        config.memory.staging_rows = c.staging_rows;
        config.memory.placement = c.placement;
        Engine engine(config);
        Session session = engine.open();
        append_random(session, config.model, 0, 500, 3);
        const HostTensor query = queries(config.model, 2, 4);
        const Picked picked = pick(session, config.model, query, retrieval);
        ASSERT_GT(*std::max_element(picked.biases.begin(), picked.biases.end()), 1.0F);
        const Results results = attend(session, config.model, query, retrieval);
        expect_attended(session, config.model, query, retrieval, picked, results);
        expect_same(results, attend(session, config.model, query, retrieval, &picked));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(PriorityAttendTest, ManySelectedTokensOfALongSessionMerge) {
  for (RetrievalConfig retrieval : {priority_estimators()[0], priority_estimators()[1]}) {
    for (const Selection selection : kinds_of_sets(retrieval)) {
      retrieval.selection = selection;
      retrieval.top_k = 1200;
      retrieval.error_target = 0.0;
      const Config config = config_of(retrieval, 2, 1);
      Engine engine(config);
      Session session = engine.open();
      append_random(session, config.model, 0, 4000, 3);
      const HostTensor query = queries(config.model, 1, 4);
      const Picked picked = pick(session, config.model, query, retrieval);
      const Results results = attend(session, config.model, query, retrieval);
      expect_attended(session, config.model, query, retrieval, picked, results);
      retrieval.error_target = 0.04;
      const Picked few = pick(session, config.model, query, retrieval);
      ASSERT_NE(few.ids.data, picked.ids.data);
      const Results of_few = attend(session, config.model, query, retrieval);
      expect_attended(session, config.model, query, retrieval, few, of_few);
      // More ids may be given, so the rows may be split otherwise.
      expect_near(of_few, attend(session, config.model, query, retrieval, &few));
    }
  }
}

// The largest error that is allowed without sinks and window, over even attention: a set has some
// hundred tokens, and is never empty.
TEST_P(PriorityAttendTest, AttendsToSomeTokensWhereNoneIsAlwaysAttended) {
  for (RetrievalConfig retrieval : priority_methods()) {
    if (retrieval.coarse_bits > 0) continue;
    for (const Selection selection : kinds_of_sets(retrieval)) {
      SCOPED_TRACE(name_of(retrieval));
      retrieval.selection = selection;
      retrieval.error_target = 0.1;
      retrieval.sink_tokens = retrieval.recent_tokens = 0;
      const Config config = config_of(retrieval, 2);
      Engine engine(config);
      Session session = engine.open();
      append_random(session, config.model, 0, 300, 3);
      const Results results = attend(session, config.model, queries(config.model, 2, 4), retrieval);
      for (std::size_t i = 0; i < static_cast<std::size_t>(2 * config.model.query_heads); ++i) {
        EXPECT_TRUE(std::isfinite(results.lse.get(i))) << i;
      }
    }
  }
}

// Heads of 128 and KV on the device: kernels that select attend too, and only they know how many.
TEST_P(PriorityAttendTest, CountsTheRowsThatAnErrorTargetTakesOfEachKvHead) {
  for (const int query_bits : {4, 8}) {
    for (const int group : {1, 8, 16}) {
      for (const double error_target : {0.05, 0.3}) {
        SCOPED_TRACE(::testing::Message()
                     << query_bits << " bits, " << group << " heads a group, " << error_target);
        RetrievalConfig retrieval = priority_estimators()[0];
        retrieval.query_bits = query_bits;
        retrieval.error_target = error_target;
        retrieval.top_k = 150;  // fewer than .05 takes
        expect_rows_counted(retrieval, group, {});
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(PriorityAttendTest, CountsTheRowsThatARecallTargetTakesOfEachKvHead) {
  for (const int query_bits : {4, 8}) {
    for (const int group : {1, 8}) {
      for (const double recall : {0.3, 0.7}) {
        SCOPED_TRACE(::testing::Message()
                     << query_bits << " bits, " << group << " heads a group, " << recall);
        RetrievalConfig retrieval = priority_estimators()[0];
        retrieval.query_bits = query_bits;
        retrieval.top_k = 1500;
        expect_rows_counted(retrieval, group,
                            {.recall_target = RecallTarget{.recall = recall, .min_top_k = 1}});
        if (HasFailure()) return;
      }
    }
  }
}

/// With one query head a KV head, so that the share of a token is that of the head's attention.
TEST_P(PriorityAttendTest, ByDefaultFewRowsOfSharpAttentionAreWithinTheErrorOfDense) {
  constexpr std::int64_t kTokens = 4000, kQueries = 16;
  constexpr int kHeads = 8;
  const RetrievalConfig retrieval;
  const Config config = config_of(retrieval, 1, kHeads);
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, kTokens, 3);
  const Stored stored = fetch_all(session, config.model, 0);
  std::vector<std::int64_t> all(kTokens);
  for (std::size_t t = 0; t < all.size(); ++t) all[t] = static_cast<std::int64_t>(t);
  for (const float scale : {2.0F, 3.0F}) {  // standard deviation of the logits
    SCOPED_TRACE(scale);
    const HostTensor query =
        HostTensor::random(kQueries, kHeads, config.model.head_dim, DType::kFloat32, 4, scale);
    const Stats before = engine.stats();
    const Results found = attend(session, config.model, query, retrieval);
    const auto rows = static_cast<double>(engine.stats().cumulative.rows_selected -
                                          before.cumulative.rows_selected);
    const double most = 1.25 / (0.03 * 0.03) * kQueries * kHeads;
    EXPECT_LT(rows, 0.7 * most);
    double denominators = 0.0, outputs = 0.0, values = 0.0;
    for (std::int64_t token = 0; token < kQueries; ++token) {
      const std::span<const std::int64_t> seen(
          all.data(), static_cast<std::size_t>(kTokens - kQueries + token) + 1);
      for (int head = 0; head < kHeads; ++head) {
        const oracle::Attention dense =
            oracle::attend(query.row(token, head), stored.of(head), seen, 0.125);
        const auto at = static_cast<std::size_t>(token * kHeads + head);
        const double relative = std::expm1(static_cast<double>(found.lse.get(at)) - dense.lse);
        denominators += relative * relative;
        const std::vector<float> out = found.out.row(token, head);
        for (std::size_t x = 0; x < out.size(); ++x) {
          const double difference = static_cast<double>(out[x]) - dense.out[x];
          outputs += difference * difference;
        }
      }
    }
    for (const float v : stored.values) values += static_cast<double>(v) * static_cast<double>(v);
    values *= kQueries / static_cast<double>(kTokens);  // of one row for each query and head
    const double error = std::sqrt(denominators / (kQueries * kHeads));
    EXPECT_LT(error, 1.1 * 0.03);
    EXPECT_GT(error, 0.1 * 0.03) << "as if all rows were attended";
    EXPECT_LT(std::sqrt(outputs / values), 1.1 * 0.03);
  }
}

TEST_P(PriorityAttendTest, GivenBiasesNeedNoPriorityRule) {
  RetrievalConfig retrieval = priority_estimators()[0];
  retrieval.rule = SelectionRule::kTopK;
  const Config config = config_of(retrieval, 2);
  const ModelConfig& model = config.model;
  Engine engine(config);
  Session session = engine.open();
  append_random(session, model, 0, 200, 3);
  const HostTensor query = queries(model, 1, 4);

  Picked once(1, model.kv_heads, 4);
  once.ids.data = {30, 90, 60, -1, 40, 20, 150, -1};  // in any order
  once.biases = {0.5F, 2.0F, 0.0F, 3.0F, 1.0F, 0.25F, 7.0F, 3.0F};
  const Results expected = attend(session, model, query, retrieval, &once);
  expect_attended(session, model, query, retrieval, once, expected);

  // Of an id given twice the larger counts; of always-attended tokens and those beyond, none.
  Picked twice(1, model.kv_heads, 8);
  twice.ids.data = {30, 90, 60, 90, 30, 3, 199, 999, 150, 20, 40, 20, 150, 40, -1, -5};
  twice.biases = {0.5F, 1.0F, 0.0F, 2.0F,  0.2F, 9.0F, 9.0F, 9.0F,
                  7.0F, 0.2F, 1.0F, 0.25F, 7.0F, 0.0F, 9.0F, 9.0F};
  expect_same(attend(session, model, query, retrieval, &twice), expected);

  // The same for each query head of its own.
  Picked heads(1, model.query_heads, 4);
  for (std::size_t i = 0; i < heads.ids.data.size(); ++i) {
    const std::size_t from = i / 8 * 4 + i % 4;
    heads.ids.data[i] = once.ids.data[from];
    heads.biases[i] = once.biases[from];
  }
  expect_near(attend(session, model, query, retrieval, &heads), expected);
  for (std::size_t i = 0; i < heads.biases.size(); ++i)
    heads.biases[i] += 0.1F * static_cast<float>(i / 4);
  expect_attended(session, model, query, retrieval, heads,
                  attend(session, model, query, retrieval, &heads));
}

TEST_P(PriorityAttendTest, WithRoomForAllEqualsDenseAttention) {
  for (const auto& [dtype, format] : {std::pair{DType::kBFloat16, PageFormat::kModel},
                                      std::pair{DType::kFloat16, PageFormat::kModel},
                                      std::pair{DType::kBFloat16, PageFormat::kInt8}}) {
    for (RetrievalConfig retrieval : priority_methods()) {
      for (const Selection selection : kinds_of_sets(retrieval)) {
        for (const SelectionRule rule : {SelectionRule::kTopK, SelectionRule::kPriority}) {
          if (rule == SelectionRule::kTopK && retrieval.coarse_bits > 0) continue;
          SCOPED_TRACE(name_of(retrieval));
          retrieval.selection = selection;
          retrieval.rule = rule;
          Config config = config_of(retrieval, 4);
          config.model.kv_dtype = dtype;
          config.memory.page_format = format;
          Engine engine(config);
          Session session = engine.open();
          append_random(session, config.model, 0, 200, 3);
          const HostTensor query = queries(config.model, 2, 4);
          const Results dense = attend(session, config.model, query, retrieval, nullptr, 0,
                                       {.mode = LayerMode::kDense});
          for (const int k : {168, 200, 4096}) {
            retrieval.top_k = k;
            expect_near(attend(session, config.model, query, retrieval), dense);
          }
        }
      }
    }
  }
}

/// 4,096 draws: the KV heads and layers of engines with several seeds hold the same tokens, so they
/// differ in the priorities alone, and seeds in the planes too.
TEST_P(PriorityAttendTest, NumeratorAndDenominatorHaveTheExpectationOfDenseAttention) {
  constexpr int kLayers = 32, kHeads = 16, kSeeds = 8, kDim = 64, kGroup = 2;
  constexpr std::int64_t kTokens = 90;
  std::vector<RetrievalConfig> rules;
  for (RetrievalConfig retrieval :
       {priority_estimators()[0], priority_estimators()[1], two_phases()}) {
    retrieval.candidates = 2;
    retrieval.sink_tokens = retrieval.recent_tokens = 4;
    for (const Selection selection : kinds_of_sets(retrieval)) {
      for (const double error_target : {0.0, 0.3}) {
        if (error_target > 0.0 && retrieval.coarse_bits > 0) continue;
        retrieval.selection = selection;
        retrieval.error_target = error_target;
        retrieval.top_k = error_target > 0.0 ? 90 : 14;
        rules.push_back(retrieval);
      }
    }
  }
  const HostTensor key = HostTensor::random(kTokens, 1, kDim, DType::kBFloat16, 1);
  const HostTensor value = HostTensor::random(kTokens, 1, kDim, DType::kBFloat16, 2);
  const HostTensor query = HostTensor::random(1, kGroup, kDim, DType::kFloat32, 3, 1.5F);
  const auto repeated = [](const HostTensor& of, int heads) {
    HostTensor all(of.tokens(), heads, kDim, DType::kFloat32);
    for (std::int64_t t = 0; t < of.tokens(); ++t) {
      for (int head = 0; head < heads; ++head) {
        const std::vector<float> row = of.row(t, head % of.heads());
        for (int x = 0; x < kDim; ++x) {
          all.set(static_cast<std::size_t>((t * heads + head) * kDim + x),
                  row[static_cast<std::size_t>(x)]);
        }
      }
    }
    return all;
  };
  const HostTensor keys = repeated(key, kHeads), values = repeated(value, kHeads);
  const HostTensor query_heads = repeated(query, kHeads * kGroup);
  std::vector<std::int64_t> all(kTokens);
  for (std::size_t t = 0; t < all.size(); ++t) all[t] = static_cast<std::int64_t>(t);
  const std::vector<float> stored_keys = stored(key, DType::kBFloat16);
  const std::vector<float> stored_values = stored(value, DType::kBFloat16);
  std::vector<oracle::Attention> dense;
  for (int h = 0; h < kGroup; ++h) {
    dense.push_back(oracle::attend(query.row(0, h), kv_view(stored_keys, stored_values, 1, kDim, 0),
                                   all, 0.125));
  }

  struct Moments {
    double sum = 0.0, squares = 0.0;
    void add(double x) {
      sum += x;
      squares += x * x;
    }
  };
  // Of each rule and query: the numerator's coordinates, then the denominator, over the dense one.
  std::vector<Moments> moments(rules.size() * kGroup * (kDim + 1));
  for (std::uint64_t seed = 1000; seed < 1000 + kSeeds; ++seed) {
    Config config = config_of(rules[0], kGroup, kHeads);
    config.model.layers = kLayers;
    config.memory.max_session_tokens = 128;
    config.memory.page_tokens = 16;
    config.memory.host_bytes = 32 * MiB;
    config.retrieval.seed = seed;
    RetrievalConfig other = rules.back();
    other.seed = seed;
    config.extra_sketches = {other.sketch(config.model.head_dim)};
    Engine engine(config);
    Session session = engine.open();
    for (int layer = 0; layer < kLayers; ++layer) {
      session.append(layer, keys.view(), values.view());
      for (std::size_t r = 0; r < rules.size(); ++r) {
        rules[r].seed = seed;
        const Results found = attend(session, config.model, query_heads, rules[r], nullptr, layer);
        for (int head = 0; head < kHeads * kGroup; ++head) {
          const auto h = static_cast<std::size_t>(head % kGroup);
          Moments* to = &moments[(r * kGroup + h) * (kDim + 1)];
          const auto lse = static_cast<double>(found.lse.get(static_cast<std::size_t>(head)));
          const double weight = std::exp(lse - dense[h].lse);
          for (const float x : found.out.row(0, head)) (to++)->add(weight * static_cast<double>(x));
          to->add(weight);
        }
      }
    }
  }
  constexpr double kDraws = 1.0 * kLayers * kHeads * kSeeds;
  for (std::size_t i = 0; i < moments.size(); ++i) {
    const std::size_t coordinate = i % (kDim + 1);
    const std::size_t set = i / (kDim + 1);
    const double expected = coordinate == kDim ? 1.0 : dense[set % kGroup].out[coordinate];
    const double mean = moments[i].sum / kDraws;
    const double variance = moments[i].squares / kDraws - mean * mean;
    EXPECT_GT(variance, 1e-8) << "every draw is the same";
    // The heads of a sequence that share a set share a draw.
    const bool shared = rules[set / kGroup].selection == Selection::kPerSequence;
    const double draws = shared ? kDraws / kHeads : kDraws;
    EXPECT_NEAR(mean, expected, 4.0 * std::sqrt(variance / draws))
        << name_of(rules[set / kGroup]) << ", error target " << rules[set / kGroup].error_target
        << ", coordinate " << coordinate;
  }
}

}  // namespace
}  // namespace kvtier::testing
