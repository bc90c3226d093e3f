#include "kvtier/error.h"

#include "runtime/paging/page_pool.h"
#include "runtime/paging/page_table.h"
#include "tests/support/fake_device.h"
#include "tests/support/fault_tier.h"
#include "tests/support/model_calls.h"
#include "transfer/tiers/file_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

/// Random calls on page tables over a pool whose pages go to tiers, against pages in plain memory.
namespace kvtier::runtime {
namespace {

using testing::FaultTier;

constexpr std::size_t kFrames = 24;
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kRows = 4;  // of a page
constexpr std::int64_t kMostPages = 12;
constexpr std::size_t kMostSequences = 6;

/// Of each case.
int num_calls() { return testing::num_model_calls(8'000); }

/// What a page is to hold.
struct ModelPage {
  std::array<std::uint64_t, kRows> rows{};
  std::size_t num_rows = 0;
  bool sealed = false;
  bool kept = false;
  bool lost = false;
};

struct Sequence {
  PageTable table;
  transfer::Buffer addresses;
  std::vector<std::shared_ptr<ModelPage>> pages;
  std::size_t length = 0;  // in rows; what follows in the last page is forgotten
};

struct Case {
  bool first_fails = false;  ///< The first tier, or both, do at times.
  bool copies_fail = false;
  bool on_disk = false;  ///< The first is a file tier, too small for all pages, without copies.
};

class Calls : private PagePool::Owner {
 public:
  Calls(const Case& what, std::uint64_t seed, const std::filesystem::path& folder)
      : case_(what),
        random_(seed),
        tiers_(make_tiers(folder), kPageBytes, std::chrono::seconds(60), {}),
        pool_(device_, kPageBytes, kFrames * kPageBytes, {}, tiers_, *this),
        stream_(device_.make_stream()) {}
  ~Calls() override {
    while (!sequences_.empty()) close(0);
    device_.run_all();
  }
  Calls(const Calls&) = delete;  // the pool points into it
  Calls& operator=(const Calls&) = delete;

  void call() {
    if (sequences_.empty()) return open();
    if (pick(50) == 0) change_faults();
    const std::size_t i = pick(sequences_.size());
    switch (pick(16)) {
      case 0:
        return sequences_.size() < kMostSequences ? open() : close(i);
      case 1:
        return sequences_.size() < kMostSequences ? fork(i) : close(i);
      case 2:
      case 3:
        return truncate(i);
      case 4:
        return keep(i);
      case 5:
      case 6:
      case 7:
      case 8:
        return read();
      default:
        return append(i);
    }
  }

  /// Compares everything that can be known without a call.
  void check() {
    std::vector<const ModelPage*> live;
    std::size_t shared = 0;
    for (const Sequence& sequence : sequences_) {
      ASSERT_EQ(static_cast<std::size_t>(sequence.table.size()), sequence.pages.size());
      for (std::size_t p = 0; p < sequence.pages.size(); ++p) {
        const ModelPage& page = *sequence.pages[p];
        const Page& name = sequence.table.page(static_cast<std::int64_t>(p));
        const std::byte* const bytes = PagePool::address(name);
        ASSERT_EQ(PagePool::shared(name), sequence.pages[p].use_count() > 1);
        ASSERT_EQ(PagePool::sealed(name), page.sealed);
        if (!page.sealed || page.kept) {
          ASSERT_NE(bytes, nullptr) << "an open page, or one of a graph, is evicted";
        }
        if (bytes != nullptr) expect_rows(page, bytes);
        live.push_back(&page);
      }
    }
    std::sort(live.begin(), live.end());
    for (std::size_t i = 1; i < live.size(); ++i) {
      if (live[i] == live[i - 1] && (i < 2 || live[i - 2] != live[i])) ++shared;
    }
    live.erase(std::unique(live.begin(), live.end()), live.end());
    ASSERT_EQ(pool_.num_used() + pool_.num_evicted(), live.size());
    ASSERT_LE(pool_.num_used(), kFrames);
    ASSERT_EQ(pool_.num_shared(), shared);
    const PagePool::Counters& moved = pool_.counters();
    ASSERT_EQ(moved.restored, tier_sums().tier_hits);
    ASSERT_GE(moved.evicted, moved.restored + pool_.num_evicted());
  }

  [[nodiscard]] const PagePool& pool() const { return pool_; }
  [[nodiscard]] Stats::Cumulative tier_sums() const {
    Stats stats;
    tiers_.add_to(stats);
    return stats.cumulative;
  }
  [[nodiscard]] std::uint64_t num_refused() const { return num_refused_; }
  [[nodiscard]] std::uint64_t num_lost() const { return num_lost_; }

 private:
  void wait_for_work(transfer::Stream& /*stream*/) override { device_.run_all(); }
  void run_unlocked(const std::function<void()>& work) override { work(); }
  std::vector<std::shared_ptr<PageTier>> make_tiers(const std::filesystem::path& folder) {
    if (!case_.on_disk) return {first_, copies_};
    tiers::FileTierOptions options;
    options.folder = folder;
    options.segment_bytes = 16 * (kPageBytes + 4096) + 2 * 4096;
    options.capacity_bytes = 3 * options.segment_bytes;
    options.max_page_bytes = kPageBytes;
    options.sync = false;
    options.retain = true;
    return {std::make_shared<tiers::FileTier>(options)};
  }
  std::size_t pick(std::size_t n) { return random_() % n; }
  bool failing() const { return case_.first_fails && fails_; }

  void change_faults() {
    const std::array<FaultTier::Faults, 7> faults{FaultTier::Faults{},
                                                  {.get = TierStatus::kUnavailable},
                                                  {.flip = true},
                                                  {.get = TierStatus::kMiss},
                                                  {.half = true},
                                                  {.put = TierStatus::kFull},
                                                  {.put = TierStatus::kUnavailable}};
    const std::size_t n = pick(2) * pick(faults.size());
    fails_ = n > 0;
    if (case_.first_fails) first_->set(faults[n]);
    // Copies that are not taken are none.
    if (case_.copies_fail) copies_->set(faults[pick(2) * pick(4)]);
  }

  // Pages that cannot go, and what a call needs beside them.
  bool fits(const ModelPage* needed, std::size_t more) const {
    std::vector<const ModelPage*> staying;
    for (const Sequence& sequence : sequences_) {
      for (const auto& page : sequence.pages) {
        if (!page->sealed || page->kept || page.get() == needed) staying.push_back(page.get());
      }
    }
    std::sort(staying.begin(), staying.end());
    staying.erase(std::unique(staying.begin(), staying.end()), staying.end());
    return staying.size() + more <= kFrames;
  }

  void open() {
    auto memory = device_.allocate(transfer::Space::kDevice, kMostPages * sizeof(std::byte*), {});
    PageTable table(pool_, memory.as<std::byte*>(), kMostPages);
    sequences_.push_back({std::move(table), std::move(memory), {}, 0});
  }
  void close(std::size_t i) {
    sequences_[i].table.shrink(*stream_, 0);
    device_.run_all();
    // A table cannot be assigned to.
    std::vector<Sequence> left;
    for (std::size_t j = 0; j < sequences_.size(); ++j) {
      if (j != i) left.push_back(std::move(sequences_[j]));
    }
    sequences_.swap(left);
  }
  void fork(std::size_t i) {
    open();
    const Sequence& parent = sequences_[i];
    Sequence& child = sequences_.back();
    child.table.share(parent.table, parent.table.size());
    std::memcpy(child.addresses.data(), parent.addresses.data(), kMostPages * sizeof(std::byte*));
    child.pages = parent.pages;
    child.length = parent.length;
  }
  void truncate(std::size_t i) {
    Sequence& sequence = sequences_[i];
    sequence.length -= pick(std::min<std::size_t>(sequence.length, 9) + 1);
    const std::size_t pages = (sequence.length + kRows - 1) / kRows;
    sequence.table.shrink(*stream_, static_cast<std::int64_t>(pages));
    sequence.pages.resize(pages);
  }

  /// Takes until `take` succeeds; false when no page may go.
  template <typename Take>
  bool evicting(std::size_t count, Take take) {
    if (count > pool_.num_movable()) return false;
    while (!take()) {
      if (pool_.evict(*stream_, count) == 0) return false;
    }
    return true;
  }
  /// Brings pages in; false when the call was refused, as it may be.
  bool ensure_resident(const std::vector<Page*>& names, std::size_t distinct) {
    try {
      if (pool_.ensure_resident(*stream_, names)) return true;
      if (distinct > pool_.num_movable()) return false;
      ++num_refused_;
      EXPECT_TRUE(failing() || case_.on_disk) << "pages that fit are refused";
    } catch (const Error& error) {
      ++num_refused_;
      if (error.code() == ErrorCode::kResourceExhausted) {
        EXPECT_TRUE(failing() || case_.on_disk) << error.what();
      } else {
        EXPECT_TRUE(case_.first_fails && case_.copies_fail) << error.what();
        if (error.code() == ErrorCode::kDataLoss)
          note_lost();
        else
          EXPECT_EQ(error.code(), ErrorCode::kUnavailable) << error.what();
      }
    }
    return false;
  }
  /// A page that was lost once stays lost.
  void note_lost() {
    std::size_t found = 0;
    for (const Sequence& sequence : sequences_) {
      for (std::size_t p = 0; p < sequence.pages.size(); ++p) {
        const bool lost = PagePool::lost(sequence.table.page(static_cast<std::int64_t>(p)));
        EXPECT_TRUE(lost || !sequence.pages[p]->lost);
        if (lost && !std::exchange(sequence.pages[p]->lost, true)) ++num_lost_;
        if (lost) ++found;
      }
    }
    EXPECT_GT(found, 0U) << "data loss, and no page is lost";
  }

  void append(std::size_t i) {
    Sequence& sequence = sequences_[i];
    pool_.unprotect_all();
    const std::size_t room = kMostPages * kRows - sequence.length;
    const std::size_t rows = std::min<std::size_t>(room, 1 + pick(7));
    if (rows == 0 || !open_last(sequence)) return;
    const std::size_t pages = (sequence.length + rows + kRows - 1) / kRows;
    const std::size_t more = pages - sequence.pages.size();
    const ModelPage* const last = sequence.pages.empty() ? nullptr : sequence.pages.back().get();
    const bool grown = evicting(
        more, [&] { return sequence.table.grow(*stream_, static_cast<std::int64_t>(pages)); });
    if (!grown) {
      ++num_refused_;
      EXPECT_TRUE(!fits(last, more) || failing() || case_.on_disk) << "no room where there is some";
      return seal_full(sequence);
    }
    while (sequence.pages.size() < pages) sequence.pages.push_back(std::make_shared<ModelPage>());
    device_.run_all();
    for (std::size_t r = 0; r < rows; ++r, ++sequence.length) {
      const std::size_t p = sequence.length / kRows;
      const std::size_t row = sequence.length % kRows;
      ModelPage& page = *sequence.pages[p];
      page.rows[row] = random_();
      page.num_rows = row + 1;
      std::byte* const bytes = sequence.table.address(static_cast<std::int64_t>(p));
      fill(bytes + row * kPageBytes / kRows, page.rows[row]);
    }
    seal_full(sequence);
  }
  /// Makes the last page one that this sequence may write to. False: refused.
  bool open_last(Sequence& sequence) {
    if (sequence.length % kRows == 0) return true;
    std::shared_ptr<ModelPage>& page = sequence.pages.back();
    const auto last = static_cast<std::int64_t>(sequence.pages.size()) - 1;
    Page& name = sequence.table.page(last);
    if (!ensure_resident({&name}, 1)) return false;
    (void)sequence.table.sync_addresses(*stream_);
    if (page.use_count() > 1) {
      Page* fresh = nullptr;
      if (!evicting(1, [&] { return pool_.take_all({&fresh, 1}, stream_.get()); })) {
        EXPECT_TRUE(!fits(page.get(), 1) || failing() || case_.on_disk);
        return false;
      }
      device_.run_all();
      std::memcpy(PagePool::address(*fresh), PagePool::address(name), kPageBytes);
      sequence.table.replace(*stream_, last, *fresh);
      auto copy = std::make_shared<ModelPage>(*page);
      copy->sealed = copy->kept = false;
      page = std::move(copy);
    } else if (page->sealed) {
      pool_.make_writable(name);
      page->sealed = false;
    }
    page->num_rows = sequence.length % kRows;
    return true;
  }
  void seal_full(Sequence& sequence) {
    for (std::size_t p = 0; p < sequence.length / kRows; ++p) {
      if (std::exchange(sequence.pages[p]->sealed, true)) continue;
      pool_.seal(sequence.table.page(static_cast<std::int64_t>(p)));
    }
  }

  /// Some pages of one sequence or more.
  void read() {
    std::vector<Page*> names;
    std::vector<const ModelPage*> pages;
    const std::size_t most = 1 + pick(2 * kFrames);
    for (Sequence& sequence : sequences_) {
      if (pick(2) == 0) continue;
      for (std::size_t p = 0; p < sequence.pages.size() && names.size() < most; ++p) {
        if (pick(3) == 0) continue;
        names.push_back(&sequence.table.page(static_cast<std::int64_t>(p)));
        if (pick(2) == 0)
          PagePool::record_rows_read(*names.back(), static_cast<std::uint32_t>(pick(100)));
        pages.push_back(sequence.pages[p].get());
      }
    }
    std::vector<const ModelPage*> distinct = pages;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    if (!ensure_resident(names, distinct.size())) return;
    for (std::size_t i = 0; i < names.size(); ++i) {
      ASSERT_FALSE(pages[i]->lost);
      ASSERT_NE(PagePool::address(*names[i]), nullptr);
      expect_rows(*pages[i], PagePool::address(*names[i]));
    }
    for (Sequence& sequence : sequences_) {
      std::int64_t evicted = sequence.table.sync_addresses(*stream_);
      device_.run_all();
      for (std::int64_t p = 0; p < sequence.table.size(); ++p) {
        const std::byte* const bytes = sequence.table.address(p);
        if (bytes == nullptr)
          --evicted;
        else
          ASSERT_EQ(sequence.addresses.as<std::byte*>()[p], bytes);
      }
      ASSERT_EQ(evicted, 0);
    }
    pool_.unprotect_all();
  }
  /// A graph is captured of a sequence that is all here, now and then: few frames may go then.
  void keep(std::size_t i) {
    if (pick(20) != 0) return;
    std::size_t kept = 0;
    for (const Sequence& sequence : sequences_) {
      for (const auto& page : sequence.pages) {
        if (page->kept) ++kept;
      }
    }
    Sequence& sequence = sequences_[i];
    if (kept + sequence.pages.size() > kFrames / 3) return;
    for (std::int64_t p = 0; p < sequence.table.size(); ++p) {
      if (sequence.table.address(p) == nullptr) return;
    }
    for (std::int64_t p = 0; p < sequence.table.size(); ++p) {
      pool_.pin(sequence.table.page(p));
      sequence.pages[static_cast<std::size_t>(p)]->kept = true;
    }
  }

  static void fill(std::byte* row, std::uint64_t value) {
    for (std::size_t i = 0; i < kPageBytes / kRows; i += sizeof(value)) {
      std::memcpy(row + i, &value, sizeof(value));
    }
  }
  static void expect_rows(const ModelPage& page, const std::byte* bytes) {
    std::array<std::byte, kPageBytes / kRows> row{};
    for (std::size_t r = 0; r < page.num_rows; ++r) {
      fill(row.data(), page.rows[r]);
      ASSERT_EQ(std::memcmp(bytes + r * row.size(), row.data(), row.size()), 0) << "row " << r;
    }
  }

  const Case case_;
  std::mt19937_64 random_;
  bool fails_ = false;
  std::uint64_t num_refused_ = 0, num_lost_ = 0;
  testing::FakeDevice device_;
  std::shared_ptr<FaultTier> first_ = std::make_shared<FaultTier>();
  std::shared_ptr<FaultTier> copies_ = std::make_shared<FaultTier>(false);
  PageTiers tiers_;
  PagePool pool_;
  std::unique_ptr<transfer::Stream> stream_;
  std::vector<Sequence> sequences_;
};

class PageModelTest : public ::testing::Test {
 protected:
  PageModelTest() {
    std::string name = ::testing::TempDir() + "kvtier-model-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~PageModelTest() override { std::filesystem::remove_all(folder_); }

  /// Runs the calls and compares after each of the first and every hundredth.
  void run(const Case& what, std::uint64_t& lost) {
    Calls calls(what, 1, folder_ / "tier");
    // A disk is waited for.
    const int count = what.on_disk ? num_calls() / 8 : num_calls();
    for (int i = 0; i < count; ++i) {
      calls.call();
      if (i < 1000 || i % 100 == 0) calls.check();
      ASSERT_FALSE(HasFailure()) << "call " << i;
    }
    EXPECT_GT(calls.pool().counters().evicted, static_cast<std::uint64_t>(count) / 100);
    EXPECT_GT(calls.pool().counters().restored, static_cast<std::uint64_t>(count) / 100);
    EXPECT_GT(calls.num_refused(), 0U);
    lost = calls.num_lost();
    RecordProperty("calls", count);
    RecordProperty("restored", std::to_string(calls.pool().counters().restored));
    RecordProperty("repaired", std::to_string(calls.tier_sums().pages_repaired));
  }

  std::filesystem::path folder_;
};

TEST_F(PageModelTest, CopiesReplaceWhatTheFirstTierLosesAndNothingIsLost) {
  std::uint64_t lost = 0;
  run({.first_fails = true}, lost);
  EXPECT_EQ(lost, 0U);
}

TEST_F(PageModelTest, WhatAllTiersLoseIsReportedAndTheRestIsWhole) {
  std::uint64_t lost = 0;
  run({.first_fails = true, .copies_fail = true}, lost);
  EXPECT_GT(lost, 0U);
}

TEST_F(PageModelTest, ADiskThatIsTooSmallRefusesAndLosesNothing) {
  std::uint64_t lost = 0;
  run({.on_disk = true}, lost);
  EXPECT_EQ(lost, 0U);
}

}  // namespace
}  // namespace kvtier::runtime
