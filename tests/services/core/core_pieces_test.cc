#include "tests/services/core/core_fixture.h"
#include "tests/support/eventually.h"

#include <chrono>
#include <future>
#include <string>
#include <vector>

namespace kvtier::services::testing {
namespace {

using kvtier::testing::await;

constexpr std::int64_t kStored = 70;
constexpr std::int64_t kQueries = 20;

ServiceCoreOptions one_token_a_piece() {
  ServiceCoreOptions options = patient_options();
  options.piece_work = 1;
  options.tenants = two_tenants();
  return options;
}

v1::AttendRequest attend_request(const std::string& session, std::int64_t tokens) {
  v1::AttendRequest request;
  request.set_session(session);
  *request.mutable_query() = random_tensor(tokens, kQueryHeads, 7);
  return request;
}

v1::DecodeRequest long_decode_request(const std::string& session, std::int64_t step) {
  v1::DecodeRequest request = decode_request(session, 0, step, 7);
  *request.mutable_query() = random_tensor(kQueries, kQueryHeads, 7);
  *request.mutable_key() = random_tensor(kQueries, kKvHeads, 8);
  *request.mutable_value() = random_tensor(kQueries, kKvHeads, 9);
  return request;
}

class CorePiecesTest : public CoreTest {
 protected:
  std::string open_with_tokens(std::size_t tenant = 0) {
    const std::string name = open(tenant);
    for (int layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(append(name, append_request(layer, kStored, 1), tenant).reason(), "OK");
    }
    return name;
  }
  Ending attend(const Call& call, const v1::AttendRequest& request, v1::AttendResponse& response) {
    Ending ending;
    core_->run(call, request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
};

TEST_F(CorePiecesTest, GiveTheBitsOfTheWholeCall) {
  std::vector<std::string> attended, decoded, selected;
  for (const std::int64_t work : {std::int64_t{1} << 40, std::int64_t{1}, std::int64_t{100'000}}) {
    ServiceCoreOptions options = small_options();
    options.piece_work = work;
    make_core(options);
    const std::string name = open_with_tokens();

    v1::AttendRequest request = attend_request(name, kQueries);
    request.set_with_missed(false);
    v1::AttendResponse response;
    ASSERT_EQ(attend(call(), request, response).reason(), "OK");
    attended.push_back(response.SerializeAsString());

    v1::SelectRequest select;
    select.set_session(name);
    *select.mutable_query() = request.query();
    select.set_with_scores(true);
    v1::SelectResponse ids;
    Ending ending;
    core_->run(call(), select, ids, ending.listener());
    executor_.run_all();
    ASSERT_EQ(ending.reason(), "OK");
    selected.push_back(ids.SerializeAsString());

    v1::DecodeResponse step;
    ASSERT_EQ(decode(long_decode_request(name, 1), step).reason(), "OK");
    EXPECT_EQ(lengths(name), (std::vector<std::int64_t>{kStored + kQueries, kStored}));
    v1::DecodeResponse again;
    ASSERT_EQ(decode(long_decode_request(name, 1), again).reason(), "OK");
    EXPECT_EQ(again.SerializeAsString(), step.SerializeAsString());
    decoded.push_back(step.SerializeAsString());
  }
  for (const auto& results : {attended, selected, decoded}) {
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
  }
}

TEST_F(CorePiecesTest, EndWithTheCallersDeadlineAndChangeNothing) {
  make_core(one_token_a_piece());
  const std::string name = open_with_tokens();
  int asked = 0;
  Call slow = call();
  slow.deadline = now_ + std::chrono::seconds(5);
  slow.cancelled = [&] {
    ++asked;
    now_ += std::chrono::seconds(1);
    return false;
  };
  v1::AttendResponse response;
  EXPECT_EQ(attend(slow, attend_request(name, kQueries), response).reason(), "QUEUE_TIMEOUT");
  EXPECT_EQ(asked, 6);

  slow.deadline = now_ + std::chrono::seconds(5);
  const std::int64_t bytes = tenant().kv_bytes();
  v1::DecodeResponse decoded;
  Ending ending;
  const v1::DecodeRequest request = long_decode_request(name, 0);
  core_->run_in(name, slow, request, decoded, ending.listener());
  executor_.run_all();
  EXPECT_EQ(ending.reason(), "QUEUE_TIMEOUT");
  EXPECT_EQ(lengths(name), (std::vector<std::int64_t>{kStored, kStored}));
  EXPECT_EQ(tenant().kv_bytes(), bytes);
}

TEST_F(CorePiecesTest, EndWhenTheCallerHasGone) {
  make_core(one_token_a_piece());
  const std::string name = open_with_tokens();
  int asked = 0;
  Call gone = call();
  gone.cancelled = [&] { return ++asked == 3; };
  v1::AttendResponse response;
  EXPECT_EQ(attend(gone, attend_request(name, kQueries), response).reason(), "CANCELLED");
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(attend(call(), attend_request(name, kQueries), response).reason(), "OK");
}

TEST_F(CorePiecesTest, AreEachMeasuredAgainstTheDevicesTime) {
  ServiceCoreOptions options = one_token_a_piece();
  options.watched_backend = Backend::kCpu;
  options.lease_ttl = std::chrono::hours(10);
  make_core(options);
  const std::string name = open_with_tokens();
  Call slow = call();
  slow.deadline = now_ + std::chrono::hours(2);
  slow.cancelled = [&] {  // asked while the piece has the engine
    now_ += std::chrono::seconds(59);
    core_->sweep();
    return false;
  };
  v1::AttendResponse response;
  EXPECT_EQ(attend(slow, attend_request(name, kQueries), response).reason(), "OK");
  EXPECT_FALSE(core_->degraded());
}

TEST_F(CorePiecesTest, OfACpuAreNeverTakenForALostDevice) {
  ServiceCoreOptions options = one_token_a_piece();
  options.lease_ttl = std::chrono::hours(10);
  make_core(options);
  const std::string name = open_with_tokens();
  Call slow = call();
  slow.deadline = now_ + std::chrono::hours(2);
  slow.cancelled = [&] {
    now_ += std::chrono::seconds(61);
    core_->sweep();
    return false;
  };
  v1::AttendResponse response;
  EXPECT_EQ(attend(slow, attend_request(name, kQueries), response).reason(), "OK");
  EXPECT_FALSE(core_->degraded());
}

/// On threads: a call of the other tenant comes while one of many pieces is at work. No time
/// passes, so that what tenants have used before, to make sessions, does not count.
class CoreFairTest : public ::testing::Test {
 protected:
  explicit CoreFairTest(std::size_t threads = 1)
      : pool_(make_thread_pool(threads, [] { return std::chrono::steady_clock::time_point(); })),
        core_(one_token_a_piece(), *pool_) {}
  ~CoreFairTest() override { pool_->finish(); }

  [[nodiscard]] Call call(std::size_t tenant) {
    return {.tenant = core_.tenants().all()[tenant].get()};
  }
  template <typename Start>
  void run(Start start) {
    std::promise<std::string> ended;
    start([&ended](const ServiceError* error) { ended.set_value(error ? error->reason() : "OK"); });
    ASSERT_EQ(await(ended), "OK");
  }
  std::string open_with_tokens(std::size_t tenant, int layers = kLayers) {
    v1::CreateSessionRequest request;
    *request.mutable_geometry() = small_geometry();
    request.mutable_geometry()->set_layers(layers);
    v1::CreateSessionResponse response;
    run([&](Done done) { core_.run(call(tenant), request, response, std::move(done)); });
    const std::string name = response.session().name();
    const v1::AppendRequest tokens = append_request(0, kStored, 1);
    v1::AppendResponse appended;
    run([&](Done done) { core_.run_in(name, call(tenant), tokens, appended, std::move(done)); });
    return name;
  }
  /// Returns how many pieces of a long call of tenant 1 begin between the arrival of one of tenant
  /// 0 and the end of that one.
  int pieces_before(const std::string& mine, const std::string& others) {
    const v1::DecodeRequest step = decode_request(mine, 0, 0, 3);
    v1::DecodeResponse stepped;
    int pieces = 0;
    std::atomic<bool> answered{false};
    int after_arrival = 0;
    std::promise<void> done;
    Call heavy = call(1);
    heavy.cancelled = [&] {
      if (++pieces == 3) {
        core_.run_in(mine, call(0), step, stepped, [&](const ServiceError* error) {
          EXPECT_EQ(error, nullptr);
          answered = true;
          done.set_value();
        });
      } else if (pieces > 3 && !answered) {
        ++after_arrival;
      }
      return false;
    };
    const v1::AttendRequest request = attend_request(others, kQueries);
    v1::AttendResponse response;
    run([&](Done ended) { core_.run(heavy, request, response, std::move(ended)); });
    EXPECT_EQ(pieces, kQueries);
    await(done);
    return after_arrival;
  }

  std::unique_ptr<Executor> pool_;
  ServiceCore core_;
};

TEST_F(CoreFairTest, AStepWaitsForOnePieceOfACallOnItsEngine) {
  const std::string mine = open_with_tokens(0);
  const std::string others = open_with_tokens(1);
  EXPECT_EQ(pieces_before(mine, others), 0);
}

TEST_F(CoreFairTest, AStepWaitsForOnePieceOfACallOnAnotherEngine) {
  const std::string mine = open_with_tokens(0);
  const std::string others = open_with_tokens(1, kLayers + 1);
  EXPECT_EQ(pieces_before(mine, others), 0);
}

/// The calls of two sessions of one tenant, of which the first holds their engine.
class CoreParkedTest : public CoreFairTest {
 protected:
  CoreParkedTest() : CoreFairTest(2) {}
};

TEST_F(CoreParkedTest, CallsThatWaitForAnEngineTakeNoThread) {
  const std::string first = open_with_tokens(1);
  const std::vector<std::string> waiting{open_with_tokens(1), open_with_tokens(1)};
  const std::string mine = open_with_tokens(0, kLayers + 1);
  std::promise<void> holds, go;
  std::promise<std::string> ended;
  Call holder = call(1);
  int asked = 0;
  holder.cancelled = [&] {
    if (++asked > 1) return false;
    holds.set_value();
    await(go);
    return false;
  };
  const v1::AttendRequest request = attend_request(first, 1);
  v1::AttendResponse response;
  core_.run(holder, request, response,
            [&](const ServiceError* error) { ended.set_value(error ? error->reason() : "OK"); });
  await(holds);
  std::vector<v1::AttendRequest> requests;
  for (const std::string& name : waiting) requests.push_back(attend_request(name, 1));
  std::vector<v1::AttendResponse> responses(waiting.size());
  std::atomic<std::size_t> answered{0};
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    core_.run(call(1), requests[i], responses[i], [&](const ServiceError*) { ++answered; });
  }
  const v1::DecodeRequest step = decode_request(mine, 0, 0, 3);
  v1::DecodeResponse stepped;
  run([&](Done done) { core_.run_in(mine, call(0), step, stepped, std::move(done)); });
  EXPECT_EQ(answered, 0U);
  go.set_value();
  EXPECT_EQ(await(ended), "OK");
  pool_->finish();
  EXPECT_EQ(answered, waiting.size());
}

}  // namespace
}  // namespace kvtier::services::testing
