#include "transfer/device/parallel.h"
#include "transfer/kv/page_rows.h"
#include "transfer/kv/row_convert.h"
#include "transfer/kv/rows_kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace kvtier::transfer {
namespace {

/// Bytes below which handing work to another thread costs more than it saves.
constexpr std::int64_t kGrainBytes = 128 * 1024;
/// Selected rows copied by one piece of work.
constexpr std::int64_t kGatherBlock = 256;

std::int64_t grain_of(std::int64_t bytes_per_token) {
  return std::max<std::int64_t>(kGrainBytes / std::max<std::int64_t>(bytes_per_token, 1), 1);
}

const void* element(const TokenTensor& tensor, std::int64_t token, std::int64_t head) {
  const std::int64_t offset = token * tensor.token_stride + head * tensor.head_stride;
  return static_cast<const std::byte*>(tensor.data) +
         offset * static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
}

RowSquares squares_of(const KvGeometry& geometry, const std::uint16_t* row) {
  constexpr int kMaxHeadDim = 256;
  const auto square = [&](const std::uint16_t* stored) {
    float x[kMaxHeadDim];
    cpu::convert_to_float(stored, geometry.dtype, x, geometry.head_dim);
    return std::inner_product(x, x + geometry.head_dim, x, 0.0F);
  };
  return {square(row), square(row + geometry.head_dim)};
}

void pack_item(const KvGeometry& geometry, const AppendItem& item, std::byte* packed,
               RowSquares* squares) {
  const std::int64_t row_bytes = geometry.row_bytes();
  const SequenceCounters* counters = item.sequence.counters;
  const std::int64_t length = counters == nullptr ? 0 : counters->length;
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    std::int64_t nonfinite = 0;
    for (std::int64_t token = begin; token < end; ++token) {
      for (std::int64_t head = 0; head < geometry.kv_heads; ++head) {
        const std::int64_t index = (item.packed_offset + token) * geometry.kv_heads + head;
        auto* row = reinterpret_cast<std::uint16_t*>(packed + index * row_bytes);
        const bool bad_key =
            cpu::convert_to_storage(element(item.keys, token, head), item.keys.dtype, row,
                                    geometry.dtype, geometry.head_dim);
        const bool bad_value =
            cpu::convert_to_storage(element(item.values, token, head), item.values.dtype,
                                    row + geometry.head_dim, geometry.dtype, geometry.head_dim);
        const bool bad = bad_key || bad_value;
        if (bad && ++nonfinite == 1) {
          cpu::note_place(item.flags, {.token = length + token, .layer = item.layer});
        }
        if (squares == nullptr) continue;
        constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
        squares[index] = bad ? RowSquares{kNan, kNan} : squares_of(geometry, row);
      }
    }
    cpu::count(item.flags, &StepFlags::nonfinite_tokens, nonfinite);
  };
  parallel_for(item.tokens, grain_of(row_bytes * geometry.kv_heads), body);
}

void store_item(const KvGeometry& geometry, const AppendItem& item, const std::byte* packed) {
  const SequenceView& sequence = item.sequence;
  const std::int64_t row_bytes = geometry.row_bytes();
  const auto bytes = static_cast<std::size_t>(row_bytes);
  const std::int64_t length = sequence.counters->length;
  const std::int64_t stored = tokens_stored(*sequence.counters, item.tokens);
  // Earlier tokens would share a slot of the ring with later ones.
  const std::int64_t ring_begin = length + stored - geometry.recent_capacity;

  const auto body = [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::byte> kept(bytes);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t token = length + i;
      const std::byte* row = packed + (item.packed_offset + i) * geometry.kv_heads * row_bytes;
      auto* page = const_cast<std::byte*>(sequence.pages[geometry.page_of(token)]);
      const bool in_ring = token >= ring_begin;
      for (std::int64_t head = 0; head < geometry.kv_heads; ++head, row += row_bytes) {
        cpu::store_page_row(geometry, page, head, token, row, kept.data());
        if (token < geometry.sink_capacity) {
          std::memcpy(sequence.sink_rows + (head * geometry.sink_capacity + token) * row_bytes,
                      kept.data(), bytes);
        }
        if (in_ring) {
          const std::int64_t slot = token % geometry.recent_capacity;
          std::memcpy(sequence.recent_rows + (head * geometry.recent_capacity + slot) * row_bytes,
                      kept.data(), bytes);
        }
      }
    }
  };
  parallel_for(stored, grain_of(row_bytes * geometry.kv_heads), body);
}

/// One (query, KV head) of a gather.
struct GatherLane {
  SequenceView sequence;
  std::int64_t resident_begin = 0;
  std::int64_t rows = 0;  ///< Rows to copy.
  const std::int32_t* ids = nullptr;
  std::byte* staged = nullptr;
};

GatherLane gather_lane(const KvGeometry& geometry, const SequenceBatch& sequences,
                       const QueryBatch& query_batch, const SelectionView& selection,
                       std::int64_t lane) {
  const auto& row = query_batch[static_cast<int>(lane / geometry.kv_heads)];
  const SequenceView& sequence = sequences[row.sequence];
  return {.sequence = sequence,
          .resident_begin = sequence.counters->resident_begin,
          .rows = std::min<std::int64_t>(selection.counts[lane], selection.staged_capacity),
          .ids = selection.ids + lane * selection.capacity,
          .staged = selection.staged + lane * selection.staged_capacity * geometry.row_bytes()};
}

}  // namespace

namespace cpu {

void count(StepFlags* flags, std::uint64_t StepFlags::*counter, std::int64_t n) {
  if (flags == nullptr || n == 0) return;
  std::atomic_ref<std::uint64_t>(flags->*counter)
      .fetch_add(static_cast<std::uint64_t>(n), std::memory_order_relaxed);
}

void note_place(StepFlags* flags, const NonfinitePlace& place) {
  if (flags == nullptr) return;
  const std::atomic_ref<std::uint64_t> first(flags->first_nonfinite);
  std::uint64_t found = first.load(std::memory_order_relaxed);
  while (place.key() < found && !first.compare_exchange_weak(found, place.key())) {
  }
}

void pack_rows(const KvGeometry& geometry, const AppendBatch& batch, std::byte* packed,
               RowSquares* squares) {
  for (int i = 0; i < batch.count; ++i) pack_item(geometry, batch[i], packed, squares);
}

void store_rows(const KvGeometry& geometry, const AppendBatch& batch, const std::byte* packed) {
  for (int i = 0; i < batch.count; ++i) store_item(geometry, batch[i], packed);
}

void append_done(const KvGeometry& geometry, const AppendBatch& batch) {
  for (int i = 0; i < batch.count; ++i) {
    count_appended(geometry, *batch[i].sequence.counters, batch[i].tokens);
  }
}

void set_length(SequenceCounters* counters, std::int64_t length, std::int64_t capacity) {
  counters->length = length;
  counters->capacity = capacity;
  counters->resident_begin = std::min(counters->resident_begin, length);
}

void patch_table(std::byte** table, std::int64_t begin, const TablePatch& patch, int count) {
  std::copy_n(patch.values, count, table + begin);
}

void gather_rows(const KvGeometry& geometry, const SequenceBatch& sequences,
                 const QueryBatch& query_batch, const SelectionView& selection,
                 bool pages_on_device, StepFlags* flags) {
  const std::int64_t row_bytes = geometry.row_bytes();
  const std::int64_t blocks = (selection.staged_capacity + kGatherBlock - 1) / kGatherBlock;
  const std::int64_t lanes = std::int64_t{query_batch.count} * geometry.kv_heads;

  const auto body = [&](std::int64_t begin, std::int64_t end) {
    std::int64_t copied = 0;
    std::int64_t resident = 0;
    for (std::int64_t block = begin; block < end; ++block) {
      const GatherLane lane =
          gather_lane(geometry, sequences, query_batch, selection, block / blocks);
      const auto head = static_cast<int>(block / blocks % geometry.kv_heads);
      const std::int64_t first = block % blocks * kGatherBlock;
      const std::int64_t last = std::min(first + kGatherBlock, lane.rows);
      for (std::int64_t i = first; i < last; ++i) {
        const std::int64_t token = lane.ids[i];
        cpu::read_row(geometry, lane.sequence, lane.resident_begin, head, token,
                      lane.staged + i * row_bytes);
        const bool kept = row_is_resident(geometry, lane.resident_begin, token);
        if (kept || pages_on_device) ++resident;
      }
      copied += std::max<std::int64_t>(last - first, 0);
    }
    count(flags, &StepFlags::rows_resident, resident);
    count(flags, &StepFlags::rows_fetched_host, copied - resident);
  };
  parallel_for(lanes * blocks, grain_of(kGatherBlock * row_bytes), body);

  count(flags, &StepFlags::rows_selected,
        std::accumulate(selection.counts, selection.counts + lanes, std::int64_t{0}));
}

void pack_queries(const KvGeometry& geometry, const QueryItems& items, float* out) {
  const std::int64_t heads = geometry.query_heads();
  for (int query_index = 0; query_index < items.count; ++query_index) {
    const QueryItem& item = items[query_index];
    bool bad = false;
    for (std::int64_t head = 0; head < heads; ++head) {
      float* to = out + (query_index * heads + head) * geometry.head_dim;
      const void* from = element(item.query, item.token, head);
      bad |= cpu::convert_to_float(from, item.query.dtype, to, geometry.head_dim);
    }
    if (!bad) continue;
    note_place(item.flags, item.place());
    count(item.flags, &StepFlags::nonfinite_queries, 1);
  }
}

}  // namespace cpu

bool all_finite(const TokenTensor& tensor, std::int64_t tokens, int heads, int head_dim,
                DType storage) {
  const std::int64_t token_elements = std::int64_t{heads} * head_dim;
  const bool dense_token = tensor.head_stride == head_dim;
  const bool dense = dense_token && tensor.token_stride == token_elements;
  std::atomic<bool> finite = true;
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    bool bad = false;
    if (dense) {
      bad = cpu::any_unstorable(element(tensor, begin, 0), tensor.dtype, storage,
                                (end - begin) * token_elements);
    } else {
      for (std::int64_t token = begin; token < end && !bad; ++token) {
        for (std::int64_t head = 0; head < heads && !bad; ++head) {
          bad = cpu::any_unstorable(element(tensor, token, head), tensor.dtype, storage, head_dim);
        }
      }
    }
    if (bad) finite.store(false, std::memory_order_relaxed);
  };
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  parallel_for(tokens, grain_of(token_elements * element_bytes), body);
  return finite.load(std::memory_order_relaxed);
}

}  // namespace kvtier::transfer
