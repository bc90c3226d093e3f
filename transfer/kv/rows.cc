#include "transfer/kv/rows.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/device/with_cuda.h"
#include "transfer/kv/rows_kernels.h"

#include <string>

namespace kvtier::transfer {
namespace {

void check_geometry(const KvGeometry& g) {
  if (g.head_dim != 64 && g.head_dim != 96 && g.head_dim != 128 && g.head_dim != 256) {
    throw_error(ErrorCode::kInvalidArgument, "head_dim: expected 64, 96, 128 or 256, found ",
                g.head_dim);
  }
  if (g.dtype != DType::kBFloat16 && g.dtype != DType::kFloat16) {
    throw_error(ErrorCode::kInvalidArgument, "KV dtype: expected bf16 or fp16, found ",
                dtype_name(g.dtype));
  }
  if (g.int8_pages && g.dtype != DType::kBFloat16) {
    throw_error(ErrorCode::kInvalidArgument, "KV dtype: expected bf16 with pages of int8, found ",
                dtype_name(g.dtype));
  }
  if (g.kv_heads < 1 || g.query_heads < 1 || g.query_heads % g.kv_heads != 0) {
    throw_error(ErrorCode::kInvalidArgument,
                "heads: expected query_heads a multiple of kv_heads, found ", g.query_heads,
                " and ", g.kv_heads);
  }
  if (g.page_tokens < 1 || g.sink_capacity < 0 || g.recent_capacity < 0) {
    throw_error(ErrorCode::kInvalidArgument,
                "page_tokens, sink_capacity, recent_capacity: expected at least 1, 0, 0, found ",
                g.page_tokens, ", ", g.sink_capacity, ", ", g.recent_capacity);
  }
}

void check_count(const char* what, std::int64_t found, std::int64_t most) {
  if (found < 0 || found > most) {
    throw_error(ErrorCode::kInvalidArgument, what, ": expected 0 to ", most, ", found ", found);
  }
}

void check_tensor(const char* what, const TokenTensor& tensor) {
  if (tensor.data == nullptr)
    throw_error(ErrorCode::kInvalidArgument, what, ": expected a tensor, found none");
  if (tensor.dtype == DType::kInt32) {
    throw_error(ErrorCode::kInvalidArgument, what, ": expected fp32, fp16 or bf16, found int32");
  }
}

void check_items(const KvGeometry& geometry, const AppendBatch& batch) {
  check_geometry(geometry);
  check_count("items of an append", batch.count, kMaxBatch);
  for (int i = 0; i < batch.count; ++i) {
    if (batch[i].tokens < 0 || batch[i].packed_offset < 0) {
      throw_error(ErrorCode::kInvalidArgument,
                  "tokens and packed_offset: expected at least 0, found ", batch[i].tokens, " and ",
                  batch[i].packed_offset);
    }
  }
}

void check_sequence(const KvGeometry& geometry, const SequenceView& sequence) {
  if (sequence.counters == nullptr || sequence.pages == nullptr ||
      (sequence.sink_rows == nullptr && geometry.sink_capacity > 0) ||
      (sequence.recent_rows == nullptr && geometry.recent_capacity > 0)) {
    throw_error(
        ErrorCode::kInvalidArgument,
        "sequence: expected counters, pages, sink rows and recent rows, found a null pointer");
  }
}

void check_tensors(const AppendBatch& batch) {
  for (int i = 0; i < batch.count; ++i) {
    if (batch[i].tokens == 0) continue;
    check_tensor("keys", batch[i].keys);
    check_tensor("values", batch[i].values);
  }
}

}  // namespace

void check_append(const KvGeometry& geometry, const AppendBatch& batch) {
  check_items(geometry, batch);
  check_tensors(batch);
  for (int i = 0; i < batch.count; ++i) check_sequence(geometry, batch[i].sequence);
}

void pack_rows(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch,
               std::byte* packed, RowSquares* squares) {
  check_items(geometry, batch);
  check_tensors(batch);
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::pack_rows(stream.native(), geometry, batch, packed, squares);
    }
  }
  stream.run([=] { cpu::pack_rows(geometry, batch, packed, squares); });
}

void store_rows(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch,
                const std::byte* packed) {
  check_items(geometry, batch);
  for (int i = 0; i < batch.count; ++i) check_sequence(geometry, batch[i].sequence);
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::store_rows(stream.native(), geometry, batch, packed);
    }
  }
  stream.run([=] { cpu::store_rows(geometry, batch, packed); });
}

void append_done(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch) {
  check_items(geometry, batch);
  for (int i = 0; i < batch.count; ++i) {
    if (batch[i].sequence.counters == nullptr)
      throw_error(ErrorCode::kInvalidArgument, "counters: expected a pointer, found null");
  }
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) return cuda::append_done(stream.native(), geometry, batch);
  }
  stream.run([=] { cpu::append_done(geometry, batch); });
}

void set_length(Stream& stream, SequenceCounters* counters, std::int64_t length,
                std::int64_t capacity) {
  if (counters == nullptr)
    throw_error(ErrorCode::kInvalidArgument, "counters: expected a pointer, found null");
  if (length < 0 || capacity < length) {
    throw_error(ErrorCode::kInvalidArgument,
                "length and capacity: expected 0 <= length <= capacity, found ", length, " and ",
                capacity);
  }
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::set_length(stream.native(), counters, length, capacity);
    }
  }
  stream.run([=] { cpu::set_length(counters, length, capacity); });
}

void patch_table(Stream& stream, std::byte** table, std::int64_t begin, const TablePatch& patch,
                 int count) {
  check_count("entries of a patch", count, kMaxTablePatch);
  if (begin < 0)
    throw_error(ErrorCode::kInvalidArgument, "begin: expected at least 0, found ", begin);
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::patch_table(stream.native(), table, begin, patch, count);
    }
  }
  stream.run([=] { cpu::patch_table(table, begin, patch, count); });
}

void gather_rows(Stream& stream, const KvGeometry& geometry, const SequenceBatch& sequences,
                 const QueryBatch& rows, const SelectionView& selection, bool pages_on_device,
                 StepFlags* flags) {
  check_geometry(geometry);
  check_count("sequences", sequences.count, kMaxBatch);
  check_count("rows", rows.count, kMaxBatch);
  for (int i = 0; i < sequences.count; ++i) check_sequence(geometry, sequences[i]);
  for (int i = 0; i < rows.count; ++i) {
    check_count("sequence of a row", rows[i].sequence, sequences.count - 1);
  }
  check_count("staged_capacity", selection.staged_capacity, selection.capacity);
  if (selection.staged == nullptr && selection.staged_capacity > 0) {
    throw_error(ErrorCode::kInvalidArgument, "staged: expected a staging area, found null");
  }
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::gather_rows(stream.native(), geometry, sequences, rows, selection,
                               pages_on_device, flags);
    }
  }
  stream.run(
      [=] { cpu::gather_rows(geometry, sequences, rows, selection, pages_on_device, flags); });
}

void check_queries(const KvGeometry& geometry, const QueryItems& items) {
  check_geometry(geometry);
  check_count("rows", items.count, kMaxBatch);
  for (int i = 0; i < items.count; ++i) {
    check_tensor("query", items[i].query);
    if (items[i].token < 0) {
      throw_error(ErrorCode::kInvalidArgument, "token: expected at least 0, found ",
                  items[i].token);
    }
  }
}

void pack_queries(Stream& stream, const KvGeometry& geometry, const QueryItems& items, float* out) {
  check_queries(geometry, items);
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::pack_queries(stream.native(), geometry, items, out);
    }
  }
  stream.run([=] { cpu::pack_queries(geometry, items, out); });
}

}  // namespace kvtier::transfer
