#include "runtime/priority_fixture.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

constexpr std::int64_t kTokens = 300;
KVTIER_INSTANTIATE_BACKENDS(PriorityTest);

TEST_P(PriorityTest, TakesTheTokensOfTheOracleForEverySize) {
  for (RetrievalConfig retrieval : priority_estimators()) {
    for (const int group : {1, 4, 8}) {
      const Config config = config_of(retrieval, group);
      const ModelConfig& model = config.model;
      Engine engine(config);
      Session session = engine.open();
      append_random(session, model, 0, kTokens, static_cast<std::uint64_t>(group));
      const HostTensor query = queries(model, 2, 5);
      const int eligible = static_cast<int>(kTokens) - 32;
      for (const Selection selection : kinds_of_sets(retrieval)) {
        retrieval.selection = selection;
        for (const int k : {1, 7, eligible - 1, eligible, 4000}) {
          retrieval.top_k = k;
          expect_oracle(session, model, query, retrieval);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(PriorityTest, TakesASharePerQueryBySparsity) {
  for (RetrievalConfig retrieval : priority_estimators()) {
    retrieval.sparsity = 9.7;  // floor(N / 9.7) differs between the queries
    const Config config = config_of(retrieval, 2);
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, kTokens, 3);
    for (const Selection selection : kinds_of_sets(retrieval)) {
      retrieval.selection = selection;
      expect_oracle(session, config.model, queries(config.model, 12, 6), retrieval);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(PriorityTest, LayersAndSeedsHaveTheirOwnPriorities) {
  RetrievalConfig retrieval = priority_estimators()[1];
  retrieval.seed = 0xFEDCBA9876543210ULL;
  Config config = config_of(retrieval, 2);
  config.model.layers = 3;
  Engine engine(config);
  Session session = engine.open();
  std::set<std::vector<std::int64_t>> sets;
  const HostTensor query = queries(config.model, 1, 5);
  for (int layer = 0; layer < 3; ++layer) {
    append_random(session, config.model, layer, kTokens, 3);  // the same tokens
    expect_oracle(session, config.model, query, retrieval, layer);
    sets.insert(pick(session, config.model, query, retrieval, layer).ids.ids(0, 0));
  }
  EXPECT_EQ(sets.size(), 3U);
}

TEST_P(PriorityTest, AnErrorTargetTakesTheTokensAboveItsThreshold) {
  for (RetrievalConfig retrieval : priority_estimators()) {
    const Config config = config_of(retrieval, 4);
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, kTokens, 8);
    const HostTensor query = queries(config.model, 2, 5);
    for (const Selection selection : kinds_of_sets(retrieval)) {
      retrieval.selection = selection;
      std::size_t fewest = kTokens;
      for (const double target : {0.5, 0.2, 0.1, 0.05}) {
        retrieval.error_target = target;
        retrieval.top_k = 4000;
        expect_oracle(session, config.model, query, retrieval);
        const std::size_t taken =
            pick(session, config.model, query, retrieval).ids.ids(1, 0).size();
        EXPECT_LE(static_cast<double>(taken), 1.25 / (target * target) + 1.0);
        fewest = std::min(fewest, taken);
        retrieval.top_k = 20;  // a cap that the smaller ones reach
        expect_oracle(session, config.model, query, retrieval);
        retrieval.sparsity = 12.0;
        expect_oracle(session, config.model, query, retrieval);
        retrieval.sparsity = 0.0;
        if (HasFatalFailure()) return;
      }
      EXPECT_LT(fewest, 20U);
    }
  }
}

TEST_P(PriorityTest, NoSizeIsAnErrorTarget) {
  for (RetrievalConfig retrieval : priority_methods()) {
    const Config config = config_of(retrieval, 4);
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, 3000, 8);
    const HostTensor query = queries(config.model, 2, 5);
    for (const Selection selection : kinds_of_sets(retrieval)) {
      SCOPED_TRACE(name_of(retrieval));
      retrieval.selection = selection;
      retrieval.top_k = 0;
      const Picked found = pick(session, config.model, query, retrieval);
      RetrievalConfig stated = retrieval;
      const bool two_phases = retrieval.coarse_bits > 0;
      stated.top_k = two_phases ? 2048 : 1389;
      stated.error_target = two_phases ? 0.0 : 0.03;
      EXPECT_TRUE(found == pick(session, config.model, query, stated));
      // A recall target says how many: a number is the most.
      const bool recalls = retrieval.estimator == Estimator::kNormAware && !two_phases &&
                           selection != Selection::kPerSequence;
      if (!recalls) continue;
      const AttendOptions options{.recall_target = RecallTarget{.recall = 0.9, .min_top_k = 1}};
      stated.top_k = 2048;
      stated.error_target = 0.0;
      EXPECT_TRUE(pick(session, config.model, query, retrieval, 0, options) ==
                  pick(session, config.model, query, stated, 0, options));
    }
  }
}

TEST_P(PriorityTest, ARecallTargetSaysHowManyTokensAreTaken) {
  for (RetrievalConfig retrieval : {priority_estimators()[0], priority_estimators()[1]}) {
    const Config config = config_of(retrieval, 4);
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, kTokens, 8);
    const HostTensor query = queries(config.model, 2, 5);
    retrieval.top_k = 150;
    for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
      retrieval.selection = selection;
      for (const double recall : {0.5, 0.9}) {
        const AttendOptions options{.recall_target =
                                        RecallTarget{.recall = recall, .min_top_k = 1}};
        RetrievalConfig plain = retrieval;
        plain.rule = SelectionRule::kTopK;
        const Picked best = pick(session, config.model, query, plain, 0, options);
        std::vector<std::int64_t> sizes;
        for (std::int64_t token = 0; token < 2; ++token) {
          for (int set = 0; set < best.ids.heads; ++set) {
            sizes.push_back(std::ssize(best.ids.ids(token, set)));
          }
        }
        EXPECT_LT(*std::min_element(sizes.begin(), sizes.end()), 150);
        expect_oracle(session, config.model, query, retrieval, 0, options, sizes);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(PriorityTest, TokensThatAreNotFiniteComeLastAndCountOnce) {
  for (RetrievalConfig retrieval : priority_methods()) {
    for (const Selection selection : kinds_of_sets(retrieval)) {
      retrieval.selection = selection;
      Config config = config_of(retrieval, 2);
      config.reject_nonfinite = false;
      Engine engine(config);
      Session session = engine.open();
      CallTensors call(config.model, 60, 4);
      for (const std::size_t token : {15U, 20U, 25U}) {
        const auto row = token * 2 * 64;
        call.key.set(row + 3, NAN);          // of the first KV head
        call.value.set(row + 64, INFINITY);  // of the second
      }
      session.append(0, call.key.view(), call.value.view());
      const HostTensor query = queries(config.model, 1, 5);
      retrieval.top_k = 25;  // 28 are eligible
      const Picked without = pick(session, config.model, query, retrieval);
      for (int set = 0; set < without.ids.heads; ++set) {
        const auto ids = without.ids.ids(0, set);
        ASSERT_EQ(ids.size(), 25U);
        for (const std::int64_t id : ids) ASSERT_TRUE(id != 15 && id != 20 && id != 25) << id;
        for (std::size_t i = 0; i < 25; ++i) {
          // What is not taken has no share.
          ASSERT_EQ(without.biases[without.at(0, set) + i], 0.0F);
        }
      }
      retrieval.top_k = 28;
      const Picked all = pick(session, config.model, query, retrieval);
      for (int set = 0; set < all.ids.heads; ++set) {
        ASSERT_EQ(all.ids.ids(0, set).size(), 28U);
        for (std::size_t i = 0; i < 28; ++i) ASSERT_EQ(all.biases[all.at(0, set) + i], 0.0F);
      }
    }
  }
}

TEST_P(PriorityTest, RepeatedQueriesTakeTheSame) {
  for (RetrievalConfig retrieval : priority_methods()) {
    for (const Selection selection : kinds_of_sets(retrieval)) {
      retrieval.selection = selection;
      const Config config = config_of(retrieval, 4);
      Engine engine(config), other(config);
      Session session = engine.open(), twin = other.open();
      append_random(session, config.model, 0, kTokens, 8);
      append_random(twin, config.model, 0, kTokens, 8);
      const HostTensor query = queries(config.model, 3, 5);
      const Picked first = pick(session, config.model, query, retrieval);
      EXPECT_TRUE(first == pick(session, config.model, query, retrieval));
      EXPECT_TRUE(first == pick(twin, config.model, query, retrieval));
    }
  }
}

/// Appending a token, dropping tokens and forking leave the priorities of the others as they are:
/// at most one token of a set makes room for the new one.
TEST_P(PriorityTest, TokensKeepTheirPrioritiesThroughAppendTruncateAndFork) {
  for (RetrievalConfig retrieval : priority_estimators()) {
    retrieval.selection = Selection::kPerQueryHead;
    const Config config = config_of(retrieval, 2);
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, kTokens, 8);
    const HostTensor query = queries(config.model, 1, 5);
    const Picked begin = pick(session, config.model, query, retrieval);
    std::vector<Session> children = session.fork(1);
    Session& child = children[0];
    EXPECT_TRUE(begin == pick(child, config.model, query, retrieval));
    std::vector<std::int64_t> before = begin.ids.ids(0, 1);
    for (std::uint64_t i = 0; i < 30; ++i) {
      append_random(child, config.model, 0, 1, 100 + i);
      const std::vector<std::int64_t> after =
          pick(child, config.model, query, retrieval).ids.ids(0, 1);
      ASSERT_EQ(after.size(), before.size());
      std::vector<std::int64_t> kept;
      std::set_intersection(before.begin(), before.end(), after.begin(), after.end(),
                            std::back_inserter(kept));
      ASSERT_GE(kept.size(), before.size() - 1) << "after " << i;
      before = after;
    }
    EXPECT_TRUE(begin == pick(session, config.model, query, retrieval));
    child.truncate(kTokens);
    EXPECT_TRUE(begin == pick(child, config.model, query, retrieval));
    child.truncate(200);
    expect_oracle(child, config.model, query, retrieval);
    append_random(child, config.model, 0, 100, 77);
    expect_oracle(child, config.model, query, retrieval);
  }
}

TEST_P(PriorityTest, ABatchOfSessionsTakesWhatEachTakesAlone) {
  for (RetrievalConfig retrieval : priority_methods()) {
    for (const Selection selection : kinds_of_sets(retrieval)) {
      retrieval.selection = selection;
      const Config config = config_of(retrieval, 4);
      const ModelConfig& model = config.model;
      Engine engine(config);
      std::vector<Session> batched, alone;
      std::vector<CallTensors> a, b;
      for (const std::int64_t tokens : {300, 20, 97, 41}) {
        const auto seed = static_cast<std::uint64_t>(tokens);
        for (std::vector<Session>* sessions : {&batched, &alone}) {
          sessions->push_back(engine.open());
          append_random(sessions->back(), model, 0, tokens, seed);
        }
        const std::int64_t rows = tokens == 97 ? 3 : 1;
        a.emplace_back(model, rows, seed);
        b.emplace_back(model, rows, seed);
      }
      std::vector<BatchItem> items;
      for (std::size_t i = 0; i < a.size(); ++i) {
        items.push_back({&batched[i], a[i].inputs(), a[i].outputs(), {}});
        alone[i].decode(0, b[i].inputs(), b[i].outputs());
      }
      engine.decode(0, items);
      for (std::size_t i = 0; i < a.size(); ++i) {
        for (std::size_t x = 0; x < a[i].out.values().size(); ++x) {
          ASSERT_NEAR(a[i].out.get(x), b[i].out.get(x), 2e-5F) << name_of(retrieval) << ' ' << i;
        }
      }
    }
  }
}

/// Variance of the estimated logits over keys in all directions.
TEST_P(PriorityTest, EstimatesHaveTheNoiseOfTheirQuantiser) {
  constexpr double kNoise[] = {.571, .135, .0389, .0117};  // D / (1 - D) of N(0, 1)
  constexpr std::int64_t kKeys = 2000;
  for (int bits = 1; bits <= 4; ++bits) {
    RetrievalConfig retrieval = priority_estimators()[1];
    retrieval.num_planes = 64 * bits;
    retrieval.query_bits = 0;
    retrieval.value_weighting = ValueWeighting::kNone;
    retrieval.sink_tokens = retrieval.recent_tokens = 0;
    const Config config = config_of(retrieval, 1);
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, kKeys, 8);
    const Stored stored = fetch_all(session, config.model, 0);
    const HostTensor query = queries(config.model, 1, 5);
    const auto scores = all_scores(session, config.model, query, 0, retrieval, 0);
    double sum = 0.0, squares = 0.0;
    for (int head = 0; head < 2; ++head) {
      const std::vector<float> q = query.row(0, head);
      double query_square = 0.0;
      for (const float x : q) query_square += static_cast<double>(x) * static_cast<double>(x);
      for (std::int64_t t = 0; t < kKeys; ++t) {
        double logit = 0.0, key_square = 0.0;
        for (int x = 0; x < 64; ++x) {
          const auto k = static_cast<double>(stored.of(head).keys[t * 64 + x]);
          logit += static_cast<double>(q[static_cast<std::size_t>(x)]) * k;
          key_square += k * k;
        }
        const double unit = std::sqrt(query_square * key_square / 64.0);
        const double found = scores[static_cast<std::size_t>(head)][static_cast<std::size_t>(t)];
        const double error = (found * 8.0 - logit) / unit;
        sum += error;
        squares += error * error;
      }
    }
    const double n = 2.0 * kKeys;
    const double noise = kNoise[bits - 1];
    EXPECT_NEAR(sum / n, 0.0, 4.0 * std::sqrt(noise / n)) << bits << " bits";
    // The variance of n normal squares has a relative standard error of sqrt(2 / n); a key has
    // 1 / 64 of its directions along the query.
    EXPECT_NEAR(squares / n / noise, 1.0, 4.0 * std::sqrt(2.0 / n) + 2.0 / 64.0) << bits << " bits";
  }
}

}  // namespace
}  // namespace kvtier::testing
