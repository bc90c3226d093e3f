#include "tests/services/server/core_fixture.h"

#include <future>
#include <thread>

namespace kvtier::services::testing {
namespace {

/// Waits for calls that run on other threads.
class Waiting {
 public:
  Done listener() {
    return [this](const ServiceError* error) { reason_.set_value(error ? error->reason() : "OK"); };
  }
  std::string reason() { return reason_.get_future().get(); }

 private:
  std::promise<std::string> reason_;
};

class CoreThreadsTest : public ::testing::Test {
 protected:
  CoreThreadsTest() : pool_(make_thread_pool(2)), core_(small_options(), *pool_) {}
  ~CoreThreadsTest() override { pool_->finish(); }

  Call call() { return {.tenant = core_.tenants().all()[0].get()}; }
  std::string open() {
    v1::CreateSessionRequest request;
    *request.mutable_geometry() = small_geometry();
    v1::CreateSessionResponse response;
    Waiting waiting;
    core_.create_session(call(), request, response, waiting.listener());
    EXPECT_EQ(waiting.reason(), "OK");
    return response.session().name();
  }
  std::string append(const std::string& name, const v1::AppendRequest& request) {
    v1::AppendResponse response;
    Waiting waiting;
    core_.append(call(), name, request, response, waiting.listener());
    return waiting.reason();
  }
  std::string release(const std::string& name) {
    v1::ReleaseSessionRequest request;
    request.set_name(name);
    Waiting waiting;
    core_.release_session(call(), request, waiting.listener());
    return waiting.reason();
  }

  std::unique_ptr<Executor> pool_;
  Core core_;
};

TEST_F(CoreThreadsTest, SessionsOfManyThreadsDoNotMix) {
  constexpr int kThreads = 6;
  constexpr int kRounds = 8;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      for (int round = 0; round < kRounds; ++round) {
        const std::string name = open();
        const int tokens = 1 + t;
        const auto request = append_request(0, tokens, static_cast<std::uint64_t>(t));
        EXPECT_EQ(append(name, request), "OK");
        EXPECT_EQ(append(name, request), "OK");
        v1::GetSessionRequest get;
        get.set_name(name);
        v1::GetSessionResponse response;
        Waiting waiting;
        core_.get_session(call(), get, response, waiting.listener());
        EXPECT_EQ(waiting.reason(), "OK");
        EXPECT_EQ(response.session().layer_lengths(0), 2 * tokens);
        EXPECT_EQ(release(name), "OK");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(core_.num_sessions(), 0U);
  EXPECT_EQ(core_.tenants().all()[0]->kv_bytes(), 0);
  EXPECT_EQ(core_.inflight_bytes(), 0);
}

TEST_F(CoreThreadsTest, CallsOfOneSessionByManyThreadsRunOneAfterAnother) {
  const std::string name = open();
  constexpr int kThreads = 4;
  constexpr int kAppends = 10;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, &name] {
      const auto request = append_request(1, 3, 9);
      for (int i = 0; i < kAppends; ++i) EXPECT_EQ(append(name, request), "OK");
    });
  }
  for (std::thread& thread : threads) thread.join();

  v1::GetStatsResponse stats;
  core_.get_stats(stats);
  EXPECT_EQ(stats.cumulative().tokens_appended(), kThreads * kAppends * 3U);
  EXPECT_EQ(stats.service().received(), stats.service().admitted() + stats.service().rejected());
}

TEST_F(CoreThreadsTest, ReleasesSweepsAndCallsMayRace) {
  for (int round = 0; round < 20; ++round) {
    const std::string name = open();
    const auto request = append_request(0, 2, 1);
    std::thread appender([&] {
      const std::string reason = append(name, request);
      EXPECT_TRUE(reason == "OK" || reason == "NOT_FOUND") << reason;
    });
    std::thread sweeper([&] {
      core_.sweep();
      v1::GetStatsResponse stats;
      core_.get_stats(stats);
    });
    EXPECT_EQ(release(name), "OK");
    appender.join();
    sweeper.join();
  }
  EXPECT_EQ(core_.num_sessions(), 0U);
  EXPECT_EQ(core_.tenants().all()[0]->kv_bytes(), 0);
}

TEST_F(CoreThreadsTest, BatchOverManySessionsIsJoined) {
  std::vector<std::string> names;
  v1::BatchDecodeRequest request;
  for (int i = 0; i < 16; ++i) {
    names.push_back(open());
    *request.add_items() = decode_request(names.back(), 0, 1, static_cast<std::uint64_t>(i));
  }
  v1::BatchDecodeResponse response;
  Waiting waiting;
  core_.batch_decode(call(), request, response, waiting.listener());

  ASSERT_EQ(waiting.reason(), "OK");
  for (const auto& item : response.items()) EXPECT_EQ(item.status().code(), 0);
}

}  // namespace
}  // namespace kvtier::services::testing
