#include "kvtier/recall.h"

#include "runtime/rejection_fixture.h"

#include <gtest/gtest.h>

#include <numbers>
#include <numeric>

namespace kvtier::testing {
namespace {

constexpr std::int64_t kTokens = 700;
constexpr int kSink = 5;
constexpr int kRecent = 9;

/// A sequence of one layer whose keys differ in length and whose values differ in norm.
struct Stored {
  Stored(const ModelConfig& model, std::int64_t tokens)
      : keys(HostTensor::random(tokens, model.kv_heads, model.head_dim, model.kv_dtype, 11)),
        values(HostTensor::random(tokens, model.kv_heads, model.head_dim, model.kv_dtype, 12)) {
    std::mt19937_64 random(13);
    std::uniform_real_distribution<float> factor(0.5F, 2.0F);
    const auto row = static_cast<std::size_t>(model.head_dim);
    for (HostTensor* tensor : {&keys, &values}) {
      for (std::size_t i = 0; i < tensor->values().size(); i += row) {
        const float scale = factor(random);
        for (std::size_t x = i; x < i + row; ++x) tensor->set(x, scale * tensor->values()[x]);
      }
    }
  }
  [[nodiscard]] double norm(const HostTensor& tensor, std::int64_t token, int head) const {
    double sum = 0.0;
    for (const float x : tensor.row(token, head)) sum += static_cast<double>(x) * x;
    return std::sqrt(sum);
  }
  HostTensor keys, values;
};

/// What the document says of one query head, in double precision, from its scores.
struct Estimate {
  std::vector<double> order;    ///< Scores of the eligible tokens.
  std::vector<double> weights;  ///< e^logit of each.
  double total = 0.0;           ///< With the exact mass of the tokens always attended.
};

struct Case {
  Selection selection = Selection::kPerQueryHead;
  ValueWeighting weighting = ValueWeighting::kLogit;
  PlaneKind planes = PlaneKind::kOrthogonal;
  int num_planes = 128;
  int query_bits = 0;
  std::int64_t tokens = kTokens;
};

std::string name_of(const Case& c) {
  return std::string(c.selection == Selection::kPerKvHead ? "per KV head" : "per query head") +
         (c.weighting == ValueWeighting::kNone ? ", no value norm" : ", value norm") +
         (c.planes == PlaneKind::kGaussian ? ", gaussian " : ", orthogonal ") +
         std::to_string(c.num_planes) + ", query bits " + std::to_string(c.query_bits);
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {},
      {.selection = Selection::kPerKvHead},
      {.weighting = ValueWeighting::kNone},
      {.selection = Selection::kPerKvHead, .planes = PlaneKind::kGaussian},
      {.num_planes = 160},
      {.selection = Selection::kPerKvHead, .query_bits = 4},
      {.selection = Selection::kPerKvHead,
       .weighting = ValueWeighting::kNone,
       .num_planes = 256,
       .query_bits = 4}};
  return all;
}

class RecallTest : public EngineTest {
 protected:
  void open(const Case& c) {
    Config config = this->config();
    config.model.query_heads = 6;
    config.model.kv_heads = 2;
    config.retrieval.estimator = Estimator::kNormAware;
    config.retrieval.selection = c.selection;
    config.retrieval.value_weighting = c.weighting;
    config.retrieval.plane_kind = c.planes;
    config.retrieval.num_planes = c.num_planes;
    config.retrieval.query_bits = c.query_bits;
    tokens_ = c.tokens;
    config.retrieval.top_k = static_cast<int>(eligible());
    config.retrieval.sink_tokens = kSink;
    config.retrieval.recent_tokens = kRecent;
    config_ = config;
    engine_.emplace(config);
    session_.emplace(engine_->open());
    stored_.emplace(config.model, tokens_);
    session_->append(0, stored_->keys.view(), stored_->values.view());
    query_ = HostTensor::random(1, 6, config.model.head_dim, DType::kFloat32, 17, 1.5F);
  }

  [[nodiscard]] double scale() const { return 1.0 / std::sqrt(config_.model.head_dim); }
  [[nodiscard]] std::int64_t eligible() const { return tokens_ - kSink - kRecent; }
  [[nodiscard]] bool shared() const { return config_.retrieval.selection == Selection::kPerKvHead; }
  [[nodiscard]] oracle::KvView kv(int kv_head) const {
    return kv_view(stored_->keys.values(), stored_->values.values(), config_.model.kv_heads,
                   config_.model.head_dim, kv_head);
  }

  /// Scores of every eligible token of one (query or KV) head, as the library exports them.
  std::vector<double> scores(Selection selection, int head) {
    RetrievalConfig all = config_.retrieval;
    all.selection = selection;
    const int heads = selection == Selection::kPerKvHead ? 2 : 6;
    HostIds ids(1, heads, eligible());
    std::vector<float> found(ids.data.size());
    session_->select(
        0, query_.view(),
        {.ids = ids.view(), .scores = {found.data(), DType::kFloat32, {1, heads, eligible()}}}, {},
        {.retrieval = &all});
    const auto begin = found.begin() + head * eligible();
    return {begin, begin + eligible()};
  }

  /// Section 3 of docs/algorithm.md.
  Estimate estimate(int head, double noise_share) {
    const int kv_head = head / 3;
    const auto d = static_cast<double>(config_.model.head_dim);
    const double planes = config_.retrieval.num_planes;
    Estimate result;
    result.order = scores(Selection::kPerQueryHead, head);
    std::vector<double> logits = result.order;
    double key_square = 0.0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const std::int64_t token = kSink + static_cast<std::int64_t>(i);
      if (config_.retrieval.weighting() == ValueWeighting::kLogit) {
        logits[i] -= std::log(
            oracle::round_to(DType::kFloat16, stored_->norm(stored_->values, token, kv_head)));
      }
      key_square +=
          std::pow(oracle::round_to(DType::kFloat16, stored_->norm(stored_->keys, token, kv_head)),
                   2.0) /
          static_cast<double>(logits.size());
    }
    double query_square = 0.0;
    for (const float x : query_.row(0, head)) query_square += static_cast<double>(x) * x;
    double variance = std::numbers::pi / 2.0 / planes;
    if (config_.retrieval.planes() == PlaneKind::kOrthogonal) {
      const double whole = std::floor(planes / d);
      const double part = planes - whole * d;
      variance -= (whole * d * d + part * part) / (d * planes * planes);
    }
    const double noise = noise_share * scale() * scale() * query_square * key_square * variance;
    double mean = 0.0, spread = 0.0;
    for (const double x : logits) mean += x / static_cast<double>(logits.size());
    for (const double x : logits) {
      spread += (x - mean) * (x - mean) / static_cast<double>(logits.size());
    }
    const double slope = spread > noise ? 1.0 - noise / spread : 0.0;
    const oracle::Attention static_tokens =
        oracle::attend(query_.row(0, head), kv(kv_head), static_tokens_of(), scale());
    result.total = std::exp(static_tokens.lse);
    for (const double x : logits) {
      result.weights.push_back(std::exp(mean + slope * (x - mean) + slope * noise / 2.0));
      result.total += result.weights.back();
    }
    return result;
  }

  [[nodiscard]] std::vector<std::int64_t> static_tokens_of() const {
    std::vector<std::int64_t> tokens;
    for (std::int64_t t = 0; t < kSink; ++t) tokens.push_back(t);
    for (std::int64_t t = tokens_ - kRecent; t < tokens_; ++t) tokens.push_back(t);
    return tokens;
  }

  /// Ids of every head under a target.
  HostIds select(const RecallTarget& target, std::optional<int> top_k = {}) {
    RetrievalConfig retrieval = config_.retrieval;
    if (top_k) retrieval.top_k = *top_k;
    HostIds ids(1, shared() ? 2 : 6, eligible());
    session_->select(0, query_.view(), {.ids = ids.view()}, {},
                     {.retrieval = &retrieval, .recall_target = target});
    return ids;
  }

  /// Mean share left out by a set of one head of `ids`.
  double missed(const std::vector<std::int64_t>& chosen, int head, double noise_share) {
    const int first = shared() ? 3 * head : head;
    const int count = shared() ? 3 : 1;
    double sum = 0.0;
    for (int h = first; h < first + count; ++h) {
      const Estimate found = estimate(h, noise_share);
      double kept = 0.0;
      for (const std::int64_t id : chosen)
        kept += found.weights[static_cast<std::size_t>(id - kSink)];
      const double all = std::accumulate(found.weights.begin(), found.weights.end(), 0.0);
      sum += (all - kept) / found.total / count;
    }
    return sum;
  }

  /// Expects the best tokens of a set, and as few of them as miss what they may.
  void expect_fewest(const std::vector<std::int64_t>& chosen, int head,
                     const RecallTarget& target) {
    const auto k = static_cast<std::int64_t>(chosen.size());
    ASSERT_GE(k, target.min_top_k);
    const auto may_miss = [&](std::int64_t tokens) {
      return (1.0 - target.recall) *
             std::min(1.0, static_cast<double>(tokens) / static_cast<double>(eligible() / 2));
    };
    const std::vector<double> order = scores(config_.retrieval.selection, head);
    std::vector<std::int64_t> best = oracle::top_k(order, k);
    for (std::int64_t& id : best) id += kSink;
    EXPECT_EQ(chosen, best) << "the best tokens by score";
    // Scores, norms and sums are fp32 and fp16 there, double here.
    EXPECT_LE(missed(chosen, head, 0.5), may_miss(k) + 1e-4);
    if (k == target.min_top_k) return;
    std::vector<std::int64_t> fewer = oracle::top_k(order, k - 1);
    for (std::int64_t& id : fewer) id += kSink;
    EXPECT_GT(missed(fewer, head, 0.5), may_miss(k - 1) - 1e-4);
  }

  Config config_;
  std::int64_t tokens_ = kTokens;
  std::optional<Engine> engine_;
  std::optional<Session> session_;
  std::optional<Stored> stored_;
  HostTensor query_;
};

TEST_P(RecallTest, TakesTheFewestTokensThatReachTheTarget) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    open(c);
    for (const double recall : {0.3, 0.8, 0.95, 0.999}) {
      for (const int least : {1, 221}) {
        const RecallTarget target{.recall = recall, .min_top_k = least};
        const HostIds ids = select(target);
        for (int head = 0; head < (shared() ? 2 : 6); ++head) {
          SCOPED_TRACE(::testing::Message()
                       << "recall " << recall << " least " << least << " head " << head);
          expect_fewest(ids.ids(0, head), head, target);
        }
      }
    }
  }
}

// Longer than what any part of a selection takes its references from.
TEST_P(RecallTest, TakesTheFewestOfManyTokens) {
  open({.selection = Selection::kPerKvHead, .num_planes = 256, .query_bits = 4, .tokens = 4'000});
  for (const double recall : {0.5, 0.9}) {
    const RecallTarget target{.recall = recall, .min_top_k = 1};
    const HostIds ids = select(target);
    for (int head = 0; head < 2; ++head) {
      SCOPED_TRACE(::testing::Message() << "recall " << recall << " head " << head);
      expect_fewest(ids.ids(0, head), head, target);
    }
  }
}

TEST_P(RecallTest, StaysBetweenTheLeastAndTheMost) {
  for (const Case& c : {cases()[0], cases()[1]}) {
    SCOPED_TRACE(name_of(c));
    open(c);
    const HostIds most = select({.recall = 0.9999}, 37);
    const HostIds least = select({.recall = 0.0001, .min_top_k = 421});
    const HostIds both = select({.recall = 0.0001, .min_top_k = 50}, 30);
    for (int head = 0; head < (shared() ? 2 : 6); ++head) {
      EXPECT_EQ(most.ids(0, head).size(), 37U);
      EXPECT_EQ(least.ids(0, head).size(), 421U);
      EXPECT_EQ(both.ids(0, head).size(), 30U);
    }
  }
}

TEST_P(RecallTest, TellsWhatWasMissedByTheExactMassOfWhatWasAttended) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    open(c);
    for (const std::optional<RecallTarget>& target :
         {std::optional<RecallTarget>{}, std::optional<RecallTarget>{{.recall = 0.9}},
          std::optional<RecallTarget>{{.recall = 0.9, .min_top_k = 1, .noise_share = 0.0F}}}) {
      RetrievalConfig retrieval = config_.retrieval;
      retrieval.top_k = 60;
      CallTensors call(config_.model, 1, 5);
      call.query = query_;
      HostTensor found(1, 1, 6, DType::kFloat32);
      AttendOutputs outputs = call.outputs(true);
      outputs.missed = {found.mutable_view().data, DType::kFloat32, {1, 6}};
      session_->attend(0, call.attend_inputs(), outputs, {},
                       {.retrieval = &retrieval, .recall_target = target});
      for (int head = 0; head < 6; ++head) {
        const Estimate estimated =
            estimate(head, target ? static_cast<double>(target->noise_share) : 0.5);
        double rest = std::accumulate(estimated.weights.begin(), estimated.weights.end(), 0.0);
        std::vector<std::int64_t> attended = static_tokens_of();
        for (const std::int64_t id : call.ids.ids(0, head)) {
          rest -= estimated.weights[static_cast<std::size_t>(id - kSink)];
          attended.push_back(id);
        }
        std::ranges::sort(attended);
        const double lse = oracle::attend(query_.row(0, head), kv(head / 3), attended, scale()).lse;
        EXPECT_NEAR(found.get(static_cast<std::size_t>(head)), rest / (rest + std::exp(lse)), 1e-4)
            << "head " << head;
      }
      // The same without the log-sum-exp.
      HostTensor again(1, 1, 6, DType::kFloat32);
      outputs.lse = {};
      outputs.missed = {again.mutable_view().data, DType::kFloat32, {1, 6}};
      session_->attend(0, call.attend_inputs(), outputs, {},
                       {.retrieval = &retrieval, .recall_target = target});
      EXPECT_EQ(found.bytes(), again.bytes());
    }
  }
}

TEST_P(RecallTest, MissesNothingWhereEverythingIsAttended) {
  open({});
  CallTensors call(config_.model, 1, 5);
  HostTensor found(1, 1, 6, DType::kFloat32);
  AttendOutputs outputs = call.outputs();
  outputs.missed = {found.mutable_view().data, DType::kFloat32, {1, 6}};
  session_->attend(0, call.attend_inputs(), outputs);
  for (std::size_t head = 0; head < 6; ++head) EXPECT_EQ(found.get(head), 0.0F);
  session_->truncate(kSink + kRecent);
  session_->attend(0, call.attend_inputs(), outputs);
  for (std::size_t head = 0; head < 6; ++head) EXPECT_EQ(found.get(head), 0.0F);
}

TEST_P(RecallTest, EstimatesTheMassOfNormalKeysWithinAFewPercent) {
  open({.num_planes = 256});
  const int steps = 40;
  double error = 0.0, bias = 0.0;
  for (int step = 0; step < steps; ++step) {
    CallTensors call(config_.model, 1, 100 + static_cast<std::uint64_t>(step));
    HostTensor found(1, 1, 6, DType::kFloat32);
    RetrievalConfig retrieval = config_.retrieval;
    retrieval.top_k = 60;
    AttendOutputs outputs = call.outputs();
    outputs.missed = {found.mutable_view().data, DType::kFloat32, {1, 6}};
    // Logits of normal keys have no outliers, which is where all of the noise comes out.
    session_->attend(
        0, call.attend_inputs(), outputs, {},
        {.retrieval = &retrieval,
         .recall_target = RecallTarget{.recall = 0.9999, .min_top_k = 60, .noise_share = 1.0F}});
    std::vector<std::int64_t> everything(static_cast<std::size_t>(kTokens));
    std::iota(everything.begin(), everything.end(), 0);
    for (int head = 0; head < 6; ++head) {
      const double dense =
          oracle::attend(call.query.row(0, head), kv(head / 3), everything, scale()).lse;
      const double attended = call.lse.get(static_cast<std::size_t>(head));
      const double gap = static_cast<double>(found.get(static_cast<std::size_t>(head))) -
                         (1.0 - std::exp(attended - dense));
      error += std::fabs(gap) / (6 * steps);
      bias += gap / (6 * steps);
    }
  }
  EXPECT_LT(error, 0.03);
  EXPECT_LT(std::fabs(bias), 0.01);
}

KVTIER_INSTANTIATE_BACKENDS(RecallTest);

class RecallErrorsTest : public EstimateTest {};

TEST_P(RecallErrorsTest, RejectsEstimatesOfWhatHasNone) {
  const ErrorCode invalid = ErrorCode::kInvalidArgument;
  CallTensors call(model(), 1, 3);
  HostTensor found(1, 1, 4, DType::kFloat32);
  AttendOutputs outputs = call.outputs();
  outputs.missed = {found.mutable_view().data, DType::kFloat32, {1, 4}};
  const auto attend = [&](const AttendInputs& inputs, const AttendOptions& options) {
    return [&, inputs, options] { session_->attend(0, inputs, outputs, {}, options); };
  };
  expect_rejected(invalid, {"missed", "a dense or sliding-window layer"},
                  attend(call.attend_inputs(), {.mode = LayerMode::kDense}));
  HostIds given(1, 4, 3);
  AttendInputs inputs = call.attend_inputs();
  inputs.selected = given.view();
  expect_rejected(invalid, {"missed", "selected ids"}, attend(inputs, {}));
  expect_rejected(invalid, {"missed", "logit_softcap 0", "found 30"},
                  attend(call.attend_inputs(), {.logit_softcap = 30.0F}));
  outputs.missed = {};
  const AttendOptions capped{.logit_softcap = 30.0F, .recall_target = RecallTarget{}};
  expect_rejected(invalid, {"recall_target", "logit_softcap 0", "found 30"},
                  attend(call.attend_inputs(), capped));
  EXPECT_EQ(found.bytes(), HostTensor(1, 1, 4, DType::kFloat32).bytes());
}

KVTIER_INSTANTIATE_BACKENDS(RecallErrorsTest);

}  // namespace
}  // namespace kvtier::testing
