#include "kvtier/client.h"
#include "kvtier/v1/attention.grpc.pb.h"
#include "kvtier/v1/session.grpc.pb.h"

#include "tests/services/server/raw_call.h"
#include "tests/services/server/server_fixture.h"
#include "tests/support/eventually.h"

#include <gmock/gmock.h>
#include <grpc/grpc.h>
#include <grpcpp/client_context.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <openssl/rand.h>
#include <thread>

namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAre;

const std::string kServing("\x08\x01", 2);
const std::string kNotServing("\x08\x02", 2);
constexpr const char* kHealthCheck = "/grpc.health.v1.Health/Check";

class StreamTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    start(configure());
    channel_ = raw_channel(socket());
    sessions_ = v1::SessionService::NewStub(channel_);
    attention_ = v1::AttentionService::NewStub(channel_);
  }
  [[nodiscard]] virtual ServerOptions configure() const { return options(); }

  static void set_deadline(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  }
  std::string open() {
    grpc::ClientContext context;
    set_deadline(context);
    v1::CreateSessionRequest request;
    *request.mutable_geometry() = small_geometry();
    v1::CreateSessionResponse response;
    const grpc::Status status = sessions_->CreateSession(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.session().name();
  }
  std::vector<std::int64_t> lengths(const std::string& name) {
    grpc::ClientContext context;
    set_deadline(context);
    v1::GetSessionRequest request;
    request.set_name(name);
    v1::GetSessionResponse response;
    EXPECT_TRUE(sessions_->GetSession(&context, request, &response).ok());
    return {response.session().layer_lengths().begin(), response.session().layer_lengths().end()};
  }

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::SessionService::Stub> sessions_;
  std::unique_ptr<v1::AttentionService::Stub> attention_;
};

TEST_F(StreamTest, SocketsAreOfThisUserAlone) {
  for (const char* name : {"kvtier.sock", "admin.sock"}) {
    const auto status = std::filesystem::status(folder_ / name);
    EXPECT_EQ(status.type(), std::filesystem::file_type::socket);
    EXPECT_EQ(status.permissions(),
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  }
}

TEST_F(StreamTest, AppendStoresChunksOfSeveralLayers) {
  const std::string name = open();
  grpc::ClientContext context;
  set_deadline(context);
  v1::AppendResponse response;
  const auto stream = attention_->Append(&context, &response);
  v1::AppendRequest first = append_request(0, 5, 1);
  first.set_session(name);
  ASSERT_TRUE(stream->Write(first));
  ASSERT_TRUE(stream->Write(append_request(0, 6, 2)));
  ASSERT_TRUE(stream->Write(append_request(1, 7, 3)));
  stream->WritesDone();

  ASSERT_TRUE(stream->Finish().ok());

  EXPECT_THAT(response.layer_lengths(), ElementsAre(11, 7));
}

TEST_F(StreamTest, AppendEndsAtARefusedChunkAndKeepsThoseBefore) {
  const std::string name = open();
  grpc::ClientContext context;
  set_deadline(context);
  v1::AppendResponse response;
  const auto stream = attention_->Append(&context, &response);
  v1::AppendRequest first = append_request(0, 5, 1);
  first.set_session(name);
  stream->Write(first);
  stream->Write(append_request(99, 6, 2));
  stream->Write(append_request(1, 7, 3));
  stream->WritesDone();

  const grpc::Status status = stream->Finish();

  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(lengths(name), ElementsAre(5, 0));
}

TEST_F(StreamTest, StreamsAreAboutOneSession) {
  const std::string name = open();
  const std::string other = open();
  grpc::ClientContext context;
  set_deadline(context);
  const auto stream = attention_->Decode(&context);
  v1::DecodeResponse response;
  ASSERT_TRUE(stream->Write(decode_request(name, 0, 1, 1)));
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(stream->Write(decode_request("", 0, 2, 1)));
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(stream->Write(decode_request(other, 0, 3, 1)));
  EXPECT_FALSE(stream->Read(&response));

  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(lengths(name), ElementsAre(2, 0));
  EXPECT_THAT(lengths(other), ElementsAre(0, 0));
}

TEST_F(StreamTest, StreamWithoutASessionIsNotFound) {
  grpc::ClientContext context;
  set_deadline(context);
  const auto stream = attention_->Decode(&context);
  stream->Write(decode_request("", 0, 1, 1));
  v1::DecodeResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(StreamTest, StreamWithoutMessagesEndsWell) {
  grpc::ClientContext context;
  set_deadline(context);
  const auto stream = attention_->Decode(&context);
  stream->WritesDone();
  v1::DecodeResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, CancelledStreamsLeaveNothingInFlight) {
  const std::string name = open();
  for (int i = 0; i < 200; ++i) {
    grpc::ClientContext context;
    set_deadline(context);
    const auto stream = attention_->Decode(&context);
    stream->Write(decode_request(name, 0, i + 1, 1));
    context.TryCancel();
    EXPECT_FALSE(stream->Finish().ok());
  }
  const std::vector<std::int64_t> stored = lengths(name);
  EXPECT_LE(stored[0], 200);
  server_->drain(std::chrono::milliseconds(0));  // ends whatever is still on its way
  EXPECT_TRUE(gives_all_bytes_back());
}

TEST_F(StreamTest, ExpiredDeadlineStoresNothing) {
  const std::string name = open();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() - std::chrono::seconds(1));
  v1::BatchDecodeRequest request;
  *request.add_items() = decode_request(name, 0, 1, 1);
  v1::BatchDecodeResponse response;
  EXPECT_EQ(attention_->BatchDecode(&context, request, &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(lengths(name), ElementsAre(0, 0));
}

TEST_F(ServerTest, ASweepWithoutMemoryEndsNothing) {
  ServerOptions options = this->options();
  std::atomic<int> sweeps{0};
  options.core.group_memory = [&sweeps]() -> std::vector<GroupMemory> {
    if (sweeps++ == 0) throw std::bad_alloc();
    return {};
  };
  start(options);
  EXPECT_TRUE(kvtier::testing::eventually([&] { return sweeps > 1; }));
  server_.reset();  // before what it counts in
}

TEST_F(StreamTest, IdleStreamIsEnded) {
  grpc::ClientContext context;
  set_deadline(context);
  const auto stream = attention_->Decode(&context);
  stream->WaitForInitialMetadata();  // the server waits for a request

  server_->sweep(std::chrono::steady_clock::now());
  server_->sweep(std::chrono::steady_clock::now() + std::chrono::hours(1));

  v1::DecodeResponse response;
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(reason_of(status), "STREAM_IDLE");
}

TEST_F(StreamTest, KeepAliveAnswersPerName) {
  const std::string name = open();
  grpc::ClientContext context;
  set_deadline(context);
  const auto stream = sessions_->KeepAlive(&context);
  for (int i = 0; i < 3; ++i) {
    v1::KeepAliveRequest request;
    request.add_names(name);
    request.add_names("sessions/none");
    v1::KeepAliveResponse response;
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&response));
    ASSERT_EQ(response.statuses_size(), 2);
    EXPECT_EQ(response.statuses(0).code(), 0);
    EXPECT_EQ(response.statuses(1).code(), 5);
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, DrainEndsOpenStreamsAndTurnsHealth) {
  const std::string name = open();
  EXPECT_EQ(raw_call(channel_, kHealthCheck, "").bytes, kServing);
  EXPECT_EQ(raw_call(channel_, kHealthCheck, "\x0A\x18kvtier.v1.SessionService").bytes, kServing);
  EXPECT_EQ(raw_call(channel_, kHealthCheck, "\x0A\x04none").status.error_code(),
            grpc::StatusCode::NOT_FOUND);
  grpc::ClientContext context;
  set_deadline(context);
  const auto stream = attention_->Decode(&context);
  v1::DecodeResponse response;
  ASSERT_TRUE(stream->Write(decode_request(name, 0, 1, 1)));
  ASSERT_TRUE(stream->Read(&response));

  server_->drain(std::chrono::seconds(20));  // waits for no one: the stream is ended

  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(reason_of(status), "DRAINING");
}

TEST_F(StreamTest, DrainUnderLoadFailsCallsOnlyInWaysThatMayBeRepeated) {
  std::vector<std::string> names;
  constexpr int kThreads = 4;
  for (int t = 0; t < kThreads; ++t) names.push_back(open());
  std::atomic<int> succeeded{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::int64_t step = 1;; ++step) {
        grpc::ClientContext context;
        set_deadline(context);
        v1::BatchDecodeRequest request;
        *request.add_items() = decode_request(names[static_cast<std::size_t>(t)], 0, step, 1);
        v1::BatchDecodeResponse response;
        const grpc::Status status = attention_->BatchDecode(&context, request, &response);
        if (!status.ok()) {
          // gRPC itself cancels a call that arrives while it shuts down.
          EXPECT_TRUE(status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                      status.error_code() == grpc::StatusCode::CANCELLED)
              << status.error_message();
          return;
        }
        const v1::ItemStatus& item = response.items(0).status();
        if (item.code() != 0) {
          EXPECT_EQ(item.reason(), "DRAINING");
          return;
        }
        ++succeeded;
      }
    });
  }
  EXPECT_TRUE(kvtier::testing::eventually([&] { return succeeded >= 50; }));

  server_->drain(std::chrono::seconds(20));

  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(gives_all_bytes_back());
}

TEST_F(StreamTest, SecondServerOnTheSameSocketIsRefused) {
  try {
    const Server second(options());
    FAIL() << "started";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kFailedPrecondition);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("another server listens there"));
  }
  EXPECT_FALSE(open().empty());  // the first still serves
  server_.reset();
  start();
}

TEST_F(StreamTest, DrainByAnOperatorIsHandedOn) {
  server_.reset();
  std::atomic<int> asked{0};
  ServerOptions with_drain = options();
  with_drain.on_drain = [&asked] { ++asked; };
  start(with_drain);
  EXPECT_TRUE(
      raw_call(raw_channel(admin_socket()), "/kvtier.v1.AdminService/Drain", "").status.ok());
  EXPECT_EQ(asked, 1);
}

TEST_F(StreamTest, LogLevelIsAnOperatorsToChange) {
  server_.reset();
  std::vector<std::optional<LogLevel>> levels;
  ServerOptions with_log = options();
  with_log.set_log_level = [&levels](std::optional<LogLevel> level) { levels.push_back(level); };
  start(with_log);
  const auto set = [this](v1::LogLevel level) {
    v1::SetLogLevelRequest request;
    request.set_level(level);
    return raw_call(raw_channel(admin_socket()), "/kvtier.v1.AdminService/SetLogLevel",
                    request.SerializeAsString())
        .status.error_code();
  };
  EXPECT_EQ(set(v1::LOG_LEVEL_DEBUG), grpc::StatusCode::OK);
  EXPECT_EQ(set(v1::LOG_LEVEL_ERROR), grpc::StatusCode::OK);
  EXPECT_EQ(set(v1::LOG_LEVEL_OFF), grpc::StatusCode::OK);
  EXPECT_EQ(set(v1::LOG_LEVEL_UNSPECIFIED), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(set(static_cast<v1::LogLevel>(77)), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(levels, (std::vector<std::optional<LogLevel>>{LogLevel::kDebug, LogLevel::kError,
                                                          std::nullopt}));
  server_.reset();
  start();  // without a log
  EXPECT_EQ(set(v1::LOG_LEVEL_INFO), grpc::StatusCode::FAILED_PRECONDITION);
}

class GrpcTest : public ServerTest {};

// Its shutdown can take 10 s.
TEST_F(GrpcTest, OutlivesItsLastServerAndClient) {
  start();
  { const Client client({.server = socket()}); }
  server_.reset();
  EXPECT_EQ(grpc_is_initialized(), 1);
}

bool draw() {
  std::array<unsigned char, 8> bytes{};
  return RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) == 1;
}

/// Ends the process, with 0 where OpenSSL works after what it has registered for the end.
[[noreturn]] void exit_after_openssl() {
  (void)std::atexit([] { std::_Exit(draw() ? 0 : 1); });
  (void)draw();  // the first use, which registers
  std::exit(2);
}

// Threads of gRPC use it until then, and would leak, or use what has been freed.
TEST(OpenSslDeathTest, LastsUntilTheProcessEnds) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_after_openssl(), ::testing::ExitedWithCode(0), "");
}

class OverloadTest : public StreamTest {
 protected:
  [[nodiscard]] ServerOptions configure() const override {
    ServerOptions options = this->options();
    options.core.max_queued_per_session = 1;
    return options;
  }
};

TEST_F(OverloadTest, BatchTakesOnePlaceInTheQueueOfItsSession) {
  const std::string name = open();
  grpc::ClientContext context;
  set_deadline(context);
  v1::BatchDecodeRequest request;
  for (int i = 0; i < 100; ++i) *request.add_items() = decode_request(name, 0, i + 1, 1);
  v1::BatchDecodeResponse response;

  ASSERT_TRUE(attention_->BatchDecode(&context, request, &response).ok());

  for (const auto& item : response.items()) EXPECT_EQ(item.status().reason(), "");
  EXPECT_THAT(lengths(name), ElementsAre(100, 0));
}

}  // namespace
}  // namespace kvtier::services::testing
