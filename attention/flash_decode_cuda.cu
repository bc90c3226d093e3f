#include "attention/flash_decode_kernels.h"
#include "attention/warp_attention.cuh"
#include "transfer/cuda_check.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cassert>

namespace kvtier::attention {
namespace {

using cuda::kTileRows;
using transfer::AttendedSpans;
using transfer::KvGeometry;
using transfer::SelectionView;
using transfer::SequenceView;
using transfer::cuda::kFullWarp;

constexpr int kMaxSplits = FlashDecode::kMaxSplits;
/// Blocks that an SM holds at any head_dim; a launch aims at one wave of them.
constexpr int kBlocksPerSm = 2;
constexpr int kMergeWarps = 4;  // of merge_results

/// Shape of a block. At head_dim 128 an SM has 128 KiB under way at the start of a wait and 64 KiB
/// while a tile is worked on, twice what covers the latency of HBM. A block fits the 99 KiB of
/// shared memory of the smallest GPU with the same instructions.
template <typename T, int D, int NT>
struct BlockShape {
  static constexpr int kWarps = D == 256 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = D == 64 ? 4 : D == 96 ? 3 : 2;  ///< Tiles of one warp.
  static constexpr int kWarpBytes = kStages * cuda::TileLayout<D>::kBytes;
  static constexpr int kSharedBytes =
      kWarps * kWarpBytes + cuda::QueryFragments<T, D, NT>::kSharedBytes;
  static_assert(kSharedBytes <= 98 * 1024);
  static_assert(kWarpBytes >= 8 * NT * (D + 4) * 4, "accumulators are merged in the tiles' place");
};

/// The rows that one (query row, KV head) attends in this part: a list, or the two spans.
struct RowSource {
  const KvGeometry& kv;
  const SequenceView& sequence;
  std::int64_t resident_begin = 0;
  int kv_head = 0;
  std::int64_t count = 0;
  AttendedSpans spans;
  const std::int32_t* ids = nullptr;  ///< nullptr: the spans.
  const std::uint16_t* masks = nullptr;
  const std::byte* staged = nullptr;
  std::int64_t num_staged = 0;

  struct Row {
    const std::byte* address = nullptr;  ///< nullptr: none, never seen.
    unsigned mask = 0;
  };

  __device__ Row row(std::int64_t i) const {
    if (ids == nullptr) {
      const std::int64_t token = i < spans.sink_end ? i : i - spans.sink_end + spans.tail_begin;
      return {row_address(kv, sequence, resident_begin, kv_head, token), 0xFFFFU};
    }
    if (i < num_staged) return {staged + i * kv.row_bytes(), masks[i]};
    return {row_address(kv, sequence, resident_begin, kv_head, ids[i]), masks[i]};
  }
};

/// Rows of a list that are in the staging area.
__device__ std::int64_t num_staged(const SelectionView& selection, std::int64_t count) {
  return selection.staged == nullptr ? 0 : min(count, selection.staged_capacity);
}

__device__ RowSource row_source(const AttendRequest& request, const SelectionView& selection,
                                int row, int kv_head) {
  const KvGeometry& kv = request.kv;
  const SequenceView& sequence = request.sequences[request.rows[row].sequence];
  RowSource source{.kv = kv, .sequence = sequence};
  source.resident_begin = sequence.counters->resident_begin;
  source.kv_head = kv_head;
  if (selection.ids == nullptr) {
    source.spans = attended_spans(request.rule, sequence.counters->length, request.rows[row]);
    source.count = source.spans.num_always();
    return source;
  }
  const std::int64_t list = std::int64_t{row} * kv.kv_heads + kv_head;
  source.count = selection.counts[list];
  source.ids = selection.ids + list * selection.capacity;
  source.masks = selection.head_mask + list * selection.capacity;
  source.num_staged = num_staged(selection, source.count);
  source.staged = selection.staged + list * selection.staged_capacity * kv.row_bytes();
  return source;
}

/// A warp starts copying a tile; lane r < 16 knows row r.
template <int D>
__device__ void load_tile(std::byte* tile, const RowSource::Row& row, const void* readable) {
  using Layout = cuda::TileLayout<D>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane < kTileRows) reinterpret_cast<unsigned*>(tile + Layout::kMasks)[lane] = row.mask;
  const unsigned base = transfer::cuda::shared_address(tile);
#pragma unroll
  for (int i = 0; i < kTileRows * Layout::kVectors / 32; ++i) {
    const int unit = i * 32 + lane;
    const int r = unit / Layout::kVectors;
    const int vector = unit % Layout::kVectors;
    const auto* from = reinterpret_cast<const std::byte*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row.address), r));
    transfer::cuda::copy_async_16(base + static_cast<unsigned>(r * Layout::kPitch + vector * 16),
                                  from != nullptr ? from + vector * 16 : readable, from != nullptr);
  }
}

/// Tokens of [begin, end) whose rows are in pages only.
__device__ std::int64_t num_in_pages(const KvGeometry& kv, std::int64_t resident_begin,
                                     std::int64_t begin, std::int64_t end) {
  const std::int64_t first = max(begin, std::int64_t{kv.sink_capacity});
  const std::int64_t last = kv.recent_capacity > 0 ? min(end, resident_begin) : end;
  return max(last - first, std::int64_t{0});
}

/// Index of the first of `ids[begin .. end)`, ascending, that is not below `bound`.
__device__ std::int64_t lower_bound(const std::int32_t* ids, std::int64_t begin, std::int64_t end,
                                    std::int64_t bound) {
  while (begin < end) {
    const std::int64_t middle = begin + (end - begin) / 2;
    if (ids[middle] < bound) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

/// One block counts the rows that the launch reads in place, while the others read them; counting
/// beside the reads would send an atomic over the link from every block.
__device__ void count_rows(const AttendRequest& request, const SelectionView& selection) {
  __shared__ unsigned long long totals[2];  // all rows, rows in pages
  if (threadIdx.x < 2) totals[threadIdx.x] = 0;
  __syncthreads();  // totals are zero before any thread adds to them
  unsigned long long all = 0;
  unsigned long long paged = 0;
  for (int i = static_cast<int>(threadIdx.x); i < request.rows.count * request.kv.kv_heads;
       i += static_cast<int>(blockDim.x)) {
    const RowSource source =
        row_source(request, selection, i / request.kv.kv_heads, i % request.kv.kv_heads);
    std::int64_t in_pages = 0;
    if (source.ids == nullptr) {
      const AttendedSpans& s = source.spans;
      in_pages = num_in_pages(request.kv, source.resident_begin, 0, s.sink_end) +
                 num_in_pages(request.kv, source.resident_begin, s.tail_begin, s.visible);
    } else {
      std::int64_t end = source.count;
      if (request.kv.recent_capacity > 0) {
        end = lower_bound(source.ids, source.num_staged, end, source.resident_begin);
      }
      in_pages = end - lower_bound(source.ids, source.num_staged, end, request.kv.sink_capacity);
    }
    all += static_cast<unsigned long long>(source.count - source.num_staged);
    paged += static_cast<unsigned long long>(in_pages);
  }
  atomicAdd(&totals[0], all);
  atomicAdd(&totals[1], paged);
  __syncthreads();  // all threads have added
  if (threadIdx.x != 0) return;
  const unsigned long long host = request.pages_on_device ? 0 : totals[1];
  if (host != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->rows_fetched_host), host);
  }
  if (totals[0] != host) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->rows_resident),
              totals[0] - host);
  }
}

/// Merges the states of the warps, in their order; `weights` are those of their accumulators.
template <int kWarps>
__device__ SoftmaxState merge_warps(const float2* states, int stride, float (&weights)[kWarps]) {
  SoftmaxState total;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float2 one = states[w * stride];
    const MergeWeights merged = merge(total, SoftmaxState{one.x, one.y});
    total = merged.state;
    weights[w] = merged.b;
#pragma unroll
    for (int earlier = 0; earlier < w; ++earlier) weights[earlier] *= merged.a;
  }
  return total;
}

/// Block (split, KV head, query row) attends over its share of the rows; its warps take tiles of 16
/// in turn, each at its own pace. Blocks past the last split count rows.
template <typename T, int D, int NT>
__global__ void __launch_bounds__(BlockShape<T, D, NT>::kThreads, kBlocksPerSm)
    attend_kernel(const __grid_constant__ AttendRequest request,
                  const __grid_constant__ SelectionView selection,
                  const __grid_constant__ PartialView partial, int splits) {
  using Layout = cuda::TileLayout<D>;
  using Shape = BlockShape<T, D, NT>;
  constexpr int kWarps = Shape::kWarps;
  constexpr int kStages = Shape::kStages;
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ float2 states[kWarps][8 * NT];

  const int split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int row = static_cast<int>(blockIdx.z);
  if (split == splits) {
    if (kv_head == 0 && row == 0) count_rows(request, selection);
    return;
  }
  const int group = request.kv.group();
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first_head = std::int64_t{row} * request.kv.query_heads + kv_head * group;
  const std::int64_t first_slot = first_head * kMaxSplits + split;

  const RowSource source = row_source(request, selection, row, kv_head);
  const std::int64_t tiles = (source.count + kTileRows - 1) / kTileRows;
  const std::int64_t share = (tiles + splits - 1) / splits;
  const std::int64_t first = split * share;
  const std::int64_t last = min(tiles, first + share);
  if (first >= last) {
    if (static_cast<int>(threadIdx.x) < group) {
      partial.state[first_slot + std::int64_t{threadIdx.x} * kMaxSplits] = SoftmaxState{};
    }
    return;
  }

  std::byte* const stages = shared + warp * Shape::kWarpBytes;
  std::int64_t next_tile = first + warp;
  int next_stage = 0;
  RowSource::Row next_row;
  const auto find_next_row = [&] {
    const std::int64_t i = next_tile * kTileRows + lane;
    next_row = {};
    if (next_tile < last && lane < kTileRows && i < source.count) next_row = source.row(i);
  };
  // One group of copies per call, empty past the end, so that waiting can count groups.
  const auto load_next_tile = [&] {
    if (next_tile < last) {
      load_tile<D>(stages + next_stage * Layout::kBytes, next_row, request.queries);
      next_tile += kWarps;
      find_next_row();
    }
    transfer::cuda::copy_async_commit();
    next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
  };
  find_next_row();
  for (int i = 0; i + 1 < kStages; ++i) load_next_tile();

  cuda::QueryFragments<T, D, NT> queries;
  queries.load(request.queries + first_head * D, group, request.softmax_scale,
               reinterpret_cast<uint4*>(shared + kWarps * Shape::kWarpBytes));
  __syncthreads();  // fragments in shared memory are complete

  cuda::WarpAttention<T, D, NT> attention;
  attention.clear();
  int stage = 0;
  for (std::int64_t tile = first + warp; tile < last; tile += kWarps) {
    load_next_tile();
    transfer::cuda::copy_async_wait<kStages - 1>();
    __syncwarp();  // every lane's copies of this tile have arrived
    attention.attend(queries, stages + stage * Layout::kBytes, request.logit_softcap);
    __syncwarp();  // no lane reads the tile any more when it is overwritten
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  transfer::cuda::copy_async_wait<0>();
  __syncwarp();
  attention.store(states[warp], reinterpret_cast<float*>(stages));
  __syncthreads();  // all warps have stored their states and accumulators

  for (int i = static_cast<int>(threadIdx.x); i < group * D; i += Shape::kThreads) {
    const int head = i / D;
    float weights[kWarps];
    const SoftmaxState state = merge_warps<kWarps>(&states[0][head], 8 * NT, weights);
    float sum = 0.0F;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto* out = reinterpret_cast<const float*>(shared + w * Shape::kWarpBytes);
      sum += weights[w] * out[head * (D + 4) + i % D];
    }
    const std::int64_t slot = first_slot + std::int64_t{head} * kMaxSplits;
    partial.out[slot * D + i % D] = sum;
    if (i % D == 0) partial.state[slot] = state;
  }
}

__device__ void store_output(DType dtype, void* out, std::int64_t i, float value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<__half*>(out)[i] = __float2half_rn(value);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<float*>(out)[i] = value;
  }
}

/// Merges the states of a warp; every lane receives lane 0's result.
__device__ SoftmaxState merge_warp(SoftmaxState state) {
  for (int distance = 16; distance > 0; distance /= 2) {
    SoftmaxState other;
    other.max = __shfl_xor_sync(kFullWarp, state.max, distance);
    other.sum = __shfl_xor_sync(kFullWarp, state.sum, distance);
    state = merge(state, other).state;
  }
  state.max = __shfl_sync(kFullWarp, state.max, 0);
  state.sum = __shfl_sync(kFullWarp, state.sum, 0);
  return state;
}

__device__ float weight_in(const SoftmaxState& part, const SoftmaxState& total) {
  return part.sum > 0.0F ? expf(part.max - total.max) * total.inverse_sum() : 0.0F;
}

/// Block (query head, query row), a thread per coordinate.
__global__ void merge_kernel(const __grid_constant__ KvGeometry kv,
                             const __grid_constant__ PartialParts parts,
                             const __grid_constant__ OutputBatch outputs) {
  static_assert(kMaxSplits == 32, "a lane per split");
  __shared__ float weights[2][kMaxSplits];
  const int head = static_cast<int>(blockIdx.x);
  const std::int64_t slot = (std::int64_t{blockIdx.y} * kv.query_heads + head) * kMaxSplits;
  const OutputItem& item = outputs[static_cast<int>(blockIdx.y)];
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x);
    SoftmaxState states[2];
    for (int p = 0; p < 2; ++p) {
      if (lane < parts.splits[p]) states[p] = parts.parts[p].state[slot + lane];
    }
    const SoftmaxState total = merge_warp(merge(states[0], states[1]).state);
    for (int p = 0; p < 2; ++p) weights[p][lane] = weight_in(states[p], total);
    if (lane == 0 && item.lse != nullptr) item.lse[head * item.lse_stride] = total.lse();
  }
  __syncthreads();  // weights are complete

  // Four threads per element, each over every fourth split; summed in their order.
  __shared__ float quarters[4][256];
  const int d = static_cast<int>(threadIdx.x) % kv.head_dim;
  const int quarter = static_cast<int>(threadIdx.x) / kv.head_dim;
  float sum = 0.0F;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const float* out = parts.parts[p].out + slot * kv.head_dim + d;
#pragma unroll
    for (int i = 0; i < kMaxSplits / 4; ++i) {
      const int s = i * 4 + quarter;
      // Accumulators of empty splits were never written.
      const float weight = weights[p][s];
      if (weight != 0.0F) sum += weight * out[std::int64_t{s} * kv.head_dim];
    }
  }
  quarters[quarter][d] = sum;
  __syncthreads();  // quarters are complete
  if (quarter != 0) return;
  sum = quarters[0][d] + quarters[1][d] + quarters[2][d] + quarters[3][d];
  store_output(item.dtype, item.out, head * item.head_stride + d, sum);
}

/// A warp per head; `head_dim` is a multiple of 32.
__global__ void __launch_bounds__(32 * kMergeWarps)
    merge_results_kernel(const __grid_constant__ MergeBatch parts, std::int64_t num_heads,
                         int head_dim, void* out, DType out_dtype, float* lse) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t head = std::int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / 32;
  if (head >= num_heads) return;
  SoftmaxState state;
  if (lane < parts.count) {
    state.max = parts[lane].lse[head];
    state.sum = state.max == -INFINITY ? 0.0F : 1.0F;
  }
  const SoftmaxState total = merge_warp(state);
  const float weight = weight_in(state, total);
  for (int d = lane; d < head_dim; d += 32) {
    const std::int64_t i = head * head_dim + d;
    float sum = 0.0F;
    for (int p = 0; p < parts.count; ++p) {
      const float w = __shfl_sync(kFullWarp, weight, p);
      if (w != 0.0F) sum += w * parts[p].out[i];
    }
    store_output(out_dtype, out, i, sum);
  }
  if (lane == 0 && lse != nullptr) lse[head] = total.lse();
}

template <typename T, int D, int NT>
void launch_attend(void* stream, const AttendRequest& request, const SelectionView& selection,
                   const PartialView& partial, int splits, bool counted) {
  using Shape = BlockShape<T, D, NT>;
  const auto kernel = attend_kernel<T, D, NT>;
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         Shape::kSharedBytes));
  const dim3 grid(static_cast<unsigned>(splits + (counted ? 1 : 0)),
                  static_cast<unsigned>(request.kv.kv_heads),
                  static_cast<unsigned>(request.rows.count));
  kernel<<<grid, Shape::kThreads, Shape::kSharedBytes, transfer::cuda::stream_of(stream)>>>(
      request, selection, partial, splits);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

template <typename T, int NT, typename... Args>
void launch_head_dim(int head_dim, const Args&... args) {
  switch (head_dim) {
    case 64:
      return launch_attend<T, 64, NT>(args...);
    case 96:
      return launch_attend<T, 96, NT>(args...);
    case 128:
      return launch_attend<T, 128, NT>(args...);
    default:
      assert(head_dim == 256);
      return launch_attend<T, 256, NT>(args...);
  }
}

/// `selection.ids` is nullptr for the spans.
void attend(void* stream, const AttendRequest& request, const SelectionView& selection,
            const PartialView& partial, int splits, bool counted) {
  assert(request.kv.group() <= 16);
  const auto launch = [&](auto type) {
    using T = decltype(type);
    if (request.kv.group() <= 8) {
      launch_head_dim<T, 1>(request.kv.head_dim, stream, request, selection, partial, splits,
                            counted);
    } else {
      launch_head_dim<T, 2>(request.kv.head_dim, stream, request, selection, partial, splits,
                            counted);
    }
  };
  request.kv.dtype == DType::kFloat16 ? launch(__half{}) : launch(__nv_bfloat16{});
}

}  // namespace

namespace cuda {

int num_splits(const AttendRequest& request, std::int64_t tokens) {
  int device = 0;
  int sms = 0;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  KVTIER_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const std::int64_t lanes =
      std::max<std::int64_t>(std::int64_t{request.rows.count} * request.kv.kv_heads, 1);
  const std::int64_t wave = std::int64_t{sms} * kBlocksPerSm / lanes;
  constexpr std::int64_t kRowsPerPass = std::int64_t{4} * kTileRows;  // of a block's four warps
  const std::int64_t useful = (tokens + kRowsPerPass - 1) / kRowsPerPass;
  return static_cast<int>(std::clamp<std::int64_t>(std::min(wave, useful), 1, kMaxSplits));
}

void spans(void* stream, const AttendRequest& request, const PartialView& partial, int splits) {
  if (request.rows.count == 0) return;
  attend(stream, request, {}, partial, splits, request.flags != nullptr);
}

void selected(void* stream, const AttendRequest& request, const SelectionView& selection,
              const PartialView& partial, int splits) {
  if (request.rows.count == 0) return;
  const bool in_place =
      selection.staged == nullptr || selection.staged_capacity < selection.capacity;
  attend(stream, request, selection, partial, splits, in_place && request.flags != nullptr);
}

void merge(void* stream, const AttendRequest& request, const PartialParts& parts,
           const OutputBatch& outputs) {
  if (request.rows.count == 0) return;
  const dim3 grid(static_cast<unsigned>(request.kv.query_heads),
                  static_cast<unsigned>(request.rows.count));
  merge_kernel<<<grid, static_cast<unsigned>(4 * request.kv.head_dim), 0,
                 transfer::cuda::stream_of(stream)>>>(request.kv, parts, outputs);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void merge_results(void* stream, const MergeBatch& parts, std::int64_t num_heads_total,
                   int head_dim, void* out, DType out_dtype, float* lse) {
  if (num_heads_total == 0) return;
  const auto blocks = static_cast<unsigned>((num_heads_total + kMergeWarps - 1) / kMergeWarps);
  merge_results_kernel<<<blocks, 32 * kMergeWarps, 0, transfer::cuda::stream_of(stream)>>>(
      parts, num_heads_total, head_dim, out, out_dtype, lse);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace cuda

}  // namespace kvtier::attention
