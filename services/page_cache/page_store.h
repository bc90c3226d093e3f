#pragma once

#include "kvtier/admin.h"

#include "services/base/handle.h"
#include "services/base/service_error.h"
#include "services/base/tenants.h"
#include "services/page_cache/histogram.h"
#include "services/page_cache/page_arena.h"
#include "services/page_cache/page_backing.h"
#include "services/page_cache/page_lease.h"
#include "services/page_cache/page_slots.h"
#include "services/page_cache/persistent_arenas.h"
#include "services/page_cache/transfer_counts.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::services {

struct PageStoreOptions {
  /// Of one tenant, a multiple of `extent_bytes`; 0: no pages are stored.
  std::int64_t arena_bytes = std::int64_t{1} << 30;
  /// Of all arenas together.
  std::int64_t max_bytes = std::int64_t{8} << 30;
  /// Largest page, and the piece in which an arena is shared out among sizes of pages; a multiple
  /// of `kUnitBytes`.
  std::int64_t extent_bytes = std::int64_t{4} << 20;
  std::size_t max_leases = 16000;
  std::chrono::milliseconds lease_ttl{60'000};
  /// How long a reservation may wait for its bytes.
  std::chrono::milliseconds reservation_ttl{30'000};
  /// Memory that one `sweep` takes ahead of its use, and what it checks of the pages stored.
  std::int64_t prefault_bytes_per_sweep = std::int64_t{64} << 20;
  std::int64_t scrub_bytes_per_sweep = std::int64_t{16} << 20;
  std::function<TimePoint()> now = [] { return std::chrono::steady_clock::now(); };
  /// Whether arenas may take so many bytes more; pages make room for others where not. Empty: yes.
  std::function<bool(std::uint64_t bytes)> may_take{};
  /// Where arenas are, with the pages that they have from a store before; null: in memory of the
  /// store's own. Of `arena_bytes` each.
  std::shared_ptr<const PersistentArenas> kept{};
  /// Where copies of committed pages go, and are looked for; empty: nowhere.
  MakeBacking backing{};
  /// `TenantPages::when_settled` waits for the disk.
  bool waits_for_disk = false;
  /// Deletions of one tenant that may wait for its tiers.
  std::size_t max_removals = 65536;
};

/// What a page is called within its tenant, its lease's model and page size.
struct BlobKey {
  std::uint32_t layer = 0;
  std::string_view hash{};  ///< Up to `kMaxPageHash` bytes; empty: found by its handle alone.
};
inline constexpr std::size_t kMaxPageHash = 64;

/// What to look for, each hash with all `layers`.
struct PageQuery {
  std::span<const std::uint32_t> layers{};
  std::span<const std::string_view> hashes{};
  bool prefix = false;  ///< Ends at the first hash that is not found.
  bool pin = false;     ///< Pins what is found. Implies `pages`.
  bool pages = true;    ///< Returns the pages, not only which hashes are found.
};

/// Where a page is.
struct PageInfo {
  std::string handle;
  std::uint32_t slot = 0;        ///< In the layout of page_layout.h.
  std::uint32_t generation = 0;  ///< As `slot`.
  std::uint64_t length = 0;      ///< Bytes.
  std::uint32_t crc32c = 0;      ///< Of a committed page.
  bool durable = false;          ///< The disk has it, synced: it is found after a restart.
  /// Of `reserve` and `commit`: another page with this key was committed before, and this is it.
  bool existed = false;
};

/// What a query finds.
struct FoundPages {
  std::vector<bool> hits{};       ///< By hash.
  std::vector<PageInfo> pages{};  ///< Of the hits, by hash, then layer.
};

inline constexpr std::array<double, 5> kEvictionSeconds{1, 10, 60, 600, 7200};
/// For how many seconds pages that were evicted had not been used.
using EvictionAges = Histogram<kEvictionSeconds>;

/// Figures of one tenant's pages, or of all: those of the message, bytes of whole slots, and more
/// for metrics.
struct PageStats : ServerStats::PageCache {
  std::uint64_t quarantined = 0;  ///< Pages found changed, and places without generations left.
  EvictionAges evicted_for_room, evicted_for_quota;  ///< Their pages together: `pages_evicted`.
  // Of tiers, where there are: pages written to the disk; those that were not, since the disk
  // refused or they had been evicted before; those that lookups brought back from disk or servers;
  // those that were deleted, and that a disk or server may still have.
  std::uint64_t written = 0, unwritten = 0, brought = 0, unremoved = 0;

  PageStats& operator+=(const PageStats& other) noexcept;
};

class TenantPages;

/// A committed page whose bytes stay where they are for as long as this lives.
class PinnedPage {
 public:
  PinnedPage(PinnedPage&& other) noexcept;
  ~PinnedPage();

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::uint32_t slot() const noexcept { return page_->slot; }
  [[nodiscard]] std::uint32_t generation() const noexcept { return page_->generation; }
  [[nodiscard]] std::uint32_t crc() const noexcept { return page_->crc; }

 private:
  friend class TenantPages;
  PinnedPage(TenantPages& owner, PageSlot& page, std::span<const std::byte> bytes) noexcept
      : owner_(&owner), page_(&page), bytes_(bytes) {}

  TenantPages* owner_;
  PageSlot* page_;
  std::span<const std::byte> bytes_;
};

enum class Verify : bool { kNo, kYes };

/// Pages that were deleted, and the bytes of their slots.
struct RemovedPages {
  std::uint64_t pages = 0, bytes = 0;
};

/// The file with a tenant's pages, to be mapped by others for reading.
struct ArenaFile {
  int fd = -1;  ///< The store's own: valid as long as the store, to be duplicated or sent.
  std::uint64_t bytes = 0;
  std::uint64_t num_units = 0;
};

/// Pages of keys and values that engines leave with the server: reserved, written, committed, from
/// then on immutable, found by hash, and evicted under pressure, the longest unused first. Each
/// tenant has an arena, hashes and handles of its own. Thread-safe.
///
/// Handles are those of handle.h. A handle that is unknown, foreign or forged is NOT_FOUND; the
/// tenant's own whose page has gone is NOT_FOUND with reason PAGE_GONE, a miss; one of an earlier
/// start is ABORTED (SERVER_EPOCH). A call that throws `ServiceError` has changed nothing. What a
/// lease does to pages is in `TenantPages`, which it has as `pages`.
class PageStore {
 public:
  /// Throws `kInvalidArgument` for options that do not go together.
  explicit PageStore(PageStoreOptions options);
  /// No `PinnedPage` may be left.
  ~PageStore();
  PageStore(const PageStore&) = delete;  // pages hold its address
  PageStore& operator=(const PageStore&) = delete;

  [[nodiscard]] const PageStoreOptions& options() const noexcept { return options_; }
  /// Part of every handle.
  [[nodiscard]] std::uint32_t epoch() const noexcept { return codec_.epoch(); }

  /// Returns whether the tenant has opened a lease before: only the first takes long, where it has
  /// a folder to be read.
  [[nodiscard]] bool has(const Tenant& tenant) const { return find_pages(tenant) != nullptr; }
  /// Opens a lease: the right to reserve and pin pages. Makes the tenant's arena with its first.
  /// `strand` is kept for those who queue calls of this lease.
  /// Throws FAILED_PRECONDITION without a page cache, INVALID_ARGUMENT for `page_bytes` outside 1
  /// to `extent_bytes` and a model's name over 128 bytes, RESOURCE_EXHAUSTED.
  [[nodiscard]] std::shared_ptr<PageLease> open(Tenant& tenant, const PageLeaseConfig& config,
                                                std::unique_ptr<Strand> strand = nullptr);
  /// Returns the tenant's own lease and renews it. Throws as `HandleTable::find`.
  [[nodiscard]] std::shared_ptr<PageLease> find(const Tenant& tenant,
                                                const std::string& name) const;
  /// Gives back what the lease has reserved, and its pins. Committed pages stay.
  void close(const Tenant& tenant, const std::string& name);

  /// Deletes the committed pages of a tenant that are not pinned and have not been used since the
  /// call, and all from the disk but those that stay. Copies on servers elsewhere stay until their
  /// time is over. Other calls of the tenant go on meanwhile.
  RemovedPages remove_unpinned(const Tenant& tenant);
  /// Returns the committed page of a tenant. `kYes` compares the checksum first: a page that fails
  /// is quarantined, and DATA_LOSS (CHECKSUM_FAILED) thrown. Counts as a use.
  [[nodiscard]] PinnedPage read(const Tenant& tenant, std::string_view handle,
                                Verify verify = Verify::kYes);
  /// Returns where a tenant's arena is. Throws FAILED_PRECONDITION when it has none yet.
  [[nodiscard]] ArenaFile arena(const Tenant& tenant) const;

  /// Returns when the tiers have what they are to have, or `end` has come, and `when_settled` calls
  /// nothing any more. A call to a tier that has begun may last longer. Disks have the pages before
  /// servers do; those that there is no time for are counted as unwritten. No other call may be
  /// made but `stats`.
  void finish(PageTier::Deadline end);
  /// Ends leases and reservations that have run out, says that the server lives, takes memory ahead
  /// of its use and checks some pages. Called every second or so.
  void sweep();
  [[nodiscard]] PageStats stats() const;
  [[nodiscard]] PageStats stats(const Tenant& tenant) const;
  [[nodiscard]] std::size_t num_leases() const { return leases_.size(); }
  /// Counted by the code that moves pages to clients and from them.
  [[nodiscard]] TransferCounts& transfers() noexcept { return transfers_; }
  [[nodiscard]] const TransferCounts& transfers() const noexcept { return transfers_; }

 private:
  [[nodiscard]] TenantPages& pages_of(Tenant& tenant);
  [[nodiscard]] TenantPages* find_pages(const Tenant& tenant) const;
  /// Those of all tenants, which stay as long as this: to be used without the mutex, so that no
  /// tenant waits for another's.
  [[nodiscard]] std::vector<TenantPages*> all_pages() const;
  void renew(PageLease& lease) const noexcept;

  const PageStoreOptions options_;
  TransferCounts transfers_{options_.now};
  HandleCodec codec_;
  PageLeaseTable leases_;
  /// Held while a tenant's pages are made, which reads its folder: other tenants' calls go on.
  std::mutex making_;
  std::int64_t bytes_ = 0;                             ///< Of arenas. Guarded by `making_`.
  mutable std::mutex mutex_;                           ///< Guards what follows.
  std::vector<std::unique_ptr<TenantPages>> tenants_;  ///< By the tenant's index; null: none yet.
};

}  // namespace kvtier::services
