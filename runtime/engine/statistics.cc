#include "runtime/engine/statistics.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <new>
#include <string>

namespace kvtier::runtime {
namespace {

constexpr std::size_t kMaxSessions = 16384;
constexpr std::size_t kFlagBytes = 128;  // one StepFlags, alone on its cache lines

static_assert(sizeof(transfer::StepFlags) <= kFlagBytes);

}  // namespace

Statistics::Statistics(transfer::Device& device, std::size_t num_sketches)
    : num_sketches_(num_sketches),
      flags_(device.allocate(transfer::Space::kPinnedHost,
                             sizeof(transfer::StepFlags) * (num_sketches + 2))),
      session_flags_(device, transfer::Space::kPinnedHost, kFlagBytes, kFlagBytes * kMaxSessions) {
  for (std::size_t i = 0; i < num_sketches + 2; ++i) new (of_sketch(i)) transfer::StepFlags{};
}

transfer::StepFlags* Statistics::open_session(transfer::Stream& stream) {
  open_.reserve(open_.size() + 1);
  std::byte* frame = nullptr;
  // The host writes to it now, so that work of a closed session must be done with it.
  if (!session_flags_.take_all({&frame, 1})) {
    if (!session_flags_.take_all({&frame, 1}, &stream)) {
      const std::string most = std::to_string(max_sessions());
      throw_error(ErrorCode::kResourceExhausted, "sessions: expected at most ", most,
                  " open, found ", most);
    }
    stream.synchronize();
  }
  open_.push_back(new (frame) transfer::StepFlags{});
  return open_.back();
}

void Statistics::close_session(transfer::StepFlags* flags, transfer::Stream& stream) {
  closed_nonfinite_ += load(flags->nonfinite_tokens);
  closed_corrupt_ += load(flags->rows_corrupt);
  std::erase(open_, flags);
  std::byte* frame = reinterpret_cast<std::byte*>(flags);
  session_flags_.give_back({&frame, 1}, stream.record());
}

void Statistics::add_steps(Stats::Cumulative& sum, const Pools& pools) const {
  const transfer::KvGeometry& kv = pools.kv;
  const auto stored_row_bytes = static_cast<std::uint64_t>(kv.page_bytes()) /
                                static_cast<std::uint64_t>(kv.kv_heads * kv.page_tokens);
  for (std::size_t i = 0; i <= num_sketches_; ++i) {
    transfer::StepFlags& step = *of_sketch(i);
    const std::uint64_t fetched = load(step.rows_fetched_host);
    const std::uint64_t resident = load(step.rows_resident);
    sum.rows_selected += load(step.rows_selected);
    sum.rows_attended += fetched + resident;
    sum.bytes_host_to_device += (fetched + load(step.rows_prefetched)) * stored_row_bytes;
    sum.bytes_device_resident += resident * static_cast<std::uint64_t>(kv.row_bytes());
    if (i == num_sketches_) continue;
    const auto token_bytes = static_cast<std::uint64_t>(pools.sketches[i].geometry.token_bytes());
    sum.bytes_sketch_read += load(step.tokens_scored) * token_bytes + load(step.sketch_bytes);
  }
  if (!pools.pages_on_device) {
    sum.bytes_device_to_host =
        sum.tokens_appended * static_cast<std::uint64_t>(kv.kv_heads) * stored_row_bytes;
  }
}

void Statistics::add_row_cache(Stats& stats, const RowCachePool& cache) const {
  Stats::Cumulative& sum = stats.cumulative;
  for (std::size_t i = 0; i < num_sketches_; ++i) {
    transfer::StepFlags& step = *of_sketch(i);
    sum.row_cache_hits += load(step.row_cache_hits);
    sum.row_cache_misses += load(step.row_cache_misses);
    sum.row_cache_admissions += load(step.row_cache_admissions);
    sum.row_cache_evictions += load(step.row_cache_evictions);
    sum.rows_prefetched += load(step.rows_prefetched);
    sum.rows_prefetched_useful += load(step.rows_prefetched_useful);
    sum.rows_prefetched_wasted += load(step.rows_prefetched_wasted);
  }
  const transfer::FramePool& frames = cache.frames;
  stats.snapshot.row_cache_rows = cache.shape.num_sets * transfer::kSetWays;
  stats.snapshot.row_cache_bytes = frames.num_frames() * frames.frame_bytes();
  stats.snapshot.row_cache_bytes_used = frames.num_used() * frames.frame_bytes();
}

void Statistics::add_to(Stats& stats, const Pools& pools) const {
  stats.seconds = seconds;
  Stats::Cumulative& sum = stats.cumulative;
  sum.tokens_appended = tokens_appended.load(std::memory_order_relaxed);
  sum.queries = queries;
  sum.dense_queries = dense_queries;
  add_steps(sum, pools);
  sum.nonfinite_tokens = closed_nonfinite_;
  sum.rows_corrupt = closed_corrupt_;
  for (transfer::StepFlags* session : open_) {
    sum.nonfinite_tokens += load(session->nonfinite_tokens);
    sum.rows_corrupt += load(session->rows_corrupt);
  }
  sum.cold_steps = cold_steps;
  sum.prefix_tokens_asked = prefix_tokens_asked;
  sum.prefix_tokens_attached = prefix_tokens_attached;
  const PagePool& pages = *pools.pages;
  sum.pages_evicted = pages.counters().evicted;
  sum.pages_restored = pages.counters().restored;

  Stats::Snapshot& now = stats.snapshot;
  now.sessions = open_.size();
  now.pages = pages.num_frames();
  now.pages_used = pages.num_used();
  now.pages_shared = pages.num_shared();
  now.pages_in_tiers = pages.num_evicted();
  if (!pools.pages_on_device) {
    now.host_page_bytes = now.pages * pages.page_bytes();
    now.host_page_bytes_used = now.pages_used * pages.page_bytes();
  }
  for (const SketchStore& sketch : pools.sketches) {
    now.sketch_bytes_used += sketch.slabs->num_used() * sketch.slabs->page_bytes();
  }
  if (pools.row_cache) add_row_cache(stats, *pools.row_cache);
}

}  // namespace kvtier::runtime
