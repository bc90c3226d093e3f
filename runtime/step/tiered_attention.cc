#include "runtime/step/tiered_attention.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/kv/row_checks.h"

#include <algorithm>
#include <cstring>

namespace kvtier::runtime {
namespace {

/// Copies device memory to vectors on the host, and waits: `add` each, then `read`.
class ReadBack {
 public:
  ReadBack(transfer::Stream& stream, EngineState& engine) : stream_(stream), engine_(engine) {}

  void add(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) wanted_.push_back({to, from, bytes});
  }
  void read() {
    std::size_t bytes = 0;
    for (const transfer::CopyRun& run : wanted_) bytes += run.bytes;
    std::vector<transfer::CopyRun> runs;
    std::byte* const staged = engine_.workspace.read_back(bytes);
    std::byte* at = staged;
    for (const transfer::CopyRun& run : wanted_) {
      runs.push_back({at, run.from, run.bytes});
      at += run.bytes;
    }
    stream_.copy(runs);
    engine_.submission.wait(stream_);
    at = staged;
    for (const transfer::CopyRun& run : wanted_) {
      std::memcpy(run.to, at, run.bytes);
      at += run.bytes;
    }
    wanted_.clear();
  }

 private:
  transfer::Stream& stream_;
  EngineState& engine_;
  std::vector<transfer::CopyRun> wanted_;
};

}  // namespace

void fail_too_many(const EngineState& engine, std::size_t needed) {
  const PagePool& pool = *engine.pools.pages;
  throw_error(ErrorCode::kResourceExhausted, "page pool: expected room for the ", needed,
              " pages that one call reads at once, found ", pool.num_movable(), " of ",
              pool.num_frames(), " frames that can be had (memory.host_bytes)",
              pool.eviction_failure_reason());
}

bool ensure_tokens_resident(transfer::Stream& stream, EngineState& engine, LayerState& layer,
                            std::span<const std::int32_t> tokens) {
  if (layer.pages.addresses_current()) return true;
  std::vector<Page*> pages;
  pages.reserve(tokens.size());
  for (const std::int32_t token : tokens) {
    pages.push_back(&layer.pages.page(token / engine.kv.page_tokens));
  }
  const std::uint64_t before = engine.pools.pages->counters().restored;
  if (!engine.pools.pages->ensure_resident(stream, pages)) return false;
  if (engine.pools.pages->counters().restored != before) ++engine.statistics.cold_steps;
  (void)layer.pages.sync_addresses(stream);
  return true;
}

TieredLaunch::TieredLaunch(transfer::Stream& stream, EngineState& engine,
                           std::span<LayerState* const> layers,
                           const attention::AttendRequest& request)
    : stream_(stream), engine_(engine), layers_(layers), request_(request) {}

bool TieredLaunch::all_resident(transfer::Stream& stream, std::span<LayerState* const> layers) {
  std::int64_t num_evicted = 0;
  for (LayerState* layer : layers) num_evicted += layer->pages.sync_addresses(stream);
  return num_evicted == 0;
}

void TieredLaunch::read_back(const transfer::SelectionView& selection) {
  ReadBack read(stream_, engine_);
  counters_.resize(layers_.size());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    read.add(&counters_[i], layers_[i]->view.counters, sizeof(transfer::SequenceCounters));
  }
  const auto lists = static_cast<std::size_t>(request_.query_batch.count * request_.kv.kv_heads);
  if (selection.ids != nullptr) {
    counts_.resize(lists);
    read.add(counts_.data(), selection.counts, lists * sizeof(std::int32_t));
  }
  read.read();
  if (selection.ids == nullptr) return;
  ids_.resize(lists);
  for (std::size_t i = 0; i < lists; ++i) {
    ids_[i].resize(static_cast<std::size_t>(counts_[i]));
    read.add(ids_[i].data(), selection.ids + static_cast<std::int64_t>(i) * selection.capacity,
             ids_[i].size() * sizeof(std::int32_t));
  }
  read.read();
}

void TieredLaunch::add_needed(int sequence, std::int64_t begin, std::int64_t end) {
  const auto s = static_cast<std::size_t>(sequence);
  begin = std::max<std::int64_t>(begin, request_.kv.sink_capacity);
  if (request_.kv.recent_capacity > 0) end = std::min(end, counters_[s].resident_begin);
  if (begin >= end) return;
  const std::int64_t unit = request_.kv.page_tokens;
  for (std::int64_t page = begin / unit; page <= (end - 1) / unit; ++page) {
    const auto i = static_cast<std::size_t>(page);
    const std::int64_t rows = std::min(end, (page + 1) * unit) - std::max(begin, page * unit);
    Page& read = layers_[s]->pages.page(page);
    PagePool::record_rows_read(read, static_cast<std::uint32_t>(rows));
    if (marked_[s][i]) continue;
    marked_[s][i] = true;
    needed_.push_back(&read);
  }
}

bool TieredLaunch::ensure_resident(const transfer::SelectionView& selection) {
  read_back(selection);
  marked_.clear();
  for (const LayerState* layer : layers_) {
    marked_.emplace_back(static_cast<std::size_t>(layer->pages.size()));
  }
  for (int r = 0; r < request_.query_batch.count; ++r) {
    const transfer::QueryToken& query = request_.query_batch[r];
    const auto s = static_cast<std::size_t>(query.sequence);
    const transfer::AttendedSpans spans =
        transfer::attended_spans(request_.rule, counters_[s].length, query);
    add_needed(query.sequence, 0, spans.sink_end);
    add_needed(query.sequence, spans.tail_begin, spans.visible);
    for (int head = 0; selection.ids != nullptr && head < request_.kv.kv_heads; ++head) {
      for (const std::int32_t id :
           ids_[static_cast<std::size_t>(r * request_.kv.kv_heads + head)]) {
        add_needed(query.sequence, id, id + 1);
      }
    }
  }
  const bool together = engine_.pools.pages->ensure_resident(stream_, needed_);
  (void)all_resident(stream_, layers_);
  return together;
}

bool TieredLaunch::hold(int sequence, std::span<const std::int64_t> tokens) {
  needed_.clear();
  for (auto& marks : marked_) std::fill(marks.begin(), marks.end(), false);
  for (const std::int64_t token : tokens) add_needed(sequence, token, token + 1);
  // Others cannot go on: the workspace has what is attended to.
  if (!engine_.pools.pages->ensure_resident(stream_, needed_, /*keep_lock=*/true)) {
    if (tokens.size() == 1) fail_too_many(engine_, 1);
    return false;
  }
  (void)all_resident(stream_, layers_);
  engine_.submission.wait(stream_);
  if (engine_.kv.row_checks) verify(sequence, tokens);
  return true;
}

void TieredLaunch::verify(int sequence, std::span<const std::int64_t> tokens) const {
  const transfer::KvGeometry& kv = engine_.kv;
  const auto s = static_cast<std::size_t>(sequence);
  std::int64_t changed = 0;
  for (const std::int64_t token : tokens) {
    if (row_is_resident(kv, counters_[s].resident_begin, token)) continue;
    const std::byte* page = layers_[s]->pages.address(token / kv.page_tokens);
    changed += transfer::num_changed_rows(kv, page, token, token + 1);
  }
  transfer::cpu::count(session_flags_[sequence], &transfer::StepFlags::rows_corrupt, changed);
}

std::size_t ensure_static_resident(transfer::Stream& stream, EngineState& engine,
                                   std::span<LayerState* const> layers,
                                   const transfer::SpanRule& rule,
                                   const transfer::QueryBatch& query_batch) {
  if (TieredLaunch::all_resident(stream, layers)) return 0;
  const attention::AttendRequest request{
      .kv = engine.kv, .rule = rule, .sequences = {}, .query_batch = query_batch, .places = {}};
  TieredLaunch launch(stream, engine, layers, request);
  if (launch.ensure_resident({})) return 0;
  // What is selected must not depend on what a tier takes now.
  if (engine.pools.pages->refused()) fail_too_many(engine, launch.needed_.size());
  return launch.needed_.size();
}

std::size_t TieredLaunch::hold_first(std::span<const PageIndex> pages) {
  std::size_t count = std::clamp<std::size_t>(engine_.pools.pages->num_movable(), 1, pages.size());
  while (true) {
    needed_.clear();
    for (const PageIndex& index : pages.first(count)) {
      const LayerState& layer = *layers_[static_cast<std::size_t>(index.sequence)];
      needed_.push_back(&layer.pages.page(index.page));
    }
    // Others cannot go on: the workspace has what is attended to.
    if (engine_.pools.pages->ensure_resident(stream_, needed_, /*keep_lock=*/true)) break;
    if (count == 1) fail_too_many(engine_, 1);
    count /= 2;
  }
  (void)all_resident(stream_, layers_);
  return count;
}

void TieredLaunch::attend_in_windows(const transfer::SelectionView& selection,
                                     const attention::OutputBatch& outputs,
                                     const transfer::Batch<transfer::StepFlags*>& session_flags) {
  std::vector<std::vector<std::uint16_t>> masks(ids_.size());
  std::vector<std::vector<float>> biases(selection.bias != nullptr ? ids_.size() : 0);
  ReadBack read(stream_, engine_);
  for (std::size_t i = 0; i < biases.size(); ++i) {
    const std::int64_t first = static_cast<std::int64_t>(i) * selection.capacity;
    biases[i].resize(ids_[i].size() * static_cast<std::size_t>(selection.bias_heads));
    read.add(biases[i].data(), selection.bias + first * selection.bias_heads,
             biases[i].size() * sizeof(float));
  }
  for (std::size_t i = 0; i < masks.size(); ++i) {
    masks[i].resize(ids_[i].size());
    read.add(masks[i].data(),
             selection.head_mask + static_cast<std::int64_t>(i) * selection.capacity,
             masks[i].size() * sizeof(std::uint16_t));
  }
  if (!masks.empty()) read.read();
  std::vector<PageIndex> pages;
  for (std::size_t s = 0; s < marked_.size(); ++s) {
    for (std::size_t i = 0; i < marked_[s].size(); ++i) {
      if (marked_[s][i]) pages.push_back({static_cast<int>(s), static_cast<std::int64_t>(i)});
    }
  }
  const WindowedLaunch launch{.request = request_,
                              .outputs = outputs,
                              .session_flags = session_flags,
                              .counters = counters_,
                              .ids = ids_,
                              .masks = masks,
                              .biases = biases,
                              .bias_heads = selection.bias_heads,
                              .pages = pages};
  runtime::attend_in_windows(stream_, engine_, launch,
                             [this](std::span<const PageIndex> left) { return hold_first(left); });
}

void TieredLaunch::attend(const transfer::SelectionView& selection, std::int64_t max_selected,
                          const attention::OutputBatch& outputs,
                          const transfer::Batch<transfer::StepFlags*>& session_flags) {
  engine_.submission.wait(stream_);
  if (engine_.device->backend() == Backend::kCuda) {
    return attend_in_windows(selection, outputs, session_flags);
  }
  session_flags_ = session_flags;
  transfer::SelectionView in_place = selection;
  in_place.staged = nullptr;
  in_place.staged_capacity = 0;
  engine_.workspace.flash.attend_in_parts(request_, in_place, max_selected, outputs, *this);
}

}  // namespace kvtier::runtime
