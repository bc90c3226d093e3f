#include "runtime/engine_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

/// What is held when calls succeed, fail and follow each other in any order.
namespace kvtier::testing {
namespace {

class TransactionsTest : public EngineTest {
 protected:
  [[nodiscard]] static std::size_t pages_used(const Engine& engine) {
    return engine.stats().snapshot.pages_used;
  }
};

/// `pages` page frames of 16 tokens.
Config small_pages(Config config, std::size_t pages) {
  config.memory.page_tokens = 16;
  config.memory.host_bytes = pages * 16 * 512;
  return config;
}

TEST_P(TransactionsTest, ReserveTakesPagesOfAllLayersOrOfNone) {
  Config config = small_pages(this->config(), 10);
  config.model.layers = 4;
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 2, 20, 1);
  ASSERT_EQ(pages_used(engine), 2U);

  // Layers 0 and 1 could have the 3 pages that 40 tokens need; layer 2 needs 2 more than it has.
  expect_error(error_of([&] { session.reserve(40); }), ErrorCode::kResourceExhausted, "layer 3");
  EXPECT_EQ(pages_used(engine), 2U);
  EXPECT_EQ(engine.stats().snapshot.sketch_bytes_used, 1024U * 2 * 20);
  const std::optional<Error> advanced = error_of([&] { session.advance(0, 1); });
  EXPECT_TRUE(advanced.has_value()) << "no capacity is left of the failed reserve";

  session.reserve(12);
  EXPECT_EQ(pages_used(engine), 5U);
  session.reserve(12);  // already there
  session.reserve(0);
  EXPECT_EQ(pages_used(engine), 5U);
  append_random(session, config.model, 0, 12, 2);
  EXPECT_EQ(pages_used(engine), 5U) << "appends up to what is reserved take no page";
}

TEST_P(TransactionsTest, AppendsWithinTheLastPageTakeNone) {
  const Config config = small_pages(this->config(), 2);
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, 17, 1);
  for (int i = 0; i < 15; ++i) append_random(session, config.model, 0, 1, 2);
  EXPECT_EQ(session.length(0), 32);
  expect_error(error_of([&] { append_random(session, config.model, 0, 1, 3); }),
               ErrorCode::kResourceExhausted);
  EXPECT_EQ(session.length(0), 32);
}

TEST_P(TransactionsTest, TruncationGivesCapacityBack) {
  const Config config = small_pages(this->config(), 8);
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, 100, 1);
  EXPECT_EQ(pages_used(engine), 7U);
  session.truncate(100);  // the length itself: nothing to drop
  EXPECT_EQ(pages_used(engine), 7U);
  session.truncate(33);
  EXPECT_EQ(pages_used(engine), 3U);
  session.advance(0, 15);  // 48 tokens are held
  EXPECT_EQ(session.length(0), 48);
  EXPECT_EQ(engine.stats().cumulative.tokens_appended, 115U);
  session.truncate(33);
  EXPECT_TRUE(error_of([&] { session.advance(0, 16); }).has_value());

  Session other = engine.open();
  append_random(other, config.model, 0, 80, 2);
  EXPECT_EQ(pages_used(engine), 8U);
  EXPECT_TRUE(error_of([&] { append_random(session, config.model, 0, 16, 3); }).has_value());
  append_random(session, config.model, 0, 15, 3);
  EXPECT_EQ(session.length(0), 48);
}

TEST_P(TransactionsTest, TruncationLeavesShorterLayersAlone) {
  Config config = this->config();
  config.model.layers = 3;
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, 50, 1);
  append_random(session, config.model, 1, 200, 1);
  EXPECT_EQ(session.length(), 0);
  session.truncate(120);
  EXPECT_EQ(session.length(0), 50);
  EXPECT_EQ(session.length(1), 120);
  EXPECT_EQ(session.length(2), 0);
  append_random(session, config.model, 2, 130, 1);
  EXPECT_EQ(session.length(), 50);
}

TEST_P(TransactionsTest, TheMostSessionsOpenAtOnceIsAnError) {
  Config config = this->config();
  config.memory.max_session_tokens = 16;
  config.memory.max_batch_rows = 1;
  config.retrieval.sink_tokens = config.retrieval.recent_tokens = 0;
  Engine engine(config);
  std::vector<Session> sessions;
  std::optional<Error> error;
  while (!error && sessions.size() <= 16384) {
    error = error_of([&] { sessions.push_back(engine.open()); });
  }
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(error->what(), ::testing::HasSubstr("expected at most 16384 open, found 16384"));
  EXPECT_EQ(engine.stats().snapshot.sessions, 16384U);
  sessions.pop_back();
  sessions.push_back(engine.open());
  append_random(sessions.back(), config.model, 0, 16, 1);
}

/// Sessions x layers as plain vectors: what each holds, and how much of the pool.
class Model {
 public:
  static constexpr int kSessions = 2;
  static constexpr int kLayers = 2;
  static constexpr std::int64_t kCapacity = 260;
  static constexpr std::int64_t kPageTokens = 16;

  explicit Model(std::size_t pages) : num_pages_(static_cast<std::int64_t>(pages)) {}

  struct Layer {
    std::vector<float> keys, values;  ///< `[tokens, 2, 64]`, as stored.
    std::int64_t pages = 0;
    [[nodiscard]] std::int64_t length() const {
      return static_cast<std::int64_t>(keys.size()) / (2 * 64);
    }
  };

  static std::int64_t pages_for(std::int64_t tokens) {
    return (tokens + kPageTokens - 1) / kPageTokens;
  }
  [[nodiscard]] std::int64_t used() const {
    std::int64_t pages = 0;
    for (const auto& session : layers_) {
      for (const Layer& layer : session) pages += layer.pages;
    }
    return pages;
  }
  [[nodiscard]] Layer& at(int session, int layer) {
    return layers_[static_cast<std::size_t>(session)][static_cast<std::size_t>(layer)];
  }
  /// Takes pages for more tokens of some layers; returns false with nothing changed when they or
  /// the capacity do not suffice.
  bool grow(int session, int first, int last, std::int64_t tokens) {
    std::int64_t more = 0;
    for (int i = first; i <= last; ++i) {
      const Layer& layer = at(session, i);
      if (layer.length() + tokens > kCapacity) return false;
      more += std::max<std::int64_t>(pages_for(layer.length() + tokens) - layer.pages, 0);
    }
    if (used() + more > num_pages_) return false;
    for (int i = first; i <= last; ++i) {
      Layer& layer = at(session, i);
      layer.pages = std::max(layer.pages, pages_for(layer.length() + tokens));
    }
    return true;
  }
  void append(Layer& layer, const std::vector<float>& keys, const std::vector<float>& values) {
    layer.keys.insert(layer.keys.end(), keys.begin(), keys.end());
    layer.values.insert(layer.values.end(), values.begin(), values.end());
  }
  void truncate(int session, std::int64_t tokens) {
    for (int i = 0; i < kLayers; ++i) {
      Layer& layer = at(session, i);
      if (layer.length() <= tokens) continue;
      layer.keys.resize(static_cast<std::size_t>(tokens) * 2 * 64);
      layer.values.resize(static_cast<std::size_t>(tokens) * 2 * 64);
      layer.pages = pages_for(tokens);
    }
  }

 private:
  std::int64_t num_pages_;
  std::array<std::array<Layer, kLayers>, kSessions> layers_;
};

/// Runs random calls on the engine and the model.
class RandomCalls {
 public:
  RandomCalls(const Config& config, std::uint64_t seed)
      : config_(config),
        engine_(config),
        model_(engine_.stats().snapshot.pages),
        random_(seed),
        seed_(seed) {
    for (int i = 0; i < Model::kSessions; ++i) {
      sessions_.push_back(engine_.open({.capacity_tokens = Model::kCapacity}));
    }
  }

  void step() {
    session_ = pick(0, Model::kSessions - 1);
    layer_ = pick(0, Model::kLayers - 1);
    const int verb = pick(0, 99);
    if (verb < 45) {
      append();
    } else if (verb < 60) {
      truncate();
    } else if (verb < 70) {
      reserve();
    } else {
      attend();
    }
    ASSERT_EQ(session().length(layer_), layer().length());
    ASSERT_EQ(engine_.stats().snapshot.pages_used, static_cast<std::size_t>(model_.used()));
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  Session& session() { return sessions_[static_cast<std::size_t>(session_)]; }
  Model::Layer& layer() { return model_.at(session_, layer_); }
  void expect_exhausted(const std::optional<Error>& error, bool exhausted) {
    ASSERT_EQ(error.has_value(), exhausted) << (error ? error->what() : "no error");
    if (error) {
      EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted) << error->what();
    }
  }

  void append() {
    const std::int64_t tokens = pick(0, 9) == 0 ? pick(40, 120) : pick(1, 20);
    const CallTensors call(config_.model, tokens, ++seed_, DType::kBFloat16, 1);
    const bool fits = model_.grow(session_, layer_, layer_, tokens);
    expect_exhausted(
        error_of([&] { session().append(layer_, call.key.view(), call.value.view()); }), !fits);
    if (fits) model_.append(layer(), call.key.values(), call.value.values());
  }
  void truncate() {
    const std::int64_t longest =
        std::max(model_.at(session_, 0).length(), model_.at(session_, 1).length());
    // Mostly near the end, within the resident window and around it.
    const int most =
        static_cast<int>(pick(0, 3) == 0 ? longest : std::min<std::int64_t>(longest, 50));
    const std::int64_t tokens = longest - pick(0, most);
    session().truncate(tokens);
    model_.truncate(session_, tokens);
  }
  void reserve() {
    const std::int64_t tokens = pick(0, 60);
    const bool fits = model_.grow(session_, 0, Model::kLayers - 1, tokens);
    expect_exhausted(error_of([&] { session().reserve(tokens); }), !fits);
  }
  /// Dense attention, or sparse with room for every token, of one to three queries.
  void attend() {
    const std::int64_t length = layer().length();
    if (length == 0) return;
    const std::int64_t tokens = std::min<std::int64_t>(pick(1, 3), length);
    CallTensors call(config_.model, tokens, ++seed_);
    const LayerMode mode = pick(0, 1) == 0 ? LayerMode::kDense : LayerMode::kSparse;
    session().attend(layer_, call.attend_inputs(), call.outputs(), {}, {.mode = mode});
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::int64_t> visible(static_cast<std::size_t>(length - tokens + 1 + t));
      std::iota(visible.begin(), visible.end(), 0);
      for (int h = 0; h < 4; ++h) {
        const oracle::Attention expected =
            oracle::attend(call.query.row(t, h),
                           kv_view(layer().keys, layer().values, 2, 64, h / 2), visible, 1.0 / 8.0);
        // Rounding of fp32 sums over a few hundred terms.
        ASSERT_LT(oracle::relative_error(call.out.row(t, h), expected.out), 2e-5)
            << "token " << t << " head " << h << " of length " << length;
      }
    }
  }

  Config config_;
  Engine engine_;
  std::vector<Session> sessions_;
  Model model_;
  std::mt19937_64 random_;
  std::uint64_t seed_;
  int session_ = 0;
  int layer_ = 0;
};

TEST_P(TransactionsTest, RandomCallsAgreeWithAModel) {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    for (const KvPlacement placement : {KvPlacement::kHost, KvPlacement::kDevice}) {
      if (seed != 1 && placement == KvPlacement::kDevice) continue;  // one seed of the simpler case
      Config config = small_pages(this->config(), 40);  // too few for what is asked for
      config.model.layers = Model::kLayers;
      config.memory.max_session_tokens = 512;
      config.retrieval.top_k = 512;
      config.retrieval.sink_tokens = 5;
      config.retrieval.recent_tokens = 13;
      config.memory.placement = placement;
      RandomCalls calls(config, seed * 100000);
      for (int i = 0; i < 2000; ++i) {
        SCOPED_TRACE(::testing::Message() << "seed " << seed << " call " << i);
        ASSERT_NO_FATAL_FAILURE(calls.step());
        if (HasFailure()) return;
      }
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(TransactionsTest);

}  // namespace
}  // namespace kvtier::testing
