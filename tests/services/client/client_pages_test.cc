#include "kvtier/client.h"

#include "services/page_cache/page_backing.h"
#include "tests/services/server/server_fixture.h"
#include "tests/support/eventually.h"
#include "transfer/tiers/crc32c.h"

#include <gmock/gmock.h>

#include <array>
#include <fstream>
#include <thread>

namespace kvtier::services::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;
using Bytes = std::vector<std::byte>;

/// Over shared memory, and over gRPC.
class ClientPagesTest : public ServerTest, public ::testing::WithParamInterface<bool> {
 protected:
  static constexpr std::int64_t kPageBytes = (std::int64_t{2} << 20) + 12;

  void SetUp() override {
    ServerTest::SetUp();
    start_server(options());
  }
  void start_server(ServerOptions options) {
    pages_.reset();
    client_.reset();
    server_.reset();
    options.data.listen = {parse_endpoint(socket() + ".data")};
    options.core.pages.arena_bytes = std::int64_t{140} << 20;  // 35 pages, more than one call's
    start(options);
    client_ = std::make_unique<Client>(ClientOptions{.server = socket(), .data_plane = GetParam()});
    pages_ = std::make_unique<RemotePages>(open());
  }
  void TearDown() override {
    pages_.reset();
    client_.reset();
    ServerTest::TearDown();
  }

  RemotePages open() { return client_->open_pages({.model = "m", .page_bytes = kPageBytes}); }
  static Bytes bytes_of(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Bytes bytes(static_cast<std::size_t>(kPageBytes));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
  }
  RemotePages::Result put(const std::string& hash, std::uint64_t seed) {
    const Bytes bytes = bytes_of(seed);
    const RemotePages::Put page{.hash = hash, .bytes = bytes};
    return pages_->put({&page, 1}).at(0);
  }
  /// Turns one bit of a committed page, as failing memory would.
  void flip_bit(const std::string& handle, std::size_t bit) {
    ServiceCore& core = server_->core();
    const PinnedPage page = core.pages().read(*core.tenants().all()[0], handle, Verify::kNo);
    auto* bytes = const_cast<std::byte*>(page.bytes().data());
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
  }
  /// Makes readers of the arena see a page as one that has gone, as they do while its place gets
  /// another; the server does not look there.
  void unindex_in_arena(const std::string& handle) {
    ServiceCore& core = server_->core();
    const Tenant& tenant = *core.tenants().all()[0];
    const PinnedPage page = core.pages().read(tenant, handle, Verify::kNo);
    const ArenaFile arena = core.pages().arena(tenant);
    auto* base =
        const_cast<std::byte*>(page.bytes().data()) - page_offset(arena.num_units, page.slot());
    ++reinterpret_cast<PageHeader*>(base + kPageHeadersOffset)[page.slot()].version;
  }
  PageStats stats() { return server_->core().pages().stats(); }
  /// A reply is there before gRPC lets the slices go that hold its pages.
  void await_no_pins() {
    EXPECT_TRUE(kvtier::testing::eventually([this] { return stats().pinned_pages == 0; }));
  }

  std::unique_ptr<Client> client_;
  std::unique_ptr<RemotePages> pages_;
  const std::array<int, 1> layer_{0};
};

TEST_P(ClientPagesTest, FindsEachHashForItself) {
  put("a", 1);
  put("b", 2);
  const std::vector<std::string> hashes{"x", "a", "x", "b"};
  EXPECT_EQ(pages_->contains(hashes, layer_), (std::vector<bool>{false, true, false, true}));
  const auto found = pages_->find(hashes, layer_, /*pin=*/true);
  ASSERT_THAT(found, SizeIs(4));
  EXPECT_THAT(found[0], IsEmpty());
  EXPECT_THAT(found[2], IsEmpty());
  std::vector<std::string> handles;
  for (const std::size_t i : {1U, 3U}) {
    ASSERT_THAT(found[i], SizeIs(1));
    EXPECT_EQ(found[i][0].bytes, kPageBytes);
    EXPECT_EQ(found[i][0].crc32c, crc32c(bytes_of(i == 1 ? 1 : 2)));
    handles.push_back(found[i][0].handle);
  }
  EXPECT_EQ(stats().pinned_pages, 2U);
  for (const RemotePages::Result& result : pages_->unpin(handles)) EXPECT_TRUE(result.ok());

  std::vector<std::string> many(5000, "x");  // more than a batch
  many.back() = "b";
  const std::vector<bool> hits = pages_->contains(many, layer_);
  ASSERT_THAT(hits, SizeIs(5000));
  EXPECT_TRUE(hits.back());
  EXPECT_EQ(std::ranges::count(hits, true), 1);
  EXPECT_THROW(static_cast<void>(pages_->contains(hashes, {})), Error);
}

TEST_P(ClientPagesTest, SaysWhichPagesTheDiskHas) {
  EXPECT_FALSE(put("a", 1).durable) << "without a folder";
  const std::string key = (folder_ / "key").string();
  std::ofstream(key) << "0123456789abcdef";
  ServerOptions stored = options();
  stored.core.pages.backing = make_backing({.key_file = key,
                                            .folder = (folder_ / "pages").string(),
                                            .capacity_bytes = PageBackingOptions::kLeastCapacity,
                                            .max_page_bytes = std::size_t{4} << 20,
                                            .read_time = kvtier::testing::kPatience,
                                            .write_time = kvtier::testing::kPatience});
  stored.core.pages.waits_for_disk = true;
  start_server(stored);
  EXPECT_TRUE(put("a", 1).durable);
  EXPECT_TRUE(put("a", 1).existed);
  start_server(stored);
  const std::vector<std::string> hashes{"a", "b"};
  EXPECT_EQ(pages_->contains(hashes, layer_), (std::vector<bool>{true, false}));
  const auto found = pages_->find(hashes, layer_);
  ASSERT_THAT(found[0], SizeIs(1));
  Bytes read(static_cast<std::size_t>(kPageBytes));
  const RemotePages::Get get{.handle = found[0][0].handle, .to = read};
  EXPECT_TRUE(pages_->get({&get, 1})[0].ok());
  EXPECT_EQ(read, bytes_of(1));
}

TEST_P(ClientPagesTest, PutsFindsAndGetsPages) {
  std::vector<Bytes> contents;
  std::vector<std::string> hashes;
  std::vector<RemotePages::Put> puts;
  for (std::uint64_t i = 0; i < 10; ++i) {
    contents.push_back(bytes_of(i));
    hashes.push_back("hash " + std::to_string(i));
  }
  for (std::size_t i = 0; i < 10; ++i) puts.push_back({.hash = hashes[i], .bytes = contents[i]});
  for (const RemotePages::Result& result : pages_->put(puts)) EXPECT_TRUE(result.ok());
  hashes.emplace_back("unknown");

  RemotePages other = open();
  const std::vector<RemotePages::Found> found = other.lookup(hashes, layer_);
  ASSERT_THAT(found, SizeIs(10));
  std::vector<Bytes> back(10, Bytes(static_cast<std::size_t>(kPageBytes)));
  std::vector<RemotePages::Get> gets;
  for (std::size_t i = 0; i < 10; ++i) gets.push_back({.handle = found[i].handle, .to = back[i]});
  const std::vector<RemotePages::Result> results = other.get(gets);
  for (std::size_t i = 0; i < 10; ++i) {
    EXPECT_TRUE(results[i].ok()) << results[i].reason;
    EXPECT_EQ(results[i].crc32c, crc32c(contents[i]));
  }
  EXPECT_EQ(back, contents);
  EXPECT_EQ(server_->data_plane()->counters().attached > 0, GetParam());
  await_no_pins();
}

TEST_P(ClientPagesTest, WritesNothingThatIsThere) {
  const RemotePages::Result first = put("a", 1);
  const RemotePages::Result again = put("a", 2);
  EXPECT_FALSE(first.existed);
  EXPECT_TRUE(again.existed);
  EXPECT_EQ(again.handle, first.handle);
  EXPECT_EQ(stats().bytes_written, static_cast<std::uint64_t>(kPageBytes));
}

TEST_P(ClientPagesTest, PutsOfSeveralClientsAgreeOnOnePage) {
  constexpr int kPuts = 10;
  std::array<std::vector<RemotePages::Result>, 2> results;
  std::array<std::thread, 2> clients;
  for (std::size_t c = 0; c < clients.size(); ++c) {
    clients[c] = std::thread([&, c] {
      RemotePages pages = open();
      for (std::uint64_t i = 0; i < kPuts; ++i) {
        const Bytes bytes = bytes_of(i);
        const RemotePages::Put page{.hash = std::to_string(i), .bytes = bytes};
        results[c].push_back(pages.put({&page, 1}).at(0));
      }
    });
  }
  for (std::thread& client : clients) client.join();
  Bytes back(static_cast<std::size_t>(kPageBytes));
  for (std::size_t i = 0; i < kPuts; ++i) {
    ASSERT_TRUE(results[0][i].ok()) << results[0][i].reason;
    ASSERT_TRUE(results[1][i].ok()) << results[1][i].reason;
    EXPECT_EQ(results[0][i].handle, results[1][i].handle);
    EXPECT_NE(results[0][i].existed, results[1][i].existed);
    const RemotePages::Get get{.handle = results[0][i].handle, .to = back};
    EXPECT_TRUE(pages_->get({&get, 1}).at(0).ok());
    EXPECT_EQ(back, bytes_of(i));
  }
  EXPECT_EQ(stats().committed_pages, static_cast<std::uint64_t>(kPuts));
  EXPECT_EQ(stats().reserved_pages, 0U);
}

TEST_P(ClientPagesTest, TellsWhatFailedPageByPage) {
  const RemotePages::Result good = put("a", 1);
  const std::string gone = put("b", 2).handle;
  EXPECT_TRUE(pages_->remove({&gone, 1}).at(0).ok());
  Bytes first(static_cast<std::size_t>(kPageBytes));
  Bytes second = first;
  Bytes small(100);
  const std::array<RemotePages::Get, 3> gets{{{.handle = gone, .to = first},
                                              {.handle = good.handle, .to = second},
                                              {.handle = good.handle, .to = small}}};
  const std::vector<RemotePages::Result> results = pages_->get(gets);
  EXPECT_EQ(results[0].reason, "PAGE_GONE");
  EXPECT_EQ(results[0].code, ErrorCode::kNotFound);
  EXPECT_TRUE(results[1].ok());
  EXPECT_EQ(second, bytes_of(1));
  EXPECT_EQ(results[2].reason, "PAGE_TOO_LARGE");
  const RemotePages::Put wrong{.hash = "c", .bytes = small};
  EXPECT_THROW(pages_->put({&wrong, 1}), Error);
  EXPECT_THROW(static_cast<void>(client_->open_pages({.model = "m", .page_bytes = 0})),
               ClientError);
}

TEST_P(ClientPagesTest, FindsADamagedPageWhichIsNotServedAgain) {
  const std::array<RemotePages::Result, 2> put_pages{put("a", 1), put("b", 2)};
  flip_bit(put_pages[0].handle, 12345);
  Bytes first(static_cast<std::size_t>(kPageBytes));
  Bytes second = first;
  const std::array<RemotePages::Get, 2> gets{{{.handle = put_pages[0].handle, .to = first},
                                              {.handle = put_pages[1].handle, .to = second}}};
  std::vector<RemotePages::Result> results = pages_->get(gets);
  EXPECT_EQ(results[0].reason, "CHECKSUM_FAILED");
  EXPECT_EQ(results[0].code, ErrorCode::kDataLoss);
  EXPECT_TRUE(results[1].ok()) << results[1].reason;
  EXPECT_EQ(second, bytes_of(2));
  EXPECT_EQ(stats().quarantined_pages, 1U);
  EXPECT_EQ(stats().checksum_failures, 1U);

  results = pages_->get(gets);
  EXPECT_EQ(results[0].reason, "PAGE_GONE");
  EXPECT_TRUE(results[1].ok()) << results[1].reason;
  await_no_pins();
}

TEST_P(ClientPagesTest, TellsTheServerOfPagesThatChangedInSharedMemory) {
  std::array<std::string, 3> handles;
  for (std::size_t i = 0; i < 3; ++i) handles[i] = put(std::to_string(i), i).handle;
  unindex_in_arena(handles[1]);
  ASSERT_TRUE(pages_->remove({&handles[2], 1}).at(0).ok());  // known to be gone: no reading anew
  std::vector<Bytes> to(3, Bytes(static_cast<std::size_t>(kPageBytes)));
  std::vector<RemotePages::Get> gets;
  for (std::size_t i = 0; i < 3; ++i) gets.push_back({.handle = handles[i], .to = to[i]});

  const std::vector<RemotePages::Result> results = pages_->get(gets);

  EXPECT_TRUE(results[0].ok() && results[1].ok());
  EXPECT_EQ(to[1], bytes_of(1));
  EXPECT_EQ(results[2].reason, "PAGE_GONE");
  EXPECT_EQ(server_->core().transfers().num_reread(), GetParam() ? 1U : 0U);
  await_no_pins();
}

TEST_P(ClientPagesTest, PinsGoWithTheObject) {
  put("a", 1);
  const std::string hash = "a";
  {
    RemotePages other = open();
    const std::vector<RemotePages::Found> found = other.lookup({&hash, 1}, layer_, true);
    ASSERT_THAT(found, SizeIs(1));
    EXPECT_EQ(stats().pinned_pages, 1U);
    EXPECT_TRUE(other.unpin({&found[0].handle, 1}).at(0).ok());
    EXPECT_EQ(other.unpin({&found[0].handle, 1}).at(0).reason, "NOT_PINNED");
    EXPECT_THAT(other.lookup({&hash, 1}, layer_, true), SizeIs(1));
    EXPECT_THAT(other.lookup({&hash, 1}, {}), IsEmpty());
  }
  EXPECT_EQ(stats().pinned_pages, 0U);
  EXPECT_EQ(server_->core().pages().num_leases(), 1U);
}

TEST_P(ClientPagesTest, PagesArePinnedByTheirHandles) {
  const RemotePages::Result good = put("a", 1);
  const std::string gone = put("b", 2).handle;
  EXPECT_TRUE(pages_->remove({&gone, 1}).at(0).ok());
  const std::array<std::string, 2> handles{good.handle, gone};
  for (int i = 0; i < 2; ++i) {
    const std::vector<RemotePages::Result> results = pages_->pin(handles);
    ASSERT_THAT(results, SizeIs(2));
    EXPECT_TRUE(results[0].ok()) << results[0].reason;
    EXPECT_EQ(results[0].handle, good.handle);
    EXPECT_EQ(results[0].crc32c, good.crc32c);
    EXPECT_EQ(results[1].reason, "PAGE_GONE");
  }
  for (std::uint64_t i = 0; i < 40; ++i) put(std::to_string(i), i);  // more than there is room for
  EXPECT_GT(stats().pages_evicted, 0U);
  EXPECT_EQ(stats().pinned_pages, 1U);
  Bytes back(static_cast<std::size_t>(kPageBytes));
  const RemotePages::Get get{.handle = good.handle, .to = back};
  EXPECT_TRUE(pages_->get({&get, 1}).at(0).ok());
  EXPECT_EQ(back, bytes_of(1));
  for (const char* reason : {"", "", "NOT_PINNED"}) {
    EXPECT_EQ(pages_->unpin({&good.handle, 1}).at(0).reason, reason);
  }
  EXPECT_THAT(pages_->pin({}), IsEmpty());
}

TEST_P(ClientPagesTest, ManyPagesGoInSeveralCalls) {
  std::vector<Bytes> contents;
  std::vector<RemotePages::Put> puts;
  for (std::uint64_t i = 0; i < 40; ++i) contents.push_back(bytes_of(i));
  for (std::size_t i = 0; i < 40; ++i) {
    puts.push_back({.hash = std::to_string(i), .bytes = contents[i]});
  }
  // More than the arena has room for: the last ones stay.
  for (const RemotePages::Result& result : pages_->put(puts)) EXPECT_TRUE(result.ok());
  EXPECT_GT(stats().pages_evicted, 0U);
  const std::string last = "39";
  EXPECT_THAT(pages_->lookup({&last, 1}, layer_), SizeIs(1));
}

TEST_P(ClientPagesTest, ReadsOverSeveralConnectionsWhereOneHasRoom) {
  ServerOptions options = this->options();
  options.core.max_inflight_bytes = std::int64_t{3} << 20;  // of one stream's two messages
  start_server(options);
  constexpr std::size_t kPages = 8;
  std::vector<Bytes> contents;
  std::vector<Bytes> back(kPages, Bytes(static_cast<std::size_t>(kPageBytes)));
  std::vector<RemotePages::Get> gets;
  for (std::size_t i = 0; i < kPages; ++i) {
    contents.push_back(bytes_of(i));
    gets.push_back({.handle = put(std::to_string(i), i).handle, .to = back[i]});
  }
  for (int round = 0; round < 5; ++round) {  // by the second, connections have been made
    for (const RemotePages::Result& result : pages_->get(gets)) {
      EXPECT_TRUE(result.ok()) << result.reason;
    }
    EXPECT_TRUE(back == contents);
    for (Bytes& bytes : back) bytes.assign(bytes.size(), std::byte{0});
  }
  await_no_pins();
}

INSTANTIATE_TEST_SUITE_P(Ways, ClientPagesTest, ::testing::Bool(), [](const auto& way) {
  return std::string(way.param ? "SharedMemory" : "Grpc");
});

}  // namespace
}  // namespace kvtier::services::testing
