#pragma once

#include "kvtier/config.h"

#include "hashing/planes.h"
#include "hashing/sketch.h"
#include "runtime/paging/page_pool.h"
#include "transfer/device/device.h"
#include "transfer/kv/frame_factors.h"
#include "transfer/kv/frame_pool.h"
#include "transfer/kv/row_checks.h"
#include "transfer/kv/rows.h"
#include "transfer/kv/sequence.h"
#include "transfer/row_cache/row_cache.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace kvtier::runtime {

/// Pages or slabs of `b` tokens that hold `a`.
[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept {
  return (a + b - 1) / b;
}

/// One kind of sketch that every session of the engine carries: its planes, layout and slabs.
struct SketchStore {
  SketchConfig config;
  hashing::Planes planes;
  hashing::SketchGeometry geometry;
  std::unique_ptr<PagePool> slabs;
};

/// Memory of cached rows: a frame per layer and session.
struct RowCachePool {
  transfer::FramePool frames;
  transfer::RowCacheShape shape;
  transfer::Buffer totals{};  ///< One `RowCacheTotals`, on the device.
  transfer::Buffer place_memory{};
  /// Where a step says that cached rows are; none where they are copied to staging: on the CPU,
  /// with `verify_rows`, which compares them there, and where that is faster.
  transfer::RowCachePlaces places{};
  transfer::StepFlags* flags = nullptr;  ///< Counts the rows that are forgotten.
};

/// What sequences are made of: pages, sketch slabs, cached rows, and memory on the device. Guarded
/// by the engine's mutex.
struct Pools {
  transfer::Device& device;
  transfer::KvGeometry kv;
  int layers = 1;
  bool pages_on_device = false;
  std::unique_ptr<PagePool> pages{};
  transfer::FrameChecks frame_checks{};  ///< Of `pages`; none without checks of rows.
  transfer::Buffer frame_check_memory{};
  transfer::FrameFactors frame_factors{};  ///< Of `pages`; none where they are read in the pages.
  transfer::Buffer frame_factor_memory{};
  std::vector<SketchStore> sketches{};
  std::unique_ptr<RowCachePool> row_cache{};  ///< Or none.
  std::size_t session_bytes = 0;              ///< On the device, of all sessions.

  struct Retired {
    transfer::Event last_use;
    transfer::Buffer memory;
  };
  std::vector<Retired> retired{};

  /// Returns the index of a sketch that the estimator of `retrieval` can read; throws
  /// `kFailedPrecondition` naming what is there.
  [[nodiscard]] std::size_t fitting_sketch(const RetrievalConfig& retrieval) const;
  /// Keeps a session's memory until the work that uses it is done.
  void retire(transfer::Event last_use, transfer::Buffer memory) {
    retired.push_back({std::move(last_use), std::move(memory)});
  }
  /// Frees retired memory whose work is done.
  void collect_retired() {
    std::erase_if(retired, [](const Retired& one) { return one.last_use.done(); });
  }
};

}  // namespace kvtier::runtime
