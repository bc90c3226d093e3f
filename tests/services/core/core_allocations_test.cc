#include "tests/services/core/core_fixture.h"
#include "tests/support/failing_new.h"

#include <array>
#include <string_view>

/// Every allocation of a call failing in turn, on the thread that makes it and executes it.
namespace kvtier::services::testing {
namespace {

/// How a call ended, noted without an allocation.
class Outcome {
 public:
  [[nodiscard]] Done listener() {
    return [this](const ServiceError* error) {
      ++endings_;
      if (error == nullptr) return;
      reason_.fill('\0');
      error->reason().copy(reason_.data(), reason_.size() - 1);
    };
  }
  [[nodiscard]] int endings() const { return endings_; }
  [[nodiscard]] std::string_view reason() const { return reason_.data(); }

 private:
  int endings_ = 0;
  std::array<char, 64> reason_{};
};

class CoreAllocationsTest : public CoreTest {
 protected:
  void SetUp() override {
    ServiceCoreOptions options = small_options();
    options.pages.arena_bytes = 4 * static_cast<std::int64_t>(MiB);
    make_core(options);
    name_ = open();
    for (int layer = 0; layer < kLayers; ++layer) {
      ASSERT_EQ(append(name_, append_request(layer, 70, 1)).reason(), "OK");
    }
  }

  /// What must be as before when a call has failed.
  struct State {
    std::vector<std::int64_t> lengths;
    std::size_t sessions = 0;
    std::int64_t tenant_sessions = 0, kv_bytes = 0, memory = 0, inflight = 0;
    friend bool operator==(const State&, const State&) = default;
  };
  State state() {
    return {.lengths = lengths(name_),
            .sessions = core_->num_sessions(),
            .tenant_sessions = tenant().sessions(),
            .kv_bytes = tenant().kv_bytes(),
            .memory = core_->session_memory(),
            .inflight = core_->inflight_bytes()};
  }

  /// Makes a call until none of its allocations fails. `start(done)` makes it, `undo()` takes back
  /// what it has done when it succeeds.
  template <typename Start, typename Undo>
  void fail_each_allocation(Start start, Undo undo) {
    Outcome first;  // what is made once, by libraries too, is made now
    const Done told = first.listener();
    start(told);
    executor_.run_all();
    ASSERT_EQ(first.reason(), "");
    undo();
    const State before = state();
    std::int64_t failed = 0;
    for (std::int64_t survived = 0;; ++survived) {
      SCOPED_TRACE("allocation " + std::to_string(survived));
      Outcome outcome;
      const Done done = outcome.listener();
      kvtier::testing::allocations_left = survived;
      start(done);
      executor_.run_all();
      const bool reached = kvtier::testing::allocations_left == kvtier::testing::kAllAllocations;
      kvtier::testing::allocations_left = kvtier::testing::kAllAllocations;
      ASSERT_EQ(outcome.endings(), 1);
      if (outcome.reason().empty()) {
        undo();
      } else {
        EXPECT_EQ(outcome.reason(), "OUT_OF_MEMORY");
        ++failed;
      }
      ASSERT_EQ(state(), before);
      if (!reached) break;
    }
    EXPECT_GT(failed, 0);
  }

  std::string fresh_id() {
    std::string id = std::to_string(++last_id_);
    id.insert(0, 12 - id.size(), '0');
    return "01234567-89ab-4cde-8f01-" + id;
  }
  void truncate(std::int64_t tokens) {
    v1::TruncateSessionRequest request;
    request.set_name(name_);
    request.set_tokens(tokens);
    v1::TruncateSessionResponse response;
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    ASSERT_EQ(ending.reason(), "OK");
  }

  std::string name_;
  int last_id_ = 0;
};

TEST_F(CoreAllocationsTest, OfACreationFailInTurn) {
  v1::CreateSessionRequest request = create_request();
  request.set_request_id(fresh_id());
  request.set_model_fingerprint("m");
  for (int i = 0; i < 100; ++i) request.add_token_ids(i);
  v1::CreateSessionResponse response;
  fail_each_allocation(
      [&](const Done& done) {
        response.Clear();
        core_->run(call(), request, response, done);
      },
      [&] {
        ASSERT_EQ(release(response.session().name()).reason(), "OK");
        request.set_request_id(fresh_id());
      });
}

TEST_F(CoreAllocationsTest, OfAnAppendFailInTurn) {
  const v1::AppendRequest request = append_request(0, 70, 3);
  v1::AppendResponse response;
  fail_each_allocation(
      [&](const Done& done) {
        response.Clear();
        core_->run_in(name_, call(), request, response, done);
      },
      [&] { truncate(70); });
}

TEST_F(CoreAllocationsTest, OfAStepFailInTurn) {
  const v1::DecodeRequest request = decode_request(name_, 0, 0, 3);
  v1::DecodeResponse response;
  fail_each_allocation(
      [&](const Done& done) {
        response.Clear();
        core_->run_in(name_, call(), request, response, done);
      },
      [&] { truncate(70); });
}

TEST_F(CoreAllocationsTest, OfABatchFailInTurn) {
  v1::BatchDecodeRequest request;
  *request.add_items() = decode_request(name_, 0, 0, 3);
  v1::BatchDecodeResponse response;
  fail_each_allocation(
      [&](const Done& done) {
        response.Clear();
        core_->run(call(), request, response, [&](const ServiceError* error) {
          if (error == nullptr && response.items(0).status().code() != 0) {
            const ServiceError item(Code::kResourceExhausted, response.items(0).status().reason(),
                                    "");
            return done(&item);
          }
          done(error);
        });
      },
      [&] { truncate(70); });
}

TEST_F(CoreAllocationsTest, OfReadingCallsFailInTurn) {
  v1::SelectRequest select;
  select.set_session(name_);
  *select.mutable_query() = random_tensor(1, kQueryHeads, 5);
  v1::SelectResponse selected;
  fail_each_allocation(
      [&](const Done& done) {
        selected.Clear();
        core_->run(call(), select, selected, done);
      },
      [] {});
  v1::AttendRequest attend;
  attend.set_session(name_);
  *attend.mutable_query() = select.query();
  v1::AttendResponse attended;
  fail_each_allocation(
      [&](const Done& done) {
        attended.Clear();
        core_->run(call(), attend, attended, done);
      },
      [] {});
  v1::GetSessionRequest get;
  get.set_name(name_);
  v1::GetSessionResponse got;
  fail_each_allocation(
      [&](const Done& done) {
        got.Clear();
        core_->run(call(), get, got, done);
      },
      [] {});
}

TEST_F(CoreAllocationsTest, OfATruncationFailInTurn) {
  v1::TruncateSessionRequest request;
  request.set_name(name_);
  request.set_tokens(70);
  request.set_request_id(fresh_id());
  v1::TruncateSessionResponse response;
  const auto lengthen = [&] {
    ASSERT_EQ(append(name_, append_request(0, 5, 1)).reason(), "OK");
    request.set_request_id(fresh_id());
  };
  lengthen();
  fail_each_allocation(
      [&](const Done& done) {
        response.Clear();
        core_->run(call(), request, response, done);
      },
      lengthen);
}

TEST_F(CoreAllocationsTest, OfAForkFailInTurn) {
  v1::ForkSessionRequest request;
  request.set_name(name_);
  request.set_count(2);
  request.set_request_id(fresh_id());
  v1::ForkSessionResponse response;
  fail_each_allocation(
      [&](const Done& done) {
        response.Clear();
        core_->run(call(), request, response, done);
      },
      [&] {
        for (const v1::Session& child : response.sessions()) {
          ASSERT_EQ(release(child.name()).reason(), "OK");
        }
        request.set_request_id(fresh_id());
      });
}

}  // namespace
}  // namespace kvtier::services::testing
