#include "kvtier/v1/attention.grpc.pb.h"
#include "kvtier/v1/session.grpc.pb.h"

#include "services/metrics/server_metrics.h"
#include "tests/services/metrics/exposition.h"
#include "tests/services/server/raw_call.h"
#include "tests/services/server/server_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/memory.h"

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <deque>

/// Clients that ask for much and read nothing of it.
namespace kvtier::services::testing {
namespace {

using kvtier::testing::eventually;

constexpr std::int64_t kLimit = std::int64_t{16} << 20;
/// Three replies of 2 MiB, twice each; their requests come to it.
constexpr std::int64_t kThree = std::int64_t{12} << 20;

class UnreadTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    ServerOptions with = options();
    with.core.max_inflight_bytes = kLimit;
    start(std::move(with));
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    // What gRPC takes in without a reader is little.
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    channel_ = grpc::CreateCustomChannel(socket(), grpc::InsecureChannelCredentials(), arguments);
    open();
  }
  void TearDown() override {
    for (Unread& call : calls_) {
      call.context.TryCancel();
      call.stream->Finish(&call.status, nullptr);
    }
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
    calls_.clear();
    ServerTest::TearDown();
  }
  [[nodiscard]] std::int64_t inflight() const { return server_->core().inflight_bytes(); }

  /// Asks for 2 MiB of rows, by 32 KiB, and reads nothing.
  void fetch() {
    v1::FetchRequest request;
    request.set_session(session_);
    constexpr std::int64_t kIds = 4096;
    request.mutable_tokens()->set_dtype(v1::DATA_TYPE_INT32);
    for (const std::int64_t extent : {std::int64_t{kKvHeads}, kIds}) {
      request.mutable_tokens()->add_shape(extent);
    }
    request.mutable_tokens()->set_data(std::string(kKvHeads * kIds * sizeof(std::int32_t), '\0'));
    Unread& call = calls_.emplace_back();
    call.context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(10));
    call.stream = grpc::GenericStub(channel_).PrepareCall(
        &call.context, "/kvtier.v1.AttentionService/Fetch", &queue_);
    call.stream->StartCall(nullptr);
    await_tag();
    const grpc::Slice slice(request.SerializeAsString());
    call.stream->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    await_tag();
  }
  [[nodiscard]] std::uint64_t counted() {
    v1::GetStatsResponse stats;
    server_->core().get_stats(stats);
    return stats.service().admitted() + stats.service().rejected();
  }

  struct Unread {
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
    grpc::Status status;
  };
  std::shared_ptr<grpc::Channel> channel_;
  grpc::CompletionQueue queue_;
  std::string session_;
  std::deque<Unread> calls_;

 private:
  void await_tag() {
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue_.Next(&tag, &ok));
  }
  void open() {
    v1::CreateSessionRequest create;
    *create.mutable_geometry() = small_geometry();
    v1::CreateSessionResponse created;
    grpc::ClientContext context;
    ASSERT_TRUE(
        v1::SessionService::NewStub(channel_)->CreateSession(&context, create, &created).ok());
    session_ = created.session().name();
    v1::AppendRequest append = append_request(0, 16, 1);
    append.set_session(session_);
    v1::AppendResponse appended;
    grpc::ClientContext append_context;
    const auto writer = v1::AttentionService::NewStub(channel_)->Append(&append_context, &appended);
    ASSERT_TRUE(writer->Write(append));
    writer->WritesDone();
    ASSERT_TRUE(writer->Finish().ok());
  }
};

TEST_F(UnreadTest, RepliesAreInFlightUntilTheirClientHasThem) {
  const std::int64_t before = kvtier::testing::status_kib("RssAnon");
  ASSERT_TRUE(kvtier::testing::reset_peak());
  const std::uint64_t calls = counted();
  // 2 MiB each, twice: three are in flight, and the others refused. The three come first, since the
  // requests of a hundred at once would leave room for two replies only.
  for (int i = 0; i < 3; ++i) fetch();
  ASSERT_TRUE(eventually([&] { return inflight() > kThree; }));
  for (int i = 3; i < 100; ++i) fetch();
  ASSERT_TRUE(eventually([&] { return counted() == calls + 100; }));

  EXPECT_TRUE(eventually([&] { return inflight() > kThree && inflight() <= kLimit; }));
  EXPECT_LT(kvtier::testing::status_kib("VmHWM") - before, 128 << 10);
}

TEST_F(UnreadTest, RepliesAreGivenUpAtTheEndOfTheCallsTime) {
  const auto before = std::chrono::steady_clock::now();
  const std::uint64_t calls = counted();
  for (int i = 0; i < 3; ++i) fetch();
  ASSERT_TRUE(eventually([&] { return counted() == calls + 3; }));
  ASSERT_TRUE(eventually([&] { return inflight() > kThree; }));

  server_->sweep(before + std::chrono::seconds(29));
  EXPECT_GT(inflight(), kThree);
  EXPECT_TRUE(eventually([&] {
    server_->sweep(std::chrono::steady_clock::now() + std::chrono::seconds(31));
    return inflight() == 0;
  }));
  EXPECT_EQ(read_exposition(server_->metrics().text())
                .sum("kvtier_admission_rejected_total", {{"reason", "slow_consumer"}}),
            3);
}

TEST_F(UnreadTest, RepliesAreGivenUpWithTheirClient) {
  const std::uint64_t calls = counted();
  for (int i = 0; i < 3; ++i) fetch();
  ASSERT_TRUE(eventually([&] { return counted() == calls + 3; }));
  for (Unread& call : calls_) call.context.TryCancel();
  EXPECT_TRUE(eventually([&] { return inflight() == 0; }));
}

}  // namespace
}  // namespace kvtier::services::testing
