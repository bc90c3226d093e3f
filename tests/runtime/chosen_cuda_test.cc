#include "runtime/graph_fixture_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

/// Steps of which one kernel selects and attends, against the same steps by a kernel each.
namespace kvtier::testing {
namespace {

struct Shape {
  Estimator estimator = Estimator::kNormAware;
  DType dtype = DType::kBFloat16;
  int query_heads = 8;
  int kv_heads = 2;
  int top_k = 100;
  double sparsity = 0.0;
  float softcap = 0.0F;
  std::vector<std::int64_t> lengths{3000};
};

class ChosenTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major < 9) GTEST_SKIP() << "one kernel selects and attends from compute capability 9 on";
  }

  static Config config_of(const Shape& shape, bool apart) {
    Config config = small_config(Backend::kCuda);
    config.model.query_heads = shape.query_heads;
    config.model.kv_heads = shape.kv_heads;
    config.model.head_dim = 128;
    config.model.kv_dtype = shape.dtype;
    config.model.layer_options = {{.logit_softcap = shape.softcap}};
    config.memory.device_bytes = 400 * MiB;
    config.memory.max_session_tokens = 20'000;
    config.memory.placement = KvPlacement::kDevice;
    config.retrieval = {.estimator = shape.estimator,
                        .rule = SelectionRule::kTopK,
                        .code = SketchCode::kSign,
                        .top_k = shape.top_k,
                        .sparsity = shape.sparsity,
                        .sink_tokens = 20,
                        .recent_tokens = 130};
    config.dense_when_faster = false;
    config.time_stages = apart;  // stages that are timed are kernels of their own
    return config;
  }

  struct Results {
    std::vector<CallTensors> calls;
    Stats::Cumulative counts;
  };

  /// Keys and values of a session.
  struct Prompt {
    HostTensor keys;
    HostTensor values;
  };
  static std::vector<Prompt> prompts_of(const Shape& shape) {
    std::vector<Prompt> prompts;
    for (const std::int64_t length : shape.lengths) {
      const std::uint64_t seed = 5 + 2 * prompts.size();
      prompts.push_back({HostTensor::random(length, shape.kv_heads, 128, shape.dtype, seed),
                         HostTensor::random(length, shape.kv_heads, 128, shape.dtype, seed + 1)});
    }
    return prompts;
  }

  /// Two decodes of a batch of a session per prompt.
  static Results run(const Shape& shape, const std::vector<Prompt>& prompts, bool apart) {
    Engine engine(config_of(shape, apart));
    std::vector<Session> sessions;
    Results results;
    for (const Prompt& prompt : prompts) {
      sessions.push_back(engine.open());
      sessions.back().append(0, prompt.keys.view(), prompt.values.view());
      results.calls.emplace_back(engine.config().model, 1, 50 + sessions.size());
    }
    const Stats::Cumulative before = engine.stats().cumulative;
    for (int step = 0; step < 2; ++step) {
      std::vector<BatchItem> items;
      for (std::size_t i = 0; i < sessions.size(); ++i) {
        CallTensors& call = results.calls[i];
        items.push_back({&sessions[i], call.inputs(), call.outputs(), {}});
      }
      engine.decode(0, items);
    }
    results.counts = engine.stats().cumulative - before;
    return results;
  }

  static void expect_like_apart(const Shape& shape) {
    const std::vector<Prompt> prompts = prompts_of(shape);
    const Results together = run(shape, prompts, false);
    const Results again = run(shape, prompts, false);
    const Results apart = run(shape, prompts, true);
    EXPECT_EQ(together.counts.rows_selected, apart.counts.rows_selected);
    EXPECT_EQ(together.counts.rows_attended, apart.counts.rows_attended);
    for (std::size_t i = 0; i < together.calls.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_TRUE(together.calls[i].same_results(again.calls[i])) << "results repeat";
      expect_near(together.calls[i].out, apart.calls[i].out);
      expect_near(together.calls[i].lse, apart.calls[i].lse);
    }
  }

  static void expect_near(const HostTensor& found, const HostTensor& expected) {
    const std::size_t count = expected.bytes().size() / sizeof(float);
    int wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float x = found.get(i);
      const float y = expected.get(i);
      // A NaN is no number that is near.
      if (!(std::abs(x - y) <= 2e-5F * (1.0F + std::abs(y)))) ++wrong;
    }
    EXPECT_EQ(wrong, 0) << "of " << count;
  }
};

TEST_F(ChosenTest, EverySizeOfAGroup) {
  for (const Estimator estimator : {Estimator::kNormAware, Estimator::kSoftCollision}) {
    for (const int group : {1, 3, 4, 8, 9, 12, 16}) {
      SCOPED_TRACE(group);
      expect_like_apart({.estimator = estimator, .query_heads = 2 * group});
    }
  }
}

TEST_F(ChosenTest, Fp16AndASoftCap) {
  expect_like_apart({.dtype = DType::kFloat16});
  expect_like_apart({.estimator = Estimator::kSoftCollision, .dtype = DType::kFloat16});
  expect_like_apart({.softcap = 5.0F});
}

// More tiles than a block holds at a time, and sets of which a block has no row.
TEST_F(ChosenTest, ManyRowsAndFew) {
  for (const Estimator estimator : {Estimator::kNormAware, Estimator::kSoftCollision}) {
    expect_like_apart({.estimator = estimator, .top_k = 4500, .lengths = {5000}});
    expect_like_apart({.estimator = estimator, .top_k = 1, .lengths = {160, 2000}});
  }
  for (const int group : {4, 8, 16}) {
    expect_like_apart(
        {.query_heads = group, .kv_heads = 1, .top_k = 0, .sparsity = 33.0, .lengths = {17'000}});
  }
}

// Short sequences have nothing to choose from, and share a launch with long ones.
TEST_F(ChosenTest, RaggedBatches) {
  for (const Estimator estimator : {Estimator::kNormAware, Estimator::kSoftCollision}) {
    expect_like_apart({.estimator = estimator, .lengths = {40, 3000, 149, 4000, 151}});
  }
  // A block has several units for each warp, and fewer of the shorter sequence.
  for (const int group : {4, 8, 16}) {
    expect_like_apart({.query_heads = 8 * group, .kv_heads = 8, .lengths = {700, 2000}});
    expect_like_apart({.query_heads = 8 * group, .kv_heads = 8, .lengths = {19'000, 9000}});
  }
}

TEST_F(ChosenTest, ReplaysAreOneKernelBesideTheAppend) {
  for (const Estimator estimator : {Estimator::kNormAware, Estimator::kSoftCollision}) {
    const Shape shape{.estimator = estimator, .query_heads = 32, .kv_heads = 8, .lengths = {3000}};
    const std::vector<Prompt> prompts = prompts_of(shape);
    const Results expected = run(shape, prompts, false);
    Engine engine(config_of(shape, false));
    Session session = engine.open();
    session.append(0, prompts[0].keys.view(), prompts[0].values.view());
    const CallTensors host(engine.config().model, 1, 51);
    const DeviceCall device(host);
    const OwnStream stream;
    session.reserve(2, stream.ref());
    stream.synchronize();
    AttendOutputs outputs = device.outputs();
    outputs.selected = {};

    const Graph graph(stream, [&] { session.decode(0, device.inputs(), outputs, stream.ref()); });
    EXPECT_EQ(graph.num_nodes(), 2U);
    graph.launch(stream);
    graph.launch(stream);
    stream.synchronize();

    EXPECT_EQ(device.out.download(), expected.calls.front().out.bytes());
    EXPECT_EQ(device.lse.download(), expected.calls.front().lse.bytes());
  }
}

}  // namespace
}  // namespace kvtier::testing
