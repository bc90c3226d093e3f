#include "tests/services/page_cache/page_fixture.h"
#include "tests/services/wire/copy_page.h"
#include "tests/support/eventually.h"
#include "tests/support/file_size_limit.h"

#include <gmock/gmock.h>

#include <cerrno>
#include <fcntl.h>
#include <future>
#include <unistd.h>

namespace kvtier::services::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST_F(PageStoreTest, ReturnsWhatWasCommitted) {
  const PageInfo info = put("a", 1);
  EXPECT_EQ(get(alpha_, info.handle), bytes_of(1));
  EXPECT_THAT(find(*lease_, {"a"}), ElementsAre(info.handle));
  EXPECT_EQ(info.crc32c, crc32c(bytes_of(1)));
  EXPECT_EQ(store_->stats().committed_bytes, std::uint64_t{kPageBytes});
  EXPECT_EQ(alpha_.kv_bytes(), kPageBytes);
}

TEST_F(PageStoreTest, ShowsNoPageBeforeItsCommit) {
  const PageInfo info = lease_->pages.reserve(*lease_, {.hash = "a"});
  const auto read = [&] { return store_->read(alpha_, info.handle); };
  EXPECT_EQ(reason_of(read), "NOT_COMMITTED");
  lease_->pages.write(*lease_, info.handle, 0, bytes_of(1));
  EXPECT_EQ(reason_of(read), "NOT_COMMITTED");
  EXPECT_THAT(find(*lease_, {"a"}), IsEmpty());
  const MappedArena arena(store_->arena(alpha_));
  EXPECT_FALSE(arena.view().is_readable(info.slot, info.generation));
  EXPECT_EQ(alpha_.kv_bytes(), kPageBytes) << "charged when reserved";
  lease_->pages.commit(*lease_, info.handle);
  EXPECT_EQ(get(alpha_, info.handle), bytes_of(1));
}

TEST_F(PageStoreTest, FindsTheLongestPrefixThatAllLayersHave) {
  put(*lease_, "a", 1, 0);
  put(*lease_, "a", 2, 1);
  put(*lease_, "b", 3, 0);
  put(*lease_, "b", 4, 1);
  put(*lease_, "c", 5, 0);
  put(*lease_, "d", 6, 0);
  put(*lease_, "d", 7, 1);
  const std::vector<std::uint32_t> layers{0, 1};
  const std::vector<std::string_view> hashes{"a", "b", "c", "d"};
  const auto found =
      lease_->pages.lookup(*lease_, {.layers = layers, .hashes = hashes, .prefix = true}).pages;
  ASSERT_EQ(found.size(), 4U);
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(get(alpha_, found[i].handle), bytes_of(i + 1));
  EXPECT_EQ(store_->stats().lookup_hits, 2U);
  EXPECT_EQ(store_->stats().lookup_misses, 2U);
}

TEST_F(PageStoreTest, FindsEachHashForItself) {
  put(*lease_, "a", 1, 0);
  put(*lease_, "b", 2, 0);
  put(*lease_, "b", 3, 1);
  put(*lease_, "d", 4, 0);
  put(*lease_, "d", 5, 1);
  const std::vector<std::uint32_t> layers{0, 1};
  const std::vector<std::string_view> hashes{"a", "b", "c", "d", "b"};
  const PageQuery query{.layers = layers, .hashes = hashes};
  const FoundPages found = lease_->pages.lookup(*lease_, query);
  EXPECT_THAT(found.hits, ElementsAre(false, true, false, true, true));
  ASSERT_EQ(found.pages.size(), 6U);
  const std::vector<std::uint64_t> seeds{2, 3, 4, 5, 2, 3};
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    EXPECT_EQ(get(alpha_, found.pages[i].handle), bytes_of(seeds[i]));
  }
  EXPECT_EQ(store_->stats().lookup_hits, 3U);
  EXPECT_EQ(store_->stats().lookup_misses, 2U);

  PageQuery only_hits = query;
  only_hits.pages = false;
  EXPECT_EQ(lease_->pages.lookup(*lease_, only_hits).hits, found.hits);
  EXPECT_THAT(lease_->pages.lookup(*lease_, only_hits).pages, IsEmpty());
  EXPECT_EQ(store_->stats().pinned_pages, 0U);
  PageQuery pins = query;
  pins.pin = true;
  EXPECT_EQ(lease_->pages.lookup(*lease_, pins).pages.size(), 6U);
  EXPECT_EQ(store_->stats().pinned_pages, 4U);
  const PageQuery nothing{.layers = {}, .hashes = hashes};
  EXPECT_THAT(lease_->pages.lookup(*lease_, nothing).hits, Each(false));
}

TEST_F(PageStoreTest, KeepsModelsAndPageSizesApart) {
  put("a", 1);
  EXPECT_THAT(find(*open(alpha_, "other"), {"a"}), IsEmpty());
  EXPECT_THAT(find(*open(alpha_, "model", kPageBytes - 1), {"a"}), IsEmpty());
  EXPECT_EQ(find(*open(alpha_), {"a"}).size(), 1U) << "another lease of the same";
}

TEST_F(PageStoreTest, OneOfTwoWritersOfAKeyWins) {
  const auto second = open(alpha_);
  const PageInfo first = lease_->pages.reserve(*lease_, {.hash = "a"});
  const PageInfo loser = second->pages.reserve(*second, {.hash = "a"});
  lease_->pages.commit(*lease_, first.handle, bytes_of(1));
  const PageInfo info = second->pages.commit(*second, loser.handle, bytes_of(2));
  EXPECT_TRUE(info.existed);
  EXPECT_EQ(info.handle, first.handle);
  EXPECT_EQ(get(alpha_, info.handle), bytes_of(1));
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, loser.handle); }), "PAGE_GONE");
  EXPECT_TRUE(second->pages.reserve(*second, {.hash = "a"}).existed);
  EXPECT_EQ(alpha_.kv_bytes(), kPageBytes);
}

TEST_F(PageStoreTest, CommitRepeatedAnswersTheSame) {
  const PageInfo info = put("a", 1);
  EXPECT_EQ(lease_->pages.commit(*lease_, info.handle).handle, info.handle);
  EXPECT_EQ(lease_->pages.commit(*lease_, info.handle, bytes_of(2)).crc32c, info.crc32c);
  lease_->pages.write(*lease_, info.handle, 0, bytes_of(2));
  EXPECT_EQ(lease_->pages.commit(*lease_, info.handle).crc32c, info.crc32c);
  EXPECT_EQ(get(alpha_, info.handle), bytes_of(1));
  EXPECT_EQ(store_->stats().pages_committed, 1U);
  const auto second = open(alpha_);
  EXPECT_EQ(reason_of([&] {
              second->pages.write(*second, info.handle, 0, bytes_of(2));
              return 0;
            }),
            "NOT_RESERVED")
      << "of another lease";
}

TEST_F(PageStoreTest, RefusesBytesThatDoNotMakeAPage) {
  const PageInfo info = lease_->pages.reserve(*lease_, {.hash = "a"});
  const auto write = [&](std::uint64_t offset, std::int64_t count) {
    return reason_of([&] {
      lease_->pages.write(*lease_, info.handle, offset, bytes_of(1, count));
      return 0;
    });
  };
  EXPECT_EQ(write(0, kPageBytes + 1), "INVALID_ARGUMENT");
  EXPECT_EQ(write(1, 1), "INVALID_ARGUMENT");
  EXPECT_EQ(write(~std::uint64_t{7}, 16), "INVALID_ARGUMENT");
  EXPECT_EQ(write(0, kPageBytes - 1), "OK");
  EXPECT_EQ(reason_of([&] { return lease_->pages.commit(*lease_, info.handle); }),
            "PAGE_INCOMPLETE");
  EXPECT_EQ(write(kPageBytes - 1, 2), "INVALID_ARGUMENT");
  for (const std::int64_t count :
       {std::int64_t{0}, kPageBytes - 1, kPageBytes + 1, 2 * kPageBytes}) {
    EXPECT_EQ(
        reason_of([&] { return lease_->pages.commit(*lease_, info.handle, bytes_of(1, count)); }),
        "INVALID_ARGUMENT");
  }
  EXPECT_EQ(write(kPageBytes - 1, 1), "OK");
  EXPECT_EQ(reason_of([&] { return lease_->pages.commit(*lease_, info.handle); }), "OK");
}

TEST_F(PageStoreTest, RefusesAWrongChecksumAndTakesTheBytesAnew) {
  const PageInfo info = lease_->pages.reserve(*lease_, {.hash = "a"});
  const PageBytes bytes = bytes_of(1);
  EXPECT_EQ(reason_of([&] {
              return lease_->pages.commit(*lease_, info.handle, bytes, crc32c(bytes) ^ 1U);
            }),
            "CHECKSUM_MISMATCH");
  EXPECT_THAT(find(*lease_, {"a"}), IsEmpty());
  lease_->pages.commit(*lease_, info.handle, bytes, crc32c(bytes));
  EXPECT_EQ(get(alpha_, info.handle), bytes);
  EXPECT_EQ(store_->stats().crc_mismatches, 1U);
}

TEST_F(PageStoreTest, RefusesLeasesThatAreTooLarge) {
  const auto open_with = [&](std::int64_t page_bytes, std::size_t model) {
    return reason_of([&] { return open(alpha_, std::string(model, 'm'), page_bytes); });
  };
  EXPECT_EQ(open_with(0, 1), "INVALID_ARGUMENT");
  EXPECT_EQ(open_with(-1, 1), "INVALID_ARGUMENT");
  EXPECT_EQ(open_with(4 * kPageBytes + 1, 1), "INVALID_ARGUMENT");
  EXPECT_EQ(open_with(std::int64_t{1} << 62, 1), "INVALID_ARGUMENT");
  EXPECT_EQ(open_with(4 * kPageBytes, 128), "OK");
  EXPECT_EQ(open_with(1, 129), "INVALID_ARGUMENT");
  EXPECT_EQ(
      reason_of([&] { return lease_->pages.reserve(*lease_, {.hash = std::string(65, 'h')}); }),
      "INVALID_ARGUMENT");
}

TEST_F(PageStoreTest, EvictsTheLongestUnused) {
  std::vector<PageInfo> pages;
  for (std::uint64_t i = 0; i < kPages; ++i) pages.push_back(put(std::to_string(i), i));
  now_ += std::chrono::seconds(20);
  EXPECT_EQ(find(*lease_, {"0"}).size(), 1U);  // a use
  now_ += std::chrono::seconds(20);
  put("new", 100);
  EXPECT_EQ(get(alpha_, pages[0].handle), bytes_of(0));
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, pages[1].handle); }), "PAGE_GONE");
  EXPECT_THAT(find(*lease_, {"1"}), IsEmpty());
  EXPECT_EQ(store_->stats().pages_evicted, 1U);
  EXPECT_EQ(static_cast<std::uint64_t>(alpha_.kv_bytes()), store_->stats().total_bytes);
  const EvictionAges ages = store_->stats().evicted_for_room;
  EXPECT_THAT(ages.counts, ElementsAre(0, 0, 1, 0, 0, 0));  // 40 s
  EXPECT_EQ(ages.sum, 40.0);
}

TEST_F(PageStoreTest, NeverEvictsPinnedOrReservedPages) {
  std::vector<PageInfo> pages;
  for (std::uint64_t i = 0; i < kPages - 1; ++i) {
    pages.push_back(put(std::to_string(i), i));
    lease_->pages.pin(*lease_, pages.back().handle);
  }
  const PageInfo reserved = lease_->pages.reserve(*lease_, {.hash = "r"});
  const auto reserve = [&] { return lease_->pages.reserve(*lease_, {.hash = "new"}); };
  EXPECT_EQ(reason_of(reserve), "PAGES_FULL");
  for (std::uint64_t i = 0; i < kPages - 1; ++i)
    EXPECT_EQ(get(alpha_, pages[i].handle), bytes_of(i));
  lease_->pages.commit(*lease_, reserved.handle, bytes_of(50));
  EXPECT_EQ(get(alpha_, reserved.handle), bytes_of(50));

  lease_->pages.unpin(*lease_, pages[3].handle);
  EXPECT_EQ(reason_of(reserve), "OK") << "the page that was committed last gives way";
  EXPECT_EQ(reason_of(reserve), "OK");
  EXPECT_EQ(reason_of(reserve), "PAGES_FULL");
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, pages[3].handle); }), "PAGE_GONE");
}

TEST_F(PageStoreTest, PinnedPageIsInUse) {
  const PageInfo held = put("held", 1);
  lease_->pages.pin(*lease_, held.handle);
  now_ += std::chrono::hours(3);
  lease_->pages.unpin(*lease_, held.handle);
  now_ += std::chrono::seconds(5);
  alpha_.set_quota(10, kPageBytes);
  put("new", 2);
  EXPECT_EQ(get(alpha_, held.handle), std::nullopt);
  const EvictionAges ages = store_->stats().evicted_for_quota;
  EXPECT_THAT(ages.counts, ElementsAre(0, 1, 0, 0, 0, 0));
  EXPECT_EQ(ages.sum, 5.0);
}

TEST_F(PageStoreTest, PinsAreCountedAndBelongToTheirLease) {
  const PageInfo info = put("a", 1);
  const auto unpin = [&](PageLease& lease) {
    return reason_of([&] {
      lease.pages.unpin(lease, info.handle);
      return 0;
    });
  };
  const auto other = open(alpha_);
  EXPECT_EQ(unpin(*lease_), "NOT_PINNED");
  lease_->pages.pin(*lease_, info.handle);
  lease_->pages.pin(*lease_, info.handle);
  EXPECT_EQ(unpin(*other), "NOT_PINNED");
  EXPECT_EQ(store_->stats().pinned_pages, 1U);
  EXPECT_EQ(unpin(*lease_), "OK");
  EXPECT_EQ(store_->stats().pinned_pages, 1U);
  EXPECT_EQ(unpin(*lease_), "OK");
  EXPECT_EQ(unpin(*lease_), "NOT_PINNED");
  EXPECT_EQ(store_->stats().pinned_pages, 0U);
}

TEST_F(PageStoreTest, DeletedPageIsGoneButKeepsItsBytesForThoseWhoPinnedIt) {
  const PageInfo info = put("a", 1);
  std::optional<PinnedPage> page = store_->read(alpha_, info.handle);
  lease_->pages.remove(*lease_, info.handle);
  EXPECT_THAT(find(*lease_, {"a"}), IsEmpty());
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, info.handle); }), "PAGE_GONE");
  for (std::uint64_t i = 0; i < 2 * kPages; ++i) put(std::to_string(i), 10 + i);
  EXPECT_TRUE(std::ranges::equal(page->bytes(), bytes_of(1)));
  page.reset();
  for (std::uint64_t i = 0; i < kPages; ++i) put("again" + std::to_string(i), 50 + i);
  EXPECT_EQ(store_->stats().committed_pages, kPages) << "its slot is used again";
}

TEST_F(PageStoreTest, EndOfALeaseGivesBackReservationsAndPins) {
  const auto client = open(alpha_);
  const PageInfo kept = put(*client, "kept", 1);
  client->pages.pin(*client, kept.handle);
  const PageInfo half = client->pages.reserve(*client, {.hash = "half"});
  client->pages.write(*client, half.handle, 0, bytes_of(2, 100));
  now_ += std::chrono::seconds(40);
  static_cast<void>(store_->find(alpha_, lease_->name));  // renews the other
  now_ += std::chrono::seconds(30);
  store_->sweep();

  EXPECT_EQ(store_->num_leases(), 1U);
  const PageStats stats = store_->stats();
  EXPECT_EQ(stats.reserved_bytes, 0U);
  EXPECT_EQ(stats.pinned_pages, 0U);
  EXPECT_EQ(alpha_.kv_bytes(), kPageBytes);
  EXPECT_EQ(get(alpha_, kept.handle), bytes_of(1)) << "what was committed stays";
  EXPECT_EQ(reason_of([&] { return store_->find(alpha_, client->name); }), "LEASE_EXPIRED");
  EXPECT_EQ(reason_of([&] { return client->pages.commit(*client, half.handle); }), "LEASE_EXPIRED");
  EXPECT_EQ(reason_of([&] { return lease_->pages.commit(*lease_, half.handle); }), "PAGE_GONE");
}

TEST_F(PageStoreTest, AbandonedReservationComesBackWhileTheLeaseLives) {
  const PageInfo old = lease_->pages.reserve(*lease_, {.hash = "old"});
  now_ += std::chrono::seconds(20);
  const PageInfo young = lease_->pages.reserve(*lease_, {.hash = "young"});
  now_ += std::chrono::seconds(10);
  store_->sweep();
  EXPECT_EQ(store_->stats().reservations_expired, 1U);
  EXPECT_EQ(reason_of([&] { return lease_->pages.commit(*lease_, old.handle, bytes_of(1)); }),
            "PAGE_GONE");
  EXPECT_EQ(reason_of([&] { return lease_->pages.commit(*lease_, young.handle, bytes_of(1)); }),
            "OK");
  store_->close(alpha_, lease_->name);
  EXPECT_EQ(store_->stats().reserved_bytes, 0U);
}

TEST_F(PageStoreTest, StaleGenerationNeverSucceeds) {
  std::vector<std::string> stale;
  for (std::uint64_t round = 0; round < 20; ++round) {
    const PageInfo info = put("a", round);
    for (const std::string& old : stale) {
      EXPECT_EQ(get(alpha_, old), std::nullopt);
      EXPECT_EQ(reason_of([&] { return lease_->pages.commit(*lease_, old); }), "PAGE_GONE");
      EXPECT_EQ(reason_of([&] { return lease_->pages.pin(*lease_, old); }), "PAGE_GONE");
    }
    lease_->pages.remove(*lease_, info.handle);
    stale.push_back(info.handle);
  }
  EXPECT_EQ(alpha_.kv_bytes(), 0);
}

TEST_F(PageStoreTest, ForgedHandlesAndThoseOfAnotherStartAreRefused) {
  const PageInfo info = put("a", 1);
  for (const std::string& text : {std::string(), std::string("x"), std::string(32, 'A'),
                                  info.handle + "A", std::string(1 << 20, 'B')}) {
    EXPECT_NE(reason_of([&] { return store_->read(alpha_, text); }), "OK");
  }
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  for (std::size_t i = 0; i < info.handle.size(); ++i) {
    for (const char digit : kDigits) {
      std::string forged = info.handle;
      if (forged[i] == digit) continue;
      forged[i] = digit;
      EXPECT_NE(reason_of([&] { return store_->read(alpha_, forged); }), "OK") << i << digit;
    }
  }
  PageStore other(small_options());
  static_cast<void>(other.open(alpha_, {.model = "model", .page_bytes = kPageBytes}));
  EXPECT_EQ(reason_of([&] { return other.read(alpha_, info.handle); }), "SERVER_EPOCH");
}

TEST_F(PageStoreTest, HundredThousandForgedHandlesReachNothing) {
  const PageInfo info = put("a", 1);
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const auto seed = std::random_device{}();
  std::mt19937_64 random(seed);
  std::string forged = info.handle;
  for (int i = 0; i < 100'000; ++i) {
    // Of this epoch, with another slot, or with this page's slot and another end.
    const std::size_t kept = i % 2 == 0 ? 6 : 22;
    forged.replace(0, kept, info.handle, 0, kept);
    std::uint64_t bits = random();
    for (std::size_t at = kept; at < forged.size(); ++at, bits >>= 6U) {
      if (at == 16) bits = random();
      forged[at] = kDigits[bits & 63U];
    }
    if (forged == info.handle) continue;
    try {
      static_cast<void>(store_->read(alpha_, forged));
      FAIL() << forged << ", seed " << seed;
    } catch (const ServiceError& error) {
      ASSERT_EQ(error.code(), Code::kNotFound) << forged << ", seed " << seed;
    }
  }
  EXPECT_EQ(store_->stats().pinned_pages, 0U);
}

TEST_F(PageStoreTest, QuotaIsMetExactlyByEvictingOnesOwn) {
  alpha_.set_quota(10, 3 * kPageBytes);
  const auto reserve = [&](PageLease& lease, std::string_view hash) {
    return reason_of([&] { return lease.pages.reserve(lease, {.hash = hash}); });
  };
  const PageInfo first = put("1", 1);
  put("2", 2);
  put("3", 3);
  now_ += std::chrono::seconds(10);
  put("4", 4);
  EXPECT_EQ(get(alpha_, first.handle), std::nullopt);
  EXPECT_EQ(alpha_.kv_bytes(), 3 * kPageBytes);
  const PageStats stats = store_->stats();
  EXPECT_THAT(stats.evicted_for_quota.counts, ElementsAre(0, 1, 0, 0, 0, 0));  // 10 s
  EXPECT_EQ(stats.evicted_for_quota.sum, 10.0);
  EXPECT_EQ(stats.evicted_for_room.sum, 0.0);
  for (const char* hash : {"2", "3", "4"}) lease_->pages.pin(*lease_, find(*lease_, {hash}).at(0));
  EXPECT_EQ(reserve(*lease_, "5"), "QUOTA_EXCEEDED");
  EXPECT_EQ(reserve(*open(beta_), "5"), "OK") << "nobody else's";
  EXPECT_EQ(store_->stats().refused_quota, 1U);
}

TEST_F(PageStoreTest, QuotaThatSessionsHaveTakenEvictsNothingInVain) {
  alpha_.set_quota(10, 4 * kPageBytes);
  const PageInfo first = put("1", 1);
  alpha_.charge_kv(3 * kPageBytes - 1);
  const auto large = store_->open(alpha_, {.model = "model", .page_bytes = 2 * kPageBytes});
  EXPECT_EQ(reason_of([&] { return large->pages.reserve(*large, {.hash = "2"}); }),
            "QUOTA_EXCEEDED");
  EXPECT_EQ(get(alpha_, first.handle), bytes_of(1));
  EXPECT_EQ(store_->stats().refused_quota, 1U);
  alpha_.refund_kv(3 * kPageBytes - 1);
}

TEST_F(PageStoreTest, DamagedBytesAreQuarantinedAndNeverServed) {
  const PageInfo info = put("a", 1);
  flip_bit(info.handle, 12'345);
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, info.handle); }), "CHECKSUM_FAILED");
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, info.handle); }), "PAGE_GONE");
  EXPECT_THAT(find(*lease_, {"a"}), IsEmpty());
  const PageStats stats = store_->stats();
  EXPECT_EQ(stats.checksum_failures, 1U);
  EXPECT_EQ(stats.quarantined, 1U);
  EXPECT_EQ(stats.quarantined_bytes, std::uint64_t{kPageBytes});
  EXPECT_EQ(alpha_.kv_bytes(), 0);
  for (std::uint64_t i = 0; i < 2 * kPages; ++i) {
    EXPECT_NE(put(std::to_string(i), i).slot, info.slot) << "not used again";
  }
}

TEST_F(PageStoreTest, EveryFlippedBitIsFound) {
  std::mt19937_64 random(3);
  PageStoreOptions options = small_options();
  options.arena_bytes = 64 * kPageBytes;
  make_store(options);
  for (std::uint64_t i = 0; i < 60; ++i) {
    const PageInfo info = put(std::to_string(i), i);
    flip_bit(info.handle, random() % (8 * kPageBytes));
    EXPECT_EQ(get(alpha_, info.handle), std::nullopt);
  }
  EXPECT_EQ(store_->stats().checksum_failures, 60U);
}

TEST_F(PageStoreTest, SweepFindsDamageBeforeAReaderDoes) {
  const PageInfo good = put("a", 1);
  const PageInfo bad = put("b", 2);
  flip_bit(bad.handle, 7);
  store_->sweep();
  EXPECT_EQ(store_->stats().checksum_failures, 1U);
  EXPECT_EQ(store_->stats().quarantined, 1U);
  EXPECT_EQ(find(*lease_, {"a", "b"}).size(), 1U);
  EXPECT_EQ(get(alpha_, good.handle), bytes_of(1));
}

TEST_F(PageStoreTest, SizesShareTheArenaAndGiveWayByAge) {
  const auto large = open(alpha_, "model", 4 * kPageBytes);
  for (std::uint64_t i = 0; i < kPages; ++i) put(std::to_string(i), i);
  const PageInfo big = put(*large, "big", 100);  // empties the older of the extents
  EXPECT_EQ(get(alpha_, big.handle), bytes_of(100, 4 * kPageBytes));
  EXPECT_EQ(store_->stats().committed_pages, 5U);
  EXPECT_THAT(find(*lease_, {"0"}), IsEmpty());
  EXPECT_EQ(find(*lease_, {"4", "5", "6", "7"}).size(), 4U);
  put(*large, "bigger", 101);
  EXPECT_EQ(find(*lease_, {"4"}).size(), 1U) << "used later than the large one";
  for (std::uint64_t i = 0; i < kPages; ++i) put("x" + std::to_string(i), i);
  EXPECT_EQ(store_->stats().committed_pages, kPages) << "and back again";
}

TEST_F(PageStoreTest, ArenaThatCannotBeMadeRefusesTheLeaseAlone) {
  const PageInfo info = put("a", 1);
  {
    const kvtier::testing::FileSizeLimit limit(4096);
    EXPECT_EQ(reason_of([&] { return open(beta_); }), "OUT_OF_MEMORY");
  }
  EXPECT_EQ(store_->num_leases(), 1U);
  EXPECT_EQ(get(alpha_, info.handle), bytes_of(1));
  EXPECT_EQ(reason_of([&] { return open(beta_); }), "OK");
}

TEST_F(PageStoreTest, OtherTenantsAreServedWhileATenantsFolderIsRead) {
  PageStoreOptions options = small_options();
  std::future<void> reads;
  bool others_wait = true;
  options.backing = [&](const Tenant& tenant) {
    if (&tenant == &beta_) {
      reads = std::async(std::launch::async, [this] { (void)store_->arena(alpha_); });
      others_wait = reads.wait_for(kvtier::testing::kPatience) != std::future_status::ready;
    }
    return PageBacking{};
  };
  make_store(options);
  (void)open(beta_);
  EXPECT_FALSE(others_wait);
}

TEST_F(PageStoreTest, MemoryOfAllArenasIsBounded) {
  PageStoreOptions options = small_options();
  options.max_bytes = options.arena_bytes;
  make_store(options);
  EXPECT_EQ(reason_of([&] { return open(beta_); }), "OUT_OF_MEMORY");
  options.arena_bytes = 0;
  store_.reset();
  PageStore none(options);
  EXPECT_EQ(reason_of([&] { return none.open(alpha_, {.model = "", .page_bytes = 1}); }),
            "NO_PAGE_CACHE");
  options.arena_bytes = options.extent_bytes + 1;
  EXPECT_THROW(PageStore{options}, Error);
}

TEST_F(PageStoreTest, ClientsCanReadTheArenaAndDoNothingElse) {
  const PageInfo info = put("a", 1);
  const ArenaFile file = store_->arena(alpha_);
  const MappedArena arena(file);
  PageBytes copy(kPageBytes);
  EXPECT_TRUE(copy_page(arena.view(), info.slot, info.generation, copy));
  EXPECT_EQ(copy, bytes_of(1));
  EXPECT_EQ(arena.view().page_header(info.slot).crc32c, crc32c(copy));
  EXPECT_EQ(arena.view().header().server_epoch, store_->epoch());

  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0), MAP_FAILED);
  EXPECT_EQ(pwrite(file.fd, "x", 1, 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(file.fd, 0), -1);
  EXPECT_EQ(ftruncate(file.fd, static_cast<off_t>(2 * file.bytes)), -1);
  EXPECT_EQ(fallocate(file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
  const std::string path = "/proc/self/fd/" + std::to_string(file.fd);
  const int again = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_EQ(pwrite(again, "x", 1, 0), -1);
  close(again);
  EXPECT_EQ(get(alpha_, info.handle), bytes_of(1));
}

TEST_F(PageStoreTest, MappedReaderSeesThatAPageHasGone) {
  const PageInfo info = put("a", 1);
  const MappedArena arena(store_->arena(alpha_));
  lease_->pages.remove(*lease_, info.handle);
  PageBytes copy(kPageBytes);
  EXPECT_FALSE(copy_page(arena.view(), info.slot, info.generation, copy));
  PageInfo next = put("b", 2);
  for (std::uint64_t i = 0; next.slot != info.slot; ++i) next = put("b" + std::to_string(i), 2);
  EXPECT_FALSE(copy_page(arena.view(), info.slot, info.generation, copy));
  EXPECT_TRUE(copy_page(arena.view(), next.slot, next.generation, copy));
  EXPECT_EQ(copy, bytes_of(2));
}

TEST_F(PageStoreTest, HeartbeatOfTheArenaMoves) {
  const MappedArena arena(store_->arena(alpha_));
  const auto before = arena.view().header().heartbeat.load();
  now_ += std::chrono::seconds(1);
  store_->sweep();
  EXPECT_EQ(arena.view().header().heartbeat.load() - before, 1'000'000'000U);
}

}  // namespace
}  // namespace kvtier::services::testing
