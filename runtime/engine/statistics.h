#pragma once

#include "kvtier/stats.h"

#include "runtime/sequence/pools.h"
#include "transfer/device/device.h"
#include "transfer/kv/frame_pool.h"
#include "transfer/kv/rows.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier::runtime {

/// Reads a counter that a device may be raising.
[[nodiscard]] inline std::uint64_t load(std::uint64_t& counter) {
  return std::atomic_ref<std::uint64_t>(counter).load(std::memory_order_relaxed);
}

/// What an engine counts: flags in pinned memory that kernels raise, and counters of the host.
/// Guarded by the engine's mutex, the atomics apart.
class Statistics {
 public:
  Statistics(transfer::Device& device, std::size_t num_sketches);

  /// Flags of the launches that score with a sketch.
  [[nodiscard]] transfer::StepFlags* of_sketch(std::size_t sketch) const {
    return flags_.as<transfer::StepFlags>() + sketch;
  }
  /// Flags of the launches that score nothing.
  [[nodiscard]] transfer::StepFlags* unscored() const { return of_sketch(num_sketches_); }
  /// Where a step counts what it has counted before; not read.
  [[nodiscard]] transfer::StepFlags* repeated() const { return of_sketch(num_sketches_ + 1); }

  /// Counts a session as open and returns its flags. Throws `kResourceExhausted`.
  [[nodiscard]] transfer::StepFlags* open_session(transfer::Stream& stream);
  /// Takes that back, once the work enqueued on `stream` is done.
  void close_session(transfer::StepFlags* flags, transfer::Stream& stream);
  [[nodiscard]] std::size_t max_sessions() const noexcept { return session_flags_.num_frames(); }

  /// Sets what this counts, and what the pools have.
  void add_to(Stats& stats, const Pools& pools) const;

  std::uint64_t cold_steps = 0;  ///< Calls that waited for pages.
  std::uint64_t prefix_tokens_asked = 0, prefix_tokens_attached = 0;
  Stats::StageSeconds seconds;
  std::atomic<std::uint64_t> tokens_appended{0};
  std::uint64_t queries = 0, dense_queries = 0;

 private:
  void add_steps(Stats::Cumulative& sum, const Pools& pools) const;
  void add_row_cache(Stats& stats, const RowCachePool& cache) const;

  std::size_t num_sketches_;
  transfer::Buffer flags_;
  transfer::FramePool session_flags_;  ///< One `StepFlags` per session, pinned.
  std::vector<transfer::StepFlags*> open_;
  std::uint64_t closed_nonfinite_ = 0, closed_corrupt_ = 0;
};

}  // namespace kvtier::runtime
