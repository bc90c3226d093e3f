#include "tests/services/page_cache/page_fixture.h"
#include "tests/services/wire/copy_page.h"

#include <array>
#include <atomic>
#include <cstring>
#include <thread>

namespace kvtier::services::testing {
namespace {

/// Pages that say which they are: every word is the same number.
PageBytes page_of(std::uint64_t number, std::int64_t page_bytes) {
  PageBytes bytes(static_cast<std::size_t>(page_bytes));
  for (std::size_t i = 0; i < bytes.size(); i += sizeof number) {
    std::memcpy(bytes.data() + i, &number, sizeof number);
  }
  return bytes;
}

class PageThreadsTest : public PageStoreTest {
 protected:
  static constexpr std::uint64_t kKeys = 20;  // more than there is room for

  /// One client's random calls. Every page that comes back must be whole, and that of its key.
  void run_client(PageLease& lease, std::uint64_t seed, int steps) {
    std::mt19937_64 random(seed);
    std::vector<std::string> pinned;
    for (int i = 0; i < steps; ++i) {
      const std::uint64_t number = random() % kKeys;
      const std::string hash = std::to_string(number);
      try {
        switch (random() % 6) {
          case 0:
          case 1: {
            const PageInfo info = lease.pages.reserve(lease, {.hash = hash});
            if (!info.existed) {
              lease.pages.commit(lease, info.handle, page_of(number, kPageBytes));
            }
            break;
          }
          case 2: {
            for (const std::string& handle : find(lease, {hash})) lease.pages.remove(lease, handle);
            break;
          }
          case 3: {
            for (std::string& handle : find(lease, {hash}, true)) pinned.push_back(handle);
            if (pinned.size() > 2) {
              lease.pages.unpin(lease, pinned.front());
              pinned.erase(pinned.begin());
            }
            break;
          }
          case 4:
            store_->sweep();
            break;
          default:
            for (const std::string& handle : find(lease, {hash})) {
              const PinnedPage page = store_->read(alpha_, handle);
              if (!std::ranges::equal(page.bytes(), page_of(number, kPageBytes))) ++wrong_;
              ++read_;
            }
        }
      } catch (const ServiceError& error) {
        const std::string& reason = error.reason();
        if (reason != "PAGE_GONE" && reason != "PAGES_FULL") ++wrong_;
      }
    }
    for (const std::string& handle : pinned) lease.pages.unpin(lease, handle);
  }

  std::atomic<int> wrong_{0}, read_{0};
};

TEST_F(PageThreadsTest, ClientsBesideEachOtherSeeWholePagesOnly) {
  const std::array<std::shared_ptr<PageLease>, 4> leases{open(alpha_), open(alpha_), open(alpha_),
                                                         open(alpha_)};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < leases.size(); ++i) {
    threads.emplace_back([this, &lease = *leases[i], i] { run_client(lease, i, 3000); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong_, 0);
  EXPECT_GT(read_, 0);
  const PageStats stats = store_->stats();
  EXPECT_EQ(stats.checksum_failures, 0U);
  EXPECT_EQ(stats.pinned_pages, 0U);
  EXPECT_EQ(stats.reserved_pages, 0U);
  EXPECT_EQ(static_cast<std::uint64_t>(alpha_.kv_bytes()), stats.committed_bytes);
}

TEST_F(PageThreadsTest, MappedReaderNeverTakesARecycledPageForItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "another process's plain reads, which ThreadSanitizer would call races";
#endif
  const MappedArena arena(store_->arena(alpha_));
  const ArenaView view = arena.view();
  // The page committed last, as slot and generation in one word: its bytes say the same word.
  std::atomic<std::uint64_t> place{0};
  std::atomic<bool> ending{false};
  std::atomic<int> copied{0}, torn{0};
  std::thread reader([&] {
    PageBytes copy(kPageBytes);
    while (!ending) {
      const std::uint64_t now = place;
      const auto slot = static_cast<std::uint32_t>(now >> 32U);
      const auto generation = static_cast<std::uint32_t>(now);
      if (generation == 0 || !copy_page(view, slot, generation, copy)) continue;
      ++copied;
      if (copy != page_of(now, kPageBytes)) ++torn;
    }
  });
  for (int round = 0; round < 20'000 || copied == 0; ++round) {
    const PageInfo info = lease_->pages.reserve(*lease_, {});
    const std::uint64_t word = std::uint64_t{info.slot} << 32U | info.generation;
    lease_->pages.commit(*lease_, info.handle, page_of(word, kPageBytes));
    place = word;
    if (round % 2 == 0) lease_->pages.remove(*lease_, info.handle);
  }
  ending = true;
  reader.join();
  EXPECT_EQ(torn, 0);
}

}  // namespace
}  // namespace kvtier::services::testing
