#include "transfer/device/cuda_check.h"
#include "transfer/kv/paged_rows_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace kvtier::transfer::cuda {
namespace {

constexpr int kThreads = 256;
/// Blocks over the entries of a list: each thread, or warp, takes several where there are more.
constexpr std::int64_t kMostBlocks = 64;

unsigned blocks_over(std::int64_t count, std::int64_t per_block) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((count + per_block - 1) / per_block, 1, kMostBlocks));
}

__device__ void count_fault(std::uint64_t* to) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), 1ULL);
}

// Grid: blocks over the table x sequences.
__global__ __launch_bounds__(kThreads) void read_table_rows(
    const __grid_constant__ TableInput input, std::int32_t* blocks, std::int64_t stride,
    SequenceCounters* counters, TableFaults* faults) {
  const std::int64_t s = blockIdx.y;
  const std::int64_t given = input.lengths[s * input.length_stride];
  const std::int64_t length = max(std::int64_t{0}, min(given, input.max_length));
  const std::int64_t used = (length + input.block_tokens - 1) / input.block_tokens;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < used;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int32_t id = input.blocks[s * input.stride + i];
    const bool inside = id >= 0 && id < input.num_blocks;
    if (!inside) count_fault(&faults->blocks);
    blocks[s * stride + i] = inside ? id : 0;
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  if (length != given) count_fault(&faults->lengths);
  SequenceCounters mine;
  mine.length = mine.capacity = length;
  counters[s] = mine;
}

struct ListArgs {
  SpanRule rule;
  SequenceBatch sequences;
  QueryBatch query_batch;
  SelectionView selection;
  AttendedList list;
  int kv_heads;
};

// Grid: blocks over entries x heads of the list x rows.
__global__ __launch_bounds__(kThreads) void list_rows(const __grid_constant__ ListArgs args) {
  const AttendedList& list = args.list;
  const SelectionView& selection = args.selection;
  const std::int64_t query_index = blockIdx.z;
  const std::int64_t head = blockIdx.y;
  const QueryToken& query = args.query_batch[static_cast<int>(query_index)];
  const AttendedSpans spans =
      attended_spans(args.rule, args.sequences[query.sequence].counters->length, query);
  const std::int64_t from = query_index * args.kv_heads + head;
  const AttendedTokens tokens(spans, selection.counts[from]);
  const std::int64_t count = min(tokens.count(), list.n);
  const std::int64_t to = query_index * list.heads + head;
  std::int32_t* ids = list.ids + query_index * list.query_stride + head * list.head_stride;
  float* bias = list.bias == nullptr
                    ? nullptr
                    : list.bias + query_index * list.bias_row_stride + head * list.bias_head_stride;

  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t end = list.counts == nullptr ? list.n : count;  // padded up to there
  for (std::int64_t i = first; i < end; i += std::int64_t{gridDim.x} * kThreads) {
    const bool inside = i < count;
    const std::int64_t chosen = inside ? tokens.chosen(i) : -1;
    const std::int64_t entry = from * selection.capacity + chosen;
    std::int32_t id = -1;
    if (inside) {
      id = chosen < 0 ? static_cast<std::int32_t>(tokens.num_static(i)) : selection.ids[entry];
    }
    ids[i] = id;
    if (bias != nullptr) {
      bias[i] = chosen < 0 || selection.bias == nullptr ? 0.0F : selection.bias[entry];
    }
    if (list.head_mask != nullptr) list.head_mask[to * list.n + i] = list.all_heads;
  }
  if (first == 0 && list.counts != nullptr) list.counts[to] = static_cast<std::int32_t>(count);
}

struct GatherArgs {
  SlotTables slots;
  PagedRows cache;
  QueryBatch query_batch;
  SelectionView list;
  int kv_heads;
  int half_vectors;  // of 16 bytes, of a key
};

__device__ const uint4* half_of(const PagedRows::Half& half, std::int64_t slot, int block_tokens,
                                std::int64_t head) {
  const std::int64_t element = slot / block_tokens * half.block_stride +
                               slot % block_tokens * half.token_stride + head * half.head_stride;
  return reinterpret_cast<const uint4*>(half.data + 2 * element);
}

// A warp per row. Grid: blocks over entries x KV heads x rows.
__global__ __launch_bounds__(kThreads) void gather_listed(const __grid_constant__ GatherArgs args) {
  constexpr int kWarps = kThreads / 32;
  const std::int64_t query_index = blockIdx.z;
  const std::int64_t lane_of_list = query_index * args.kv_heads + blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t count = args.list.counts[lane_of_list];
  const std::int32_t* table =
      args.slots.of(args.query_batch[static_cast<int>(query_index)].sequence);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count;
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t token = args.list.ids[lane_of_list * args.list.capacity + i];
    const std::int64_t slot = slot_of(table, args.slots.block_tokens, token);
    const uint4* key = half_of(args.cache.keys, slot, args.slots.block_tokens, blockIdx.y);
    const uint4* value = half_of(args.cache.values, slot, args.slots.block_tokens, blockIdx.y);
    auto* to = reinterpret_cast<uint4*>(args.list.staged) +
               (lane_of_list * args.list.staged_capacity + i) * 2 * args.half_vectors;
    for (int v = lane; v < 2 * args.half_vectors; v += 32) {
      to[v] = v < args.half_vectors ? key[v] : value[v - args.half_vectors];
    }
  }
}

}  // namespace

void read_tables(void* stream, const TableInput& input, std::int32_t* blocks, std::int64_t stride,
                 SequenceCounters* counters, TableFaults* faults) {
  if (input.sequences == 0) return;
  const std::int64_t most = (input.max_length + input.block_tokens - 1) / input.block_tokens;
  const dim3 grid(blocks_over(most, kThreads), static_cast<unsigned>(input.sequences));
  read_table_rows<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(input, blocks, stride,
                                                                            counters, faults);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void list_attended(void* stream, const SpanRule& rule, const SequenceBatch& sequences,
                   const QueryBatch& query_batch, int kv_heads, const SelectionView& selection,
                   const AttendedList& list) {
  if (query_batch.count == 0 || list.n == 0) return;
  const ListArgs args{.rule = rule,
                      .sequences = sequences,
                      .query_batch = query_batch,
                      .selection = selection,
                      .list = list,
                      .kv_heads = kv_heads};
  const dim3 grid(blocks_over(list.n, kThreads), static_cast<unsigned>(list.heads),
                  static_cast<unsigned>(query_batch.count));
  list_rows<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void gather_paged_rows(void* stream, const KvGeometry& geometry, const SlotTables& slots,
                       const PagedRows& cache, const QueryBatch& query_batch,
                       const SelectionView& list) {
  if (query_batch.count == 0 || list.capacity == 0) return;
  const GatherArgs args{.slots = slots,
                        .cache = cache,
                        .query_batch = query_batch,
                        .list = list,
                        .kv_heads = geometry.kv_heads,
                        .half_vectors = geometry.head_dim / 8};
  const dim3 grid(blocks_over(list.capacity, kThreads / 32),
                  static_cast<unsigned>(geometry.kv_heads),
                  static_cast<unsigned>(query_batch.count));
  gather_listed<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::transfer::cuda
