#include "runtime/engine_fixture.h"

#include <gtest/gtest.h>

#include <numeric>

namespace kvtier::testing {
namespace {

/// A sequence on an engine, its tensors, and the oracle's view of them.
class Sequence {
 public:
  Sequence(const Config& config, std::int64_t tokens, DType input, std::uint64_t seed,
           float key_scale = 1.0F)
      : model_(config.model),
        keys_(HostTensor::random(tokens, model_.kv_heads, model_.head_dim, input, seed, key_scale)),
        values_(HostTensor::random(tokens, model_.kv_heads, model_.head_dim, input, seed + 1)),
        stored_keys_(stored(keys_, model_.kv_dtype)),
        stored_values_(stored(values_, model_.kv_dtype)) {}

  void append(Session& session, int layer, std::int64_t begin, std::int64_t count) const {
    session.append(layer, keys_.view(begin, count), values_.view(begin, count));
  }
  [[nodiscard]] oracle::KvView kv(int kv_head) const {
    return kv_view(stored_keys_, stored_values_, model_.kv_heads, model_.head_dim, kv_head);
  }
  [[nodiscard]] const HostTensor& keys() const { return keys_; }
  [[nodiscard]] const HostTensor& values() const { return values_; }

 private:
  ModelConfig model_;
  HostTensor keys_, values_;
  std::vector<float> stored_keys_, stored_values_;
};

/// Rounding of the output dtype, and of fp32 sums over a few thousand terms.
double tolerance(DType out) {
  switch (out) {
    case DType::kBFloat16:
      return 6e-3;
    case DType::kFloat16:
      return 1e-3;
    default:
      return 2e-5;
  }
}

std::vector<std::int64_t> first_tokens(std::int64_t count) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

double default_scale(const Config& config) {
  return 1.0 / std::sqrt(static_cast<double>(config.model.head_dim));
}

class DecodeTest : public EngineTest {};

TEST_P(DecodeTest, EqualsDenseAttentionWhenKCoversTheLength) {
  struct Case {
    DType input, storage;
    int head_dim, query_heads, kv_heads;
  };
  std::vector<Case> cases;
  const DType f32 = DType::kFloat32, f16 = DType::kFloat16, b16 = DType::kBFloat16;
  for (const DType input : {f32, f16, b16}) {
    for (const DType storage : {f16, b16}) {
      for (const int head_dim : {64, 96, 128, 256})
        cases.push_back({input, storage, head_dim, 4, 2});
    }
  }
  for (const int group : {1, 3, 4, 8, 16}) cases.push_back({b16, b16, 128, group, 1});
  for (const Case& c : cases) {
    for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
      SCOPED_TRACE(::testing::Message()
                   << "input " << dtype_name(c.input) << " storage " << dtype_name(c.storage)
                   << " head_dim " << c.head_dim << " heads " << c.query_heads << "/" << c.kv_heads
                   << " selection " << static_cast<int>(selection));
      Config config = this->config();
      config.model.head_dim = c.head_dim;
      config.model.query_heads = c.query_heads;
      config.model.kv_heads = c.kv_heads;
      config.model.kv_dtype = c.storage;
      config.memory.max_session_tokens = 1024;
      config.retrieval.top_k = 1 << 20;
      config.retrieval.selection = selection;
      Engine engine(config);
      Session session = engine.open();
      const Sequence sequence(config, 301, c.input, 7);
      sequence.append(session, 0, 0, 298);
      const HostTensor query = HostTensor::random(3, c.query_heads, c.head_dim, c.input, 99);
      HostTensor out(3, c.query_heads, c.head_dim, c.input);
      HostTensor lse(3, 1, c.query_heads, DType::kFloat32);
      const MutableTensorView lse_view(lse.mutable_view().data, DType::kFloat32,
                                       {3, c.query_heads});

      session.decode(0,
                     {
                         .query = query.view(),
                         .key = sequence.keys().view(298),
                         .value = sequence.values().view(298),
                     },
                     {.out = out.mutable_view(), .lse = lse_view});

      for (std::int64_t t = 0; t < 3; ++t) {
        for (int h = 0; h < c.query_heads; ++h) {
          const oracle::Attention dense =
              oracle::attend(query.row(t, h), sequence.kv(h * c.kv_heads / c.query_heads),
                             first_tokens(299 + t), default_scale(config));
          EXPECT_LT(oracle::relative_error(out.row(t, h), dense.out), tolerance(c.input));
          EXPECT_NEAR(lse.get(static_cast<std::size_t>(t * c.query_heads + h)), dense.lse, 1e-4);
        }
      }
    }
  }
}

/// Options of one estimator run on `EngineTest::config`.
struct EstimatorCase {
  Estimator estimator;
  ValueWeighting weighting;
};
const EstimatorCase kEstimators[] = {
    {Estimator::kSoftCollision, ValueWeighting::kLinear},
    {Estimator::kSoftCollision, ValueWeighting::kCalibrated},
    {Estimator::kSoftCollision, ValueWeighting::kNone},
    {Estimator::kHardCollision, ValueWeighting::kLinear},
    {Estimator::kNormAware, ValueWeighting::kLogit},
    {Estimator::kNormAware, ValueWeighting::kNone},
};

RetrievalConfig retrieval_of(const Config& config, const EstimatorCase& c, Selection selection) {
  RetrievalConfig retrieval = config.retrieval;
  retrieval.estimator = c.estimator;
  retrieval.value_weighting = c.weighting;
  retrieval.selection = selection;
  retrieval.num_planes = 128;
  return retrieval;
}

TEST_P(DecodeTest, OutputIsExactAttentionOverSpansAndReturnedIds) {
  for (const int staging_rows : {0, 40, -1}) {
    for (const KvPlacement placement : {KvPlacement::kHost, KvPlacement::kDevice}) {
      Config config = this->config();
      config.memory.staging_rows = staging_rows;
      config.memory.placement = placement;
      config.extra_sketches = {{.kind = PlaneKind::kOrthogonal, .num_planes = 128, .seed = 0}};
      Engine engine(config);
      Session session = engine.open();
      const Sequence sequence(config, 1500, DType::kBFloat16, 21);
      sequence.append(session, 0, 0, 1490);
      for (const EstimatorCase& c : kEstimators) {
        for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
          SCOPED_TRACE(::testing::Message()
                       << "staging " << staging_rows << " placement " << static_cast<int>(placement)
                       << " estimator " << static_cast<int>(c.estimator) << " weighting "
                       << static_cast<int>(c.weighting) << " selection "
                       << static_cast<int>(selection));
          const RetrievalConfig retrieval = retrieval_of(config, c, selection);
          const HostTensor query = HostTensor::random(10, 4, 64, DType::kBFloat16, 5);
          HostTensor out(10, 4, 64, DType::kFloat32);
          HostIds ids(10, 4, 64);
          session.decode(0,
                         {
                             .query = query.view(),
                             .key = sequence.keys().view(1490),
                             .value = sequence.values().view(1490),
                         },
                         {.out = out.mutable_view(), .selected = ids.view()}, {},
                         {.retrieval = &retrieval});

          for (std::int64_t t = 0; t < 10; ++t) {
            const oracle::Visible visible =
                oracle::visible_tokens({.sink = 16, .recent = 16}, 1500, 9 - t);
            for (int h = 0; h < 4; ++h) {
              std::vector<std::int64_t> attended = ids.ids(t, h);
              ASSERT_EQ(attended.size(), 64U);
              attended.insert(attended.end(), visible.static_tokens.begin(),
                              visible.static_tokens.end());
              std::sort(attended.begin(), attended.end());
              ASSERT_EQ(std::adjacent_find(attended.begin(), attended.end()), attended.end());
              ASSERT_LT(attended.back(), 1491 + t);
              const oracle::Attention exact = oracle::attend(query.row(t, h), sequence.kv(h / 2),
                                                             attended, default_scale(config));
              ASSERT_LT(oracle::relative_error(out.row(t, h), exact.out), 2e-5);
            }
          }
          session.truncate(1490);
        }
      }
    }
  }
}

TEST_P(DecodeTest, SelectReturnsWhatAttendUsesAndItsScores) {
  const Config config = this->config();
  Engine engine(config);
  Session session = engine.open();
  const Sequence sequence(config, 900, DType::kFloat32, 3);
  sequence.append(session, 0, 0, 900);
  const HostTensor query = HostTensor::random(2, 4, 64, DType::kFloat32, 4);
  HostTensor out(2, 4, 64, DType::kFloat32);
  HostIds used(2, 2, 64), chosen(2, 2, 70);
  HostTensor scores(2, 2, 70, DType::kFloat32);

  session.attend(0, {.query = query.view()}, {.out = out.mutable_view(), .selected = used.view()});
  session.select(0, query.view(), {.ids = chosen.view(), .scores = scores.mutable_view()});

  for (std::int64_t t = 0; t < 2; ++t) {
    for (int h = 0; h < 2; ++h) {
      EXPECT_EQ(chosen.ids(t, h), used.ids(t, h));
      for (std::size_t i = 0; i < 70; ++i) {
        const float score = scores.get(static_cast<std::size_t>((t * 2 + h) * 70) + i);
        EXPECT_EQ(std::isfinite(score), i < 64) << score;
      }
    }
  }
}

TEST_P(DecodeTest, CallersIdsReplaceScoring) {
  const Config config = this->config();
  Engine engine(config);
  Session session = engine.open();
  const Sequence sequence(config, 700, DType::kFloat32, 31);
  sequence.append(session, 0, 0, 700);
  const HostTensor query = HostTensor::random(1, 4, 64, DType::kFloat32, 32);
  HostTensor out(1, 4, 64, DType::kFloat32);
  HostIds ids(1, 2, 4);
  // A duplicate, a sink token, a future token and padding count for nothing.
  ids.data = {500, 20, 500, -1, 3, 699, 900, 40};

  session.attend(0, {.query = query.view(), .selected = ids.view()}, {.out = out.mutable_view()});

  const std::vector<std::int64_t> picked[2] = {{20, 500}, {40}};
  const oracle::Visible visible = oracle::visible_tokens({.sink = 16, .recent = 16}, 700, 0);
  for (int h = 0; h < 4; ++h) {
    std::vector<std::int64_t> attended = picked[h / 2];
    attended.insert(attended.end(), visible.static_tokens.begin(), visible.static_tokens.end());
    const oracle::Attention exact =
        oracle::attend(query.row(0, h), sequence.kv(h / 2), attended, default_scale(config));
    EXPECT_LT(oracle::relative_error(out.row(0, h), exact.out), 2e-5);
  }
}

TEST_P(DecodeTest, SpansFollowModeScaleCapAndDenseFrom) {
  Config config = this->config();
  config.model.layers = 3;
  config.model.layer_options = {
      {.mode = LayerMode::kSparse},
      {.mode = LayerMode::kDense, .softmax_scale = 0.3F},
      {.mode = LayerMode::kSlidingWindow, .window_tokens = 37, .logit_softcap = 2.0F}};
  config.retrieval.top_k = 1;
  Engine engine(config);
  Session session = engine.open();
  const Sequence sequence(config, 400, DType::kFloat32, 11);
  for (int layer = 0; layer < 3; ++layer) sequence.append(session, layer, 0, 400);
  const HostTensor query = HostTensor::random(2, 4, 64, DType::kFloat32, 12);

  struct Expectation {
    int layer;
    oracle::VisibleRule rule;
    double scale, cap;
    AttendOptions options;
  };
  const double scale = default_scale(config);
  const std::vector<Expectation> expectations = {
      {0, {.sink = 16, .recent = 16, .dense_from = 100}, scale, 0, {.dense_from = 100}},
      {1, {.mode = LayerMode::kDense}, 0.3F, 0, {}},
      {1,
       {.mode = LayerMode::kDense},
       0.25F,
       5.0F,
       {.softmax_scale = 0.25F, .logit_softcap = 5.0F}},
      {2, {.mode = LayerMode::kSlidingWindow, .window = 37}, scale, 2.0F, {}},
      {0, {.mode = LayerMode::kDense}, scale, 0, {.mode = LayerMode::kDense}}};
  for (const Expectation& e : expectations) {
    HostTensor out(2, 4, 64, DType::kFloat32);
    HostIds ids(2, 4, 1);
    const bool sparse = e.rule.mode == LayerMode::kSparse;
    session.attend(e.layer, {.query = query.view()},
                   {.out = out.mutable_view(), .lse = {}, .selected = ids.view()}, {}, e.options);
    for (std::int64_t t = 0; t < 2; ++t) {
      for (int h = 0; h < 4; ++h) {
        std::vector<std::int64_t> attended =
            oracle::visible_tokens(e.rule, 400, 1 - t).static_tokens;
        ASSERT_EQ(ids.ids(t, h).size(), sparse ? 1U : 0U) << "layer " << e.layer;
        if (sparse) attended.push_back(ids.ids(t, h).at(0));
        const oracle::Attention exact =
            oracle::attend(query.row(t, h), sequence.kv(h / 2), attended, e.scale, e.cap);
        EXPECT_LT(oracle::relative_error(out.row(t, h), exact.out), 2e-5) << "layer " << e.layer;
      }
    }
  }
}

TEST_P(DecodeTest, RaggedBatchEqualsSingleSessions) {
  Config config = this->config();
  config.memory.max_batch_rows = 5;
  Engine engine(config);
  const std::int64_t lengths[] = {1, 33, 700, 64, 1300};
  const std::int64_t tokens[] = {1, 4, 2, 1, 7};
  std::vector<Session> batched, single;
  std::vector<Sequence> sequences;
  std::vector<HostTensor> queries, batch_out, single_out;
  for (std::size_t i = 0; i < 5; ++i) {
    sequences.emplace_back(config, lengths[i] + tokens[i], DType::kBFloat16, 100 + i);
    queries.push_back(HostTensor::random(tokens[i], 4, 64, DType::kBFloat16, 200 + i));
    batch_out.emplace_back(tokens[i], 4, 64, DType::kFloat32);
    single_out.emplace_back(tokens[i], 4, 64, DType::kFloat32);
    for (std::vector<Session>* sessions : {&batched, &single}) {
      sessions->push_back(engine.open());
      sequences[i].append(sessions->back(), 0, 0, lengths[i]);
    }
  }
  std::vector<BatchItem> items;
  for (std::size_t i = 0; i < 5; ++i) {
    const DecodeInputs inputs{
        .query = queries[i].view(),
        .key = sequences[i].keys().view(lengths[i]),
        .value = sequences[i].values().view(lengths[i]),
    };
    AttendOptions options;
    if (i == 3) options.softmax_scale = 0.5F;
    items.push_back({.session = &batched[i],
                     .inputs = inputs,
                     .outputs = {.out = batch_out[i].mutable_view()},
                     .options = options});
    single[i].decode(0, inputs, {.out = single_out[i].mutable_view()}, {}, options);
  }

  engine.decode(0, items);

  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(batched[i].length(0), lengths[i] + tokens[i]);
    for (std::int64_t t = 0; t < tokens[i]; ++t) {
      for (int h = 0; h < 4; ++h) {
        const std::vector<float> expected = single_out[i].row(t, h);
        const std::vector<double> as_double(expected.begin(), expected.end());
        // Splits depend on the longest of a launch, so sums may be grouped differently.
        EXPECT_LT(oracle::relative_error(batch_out[i].row(t, h), as_double), 1e-5) << i;
      }
    }
  }
}

TEST_P(DecodeTest, AppendInPiecesTruncateAndLongDecodeKeepTheSequence) {
  Config config = this->config();
  config.memory.page_tokens = 16;
  config.retrieval.top_k = 1 << 20;
  Engine engine(config);
  Session session = engine.open();
  const Sequence sequence(config, 420, DType::kFloat16, 61);
  const HostTensor query = HostTensor::random(420, 4, 64, DType::kFloat16, 62);
  std::int64_t length = 0;
  const auto decode_until = [&](std::int64_t end, std::int64_t step) {
    while (length < end) {
      const std::int64_t count = std::min(step, end - length);
      HostTensor out(count, 4, 64, DType::kFloat32);
      session.decode(0,
                     {
                         .query = query.view(length, count),
                         .key = sequence.keys().view(length, count),
                         .value = sequence.values().view(length, count),
                     },
                     {.out = out.mutable_view()});
      length += count;
      ASSERT_EQ(session.length(0), length);
      for (std::int64_t t = 0; t < count; ++t) {
        const oracle::Attention dense =
            oracle::attend(query.row(length - count + t, 3), sequence.kv(1),
                           first_tokens(length - count + t + 1), default_scale(config));
        ASSERT_LT(oracle::relative_error(out.row(t, 3), dense.out), 2e-5) << "length " << length;
      }
    }
  };
  const auto truncate = [&](std::int64_t tokens) {
    session.truncate(tokens);
    length = tokens;
  };
  decode_until(100, 1);
  decode_until(260, 13);
  truncate(250);
  decode_until(300, 1);
  truncate(90);
  decode_until(420, 29);
  truncate(0);
  decode_until(40, 3);
}

TEST_P(DecodeTest, RunsGiveBitIdenticalResults) {
  const Config config = this->config();
  std::vector<std::byte> first;
  for (int run = 0; run < 2; ++run) {
    Engine engine(config);
    Session session = engine.open();
    const Sequence sequence(config, 1200, DType::kBFloat16, 77);
    sequence.append(session, 0, 0, 1200);
    const HostTensor query = HostTensor::random(9, 4, 64, DType::kBFloat16, 78);
    HostTensor out(9, 4, 64, DType::kFloat32);
    session.attend(0, {.query = query.view()}, {.out = out.mutable_view()});
    if (run == 0) first = out.bytes();
    EXPECT_EQ(out.bytes(), first);
  }
}

TEST_P(DecodeTest, MergedHalvesEqualTheWhole) {
  Config config = this->config();
  config.model.layer_options = {{.mode = LayerMode::kDense}};
  Engine engine(config);
  Session whole = engine.open(), left = engine.open(), right = engine.open();
  const Sequence sequence(config, 500, DType::kFloat32, 41);
  sequence.append(whole, 0, 0, 500);
  sequence.append(left, 0, 0, 200);
  sequence.append(right, 0, 200, 300);
  const HostTensor query = HostTensor::random(1, 4, 64, DType::kFloat32, 42);
  HostTensor out(1, 4, 64, DType::kFloat32);
  HostTensor parts[2] = {{1, 4, 64, DType::kFloat32}, {1, 4, 64, DType::kFloat32}};
  HostTensor lses[2] = {{1, 1, 4, DType::kFloat32}, {1, 1, 4, DType::kFloat32}};
  const auto lse_view = [](HostTensor& lse) {
    return MutableTensorView(lse.mutable_view().data, DType::kFloat32, {1, 4});
  };
  left.attend(0, {query.view(), {}}, {parts[0].mutable_view(), lse_view(lses[0]), {}});
  right.attend(0, {query.view(), {}}, {parts[1].mutable_view(), lse_view(lses[1]), {}});
  const PartialResult partials[2] = {{parts[0].mutable_view(), lse_view(lses[0])},
                                     {parts[1].mutable_view(), lse_view(lses[1])}};

  engine.merge(partials, {out.mutable_view(), {}, {}});

  for (int h = 0; h < 4; ++h) {
    const oracle::Attention dense = oracle::attend(query.row(0, h), sequence.kv(h / 2),
                                                   first_tokens(500), default_scale(config));
    EXPECT_LT(oracle::relative_error(out.row(0, h), dense.out), 2e-5);
  }
}

KVTIER_INSTANTIATE_BACKENDS(DecodeTest);

}  // namespace
}  // namespace kvtier::testing
