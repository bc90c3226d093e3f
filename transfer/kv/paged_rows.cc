#include "transfer/kv/paged_rows.h"

#include "transfer/device/parallel.h"
#include "transfer/device/with_cuda.h"
#include "transfer/kv/paged_rows_kernels.h"

#include <algorithm>
#include <cstring>

namespace kvtier::transfer {

void read_tables(Stream& stream, const TableInput& input, std::int32_t* blocks, std::int64_t stride,
                 SequenceCounters* counters, TableFaults* faults) {
  enqueue<cpu::read_tables, cuda::read_tables>(stream, input, blocks, stride, counters, faults);
}

void list_attended(Stream& stream, const SpanRule& rule, const SequenceBatch& sequences,
                   const QueryBatch& query_batch, int kv_heads, const SelectionView& selection,
                   const AttendedList& list) {
  enqueue<cpu::list_attended, cuda::list_attended>(stream, rule, sequences, query_batch, kv_heads,
                                                   selection, list);
}

void gather_paged_rows(Stream& stream, const KvGeometry& geometry, const SlotTables& slots,
                       const PagedRows& cache, const QueryBatch& query_batch,
                       const SelectionView& list) {
  enqueue<cpu::gather_paged_rows, cuda::gather_paged_rows>(stream, geometry, slots, cache,
                                                           query_batch, list);
}

namespace cpu {

void read_tables(const TableInput& input, std::int32_t* blocks, std::int64_t stride,
                 SequenceCounters* counters, TableFaults* faults) {
  for (int s = 0; s < input.sequences; ++s) {
    const std::int64_t given = input.lengths[s * input.length_stride];
    const std::int64_t length = std::clamp<std::int64_t>(given, 0, input.max_length);
    if (length != given) ++faults->lengths;
    counters[s] = {.length = length, .capacity = length};
    const std::int64_t used = (length + input.block_tokens - 1) / input.block_tokens;
    for (std::int64_t i = 0; i < used; ++i) {
      const std::int32_t id = input.blocks[s * input.stride + i];
      const bool inside = id >= 0 && id < input.num_blocks;
      if (!inside) ++faults->blocks;
      blocks[s * stride + i] = inside ? id : 0;
    }
  }
}

void list_attended(const SpanRule& rule, const SequenceBatch& sequences,
                   const QueryBatch& query_batch, int kv_heads, const SelectionView& selection,
                   const AttendedList& list) {
  for (int query_index = 0; query_index < query_batch.count; ++query_index) {
    const AttendedSpans spans =
        attended_spans(rule, sequences[query_batch[query_index].sequence].counters->length,
                       query_batch[query_index]);
    for (int head = 0; head < list.heads; ++head) {
      const std::int64_t from = std::int64_t{query_index} * kv_heads + head;
      const AttendedTokens tokens(spans, selection.counts[from]);
      const std::int64_t count = std::min(tokens.count(), list.n);
      const std::int64_t to = std::int64_t{query_index} * list.heads + head;
      std::int32_t* ids = list.ids + query_index * list.query_stride + head * list.head_stride;
      float* bias = list.bias == nullptr ? nullptr
                                         : list.bias + query_index * list.bias_row_stride +
                                               head * list.bias_head_stride;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t chosen = tokens.chosen(i);
        const std::int64_t entry = from * selection.capacity + chosen;
        ids[i] =
            chosen < 0 ? static_cast<std::int32_t>(tokens.num_static(i)) : selection.ids[entry];
        if (bias != nullptr) {
          bias[i] = chosen < 0 || selection.bias == nullptr ? 0.0F : selection.bias[entry];
        }
        if (list.head_mask != nullptr) list.head_mask[to * list.n + i] = list.all_heads;
      }
      if (list.counts != nullptr) {
        list.counts[to] = static_cast<std::int32_t>(count);
        continue;
      }
      std::fill(ids + count, ids + list.n, -1);
      if (bias != nullptr) std::fill(bias + count, bias + list.n, 0.0F);
    }
  }
}

void gather_paged_rows(const KvGeometry& geometry, const SlotTables& slots, const PagedRows& cache,
                       const QueryBatch& query_batch, const SelectionView& list) {
  const std::size_t half_bytes = static_cast<std::size_t>(geometry.row_bytes()) / 2;
  const auto address = [&](const PagedRows::Half& half, std::int64_t slot, std::int64_t head) {
    return half.data +
           2 * (slot / slots.block_tokens * half.block_stride +
                slot % slots.block_tokens * half.token_stride + head * half.head_stride);
  };
  parallel_for_each(std::int64_t{query_batch.count} * geometry.kv_heads, 1, [&](std::int64_t lane) {
    const auto query_index = static_cast<int>(lane / geometry.kv_heads);
    const std::int32_t* table = slots.of(query_batch[query_index].sequence);
    for (std::int64_t i = 0; i < list.counts[lane]; ++i) {
      const std::int64_t token = list.ids[lane * list.capacity + i];
      const std::int64_t slot = slot_of(table, slots.block_tokens, token);
      const std::int64_t head = lane % geometry.kv_heads;
      std::byte* to = list.staged + (lane * list.staged_capacity + i) * geometry.row_bytes();
      std::memcpy(to, address(cache.keys, slot, head), half_bytes);
      std::memcpy(to + half_bytes, address(cache.values, slot, head), half_bytes);
    }
  });
}

}  // namespace cpu

}  // namespace kvtier::transfer
