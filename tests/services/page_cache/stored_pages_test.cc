#include "services/page_cache/page_backing.h"
#include "tests/services/page_cache/page_fixture.h"
#include "tests/support/fault_tier.h"
#include "tests/support/gated_tier.h"
#include "tests/support/program.h"
#include "transfer/tiers/sealed_file_tier.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <set>
#include <unistd.h>

namespace kvtier::services::testing {
namespace {

namespace fs = std::filesystem;
using kvtier::testing::GatedTier;
using kvtier::testing::kPatience;
using Verb = GatedTier::Verb;
using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string name_of(std::uint64_t number) { return "hash " + std::to_string(number); }

/// A store whose pages are in a folder beside its arena, which a next store finds.
class StoredPagesTest : public PageStoreTest {
 protected:
  StoredPagesTest() {
    std::string pattern = ::testing::TempDir() + "kvtier-pages-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    write_key("0123456789abcdef, a secret");
  }
  ~StoredPagesTest() override { fs::remove_all(folder_); }
  void SetUp() override { next_store(); }
  void TearDown() override {
    PageStoreTest::TearDown();
    lease_.reset();
    store_.reset();
  }

  void write_key(const std::string& text) { std::ofstream(folder_ / "key") << text; }
  [[nodiscard]] PageBackingOptions backing_options() const {
    return {.key_file = folder_ / "key",
            .folder = folder_ / "pages",
            .capacity_bytes = PageBackingOptions::kLeastCapacity,
            .max_page_bytes = 4 * kPageBytes,
            .read_time = kPatience,
            .write_time = kPatience};
  }
  PageStoreOptions stored_options(const PageBackingOptions& backing) {
    PageStoreOptions options = small_options();
    options.backing = make_backing(backing);
    options.waits_for_disk = true;
    return options;
  }
  /// Makes the store of the next process; what the one before has is left as it is.
  void next_store() { make_store(stored_options(backing_options())); }
  void end_store() {
    lease_.reset();
    store_.reset();
  }
  /// Does as a server would that is killed afterwards: in a process that ends without destructors.
  void in_killed_process(const std::function<void()>& act) {
    end_store();
    const pid_t pid = ::fork();
    if (pid == 0) {
      next_store();
      act();
      ::_exit(HasFailure() ? 1 : 0);
    }
    ASSERT_EQ(kvtier::testing::wait_for_exit(pid), 0);
  }
  /// Returns the bytes of the page that a hash finds, or nothing.
  std::optional<PageBytes> look_up(std::string_view hash) {
    const std::vector<std::string> handles = find(*lease_, {hash});
    return handles.empty() ? std::nullopt : get(alpha_, handles[0]);
  }
  std::vector<bool> contains(PageLease& lease, const std::vector<std::string_view>& hashes) {
    const std::uint32_t layer = 0;
    return lease.pages.lookup(lease, {.layers = {&layer, 1}, .hashes = hashes, .pages = false})
        .hits;
  }
  [[nodiscard]] std::vector<fs::path> segments() const {
    std::vector<fs::path> found;
    for (const auto& file : fs::directory_iterator(folder_ / "pages" / "tenant-alpha")) {
      if (file.path().extension() == ".segment") found.push_back(file.path());
    }
    std::ranges::sort(found);
    return found;
  }
  static std::string text_of(const fs::path& path) {
    std::string text(fs::file_size(path), '\0');
    std::ifstream(path, std::ios::binary).read(text.data(), std::ssize(text));
    return text;
  }

  fs::path folder_;
};

TEST_F(StoredPagesTest, HaveTheDurablePagesOfAProcessThatWasKilled) {
  in_killed_process([this] {
    const PageInfo a = put("a", 1);
    (void)put("b", 2);
    const PageInfo gone = put("c", 3);
    settle();
    EXPECT_TRUE(lease_->pages.is_durable(a.handle));
    lease_->pages.remove(*lease_, gone.handle);
    settle();
    const PageInfo half = lease_->pages.reserve(*lease_, {.hash = "d"});
    lease_->pages.write(*lease_, half.handle, 0, bytes_of(4, kPageBytes / 2));
    (void)put(*lease_, "", 5);  // found by a handle that is not in use any more
    settle();
  });
  next_store();

  EXPECT_EQ(contains(*lease_, {"a", "b", "c", "d"}), (std::vector<bool>{true, true, false, false}));
  EXPECT_EQ(store_->stats().committed_pages, 0U) << "to ask brings nothing";
  EXPECT_EQ(look_up("a"), bytes_of(1));
  const std::vector<std::string> b = find(*lease_, {"b"}, /*pin=*/true);
  ASSERT_THAT(b, SizeIs(1));
  EXPECT_EQ(get(alpha_, b[0]), bytes_of(2));
  EXPECT_TRUE(lease_->pages.is_durable(b[0]));
  EXPECT_THAT(find(*lease_, {"c"}), IsEmpty());
  EXPECT_THAT(find(*lease_, {"d"}), IsEmpty());
  EXPECT_EQ(store_->stats().brought, 2U);
  EXPECT_EQ(alpha_.kv_bytes(), 2 * kPageBytes) << "charged as it comes";
}

TEST_F(StoredPagesTest, WhatWasEvictedFromMemoryIsFoundOnTheDisk) {
  constexpr std::uint64_t kMany = 3 * kPages;
  for (std::uint64_t i = 0; i < kMany; ++i) {
    (void)put(name_of(i), i);
    settle();
  }
  EXPECT_GT(store_->stats().pages_evicted, 0U);
  for (std::uint64_t i = 0; i < kMany; ++i) EXPECT_EQ(look_up(name_of(i)), bytes_of(i)) << i;
  EXPECT_EQ(store_->stats().unwritten, 0U);
}

TEST_F(StoredPagesTest, APrefixIsBroughtInItsOrderUpToTheFirstMiss) {
  for (const std::uint64_t i : {0U, 1U, 2U, 4U}) (void)put(name_of(i), i);
  settle();
  end_store();
  next_store();
  std::vector<std::string> names;
  for (std::uint64_t i = 0; i < 5; ++i) names.push_back(name_of(i));
  const std::vector<std::string> handles = find(*lease_, {names.begin(), names.end()});
  ASSERT_THAT(handles, SizeIs(3));
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_EQ(get(alpha_, handles[i]), bytes_of(i));
}

TEST_F(StoredPagesTest, KeepTenantsModelsAndSizesApart) {
  (void)put("a", 1);
  settle();
  end_store();
  fs::create_directory(folder_ / "pages" / "tenant-beta");
  fs::permissions(folder_ / "pages" / "tenant-beta", fs::perms::owner_all);
  for (const fs::path& path : segments()) {
    fs::copy(path, folder_ / "pages" / "tenant-beta" / path.filename());
  }
  next_store();
  EXPECT_THAT(contains(*open(beta_), {"a"}), Each(false)) << "even with the file of another";
  EXPECT_THAT(contains(*open(alpha_, "other"), {"a"}), Each(false));
  EXPECT_THAT(contains(*open(alpha_, "model", kPageBytes - 1), {"a"}), Each(false));
  EXPECT_THAT(contains(*lease_, {"a"}), Each(true));
}

TEST_F(StoredPagesTest, AnotherKeyFindsNothingAndServesNothing) {
  (void)put("a", 1);
  settle();
  end_store();
  const std::string before = text_of(folder_ / "key");
  write_key("another secret of enough bytes");
  next_store();
  EXPECT_EQ(look_up("a"), std::nullopt);
  EXPECT_THAT(contains(*lease_, {"a"}), Each(false));
  end_store();
  write_key(before);
  next_store();
  EXPECT_EQ(look_up("a"), bytes_of(1));
}

TEST_F(StoredPagesTest, RecordsOfAnotherOwnerOrSecretDoNotOpen) {
  end_store();
  const tiers::FileTierOptions files{.folder = folder_ / "one",
                                     .capacity_bytes = std::uint64_t{32} << 20,
                                     .segment_bytes = std::uint64_t{16} << 20,
                                     .max_page_bytes = 8192};
  const auto bytes_of_text = [](std::string_view text) { return std::as_bytes(std::span(text)); };
  const std::string secret(32, 's'), other(32, 'o');
  const kvtier::PageKey key{1, 2, 3};
  const PageBytes page = bytes_of(7);
  const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::minutes(1); };
  const auto put = [&] {
    tiers::SealedFileTier tier(files, {"alpha", bytes_of_text(secret)});
    TierPut one{.key = key, .bytes = page};
    tier.put({&one, 1}, soon());
    EXPECT_EQ(one.status, TierStatus::kOk);
  };
  const auto get = [&](std::string_view owner, const std::string& with) {
    tiers::SealedFileTier tier(files, {owner, bytes_of_text(with)});
    PageBytes read(page.size());
    TierGet one{.key = key, .bytes = read};
    tier.get({&one, 1}, soon());
    if (one.status == TierStatus::kOk) {
      EXPECT_EQ(read, page);
    }
    return one.status;
  };
  put();
  for (const fs::path& path : {folder_ / "one"}) {
    for (const auto& file : fs::directory_iterator(path)) {
      EXPECT_EQ(
          text_of(file.path()).find(std::string(reinterpret_cast<const char*>(page.data()), 64)),
          std::string::npos)
          << "nothing of a page can be read";
    }
  }
  EXPECT_EQ(get("alpha", secret), TierStatus::kOk);
  EXPECT_EQ(get("beta", secret), TierStatus::kCorrupt);
  EXPECT_EQ(get("alpha", secret), TierStatus::kMiss) << "what does not open is gone";
  put();
  EXPECT_EQ(get("alpha", other), TierStatus::kCorrupt);
}

TEST_F(StoredPagesTest, DamagedRecordsAreMisses) {
  constexpr std::uint64_t kMany = 6;
  constexpr std::size_t kRecord = 4096 + 12288;  // header, and a sealed page in whole blocks
  constexpr std::size_t kUsed = 4096 + kMany * kRecord;
  std::mt19937_64 random(5);
  for (int round = 0; round < 30; ++round) {
    SCOPED_TRACE(round);
    end_store();
    fs::remove_all(folder_ / "pages");
    next_store();
    for (std::uint64_t i = 0; i < kMany; ++i) (void)put(name_of(i), i);
    settle();
    end_store();
    const std::vector<fs::path> files = segments();
    ASSERT_THAT(files, SizeIs(1));
    std::fstream file(files[0], std::ios::binary | std::ios::in | std::ios::out);
    std::string text(kUsed, '\0');
    ASSERT_TRUE(file.read(text.data(), kUsed));
    if (round % 3 == 0) {  // torn
      fs::resize_file(files[0], random() % kUsed);
      text.clear();
    } else if (round % 3 == 1) {  // rotten
      for (int flips = 0; flips < 4; ++flips) {
        text[random() % kUsed] ^= static_cast<char>(1U << random() % 8);
      }
    } else {  // swapped: the record of one page where that of another is
      const std::size_t a = 4096 + random() % kMany * kRecord;
      const std::size_t b = 4096 + random() % kMany * kRecord;
      const std::size_t skip = random() % 2 * 4096;  // the whole record, or the page alone
      for (std::size_t i = skip; i < kRecord; ++i) std::swap(text[a + i], text[b + i]);
    }
    file.seekp(0).write(text.data(), static_cast<std::streamsize>(text.size()));
    file.close();
    next_store();
    for (std::uint64_t i = 0; i < kMany; ++i) {
      const std::optional<PageBytes> read = look_up(name_of(i));
      if (read) {
        EXPECT_EQ(*read, bytes_of(i)) << i;
      }
    }
    EXPECT_EQ(put("after", 99).length, static_cast<std::uint64_t>(kPageBytes));
    settle();
    EXPECT_EQ(look_up("after"), bytes_of(99));
  }
}

TEST_F(StoredPagesTest, QuotasHoldAfterARestart) {
  for (std::uint64_t i = 0; i < 4; ++i) (void)put(name_of(i), i);
  settle();
  end_store();
  alpha_.set_quota(0, 2 * kPageBytes);
  next_store();
  std::size_t found = 0;
  for (std::uint64_t i = 0; i < 4; ++i) {
    const std::optional<PageBytes> read = look_up(name_of(i));
    if (!read) continue;
    ++found;
    EXPECT_EQ(*read, bytes_of(i));
    EXPECT_LE(alpha_.kv_bytes(), 2 * kPageBytes);
  }
  EXPECT_EQ(found, 4U) << "one makes room for the next";
  alpha_.set_quota(0, kPageBytes - 1);
  end_store();
  next_store();
  EXPECT_EQ(look_up(name_of(0)), std::nullopt);
  EXPECT_EQ(alpha_.kv_bytes(), 0);
}

TEST_F(StoredPagesTest, TheDiskKeepsToItsCapacity) {
  constexpr std::int64_t kLarge = std::int64_t{4} << 20;
  PageStoreOptions options = stored_options(backing_options());
  PageBackingOptions backing = backing_options();
  backing.max_page_bytes = static_cast<std::size_t>(kLarge);
  options.backing = make_backing(backing);
  options.extent_bytes = kLarge;
  options.arena_bytes = 4 * kLarge;
  end_store();
  make_store(options);
  const auto lease = open(alpha_, "large", kLarge);
  for (std::uint64_t i = 0; i < 40; ++i) {  // 160 MiB, in 64
    (void)put(*lease, name_of(i), i);
    settle();
  }
  std::uintmax_t bytes = 0;
  for (const fs::path& path : segments()) bytes += fs::file_size(path);
  EXPECT_LE(bytes, PageBackingOptions::kLeastCapacity);
  EXPECT_THAT(contains(*lease, {"hash 39", "hash 38"}), Each(true)) << "the newest are there";
}

TEST_F(StoredPagesTest, EvictedTenantsHaveNothingOnTheDisk) {
  (void)put("a", 1);
  const std::vector<std::string> pinned = [&] {
    (void)put("b", 2);
    return find(*lease_, {"b"}, /*pin=*/true);
  }();
  settle();
  now_ += std::chrono::seconds(1);
  EXPECT_EQ(store_->remove_unpinned(alpha_).pages, 1U);
  settle();
  EXPECT_THAT(contains(*lease_, {"a"}), Each(false));
  EXPECT_TRUE(lease_->pages.is_durable(pinned.at(0))) << "written anew";
  end_store();
  next_store();
  EXPECT_EQ(look_up("a"), std::nullopt);
  EXPECT_EQ(look_up("b"), bytes_of(2));
}

/// Random histories with kills, against a model: a page that was durable is found as it was put,
/// and what is found is never anything else.
TEST_F(StoredPagesTest, HistoriesWithKillsLoseNoDurablePage) {
  for (const std::uint64_t seed : {1U, 2U, 3U, 4U}) {
    SCOPED_TRACE(seed);
    end_store();
    fs::remove_all(folder_ / "pages");
    std::mt19937_64 random(seed);
    std::map<std::uint64_t, bool> pages;  // every page that was put; whether it may not be lost
    for (int life = 0; life < 6; ++life) {
      std::vector<std::pair<std::uint64_t, bool>> acts;  // number; whether it is deleted
      for (int i = 0; i < 12; ++i) acts.emplace_back(random() % 20, random() % 4 == 0);
      const std::size_t settled = random() % acts.size();  // what comes after may be lost
      in_killed_process([&] {
        for (const auto& [number, is_kept] : pages) {
          const std::optional<PageBytes> read = look_up(name_of(number));
          EXPECT_TRUE(read || !is_kept) << number;
          if (read) {
            EXPECT_EQ(*read, bytes_of(number)) << number;
          }
        }
        for (std::size_t i = 0; i < acts.size(); ++i) {
          const auto [number, is_deleted] = acts[i];
          const std::vector<std::string> there = find(*lease_, {name_of(number)});
          if (!is_deleted) {
            if (there.empty()) (void)put(name_of(number), number);
          } else if (!there.empty()) {
            lease_->pages.remove(*lease_, there[0]);
          }
          if (i <= settled) settle();
        }
      });
      for (std::size_t i = 0; i < acts.size(); ++i) {
        const auto [number, is_deleted] = acts[i];
        bool& is_kept = pages.emplace(number, false).first->second;
        is_kept = !is_deleted && (i <= settled || is_kept);
      }
    }
  }
}

TEST_F(StoredPagesTest, StoresThatShareServersFindEachOthersPages) {
  const auto servers = std::make_shared<kvtier::testing::FaultTier>();
  PageBackingOptions shared{.key_file = folder_ / "key",
                            .max_page_bytes = 4 * kPageBytes,
                            .make_remote =
                                [&](const std::string& owner) {
                                  EXPECT_EQ(owner, "pages/alpha");
                                  return std::vector<std::shared_ptr<PageTier>>{servers};
                                },
                            .read_time = kPatience,
                            .write_time = kPatience};
  end_store();
  make_store(stored_options(shared));
  (void)put("a", 1);
  settle();
  EXPECT_FALSE(lease_->pages.is_durable(find(*lease_, {"a"}).at(0)));

  Tenant other{0, {"alpha", "", "", {}}};
  {
    PageStore second(stored_options(shared));
    const auto lease = second.open(other, {.model = "model", .page_bytes = kPageBytes});
    const std::uint32_t layer = 0;
    const std::vector<std::string_view> hashes{"a", "b"};
    const PageQuery query{.layers = {&layer, 1}, .hashes = hashes};
    const FoundPages found = lease->pages.lookup(*lease, query);
    EXPECT_EQ(found.hits, (std::vector<bool>{true, false}));
    const PinnedPage page = second.read(other, found.pages.at(0).handle);
    EXPECT_TRUE(std::ranges::equal(page.bytes(), bytes_of(1)));
    EXPECT_EQ(servers->puts(), 1U) << "not written back to where it came from";
  }
  kvtier::testing::FaultTier::Faults down;
  down.get = TierStatus::kUnavailable;
  servers->set(down);
  PageStore third(stored_options(shared));
  const auto lease = third.open(other, {.model = "model", .page_bytes = kPageBytes});
  const std::uint32_t layer = 0;
  const std::vector<std::string_view> hashes{"a"};
  EXPECT_THAT(lease->pages.lookup(*lease, {.layers = {&layer, 1}, .hashes = hashes}).hits,
              Each(false));
}

/// A store whose pages are on servers elsewhere, which a test can keep waiting.
class GatedPagesTest : public PageStoreTest {
 protected:
  void SetUp() override { make_store(gated_options()); }
  void TearDown() override {
    for (const Verb verb : {Verb::kPut, Verb::kGet, Verb::kRemove}) servers_->let_go(verb);
    PageStoreTest::TearDown();
    lease_.reset();
    store_.reset();
  }
  PageStoreOptions gated_options() {
    PageStoreOptions options = small_options();
    options.waits_for_disk = true;
    options.backing = [servers = servers_](const Tenant& /*tenant*/) {
      return PageBacking{.remote = {servers}, .read_time = kPatience, .write_time = kPatience};
    };
    return options;
  }
  /// Drives all other pages out of memory.
  void fill_memory() {
    for (std::uint64_t i = 0; i < kPages; ++i) (void)put("", 100 + i);
  }
  std::vector<std::string> find_one(std::string_view hash) { return find(*lease_, {hash}); }
  std::string reason_of_removal(const std::string& handle) {
    return reason_of([&] {
      lease_->pages.remove(*lease_, handle);
      return 0;
    });
  }

  const std::shared_ptr<GatedTier> servers_ = std::make_shared<GatedTier>();
};

/// A tier that says nothing of itself before it may.
class SilentTier final : public PageTier {
 public:
  void put(std::span<TierPut> /*pages*/, Deadline /*deadline*/) override {}
  void get(std::span<TierGet> /*pages*/, Deadline /*deadline*/) override {}
  void remove(std::span<const kvtier::PageKey> /*keys*/, Deadline /*deadline*/) override {}
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override { return 1U << 24U; }
  [[nodiscard]] TierStats stats() const override {
    asked.set_value(true);
    may_answer.wait_for(kPatience);
    return {};
  }
  [[nodiscard]] std::string describe() const override { return "silent tier"; }

  mutable std::promise<bool> asked;
  std::promise<void> answer;
  std::shared_future<void> may_answer = answer.get_future().share();
};

TEST_F(PageStoreTest, StatisticsThatWaitForAServerKeepNoCallWaiting) {
  const auto server = std::make_shared<SilentTier>();
  PageStoreOptions options = small_options();
  options.backing = [server](const Tenant& tenant) {
    PageBacking backing;
    if (tenant.index() == 0) backing.remote = {server};
    return backing;
  };
  make_store(options);
  auto scrape = std::async(std::launch::async, [this] { return store_->stats().leases; });
  ASSERT_TRUE(kvtier::testing::await(server->asked));

  auto calls = std::async(std::launch::async, [this] {
    (void)open(beta_);
    (void)lease_->pages.reserve(*lease_, {});
  });
  EXPECT_EQ(calls.wait_for(kPatience), std::future_status::ready);

  server->answer.set_value();
  EXPECT_EQ(scrape.get(), 1U);
  server->asked = {};  // of the end of the test
}

TEST_F(GatedPagesTest, DeletedPagesAreNotBroughtBackBeforeTheServersHaveDeletedThem) {
  const PageInfo page = put("a", 1);
  settle();
  servers_->hold_next(Verb::kRemove);
  lease_->pages.remove(*lease_, page.handle);
  ASSERT_TRUE(servers_->await_held(Verb::kRemove));

  EXPECT_THAT(find_one("a"), IsEmpty());
  EXPECT_FALSE(put("a", 2).existed) << "the bytes that were deleted take the place of new ones";
  EXPECT_EQ(get(alpha_, find_one("a").at(0)), bytes_of(2));

  servers_->let_go(Verb::kRemove);
  settle();
  fill_memory();
  EXPECT_EQ(get(alpha_, find_one("a").at(0)), bytes_of(2));
}

TEST_F(GatedPagesTest, APageThatIsDeletedWhileALookupReadsItIsNotFoundAfterwards) {
  (void)put("a", 1);
  settle();
  fill_memory();
  servers_->hold_next(Verb::kGet);
  std::future<std::vector<std::string>> slow =
      std::async(std::launch::async, [&] { return find_one("a"); });
  ASSERT_TRUE(servers_->await_held(Verb::kGet));
  lease_->pages.remove(*lease_, find_one("a").at(0));
  settle();
  EXPECT_EQ(servers_->size(), 0U);

  servers_->let_go(Verb::kGet);

  EXPECT_THAT(slow.get(), IsEmpty());
  EXPECT_THAT(find_one("a"), IsEmpty());
}

TEST_F(GatedPagesTest, ALookupAsksForFewPagesAtOnceHoweverManyLayersItHas) {
  constexpr std::int64_t kLargePage = std::int64_t{4} << 20;
  PageStoreOptions options = gated_options();
  options.extent_bytes = kLargePage;
  options.arena_bytes = 64 * kLargePage;
  make_store(options);
  const auto lease = open(alpha_, "model", kLargePage);
  std::vector<std::uint32_t> layers(24);
  for (std::uint32_t i = 0; i < layers.size(); ++i) layers[i] = i;
  const std::vector<std::string_view> hashes{"a"};

  (void)lease->pages.lookup(*lease, {.layers = layers, .hashes = hashes});

  EXPECT_EQ(servers_->most_got(), std::size_t{16} << 20);
}

TEST_F(GatedPagesTest, PagesThatHaveGoneDoNotWaitToBeWritten) {
  constexpr std::uint64_t kMany = 10'000;
  servers_->hold_next(Verb::kPut);
  (void)put("first", 1);
  ASSERT_TRUE(servers_->await_held(Verb::kPut));
  for (std::uint64_t i = 0; i < kMany; ++i) (void)put(std::to_string(i), i);

  EXPECT_GT(store_->stats().unwritten, kMany / 2) << "known before the servers answer";
  servers_->let_go(Verb::kPut);
  settle();
  EXPECT_EQ(store_->stats().unwritten, kMany + 1 - servers_->size());
  EXPECT_GE(servers_->size(), kPages) << "those that are there are written";
}

TEST_F(GatedPagesTest, ADeletionIsRefusedWhereTooManyWait) {
  PageStoreOptions options = gated_options();
  EXPECT_EQ(options.max_removals, 65536U);
  options.max_removals = 3000;
  make_store(options);
  servers_->hold_next(Verb::kRemove);
  std::uint64_t i = 0;
  std::string reason;
  PageInfo page;
  for (; i < 2 * options.max_removals; ++i) {
    page = put(std::to_string(i), 1);
    reason = reason_of_removal(page.handle);
    if (reason != "OK") break;
  }
  ASSERT_EQ(reason, "TIERS_BUSY");
  EXPECT_EQ(i, options.max_removals);
  EXPECT_TRUE(get(alpha_, page.handle)) << "a call that throws has changed nothing";

  servers_->let_go(Verb::kRemove);
  settle();
  EXPECT_EQ(reason_of_removal(page.handle), "OK");
  settle();
  EXPECT_EQ(servers_->size(), 0U);
  EXPECT_LE(servers_->most_removed(), 1024U) << "they share one deadline";
}

TEST_F(GatedPagesTest, DeletionsThatAreLeftAtTheEndShareOneDeadline) {
  static constexpr std::chrono::seconds kReadTime{1};
  PageStoreOptions options = gated_options();
  options.backing = [servers = servers_](const Tenant& /*tenant*/) {
    return PageBacking{.remote = {servers}, .read_time = kReadTime, .write_time = kPatience};
  };
  make_store(options);
  servers_->hold_next(Verb::kRemove);
  for (std::uint64_t i = 0; i < 6000; ++i) {
    ASSERT_EQ(reason_of_removal(put(std::to_string(i), 1).handle), "OK");
  }
  ASSERT_TRUE(servers_->await_held(Verb::kRemove));
  servers_->be_deaf(true);
  const auto begin = std::chrono::steady_clock::now();
  servers_->let_go(Verb::kRemove);

  store_->finish(begin + kPatience);

  const std::vector<PageTier::Deadline> all = servers_->removals();
  std::set<PageTier::Deadline> late;
  std::ranges::copy_if(all, std::inserter(late, late.end()),
                       [&](PageTier::Deadline one) { return one >= begin + kReadTime; });
  EXPECT_GE(all.size(), 6U);
  EXPECT_LE(late.size(), 2U) << "that of one that began before the end, and that of the others";
  EXPECT_GT(store_->stats().unremoved, 0U);
}

TEST_F(GatedPagesTest, WritesThatAreLeftAtTheEndShareOneDeadline) {
  // Eight pairs of writes, each given up after so long, outlast the puts on a slow machine, too.
  static constexpr std::chrono::seconds kWriteTime{5};
  static constexpr std::int64_t kLarge = std::int64_t{8} << 20;  // two go at once
  static constexpr std::uint64_t kMany = 8;
  PageStoreOptions options = gated_options();
  options.backing = [servers = servers_](const Tenant& /*tenant*/) {
    return PageBacking{.remote = {servers}, .read_time = kPatience, .write_time = kWriteTime};
  };
  options.extent_bytes = kLarge;
  options.arena_bytes = kMany * kLarge;
  make_store(options);
  servers_->be_deaf(true);
  for (Tenant* tenant : {&alpha_, &beta_}) {
    const auto lease = open(*tenant, "large", kLarge);
    for (std::uint64_t i = 0; i < kMany; ++i) (void)put(*lease, name_of(i), i);
  }

  const PageTier::Deadline end = std::chrono::steady_clock::now() + kWriteTime;
  store_->finish(end);

  for (const PageTier::Deadline deadline : servers_->puts()) EXPECT_LE(deadline, end);
  EXPECT_GT(store_->stats().unwritten, 0U);
}

TEST_F(GatedPagesTest, ALookupOfAPrefixReadsNothingBehindAPageThatIsDeleted) {
  const PageInfo page = put("a", 1);
  for (const char* hash : {"b", "c"}) (void)put(hash, 1);
  settle();
  servers_->hold_next(Verb::kRemove);
  lease_->pages.remove(*lease_, page.handle);
  ASSERT_TRUE(servers_->await_held(Verb::kRemove));
  fill_memory();

  EXPECT_THAT(find(*lease_, {"a", "b", "c"}), IsEmpty());

  EXPECT_EQ(servers_->most_got(), 0U);
}

TEST_F(GatedPagesTest, ALookupDoesNotDriveOutWhatItHasFound) {
  for (std::uint64_t i = 0; i < kPages; ++i) (void)put(std::to_string(i), i);
  settle();
  for (std::uint64_t i = 0; i < kPages / 2; ++i) (void)put("", 100 + i);  // 0 to 3 go

  EXPECT_THAT(find(*lease_, {"4", "5", "6", "7", "0", "1", "2", "3"}), SizeIs(kPages));
}

TEST_F(StoredPagesTest, AtTheEndTheDiskHasAllPagesBeforeTheServersDo) {
  constexpr std::int64_t kLarge = std::int64_t{4} << 20;  // four go at once
  constexpr std::uint64_t kMany = 9;
  const auto servers = std::make_shared<GatedTier>();
  PageBackingOptions backing = backing_options();
  backing.max_page_bytes = static_cast<std::size_t>(kLarge);
  backing.make_remote = [&](const std::string& /*owner*/) {
    return std::vector<std::shared_ptr<PageTier>>{servers};
  };
  end_store();
  PageStoreOptions options = stored_options(backing);
  options.extent_bytes = kLarge;
  options.arena_bytes = kMany * kLarge;
  make_store(options);
  const auto lease = open(alpha_, "large", kLarge);
  servers->hold_next(Verb::kPut);
  (void)put(*lease, name_of(0), 0);
  ASSERT_TRUE(servers->await_held(Verb::kPut));
  for (std::uint64_t i = 1; i < kMany; ++i) (void)put(*lease, name_of(i), i);

  const PageTier::Deadline end = std::chrono::steady_clock::now() + kPatience;
  lease->pages.end_by(end);
  servers->hold_next_instead(Verb::kPut);
  ASSERT_TRUE(servers->await_held(Verb::kPut));

  EXPECT_EQ(store_->stats().written, kMany);
  EXPECT_EQ(servers->size(), 1U);
  servers->let_go(Verb::kPut);
  store_->finish(end);
  EXPECT_EQ(servers->size(), kMany);
  EXPECT_EQ(store_->stats().unwritten, 0U);
}

TEST_F(StoredPagesTest, ADiskThatCannotBeUsedIsRefused) {
  const auto error_of = [&](const PageBackingOptions& options) {
    try {
      (void)make_backing(options)(alpha_);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("OK");
  };
  end_store();
  PageBackingOptions options = backing_options();
  EXPECT_EQ(error_of(options), "OK");
  options.key_file = folder_ / "none";
  EXPECT_THAT(error_of(options), ::testing::HasSubstr("expected a readable file, found"));
  write_key("too short");
  options.key_file = folder_ / "key";
  EXPECT_THAT(error_of(options), ::testing::HasSubstr("expected 16 to 4096 bytes, found 9"));
  write_key(std::string(16, 'k'));
  options.capacity_bytes -= 1;
  EXPECT_THAT(error_of(options), ::testing::HasSubstr("expected at least 64 MiB"));
  options = backing_options();
  options.folder = folder_ / "key";
  EXPECT_THAT(error_of(options), ::testing::HasSubstr("expected a folder"));
  options.folder = folder_ / "open";
  fs::create_directories(folder_ / "open" / "tenant-alpha");
  fs::permissions(folder_ / "open" / "tenant-alpha", fs::perms::all);
  EXPECT_NE(error_of(options), "OK") << "others may enter";
}

}  // namespace
}  // namespace kvtier::services::testing
