#include "transfer/device/parallel.h"
#include "transfer/kv/page_rows.h"
#include "transfer/kv/rows_kernels.h"
#include "transfer/row_cache/row_cache_kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace kvtier::transfer {
namespace {

/// A row that its set does not have.
struct Missing {
  std::int32_t token;
  std::uint32_t heads;
  std::byte* staged;  ///< Null: it is prefetched.
};

/// The gather of one KV head of one sequence.
class HeadGather {
 public:
  HeadGather(const KvGeometry& geometry, const RowCacheGather& gather, int sequence, int head)
      : geometry_(geometry),
        gather_(gather),
        number_(sequence),
        head_(head),
        sequence_(gather.sequences[sequence]),
        resident_begin_(sequence_.counters->resident_begin) {
    const RowCache& row_cache = gather.row_cache[sequence];
    if (row_cache.sets == nullptr) return;
    const std::int64_t first = std::int64_t{head} * gather.shape.num_sets;
    for (int i = 0; i < gather.shape.num_sets; ++i) {
      sets_.emplace_back(row_cache.sets[first + i], gather.prefetched);
    }
    missing_.resize(sets_.size());
    slots_ = row_cache.slots + first * kSetWays * geometry.row_bytes();
  }

  void run() {
    for (int r = 0; r < gather_.query_batch.count; ++r) {
      if (gather_.query_batch[r].sequence != number_) continue;
      if (gather_.prefetched) {
        look_up_prefetched(r);
      } else {
        look_for(r);
      }
    }
    for (OpenSet& set : sets_) {
      if (gather_.prefetched) break;
      totals_.prefetched_useful +=
          static_cast<unsigned long long>(set.count_uses(gather_.shape.policy));
    }
    for (std::size_t i = 0; i < sets_.size(); ++i) {
      for (const Missing& row : missing_[i]) admit(static_cast<std::int64_t>(i), row);
    }
    add_totals();
  }

 private:
  void look_for(int query_index) {
    const SelectionView& selection = gather_.selection;
    const std::int64_t list = std::int64_t{query_index} * geometry_.kv_heads + head_;
    const std::int64_t rows =
        std::min<std::int64_t>(selection.counts[list], selection.staged_capacity);
    totals_.selected += static_cast<unsigned long long>(selection.counts[list]);
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t at = list * selection.capacity + i;
      const Missing wanted{
          selection.ids[at],
          static_cast<std::uint32_t>(__builtin_popcount(selection.head_mask[at])),
          selection.staged + (list * selection.staged_capacity + i) * geometry_.row_bytes()};
      look_for(wanted);
    }
  }

  void look_up_prefetched(int query_index) {
    const SelectionView& selection = gather_.selection;
    const std::int64_t list = std::int64_t{query_index} * geometry_.kv_heads + head_;
    for (std::int64_t i = 0; !sets_.empty() && i < selection.counts[list]; ++i) {
      const std::int64_t at = list * selection.capacity + i;
      const std::int32_t token = selection.ids[at];
      if (row_is_resident(geometry_, resident_begin_, token)) continue;
      const auto heads = static_cast<std::uint32_t>(__builtin_popcount(selection.head_mask[at]));
      const auto set = static_cast<std::size_t>(row_cache_set(token, gather_.shape.num_sets));
      if (sets_[set].find(token, heads) >= 0 || missing_[set].size() == kSetWays) continue;
      missing_[set].push_back({token, heads, nullptr});
    }
  }

  void look_for(const Missing& row) {
    if (row_is_resident(geometry_, resident_begin_, row.token)) {
      ++totals_.resident;
      return read(row.token, row.staged);
    }
    if (sets_.empty()) return fetch(row);
    const int set = row_cache_set(row.token, gather_.shape.num_sets);
    const int way = sets_[static_cast<std::size_t>(set)].find(row.token, row.heads);
    if (way >= 0) {
      ++totals_.hits;
      ++totals_.resident;
      return copy(row.staged, slot(set, way));
    }
    ++totals_.misses;
    std::vector<Missing>& missing = missing_[static_cast<std::size_t>(set)];
    if (missing.size() == kSetWays) return fetch(row);
    missing.push_back(row);
  }

  void admit(std::int64_t set, const Missing& row) {
    if (row.staged != nullptr) fetch(row);
    OpenSet& open = sets_[static_cast<std::size_t>(set)];
    if (open.find(row.token, row.heads) >= 0) return;  // for an earlier query
    RowCacheChange change;
    const int way = open.admit(gather_.shape.policy, row.token, row.heads, change);
    if (way < 0) return;
    if (row.staged != nullptr) {
      copy(slot(set, way), row.staged);
      ++totals_.admissions;
    } else {
      read(row.token, slot(set, way));
      ++totals_.prefetched;
    }
    if (change.evicts) ++totals_.evictions;
    if (change.wastes) ++totals_.prefetched_wasted;
  }

  void fetch(const Missing& row) {
    ++totals_.fetched;
    read(row.token, row.staged);
  }
  void add_totals() const {
    const auto add = [this](std::uint64_t StepFlags::*counter, unsigned long long n) {
      cpu::count(gather_.flags, counter, static_cast<std::int64_t>(n));
    };
    add(&StepFlags::rows_selected, totals_.selected);
    add(&StepFlags::rows_resident, totals_.resident);
    add(&StepFlags::rows_fetched_host, totals_.fetched);
    add(&StepFlags::row_cache_hits, totals_.hits);
    add(&StepFlags::row_cache_misses, totals_.misses);
    add(&StepFlags::row_cache_admissions, totals_.admissions);
    add(&StepFlags::row_cache_evictions, totals_.evictions);
    add(&StepFlags::rows_prefetched, totals_.prefetched);
    add(&StepFlags::rows_prefetched_useful, totals_.prefetched_useful);
    add(&StepFlags::rows_prefetched_wasted, totals_.prefetched_wasted);
  }

  void read(std::int32_t token, std::byte* to) const {
    cpu::read_row(geometry_, sequence_, resident_begin_, head_, token, to);
  }
  [[nodiscard]] std::byte* slot(std::int64_t set, int way) const {
    return slots_ + (set * kSetWays + way) * geometry_.row_bytes();
  }
  void copy(std::byte* to, const std::byte* from) const {
    std::memcpy(to, from, static_cast<std::size_t>(geometry_.row_bytes()));
  }

  const KvGeometry& geometry_;
  const RowCacheGather& gather_;
  int number_;
  int head_;
  const SequenceView& sequence_;
  std::int64_t resident_begin_;
  std::vector<OpenSet> sets_;
  std::vector<std::vector<Missing>> missing_;  ///< Of each set, in the order of lists.
  std::byte* slots_ = nullptr;
  RowCacheTotals totals_;
};

}  // namespace

namespace cpu {

void forget_cached_rows(const RowCacheForget& forget, std::int64_t num_sets) {
  std::int64_t wasted = 0;
  for (std::int64_t i = 0; i < num_sets; ++i) {
    RowCacheSet& set = forget.row_cache.sets[i];
    for (int way = 0; way < kSetWays; ++way) {
      if (set.tokens[way] < 0 || set.tokens[way] < forget.length) continue;
      set.tokens[way] = -1;
      wasted += set.prefetched >> way & 1U;
    }
  }
  count(forget.flags, &StepFlags::rows_prefetched_wasted, wasted);
}

void gather_cached_rows(const KvGeometry& geometry, const RowCacheGather& gather) {
  const std::int64_t heads = std::int64_t{gather.sequences.count} * geometry.kv_heads;
  parallel_for_each(heads, 1, [&](std::int64_t i) {
    HeadGather(geometry, gather, static_cast<int>(i / geometry.kv_heads),
               static_cast<int>(i % geometry.kv_heads))
        .run();
  });
}

}  // namespace cpu

}  // namespace kvtier::transfer
