#pragma once

#include "kvtier/config.h"
#include "kvtier/stats.h"

#include "attention/flash_decode.h"
#include "hashing/append.h"
#include "hashing/planes.h"
#include "hashing/sketch.h"
#include "runtime/engine/host_staging.h"
#include "runtime/engine/memory_plan.h"
#include "runtime/paging/page_pool.h"
#include "runtime/paging/page_quota.h"
#include "runtime/paging/page_tiers.h"
#include "scoring/selector.h"
#include "transfer/device/device.h"
#include "transfer/kv/frame_pool.h"
#include "transfer/kv/row_checks.h"
#include "transfer/kv/rows.h"
#include "transfer/kv/sequence.h"
#include "transfer/row_cache/row_cache.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvtier::runtime {

class PrefixStore;
class PagePrefetch;

/// Reads a counter that a device may be raising.
[[nodiscard]] inline std::uint64_t load(std::uint64_t& counter) {
  return std::atomic_ref<std::uint64_t>(counter).load(std::memory_order_relaxed);
}

/// One kind of sketch that every session of the engine carries: its planes, layout and blocks.
struct SketchStore {
  SketchConfig config;
  hashing::Planes planes;
  hashing::SketchGeometry geometry;
  std::unique_ptr<PagePool> blocks;
};

/// Everything that sessions share: the device, the pools, the planes, and the workspace of one
/// step.
///
/// There is one workspace, so steps of different sessions run one after another: `SubmissionScope`
/// orders them on the device by an event, on the host by the mutex. A step under graph capture
/// takes no part in that order: its replays must be ordered with other calls of the engine by the
/// caller. A call that waits for pages in a tier unlocks the engine meanwhile.
class EngineState : private PagePool::Owner {
 public:
  explicit EngineState(const Config& config_in);
  ~EngineState() override;
  EngineState(const EngineState&) = delete;  // sessions point to it
  EngineState& operator=(const EngineState&) = delete;

  /// The scope of one call that enqueues. Locks the engine's mutex and makes the stream wait for
  /// the previous use of the workspace; its end records the new last use. `stream()` is the
  /// caller's stream, or the engine's own when none was given; `finish()` then waits for the
  /// outputs.
  class SubmissionScope {
   public:
    SubmissionScope(EngineState& engine, StreamRef stream);
    SubmissionScope(const SubmissionScope&) = delete;  // one owner of the mutex
    SubmissionScope& operator=(const SubmissionScope&) = delete;
    ~SubmissionScope();

    [[nodiscard]] transfer::Stream& stream() noexcept { return *stream_; }
    /// True when the call returns with its outputs written.
    [[nodiscard]] bool synchronous() const noexcept { return synchronous_; }
    [[nodiscard]] bool capturing() const noexcept { return capturing_; }
    /// Waits when the call is synchronous. A fault of the device fails the engine.
    void finish();
    /// Switches to the engine's own stream, ordered after the call's work; the caller's stream does
    /// not wait for what follows. Not during a capture.
    void continue_on_engine_stream();

    /// Waits for all that was enqueued, unlocks the engine, runs `work`, and locks it again. `work`
    /// must not touch what the mutex guards. Throws what `work` throws, or what has failed the
    /// engine meanwhile.
    void run_unlocked(const std::function<void()>& work);
    /// Returns true, and clears the flag, if another call used the workspace while the engine was
    /// unlocked: its contents are then lost.
    [[nodiscard]] bool workspace_lost() noexcept { return std::exchange(workspace_lost_, false); }

   private:
    /// Makes the stream wait for the workspace's last use.
    void take_workspace();
    void mark_last_use();

    EngineState& engine_;
    std::unique_lock<std::mutex> lock_;
    transfer::Stream* stream_ = nullptr;
    bool synchronous_ = false;
    bool capturing_ = false;
    bool workspace_lost_ = false;
  };

  /// Throws what failed the engine, if anything did.
  void check_alive() const;
  /// Makes the host wait for everything enqueued on `stream`, which within a submission is ordered
  /// after all earlier ones. A fault of the device fails the engine.
  void wait(transfer::Stream& stream);
  /// Keeps a session's memory until the work that uses it is done. Called with the mutex held.
  void retire(transfer::Event last_use, transfer::Buffer memory);
  /// Frees retired memory whose work is done. Called with the mutex held.
  void collect_retired();

  /// Where a step says that cached rows are; none where they are copied to staging: on the CPU,
  /// with `verify_rows`, which compares them there, and where that is faster.
  [[nodiscard]] transfer::RowCachePlaces row_cache_places() const;

  /// Orders `stream` after all earlier submissions.
  void wait_for_submissions(transfer::Stream& stream) const { stream.wait(workspace_last_use_); }
  /// Enqueues the copy of a page. Within a submission scope: on CUDA pages in host memory go by way
  /// of `packed`, because a copy from host to host would hold the caller up.
  void copy_page(transfer::Stream& stream, const transfer::CopyRun& page) const;

  /// Tokens of a layer for which there are pages, those in tiers included.
  [[nodiscard]] std::int64_t tokens_of_pages() const;
  void log(LogLevel level, const std::string& message) const;
  /// Returns the index of a sketch that the estimator of `retrieval` can read; throws
  /// `kFailedPrecondition` naming what is there.
  [[nodiscard]] std::size_t fitting_sketch(const RetrievalConfig& retrieval) const;
  [[nodiscard]] Stats stats() const;

  Config config;
  transfer::KvGeometry kv;
  std::unique_ptr<transfer::Device> device;
  std::unique_ptr<transfer::Stream> main;  ///< For calls without a stream.
  std::vector<SketchStore> sketches;
  std::unique_ptr<PageTiers> tiers;  ///< None: every page is in the pool.
  std::unique_ptr<PagePool> pages;
  transfer::FrameChecks frame_checks;  ///< Of `pages`; none without checks of rows.
  std::unique_ptr<transfer::FramePool>
      row_cache;  ///< Cached rows, a frame per layer and session; or none.
  transfer::RowCacheShape row_cache_shape;
  transfer::Buffer row_cache_totals;                   ///< One `RowCacheTotals`, on the device.
  std::unique_ptr<transfer::FramePool> session_flags;  ///< One `StepFlags` per session, pinned.

  std::unique_ptr<PageQuotas> quotas;
  std::unique_ptr<PrefixStore> prefixes;
  std::unique_ptr<PagePrefetch> page_prefetch;  ///< Or none.
  std::array<std::uint8_t, 32> prefix_key{};    ///< What keys of stored prefixes begin with.

  // The workspace of a step, sized at construction, on the device.
  int batch_rows = 1;              ///< Query rows per launch.
  std::int64_t append_tokens = 0;  ///< Tokens packed at a time.
  std::int64_t staged_rows = 0;
  std::unique_ptr<scoring::Selector> selector;
  std::unique_ptr<attention::FlashDecode> flash;
  transfer::Buffer packed;   ///< Of `append_tokens` tokens, see `packed_rows`.
  transfer::Buffer queries;  ///< `[batch_rows, query_heads, head_dim]` fp32
  /// Pinned `StepFlags`: one per sketch, one for unscored rows, and the last, which is not read,
  /// for what a step does again.
  transfer::Buffer flags;
  std::unique_ptr<HostStaging> staging;
  transfer::Buffer read_back;  ///< Pinned; grown by calls that read selections back.

  // Counters and state below are guarded by `mutex`, the atomics apart.
  mutable std::mutex mutex;
  std::size_t num_sessions = 0;
  std::size_t session_device_bytes = 0;
  std::uint64_t closed_nonfinite = 0, closed_corrupt = 0;
  std::uint64_t cold_steps = 0;
  std::uint64_t prefix_tokens_asked = 0, prefix_tokens_attached = 0;
  std::vector<transfer::StepFlags*> live_flags;
  Stats::StageSeconds seconds;
  std::atomic<std::uint64_t> tokens_appended{0};
  std::atomic<std::uint64_t> query_tokens{0};

  /// Tokens appended at a time that need no packing: their squares take the place of packed rows.
  [[nodiscard]] std::int64_t given_tokens() const {
    return append_tokens * kv.row_bytes() / static_cast<std::int64_t>(sizeof(transfer::RowSquares));
  }
  [[nodiscard]] hashing::PackedRows given_rows() const {
    return {nullptr, packed.as<transfer::RowSquares>()};
  }
  [[nodiscard]] hashing::PackedRows packed_rows() const {
    const std::int64_t rows = append_tokens * kv.kv_heads;
    return {packed.data(),
            reinterpret_cast<transfer::RowSquares*>(packed.data() + rows * kv.row_bytes())};
  }
  /// Where a step counts what it has counted before.
  [[nodiscard]] transfer::StepFlags* repeat_flags() const {
    return step_flags(sketches.size() + 1);
  }
  [[nodiscard]] transfer::StepFlags* step_flags(std::size_t index) const {
    return flags.as<transfer::StepFlags>() + index;
  }

 private:
  void wait_for_work(transfer::Stream& stream) override { wait(stream); }
  void run_unlocked(const std::function<void()>& work) override { scope_->run_unlocked(work); }
  void restored(const std::byte* frame) override;
  void make_workspace(const WorkspacePlan& plan);
  void make_pages();
  void make_frame_checks();
  void add_tier_stats(Stats& stats) const;
  [[nodiscard]] transfer::PinOptions page_pool_options() const;
  void make_sketches(const DevicePools& pools);
  void make_row_cache(const DevicePools& pools, const WorkspacePlan& workspace);
  void add_row_cache_stats(Stats& stats) const;
  transfer::Stream* adopted(StreamRef stream);

  struct Retired {
    transfer::Event last_use;
    transfer::Buffer memory;
  };
  std::unordered_map<void*, std::unique_ptr<transfer::Stream>> adopted_;
  std::vector<Retired> retired_;
  SubmissionScope* scope_ = nullptr;   ///< The one in progress.
  std::uint64_t num_submissions_ = 0;  ///< One that locks again counts anew.
  transfer::Event workspace_last_use_;
  transfer::Stream* workspace_last_stream_ = nullptr;
  std::string failure_;
  transfer::Buffer frame_check_memory_;
  transfer::Buffer row_cache_places_;
  std::size_t fixed_device_bytes_ = 0;
};

}  // namespace kvtier::runtime
