#include "services/client/page_plane.h"
#include "tests/services/dataplane/plane_fixture.h"
#include "tests/services/wire/copy_page.h"
#include "tests/support/gated_tier.h"
#include "transfer/tiers/crc32c.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

namespace kvtier::services::testing {
namespace {

using ::testing::Each;

constexpr std::uint32_t kNotFound = 5;
constexpr std::uint32_t kInvalid = 3;
constexpr std::uint32_t kDataLoss = 15;

class PlanePages : public PlaneTest {
 protected:
  void SetUp() override {
    PlaneTest::SetUp();
    ServiceCoreOptions options = small_options();
    options.tenants = two_tenants();
    start(options, {});
    lease_ = open_lease();
  }
  void TearDown() override {
    lease_.reset();  // of a tenant that ends with the core
    PlaneTest::TearDown();
  }
  std::vector<PageOutcome> read(DataChannel& channel, const std::vector<PageDescriptor>& wanted) {
    return decode_outcomes(
        channel.reply_to(channel.send(FrameType::kReadPages, 0, encode(wanted))).control());
  }
  std::vector<PageOutcome> write(DataChannel& channel, const std::vector<PageDescriptor>& pages,
                                 const std::string& lease) {
    return decode_outcomes(
        channel.reply_to(channel.send(FrameType::kWritePages, 0, encode(WriteBody{lease, pages})))
            .control());
  }
  /// Bytes of all pages, from payloads.
  std::vector<std::vector<std::byte>> read_inline(DataChannel& channel,
                                                  const std::vector<PageDescriptor>& wanted,
                                                  std::vector<std::uint32_t>& codes) {
    std::vector<std::vector<std::byte>> pages;
    const std::uint64_t id = channel.send(FrameType::kReadPages, kInline, encode(wanted));
    for (bool more = true; more;) {
      const DataChannel::Frame frame = channel.reply_to(id);
      for (const PageOutcome& page : decode_outcomes(frame.control())) {
        const auto bytes = frame.payload().subspan(page.offset, page.bytes);
        pages.emplace_back(bytes.begin(), bytes.end());
        codes.push_back(page.code);
      }
      more = (frame.header.flags & kMore) != 0;
    }
    return pages;
  }

  std::shared_ptr<PageLease> lease_;
};

TEST_F(PlanePages, AreReadInPlace) {
  std::vector<PageDescriptor> wanted;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    wanted.push_back(descriptor_of(store_page(*lease_, seed)));
  }
  std::shuffle(wanted.begin() + 1, wanted.end(), std::mt19937_64(1));
  const auto channel = attach();
  ASSERT_TRUE(channel->arena());

  const std::vector<PageOutcome> pages = read(*channel, wanted);

  ASSERT_EQ(pages.size(), wanted.size());
  EXPECT_EQ(pages_->stats().pinned_pages, 0U);
  std::vector<std::byte> bytes(kPageBytes);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    ASSERT_EQ(pages[i].code, 0U);
    ASSERT_EQ(pages[i].bytes, bytes.size());
    ASSERT_TRUE(copy_page(*channel->arena(), pages[i].slot, pages[i].generation, bytes));
    EXPECT_EQ(crc32c(bytes), pages[i].crc);
    const PinnedPage page =
        pages_->read(tenant(), {wanted[i].handle.data(), wanted[i].handle.size()});
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), page.bytes().begin()));
  }
}

TEST_F(PlanePages, AreCopiedOutOfTheArenaInBatches) {
  constexpr std::size_t kStored = 20;
  constexpr auto kBytes = static_cast<std::size_t>(kPageBytes);
  std::vector<std::string> handles;
  for (std::uint64_t seed = 0; seed < kStored; ++seed) {
    const PageDescriptor stored = descriptor_of(store_page(*lease_, seed));
    handles.emplace_back(stored.handle.data(), stored.handle.size());
  }
  const auto channel = attach();
  lease_->pages.remove(*lease_, handles[3]);
  std::string forged = handles[5];
  forged.back() = forged.back() == 'A' ? 'B' : 'A';
  // Few of them stay in the cache, many pass it by; memory for both is not aligned.
  for (const std::size_t count : {std::size_t{1}, std::size_t{30}, std::size_t{600}}) {
    std::vector<std::byte> memory(count * (kBytes + 1), std::byte{0xEE});
    std::vector<PageRead> reads;
    for (std::size_t i = 0; i < count; ++i) {
      reads.push_back({.handle = handles[i * 7 % kStored],
                       .to = std::span(memory).subspan(i * (kBytes + 1), kBytes)});
    }
    if (count > 1) {
      reads[10].handle = forged;
      reads[11].handle = "short";
      reads[12].to = reads[12].to.first(kBytes - 1);
    }
    read_shared(*channel, reads, count % 4 == 2);
    for (std::size_t i = 0; i < count; ++i) {
      const bool there = !(i >= 10 && i <= 12) && i * 7 % kStored != 3;
      ASSERT_EQ(reads[i].done, there) << i << " of " << count;
      ASSERT_EQ(memory[i * (kBytes + 1) + kBytes], std::byte{0xEE}) << "beyond page " << i;
      if (!there) continue;
      const PinnedPage page = pages_->read(tenant(), reads[i].handle);
      ASSERT_EQ(reads[i].crc, page.crc());
      ASSERT_TRUE(std::ranges::equal(reads[i].to, page.bytes())) << i << " of " << count;
    }
  }
}

TEST_F(PlanePages, ThatFailTheirChecksumAreNotCopied) {
  const std::string handle = [&] {
    const PageDescriptor stored = descriptor_of(store_page(*lease_, 1));
    return std::string(stored.handle.data(), stored.handle.size());
  }();
  const auto channel = attach();
  std::vector<std::byte> memory(kPageBytes);
  const auto read = [&](bool verify) {
    PageRead page{.handle = handle, .to = memory};
    read_shared(*channel, {&page, 1}, verify);
    return page.done;
  };
  EXPECT_TRUE(read(true));
  {
    const PinnedPage page = pages_->read(tenant(), handle);
    const_cast<std::byte&>(page.bytes()[100]) ^= std::byte{1};
  }
  EXPECT_FALSE(read(true));
  EXPECT_TRUE(read(false)) << "no answer without a request";
}

TEST_F(PlanePages, ThatAreDeletedAreNotReadInPlace) {
  const std::string handle = store_page(*lease_, 1);
  const auto channel = attach();
  const PageOutcome page = read(*channel, {descriptor_of(handle)}).at(0);

  lease_->pages.remove(*lease_, handle);

  std::vector<std::byte> bytes(kPageBytes);
  EXPECT_FALSE(copy_page(*channel->arena(), page.slot, page.generation, bytes));
  EXPECT_EQ(read(*channel, {descriptor_of(handle)}).at(0).code, kNotFound);
}

TEST_F(PlanePages, AreReadFromTheSocketInManyFrames) {
  std::vector<PageDescriptor> wanted;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    wanted.push_back(descriptor_of(store_page(*lease_, seed)));
  }
  wanted[7].offset = 1000;
  wanted[7].bytes = 10;
  wanted[8].bytes = 0;
  wanted[9].offset = 1;  // one byte past the end
  const auto channel = attach();

  std::vector<std::uint32_t> codes;
  const auto pages = read_inline(*channel, wanted, codes);

  ASSERT_EQ(pages.size(), wanted.size());
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const auto expected = random_bytes(kPageBytes, i);
    if (i == 7) {
      EXPECT_TRUE(std::equal(pages[i].begin(), pages[i].end(), expected.begin() + 1000));
      EXPECT_EQ(pages[i].size(), 10U);
    } else if (i == 8 || i == 9) {
      EXPECT_TRUE(pages[i].empty());
    } else {
      EXPECT_EQ(pages[i], expected) << i;
    }
    EXPECT_EQ(codes[i], i == 9 ? kInvalid : 0U);
  }
  EXPECT_TRUE(eventually([&] { return pages_->stats().pinned_pages == 0; }));
}

TEST_F(PlanePages, WhoseChecksumsTheServerComparesAreReadInPartsHoweverFewBytesAreAskedFor) {
  constexpr std::size_t kAtOnce = (4 << 20) / kPageBytes;
  const auto channel = attach();
  const std::string handle = store_page(*lease_, 1);
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{kPageBytes} + 1}) {
    std::vector<PageDescriptor> wanted(4 * kAtOnce, descriptor_of(handle, /*bytes=*/0));
    for (PageDescriptor& one : wanted) one.offset = offset;
    const std::uint64_t id =
        channel->send(FrameType::kReadPages, kInline | kServerSums, encode(wanted));
    std::size_t answered = 0;
    for (bool more = true; more;) {
      const DataChannel::Frame frame = channel->reply_to(id);
      const std::size_t count = decode_outcomes(frame.control()).size();
      EXPECT_LE(count, kAtOnce) << "others have their turn in between";
      answered += count;
      more = (frame.header.flags & kMore) != 0;
    }
    EXPECT_EQ(answered, wanted.size());
  }
}

TEST_F(PlanePages, AreCountedByTheWayThatTheyTake) {
  using enum TransferPlane;
  constexpr auto kBytes = static_cast<std::uint64_t>(kPageBytes);
  const auto counted = [&](TransferPlane plane, TransferDirection direction, std::uint64_t pages,
                           std::uint64_t bytes) {
    return eventually([&] {  // a request is counted once its reply has left
      const TransferSums sums = pages_->transfers().of(plane, direction);
      return sums.pages == pages && sums.bytes == bytes;
    });
  };
  std::vector<PageDescriptor> wanted;
  for (std::uint64_t i = 0; i < 3; ++i) wanted.push_back(descriptor_of(store_page(*lease_, i)));
  wanted.push_back(descriptor_of("none"));
  const auto channel = attach();

  (void)read(*channel, wanted);
  EXPECT_TRUE(counted(kShared, TransferDirection::kRead, 4, 3 * kBytes));

  std::vector<std::uint32_t> codes;
  wanted[1].bytes = 100;
  (void)read_inline(*channel, wanted, codes);
  EXPECT_TRUE(counted(kUnix, TransferDirection::kRead, 4, 2 * kBytes + 100));

  std::vector<PageDescriptor> written{descriptor_of(lease_->pages.reserve(*lease_, {}).handle),
                                      descriptor_of("none")};
  written[0].crc = crc32c(channel->staging().first(kPageBytes));
  (void)write(*channel, written, lease_->name);
  EXPECT_TRUE(counted(kShared, TransferDirection::kWrite, 2, kBytes));
  EXPECT_TRUE(counted(kUnix, TransferDirection::kWrite, 0, 0));
  EXPECT_EQ(pages_->transfers().of(kShared, TransferDirection::kWrite).by_pages.counts,
            (std::array<std::uint64_t, 4>{0, 1, 0, 0}));
}

TEST_F(PlanePages, OfOthersAreUnknown) {
  const std::string handle = store_page(*lease_, 1);
  std::string forged = handle;
  forged.back() = forged.back() == 'A' ? 'B' : 'A';
  (void)open_lease(1);
  const auto channel = attach(1);

  const std::vector<PageOutcome> pages =
      read(*channel, {descriptor_of(handle), descriptor_of(forged), descriptor_of("")});

  EXPECT_THAT(pages, Each(PageOutcome{.code = kNotFound}));
  std::vector<std::uint32_t> codes;
  EXPECT_THAT(read_inline(*channel, {descriptor_of(handle)}, codes).at(0), ::testing::IsEmpty());
  EXPECT_EQ(codes, std::vector<std::uint32_t>{kNotFound});
}

TEST_F(PlanePages, AnEmptyListIsAnswered) {
  const auto channel = attach();
  EXPECT_TRUE(read(*channel, {}).empty());
  EXPECT_TRUE(write(*channel, {}, lease_->name).empty());
}

TEST_F(PlanePages, AreWrittenFromStaging) {
  const auto channel = attach();
  std::vector<PageDescriptor> pages;
  for (std::uint64_t i = 0; i < 10; ++i) {
    const auto bytes = random_bytes(kPageBytes, 100 + i);
    std::copy(bytes.begin(), bytes.end(),
              channel->staging().begin() + static_cast<std::ptrdiff_t>(i) * kPageBytes);
    PageDescriptor page = descriptor_of(lease_->pages.reserve(*lease_, {}).handle);
    page.destination = i * kPageBytes;
    page.crc = crc32c(bytes);
    pages.push_back(page);
  }
  pages[3].crc ^= 1;
  pages[4].destination = (1 << 20) - kPageBytes + 1;
  pages[5].bytes = kPageBytes - 1;
  pages[6].offset = 1;

  const std::vector<PageOutcome> written = write(*channel, pages, lease_->name);

  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (i >= 3 && i <= 6) {
      EXPECT_NE(written[i].code, 0U) << i;
      continue;
    }
    EXPECT_EQ(written[i].code, 0U) << i;
    const PinnedPage page =
        pages_->read(tenant(), {pages[i].handle.data(), pages[i].handle.size()});
    const auto expected = random_bytes(kPageBytes, 100 + i);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), page.bytes().begin()));
  }
  EXPECT_EQ(pages_->stats().committed_pages, 6U);
  EXPECT_EQ(pages_->stats().reserved_pages, 4U);
}

TEST_F(PlanePages, ThatWaitForTheirTiersHoldUpNoOtherClient) {
  using kvtier::testing::GatedTier;
  const auto tier = std::make_shared<GatedTier>();
  tier->hold_next(GatedTier::Verb::kPut);
  lease_.reset();
  plane_.reset();
  pages_.reset();
  page_options_.waits_for_disk = true;
  page_options_.backing = [tier](const Tenant& /*tenant*/) {
    return PageBacking{.remote = {tier}, .write_time = kPatience};
  };
  ServiceCoreOptions options = small_options();
  options.tenants = two_tenants();
  start(options, {});
  lease_ = open_lease();
  const auto writer = attach();
  const auto bytes = random_bytes(kPageBytes, 1);
  std::ranges::copy(bytes, writer->staging().begin());
  PageDescriptor page = descriptor_of(lease_->pages.reserve(*lease_, {.hash = "h"}).handle);
  page.crc = crc32c(bytes);
  const std::uint64_t id =
      writer->send(FrameType::kWritePages, 0, encode(WriteBody{lease_->name, {page}}));
  ASSERT_TRUE(tier->await_held(GatedTier::Verb::kPut));

  const auto other = attach(1);

  EXPECT_TRUE(tier->is_held(GatedTier::Verb::kPut));
  tier->let_go(GatedTier::Verb::kPut);
  EXPECT_EQ(decode_outcomes(writer->reply_to(id).control()).at(0).code, 0U);
}

TEST_F(PlanePages, AreWrittenInBatchesThroughHalvesOfStaging) {
  constexpr std::size_t kPages = 40;  // a half of 512 KiB takes eight
  const auto channel = attach();
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::string> handles;
  for (std::uint64_t i = 0; i < kPages; ++i) {
    bytes.push_back(random_bytes(kPageBytes, i));
    handles.push_back(lease_->pages.reserve(*lease_, {}).handle);
  }
  const std::string unknown = handles[11];
  lease_->pages.abort(*lease_, unknown);
  std::vector<PageWrite> writes;
  for (std::size_t i = 0; i < kPages; ++i) {
    writes.push_back({.handle = handles[i], .from = bytes[i]});
  }
  writes[20].handle = "short";
  writes[30].from = writes[30].from.first(100);

  write_shared(*channel, lease_->name, writes);

  for (std::size_t i = 0; i < kPages; ++i) {
    const bool good = i != 11 && i != 20 && i != 30;
    ASSERT_EQ(writes[i].done, good) << i;
    EXPECT_FALSE(writes[i].existed);
    if (!good) continue;
    const PinnedPage page = pages_->read(tenant(), handles[i]);
    EXPECT_TRUE(std::ranges::equal(page.bytes(), bytes[i])) << i;
    EXPECT_EQ(page.crc(), writes[i].crc);
  }
  EXPECT_EQ(pages_->stats().committed_pages, kPages - 3);
}

TEST_F(PlanePages, AreSummedByTheServerForClientsThatDoNot) {
  const auto channel = attach();
  const auto bytes = random_bytes(kPageBytes, 1);
  std::ranges::copy(bytes, channel->staging().begin());
  PageDescriptor page = descriptor_of(lease_->pages.reserve(*lease_, {}).handle);
  const auto exchange = [&](FrameType type, const Bytes& control) {
    return decode_outcomes(channel->reply_to(channel->send(type, kServerSums, control)).control());
  };
  const std::vector<PageOutcome> written =
      exchange(FrameType::kWritePages, encode(WriteBody{lease_->name, {page}}));
  ASSERT_EQ(written.at(0).code, 0U);
  EXPECT_EQ(written[0].crc, crc32c(bytes));
  const std::array<PageDescriptor, 2> wanted{page, descriptor_of(std::string(32, 'x'))};
  const std::vector<PageOutcome> found = exchange(FrameType::kReadPages, encode(wanted));
  EXPECT_EQ(found.at(0), written[0]);
  EXPECT_NE(found.at(1).code, 0U);

  const PinnedPage stored = pages_->read(tenant(), {page.handle.data(), page.handle.size()});
  const_cast<std::byte&>(stored.bytes()[17]) ^= std::byte{1};

  EXPECT_EQ(read(*channel, {page}).at(0).code, 0U) << "not looked at";
  EXPECT_EQ(exchange(FrameType::kReadPages, encode(std::span(wanted).first(1))).at(0).code,
            kDataLoss);
}

TEST_F(PlanePages, LargerThanHalfOfStagingAreLeftToOtherWays) {
  const auto channel = attach();
  const std::vector<std::byte> bytes(channel->staging().size() / 2 + 1);
  PageWrite write{.handle = "x", .from = bytes};
  write_shared(*channel, lease_->name, {&write, 1});
  EXPECT_FALSE(write.done);
  EXPECT_FALSE(write.existed);
}

TEST_F(PlanePages, WrittenAfterAnothersOfTheirKeyAreToldSo) {
  const BlobKey key{.layer = 3, .hash = "hash"};
  const auto other = open_lease();
  const std::string ours = lease_->pages.reserve(*lease_, key).handle;
  const std::string theirs = other->pages.reserve(*other, key).handle;
  const auto bytes = random_bytes(kPageBytes, 1);
  (void)other->pages.commit(*other, theirs, bytes);
  const auto channel = attach();
  PageWrite write{.handle = ours, .from = bytes};

  write_shared(*channel, lease_->name, {&write, 1});

  EXPECT_FALSE(write.done);
  EXPECT_TRUE(write.existed);
  EXPECT_EQ(pages_->stats().reserved_pages, 0U);
  const PageInfo found = lease_->pages.reserve(*lease_, key);
  EXPECT_TRUE(found.existed);
  EXPECT_EQ(found.handle, theirs);
}

TEST_F(PlanePages, WrittenWhileTheirClientChangesThemAreWholeOrRefused) {
  const auto channel = attach();
  const auto page_of = [&](std::uint64_t index) {
    return channel->staging().subspan(index * kPageBytes, kPageBytes);
  };
  std::vector<PageDescriptor> pages;
  for (std::uint64_t i = 0; i < 16; ++i) {
    PageDescriptor page = descriptor_of(lease_->pages.reserve(*lease_, {}).handle);
    page.destination = i * kPageBytes;
    page.crc = crc32c(page_of(i));
    pages.push_back(page);
  }
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (std::uint64_t i = 0; !stop; ++i) {
      std::atomic_ref(page_of(i % 8)[i * 4099 % kPageBytes]).store(std::byte(i));
    }
  });

  const std::vector<PageOutcome> written = write(*channel, pages, lease_->name);
  stop = true;
  changer.join();

  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (written[i].code != 0) {
      EXPECT_LT(i, 8U) << "nobody changed it";
      continue;
    }
    const PinnedPage page =
        pages_->read(tenant(), {pages[i].handle.data(), pages[i].handle.size()});
    EXPECT_EQ(crc32c(page.bytes()), pages[i].crc) << i;
  }
}

TEST_F(PlanePages, AreWrittenByTheirLeaseAlone) {
  const auto other = open_lease(1);
  const auto channel = attach(1);
  PageDescriptor page = descriptor_of(lease_->pages.reserve(*lease_, {}).handle);
  page.crc = crc32c(channel->staging().first(kPageBytes));

  EXPECT_EQ(write(*channel, {page}, other->name).at(0).code, kNotFound);
  EXPECT_EQ(reason_of([&] { (void)write(*channel, {page}, lease_->name); }), "NOT_FOUND");
  EXPECT_EQ(reason_of([&] { (void)write(*channel, {page}, "leases/none"); }), "NOT_FOUND");
  EXPECT_EQ(pages_->stats().committed_pages, 0U);
}

}  // namespace
}  // namespace kvtier::services::testing
