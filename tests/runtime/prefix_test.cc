#include "runtime/engine_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

/// Stored prefixes: which sessions begin with which tokens, what is held, and what goes first.
namespace kvtier::testing {
namespace {

using Ids = std::vector<std::int32_t>;

Ids iota(std::size_t count, std::int32_t first = 0) {
  Ids ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

class PrefixTest : public EngineTest {
 protected:
  [[nodiscard]] Config config() const {
    Config config = EngineTest::config();
    config.model.layers = 2;
    config.memory.page_tokens = 16;
    config.retrieval.sparsity = 2.0;
    return config;
  }
  static Stats::Snapshot snapshot(const Engine& engine) { return engine.stats().snapshot; }

  /// Keys and values that depend on the token's id alone, in every layer.
  static HostTensor rows(const ModelConfig& model, std::span<const std::int32_t> ids,
                         std::uint64_t seed) {
    HostTensor tensor(static_cast<std::int64_t>(ids.size()), model.kv_heads, model.head_dim,
                      DType::kBFloat16);
    const auto width = static_cast<std::size_t>(model.kv_heads * model.head_dim);
    for (std::size_t t = 0; t < ids.size(); ++t) {
      std::mt19937_64 engine(seed * 1'000'003 + static_cast<std::uint64_t>(ids[t]));
      std::normal_distribution<float> normal;
      for (std::size_t i = 0; i < width; ++i) tensor.set(t * width + i, normal(engine));
    }
    return tensor;
  }
  static void append_ids(Session& session, const ModelConfig& model,
                         std::span<const std::int32_t> ids) {
    if (ids.empty()) return;
    for (int layer = 0; layer < model.layers; ++layer) {
      const HostTensor keys = rows(model, ids, 2 * static_cast<std::uint64_t>(layer));
      const HostTensor values = rows(model, ids, 2 * static_cast<std::uint64_t>(layer) + 1);
      session.append(layer, keys.view(), values.view());
    }
  }
  /// Opens a session, and appends the tokens that no stored prefix has.
  static Session open_with(Engine& engine, const Ids& ids, std::string_view secret = "") {
    Session session = engine.open({.token_ids = ids, .tenant_secret = secret});
    append_ids(session, engine.config().model,
               std::span(ids).subspan(static_cast<std::size_t>(session.length())));
    return session;
  }
  static std::int64_t attached(Engine& engine, const Ids& ids, std::string_view secret = "") {
    return engine.open({.token_ids = ids, .tenant_secret = secret}).length();
  }
  /// Decodes the same tokens with both, in every layer, and compares bits.
  static void expect_same(Session& a, Session& b, const ModelConfig& model, std::uint64_t seed) {
    for (int layer = 0; layer < model.layers; ++layer) {
      CallTensors x(model, 3, seed), y(model, 3, seed);
      a.decode(layer, x.inputs(), x.outputs(true));
      b.decode(layer, y.inputs(), y.outputs(true));
      EXPECT_TRUE(x.same_results(y)) << "layer " << layer;
    }
  }
};

TEST_P(PrefixTest, AnAttachedSessionGivesTheBitsOfOneThatAppendedEverything) {
  const Config config = this->config();
  // Less than the sinks, a few pages, a whole block, into the second block.
  for (const std::size_t stored : {16U, 160U, 1024U, 1200U}) {
    SCOPED_TRACE(stored);
    Engine engine(config);
    const Ids ids = iota(1500);
    {
      Session publisher = open_with(engine, ids);
      publisher.publish(std::span(ids).first(stored + 7));
      append_ids(publisher, config.model, iota(40, 9000));  // copies what is shared
    }
    EXPECT_EQ(snapshot(engine).prefix_tokens, stored);
    Session session = engine.open({.token_ids = ids});
    ASSERT_EQ(session.length(), static_cast<std::int64_t>(stored));
    const std::size_t used = snapshot(engine).pages_used;
    append_ids(session, config.model, std::span(ids).subspan(stored));
    EXPECT_EQ(snapshot(engine).pages_used, used + 2 * ((1500 - stored + 15) / 16));

    Engine other(config);
    Session alone = open_with(other, ids);
    expect_same(session, alone, config.model, 3);
    Session again = engine.open({.token_ids = ids});
    append_ids(again, config.model, std::span(ids).subspan(stored));
    Session fresh = open_with(other, ids);
    expect_same(again, fresh, config.model, 4);
  }
}

TEST_P(PrefixTest, TheLongestRunOfWholePagesIsFound) {
  Engine engine(config());
  const Ids ids = iota(200);
  Session publisher = open_with(engine, ids);
  EXPECT_EQ(attached(engine, ids), 0) << "nothing is published yet";
  publisher.publish(std::span(ids).first(100));
  EXPECT_EQ(attached(engine, ids), 96);
  EXPECT_EQ(attached(engine, iota(95)), 80);
  EXPECT_EQ(attached(engine, iota(15)), 0);
  EXPECT_EQ(attached(engine, {}), 0);
  Ids other = ids;
  other[50] = 7777;
  EXPECT_EQ(attached(engine, other), 48);
  other[0] = 7777;
  EXPECT_EQ(attached(engine, other), 0);
  publisher.publish(ids);
  EXPECT_EQ(attached(engine, ids), 192);
  EXPECT_EQ(engine.open({.capacity_tokens = 50, .token_ids = ids}).length(), 48);

  const Stats::Cumulative sum = engine.stats().cumulative;
  EXPECT_EQ(sum.prefix_tokens_attached, 96U + 80 + 48 + 192 + 48);
  EXPECT_EQ(sum.prefix_tokens_asked, 200U + 200 + 200 + 95 + 15 + 200 + 200 + 200 + 200);
  EXPECT_EQ(sum.prefix_tokens_evicted, 0U);
}

TEST_P(PrefixTest, NoOtherSecretAndNoOtherModelFindsAPrefix) {
  Config config = this->config();
  Engine engine(config);
  const Ids ids = iota(64);
  Session publisher = open_with(engine, ids, "tenant a");
  publisher.publish(ids);
  EXPECT_EQ(attached(engine, ids, "tenant a"), 64);
  EXPECT_EQ(attached(engine, ids, "tenant b"), 0);
  EXPECT_EQ(attached(engine, ids, ""), 0);
  EXPECT_EQ(
      engine.open({.token_ids = ids, .tenant_secret = "tenant a", .model_fingerprint = "another"})
          .length(),
      0);
  Session child = std::move(publisher.fork(1)[0]);
  append_ids(child, config.model, iota(16, 64));
  child.publish(iota(80));
  EXPECT_EQ(attached(engine, iota(80), "tenant a"), 80) << "a child is of its parent's tenant";
}

TEST_P(PrefixTest, IdenticalPagesAreHeldOnce) {
  const Config config = this->config();
  Engine engine(config);
  const Ids ids = iota(1100);
  // Neither finds anything stored, so both have pages of their own until they publish.
  std::vector<Session> sessions;
  for (int i = 0; i < 3; ++i) sessions.push_back(open_with(engine, ids));
  const std::size_t pages = snapshot(engine).pages_used;
  const std::size_t sketches = snapshot(engine).sketch_bytes_used;
  for (Session& session : sessions) session.publish(ids);
  EXPECT_EQ(snapshot(engine).prefix_tokens, 1088U);
  EXPECT_EQ(snapshot(engine).pages_used, 2U * (68 + 3)) << "68 in common, one each of their own";
  EXPECT_EQ(pages, 2U * 3 * 69);
  // The first block is in common; of the second each has its own, for it is not full.
  EXPECT_EQ(snapshot(engine).sketch_bytes_used, sketches / 6 * 4);
  sessions[0].publish(ids);  // again: nothing new
  EXPECT_EQ(snapshot(engine).pages_used, 2U * (68 + 3));

  Engine other(config);
  for (Session& session : sessions) {
    Session alone = open_with(other, ids);
    expect_same(session, alone, config.model, 5);
  }
  sessions.clear();
  EXPECT_EQ(snapshot(engine).pages_used, 2U * 68) << "the store holds what it has";
  EXPECT_EQ(snapshot(engine).sketch_bytes_used, sketches / 6 * 2);
}

TEST_P(PrefixTest, PublishingPageByPageKeepsOneCopyOfEachBlock) {
  const Config config = this->config();
  Engine engine(config);
  const Ids ids = iota(320);
  Session session = engine.open();
  const auto step = [&](std::size_t at) {
    append_ids(session, config.model, std::span(ids).subspan(at, 16));
    session.publish(std::span(ids).first(at + 16));
  };
  step(0);
  const std::size_t one = snapshot(engine).sketch_bytes_used;
  for (std::size_t at = 16; at < ids.size(); at += 16) {
    step(at);
    EXPECT_EQ(snapshot(engine).sketch_bytes_used, one) << at;
  }
  EXPECT_EQ(attached(engine, ids), 320);
  for (const std::size_t count : {16U, 160U, 320U}) {
    const Ids first = iota(count);
    Session found = engine.open({.token_ids = first});
    ASSERT_EQ(found.length(), static_cast<std::int64_t>(count));
    Engine other(config);
    Session alone = open_with(other, first);
    expect_same(found, alone, config.model, 6);
  }
}

TEST_P(PrefixTest, PagesInNeedPushTheLeastRecentPrefixOut) {
  Config config = this->config();
  config.model.layers = 1;
  config.memory.host_bytes = 10 * 16 * 512;  // ten pages
  Engine engine(config);
  const Ids a = iota(64), b = iota(64, 1000);
  for (const Ids* ids : {&a, &b}) open_with(engine, *ids).publish(*ids);
  EXPECT_EQ(snapshot(engine).pages_used, 8U);
  EXPECT_EQ(attached(engine, a), 64);  // b is now the older

  Session session = engine.open();
  append_ids(session, config.model, iota(64, 5000));  // two free pages, and two of b's
  EXPECT_EQ(engine.stats().cumulative.prefix_tokens_evicted, 32U);
  EXPECT_EQ(attached(engine, b), 32) << "the end goes first";
  EXPECT_EQ(attached(engine, a), 64);

  // A session holds a's pages, which letting go of does not free.
  Session holder = engine.open({.token_ids = a});
  append_ids(session, config.model, iota(32, 6000));
  expect_error(error_of([&] { append_ids(session, config.model, iota(1, 7000)); }),
               ErrorCode::kResourceExhausted);
  EXPECT_EQ(session.length(), 96);
  EXPECT_EQ(holder.length(), 64);
  EXPECT_EQ(snapshot(engine).prefix_tokens, 0U);
  EXPECT_EQ(snapshot(engine).pages_used, 10U);
  Engine other(config);
  Session alone = open_with(other, a);
  holder.truncate(63);
  alone.truncate(63);
  CallTensors x(config.model, 1, 3), y(config.model, 1, 3);
  holder.attend(0, x.attend_inputs(), x.outputs(true));
  alone.attend(0, y.attend_inputs(), y.outputs(true));
  EXPECT_TRUE(x.same_results(y));
}

TEST_P(PrefixTest, AnAppendOfMoreThanThereIsLeavesStoredPrefixes) {
  Config config = this->config();
  config.memory.host_bytes = std::size_t{20} * 16 * 512;  // 20 pages, ten of each layer
  Engine engine(config);
  const Ids ids = iota(64);
  open_with(engine, ids).publish(ids);
  Session session = engine.open();
  expect_error(error_of([&] { append_random(session, config.model, 0, 21 * 16, 1); }),
               ErrorCode::kResourceExhausted);
  EXPECT_EQ(attached(engine, ids), 64);
}

TEST_P(PrefixTest, IdsThatCannotBeAreErrorsThatChangeNothing) {
  const Config config = this->config();
  Engine engine(config);
  const Ids ids = iota(100);
  Session session = open_with(engine, ids);
  const auto expect_refused = [&](const Ids& wrong, const std::string& part) {
    const std::optional<Error> error = error_of([&] { session.publish(wrong); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error->what(), ::testing::HasSubstr(part));
    EXPECT_THAT(error->what(), ::testing::HasSubstr("found"));
  };
  expect_refused(iota(101), "token_ids: expected at most 100");
  EXPECT_EQ(snapshot(engine).prefix_tokens, 0U);
  session.publish(iota(50));
  EXPECT_EQ(snapshot(engine).prefix_tokens, 48U);
  Ids other = ids;
  other[20] = 5;
  expect_refused(other, "published before");
  EXPECT_EQ(snapshot(engine).prefix_tokens, 48U);
  session.truncate(16);
  append_ids(session, config.model, std::span(other).subspan(16));
  session.publish(other);  // they are other tokens now
  EXPECT_EQ(attached(engine, other), 96);
  EXPECT_EQ(attached(engine, ids), 48);
}

KVTIER_INSTANTIATE_BACKENDS(PrefixTest);

}  // namespace
}  // namespace kvtier::testing
