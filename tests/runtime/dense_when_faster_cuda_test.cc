#include "runtime/graph_fixture_cuda.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>

/// Sparse layers with KV on the GPU that attend to all tokens, because that is faster.
namespace kvtier::testing {
namespace {

/// Two KV heads of sixteen query heads, of which no path selects in the time that dense attention
/// to so few tokens takes.
class DenseWhenFasterTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 16'400;

  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
  }

  static Config config_of(LayerMode mode = LayerMode::kSparse) {
    Config config = small_config(Backend::kCuda);
    config.model.query_heads = 32;
    config.model.kv_heads = 2;
    config.model.head_dim = 128;
    config.model.layer_options = {{.mode = mode}};
    config.memory.device_bytes = 600 * MiB;
    config.memory.host_bytes = 40 * MiB;
    config.memory.max_session_tokens = 18'000;
    config.memory.placement = KvPlacement::kDevice;
    config.retrieval = RetrievalConfig{.top_k = 500};
    return config;
  }

  /// Keys and values alone, made once: queries of so many tokens take seconds to draw.
  static void append(Session& session, std::int64_t tokens = kTokens) {
    static const HostTensor keys = HostTensor::random(kTokens, 2, 128, DType::kBFloat16, 7);
    static const HostTensor values = HostTensor::random(kTokens, 2, 128, DType::kBFloat16, 8);
    const auto first = [&](const HostTensor& tensor) {
      TensorView view = tensor.view();
      view.shape[0] = tokens;
      return view;
    };
    session.append(0, first(keys), first(values));
  }

  struct Result {
    CallTensors call;
    Stats::Cumulative counts;
  };

  /// A decode behind `tokens` tokens.
  static Result decode(const Config& config, std::int64_t tokens = kTokens,
                       const AttendOptions& options = {}, bool with_ids = false) {
    Engine engine(config);
    Session session = engine.open();
    append(session, tokens);
    Result result{CallTensors(config.model, 1, 9), {}};
    const Stats::Cumulative before = engine.stats().cumulative;
    session.decode(0, result.call.inputs(), result.call.outputs(with_ids), {}, options);
    result.counts = engine.stats().cumulative - before;
    return result;
  }
  static void expect_sparse(const Result& result) {
    EXPECT_EQ(result.counts.queries, 1U);
    EXPECT_EQ(result.counts.dense_queries, 0U);
    EXPECT_GT(result.counts.rows_selected, 0U);
    EXPECT_LT(result.counts.rows_attended, 2U * kTokens);
  }
};

TEST_F(DenseWhenFasterTest, AttendsToAllTokensAndSaysSo) {
  const Result found = decode(config_of());
  const Result dense = decode(config_of(LayerMode::kDense));
  EXPECT_TRUE(found.call.same_results(dense.call));
  EXPECT_EQ(found.counts.queries, 1U);
  EXPECT_EQ(found.counts.dense_queries, 1U);
  EXPECT_EQ(found.counts.rows_selected, 0U);
  EXPECT_EQ(found.counts.rows_attended, 2U * (kTokens + 1));
  EXPECT_EQ(dense.counts.dense_queries, 0U) << "a dense layer is what the caller asked for";
}

TEST_F(DenseWhenFasterTest, MayBeTurnedOff) {
  Config config = config_of();
  config.dense_when_faster = false;
  expect_sparse(decode(config));
  expect_sparse(decode(config_of(), kTokens, {.mode = LayerMode::kSparse}));
}

TEST_F(DenseWhenFasterTest, IsForNoCallThatAsksWhatWasSelected) {
  expect_sparse(decode(config_of(), kTokens, {}, /*with_ids=*/true));
  Config config = config_of();
  config.retrieval.estimator = Estimator::kNormAware;
  Engine engine(config);
  Session session = engine.open();
  append(session);
  CallTensors call(config.model, 1, 9);
  HostTensor missed(1, 1, 32, DType::kFloat32);
  AttendOutputs outputs = call.outputs();
  outputs.missed = {missed.mutable_view().data, DType::kFloat32, {1, 32}};
  session.attend(0, call.attend_inputs(), outputs);
  EXPECT_EQ(engine.stats().cumulative.dense_queries, 0U);
  EXPECT_GT(missed.get(0), 0.0F);
}

TEST_F(DenseWhenFasterTest, IsForNoShortSequenceAndNoKvOnTheHost) {
  expect_sparse(decode(config_of(), 16'000));
  Config config = config_of();
  config.memory.placement = KvPlacement::kHost;
  expect_sparse(decode(config));
}

TEST_F(DenseWhenFasterTest, ReplaysAttendToAllTokensOfTheGrowingSequence) {
  constexpr int kReplays = 3;
  const Config config = config_of();
  Engine engine(config);
  Session session = engine.open();
  append(session);
  Engine twin_engine(config_of(LayerMode::kDense));
  Session twin = twin_engine.open();
  append(twin);
  const OwnStream stream;
  session.reserve(kReplays, stream.ref());
  const DeviceCall fixed(CallTensors(config.model, 1, 1));
  stream.synchronize();
  const Graph graph(stream, [&] {
    AttendOutputs outputs = fixed.outputs();
    outputs.selected = {};
    session.decode(0, fixed.inputs(), outputs, stream.ref());
  });
  for (std::uint64_t i = 0; i < kReplays; ++i) {
    CallTensors host(config.model, 1, 20 + i);
    fixed.take_inputs(DeviceCall(host), stream.get());
    stream.synchronize();
    graph.launch(stream);
    stream.synchronize();
    twin.decode(0, host.inputs(), host.outputs());
    CallTensors found(config.model, 1, 20 + i);
    fixed.download(found);
    for (std::size_t j = 0; j < 32 * 128; ++j) {
      ASSERT_NEAR(found.out.get(j), host.out.get(j), 1e-5F) << "replay " << i << ", value " << j;
    }
    for (std::size_t j = 0; j < 32; ++j) {
      ASSERT_NEAR(found.lse.get(j), host.lse.get(j), 1e-5F) << "replay " << i << ", head " << j;
    }
  }
  const Stats::Cumulative counts = engine.stats().cumulative;
  EXPECT_EQ(counts.rows_selected, 0U);
  EXPECT_EQ(counts.rows_attended, 2U * (3 * kTokens + 1 + 2 + 3));
  EXPECT_EQ(counts.dense_queries, counts.queries) << "neither counts replays";
}

}  // namespace
}  // namespace kvtier::testing
