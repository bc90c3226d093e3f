#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace kvtier::services {

using TimePoint = std::chrono::steady_clock::time_point;

/// The way that pages take: messages of gRPC, frames on a Unix socket or TCP, or memory that is
/// shared with the client.
enum class TransferPlane : std::uint8_t { kGrpc, kUnix, kTcp, kShared };
/// What the client does.
enum class TransferDirection : std::uint8_t { kRead, kWrite };

/// Transfers of one plane in one direction.
struct TransferSums {
  static constexpr std::array<double, 5> kSecondBounds{1e-4, 1e-3, 1e-2, 1e-1, 1};
  static constexpr std::array<double, 3> kPageBounds{1, 16, 256};

  /// Transfers up to each bound and above the one before; the last are above all.
  std::array<std::uint64_t, kSecondBounds.size() + 1> by_seconds{};
  std::array<std::uint64_t, kPageBounds.size() + 1> by_pages{};
  double seconds = 0;
  std::uint64_t pages = 0;  ///< That were asked for or offered.
  std::uint64_t bytes = 0;  ///< Of those that moved.
};

/// Counts transfers of pages. Thread-safe, without a lock.
class TransferCounts {
 public:
  explicit TransferCounts(std::function<TimePoint()> now) : now_(std::move(now)) {}

  [[nodiscard]] TransferSums of(TransferPlane plane, TransferDirection direction) const noexcept;

  /// Pages that clients asked for by messages because they changed as they were read where they
  /// are.
  void reread(std::uint64_t pages) noexcept { reread_ += pages; }
  [[nodiscard]] std::uint64_t num_reread() const noexcept { return reread_; }

 private:
  friend class Transfer;
  struct Sums {
    std::array<std::atomic<std::uint64_t>, TransferSums::kSecondBounds.size() + 1> by_seconds{};
    std::array<std::atomic<std::uint64_t>, TransferSums::kPageBounds.size() + 1> by_pages{};
    std::atomic<std::uint64_t> nanoseconds{0}, pages{0}, bytes{0};
  };
  [[nodiscard]] static std::size_t index_of(TransferPlane plane, TransferDirection direction) {
    return 2 * static_cast<std::size_t>(plane) + static_cast<std::size_t>(direction);
  }

  const std::function<TimePoint()> now_;
  std::array<Sums, 8> sums_;
  std::atomic<std::uint64_t> reread_{0};
};

/// A request that moves pages, from its arrival until the last of it is handed on: counted when
/// this is gone, whether it came to its end or not. Used by one thread at a time.
class Transfer {
 public:
  Transfer(TransferCounts& counts, TransferPlane plane, TransferDirection direction)
      : counts_(counts),
        sums_(counts.sums_[TransferCounts::index_of(plane, direction)]),
        began_(counts.now_()) {}
  ~Transfer();
  Transfer(const Transfer&) = delete;  // counts once
  Transfer& operator=(const Transfer&) = delete;

  /// One more page of the request.
  void page() noexcept { ++pages_; }
  void moved(std::uint64_t bytes) noexcept { bytes_ += bytes; }

 private:
  TransferCounts& counts_;
  TransferCounts::Sums& sums_;
  const TimePoint began_;
  std::uint64_t pages_ = 0, bytes_ = 0;
};

}  // namespace kvtier::services
