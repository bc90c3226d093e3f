#pragma once

#include "kvtier/config.h"
#include "kvtier/stats.h"

#include "runtime/engine/memory_plan.h"
#include "runtime/engine/statistics.h"
#include "runtime/engine/submission.h"
#include "runtime/engine/workspace.h"
#include "runtime/paging/page_pool.h"
#include "runtime/paging/page_quota.h"
#include "runtime/paging/page_tiers.h"
#include "runtime/sequence/pools.h"
#include "runtime/sequence/prefix_key.h"
#include "runtime/sequence/prefix_store.h"
#include "transfer/device/device.h"
#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace kvtier::runtime {

/// Everything that sessions share, by what it is for. Steps of different sessions run one after
/// another, because there is one workspace: `SubmissionScope` orders them on the device by an event
/// and on the host by a mutex. A call that waits for pages in a tier unlocks the engine meanwhile.
class EngineState : private PagePool::Owner {
 public:
  explicit EngineState(const Config& config_in);
  ~EngineState() override;
  EngineState(const EngineState&) = delete;  // sessions point to it
  EngineState& operator=(const EngineState&) = delete;

  /// Enqueues the copy of a page. Within a submission scope: on CUDA pages in host memory go by way
  /// of `Workspace::packed`, because a copy from host to host would hold the caller up.
  void copy_page(transfer::Stream& stream, const transfer::CopyRun& page) const;
  void log(LogLevel level, const std::string& message) const;
  [[nodiscard]] Stats stats();

  const Config config;
  const transfer::KvGeometry kv;
  const std::unique_ptr<transfer::Device> device;
  const WorkspacePlan plan;
  Workspace workspace;
  Submission submission;
  Statistics statistics;
  std::unique_ptr<PageTiers> tiers;  ///< None: every page is resident.
  Pools pools;
  PageQuotas quotas;
  PrefixStore prefixes;
  const PrefixKey prefix_key;  ///< What keys of stored prefixes begin with.

 private:
  void wait_for_work(transfer::Stream& stream) override { submission.wait(stream); }
  void run_unlocked(const std::function<void()>& work) override {
    submission.scope().run_unlocked(work);
  }
  void restored(const std::byte* frame) override;
  void make_pages();
  void make_frame_checks();
  void make_frame_factors(const DevicePools& sizes);
  /// Brings what the device keeps of a page, which has come to its frame, up to date. Enqueued.
  void load_frame(transfer::Stream& stream, const std::byte* frame) const;
  [[nodiscard]] transfer::PinOptions page_pool_options() const;
  void make_sketches(const DevicePools& sizes);
  void make_row_cache(const DevicePools& sizes);

  std::size_t fixed_device_bytes_;
};

}  // namespace kvtier::runtime
