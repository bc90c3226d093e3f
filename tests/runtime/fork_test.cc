#include "runtime/engine_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

/// Forks: what the parent and its children hold, and that none sees what another does.
namespace kvtier::testing {
namespace {

class ForkTest : public EngineTest {
 protected:
  /// Pages of 16 tokens in two layers; everything is scored, and half of it selected.
  [[nodiscard]] Config config() const {
    Config config = EngineTest::config();
    config.model.layers = 2;
    config.memory.page_tokens = 16;
    config.retrieval.sparsity = 2.0;
    return config;
  }
  static Stats::Snapshot snapshot(const Engine& engine) { return engine.stats().snapshot; }

  static void append_all(Session& session, const ModelConfig& model, std::int64_t tokens,
                         std::uint64_t seed) {
    for (int layer = 0; layer < model.layers && tokens > 0; ++layer) {
      append_random(session, model, layer, tokens, seed + static_cast<std::uint64_t>(layer));
    }
  }
  /// Decodes `tokens` tokens in every layer and returns the results.
  static std::vector<CallTensors> decode_all(Session& session, const ModelConfig& model,
                                             std::int64_t tokens, std::uint64_t seed) {
    std::vector<CallTensors> calls;
    for (int layer = 0; layer < model.layers; ++layer) {
      calls.emplace_back(model, tokens, seed + static_cast<std::uint64_t>(layer));
      session.decode(layer, calls.back().inputs(), calls.back().outputs(true));
    }
    return calls;
  }
  static void expect_same(const std::vector<CallTensors>& a, const std::vector<CallTensors>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(a[i].same_results(b[i])) << "layer " << i;
    }
  }
};

TEST_P(ForkTest, EachSessionGivesTheBitsOfOneThatNeverForked) {
  const Config config = this->config();
  // Within a page, at its end, at the end of a block, one past it, nothing.
  for (const std::int64_t tokens : {1000, 992, 1024, 1025, 0}) {
    SCOPED_TRACE(tokens);
    Engine engine(config);
    Session parent = engine.open();
    append_all(parent, config.model, tokens, 1);
    std::vector<Session> family = parent.fork(3);
    family.push_back(std::move(parent));
    // One after another, so that the first copies shared pages and the last writes in place, and
    // twice, so that those before see nothing of it.
    std::vector<std::vector<CallTensors>> found(family.size());
    for (std::size_t round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i < family.size(); ++i) {
        found[i] = decode_all(family[i], config.model, 5, 1000 * (i + 1) + 10 * round);
      }
    }
    for (std::size_t i = 0; i < family.size(); ++i) {
      SCOPED_TRACE(i);
      Session alone = engine.open();
      append_all(alone, config.model, tokens, 1);
      (void)decode_all(alone, config.model, 5, 1000 * (i + 1));
      expect_same(found[i], decode_all(alone, config.model, 5, 1000 * (i + 1) + 10));
      EXPECT_EQ(family[i].length(), tokens + 10);
    }
  }
}

TEST_P(ForkTest, TakesNoPageAndTheMemoryOfOneSessionUntilAChildIsUsed) {
  const Config config = this->config();
  Engine engine(config);
  const std::size_t empty = snapshot(engine).device_bytes;
  Session parent = engine.open();
  const std::size_t one = snapshot(engine).device_bytes - empty;
  append_all(parent, config.model, 1000, 1);
  const Stats::Snapshot before = snapshot(engine);

  std::vector<Session> children = parent.fork(8);
  const Stats::Snapshot after = snapshot(engine);
  EXPECT_EQ(after.pages_used, before.pages_used);
  EXPECT_EQ(after.pages_shared, before.pages_used);
  EXPECT_EQ(after.sketch_bytes_used, before.sketch_bytes_used);
  EXPECT_EQ(after.device_bytes, before.device_bytes + one);
  EXPECT_EQ(after.sessions, 9U);
  for (const Session& child : children) EXPECT_EQ(child.length(), 1000);

  // Each copies one page and one block per layer; the last holder of these writes in place.
  for (Session& child : children) (void)decode_all(child, config.model, 1, 5);
  EXPECT_EQ(snapshot(engine).pages_used, before.pages_used + 16);
  EXPECT_EQ(snapshot(engine).sketch_bytes_used, before.sketch_bytes_used * 9);
  (void)decode_all(parent, config.model, 1, 5);
  EXPECT_EQ(snapshot(engine).pages_used, before.pages_used + 16);
  EXPECT_EQ(snapshot(engine).device_bytes, before.device_bytes + 8 * one)
      << "the last child took over what they began with";
}

TEST_P(ForkTest, GivesEverythingBackInAnyOrderOfClosing) {
  const Config config = this->config();
  Engine engine(config);
  const Stats::Snapshot empty = snapshot(engine);
  for (int order = 0; order < 4; ++order) {
    SCOPED_TRACE(order);
    std::vector<Session> family;
    family.push_back(engine.open());
    append_all(family[0], config.model, 100, 1);
    for (Session& child : family[0].fork(2)) family.push_back(std::move(child));
    for (Session& child : family[2].fork(2)) family.push_back(std::move(child));  // never used
    (void)decode_all(family[3], config.model, 3, 2);
    for (Session& child : family[3].fork(1)) family.push_back(std::move(child));
    while (!family.empty()) {
      const std::size_t i = order == 0 ? 0 : order == 1 ? family.size() - 1 : family.size() / 2;
      if (order == 3) (void)decode_all(family[i], config.model, 3, 4);
      family.erase(family.begin() + static_cast<std::ptrdiff_t>(i));
    }
    const Stats::Snapshot now = snapshot(engine);
    EXPECT_EQ(now.pages_used, 0U);
    EXPECT_EQ(now.pages_shared, 0U);
    EXPECT_EQ(now.sketch_bytes_used, 0U);
    EXPECT_EQ(now.device_bytes, empty.device_bytes);
    EXPECT_EQ(now.sessions, 0U);
  }
}

TEST_P(ForkTest, RewritingTruncatedTokensLeavesTheOthersAlone) {
  const Config config = this->config();
  Engine engine(config);
  Session parent = engine.open();
  append_all(parent, config.model, 300, 1);
  std::vector<Session> children = parent.fork(2);
  // Page 6, full and shared by three, becomes the last page of two of them.
  parent.truncate(100);
  children[0].truncate(100);
  append_all(parent, config.model, 200, 70);
  append_all(children[0], config.model, 200, 80);

  for (const auto& [session, seed] : {std::pair{&parent, 70U}, {children.data(), 80U}}) {
    Session alone = engine.open();
    append_all(alone, config.model, 300, 1);
    alone.truncate(100);
    append_all(alone, config.model, 200, seed);
    expect_same(decode_all(*session, config.model, 2, 9), decode_all(alone, config.model, 2, 9));
  }
  Session alone = engine.open();
  append_all(alone, config.model, 300, 1);
  expect_same(decode_all(children[1], config.model, 2, 9), decode_all(alone, config.model, 2, 9));
}

TEST_P(ForkTest, AChildDecodesInABatchWithItsParent) {
  const Config config = this->config();
  Engine engine(config);
  Session parent = engine.open();
  append_all(parent, config.model, 500, 1);
  std::vector<Session> children = parent.fork(1);
  CallTensors a(config.model, 1, 7), b(config.model, 2, 8);
  const BatchItem items[] = {
      {.session = &parent, .inputs = a.inputs(), .outputs = a.outputs()},
      {.session = children.data(), .inputs = b.inputs(), .outputs = b.outputs()}};
  engine.decode(0, items);

  for (CallTensors* call : {&a, &b}) {
    Session alone = engine.open();
    append_all(alone, config.model, 500, 1);
    CallTensors expected(config.model, call->key.tokens(), call == &a ? 7 : 8);
    alone.decode(0, expected.inputs(), expected.outputs());
    EXPECT_TRUE(call->same_results(expected));
  }
}

TEST_P(ForkTest, NoPageForACopyIsAnErrorThatChangesNothing) {
  Config config = this->config();
  config.model.layers = 1;
  config.memory.host_bytes = 4 * 16 * 512;  // four pages
  Engine engine(config);
  Session parent = engine.open();
  append_random(parent, config.model, 0, 60, 1);
  std::vector<Session> children = parent.fork(1);
  const std::size_t sketch_bytes = snapshot(engine).sketch_bytes_used;

  for (Session* session : {&parent, children.data()}) {
    expect_error(error_of([&] { append_random(*session, config.model, 0, 1, 2); }),
                 ErrorCode::kResourceExhausted,
                 "page pool: expected a free one for the copy of a shared one"
                 " in layer 0, found 0 of 4 (memory.host_bytes)");
    EXPECT_EQ(session->length(), 60);
  }
  EXPECT_EQ(snapshot(engine).pages_used, 4U);
  EXPECT_EQ(snapshot(engine).sketch_bytes_used, sketch_bytes);

  children.clear();
  append_random(parent, config.model, 0, 4, 2);  // alone again: in place
  EXPECT_EQ(snapshot(engine).pages_used, 4U);
}

TEST_P(ForkTest, ReservedPagesStayTheParents) {
  const Config config = this->config();
  Engine engine(config);
  Session parent = engine.open();
  append_all(parent, config.model, 20, 1);
  parent.reserve(100);
  const std::size_t used = snapshot(engine).pages_used;
  std::vector<Session> children = parent.fork(1);
  EXPECT_EQ(snapshot(engine).pages_used, used);
  EXPECT_EQ(snapshot(engine).pages_shared, 4U);
  EXPECT_TRUE(error_of([&] { parent.advance(0, 1); }).has_value())
      << "replays have no room until the shared page is copied";
  parent.reserve(100);
  EXPECT_EQ(snapshot(engine).pages_used, used + 2) << "one page per layer is copied";
  parent.advance(0, 100);
}

TEST_P(ForkTest, ChildrenAreUsedAndClosedByThreadsOfTheirOwn) {
  const Config config = this->config();
  Engine engine(config);
  Session parent = engine.open();
  append_all(parent, config.model, 500, 1);
  Session alone = engine.open();
  append_all(alone, config.model, 500, 1);
  const std::vector<CallTensors> expected = decode_all(alone, config.model, 2, 5);

  std::vector<std::vector<CallTensors>> found(6);
  std::vector<std::thread> threads;
  std::vector<Session> children = parent.fork(static_cast<int>(found.size()));
  for (std::size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i, child = std::move(children[i])]() mutable {
      if (i % 3 == 2) return;  // closed unused
      const Session grandchild = std::move(child.fork(1)[0]);
      found[i] = decode_all(child, config.model, 2, 5);
    });
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (i % 3 != 2) expect_same(found[i], expected);
  }
  expect_same(decode_all(parent, config.model, 2, 5), expected);
}

TEST_P(ForkTest, CountsOutOfRangeAreErrors) {
  const Config config = this->config();
  Engine engine(config);
  Session parent = engine.open();
  for (const int count : {0, -1, 16385}) {
    const std::optional<Error> error = error_of([&] { (void)parent.fork(count); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(std::string(error->what()),
              "count: expected 1..16384, found " + std::to_string(count));
  }
  const Stats::Snapshot before = snapshot(engine);
  expect_error(error_of([&] { (void)parent.fork(16384); }), ErrorCode::kResourceExhausted);
  EXPECT_EQ(snapshot(engine).sessions, 1U);
  EXPECT_EQ(snapshot(engine).device_bytes, before.device_bytes);
  EXPECT_EQ(parent.fork(100).size(), 100U);
}

TEST_P(ForkTest, PagesOnTheDeviceForkTheSameWay) {
  Config config = this->config();
  config.memory.placement = KvPlacement::kDevice;
  Engine engine(config);
  Session parent = engine.open();
  append_all(parent, config.model, 1000, 1);
  std::vector<Session> children = parent.fork(1);
  const std::vector<CallTensors> found = decode_all(children[0], config.model, 3, 5);
  expect_same(decode_all(parent, config.model, 3, 5), found);
  Session alone = engine.open();
  append_all(alone, config.model, 1000, 1);
  expect_same(decode_all(alone, config.model, 3, 5), found);
}

KVTIER_INSTANTIATE_BACKENDS(ForkTest);

}  // namespace
}  // namespace kvtier::testing
