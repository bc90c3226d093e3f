#include "tests/services/core/core_fixture.h"
#include "tests/support/eventually.h"

#include <future>
#include <thread>

namespace kvtier::services::testing {
namespace {

using kvtier::testing::await;

/// Waits for calls that run on other threads.
class Waiting {
 public:
  Done listener() {
    return [this](const ServiceError* error) { reason_.set_value(error ? error->reason() : "OK"); };
  }
  std::string reason() { return await(reason_); }

 private:
  std::promise<std::string> reason_;
};

class CoreThreadsTest : public ::testing::Test {
 protected:
  CoreThreadsTest() : pool_(make_thread_pool(2)), core_(patient_options(), *pool_) {}
  ~CoreThreadsTest() override { pool_->finish(); }

  Call call() { return {.tenant = core_.tenants().all()[0].get()}; }
  std::string open() {
    v1::CreateSessionRequest request;
    *request.mutable_geometry() = small_geometry();
    v1::CreateSessionResponse response;
    Waiting waiting;
    core_.run(call(), request, response, waiting.listener());
    EXPECT_EQ(waiting.reason(), "OK");
    return response.session().name();
  }
  std::string append(const std::string& name, const v1::AppendRequest& request) {
    v1::AppendResponse response;
    Waiting waiting;
    core_.run_in(name, call(), request, response, waiting.listener());
    return waiting.reason();
  }
  std::string release(const std::string& name) {
    v1::ReleaseSessionRequest request;
    request.set_name(name);
    v1::ReleaseSessionResponse response;
    Waiting waiting;
    core_.run(call(), request, response, waiting.listener());
    return waiting.reason();
  }

  std::unique_ptr<Executor> pool_;
  ServiceCore core_;
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
        core_.run(call(), get, response, waiting.listener());
        EXPECT_EQ(waiting.reason(), "OK");
        EXPECT_EQ(response.session().layer_lengths(0), 2 * tokens);
        EXPECT_EQ(release(name), "OK");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(core_.num_sessions(), 0U);
  EXPECT_EQ(core_.tenants().all()[0]->kv_bytes(), 0);
  // A call is counted until its task is destroyed, which is after its reply.
  EXPECT_TRUE(kvtier::testing::eventually([&] { return core_.inflight_bytes() == 0; }));
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
  core_.run(call(), request, response, waiting.listener());

  ASSERT_EQ(waiting.reason(), "OK");
  for (const auto& item : response.items()) EXPECT_EQ(item.status().code(), 0);
}

class StrandTest : public ::testing::Test {
 protected:
  ~StrandTest() override { pool_->finish(); }

  std::unique_ptr<Executor> pool_ = make_thread_pool(2);
  std::unique_ptr<Strand> strand_ = pool_->make_strand();
};

TEST_F(StrandTest, RunsAShortTaskHereWhenNothingRunsOrWaits) {
  std::thread::id here;
  strand_->enqueue(Strand::Start::kNowIfIdle, [&] { here = std::this_thread::get_id(); });
  EXPECT_EQ(here, std::this_thread::get_id());
}

TEST_F(StrandTest, QueuesAShortTaskBehindOthers) {
  std::promise<void> go, running, done;
  std::vector<int> order;
  strand_->post([&] {
    running.set_value();
    await(go);
    order.push_back(0);
  });
  await(running);
  std::thread::id other;
  strand_->post([&] { order.push_back(1); });
  strand_->enqueue(Strand::Start::kNowIfIdle, [&] {
    order.push_back(2);
    other = std::this_thread::get_id();
    done.set_value();
  });
  EXPECT_EQ(other, std::thread::id());
  go.set_value();
  await(done);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  EXPECT_NE(other, std::this_thread::get_id());
}

TEST_F(StrandTest, HandsToThePoolWhatCameWhileATaskRanHere) {
  std::promise<std::thread::id> other;
  bool inside = false;
  bool overlapped = false;
  strand_->enqueue(Strand::Start::kNowIfIdle, [&] {
    inside = true;
    strand_->post([&] { overlapped = inside; });
    strand_->enqueue(Strand::Start::kNowIfIdle, [&] {
      overlapped |= inside;
      other.set_value(std::this_thread::get_id());
    });
    inside = false;
  });
  EXPECT_NE(await(other), std::this_thread::get_id());
  EXPECT_FALSE(overlapped);
}

TEST_F(StrandTest, RunsTasksOfManyThreadsOneAtATime) {
  constexpr int kThreads = 4;
  constexpr int kTasks = 500;
  int unguarded = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto start = t % 2 == 0 ? Strand::Start::kQueued : Strand::Start::kNowIfIdle;
      for (int i = 0; i < kTasks; ++i) strand_->enqueue(start, [&] { ++unguarded; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  pool_->finish();
  EXPECT_EQ(unguarded, kThreads * kTasks);
}

TEST_F(StrandTest, TakesTurnsWithOthers) {
  const std::unique_ptr<Executor> one = make_thread_pool(1);
  const std::unique_ptr<Strand> busy = one->make_strand();
  const std::unique_ptr<Strand> other = one->make_strand();
  std::promise<void> go;
  std::vector<int> order;
  busy->post([&] { await(go); });
  for (int i = 1; i <= 3; ++i) {
    busy->post([&order, i] { order.push_back(i); });
  }
  other->post([&order] { order.push_back(0); });
  go.set_value();
  one->finish();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
}

TEST_F(StrandTest, MayEndInATask) {
  std::promise<void> done;
  strand_->post([&] {
    strand_.reset();
    done.set_value();
  });
  await(done);
  strand_ = pool_->make_strand();
  strand_->enqueue(Strand::Start::kNowIfIdle, [&] { strand_.reset(); });
  EXPECT_EQ(strand_, nullptr);
}

}  // namespace
}  // namespace kvtier::services::testing
