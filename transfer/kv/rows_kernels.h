#pragma once

#include "transfer/kv/frame_factors.h"
#include "transfer/kv/rows.h"

/// The two implementations behind transfer/kv/rows.h; arguments as there.
namespace kvtier::transfer {

namespace cpu {
void pack_rows(const KvGeometry& geometry, const AppendBatch& batch, std::byte* packed,
               RowSquares* squares);
void store_rows(const KvGeometry& geometry, const AppendBatch& batch, const std::byte* packed);
void append_done(const KvGeometry& geometry, const AppendBatch& batch);
void set_length(SequenceCounters* counters, std::int64_t length, std::int64_t capacity);
void patch_table(std::byte** table, std::int64_t begin, const TablePatch& patch, int count);
void gather_rows(const KvGeometry& geometry, const SequenceBatch& sequences,
                 const QueryBatch& query_batch, const SelectionView& selection,
                 bool pages_on_device, StepFlags* flags);
void read_sinks(const KvGeometry& geometry, const SequenceView& sequence, std::int64_t tokens);
void pack_queries(const KvGeometry& geometry, const QueryItems& items, float* out);
/// Lets `first_nonfinite` be this place if it is the least.
void note_place(StepFlags* flags, const NonfinitePlace& place);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
void pack_rows(void* stream, const KvGeometry& geometry, const AppendBatch& batch,
               std::byte* packed, RowSquares* squares);
void store_rows(void* stream, const KvGeometry& geometry, const AppendBatch& batch,
                const std::byte* packed, const FrameFactors& factors);
void append_done(void* stream, const KvGeometry& geometry, const AppendBatch& batch);
void set_length(void* stream, SequenceCounters* counters, std::int64_t length,
                std::int64_t capacity);
void patch_table(void* stream, std::byte** table, std::int64_t begin, const TablePatch& patch,
                 int count);
void gather_rows(void* stream, const KvGeometry& geometry, const SequenceBatch& sequences,
                 const QueryBatch& query_batch, const SelectionView& selection,
                 bool pages_on_device, StepFlags* flags);
void read_sinks(void* stream, const KvGeometry& geometry, const SequenceView& sequence,
                std::int64_t tokens);
void pack_queries(void* stream, const KvGeometry& geometry, const QueryItems& items, float* out);
}  // namespace cuda

}  // namespace kvtier::transfer
