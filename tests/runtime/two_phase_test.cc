#include "hashing/planes.h"
#include "runtime/priority_fixture.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvtier::testing {
namespace {

constexpr std::int64_t kLength = 400;
constexpr int kDim = 64;

/// E[level y] of the first `coarse` bits of a code, y of N(0, 1), by the midpoint rule.
double agreement(int bits, int coarse) {
  double sum = 0.0;
  constexpr double kStep = 1e-4;
  for (double y = -8.0 + kStep / 2; y < 8.0; y += kStep) {
    const int code = oracle::quantise(y, bits).code >> (bits - coarse);
    const double level = (code + 0.5) * (1 << (bits - coarse)) - (1 << bits) / 2.0;
    sum += level * y * std::exp(-y * y / 2) * kStep;
  }
  return sum;
}

class TwoPhaseTest : public PriorityTest {
 protected:
  /// ln p of every eligible token for each query head, by the first bits of its code.
  static std::vector<std::vector<double>> coarse_scores(Session& session, const ModelConfig& model,
                                                        const HostTensor& query,
                                                        const RetrievalConfig& retrieval) {
    const SketchConfig sketch = retrieval.sketch(kDim);
    const int bits = sketch.num_planes / kDim;
    const int dropped = bits - retrieval.coarse_bits;
    const double gain = agreement(bits, bits) / agreement(bits, retrieval.coarse_bits);
    const std::vector<std::uint16_t> planes = hashing::generate_planes(
        {.kind = sketch.kind, .num_planes = kDim, .seed = sketch.seed}, kDim);
    const auto rotated = [&](std::span<const float> x) {
      std::vector<double> y(kDim, 0.0);
      for (std::size_t i = 0; i < kDim * kDim; ++i) {
        y[i / kDim] += oracle::from_bf16(planes[i]) * static_cast<double>(x[i % kDim]);
      }
      return y;
    };
    const auto length_of = [](std::span<const float> x) {
      double square = 0.0;
      for (const float each : x) square += static_cast<double>(each) * static_cast<double>(each);
      return std::sqrt(square);
    };
    const Stored stored = fetch_all(session, model, 0);
    const oracle::Visible tokens = visible(retrieval, stored.length, 0);
    std::vector<std::vector<double>> scores;
    for (int head = 0; head < model.query_heads; ++head) {
      const oracle::KvView kv = stored.of(head / (model.query_heads / model.kv_heads));
      const std::vector<double> p = rotated(query.row(0, head));
      scores.emplace_back();
      for (const std::int64_t t : tokens.eligible) {
        const std::span<const float> key(kv.keys + t * kDim, kDim);
        const double norm = length_of(key);
        std::vector<double> y = rotated(key);
        std::vector<int> codes;
        double sum = 0.0;
        for (std::size_t i = 0; i < kDim; ++i) {
          y[i] /= norm;
          codes.push_back(oracle::quantise(y[i], bits).code);
          const int prefix = codes.back() >> dropped;
          sum += ((prefix + 0.5) * (1 << dropped) - (1 << bits) / 2.0) * p[i];
        }
        const double factor = oracle::code_factor(y, codes, bits, norm);
        const double logit = gain * sum * oracle::quantiser_step(bits) / kDim * factor / 8.0;
        const double value = length_of({kv.values + t * kDim, kDim});
        scores.back().push_back(logit + std::log(value));
      }
    }
    return scores;
  }
};
KVTIER_INSTANTIATE_BACKENDS(TwoPhaseTest);

/// Ids near a cut may differ; the cuts, and so the biases, may not.
TEST_P(TwoPhaseTest, TakesWhatBothPhasesOfTheOracleTake) {
  for (const auto& [bits, coarse] : {std::pair{2, 1}, std::pair{4, 2}, std::pair{4, 1}}) {
    for (const int group : {1, 4}) {
      for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
        SCOPED_TRACE(::testing::Message()
                     << bits << " bits, " << coarse << " first, group " << group << ", selection "
                     << static_cast<int>(selection));
        RetrievalConfig retrieval = priority_estimators()[1];
        retrieval.num_planes = bits * kDim;
        retrieval.query_bits = 0;
        retrieval.selection = selection;
        retrieval.top_k = 25;
        retrieval.candidates = 4;
        retrieval.coarse_bits = coarse;
        retrieval.seed = 17;
        const Config config = config_of(retrieval, group);
        const ModelConfig& model = config.model;
        Engine engine(config);
        Session session = engine.open();
        append_random(session, model, 0, kLength, 3);
        const HostTensor query = queries(model, 1, 5);
        const Picked picked = pick(session, model, query, retrieval);
        RetrievalConfig whole = retrieval;
        whole.coarse_bits = 0;
        const auto fine = all_scores(session, model, query, 0, whole, 0);
        const auto first = coarse_scores(session, model, query, retrieval);
        const oracle::Visible tokens = visible(retrieval, kLength, 0);
        const std::size_t count = tokens.eligible.size();

        for (int set = 0; set < picked.ids.heads; ++set) {
          // ln p of both phases; the heads of a set are normalised as the first has them.
          std::vector<double> one(count, -INFINITY), two(count, -INFINITY);
          const bool per_kv = selection == Selection::kPerKvHead;
          for (int h = per_kv ? set * group : set; h < (per_kv ? (set + 1) * group : set + 1);
               ++h) {
            const auto head = static_cast<std::size_t>(h);
            double total = -INFINITY;
            for (const double s : first[head]) total = oracle::log_add(total, s);
            const double whole_of = per_kv ? total + std::log(group) : 0.0;
            for (std::size_t i = 0; i < count; ++i) {
              one[i] = oracle::log_add(one[i], first[head][i] - whole_of);
              two[i] = oracle::log_add(two[i], fine[head][i] - whole_of);
            }
          }
          std::vector<double> u1, u2;
          for (const std::int64_t t : tokens.eligible) {
            u1.push_back(oracle::priority_uniform({.seed = 17, .head = set}, t));
            u2.push_back(oracle::priority_uniform({.seed = 17, .head = set, .second = true}, t));
          }
          const auto candidates = oracle::select_by_priority(one, u1, 100, -INFINITY);
          std::vector<double> weights(count, -INFINITY);
          for (std::size_t c = 0; c < candidates.positions.size(); ++c) {
            const auto i = static_cast<std::size_t>(candidates.positions[c]);
            weights[i] = two[i] + candidates.biases[c];
          }
          const auto chosen = oracle::select_by_priority(weights, u2, 25, -INFINITY);

          constexpr double kNear = 0.03;  // factors of 11 bits, times the largest logits
          const std::vector<std::int64_t> ids = picked.ids.ids(0, set);
          ASSERT_EQ(ids.size(), 25U);
          std::size_t next = 0;
          for (std::size_t i = 0; i < count; ++i) {
            const double bias_of_first = std::max(0.0, candidates.cut - one[i]);
            const double weight = two[i] + bias_of_first;
            const double r1 = one[i] - std::log(u1[i]), r2 = weight - std::log(u2[i]);
            const bool taken = next < ids.size() && ids[next] == tokens.eligible[i];
            if (!taken) {
              ASSERT_TRUE(r1 < candidates.cut + kNear || r2 < chosen.cut + kNear) << "token " << i;
              continue;
            }
            ASSERT_GT(r1, candidates.cut - kNear) << "token " << i;
            ASSERT_GT(r2, chosen.cut - kNear) << "token " << i;
            const std::size_t at = picked.at(0, set) + next++;
            ASSERT_NEAR(static_cast<double>(picked.scores[at]), weight, kNear);
            ASSERT_NEAR(static_cast<double>(picked.biases[at]),
                        bias_of_first + std::max(0.0, chosen.cut - weight), kNear);
          }
        }
      }
    }
  }
}

/// On a GPU selections without scores are made by other kernels.
TEST_P(TwoPhaseTest, TakesTheSameWithoutScores) {
  struct Shape {
    int head_dim, bits, group;
    std::int64_t length;
    int top_k, candidates;
  };
  for (const Shape& shape : {Shape{64, 2, 1, 400, 25, 4}, Shape{64, 4, 4, 400, 25, 8},
                             Shape{128, 2, 4, 9000, 200, 8}, Shape{128, 4, 8, 5000, 100, 4},
                             Shape{64, 4, 16, 5000, 100, 4}, Shape{128, 3, 3, 700, 200, 3},
                             Shape{96, 2, 4, 700, 50, 1}, Shape{128, 2, 4, 300, 400, 2}}) {
    SCOPED_TRACE(::testing::Message()
                 << "head_dim " << shape.head_dim << ", " << shape.bits << " bits, group "
                 << shape.group << ", " << shape.length << " tokens, k " << shape.top_k);
    RetrievalConfig retrieval = two_phases();
    retrieval.num_planes = shape.bits * shape.head_dim;
    retrieval.query_bits = 4;
    retrieval.top_k = shape.top_k;
    retrieval.candidates = shape.candidates;
    Config config = config_of(retrieval, shape.group);
    config.memory.max_session_tokens = 1 << 14;
    config.model.head_dim = shape.head_dim;
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, shape.length, 3);
    const HostTensor query = queries(config.model, 1, 5);
    const Picked with_scores = pick(session, config.model, query, retrieval);
    Picked picked(1, config.model.kv_heads, shape.length);
    SelectOutputs outputs = picked.outputs();
    outputs.scores = {};
    session.select(0, query.view(), outputs, {}, {.retrieval = &retrieval});

    for (int head = 0; head < config.model.kv_heads; ++head) {
      const std::vector<std::int64_t> expected = with_scores.ids.ids(0, head);
      const std::vector<std::int64_t> found = picked.ids.ids(0, head);
      ASSERT_EQ(found.size(), expected.size());
      std::size_t common = 0;
      for (std::size_t i = 0; i < found.size(); ++i) {
        const auto at = std::lower_bound(expected.begin(), expected.end(), found[i]);
        if (at == expected.end() || *at != found[i]) continue;
        ++common;
        ASSERT_NEAR(static_cast<double>(picked.biases[picked.at(0, head) + i]),
                    static_cast<double>(
                        with_scores.biases[with_scores.at(0, head) +
                                           static_cast<std::size_t>(at - expected.begin())]),
                    2e-3)
            << "token " << found[i];
      }
      EXPECT_GE(common + 1, found.size());  // a near-tie may go either way
    }
  }
}

TEST_P(TwoPhaseTest, ReadsTheFirstBitsOfAllAndAllBitsOfTheCandidates) {
  RetrievalConfig retrieval = two_phases();
  retrieval.num_planes = 4 * kDim;  // two chunks of 16 bytes, of which the first phase reads one
  retrieval.coarse_bits = 2;
  retrieval.candidates = 3;
  const Config config = config_of(retrieval, 2);
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, kLength, 3);
  const HostTensor query = queries(config.model, 1, 4);
  (void)pick(session, config.model, query, retrieval);
  const auto eligible = static_cast<std::uint64_t>(kLength - 32);
  const auto candidates = static_cast<std::uint64_t>(3 * retrieval.top_k);
  EXPECT_EQ(engine.stats().cumulative.bytes_sketch_read, 2 * (eligible * 20 + candidates * 36));
}

TEST_P(TwoPhaseTest, RefusesWhatHasNoTwoPhases) {
  const RetrievalConfig good = two_phases();
  EXPECT_TRUE(good.validate().empty());
  const auto problems = [&](const std::function<void(RetrievalConfig&)>& spoil) {
    Config config = this->config();
    config.retrieval = good;
    spoil(config.retrieval);
    std::string all;
    for (const std::string& problem : config.validate()) all += problem + "\n";
    return all;
  };
  EXPECT_EQ(problems([](RetrievalConfig& r) { r.rule = SelectionRule::kTopK; }),
            "retrieval.coarse_bits: expected 0 without the priority rule over a scalar code, found "
            "1\n");
  EXPECT_EQ(problems([](RetrievalConfig& r) { r.code = SketchCode::kSign; }),
            "retrieval.coarse_bits: expected 0 without the priority rule over a scalar code, found "
            "1\n");
  EXPECT_EQ(problems([](RetrievalConfig& r) { r.error_target = 0.1; }),
            "retrieval.coarse_bits: expected 0 beside an error_target, found 1\n");
  EXPECT_EQ(problems([](RetrievalConfig& r) { r.selection = Selection::kPerSequence; }),
            "retrieval.coarse_bits: expected 0 (one phase) with a set per sequence, found 1\n");
  EXPECT_EQ(problems([](RetrievalConfig& r) { r.candidates = 0; }),
            "retrieval.candidates: expected at least 1, found 0\n");
  EXPECT_EQ(problems([](RetrievalConfig& r) { r.coarse_bits = 2; }),
            "retrieval.coarse_bits: expected fewer than the 2 bits of a coordinate, found 2\n");

  const Config config = config_of(good, 2);
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, 100, 3);
  const HostTensor query = queries(config.model, 1, 4);
  const auto error_of_pick = [&](const RetrievalConfig& retrieval, AttendOptions options) {
    const auto error =
        error_of([&] { (void)pick(session, config.model, query, retrieval, 0, options); });
    return error ? std::string(error->what()) : std::string();
  };
  RetrievalConfig whole = good;
  whole.coarse_bits = 2;
  EXPECT_NE(error_of_pick(whole, {}).find("expected fewer than the 2 bits"), std::string::npos);
  EXPECT_NE(error_of_pick(good, {.recall_target = RecallTarget{}})
                .find("recall_target: expected coarse_bits 0, found 1"),
            std::string::npos);
}

}  // namespace
}  // namespace kvtier::testing
