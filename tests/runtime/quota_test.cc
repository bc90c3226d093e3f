#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

/// Two layers of pages of 16 tokens.
class QuotaTest : public EngineTest {
 protected:
  void start(std::size_t frames = 400, std::shared_ptr<PageTier> tier = nullptr) {
    engine_.emplace(tiered_config(GetParam(), frames, std::move(tier)));
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }
  [[nodiscard]] static std::size_t bytes(std::size_t pages) {
    return pages * std::size_t{4} * 64 * 2 * kPageTokens;
  }
  [[nodiscard]] Session open(std::string_view tenant, std::size_t pages = 0) {
    SessionConfig config;
    config.tenant = tenant;
    config.max_page_bytes = bytes(pages);
    return engine_->open(config);
  }
  void append(Session& session, std::int64_t tokens, std::uint64_t seed = 1) {
    append_to_all(session, model(), tokens, seed);
  }
  /// Runs a call that a quota refuses, and checks that it changed nothing.
  template <typename Call>
  void expect_refused(Session& session, const std::string& quota, Call&& call) {
    const std::int64_t lengths[] = {session.length(0), session.length(1)};
    const Stats before = engine_->stats();
    expect_error(error_of(call), ErrorCode::kResourceExhausted, quota);
    EXPECT_EQ(session.length(0), lengths[0]);
    EXPECT_EQ(session.length(1), lengths[1]);
    const Stats after = engine_->stats();
    EXPECT_EQ(after.snapshot.pages_used, before.snapshot.pages_used);
    EXPECT_EQ(after.snapshot.sessions, before.snapshot.sessions);
    EXPECT_EQ(after.cumulative.tokens_appended, before.cumulative.tokens_appended);
    EXPECT_EQ(after.cumulative.tier_bytes_written, before.cumulative.tier_bytes_written);
    ASSERT_EQ(after.tenants.size(), before.tenants.size());
    for (std::size_t i = 0; i < after.tenants.size(); ++i) {
      EXPECT_EQ(after.tenants[i].page_bytes, before.tenants[i].page_bytes);
      EXPECT_EQ(after.tenants[i].sessions, before.tenants[i].sessions);
    }
  }
  [[nodiscard]] Stats::Tenant tenant(const std::string& name) const {
    for (const Stats::Tenant& tenant : engine_->stats().tenants) {
      if (tenant.name == name) return tenant;
    }
    return {.name = "none"};
  }

  std::optional<Engine> engine_;
};

TEST_P(QuotaTest, OfASessionIsMetExactly) {
  start();
  Session session = open("", 6);
  append(session, 2 * kPageTokens + 5);  // three pages of each layer
  append(session, kPageTokens - 5);
  expect_refused(session, "max_page_bytes", [&] { append_random(session, model(), 1, 1, 2); });
  expect_refused(session, "max_page_bytes", [&] { session.reserve(1); });
  CallTensors call(model(), 1, 3);
  expect_refused(session, "max_page_bytes",
                 [&] { session.decode(0, call.inputs(), call.outputs()); });
  session.truncate(2 * kPageTokens);
  session.reserve(kPageTokens);
  append(session, kPageTokens);

  Session other = open("");
  append(other, 10 * kPageTokens);
  EXPECT_TRUE(engine_->stats().tenants.empty());
}

TEST_P(QuotaTest, OfATenantCoversItsSessionsAndNobodyElses) {
  start();
  engine_->set_quota("a", bytes(8) + 1);
  EXPECT_EQ(tenant("a").quota_bytes, bytes(8));
  Session first = open("a");
  Session second = open("a", 4);
  Session other = open("b");
  append(first, 2 * kPageTokens);
  append(second, kPageTokens);
  append(other, 20 * kPageTokens);
  EXPECT_EQ(tenant("a").page_bytes, bytes(6));
  EXPECT_EQ(tenant("a").sessions, 2U);
  EXPECT_EQ(tenant("b").page_bytes, bytes(40));
  EXPECT_EQ(tenant("b").quota_bytes, SIZE_MAX);

  expect_refused(second, "max_page_bytes",
                 [&] { append_random(second, model(), 0, 3 * kPageTokens, 4); });
  expect_refused(first, "tenant \"a\"",
                 [&] { append_random(first, model(), 0, 3 * kPageTokens, 5); });
  CallTensors a(model(), 2 * kPageTokens, 6);
  CallTensors b(model(), 2 * kPageTokens, 7);
  const BatchItem items[] = {{&first, a.inputs(), a.outputs(), {}},
                             {&second, b.inputs(), b.outputs(), {}}};
  expect_refused(first, "tenant \"a\"", [&] { engine_->decode(0, items); });

  second = open("a");  // ends the former
  append(first, kPageTokens);
  EXPECT_EQ(tenant("a").page_bytes, bytes(6));
  first = open("");
  second = open("");
  EXPECT_EQ(tenant("a").page_bytes, 0U);
  engine_->set_quota("a", SIZE_MAX);
  EXPECT_EQ(tenant("a").name, "none");
}

TEST_P(QuotaTest, BelowWhatIsHeldRefusesMoreAndTakesNothing) {
  start();
  Session session = open("a");
  append(session, 4 * kPageTokens);
  engine_->set_quota("a", bytes(2));
  expect_refused(session, "tenant \"a\"", [&] { append_random(session, model(), 0, 1, 2); });
  session.truncate(kPageTokens - 1);
  append(session, 1);
  expect_refused(session, "tenant \"a\"", [&] { append_random(session, model(), 0, 1, 2); });
  engine_->set_quota("a", SIZE_MAX);
  append(session, 10 * kPageTokens);
}

TEST_P(QuotaTest, CountsEachChildOfAForkAsItsParent) {
  start();
  engine_->set_quota("a", bytes(12));
  Session session = open("a", 6);
  append(session, kPageTokens + 3);
  expect_refused(session, "tenant \"a\"", [&] { (void)session.fork(3); });
  std::vector<Session> children = session.fork(2);
  EXPECT_EQ(tenant("a").page_bytes, bytes(12));
  EXPECT_EQ(tenant("a").sessions, 3U);
  append(children[0], kPageTokens - 3);  // room of its own in the place of what it shared
  expect_refused(children[0], "tenant \"a\"",
                 [&] { append_random(children[0], model(), 0, 1, 2); });
  children.pop_back();
  append(children[0], kPageTokens);
  expect_refused(children[0], "max_page_bytes",
                 [&] { append_random(children[0], model(), 0, 1, 2); });
}

TEST_P(QuotaTest, AStoredPrefixBeginsASessionAsFarAsItGoes) {
  start();
  std::vector<std::int32_t> ids(10 * kPageTokens);
  std::iota(ids.begin(), ids.end(), 0);
  Session session = open("");
  append(session, 10 * kPageTokens);
  session.publish(ids);
  engine_->set_quota("a", bytes(10));
  SessionConfig config;
  config.token_ids = ids;
  config.tenant = "a";
  config.max_page_bytes = bytes(7);
  Session first = engine_->open(config);
  EXPECT_EQ(first.length(), 3 * kPageTokens);
  Session second = engine_->open(config);
  EXPECT_EQ(second.length(), 2 * kPageTokens);
  EXPECT_EQ(tenant("a").page_bytes, bytes(10));
}

TEST_P(QuotaTest, IsAskedBeforePagesLeaveForATier) {
  start(24, std::make_shared<FaultTier>());
  Session session = open("a", 80);
  append(session, 20 * kPageTokens);
  ASSERT_GT(engine_->stats().snapshot.pages_in_tiers, 0U);
  EXPECT_EQ(tenant("a").page_bytes, bytes(40));
  expect_refused(session, "max_page_bytes",
                 [&] { append_random(session, model(), 0, 41 * kPageTokens, 3); });
  append(session, 20 * kPageTokens);
  EXPECT_EQ(tenant("a").page_bytes, bytes(80));
}

TEST_P(QuotaTest, TenantsWithoutANameAreRefused) {
  start();
  expect_error(error_of([&] { engine_->set_quota("", 1); }), ErrorCode::kInvalidArgument);
}

TEST_P(QuotaTest, RandomCallsAreCountedAsASimpleModelSays) {
  start();
  constexpr std::size_t kQuota = 60;
  engine_->set_quota("a", bytes(kQuota));
  struct Held {
    Session session;
    std::int64_t lengths[2];
  };
  std::vector<Held> sessions;
  const auto pages = [](std::int64_t tokens) {
    return static_cast<std::size_t>((tokens + kPageTokens - 1) / kPageTokens);
  };
  const auto held = [&] {
    std::size_t sum = 0;
    for (const Held& one : sessions) sum += pages(one.lengths[0]) + pages(one.lengths[1]);
    return sum;
  };
  std::mt19937_64 random(3);
  const auto below = [&](std::size_t n) { return random() % n; };
  int refused = 0;
  for (int step = 0; step < 600; ++step) {
    if (sessions.empty() || below(12) == 0) {
      sessions.push_back({open("a"), {0, 0}});
      continue;
    }
    const std::size_t i = below(sessions.size());
    Held& one = sessions[i];
    const auto kind = below(8);
    if (kind < 5) {
      const int layer = static_cast<int>(below(2));
      const auto more = static_cast<std::int64_t>(1 + below(60));
      const std::size_t lacking = pages(one.lengths[layer] + more) - pages(one.lengths[layer]);
      const bool fits = held() + lacking <= kQuota;
      const auto error =
          error_of([&] { append_random(one.session, model(), layer, more, random()); });
      ASSERT_EQ(error.has_value(), !fits) << "step " << step;
      if (fits) one.lengths[layer] += more;
      refused += fits ? 0 : 1;
    } else if (kind == 5) {
      const std::int64_t longest = std::max(one.lengths[0], one.lengths[1]);
      const auto tokens = static_cast<std::int64_t>(below(static_cast<std::size_t>(longest) + 1));
      one.session.truncate(tokens);
      for (std::int64_t& length : one.lengths) length = std::min(length, tokens);
    } else if (kind == 6) {
      const std::size_t more = pages(one.lengths[0]) + pages(one.lengths[1]);
      const bool fits = held() + more <= kQuota;
      const std::int64_t lengths[] = {one.lengths[0], one.lengths[1]};
      std::vector<Session> children;
      const auto error = error_of([&] { children = one.session.fork(1); });
      ASSERT_EQ(error.has_value(), !fits) << "step " << step;
      if (fits) sessions.push_back({std::move(children[0]), {lengths[0], lengths[1]}});
    } else {
      sessions.erase(sessions.begin() + static_cast<std::ptrdiff_t>(i));
    }
    ASSERT_EQ(tenant("a").page_bytes, bytes(held())) << "step " << step;
    ASSERT_EQ(tenant("a").sessions, sessions.size());
  }
  EXPECT_GT(refused, 0);
}

KVTIER_INSTANTIATE_BACKENDS(QuotaTest);

}  // namespace
}  // namespace kvtier::testing
