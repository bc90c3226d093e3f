#include "services/server/grpc_stream.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

namespace kvtier::services::testing {
namespace {

/// What gRPC's reactors have, without a call.
class FakeReactor {
 public:
  FakeReactor() = default;
  FakeReactor(const FakeReactor&) = delete;  // the stream's state holds its address
  FakeReactor& operator=(const FakeReactor&) = delete;
  virtual ~FakeReactor() = default;
  virtual void OnDone() = 0;
  void Finish(const grpc::Status& status) { finished.push_back(status.error_code()); }

  std::vector<grpc::StatusCode> finished;
};

class FakeStream final : public RegisteredStream<FakeReactor> {
 public:
  using RegisteredStream::enlist;
  using RegisteredStream::enter;
  using RegisteredStream::finish;
  using RegisteredStream::finish_anyhow;
  using RegisteredStream::RegisteredStream;
};

class GrpcStreamTest : public ::testing::Test {
 protected:
  /// Ends a stream that works, and has `finish` end it when the work is done.
  template <typename Finish>
  static std::vector<grpc::StatusCode> codes_of(Finish finish) {
    StreamRegistry registry([] { return std::chrono::steady_clock::now(); });
    grpc::CallbackServerContext context;
    auto* stream = new FakeStream(registry, context);  // deletes itself
    stream->enlist();
    EXPECT_TRUE(stream->enter(StreamState::Phase::kWorking, [] {}));
    registry.end_all({grpc::StatusCode::UNAVAILABLE, "the server drains"});
    EXPECT_TRUE(stream->finished.empty()) << "it is at work";
    finish(*stream);
    std::vector<grpc::StatusCode> codes = stream->finished;
    stream->OnDone();
    return codes;
  }
};

TEST_F(GrpcStreamTest, AStreamThatIsToEndEndsAfterTheRequestAtWork) {
  EXPECT_EQ(codes_of([](FakeStream& stream) { stream.finish(grpc::Status::OK); }),
            std::vector{grpc::StatusCode::UNAVAILABLE});
}

TEST_F(GrpcStreamTest, AStreamWhoseWorkIsAllDoneHasItsOutcomeThoughItWasToEnd) {
  EXPECT_EQ(codes_of([](FakeStream& stream) {
              stream.finish_anyhow(grpc::Status::OK);
              stream.finish_anyhow(grpc::Status::CANCELLED);
            }),
            std::vector{grpc::StatusCode::OK});
}

}  // namespace
}  // namespace kvtier::services::testing
