#include "services/page_cache/page_transfer.h"

#include "services/page_cache/tenant_pages.h"
#include "tests/services/page_cache/page_fixture.h"

#include <array>

namespace kvtier::services::testing {
namespace {

class PageTransferTest : public PageStoreTest {
 protected:
  /// The message in pieces of `piece` bytes, as a transport may deliver it.
  static WriteMessage parse(const std::string& text, std::size_t piece) {
    ByteRuns runs;
    const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
    for (std::size_t i = 0; i < bytes.size(); i += piece) {
      runs.push_back(bytes.subspan(i, std::min(piece, bytes.size() - i)));
    }
    return parse_write_message(runs);
  }
  v1::WritePagesRequest::Chunk& add_chunk(v1::WritePagesRequest& request, int index,
                                          const std::string& handle, const PageBytes& bytes) {
    auto& chunk = *request.add_chunks();
    chunk.set_index(index);
    chunk.set_handle(handle);
    chunk.set_data(bytes.data(), bytes.size());
    chunk.set_last(true);
    return chunk;
  }
  std::string reserve(std::string_view hash) {
    return lease_->pages.reserve(*lease_, {.hash = hash}).handle;
  }
  v1::WritePagesResponse write(const v1::WritePagesRequest& request) {
    const std::string text = request.SerializeAsString();
    PageWriter writer(*store_);
    writer.write(*lease_, parse(text, text.size()), 8);
    return writer.finish();
  }
  /// Reads by messages, through protobuf's own parser. Checks that messages keep to `max_bytes`.
  std::vector<v1::ReadPagesResponse::Chunk> read(const v1::ReadPagesRequest& request,
                                                 std::size_t max_bytes) {
    std::vector<v1::ReadPagesResponse::Chunk> chunks;
    PageReader reader(*store_, alpha_, request);
    for (;;) {
      std::string text;
      for (const ReadPiece& piece : reader.next(max_bytes)) {
        text += piece.head;
        text.append(reinterpret_cast<const char*>(piece.data.data()), piece.data.size());
      }
      if (text.empty()) return chunks;
      EXPECT_LE(text.size(), max_bytes);
      v1::ReadPagesResponse response;
      EXPECT_TRUE(response.ParseFromString(text));
      for (const auto& chunk : response.chunks()) chunks.push_back(chunk);
    }
  }
};

TEST_F(PageTransferTest, IsCountedWithItsPagesBytesAndTime) {
  using enum TransferDirection;
  const auto sums = [this](TransferDirection direction) {
    return store_->transfers().of(TransferPlane::kGrpc, direction);
  };
  v1::WritePagesRequest request;
  request.set_lease(lease_->name);
  const std::string first = reserve("a");
  add_chunk(request, 0, first, bytes_of(1));
  add_chunk(request, 1, "unknown", bytes_of(2));
  const std::string text = request.SerializeAsString();
  {
    PageWriter writer(*store_);
    writer.write(*lease_, parse(text, text.size()), 8);
    now_ += std::chrono::milliseconds(50);
    EXPECT_EQ(writer.finish().items_size(), 2);
    EXPECT_EQ(sums(kWrite).pages, 0U) << "not over yet";
  }
  const TransferSums written = sums(kWrite);
  EXPECT_EQ(written.pages, 2U);
  EXPECT_EQ(written.bytes, static_cast<std::uint64_t>(kPageBytes));
  EXPECT_EQ(written.by_seconds.sum, 0.05);
  EXPECT_EQ(written.by_seconds.counts, (std::array<std::uint64_t, 6>{0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(written.by_pages.counts, (std::array<std::uint64_t, 4>{0, 1, 0, 0}));

  v1::ReadPagesRequest wanted;
  for (int i = 0; i < 17; ++i) wanted.add_handles(first);
  wanted.add_handles("unknown");
  (void)read(wanted, 5000);  // in many messages
  {
    v1::ReadPagesRequest one;
    one.add_handles(first);
    PageReader reader(*store_, alpha_, one);
    (void)reader.next(1000);
    now_ += std::chrono::seconds(3);  // and its caller goes
  }
  const TransferSums read = sums(kRead);
  EXPECT_EQ(read.pages, 19U);
  EXPECT_GT(read.bytes, 17U * static_cast<std::uint64_t>(kPageBytes));
  EXPECT_LT(read.bytes, 17U * static_cast<std::uint64_t>(kPageBytes) + 1000);
  EXPECT_EQ(read.by_seconds.sum, 3.0);
  EXPECT_EQ(read.by_seconds.counts, (std::array<std::uint64_t, 6>{1, 0, 0, 0, 0, 1}));
  EXPECT_EQ(read.by_pages.counts, (std::array<std::uint64_t, 4>{1, 0, 1, 0}));
  EXPECT_EQ(store_->transfers().of(TransferPlane::kShared, kRead).pages, 0U);
}

TEST_F(PageTransferTest, ParsesWhatProtobufWritesHoweverItIsCut) {
  v1::WritePagesRequest request;
  request.set_lease(lease_->name);
  add_chunk(request, 0, "first", bytes_of(1, 300)).set_crc32c(0x89ABCDEF);
  auto& second = add_chunk(request, 7, "", {});
  second.set_offset(std::int64_t{1} << 40);
  second.set_last(false);
  request.GetReflection()->MutableUnknownFields(&request)->AddVarint(900, 5);
  request.GetReflection()->MutableUnknownFields(&request)->AddFixed64(901, 5);
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(902, "later");
  const std::string text = request.SerializeAsString();
  for (const std::size_t piece : {1UL, 2UL, 7UL, 100UL, text.size()}) {
    const WriteMessage message = parse(text, piece);
    EXPECT_EQ(message.lease, lease_->name);
    ASSERT_EQ(message.chunks.size(), 2U);
    EXPECT_EQ(message.chunks[0].fields.handle(), "first");
    EXPECT_EQ(message.chunks[0].fields.crc32c(), 0x89ABCDEFU);
    EXPECT_TRUE(message.chunks[0].fields.last());
    PageBytes data;
    for (const auto& run : message.chunks[0].data) data.insert(data.end(), run.begin(), run.end());
    EXPECT_EQ(data, bytes_of(1, 300));
    EXPECT_EQ(message.chunks[1].fields.index(), 7);
    EXPECT_EQ(message.chunks[1].fields.offset(), std::int64_t{1} << 40);
    EXPECT_FALSE(message.chunks[1].fields.has_crc32c());
    EXPECT_FALSE(message.chunks[1].fields.last());
  }
}

TEST_F(PageTransferTest, BytesThatAreNoMessageAreRefusedOrReadButNeverOutside) {
  v1::WritePagesRequest request;
  request.set_lease(lease_->name);
  add_chunk(request, 0, "handle", bytes_of(1, 200)).set_crc32c(7);
  const std::string good = request.SerializeAsString();
  std::mt19937_64 random(11);
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text = good.substr(0, 1 + random() % good.size());
    for (int flips = static_cast<int>(random() % 4); flips > 0; --flips) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    try {
      const WriteMessage message = parse(text, 1 + random() % 64);
      std::size_t bytes = 0;
      for (const WriteChunk& chunk : message.chunks) {
        for (const auto& run : chunk.data) bytes += run.size();
      }
      EXPECT_LE(bytes, text.size());
    } catch (const Error&) {
      ++refused;
    } catch (const ServiceError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_THROW(parse(std::string(20, '\xff'), 20), Error);
}

TEST_F(PageTransferTest, WritesAndCommitsPagesInChunks) {
  v1::WritePagesRequest request;
  const PageBytes bytes = bytes_of(1);
  const std::string handle = reserve("a");
  for (std::size_t offset = 0; offset < bytes.size(); offset += 3000) {
    const std::size_t count = std::min<std::size_t>(3000, bytes.size() - offset);
    auto& chunk = add_chunk(request, 0, offset == 0 ? handle : "", {});
    chunk.set_data(bytes.data() + offset, count);
    chunk.set_offset(static_cast<std::int64_t>(offset));
    chunk.set_last(offset + count == bytes.size());
  }
  request.mutable_chunks(2)->set_crc32c(crc32c(bytes));
  add_chunk(request, 1, reserve("b"), bytes_of(2));
  const v1::WritePagesResponse response = write(request);
  ASSERT_EQ(response.items_size(), 2);
  EXPECT_EQ(response.items(0).page().crc32c(), crc32c(bytes));
  EXPECT_EQ(get(alpha_, handle), bytes);
  EXPECT_EQ(get(alpha_, response.items(1).page().handle()), bytes_of(2));
}

TEST_F(PageTransferTest, FailuresStayWithTheirPage) {
  v1::WritePagesRequest request;
  const std::string wrong = reserve("wrong");
  add_chunk(request, 0, wrong, bytes_of(1)).set_crc32c(1);
  add_chunk(request, 0, wrong, bytes_of(1));  // passed over
  add_chunk(request, 1, "forged", bytes_of(2));
  const std::string half = reserve("half");
  add_chunk(request, 2, half, bytes_of(3, 100)).set_last(false);
  add_chunk(request, 3, reserve("good"), bytes_of(4));
  add_chunk(request, 4, reserve("long"), bytes_of(5, kPageBytes + 1));
  const v1::WritePagesResponse response = write(request);
  ASSERT_EQ(response.items_size(), 5);
  EXPECT_EQ(response.items(0).status().reason(), "CHECKSUM_MISMATCH");
  EXPECT_EQ(response.items(1).status().reason(), "NOT_FOUND");
  EXPECT_EQ(response.items(2).status().reason(), "PAGE_INCOMPLETE");
  EXPECT_EQ(response.items(3).status().code(), 0);
  EXPECT_EQ(response.items(4).status().reason(), "INVALID_ARGUMENT");
  EXPECT_EQ(store_->stats().committed_pages, 1U);
  lease_->pages.commit(*lease_, wrong, bytes_of(1));  // it may be written anew
}

TEST_F(PageTransferTest, IndicesGoUpByOneAndHaveALimit) {
  for (const int index : {1, -1, 8, 1 << 30}) {
    v1::WritePagesRequest request;
    add_chunk(request, index, "x", {});
    EXPECT_EQ(reason_of([&] { return write(request); }), "INVALID_ARGUMENT") << index;
  }
  v1::WritePagesRequest request;
  for (int i = 0; i < 8; ++i) add_chunk(request, i, "x", {});
  EXPECT_EQ(write(request).items_size(), 8);
  add_chunk(request, 8, "x", {});
  EXPECT_EQ(reason_of([&] { return write(request); }), "INVALID_ARGUMENT");
}

TEST_F(PageTransferTest, ReadsWhatIsThereAndSaysWhatIsNot) {
  v1::ReadPagesRequest request;
  const PageInfo damaged = put("d", 3);
  flip_bit(damaged.handle, 99);
  const std::vector<std::string> handles{put("a", 1).handle, "none", put("b", 2).handle,
                                         damaged.handle, put("a", 1).handle};
  for (const std::string& handle : handles) request.add_handles(handle);
  for (const std::size_t max_bytes : {500UL, 8192UL, 9000UL, 1UL << 20U}) {
    std::vector<PageBytes> pages(handles.size());
    std::vector<std::string> reasons(handles.size());
    int last = 0;
    for (const auto& chunk : read(request, max_bytes)) {
      const auto i = static_cast<std::size_t>(chunk.index());
      EXPECT_EQ(chunk.offset(), static_cast<std::int64_t>(pages[i].size()));
      const auto data = std::as_bytes(std::span(chunk.data().data(), chunk.data().size()));
      pages[i].insert(pages[i].end(), data.begin(), data.end());
      reasons[i] += chunk.status().reason();
      EXPECT_EQ(chunk.page().length(), chunk.has_page() ? kPageBytes : 0);
      last += chunk.last() ? 1 : 0;
    }
    EXPECT_EQ(last, 5);
    EXPECT_EQ(pages[0], bytes_of(1));
    EXPECT_EQ(pages[2], bytes_of(2));
    EXPECT_EQ(pages[4], bytes_of(1));
    EXPECT_EQ(reasons[1], "NOT_FOUND");
    EXPECT_TRUE(reasons[3] == "CHECKSUM_FAILED" || reasons[3] == "PAGE_GONE") << reasons[3];
    EXPECT_TRUE(pages[1].empty() && pages[3].empty());
  }
  EXPECT_EQ(store_->stats().pinned_pages, 0U);
}

TEST_F(PageTransferTest, LeavesChecksumsToAClientThatComparesThem) {
  const PageInfo damaged = put("d", 3);
  flip_bit(damaged.handle, 99);
  v1::ReadPagesRequest request;
  request.add_handles(damaged.handle);
  request.set_client_verifies(true);
  const auto sent = read(request, 1UL << 20U);
  ASSERT_EQ(sent.size(), 1U);
  EXPECT_EQ(sent[0].status().code(), 0);
  EXPECT_EQ(sent[0].page().crc32c(), damaged.crc32c);
  PageBytes bytes = bytes_of(3);
  bytes[99 / 8] ^= std::byte{1} << 99 % 8;
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(sent[0].data())), bytes));
  EXPECT_EQ(store_->stats().checksum_failures, 0U);

  request.set_client_verifies(false);
  const auto compared = read(request, 1UL << 20U);
  ASSERT_EQ(compared.size(), 1U);
  EXPECT_EQ(compared[0].status().reason(), "CHECKSUM_FAILED");
  EXPECT_EQ(store_->stats().quarantined_pages, 1U);
}

}  // namespace
}  // namespace kvtier::services::testing
