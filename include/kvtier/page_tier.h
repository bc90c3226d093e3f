#pragma once

#include "kvtier/export.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace kvtier {

/// Names the contents of a page: a digest, so that two pages with one key are one page.
using PageKey = std::array<std::uint8_t, 32>;

enum class TierStatus : std::uint8_t {
  kOk,
  kMiss,         ///< Not there: never stored, evicted, expired, flushed.
  kCorrupt,      ///< There, but not what was stored: quarantined, never to be found again.
  kFull,         ///< Of a put: no room, and the tier makes none.
  kUnavailable,  ///< The tier is down, slow or refuses: nothing is known of the page.
};

/// Returns the name, such as "miss".
[[nodiscard]] KVTIER_EXPORT std::string_view tier_status_name(TierStatus status) noexcept;

struct TierPut {
  PageKey key{};
  std::span<const std::byte> bytes;
  TierStatus status = TierStatus::kUnavailable;
};

struct TierGet {
  PageKey key{};
  std::span<std::byte> bytes;  ///< Where the page goes; its size is the page's.
  TierStatus status = TierStatus::kUnavailable;
  /// With kOk, where the tier has it: the CRC-32C of what it wrote to `bytes`, as it wrote it. Who
  /// asks compares it with its own, and need not read the page for that.
  std::optional<std::uint32_t> crc{};
};

/// How long something took: `counts[i]` of them at most `bound(i)` and longer than the bound
/// before; the last, longer than all bounds.
struct LatencyHistogram {
  static constexpr std::size_t kBounds = 18;
  std::array<std::uint64_t, kBounds + 1> counts{};
  std::uint64_t nanoseconds = 0;  ///< All together.

  /// 50 us, and twice as long each time, up to 6.6 s.
  [[nodiscard]] static constexpr std::chrono::nanoseconds bound(std::size_t i) noexcept {
    return std::chrono::nanoseconds(std::int64_t{50'000} << i);
  }
  KVTIER_EXPORT void add(std::chrono::nanoseconds time) noexcept;
  KVTIER_EXPORT LatencyHistogram& operator+=(const LatencyHistogram& other) noexcept;
  [[nodiscard]] KVTIER_EXPORT std::uint64_t total() const noexcept;
};

/// What an engine has asked of a tier, in pages, and what it was answered, and what the tier says
/// of itself. Every page of a batch that did not throw is counted once, so that at rest
///
///     gets     = hits + misses + corrupt + get_timeouts + get_failures
///     puts     = stored + refused + put_timeouts + put_failures
struct TierStats {
  // Of `Stats::tiers` alone.
  std::string kind{};               ///< As `PageTier::kind`.
  std::uint64_t gets = 0;           ///< Pages asked for.
  std::uint64_t hits = 0;           ///< kOk: whole and verified.
  std::uint64_t misses = 0;         ///< kMiss.
  std::uint64_t corrupt = 0;        ///< kCorrupt: a checksum, a seal, a length or a key was wrong.
  std::uint64_t get_timeouts = 0;   ///< kUnavailable because the deadline passed.
  std::uint64_t get_failures = 0;   ///< kUnavailable for another reason.
  std::uint64_t puts = 0;           ///< Pages offered.
  std::uint64_t stored = 0;         ///< kOk.
  std::uint64_t refused = 0;        ///< kFull.
  std::uint64_t put_timeouts = 0;   ///< kUnavailable because the deadline passed.
  std::uint64_t put_failures = 0;   ///< kUnavailable for another reason.
  std::uint64_t bytes_read = 0;     ///< Payload of the hits.
  std::uint64_t bytes_written = 0;  ///< Payload of what was stored.
  LatencyHistogram get_time{};      ///< Of calls.
  LatencyHistogram put_time{};
  // What the tier says of itself (`PageTier::stats`), of all its users.
  std::uint64_t removed = 0;          ///< Pages that `remove` took out.
  std::uint64_t remove_failures = 0;  ///< Pages that it did not, or not for good.
  std::uint64_t evicted = 0;          ///< Pages that the tier itself let go, to make room.
  std::uint64_t pages = 0;            ///< Held now; 0 where only a server knows.
  std::uint64_t used_bytes = 0;       ///< Their sizes, without headers and padding; 0: not known.
  std::uint64_t capacity_bytes = 0;   ///< Of pages, headers and padding; 0: not known.
  std::uint64_t servers = 0;          ///< Of a remote tier, now.
  std::uint64_t servers_open = 0;     ///< Of those: nothing is sent to them, because they fail.
  std::uint64_t servers_probing = 0;  ///< Of those: asked now whether they work again.
};

/// A store of whole pages below pinned memory.
///
/// Calls block until done or until the deadline, and may come from any thread. A page is found
/// whole and verified, or not at all: the bytes of a get whose status is another than kOk are
/// undefined. A batch is answered page by page in `status`. Faults of the tier are statuses, never
/// exceptions. What throws is misuse, `Error(kInvalidArgument)`, before anything has been done: a
/// page that is empty or larger than `max_page_bytes()`.
///
/// A put of a key that is there is kOk and may write nothing. A get whose size is not that of the
/// stored page is kMiss: the caller's pages have another geometry. Keys removed while the tier is
/// unavailable may be found again. An engine that ends removes its pages, unless a disk cache,
/// which ends with it, is its first tier.
///
/// ```cpp
/// kvtier::Config config;
/// config.memory.tiers.push_back(tier);  // a std::shared_ptr to your own PageTier
/// kvtier::Engine engine(config);
/// ```
class PageTier {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  PageTier() = default;
  virtual ~PageTier() = default;
  PageTier(const PageTier&) = delete;  // a tier owns files, sockets and threads
  PageTier& operator=(const PageTier&) = delete;

  virtual void put(std::span<TierPut> pages, Deadline deadline) = 0;
  virtual void get(std::span<TierGet> pages, Deadline deadline) = 0;
  virtual void remove(std::span<const PageKey> keys, Deadline deadline) = 0;
  [[nodiscard]] virtual std::size_t max_page_bytes() const noexcept = 0;
  /// Returns whether a page whose put was kOk stays until it is removed, but for a fault. A cache
  /// that may forget pages says no.
  [[nodiscard]] virtual bool retains() const noexcept { return false; }
  /// Returns what the tier says of itself: `removed` and what follows it. The rest is not read.
  [[nodiscard]] virtual TierStats stats() const = 0;
  /// One word for labels: "file", "memcached", "redis".
  [[nodiscard]] virtual std::string_view kind() const noexcept { return "custom"; }
  /// One line for logs and people: what the tier is, where, and how its bytes travel.
  [[nodiscard]] virtual std::string describe() const = 0;
};

}  // namespace kvtier
