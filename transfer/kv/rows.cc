#include "transfer/kv/rows.h"

#include "transfer/device/with_cuda.h"
#include "transfer/kv/rows_kernels.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace kvtier::transfer {
namespace {

// What callers have checked, for asserts.
[[maybe_unused]] bool valid(const KvGeometry& g) {
  return (g.head_dim == 64 || g.head_dim == 96 || g.head_dim == 128 || g.head_dim == 256) &&
         (g.dtype == DType::kBFloat16 || (g.dtype == DType::kFloat16 && !g.int8_pages)) &&
         g.kv_heads >= 1 && g.group >= 1 &&
         std::has_single_bit(static_cast<unsigned>(g.page_tokens)) && g.sink_capacity >= 0 &&
         g.recent_capacity >= 0;
}

[[maybe_unused]] bool valid(const TokenTensor& tensor) {
  return tensor.data != nullptr && tensor.dtype != DType::kInt32;
}

[[maybe_unused]] bool valid(const KvGeometry& geometry, const SequenceView& sequence) {
  return sequence.counters != nullptr && sequence.pages != nullptr &&
         (sequence.sink_rows != nullptr || geometry.sink_capacity == 0) &&
         (sequence.recent_rows != nullptr || geometry.recent_capacity == 0);
}

template <typename Item, typename Valid>
[[maybe_unused]] bool all_valid(const KvGeometry& geometry, const Batch<Item>& batch,
                                const Valid& is_valid) {
  return valid(geometry) && batch.count >= 0 && batch.count <= kMaxBatch &&
         std::all_of(&batch[0], &batch[0] + batch.count, is_valid);
}

}  // namespace

void pack_rows(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch,
               std::byte* packed, RowSquares* squares) {
  assert(all_valid(geometry, batch, [](const AppendItem& item) {
    return item.packed_offset >= 0 &&
           (item.tokens == 0 || (item.tokens > 0 && valid(item.keys) && valid(item.values)));
  }));
  enqueue<cpu::pack_rows, cuda::pack_rows>(stream, geometry, batch, packed, squares);
}

void store_rows(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch,
                const std::byte* packed, const FrameFactors& factors) {
  assert(all_valid(geometry, batch, [&](const AppendItem& item) {
    return item.tokens >= 0 && item.packed_offset >= 0 && valid(geometry, item.sequence);
  }));
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::store_rows(stream.native(), geometry, batch, packed, factors);
    }
  }
  assert(factors.factors == nullptr);
  stream.run([=] { cpu::store_rows(geometry, batch, packed); });
}

void append_done(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch) {
  assert(all_valid(geometry, batch, [](const AppendItem& item) {
    return item.tokens >= 0 && item.sequence.counters != nullptr;
  }));
  enqueue<cpu::append_done, cuda::append_done>(stream, geometry, batch);
}

void set_length(Stream& stream, SequenceCounters* counters, std::int64_t length,
                std::int64_t capacity) {
  assert(counters != nullptr && length >= 0 && capacity >= length);
  enqueue<cpu::set_length, cuda::set_length>(stream, counters, length, capacity);
}

void patch_table(Stream& stream, std::byte** table, std::int64_t begin, const TablePatch& patch,
                 int count) {
  assert(begin >= 0 && count >= 0 && count <= kMaxTablePatch);
  enqueue<cpu::patch_table, cuda::patch_table>(stream, table, begin, patch, count);
}

void gather_rows(Stream& stream, const KvGeometry& geometry, const SequenceBatch& sequences,
                 const QueryBatch& query_batch, const SelectionView& selection,
                 bool pages_on_device, StepFlags* flags) {
  assert(all_valid(geometry, sequences,
                   [&](const SequenceView& sequence) { return valid(geometry, sequence); }));
  assert(all_valid(geometry, query_batch, [&](const QueryToken& query) {
    return query.sequence >= 0 && query.sequence < sequences.count;
  }));
  assert(selection.staged_capacity >= 0 && selection.staged_capacity <= selection.capacity);
  assert(selection.staged != nullptr || selection.staged_capacity == 0);
  enqueue<cpu::gather_rows, cuda::gather_rows>(stream, geometry, sequences, query_batch, selection,
                                               pages_on_device, flags);
}

void pack_queries(Stream& stream, const KvGeometry& geometry, const QueryItems& items, float* out) {
  assert(all_valid(geometry, items,
                   [](const QueryItem& item) { return valid(item.query) && item.token >= 0; }));
  enqueue<cpu::pack_queries, cuda::pack_queries>(stream, geometry, items, out);
}

}  // namespace kvtier::transfer
