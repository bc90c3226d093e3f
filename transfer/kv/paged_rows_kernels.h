#pragma once

#include "transfer/kv/paged_rows.h"

/// The two implementations behind transfer/kv/paged_rows.h; arguments as there.
namespace kvtier::transfer {

namespace cpu {
void read_tables(const TableInput& input, std::int32_t* blocks, std::int64_t stride,
                 SequenceCounters* counters, TableFaults* faults);
void list_attended(const SpanRule& rule, const SequenceBatch& sequences,
                   const QueryBatch& query_batch, int kv_heads, const SelectionView& selection,
                   const AttendedList& list);
void gather_paged_rows(const KvGeometry& geometry, const SlotTables& slots, const PagedRows& cache,
                       const QueryBatch& query_batch, const SelectionView& list);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
void read_tables(void* stream, const TableInput& input, std::int32_t* blocks, std::int64_t stride,
                 SequenceCounters* counters, TableFaults* faults);
void list_attended(void* stream, const SpanRule& rule, const SequenceBatch& sequences,
                   const QueryBatch& query_batch, int kv_heads, const SelectionView& selection,
                   const AttendedList& list);
void gather_paged_rows(void* stream, const KvGeometry& geometry, const SlotTables& slots,
                       const PagedRows& cache, const QueryBatch& query_batch,
                       const SelectionView& list);
}  // namespace cuda

/// The tokens that one query attends: the always-attended ones and `selected` others, ascending.
class AttendedTokens {
 public:
  KVTIER_HOST_DEVICE AttendedTokens(const AttendedSpans& spans, std::int64_t selected)
      : spans_(spans), selected_(selected) {}

  KVTIER_HOST_DEVICE std::int64_t count() const { return selected_ + spans_.num_static(); }
  /// Returns the index of entry `i` in the selection, or -1 where it is always attended.
  KVTIER_HOST_DEVICE std::int64_t chosen(std::int64_t i) const {
    const std::int64_t at = i - spans_.sink_end;
    return at >= 0 && at < selected_ ? at : -1;
  }
  /// Returns the token of an entry that is always attended.
  KVTIER_HOST_DEVICE std::int64_t num_static(std::int64_t i) const {
    return i < spans_.sink_end ? i : spans_.tail_begin + i - spans_.sink_end - selected_;
  }

 private:
  AttendedSpans spans_;
  std::int64_t selected_;
};

}  // namespace kvtier::transfer
