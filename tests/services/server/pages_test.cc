#include "kvtier/v1/admin.grpc.pb.h"
#include "kvtier/v1/page.grpc.pb.h"
#include "kvtier/v1/transfer.grpc.pb.h"

#include "tests/services/server/raw_call.h"
#include "tests/services/server/server_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/gated_tier.h"
#include "transfer/tiers/crc32c.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <array>
#include <atomic>
#include <random>
#include <thread>

namespace kvtier::services::testing {
namespace {

/// Pages over gRPC, by the code that protobuf generates.
class PagesTest : public ServerTest {
 protected:
  static constexpr std::int64_t kPageBytes = (std::int64_t{3} << 20) + 5;

  void SetUp() override {
    ServerTest::SetUp();
    ServerOptions options = this->options();
    options.core.pages.arena_bytes = std::int64_t{32} << 20;
    options.core.now = [this] { return std::chrono::steady_clock::now() + later_.load(); };
    adjust(options);
    start(options);
    const auto channel = make_channel();
    pages_ = v1::PageService::NewStub(channel);
    transfer_ = v1::TransferService::NewStub(channel);
    v1::OpenLeaseRequest request;
    request.set_page_bytes(kPageBytes);
    v1::OpenLeaseResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(pages_->OpenLease(&context, request, &response).ok());
    lease_ = response.lease().name();
    chunk_bytes_ = static_cast<std::size_t>(response.limits().max_transfer_bytes()) - 1024;
  }

  virtual void adjust(ServerOptions& /*options*/) {}
  /// A connection of its own, with windows that stay as they are, as those of kvtier's clients: a
  /// server gets as far ahead of a reader in every step.
  [[nodiscard]] std::shared_ptr<grpc::Channel> make_channel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1 << 20);
    return grpc::CreateCustomChannel(socket(), grpc::InsecureChannelCredentials(), arguments);
  }
  static std::string bytes_of(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::string bytes(static_cast<std::size_t>(kPageBytes), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    return bytes;
  }
  static std::uint32_t crc_of(const std::string& bytes) {
    return crc32c(std::as_bytes(std::span(bytes.data(), bytes.size())));
  }
  std::vector<std::string> reserve(const std::vector<std::string>& hashes) {
    v1::BatchReservePagesRequest request;
    request.set_lease(lease_);
    for (const std::string& hash : hashes) request.add_keys()->set_hash(hash);
    v1::BatchReservePagesResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(pages_->BatchReservePages(&context, request, &response).ok());
    std::vector<std::string> handles;
    for (const auto& item : response.items()) handles.push_back(item.page().handle());
    return handles;
  }
  v1::WritePagesRequest chunk_of(int index, const std::string& handle, const std::string& bytes,
                                 std::size_t offset) {
    v1::WritePagesRequest request;
    request.set_lease(lease_);
    auto& chunk = *request.add_chunks();
    chunk.set_index(index);
    chunk.set_handle(handle);
    chunk.set_offset(static_cast<std::int64_t>(offset));
    chunk.set_data(bytes.substr(offset, chunk_bytes_));
    chunk.set_last(offset + chunk.data().size() == bytes.size());
    if (chunk.last()) chunk.set_crc32c(crc_of(bytes));
    return request;
  }
  v1::WritePagesResponse write(const std::vector<std::string>& handles, std::uint64_t first_seed) {
    v1::WritePagesResponse response;
    grpc::ClientContext context;
    const auto stream = transfer_->WritePages(&context, &response);
    for (std::size_t i = 0; i < handles.size(); ++i) {
      const std::string bytes = bytes_of(first_seed + i);
      for (std::size_t offset = 0; offset < bytes.size(); offset += chunk_bytes_) {
        EXPECT_TRUE(stream->Write(chunk_of(static_cast<int>(i), handles[i], bytes, offset)));
      }
    }
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
    return response;
  }
  PageStats stats() { return server_->core().pages().stats(); }

  std::atomic<std::chrono::seconds> later_{std::chrono::seconds(0)};
  std::unique_ptr<v1::PageService::Stub> pages_;
  std::unique_ptr<v1::TransferService::Stub> transfer_;
  std::string lease_;
  std::size_t chunk_bytes_ = 0;
};

/// Whose writers wait for servers elsewhere.
class GatedPagesTest : public PagesTest {
 protected:
  using GatedTier = kvtier::testing::GatedTier;

  void adjust(ServerOptions& options) override {
    options.core.pages.waits_for_disk = true;
    options.core.pages.backing = [servers = servers_](const Tenant& /*tenant*/) {
      return PageBacking{.remote = {servers}, .write_time = kvtier::testing::kPatience};
    };
  }

  const std::shared_ptr<GatedTier> servers_ = std::make_shared<GatedTier>();
};

TEST_F(GatedPagesTest, WritersThatWaitHoldUpNobody) {
  constexpr std::size_t kWriters = 24;  // gRPC has 16 threads at most
  constexpr std::int64_t kSmallPage = 4096;
  v1::OpenLeaseRequest request;
  request.set_page_bytes(kSmallPage);
  v1::OpenLeaseResponse opened;
  grpc::ClientContext context;
  ASSERT_TRUE(pages_->OpenLease(&context, request, &opened).ok());
  lease_ = opened.lease().name();
  const std::vector<std::string> handles = reserve(std::vector<std::string>(kWriters));
  servers_->hold_next(GatedTier::Verb::kPut);
  const std::string first = reserve({"a"})[0];  // those without a hash are not put anywhere
  const std::string bytes(kSmallPage, 'x');
  std::array<v1::WritePagesResponse, kWriters> written;
  std::vector<std::thread> writers;
  for (std::size_t i = 0; i < kWriters; ++i) {
    writers.emplace_back([&, i] {
      grpc::ClientContext writing;
      const auto stream = transfer_->WritePages(&writing, &written[i]);
      (void)stream->Write(chunk_of(0, i == 0 ? first : handles[i], bytes, 0));
      stream->WritesDone();
      EXPECT_TRUE(stream->Finish().ok());
    });
    if (i == 0) {
      EXPECT_TRUE(servers_->await_held(GatedTier::Verb::kPut));
    }
  }

  const bool all_came = kvtier::testing::eventually(
      [&] { return stats().committed_pages == kWriters; }, std::chrono::seconds(20));

  EXPECT_TRUE(all_came);
  EXPECT_TRUE(servers_->is_held(GatedTier::Verb::kPut));
  servers_->let_go(GatedTier::Verb::kPut);
  for (std::thread& writer : writers) writer.join();
  for (const auto& response : written) EXPECT_EQ(response.items(0).status().code(), 0);
}

TEST_F(PagesTest, ComeBackAsTheyWereWritten) {
  const std::vector<std::string> handles = reserve({"a", "b"});
  const v1::WritePagesResponse written = write(handles, 1);
  ASSERT_EQ(written.items_size(), 2);
  EXPECT_EQ(written.items(1).page().crc32c(), crc_of(bytes_of(2)));

  v1::LookupPrefixRequest lookup;
  lookup.set_lease(lease_);
  for (const char* hash : {"a", "b", "c"}) lookup.add_hashes(hash);
  lookup.add_layers(0);
  v1::LookupPrefixResponse found;
  grpc::ClientContext lookup_context;
  ASSERT_TRUE(pages_->LookupPrefix(&lookup_context, lookup, &found).ok());
  EXPECT_EQ(found.hits(), 2);

  v1::ReadPagesRequest request;
  request.set_lease(lease_);
  for (const auto& page : found.pages()) request.add_handles(page.handle());
  request.add_handles("forged");
  grpc::ClientContext context;
  const auto stream = transfer_->ReadPages(&context, request);
  std::vector<std::string> bytes(3);
  v1::ReadPagesResponse response;
  while (stream->Read(&response)) {
    EXPECT_LE(response.ByteSizeLong(), 1U << 20U);
    for (const auto& chunk : response.chunks()) {
      bytes[static_cast<std::size_t>(chunk.index())] += chunk.data();
      EXPECT_EQ(chunk.status().reason(), chunk.index() == 2 ? "NOT_FOUND" : "");
    }
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(bytes[0], bytes_of(1));
  EXPECT_EQ(bytes[1], bytes_of(2));
  EXPECT_EQ(bytes[2], "");
  // gRPC lets its slices go.
  EXPECT_TRUE(kvtier::testing::eventually([this] { return stats().pinned_pages == 0; }));
}

TEST_F(PagesTest, AnOperatorEvictsThoseOfATenant) {
  const std::vector<std::string> handles = reserve({"a", "b", "c"});
  write(handles, 1);
  v1::BatchPinPagesRequest pin;
  pin.set_lease(lease_);
  pin.add_handles(handles[1]);
  v1::BatchPinPagesResponse pinned;
  grpc::ClientContext pin_context;
  ASSERT_TRUE(pages_->BatchPinPages(&pin_context, pin, &pinned).ok());

  const auto admin = v1::AdminService::NewStub(
      grpc::CreateChannel(admin_socket(), grpc::InsecureChannelCredentials()));
  v1::ListTenantsResponse tenants;
  grpc::ClientContext list_context;
  ASSERT_TRUE(admin->ListTenants(&list_context, {}, &tenants).ok());
  const auto evict = [&](const std::string& name, v1::EvictTenantResponse& response) {
    v1::EvictTenantRequest request;
    request.set_name(name);
    grpc::ClientContext context;
    return admin->EvictTenant(&context, request, &response).error_code();
  };
  const auto bytes_before = stats().committed_bytes;
  v1::EvictTenantResponse evicted;
  EXPECT_EQ(evict("nobody", evicted), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(stats().committed_pages, 3U);
  ASSERT_EQ(evict(tenants.tenants(0).name(), evicted), grpc::StatusCode::OK);
  EXPECT_EQ(evicted.pages(), 2U);
  EXPECT_EQ(evicted.bytes(), bytes_before / 3 * 2);
  EXPECT_EQ(stats().committed_pages, 1U);
  EXPECT_EQ(stats().pages_deleted, 2U);
  EXPECT_TRUE(pages_->BatchPinPages(std::make_unique<grpc::ClientContext>().get(), pin, &pinned)
                  .ok());  // the lease is as it was
  EXPECT_EQ(pinned.items(0).status().code(), 0);
  ASSERT_EQ(evict(tenants.tenants(0).name(), evicted), grpc::StatusCode::OK);
  EXPECT_EQ(evicted.pages(), 0U);
}

TEST_F(PagesTest, ReadAgainAfterTheyChangedInSharedMemoryAreCounted) {
  const std::vector<std::string> handles = reserve({"a", "b"});
  write(handles, 1);
  const auto read = [&](std::uint32_t stale_reads) {
    v1::ReadPagesRequest request;
    request.set_lease(lease_);
    for (const std::string& handle : handles) request.add_handles(handle);
    request.set_stale_reads(stale_reads);
    grpc::ClientContext context;
    const auto stream = transfer_->ReadPages(&context, request);
    v1::ReadPagesResponse response;
    while (stream->Read(&response)) continue;
    EXPECT_TRUE(stream->Finish().ok());
    return server_->core().transfers().num_reread();
  };
  EXPECT_EQ(read(0), 0U);
  EXPECT_EQ(read(1), 1U);
  EXPECT_EQ(read(4'000'000'000), 3U) << "no more than it asks for";
}

TEST_F(PagesTest, HalfWrittenPagesComeBackWithTheLease) {
  const std::vector<std::string> handles = reserve({"a"});
  {
    v1::WritePagesResponse response;
    grpc::ClientContext context;
    const auto stream = transfer_->WritePages(&context, &response);
    ASSERT_TRUE(stream->Write(chunk_of(0, handles[0], bytes_of(1), 0)));
    // All of the chunk: a page that is written to is given back once that is over.
    EXPECT_TRUE(
        kvtier::testing::eventually([this] { return stats().bytes_written >= chunk_bytes_; }));
    context.TryCancel();
    EXPECT_FALSE(stream->Finish().ok());
  }
  EXPECT_EQ(stats().reserved_pages, 1U);
  later_ = std::chrono::seconds(61);
  server_->sweep(std::chrono::steady_clock::now());
  EXPECT_EQ(stats().reserved_bytes, 0U);
  EXPECT_EQ(server_->core().pages().num_leases(), 0U);
  EXPECT_EQ(server_->core().tenants().all()[0]->kv_bytes(), 0);
}

TEST_F(PagesTest, HostileMessagesEndTheirCallAndNothingElse) {
  const std::vector<std::string> handles = reserve({"a"});
  const auto send = [&](const v1::WritePagesRequest& request) {
    v1::WritePagesResponse response;
    grpc::ClientContext context;
    const auto stream = transfer_->WritePages(&context, &response);
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish().error_code();
  };
  v1::WritePagesRequest request = chunk_of(0, handles[0], bytes_of(1), 0);
  request.mutable_chunks(0)->mutable_data()->resize((std::size_t{1} << 20) + (64 << 10));
  EXPECT_EQ(send(request), grpc::StatusCode::INVALID_ARGUMENT) << "too large";
  request = chunk_of(5, handles[0], bytes_of(1), 0);
  EXPECT_EQ(send(request), grpc::StatusCode::INVALID_ARGUMENT) << "index";
  request = chunk_of(0, handles[0], bytes_of(1), 0);
  request.set_lease("leases/forged");
  EXPECT_EQ(send(request), grpc::StatusCode::NOT_FOUND);
  request.set_lease(std::string(1000, 'x'));
  EXPECT_EQ(send(request), grpc::StatusCode::INVALID_ARGUMENT) << "a name that long";
  const RawReply reply = raw_call(raw_channel(socket()), "/kvtier.v1.TransferService/WritePages",
                                  std::string(100, '\xff'));
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(stats().bytes_written, 0U);
  write(handles, 7);
  EXPECT_EQ(stats().committed_pages, 1U);
}

TEST_F(PagesTest, ThousandsOfForgedHandlesReachNothing) {
  const std::string handle = reserve({"a"})[0];
  write({handle}, 1);
  const auto seed = std::random_device{}();
  std::mt19937_64 random(seed);
  v1::ReadPagesRequest reads;
  v1::BatchPinPagesRequest pins;
  reads.set_lease(lease_);
  pins.set_lease(lease_);
  for (int i = 0; i < 4096; ++i) {
    std::string forged = handle;
    for (std::size_t at = i % 2 == 0 ? 6 : 22; at < forged.size(); ++at) {
      forged[at] = static_cast<char>('A' + static_cast<char>(random() % 26));
    }
    reads.add_handles(forged);
    pins.add_handles(forged);
  }
  grpc::ClientContext context;
  const auto stream = transfer_->ReadPages(&context, reads);
  v1::ReadPagesResponse response;
  int refused = 0;
  while (stream->Read(&response)) {
    for (const auto& chunk : response.chunks()) {
      EXPECT_EQ(chunk.status().reason(), "NOT_FOUND") << "seed " << seed;
      EXPECT_TRUE(chunk.data().empty());
      ++refused;
    }
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(refused, 4096);
  v1::BatchPinPagesResponse pinned;
  grpc::ClientContext pin_context;
  ASSERT_TRUE(pages_->BatchPinPages(&pin_context, pins, &pinned).ok());
  for (const auto& item : pinned.items()) EXPECT_EQ(item.status().reason(), "NOT_FOUND");
  EXPECT_EQ(stats().pinned_pages, 0U);
}

TEST_F(PagesTest, ClientsThatAreTooSlowAreCutOffAndNobodyElse) {
  const std::vector<std::string> handles = reserve({"a", "b", "c"});
  write({handles[0], handles[1]}, 1);
  v1::ReadPagesRequest request;
  request.set_lease(lease_);
  constexpr std::size_t kPages = 30;
  for (std::size_t i = 0; i < kPages; ++i) request.add_handles(handles[i % 2]);

  const auto slow_stub = v1::TransferService::NewStub(make_channel());
  grpc::ClientContext slow_context;
  const auto slow_reader = slow_stub->ReadPages(&slow_context, request);
  grpc::ClientContext writer_context;
  v1::WritePagesResponse written;
  const auto slow_writer = transfer_->WritePages(&writer_context, &written);
  ASSERT_TRUE(slow_writer->Write(chunk_of(0, handles[2], bytes_of(3), 0)));
  ASSERT_TRUE(kvtier::testing::eventually([&] {
    return stats().bytes_written >= 2 * static_cast<std::uint64_t>(kPageBytes) + chunk_bytes_;
  }));
  // Reads on, 4 MiB in every 10 s of the server's clock.
  grpc::ClientContext context;
  const auto reader = transfer_->ReadPages(&context, request);
  std::string bytes;
  v1::ReadPagesResponse response;
  std::uint64_t sent = 0;
  for (int step = 0; step < 9; ++step) {
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(reader->Read(&response)) << reader->Finish().error_message();
      for (const auto& chunk : response.chunks()) bytes += chunk.data();
    }
    EXPECT_LE(server_->core().inflight_bytes(), std::int64_t{8} << 20) << "of two readers";
    EXPECT_TRUE(
        kvtier::testing::eventually([&] { return stats().bytes_read >= sent + (1U << 20U); }));
    sent = stats().bytes_read;
    later_ = later_.load() + std::chrono::seconds(10);
    server_->sweep(std::chrono::steady_clock::now() + later_.load());
  }

  const grpc::Status ended = slow_writer->Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(reason_of(ended), "SLOW_CLIENT");
  // What tells it why would come behind what it does not read.
  while (slow_reader->Read(&response)) {
  }
  EXPECT_EQ(slow_reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  while (reader->Read(&response)) {
    for (const auto& chunk : response.chunks()) bytes += chunk.data();
  }
  EXPECT_TRUE(reader->Finish().ok());
  constexpr auto kSize = static_cast<std::size_t>(kPageBytes);
  ASSERT_EQ(bytes.size(), kPages * kSize);
  const std::array<std::string, 2> expected{bytes_of(1), bytes_of(2)};
  for (std::size_t i = 0; i < kPages; ++i) {
    ASSERT_EQ(bytes.compare(i * kSize, kSize, expected[i % 2]), 0) << i;
  }
}

TEST_F(PagesTest, ReaderThatDoesNotReadHoldsUpNeitherOthersNorTheEnd) {
  const std::vector<std::string> handles = reserve({"a", "b", "c"});
  write(handles, 1);
  v1::ReadPagesRequest request;
  request.set_lease(lease_);
  for (int i = 0; i < 100; ++i) request.add_handles(handles[static_cast<std::size_t>(i % 3)]);
  grpc::ClientContext context;
  const auto slow = transfer_->ReadPages(&context, request);
  v1::ReadPagesResponse response;
  ASSERT_TRUE(slow->Read(&response));
  EXPECT_LE(server_->core().inflight_bytes(), std::int64_t{4} << 20);
  write(reserve({"d"}), 4);
  context.TryCancel();
  EXPECT_FALSE(slow->Finish().ok());
  server_->drain(std::chrono::milliseconds(0));
  EXPECT_TRUE(gives_all_bytes_back());
}

}  // namespace
}  // namespace kvtier::services::testing
