#pragma once

#include "kvtier/config.h"
#include "kvtier/page_tier.h"
#include "kvtier/stats.h"

#include "transfer/tiers/file_tier.h"

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

namespace kvtier::runtime {

/// One state of the contents of a page. No two pages of a process, nor states of one, have the
/// same.
struct PageVersion {
  std::uint64_t page = 0;
  std::uint64_t generation = 0;
};

/// A page on its way out.
struct PageOut {
  PageVersion version;
  std::span<const std::byte> bytes;
  std::uint32_t crc = 0;  ///< CRC-32C of the bytes, set by `write`.
  bool stored = false;    ///< Set by `write`: the first tier has it, and keeps it.
};

/// A page on its way back.
struct PageIn {
  enum class Outcome : std::uint8_t {
    kRead,         ///< Whole: of the length and with the checksum of the page that was written.
    kRepaired,     ///< Whole, from a copy: the first tier does not have it.
    kLost,         ///< No tier has it.
    kUnavailable,  ///< A tier that may have it did not answer in time.
  };
  PageVersion version;
  std::span<std::byte> bytes;  ///< Undefined unless it was read.
  std::uint32_t crc = 0;       ///< What `write` said.
  Outcome outcome = Outcome::kUnavailable;
};

/// The stores below the page pool. The first keeps pages until they are removed, and what it has
/// accepted is stored; the others get copies, which are read where the first has failed. Calls
/// block until done or until a deadline. Thread-safe.
class PageTiers {
 public:
  using Log = std::function<void(LogLevel, std::string_view)>;

  /// Throws `kInvalidArgument` when the first tier may forget pages, or one takes none of
  /// `page_bytes`.
  PageTiers(std::vector<std::shared_ptr<PageTier>> tiers, std::size_t page_bytes,
            std::chrono::milliseconds deadline, Log log);

  void write(std::span<PageOut> pages);
  void read(std::span<PageIn> pages);
  /// Removes pages from every tier.
  void remove(std::span<const PageVersion> pages);

  /// Adds what each tier was asked and answered, what it says of itself now, and their sums.
  void add_to(Stats& stats) const;
  [[nodiscard]] const std::vector<std::shared_ptr<PageTier>>& all() const noexcept {
    return tiers_;
  }
  /// Names the first tier and what it last answered to a put that failed.
  [[nodiscard]] std::string describe_refusal() const;

 private:
  /// Logs, once, that the first tier has begun to refuse pages, or to take them again.
  void report_refusal(bool refuses);
  class Clock;
  [[nodiscard]] PageKey key_of(const PageVersion& version) const;
  [[nodiscard]] PageTier::Deadline deadline() const {
    return std::chrono::steady_clock::now() + deadline_;
  }
  /// Offers pages to a tier, or asks it for some; counts what it answers to puts.
  void put(std::size_t tier, std::span<TierPut> pages);
  /// Returns whether the deadline had passed when it answered.
  bool get(std::size_t tier, std::span<TierGet> pages);
  /// Returns whether a get brought the page that was written; counts it.
  bool accept(std::size_t tier, const TierGet& got, const PageIn& wanted, bool late);
  void say(LogLevel level, const std::string& message) const {
    if (log_) log_(level, message);
  }

  std::vector<std::shared_ptr<PageTier>> tiers_;
  std::chrono::milliseconds deadline_;
  Log log_;
  std::uint64_t nonce_;            ///< Of this engine: others may share a tier.
  mutable std::mutex mutex_;       // guards what follows, and is not held while a tier is asked
  std::uint64_t lost_ = 0;         ///< Pages that no tier had.
  std::uint64_t unavailable_ = 0;  ///< Pages asked for and not answered in time.
  std::uint64_t wait_nanoseconds_ = 0;
  std::vector<TierStats> uses_;  ///< By tier; what it says of itself left out.
  TierStatus last_refusal_ = TierStatus::kOk;
  bool refusing_ = false;  ///< The log has said so.
};

/// Pages that the first tier has room for, by what it says of itself where it is no disk cache; as
/// many as one likes, when it says nothing. None without tiers.
[[nodiscard]] tiers::PageRoom tier_room(const MemoryConfig& config, std::size_t page_bytes);

/// Returns the tiers that the configuration names, none when it names none. Throws what the file
/// tier throws, and `kInvalidArgument`.
[[nodiscard]] std::unique_ptr<PageTiers> make_page_tiers(const MemoryConfig& config,
                                                         std::size_t page_bytes,
                                                         const PageTiers::Log& log);

}  // namespace kvtier::runtime
