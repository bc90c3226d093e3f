#pragma once

#include "services/page_cache/page_store.h"
#include "services/page_cache/tenant_pages.h"
#include "tests/support/eventually.h"
#include "tests/support/random_bytes.h"
#include "transfer/tiers/crc32c.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <sys/mman.h>
#include <utility>
#include <vector>

namespace kvtier::services::testing {

using kvtier::testing::random_bytes;
using PageBytes = std::vector<std::byte>;

/// Returns the reason of the `ServiceError` that `act` throws, or "OK".
template <typename Act>
std::string reason_of(Act act) {
  try {
    static_cast<void>(act());
  } catch (const ServiceError& error) {
    return error.reason();
  }
  return "OK";
}

/// An arena, mapped as a client maps it.
class MappedArena {
 public:
  explicit MappedArena(const ArenaFile& file) : size_(file.bytes) {
    base_ = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
    EXPECT_NE(base_, MAP_FAILED);
  }
  ~MappedArena() { munmap(base_, size_); }
  MappedArena(const MappedArena&) = delete;  // owns a mapping
  MappedArena& operator=(const MappedArena&) = delete;

  [[nodiscard]] ArenaView view() const {
    return *ArenaView::of({static_cast<const std::byte*>(base_), size_});
  }

 private:
  void* base_;
  std::size_t size_;
};

/// A store of two tenants, eight pages of 8 KiB each, in extents of four.
class PageStoreTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kPageBytes = 8192;
  static constexpr std::uint64_t kPages = 8;

  PageStoreOptions small_options() {
    PageStoreOptions options;
    options.extent_bytes = 4 * kPageBytes;
    options.arena_bytes = 8 * kPageBytes;
    options.now = [this] { return now_; };
    return options;
  }
  void make_store(const PageStoreOptions& options) {
    lease_.reset();
    store_.reset();
    store_ = std::make_unique<PageStore>(options);
    lease_ = open(alpha_);
  }
  void SetUp() override { make_store(small_options()); }
  void TearDown() override {
    if (store_ == nullptr) return;
    for (const Tenant* tenant : {&alpha_, &beta_}) expect_identity(store_->stats(*tenant));
  }

  static void expect_identity(const PageStats& stats) {
    EXPECT_EQ(
        stats.free_bytes + stats.reserved_bytes + stats.committed_bytes + stats.quarantined_bytes,
        stats.total_bytes);
    EXPECT_LE(stats.free_bytes, stats.total_bytes) << "below 0";
  }

  std::shared_ptr<PageLease> open(Tenant& tenant, const std::string& model = "model",
                                  std::int64_t page_bytes = kPageBytes) {
    return store_->open(tenant, {.model = model, .page_bytes = page_bytes});
  }
  static PageBytes bytes_of(std::uint64_t seed, std::int64_t count = kPageBytes) {
    return random_bytes(static_cast<std::size_t>(count), seed);
  }
  /// Reserves, writes and commits a page of random bytes.
  PageInfo put(PageLease& lease, std::string_view hash, std::uint64_t seed,
               std::uint32_t layer = 0) {
    const PageInfo reserved = lease.pages.reserve(lease, {.layer = layer, .hash = hash});
    const PageBytes bytes = bytes_of(seed, lease.config.page_bytes);
    return lease.pages.commit(lease, reserved.handle, bytes, crc32c(bytes));
  }
  PageInfo put(std::string_view hash, std::uint64_t seed) { return put(*lease_, hash, seed); }
  /// Returns the bytes of a page, or nothing when it is not there.
  std::optional<PageBytes> get(const Tenant& tenant, std::string_view handle) {
    try {
      const PinnedPage page = store_->read(tenant, handle);
      return PageBytes(page.bytes().begin(), page.bytes().end());
    } catch (const ServiceError&) {
      return std::nullopt;
    }
  }
  /// Returns the handles of the longest prefix of these hashes.
  std::vector<std::string> find(PageLease& lease, const std::vector<std::string_view>& hashes,
                                bool pin = false) {
    const std::uint32_t layer = 0;
    std::vector<std::string> handles;
    for (PageInfo& info :
         lease.pages
             .lookup(lease, {.layers = {&layer, 1}, .hashes = hashes, .prefix = true, .pin = pin})
             .pages) {
      handles.push_back(std::move(info.handle));
    }
    return handles;
  }
  /// Returns when the tiers have what they are to have, of a store that waits for that.
  void settle() {
    std::promise<bool> settled;
    lease_->pages.when_settled([&] { settled.set_value(true); });
    EXPECT_TRUE(kvtier::testing::await(settled));
  }
  /// Turns one bit of a committed page, as failing memory would.
  void flip_bit(const std::string& handle, std::size_t bit) {
    const PinnedPage page = store_->read(alpha_, handle, Verify::kNo);
    auto* bytes = const_cast<std::byte*>(page.bytes().data());
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
  }

  TimePoint now_{std::chrono::hours(1)};
  Tenant alpha_{0, {"alpha", "", "", {}}};
  Tenant beta_{1, {"beta", "", "", {}}};
  std::unique_ptr<PageStore> store_;
  std::shared_ptr<PageLease> lease_;  ///< Of alpha.
};

}  // namespace kvtier::services::testing
