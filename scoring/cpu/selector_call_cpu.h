#pragma once

#include "scoring/cpu/scores_cpu.h"
#include "scoring/selector_kernels.h"
#include "transfer/device/parallel.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>

/// What the selections of the CPU backend share.
namespace kvtier::scoring::cpu {

/// `select` of a request with `coarse_bits`.
void select_in_two_phases(const SelectRequest& request, const SelectorWorkspace& workspace);

using transfer::AttendedSpans;
using transfer::parallel_for_each;

/// Tiles that a thread takes at once: a tile costs tens of microseconds.
inline constexpr std::int64_t kTileGrain = 4;

inline std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

inline std::int64_t tiles_of(std::int64_t tokens) {
  return (tokens + kTileTokens - 1) / kTileTokens;
}

inline std::uint16_t all_heads(int group) { return static_cast<std::uint16_t>((1U << group) - 1U); }

/// One call: the spans of each query, and where each (query, head) has its memory.
class Call {
 public:
  Call(const SelectRequest& request, const SelectorWorkspace& space)
      : request_(request), space_(space), group_(request.kv.group) {
    for (int query_index = 0; query_index < request.query_batch.count; ++query_index) {
      const transfer::QueryToken& query = request.query_batch[query_index];
      const std::int64_t length = request.sequences[query.sequence].counters->length;
      assert(length <= space.limits.max_tokens);
      AttendedSpans& spans = spans_[static_cast<std::size_t>(query_index)];
      spans = transfer::attended_spans(request.rule, length, query);
      if (spans.num_eligible() > 0) max_tiles_ = std::max(max_tiles_, tiles_of(spans.eligible_end));
    }
  }

  [[nodiscard]] const SelectRequest& request() const { return request_; }
  [[nodiscard]] const transfer::SelectionView& selection() const { return space_.selection; }
  [[nodiscard]] const AttendedSpans& spans(int query_index) const {
    return spans_[static_cast<std::size_t>(query_index)];
  }
  [[nodiscard]] int num_queries() const { return request_.query_batch.count; }
  [[nodiscard]] int group() const { return group_; }
  [[nodiscard]] int kv_heads() const { return request_.kv.kv_heads; }
  [[nodiscard]] int query_heads() const { return request_.kv.query_heads(); }
  [[nodiscard]] std::int64_t max_tokens() const { return space_.limits.max_tokens; }
  [[nodiscard]] bool prioritised() const {
    return request_.params.rule == SelectionRule::kPriority;
  }
  [[nodiscard]] bool per_query_head() const { return !request_.params.shared(); }
  [[nodiscard]] bool per_sequence() const {
    return request_.params.selection == Selection::kPerSequence;
  }
  /// Scores that order the tokens of a selection that heads share. Normalising one head keeps its
  /// order, but not every last bit of it.
  [[nodiscard]] float* order(int query_index, int kv_head) const {
    return group_ == 1 && !per_sequence() ? scores(query_index, kv_head)
                                          : combined(query_index, kv_head);
  }

  [[nodiscard]] GroupQuery group_query(int query_index, int kv_head) const {
    const std::int64_t head =
        std::int64_t{query_index} * query_heads() + std::int64_t{kv_head} * group_;
    const std::size_t slot = static_cast<std::size_t>(query_index * kv_heads() + kv_head);
    return {.entries = space_.tables.entries + head * space_.tables.entries_per_head,
            .scalars = space_.tables.scalars + head,
            .group = group_,
            .prepared = space_.scratch + slot * aligned(prepared_bytes(group_))};
  }
  /// Scores of the first head of a group.
  [[nodiscard]] float* scores(int query_index, int kv_head) const {
    return space_.scores +
           (std::int64_t{query_index} * query_heads() + std::int64_t{kv_head} * group_) *
               max_tokens();
  }
  [[nodiscard]] float* combined(int query_index, int kv_head) const {
    return space_.combined + (std::int64_t{query_index} * kv_heads() + kv_head) * max_tokens();
  }
  [[nodiscard]] std::uint16_t* token_mask(int query_index, int kv_head) const {
    return space_.token_mask + (std::int64_t{query_index} * kv_heads() + kv_head) * max_tokens();
  }
  /// Of the first head of a group.
  [[nodiscard]] float* rest_logs(int query_index, int kv_head) const {
    return space_.rest_logs + std::int64_t{query_index} * query_heads() +
           std::int64_t{kv_head} * group_;
  }
  /// Reductions of the first head of a group, `partial_stride()` apart from the next head's.
  [[nodiscard]] TilePartial* partials(int query_index, int kv_head) const {
    const auto groups =
        static_cast<std::size_t>(space_.limits.num_queries * space_.limits.kv_heads);
    auto* base =
        reinterpret_cast<TilePartial*>(space_.scratch + groups * aligned(prepared_bytes(group_)));
    return base + (std::int64_t{query_index} * query_heads() + std::int64_t{kv_head} * group_) *
                      partial_stride();
  }
  [[nodiscard]] std::int64_t partial_stride() const { return tiles_of(max_tokens()); }

  /// Calls body(query_index, kv_head, first token, count) for the eligible tokens of each tile, in
  /// parallel.
  template <typename Body>
  void for_each_tile(const Body& body) const {
    const std::int64_t pairs = std::int64_t{num_queries()} * kv_heads();
    parallel_for_each(pairs * max_tiles_, kTileGrain, [&](std::int64_t i) {
      const auto pair = static_cast<int>(i / max_tiles_);
      const int query_index = pair / kv_heads();
      const std::int64_t tile = i % max_tiles_ * kTileTokens;
      const std::int64_t first = std::max(tile, spans(query_index).sink_end);
      const std::int64_t last = std::min(tile + kTileTokens, spans(query_index).eligible_end);
      if (first < last) body(query_index, pair % kv_heads(), first, static_cast<int>(last - first));
    });
  }
  /// Calls body(query_index, kv_head) for each pair, in parallel.
  template <typename Body>
  void for_each_group(const Body& body) const {
    parallel_for_each(std::int64_t{num_queries()} * kv_heads(), 1, [&](std::int64_t i) {
      body(static_cast<int>(i / kv_heads()), static_cast<int>(i % kv_heads()));
    });
  }

 private:
  const SelectRequest& request_;
  const SelectorWorkspace& space_;
  int group_;
  std::int64_t max_tiles_ = 0;
  std::array<AttendedSpans, transfer::kMaxBatch> spans_;
};

/// Appends to one (query, KV head) of a selection.
class SelectionWriter {
 public:
  SelectionWriter(const transfer::SelectionView& view, std::int64_t slot)
      : ids_(view.ids + slot * view.capacity),
        masks_(view.head_mask + slot * view.capacity),
        biases_(view.bias == nullptr ? nullptr
                                     : view.bias + slot * view.capacity * view.bias_heads),
        bias_heads_(view.bias_heads),
        count_(view.counts + slot),
        capacity_(view.capacity) {}

  /// `bias_of(i)` is the bias of the i-th head that has its own; not called when there are none.
  template <typename BiasOf>
  void add(std::int64_t token, std::uint16_t mask, const BiasOf& bias_of) {
    assert(used_ < capacity_);
    if (used_ == capacity_) return;
    ids_[used_] = static_cast<std::int32_t>(token);
    masks_[used_] = mask;
    if (biases_ != nullptr) {
      for (int i = 0; i < bias_heads_; ++i) biases_[used_ * bias_heads_ + i] = bias_of(i);
    }
    ++used_;
  }
  void finish() { *count_ = static_cast<std::int32_t>(used_); }

 private:
  std::int32_t* ids_;
  std::uint16_t* masks_;
  float* biases_;
  int bias_heads_;
  std::int32_t* count_;
  std::int64_t capacity_;
  std::int64_t used_ = 0;
};

/// Scores the eligible tokens of each (query, KV head), and normalises the heads and combines those
/// that share a set; `request.params` says how.
void score(const Call& call);
void combine(const Call& call);

}  // namespace kvtier::scoring::cpu
