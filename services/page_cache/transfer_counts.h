#pragma once

#include "services/page_cache/histogram.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

namespace kvtier::services {

using TimePoint = std::chrono::steady_clock::time_point;

/// The way that pages take: messages of gRPC, frames on a Unix socket or TCP, or memory that is
/// shared with the client.
enum class TransferPlane : std::uint8_t { kGrpc, kUnix, kTcp, kShared };
/// What the client does.
enum class TransferDirection : std::uint8_t { kRead, kWrite };

inline constexpr std::array<double, 5> kTransferSeconds{1e-4, 1e-3, 1e-2, 1e-1, 1};
inline constexpr std::array<double, 3> kTransferPages{1, 16, 256};

/// Transfers of one plane in one direction.
struct TransferSums {
  Histogram<kTransferSeconds> by_seconds;
  Histogram<kTransferPages> by_pages;
  std::uint64_t pages = 0;  ///< That were asked for or offered.
  std::uint64_t bytes = 0;  ///< Of those that moved.
};

/// Counts transfers of pages. Thread-safe.
class TransferCounts {
 public:
  explicit TransferCounts(std::function<TimePoint()> now) : now_(std::move(now)) {}

  [[nodiscard]] TransferSums of(TransferPlane plane, TransferDirection direction) const {
    const std::lock_guard lock(mutex_);
    return sums_[index_of(plane, direction)];
  }

  /// Pages that clients asked for by messages because they changed as they were read where they
  /// are.
  void reread(std::uint64_t pages) noexcept { reread_ += pages; }
  [[nodiscard]] std::uint64_t num_reread() const noexcept { return reread_; }

 private:
  friend class Transfer;
  [[nodiscard]] static std::size_t index_of(TransferPlane plane, TransferDirection direction) {
    return 2 * static_cast<std::size_t>(plane) + static_cast<std::size_t>(direction);
  }

  const std::function<TimePoint()> now_;
  std::atomic<std::uint64_t> reread_{0};
  mutable std::mutex mutex_;  ///< Guards `sums_`.
  std::array<TransferSums, 8> sums_;
};

/// A request that moves pages, from its arrival until the last of it is handed on: counted when
/// this is gone, whether it came to its end or not. Used by one thread at a time.
class Transfer {
 public:
  Transfer(TransferCounts& counts, TransferPlane plane, TransferDirection direction)
      : counts_(counts),
        sums_(counts.sums_[TransferCounts::index_of(plane, direction)]),
        began_(counts.now_()) {}
  ~Transfer() {
    const std::chrono::duration<double> time = counts_.now_() - began_;
    const std::lock_guard lock(counts_.mutex_);
    sums_.by_seconds.add(time.count());
    sums_.by_pages.add(static_cast<double>(pages_));
    sums_.pages += pages_;
    sums_.bytes += bytes_;
  }
  Transfer(const Transfer&) = delete;  // counts once
  Transfer& operator=(const Transfer&) = delete;

  /// One more page of the request.
  void page() noexcept { ++pages_; }
  void moved(std::uint64_t bytes) noexcept { bytes_ += bytes; }

 private:
  TransferCounts& counts_;
  TransferSums& sums_;
  const TimePoint began_;
  std::uint64_t pages_ = 0, bytes_ = 0;
};

}  // namespace kvtier::services
