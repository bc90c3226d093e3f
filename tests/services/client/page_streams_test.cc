#include "services/client/page_streams.h"

#include "kvtier/v1/transfer.grpc.pb.h"

#include "services/client/connection.h"
#include "tests/support/eventually.h"
#include "transfer/tiers/crc32c.h"

#include <gmock/gmock.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <stdlib.h>
#include <string>
#include <thread>
#include <vector>

namespace kvtier::services::testing {
namespace {

using kvtier::testing::kPatience;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Bytes = std::vector<std::byte>;
using Handles = std::vector<std::string>;

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// What the pages have: one of `size` bytes is named "NUMBER".
Bytes page_of(const std::string& handle, std::size_t size) {
  std::mt19937_64 random(std::stoul(handle));
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Sends pages in chunks of up to 1 MiB, and does with each call what the test says.
class ScriptedPages final : public v1::TransferService::Service {
 public:
  using Writer = grpc::ServerWriter<v1::ReadPagesResponse>;
  /// Called with a call's number, from 0 on, and its first handle. What is not OK ends it.
  using Script = std::function<grpc::Status(grpc::ServerContext&, int, const std::string&)>;

  grpc::Status ReadPages(grpc::ServerContext* context, const v1::ReadPagesRequest* request,
                         Writer* writer) override {
    const Handles handles(request->handles().begin(), request->handles().end());
    int call = 0;
    {
      const std::lock_guard lock(mutex_);
      call = static_cast<int>(calls_.size());
      calls_.push_back(handles);
      ++running_;
    }
    changed_.notify_all();
    const std::shared_ptr<void> end(nullptr, [this](void*) {
      const std::lock_guard lock(mutex_);
      --running_;
      changed_.notify_all();
    });
    if (script) {
      grpc::Status status = script(*context, call, handles.empty() ? "" : handles.front());
      if (!status.ok()) return status;
    }
    for (int i = 0; i < request->handles_size(); ++i)
      send(handles[static_cast<std::size_t>(i)], i, *writer);
    return grpc::Status::OK;
  }

  /// Waits until there have been so many calls.
  void await_calls(std::size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return calls_.size() >= count; }));
  }
  [[nodiscard]] std::vector<Handles> calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  /// Waits for the end of all calls, which a client that has cancelled them does not, so that the
  /// script may be replaced.
  void forget_calls() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return running_ == 0; }));
    calls_.clear();
  }

  Script script;
  std::size_t page_bytes = kMiB;
  std::string missing, damaged, garbled;  ///< Handles.

 private:
  void send(const std::string& handle, int index, Writer& writer) {
    const Bytes bytes = page_of(handle, page_bytes);
    for (std::size_t offset = 0; offset < bytes.size(); offset += kMiB) {
      v1::ReadPagesResponse response;
      auto& chunk = *response.add_chunks();
      chunk.set_index(index);
      if (handle == garbled) chunk.mutable_page()->set_handle(std::string(8192, 'x'));
      if (handle == missing) {
        chunk.mutable_status()->set_code(static_cast<int>(ErrorCode::kNotFound));
        chunk.mutable_status()->set_reason("PAGE_GONE");
        writer.Write(response);
        return;
      }
      const std::size_t size = std::min(kMiB, bytes.size() - offset);
      chunk.set_offset(static_cast<std::int64_t>(offset));
      chunk.set_data(bytes.data() + offset, size);
      if (offset == 0) {
        chunk.mutable_page()->set_crc32c(crc32c(bytes) + (handle == damaged ? 1U : 0U));
      }
      chunk.set_last(offset + size == bytes.size());
      if (!writer.Write(response)) return;
    }
  }

  std::mutex mutex_;  ///< Guards all below.
  std::condition_variable changed_;
  std::vector<Handles> calls_;
  int running_ = 0;
};

/// Holds a call until its client has gone.
grpc::Status hold(const grpc::ServerContext& context) {
  if (kvtier::testing::eventually([&] { return context.IsCancelled(); })) {
    return grpc::Status::CANCELLED;
  }
  return {grpc::StatusCode::INTERNAL, "expected the client to go"};
}

grpc::Status failure(grpc::StatusCode code) { return {code, "as the test says"}; }

class PageStreamsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    endpoint_ = "unix:" + (folder_ / "pages.sock").string();
    grpc::ServerBuilder builder;
    builder.AddListeningPort(endpoint_, grpc::InsecureServerCredentials());
    builder.RegisterService(&pages_);
    server_ = builder.BuildAndStart();
    connect({.server = endpoint_});
  }
  void TearDown() override {
    connection_.reset();
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  /// With all connections that there may be.
  void connect(ClientOptions options) {
    if (options.page_streams == 0) options.page_streams = 2;
    connection_ = std::make_unique<Connection>(options);
    const auto streams = static_cast<std::size_t>(options.page_streams);
    EXPECT_TRUE(kvtier::testing::eventually(
        [&] { return connection_->channels(streams).size() >= streams; }));
  }
  /// Pages "0", "1" and so on, of `sizes` bytes at their places.
  grpc::Status read(const std::vector<std::size_t>& sizes) {
    places_.clear();
    gets_.clear();
    for (const std::size_t size : sizes) places_.emplace_back(size);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      gets_.push_back({.handle = std::to_string(i), .to = places_[i]});
    }
    results_.assign(sizes.size(), {});
    return read_pages(*connection_, {"lease", gets_}, results_);
  }
  grpc::Status read(std::size_t pages) {
    return read(std::vector<std::size_t>(pages, pages_.page_bytes));
  }
  void expect_read(std::size_t i) {
    EXPECT_TRUE(results_[i].ok()) << i << ": " << results_[i].reason;
    EXPECT_EQ(results_[i].crc32c, crc32c(places_[i]));
    EXPECT_TRUE(places_[i] == page_of(std::to_string(i), pages_.page_bytes)) << i;
  }
  void expect_all_read() {
    for (std::size_t i = 0; i < results_.size(); ++i) expect_read(i);
  }
  [[nodiscard]] std::vector<Handles> sorted_calls() {
    std::vector<Handles> calls = pages_.calls();
    std::ranges::sort(calls);
    return calls;
  }

  std::filesystem::path folder_;
  std::string endpoint_;
  ScriptedPages pages_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Connection> connection_;
  std::vector<Bytes> places_;
  std::vector<RemotePages::Get> gets_;
  std::vector<RemotePages::Result> results_;
};

TEST_F(PageStreamsTest, ReadsPartsAtATimeToTheirPlaces) {
  // No call is answered before the other has come.
  pages_.script = [this](auto&, int, const std::string&) {
    pages_.await_calls(2);
    return grpc::Status::OK;
  };
  EXPECT_TRUE(read(9).ok());
  expect_all_read();
  EXPECT_THAT(sorted_calls(),
              ElementsAre(ElementsAre("0", "1", "2", "3", "4"), ElementsAre("5", "6", "7", "8")));
}

TEST_F(PageStreamsTest, ReadsAsManyPartsAsItMay) {
  connect({.server = endpoint_, .page_streams = 3});
  pages_.script = [this](auto&, int, const std::string&) {
    pages_.await_calls(3);
    return grpc::Status::OK;
  };
  EXPECT_TRUE(read(12).ok());
  expect_all_read();
  EXPECT_THAT(sorted_calls(), Each(SizeIs(4)));
}

TEST_F(PageStreamsTest, ReadsPagesOfSeveralMessages) {
  pages_.page_bytes = 3 * kMiB + 12;
  EXPECT_TRUE(read(5).ok());
  expect_all_read();
  EXPECT_THAT(sorted_calls(), ElementsAre(SizeIs(3), SizeIs(2)));
}

TEST_F(PageStreamsTest, DividesByBytes) {
  EXPECT_TRUE(read({6 * kMiB, kMiB, kMiB, kMiB, kMiB}).ok());
  EXPECT_THAT(sorted_calls(), ElementsAre(ElementsAre("0"), ElementsAre("1", "2", "3", "4")));
  EXPECT_EQ(results_[0].reason, "CHECKSUM_FAILED");  // the page is shorter
  for (std::size_t i = 1; i < 5; ++i) expect_read(i);
  pages_.forget_calls();
  EXPECT_TRUE(read({kMiB, kMiB, kMiB, kMiB, 6 * kMiB}).ok());
  EXPECT_THAT(sorted_calls(), ElementsAre(ElementsAre("0", "1", "2", "3"), ElementsAre("4")));
  for (std::size_t i = 0; i < 4; ++i) expect_read(i);
}

TEST_F(PageStreamsTest, DoesNotDivideWhatIsSmall) {
  EXPECT_TRUE(read(0).ok());
  EXPECT_THAT(pages_.calls(), ElementsAre(IsEmpty()));
  for (const std::size_t pages : {1U, 7U}) {
    pages_.forget_calls();
    EXPECT_TRUE(read(pages).ok());
    expect_all_read();
    EXPECT_THAT(pages_.calls(), ElementsAre(SizeIs(pages)));
  }
  pages_.forget_calls();
  pages_.page_bytes = 8 * kMiB;  // is whole
  EXPECT_TRUE(read(1).ok());
  expect_all_read();
  EXPECT_THAT(pages_.calls(), SizeIs(1));
}

TEST_F(PageStreamsTest, DoesNotDivideWhenItMustNot) {
  connect({.server = endpoint_, .page_streams = 1});
  EXPECT_TRUE(read(16).ok());
  expect_all_read();
  EXPECT_THAT(pages_.calls(), SizeIs(1));
}

TEST_F(PageStreamsTest, TellsPageByPageWhatFailed) {
  pages_.missing = "1";
  pages_.damaged = "6";
  EXPECT_TRUE(read(8).ok());
  EXPECT_THAT(pages_.calls(), SizeIs(2));
  EXPECT_EQ(results_[1].code, ErrorCode::kNotFound);
  EXPECT_EQ(results_[1].reason, "PAGE_GONE");
  EXPECT_EQ(results_[6].code, ErrorCode::kDataLoss);
  EXPECT_EQ(results_[6].reason, "CHECKSUM_FAILED");
  for (const std::size_t i : {0U, 2U, 3U, 4U, 5U, 7U}) expect_read(i);
}

TEST_F(PageStreamsTest, ReadsAPartAgainThatIsRefused) {
  for (const char* refused : {"0", "4"}) {
    for (const auto code : {grpc::StatusCode::RESOURCE_EXHAUSTED, grpc::StatusCode::UNAVAILABLE,
                            grpc::StatusCode::CANCELLED}) {
      pages_.forget_calls();
      pages_.script = [&](auto&, int call, const std::string& first) {
        pages_.await_calls(2);
        return call < 2 && first == refused ? failure(code) : grpc::Status::OK;
      };
      EXPECT_TRUE(read(8).ok());
      expect_all_read();
      ASSERT_THAT(pages_.calls(), SizeIs(3));
      EXPECT_EQ(pages_.calls()[2].front(), refused);
      EXPECT_THAT(pages_.calls()[2], SizeIs(4));
    }
  }
}

TEST_F(PageStreamsTest, FailsWhenAPartIsRefusedAgain) {
  pages_.script = [&](auto&, int, const std::string& first) {
    pages_.await_calls(2);
    return first == "4" ? failure(grpc::StatusCode::RESOURCE_EXHAUSTED) : grpc::Status::OK;
  };
  EXPECT_EQ(read(8).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(pages_.calls(), SizeIs(3));
}

TEST_F(PageStreamsTest, IsRefusedWhenAllPartsAre) {
  pages_.script = [&](auto&, int, const std::string&) {
    return failure(grpc::StatusCode::RESOURCE_EXHAUSTED);
  };
  EXPECT_EQ(read(8).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(pages_.calls(), SizeIs(2));
}

TEST_F(PageStreamsTest, EndsTheOthersWhenAPartFails) {
  for (const char* failing : {"0", "4"}) {
    pages_.forget_calls();
    pages_.script = [this, failing](grpc::ServerContext& context, int, const std::string& first) {
      pages_.await_calls(2);
      return first == failing ? failure(grpc::StatusCode::FAILED_PRECONDITION) : hold(context);
    };
    EXPECT_EQ(read(8).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(pages_.calls(), SizeIs(2));
  }
}

TEST_F(PageStreamsTest, ThrowsForAMessageThatNoServerSends) {
  pages_.garbled = "5";
  pages_.script = [this](grpc::ServerContext& context, int, const std::string& first) {
    pages_.await_calls(2);
    return first == "0" ? hold(context) : grpc::Status::OK;
  };
  EXPECT_THROW(static_cast<void>(read(8)), Error);
}

TEST_F(PageStreamsTest, EndsAtItsDeadline) {
  connect({.server = endpoint_, .timeout = std::chrono::milliseconds(200)});
  pages_.script = [](grpc::ServerContext& context, int, const std::string& first) {
    return first == "0" ? hold(context) : failure(grpc::StatusCode::UNAVAILABLE);
  };
  EXPECT_EQ(read(8).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(PageStreamsTest, EndsWithTheServer) {
  pages_.script = [](grpc::ServerContext& context, int, const std::string&) {
    return hold(context);
  };
  auto status = std::async(std::launch::async, [this] { return read(8); });
  pages_.await_calls(2);
  server_->Shutdown(std::chrono::system_clock::now());
  EXPECT_FALSE(status.get().ok());
  EXPECT_THAT(results_,
              Each(::testing::ResultOf([](const auto& result) { return result.ok(); }, false)));
}

TEST_F(PageStreamsTest, LendsChannelsThatAreConnected) {
  Connection unconnected({.server = "unix:" + (folder_ / "nobody.sock").string()});
  EXPECT_THAT(unconnected.channels(3), ElementsAre(&unconnected.channel()));
  EXPECT_THAT(connection_->channels(1), ElementsAre(&connection_->channel()));
  const std::vector<grpc::Channel*> two = connection_->channels(2);
  EXPECT_THAT(two, SizeIs(2));
  EXPECT_NE(two[0], two[1]);
  EXPECT_EQ(connection_->channels(2), two);
}

TEST_F(PageStreamsTest, RefusesOptionsOutOfRange) {
  for (const int streams : {-1, 17}) {
    EXPECT_THROW(Connection({.server = endpoint_, .page_streams = streams}), Error) << streams;
  }
}

}  // namespace
}  // namespace kvtier::services::testing
