#include "runtime/graph_fixture_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

/// Steps on a caller's stream: captured in a CUDA graph and replayed, or enqueued as they are.
namespace kvtier::testing {
namespace {

class GraphTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kPrompt = 600;
  static constexpr int kReplays = 100;

  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
    open(two_layers());
  }
  void TearDown() override {
    if (engine_) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }
  static Config two_layers() {
    Config config = small_config(Backend::kCuda);
    config.model.layers = 2;
    return config;
  }
  /// Opens a session and a twin with the same prompt.
  void open(const Config& config) {
    session_.reset();
    twin_.reset();
    engine_.emplace(config);
    for (std::optional<Session>* session : {&session_, &twin_}) {
      session->emplace(engine_->open());
      for (int layer = 0; layer < config.model.layers; ++layer) {
        append_random(**session, model(), layer, kPrompt, static_cast<std::uint64_t>(layer) + 1);
      }
    }
    stream_ = std::make_unique<OwnStream>();
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }
  [[nodiscard]] CallTensors call(std::uint64_t seed, std::int64_t tokens = 1) const {
    return {model(), tokens, seed, DType::kBFloat16, 64};
  }
  /// One decode of the twin, from host memory.
  void decode_twin(int layer, CallTensors& host) {
    twin_->decode(layer, host.inputs(), host.outputs(true));
  }
  /// Decodes the same token with both, eagerly and on the stream, and compares.
  void expect_like_twin(std::uint64_t seed) {
    for (int layer = 0; layer < model().layers; ++layer) {
      CallTensors host = call(seed);
      const DeviceCall device(host);
      session_->decode(layer, device.inputs(), device.outputs(), stream_->ref());
      stream_->synchronize();
      decode_twin(layer, host);
      EXPECT_TRUE(device.same_results(host)) << "layer " << layer;
      EXPECT_EQ(session_->length(layer), twin_->length(layer));
    }
  }

  /// Replays a graph of decodes of both layers and compares every one with the twin's.
  void expect_replays_like_twin();

  std::unique_ptr<OwnStream> stream_;
  std::optional<Engine> engine_;
  std::optional<Session> session_;
  std::optional<Session> twin_;
};

void GraphTest::expect_replays_like_twin() {
  session_->reserve(kReplays, stream_->ref());
  const CallTensors first = call(1);
  std::vector<std::unique_ptr<DeviceCall>> fixed;  // of each layer: what the graph reads and writes
  for (int layer = 0; layer < 2; ++layer) fixed.push_back(std::make_unique<DeviceCall>(first));
  std::vector<CallTensors> host;
  std::vector<std::unique_ptr<DeviceCall>> steps;  // inputs and results of each replay and layer
  for (std::uint64_t i = 0; i < 2 * kReplays; ++i) {
    host.push_back(call(100 + i));
    steps.push_back(std::make_unique<DeviceCall>(host.back()));
  }
  const Stats before = engine_->stats();
  stream_->synchronize();

  const Graph graph(*stream_, [&] {
    for (int layer = 0; layer < 2; ++layer) {
      const DeviceCall& io = *fixed[static_cast<std::size_t>(layer)];
      session_->decode(layer, io.inputs(), io.outputs(), stream_->ref());
    }
  });
  EXPECT_EQ(session_->length(), kPrompt) << "a capture runs nothing";
  const Stats captured = engine_->stats();
  EXPECT_EQ(captured.snapshot.pages_used, before.snapshot.pages_used);
  EXPECT_EQ(captured.cumulative.tokens_appended, before.cumulative.tokens_appended);
  EXPECT_EQ(captured.cumulative.queries, before.cumulative.queries);
  // The host enqueues the replays and waits once, at the end.
  for (std::size_t i = 0; i < kReplays; ++i) {
    for (std::size_t layer = 0; layer < 2; ++layer) {
      fixed[layer]->take_inputs(*steps[2 * i + layer], stream_->get());
    }
    graph.launch(*stream_);
    for (std::size_t layer = 0; layer < 2; ++layer) {
      fixed[layer]->give_results(*steps[2 * i + layer], stream_->get());
    }
  }
  stream_->synchronize();

  // Rows are counted on the device, in every replay: 2 layers, 2 KV heads, 64 rows each.
  const Stats::Cumulative replayed = engine_->stats().cumulative - captured.cumulative;
  EXPECT_EQ(replayed.rows_selected, std::uint64_t{kReplays} * 2 * 2 * 64);
  for (std::size_t i = 0; i < kReplays; ++i) {
    for (std::size_t layer = 0; layer < 2; ++layer) {
      CallTensors& expected = host[2 * i + layer];
      decode_twin(static_cast<int>(layer), expected);
      ASSERT_TRUE(steps[2 * i + layer]->same_results(expected))
          << "replay " << i << " layer " << layer;
    }
  }
  EXPECT_EQ(session_->length(), kPrompt) << "the host does not see replays";
  const std::uint64_t appended = engine_->stats().cumulative.tokens_appended;
  for (int layer = 0; layer < 2; ++layer) session_->advance(layer, kReplays);
  EXPECT_EQ(engine_->stats().cumulative.tokens_appended, appended + 2 * kReplays);
  EXPECT_EQ(session_->length(), twin_->length());
  for (std::uint64_t seed = 900; seed < 903; ++seed) expect_like_twin(seed);
}

TEST_F(GraphTest, ReplaysEqualEagerSteps) { expect_replays_like_twin(); }

TEST_F(GraphTest, ReplaysThatReadTheSequenceBeforeTheAppendIsDoneEqualEagerSteps) {
  Config config = two_layers();
  config.memory.placement = KvPlacement::kDevice;
  config.retrieval.estimator = Estimator::kNormAware;
  config.retrieval.recent_tokens = 128;
  open(config);
  expect_replays_like_twin();
}

TEST_F(GraphTest, ReplaysKeepTheRowCache) {
  Config config = two_layers();
  config.memory.row_cache_rows = 128;
  config.memory.row_cache_bytes = MiB;
  open(config);
  session_->reserve(1, stream_->ref());
  stream_->synchronize();
  EXPECT_GT(engine_->stats().snapshot.row_cache_bytes_used, 0U);
  // The twin has cached rows of its own, and others: it is compared with replays, not the same
  // memory.
  expect_replays_like_twin();
  const Stats::Cumulative sum = engine_->stats().cumulative;
  EXPECT_GT(sum.row_cache_hits, 0U);
  EXPECT_GT(sum.row_cache_evictions, 0U);
  // Some of the rows selected are in the ring.
  EXPECT_LE(sum.row_cache_hits + sum.row_cache_misses, sum.rows_selected);
  EXPECT_GT(sum.row_cache_hits + sum.row_cache_misses, sum.rows_selected * 9 / 10);
}

TEST_F(GraphTest, ReplaysOfDenseAndWindowLayersAttendTheGrowingSequence) {
  for (const KvPlacement placement : {KvPlacement::kHost, KvPlacement::kDevice}) {
    Config config = two_layers();
    config.model.layer_options = {
        {.mode = LayerMode::kDense},
        {.mode = LayerMode::kSlidingWindow, .window_tokens = 50},
    };
    config.memory.placement = placement;
    open(config);
    session_->reserve(20, stream_->ref());
    for (int layer = 0; layer < 2; ++layer) {
      const DeviceCall fixed(call(1));
      stream_->synchronize();
      const Graph graph(*stream_, [&] {
        AttendOutputs outputs = fixed.outputs();
        outputs.selected = {};
        session_->decode(layer, fixed.inputs(), outputs, stream_->ref());
      });
      for (std::uint64_t i = 0; i < 20; ++i) {
        CallTensors host = call(50 + i);
        const DeviceCall next(host);
        fixed.take_inputs(next, stream_->get());
        graph.launch(*stream_);
        stream_->synchronize();
        twin_->decode(layer, host.inputs(), host.outputs());
        const std::vector<std::byte> bytes = fixed.out.download();
        for (int h = 0; h < model().query_heads; ++h) {
          std::vector<float> found(64);
          std::memcpy(found.data(), bytes.data() + static_cast<std::size_t>(h) * 256, 256);
          const std::vector<float> expected = host.out.row(0, h);
          // A graph is sized for the capacity, so its sums are split otherwise: fp32 rounding.
          EXPECT_LT(
              oracle::relative_error(found, std::vector<double>(expected.begin(), expected.end())),
              1e-5)
              << "layer " << layer << " replay " << i << " head " << h;
        }
      }
      session_->advance(layer, 20);
    }
  }
}

TEST_F(GraphTest, RecallTargetsAreCapturedToo) {
  Config config = two_layers();
  config.retrieval.estimator = Estimator::kNormAware;
  open(config);
  session_->reserve(10, stream_->ref());
  const AttendOptions options{.recall_target = RecallTarget{.recall = 0.15, .min_top_k = 1}};
  const DeviceCall fixed(call(1));
  const DeviceBytes missed(static_cast<std::size_t>(fixed.query_heads) * sizeof(float));
  const auto with_missed = [&](AttendOutputs outputs, void* data, MemorySpace space) {
    outputs.missed = {data, DType::kFloat32, {1, fixed.query_heads}, space};
    return outputs;
  };
  stream_->synchronize();
  const Graph graph(*stream_, [&] {
    session_->decode(0, fixed.inputs(),
                     with_missed(fixed.outputs(), missed.at(), MemorySpace::kDevice),
                     stream_->ref(), options);
  });
  std::set<std::size_t> sizes;
  for (std::uint64_t i = 0; i < 10; ++i) {
    CallTensors host = call(20 + i);
    const DeviceCall next(host);
    fixed.take_inputs(next, stream_->get());
    graph.launch(*stream_);
    stream_->synchronize();
    HostTensor expected(1, 1, fixed.query_heads, DType::kFloat32);
    twin_->decode(0, host.inputs(),
                  with_missed(host.outputs(true), expected.mutable_view().data, MemorySpace::kHost),
                  {}, options);
    EXPECT_TRUE(fixed.same_results(host)) << "replay " << i;
    EXPECT_EQ(missed.download(), expected.bytes()) << "replay " << i;
    sizes.insert(host.ids.ids(0, 0).size());
  }
  EXPECT_GT(sizes.size(), 1U) << "as many as each query needs";
}

TEST_F(GraphTest, ABatchIsCapturedToo) {
  Session other = engine_->open(), other_twin = engine_->open();
  append_random(other, model(), 0, 333, 7);
  append_random(other_twin, model(), 0, 333, 7);
  session_->reserve(10);
  other.reserve(30);
  const DeviceCall a(call(1)), b(call(2, 3));
  const auto without_ids = [](AttendOutputs outputs) {  // items with ids would not share launches
    outputs.selected = {};
    return outputs;
  };
  const BatchItem items[] = {{&*session_, a.inputs(), without_ids(a.outputs()), {}},
                             {&other, b.inputs(), without_ids(b.outputs()), {}}};
  stream_->synchronize();
  const Graph graph(*stream_, [&] { engine_->decode(0, items, stream_->ref()); });
  for (std::uint64_t i = 0; i < 10; ++i) {
    CallTensors host_a = call(20 + i), host_b = call(40 + i, 3);
    const DeviceCall next_a(host_a), next_b(host_b);
    a.take_inputs(next_a, stream_->get());
    b.take_inputs(next_b, stream_->get());
    graph.launch(*stream_);
    stream_->synchronize();
    const BatchItem twins[] = {{&*twin_, host_a.inputs(), host_a.outputs(), {}},
                               {&other_twin, host_b.inputs(), host_b.outputs(), {}}};
    engine_->decode(0, twins);
    EXPECT_EQ(a.out.download(), host_a.out.bytes()) << "replay " << i;
    EXPECT_EQ(a.lse.download(), host_a.lse.bytes()) << "replay " << i;
    EXPECT_EQ(b.out.download(), host_b.out.bytes()) << "replay " << i;
    EXPECT_EQ(b.lse.download(), host_b.lse.bytes()) << "replay " << i;
  }
}

TEST_F(GraphTest, StagedRowsAreCapturedToo) {
  for (const int staging_rows : {0, 40, 64}) {
    Config config = two_layers();
    config.memory.staging_rows = staging_rows;
    open(config);
    session_->reserve(4);
    const DeviceCall fixed(call(1));
    const Graph graph(
        *stream_, [&] { session_->decode(0, fixed.inputs(), fixed.outputs(), stream_->ref()); });
    CallTensors host = call(30);
    const DeviceCall next(host);
    fixed.take_inputs(next, stream_->get());
    graph.launch(*stream_);
    stream_->synchronize();
    decode_twin(0, host);
    EXPECT_TRUE(fixed.same_results(host)) << "staging_rows " << staging_rows;
    session_->advance(0, 1);
    session_->append(1, fixed.input(fixed.key, 2), fixed.input(fixed.value, 2), stream_->ref());
    CallTensors same = call(30);
    twin_->append(1, same.key.view(), same.value.view());
    expect_like_twin(31);
  }
}

TEST_F(GraphTest, CaptureNeedsRoomThatIsReserved) {
  append_random(*session_, model(), 0, 640 - kPrompt, 9);  // up to the end of a page
  append_random(*twin_, model(), 0, 640 - kPrompt, 9);
  const DeviceCall device(call(1));
  const auto expect_refused = [&](const std::string& part, auto&& enqueue) {
    check(cudaStreamBeginCapture(stream_->get(), cudaStreamCaptureModeGlobal));
    const std::optional<Error> error = error_of(enqueue);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_->get(), &graph), cudaSuccess) << "ends cleanly";
    std::size_t nodes = 1;
    ASSERT_NE(graph, nullptr);
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
    EXPECT_EQ(nodes, 0U);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kFailedPrecondition);
    EXPECT_THAT(error->what(), ::testing::HasSubstr(part));
    EXPECT_THAT(error->what(), ::testing::HasSubstr("expected"));
    EXPECT_THAT(error->what(), ::testing::HasSubstr("found"));
  };

  expect_refused("call reserve before the capture",
                 [&] { session_->decode(0, device.inputs(), device.outputs(), stream_->ref()); });
  const BatchItem item{&*session_, device.inputs(), device.outputs(), {}};
  expect_refused("call reserve before the capture", [&] {
    engine_->decode(0, {&item, 1}, stream_->ref());
  });
  expect_refused("reserve", [&] { session_->reserve(1, stream_->ref()); });
  expect_refused("truncate", [&] { session_->truncate(1, stream_->ref()); });
  EXPECT_EQ(session_->length(0), 640);
  expect_like_twin(5);
}

TEST_F(GraphTest, AdvanceStopsAtWhatWasReserved) {
  session_->reserve(100);
  const std::int64_t pages = (kPrompt + 100 + 63) / 64;
  const std::int64_t room = 64 * pages - kPrompt;
  EXPECT_EQ(error_of([&] { session_->advance(0, room + 1); })->code(), ErrorCode::kInvalidArgument);
  session_->advance(0, room);
  EXPECT_EQ(session_->length(0), 64 * pages);
  session_->truncate(kPrompt);
  expect_like_twin(5);
}

TEST_F(GraphTest, ReplaysPastTheReservationDropTokensAndHarmNothing) {
  append_random(*session_, model(), 0, 640 - kPrompt - 2, 9);
  append_random(*twin_, model(), 0, 640 - kPrompt - 2, 9);
  const DeviceCall fixed(call(1));
  const Graph graph(*stream_, [&] {  // the last page has room for two tokens
    session_->decode(0, fixed.inputs(), fixed.outputs(), stream_->ref());
  });
  for (int i = 0; i < 5; ++i) graph.launch(*stream_);
  stream_->synchronize();
  session_->advance(0, 2);
  EXPECT_EQ(session_->length(0), 640);
  for (int i = 0; i < 2; ++i) {
    CallTensors host = call(1);
    decode_twin(0, host);
  }
  expect_like_twin(6);
}

/// bf16 NaN in one element.
void poke_nan(const DeviceBytes& bytes, std::size_t element) {
  const std::uint16_t nan = 0x7FC0;
  bytes.upload(element * 2, &nan, 2);
}

TEST_F(GraphTest, ForksOnAStreamAndDropsReplaysUntilRoomIsReservedAnew) {
  CallTensors host = call(3);
  const DeviceCall device(host);
  session_->reserve(20, stream_->ref());
  const Graph graph(
      *stream_, [&] { session_->decode(0, device.inputs(), device.outputs(), stream_->ref()); });
  std::vector<Session> children = session_->fork(1, stream_->ref());
  graph.launch(*stream_);  // into the shared page, which must not change
  stream_->synchronize();

  CallTensors from_child = call(4), from_twin = call(4);
  children[0].decode(0, from_child.inputs(), from_child.outputs(true));
  twin_->decode(0, from_twin.inputs(), from_twin.outputs(true));
  EXPECT_TRUE(from_child.same_results(from_twin));
  twin_->truncate(kPrompt);

  session_->reserve(20, stream_->ref());
  graph.launch(*stream_);
  stream_->synchronize();
  session_->advance(0, 1);
  decode_twin(0, host);
  EXPECT_TRUE(device.same_results(host));

  std::vector<Session> more = session_->fork(2, stream_->ref());
  const std::optional<Error> error = error_of([&] {
    const Graph unused(*stream_, [&] {
      more[0].attend(0, device.attend_inputs(), device.outputs(), stream_->ref());
    });
  });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kFailedPrecondition);
}

TEST_F(GraphTest, NonfiniteDeviceTensorsFailTheNextCall) {
  for (const std::string name : {"key", "value", "query"}) {
    SCOPED_TRACE(name);
    CallTensors host = call(3);
    const DeviceCall bad(host), good(host);
    poke_nan(name == "key" ? bad.key : name == "value" ? bad.value : bad.query, 70);
    const std::int64_t length = session_->length(0);
    session_->decode(0, bad.inputs(), bad.outputs(), stream_->ref());
    stream_->synchronize();

    const std::optional<Error> error = error_of(
        [&] { session_->attend(0, good.attend_inputs(), good.outputs(), stream_->ref()); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error->what(), ::testing::HasSubstr("an earlier call"));
    EXPECT_THAT(error->what(), ::testing::HasSubstr(name == "query" ? "1 query tokens"
                                                                    : "1 (token, KV head) pairs"));
    // Element 70 of the first of three tokens.
    const std::string place = name == "query" ? "the query" : "keys or values";
    EXPECT_THAT(error->what(), ::testing::HasSubstr("the first in " + place + " of token " +
                                                    std::to_string(length) + " of layer 0"));
    session_->truncate(length, stream_->ref());
    expect_like_twin(10);  // said once, and forgotten with the token
  }
  EXPECT_EQ(engine_->stats().cumulative.nonfinite_tokens, 2U);
}

TEST_F(GraphTest, AnAppendOfAPromptOnTheDeviceEqualsOneFromTheHost) {
  // From the host it goes in two pieces, and through other memory.
  constexpr std::int64_t kTokens = 8192 + 2100;
  Config config = two_layers();
  config.memory.max_session_tokens = 3 * kPrompt + kTokens;
  config.memory.host_bytes = 32 * MiB;
  open(config);
  for (int layer = 0; layer < config.model.layers; ++layer) {
    CallTensors host(config.model, kTokens, static_cast<std::uint64_t>(layer) + 7, DType::kBFloat16,
                     1);
    const DeviceCall device(host);
    session_->append(layer, device.inputs().key, device.inputs().value, stream_->ref());
    stream_->synchronize();
    twin_->append(layer, host.key.view(), host.value.view());
  }

  expect_like_twin(99);

  for (int layer = 0; layer < config.model.layers; ++layer) {
    EXPECT_EQ(session_->length(layer), kPrompt + kTokens + 1);
  }
}

TEST_F(GraphTest, TheLegacyStreamIsServedEagerly) {
  const StreamRef legacy = StreamRef::of(nullptr);
  for (int layer = 0; layer < 2; ++layer) {
    CallTensors host = call(3);
    const DeviceCall device(host);
    session_->reserve(1, legacy);
    session_->decode(layer, device.inputs(), device.outputs(), legacy);
    check(cudaStreamSynchronize(nullptr));
    decode_twin(layer, host);
    EXPECT_TRUE(device.same_results(host));
  }
  session_->truncate(kPrompt, legacy);
  twin_->truncate(kPrompt);
  expect_like_twin(4);
}

TEST_F(GraphTest, StreamsFollowEachOtherInOrderOfCalls) {
  const OwnStream second;
  std::vector<CallTensors> host;
  std::vector<std::unique_ptr<DeviceCall>> device;
  for (std::uint64_t i = 0; i < 40; ++i) {
    host.push_back(call(60 + i));
    device.push_back(std::make_unique<DeviceCall>(host.back()));
  }
  for (std::size_t i = 0; i < device.size(); ++i) {
    const StreamRef ref = i % 2 == 0 ? stream_->ref() : second.ref();
    session_->decode(0, device[i]->inputs(), device[i]->outputs(), ref);
  }
  session_.reset();  // closing waits for nothing: its pages return after the last step
  stream_->synchronize();
  second.synchronize();

  for (std::size_t i = 0; i < device.size(); ++i) {
    decode_twin(0, host[i]);
    EXPECT_TRUE(device[i]->same_results(host[i])) << "step " << i;
  }
}

}  // namespace
}  // namespace kvtier::testing
