#include "attention/flash_decode_kernels.h"
#include "attention/parts.cuh"
#include "attention/row_set.cuh"
#include "attention/warp_attention.cuh"
#include "transfer/device/arena.h"
#include "transfer/device/bulk_copy.cuh"
#include "transfer/device/head_dim_cuda.cuh"
#include "transfer/device/launch_cuda.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/row_cache/row_cache_places_cuda.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cassert>

namespace kvtier::attention {
namespace {

using cuda::Parts;
using cuda::Plan;
using cuda::RowCounts;
using cuda::RowFinder;
using cuda::RowSet;
using cuda::RowTotals;
using cuda::Workspace;
using transfer::QueryItem;
using transfer::QueryItems;
using transfer::SelectionView;
using transfer::cuda::CopyBarrier;

/// Two blocks of an SM, so that one works while the other changes its set or merges.
constexpr int kBlocksPerSm = 2;
/// Where they attend while a gather runs: they must find room beside it.
constexpr int kBlocksPerSmBeside = 1;
/// Most blocks of a launch; a GPU with more SMs leaves some idle.
constexpr int kMaxBlocks = 320;
constexpr int kMaxGroup = 16;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxStages = 4;

/// Counts queries with NaN or infinity; each block looks at some.
__device__ __noinline__ void count_nonfinite(const transfer::KvGeometry& kv,
                                             const QueryItems& items) {
  for (auto q = static_cast<int>(blockIdx.x); q < items.count; q += static_cast<int>(gridDim.x)) {
    if (items[q].flags == nullptr) continue;
    transfer::cuda::pack_query(items[q], kv.query_heads(), kv.head_dim, nullptr);
  }
}

/// Shape of a block. With three stages at head_dim 128 an SM has 192 KiB under way while it waits,
/// five times what covers the latency of HBM.
template <typename T, int D, int NT>
struct BlockShape {
  static constexpr int kWarps = D == 256 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStageBytes = kWarps * cuda::TileLayout<D>::kBytes;
  static constexpr int kQueryBytes = cuda::QueryFragments<T, D, NT>::kSharedBytes;
  /// One stage must hold what is written in the place of the tiles: accumulators of the warps.
  static_assert(cuda::TileLayout<D>::kBytes >= 8 * NT * (D + 4) * 4);
  /// And all of it what a block merges of a run: states, and a vector of each thread.
  static constexpr int kMergeBytes =
      cuda::most_in_run(kMaxBlocks) * (8 * NT * static_cast<int>(sizeof(float2)) + kThreads * 16);
};

Workspace workspace_in(std::byte* memory, const FlashDecodeLimits& limits,
                       std::size_t* bytes = nullptr) {
  const auto heads = static_cast<std::size_t>(limits.query_heads);
  constexpr std::size_t kSlots = std::size_t{2} * kMaxBlocks;
  const std::size_t partials = kSlots * std::min<std::size_t>(heads, kMaxGroup);
  transfer::Arena arena(memory);
  const Workspace workspace{
      .no_row = arena.take<std::byte>(4 * kMaxHeadDim),
      .counts = arena.take<RowCounts>(1),
      .tickets = arena.take<unsigned>(static_cast<std::size_t>(limits.num_queries) * heads),
      .run_tickets = arena.take<unsigned>(kSlots),
      .states = arena.take<float2>(partials),
      .out = arena.take<float>(partials * static_cast<std::size_t>(limits.head_dim))};
  if (bytes != nullptr) *bytes = arena.bytes();
  return workspace;
}

/// The first block counts what the plan knows, while copies cross the memory system: all rows when
/// pages are on the device. Otherwise rows in pages are counted as they are found.
__device__ void count_planned(const AttendRequest& request, const SelectionView& selection,
                              const Workspace& workspace, const RowTotals& totals) {
  const unsigned long long in_place = transfer::cuda::warp_sum(totals.in_place);
  const unsigned long long listed = transfer::cuda::warp_sum(totals.listed);
  if (threadIdx.x % 32 != 0) return;
  if (selection.staged_capacity == 0) transfer::cuda::raise(&request.flags->rows_selected, listed);
  if (request.pages_on_device) {
    transfer::cuda::raise(&request.flags->rows_resident, in_place);
  } else {
    atomicAdd(&workspace.counts->in_place, in_place);
  }
}

/// Every block adds the rows that it found in pages on the host; the last one adds them for the
/// host, for each addition crosses the link.
__device__ void count_found(const AttendRequest& request, const Workspace& workspace, int blocks,
                            unsigned in_pages) {
  RowCounts& counts = *workspace.counts;
  const unsigned found = transfer::cuda::warp_sum(in_pages);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&counts.in_pages, static_cast<unsigned long long>(found));
    __threadfence();  // the additions are seen by the block that sees this one done
  }
  __syncthreads();  // all warps have added
  if (threadIdx.x != 0) return;
  if (atomicAdd(&counts.blocks_done, 1U) + 1 != static_cast<unsigned>(blocks)) return;
  __threadfence();
  const unsigned long long paged = atomicExch(&counts.in_pages, 0ULL);
  const unsigned long long all = atomicExch(&counts.in_place, 0ULL);
  counts.blocks_done = 0;
  transfer::cuda::raise(&request.flags->rows_fetched_host, paged);
  transfer::cuda::raise(&request.flags->rows_resident, all - paged);
}

/// Which tiles a block has of a set, and in which order.
struct Share {
  int index;  ///< Of the set.
  int first;
  int last;
  int tiles;  ///< Of the set,
  int parts;  ///< and its parts.

  friend bool operator==(const Share&, const Share&) = default;
};

__device__ void prefetch_to_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(address)));
}
__device__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

/// Asks for the page addresses of a set that are needed once its tokens are known: L1 for all of
/// them where they are few, else L2, for which the blocks of a set share them.
template <int kWarps>
__device__ void prefetch_pages(const AttendRequest& request, const SelectionView& selection,
                               const cuda::Plan<kWarps>& plan) {
  constexpr int kLine = 128 / sizeof(void*);
  const transfer::SequenceView& sequence =
      request.sequences[request.query_batch[plan.set.query_index].sequence];
  const auto tokens = static_cast<unsigned>(plan.set.tail_begin);
  if (tokens == 0) return;  // nothing is selected
  if (threadIdx.x == 0) {   // the list is not there yet, but where it will be
    prefetch_to_l2(selection.ids + plan.index * selection.capacity);
    prefetch_to_l2(selection.head_mask + plan.index * selection.capacity);
  }
  const unsigned pages = request.kv.page_of(tokens) + 1;
  const unsigned threads = 32 * kWarps;
  if (pages <= threads * kLine) {
    if (threadIdx.x * kLine < pages) prefetch_to_l1(sequence.pages + threadIdx.x * kLine);
    return;
  }
  const bool shared = plan.set_blocks > 0;
  const unsigned block = shared ? blockIdx.x - static_cast<unsigned>(plan.first_block) : 0;
  const unsigned blocks = shared ? static_cast<unsigned>(plan.set_blocks) : 1;
  for (unsigned i = (block * threads + threadIdx.x) * kLine; i < pages;
       i += blocks * threads * kLine) {
    prefetch_to_l2(sequence.pages + i);
  }
}

/// A block attends to its share of the tiles of all sets, one set after another; its warps take
/// tiles in turn, each at its own pace, with `num_stages` tiles in shared memory. The last block to
/// finish a set merges it. `kInt8`: pages are of int8.
template <typename T, int D, int NT, bool kInt8>
__global__ void __launch_bounds__(BlockShape<T, D, NT>::kThreads, kBlocksPerSm)
    attend_kernel(const __grid_constant__ AttendRequest request,
                  const __grid_constant__ QueryItems items,
                  const __grid_constant__ SelectionView selection,
                  const __grid_constant__ OutputBatch outputs,
                  const __grid_constant__ Workspace workspace, int num_stages) {
  using Layout = cuda::TileLayout<D>;
  using Shape = BlockShape<T, D, NT>;
  constexpr int kWarps = Shape::kWarps;
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ float2 states[kWarps][8 * NT];
  __shared__ CopyBarrier barriers[kWarps][kMaxStages];
  __shared__ __align__(16) std::byte plan_memory[sizeof(Plan<kWarps>)];
  __shared__ CopyBarrier merge_barrier;
  __shared__ Share early_share;
  __shared__ bool merges;
  auto& plan = *reinterpret_cast<Plan<kWarps>*>(plan_memory);

  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < num_stages; ++i) barriers[warp][i].init();
    if (warp == 0) merge_barrier.init();
    transfer::cuda::publish_barriers();
  }
  __syncwarp();
  // Missing rows are on their way: what is waited for first is where the others are.
  const bool placed = request.places.lists != nullptr;
  const bool k_known = request.k_known && !placed;
  bool early = request.appending_tokens > 0;
  if (placed) {
    transfer::cuda::wait_for_places(request.places.lists, cuda::num_sets(request));
  } else if (!k_known && !early) {
    transfer::cuda::wait_for_previous();
  }
  const int block = static_cast<int>(blockIdx.x);
  const int group = request.kv.group;
  std::byte* const stages = shared + warp * num_stages * Layout::kBytes;
  std::byte* const query_memory = shared + num_stages * Shape::kStageBytes;
  cuda::StagedQueries<D, NT, Shape::kThreads> staged_queries;
  cuda::QueryFragments<T, D, NT> queries;
  cuda::WarpAttention<T, D, NT> attention;
  int stage_in = 0;
  int stage_out = 0;
  unsigned parity = 0;  // of the phase of stage_out
  const auto next_out = [&] {
    stage_out = stage_out + 1 == num_stages ? 0 : stage_out + 1;
    if (stage_out == 0) parity ^= 1U;
  };
  int queries_of = -1;  // the set whose queries the warps have
  int started = 0;      // tiles of this warp and part
  // The append has changed the shares: tiles that were started early are of no use.
  const auto drop_started = [&] {
    for (; started > 0; --started) {
      barriers[warp][stage_out].wait(parity);
      next_out();
    }
  };
  unsigned merge_parity = 0;
  unsigned in_pages = 0;
  unsigned begin = 0;
  RowSet set;
  for (int part = 0;;) {
    if (part == 0) {
      const RowTotals totals = cuda::make_plan<kWarps>(request, selection, plan);
      if (block >= plan.blocks) {
        drop_started();
        transfer::cuda::wait_for_previous();
        if (early) {
          __syncthreads();  // all threads have read the plan
          early = false;
          continue;
        }
        transfer::cuda::let_next_start();
        if (queries_of < 0) count_nonfinite(request.kv, items);
        return;
      }
      if (block == 0 && !early && request.flags != nullptr) {
        count_planned(request, selection, workspace, totals);
      }
      set = plan.set;
      begin = plan.begin;
    }
    const int first = static_cast<int>(begin - set.first_tile);
    const int last = static_cast<int>(min(set.tiles(), plan.end - set.first_tile));
    const int count = max(last - first - warp + kWarps - 1, 0) / kWarps;  // tiles of this warp
    const bool whole = first == 0 && last == static_cast<int>(set.tiles());
    const Parts parts(plan, set);
    const TileOrder order(set.tiles(), parts.count);
    const Share share{plan.index + part, first, last, static_cast<int>(set.tiles()), parts.count};
    if (started > 0 && !(share == early_share)) drop_started();
    const bool same_queries = share.index == queries_of;
    if (!same_queries) {
      staged_queries.load(items[set.query_index], set.kv_head * group, group);
    }
    if (part == 0 && k_known) {
      prefetch_pages(request, selection, plan);
      transfer::cuda::wait_for_previous();
    }
    if (part == 0 && !placed && !early) transfer::cuda::let_next_start();
    RowFinder<D, kWarps, kInt8> rows(request, selection, set, order, workspace.no_row,
                                     first + warp + started / 2 * 2 * kWarps, last);
    int startable = count;
    if (placed || early) {
      const int tiles = placed ? cuda::tiles_not_missing(request, selection, set)
                               : max(set.count - request.appending_tokens, 0) / cuda::kTileRows;
      startable = order.num_below(tiles, first + warp, kWarps, count);
    }
    const auto start_next = [&] {
      if (started == startable) return;
      std::byte* const tile = stages + stage_in * Layout::kBytes;
      const int half = started % 2;
      if (lane / 16 == half) {
        reinterpret_cast<unsigned*>(tile + Layout::kMasks)[lane % 16] = rows.row().mask;
        reinterpret_cast<unsigned*>(tile + Layout::kBiases)[lane % 16] = rows.row().bias;
        if constexpr (kInt8) cuda::row_scales<D>(tile, lane % 16) = rows.row().scales;
      }
      if constexpr (kInt8) {
        barriers[warp][stage_in].template start_row_ends<4 * D, Layout::kPitch>(
            tile, rows.row().address(), rows.row().bytes(), half * 16);
      } else {
        barriers[warp][stage_in].template start_rows<4 * D, Layout::kPitch>(
            tile, rows.row().address(), half * 16);
      }
      stage_in = stage_in + 1 == num_stages ? 0 : stage_in + 1;
      if (half == 1) rows.next_pair();
      ++started;
    };
    // The copy engine takes a tile of each warp or two at once. With more, the warp would wait for
    // room in place of working on what has come.
#pragma unroll 1
    for (int i = started; i < min(num_stages, 2); ++i) start_next();
    if (!same_queries) {
      queries.make(staged_queries, items[set.query_index].query.dtype, group, request.softmax_scale,
                   query_memory);
      __syncthreads();  // the fragments are there
      if (queries_of < 0) count_nonfinite(request.kv, items);
      queries_of = share.index;
    }
    if (early) {
      if (threadIdx.x == 0) early_share = share;
      transfer::cuda::wait_for_previous();
      __syncthreads();  // all threads have read the plan
      early = false;
      continue;
    }
    attention.clear();
    int free_stages = 0;
    int unused_stages = max(num_stages - started, 0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i == startable) {
        transfer::cuda::wait_for_previous();
        transfer::cuda::let_next_start();
        startable = count;
        free_stages = num_stages;
        unused_stages = 0;
      }
#pragma unroll 1
      for (; free_stages > 0; --free_stages) start_next();
      barriers[warp][stage_out].wait(parity);
      __syncwarp();  // masks are written
      if constexpr (kInt8) cuda::widen_int8<D>(stages + stage_out * Layout::kBytes);
      attention.attend(queries, stages + stage_out * Layout::kBytes, request.logit_softcap,
                       rows.bias());
      __syncwarp();  // no lane reads the tile any more when it is overwritten
      next_out();
      free_stages = 1 + unused_stages;
      unused_stages = 0;
    }
    in_pages += rows.num_in_pages();
    started = 0;
    attention.store(states[warp], reinterpret_cast<float*>(stages));
    __syncthreads();  // all warps have stored their states and accumulators

    const OutputItem& item = outputs[set.query_index];
    const std::int64_t slot = 2 * std::int64_t{block} + (part == 0 ? 0 : 1);
    const auto state = cuda::merge_warps<kWarps>(&states[0][0], 8 * NT);
    if (const auto head = static_cast<int>(threadIdx.x) / kWarps;
        head < group && threadIdx.x % kWarps == 0) {
      const int query_head = set.kv_head * group + head;
      if (!whole) {
        workspace.states[slot * group + head] = {state.max, state.sum};
      } else if (item.lse != nullptr) {
        item.lse[query_head * item.lse_stride] = state.lse();
      }
    }
    __syncthreads();  // weights of all heads are there
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < group * (D / 4); i += Shape::kThreads) {
      const int head = i / (D / 4);
      const int x = i % (D / 4) * 4;
      float4 sum{};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const auto* out = reinterpret_cast<const float*>(shared + w * num_stages * Layout::kBytes);
        cuda::add_scaled(sum, whole ? states[w][head].y : states[w][head].x,
                         *reinterpret_cast<const float4*>(out + head * (D + 4) + x));
      }
      if (whole) {
        cuda::store_output(item, set.kv_head * group + head, x, sum);
      } else {
        *reinterpret_cast<float4*>(workspace.out + (slot * group + head) * D + x) = sum;
      }
    }
    if (!whole) {
      const int merge_bytes = max(num_stages * Shape::kStageBytes, Shape::kMergeBytes);
      const cuda::Runs runs(parts.count, group * (D * 4 + static_cast<int>(sizeof(float2))),
                            merge_bytes - 16);
      // Whether this block is the last of `count` to have written a part.
      const auto is_last = [&](unsigned* ticket, int count) {
        transfer::cuda::release_to_copies();
        __syncthreads();  // all threads have written, and read the tiles' memory
        if (threadIdx.x == 0) {
          __threadfence();  // this part is seen by the block that sees the ticket
          merges = atomicAdd(ticket, 1U) + 1 == static_cast<unsigned>(count);
          if (merges) *ticket = 0;
          __threadfence();
        }
        __syncthreads();  // `merges` is set
        return merges;
      };
      unsigned* const ticket =
          workspace.tickets + set.query_index * request.kv.kv_heads + set.kv_head;
      // The run that this block's part is in, then all runs.
#pragma unroll 1
      for (bool all = runs.count() == 1;; all = true) {
        const cuda::PartRun run = !all               ? runs.of_part(parts.of_block(block))
                                  : runs.count() > 1 ? runs.merged()
                                                     : runs.of_part(0);
        if (!is_last(all ? ticket : workspace.run_tickets + parts.slot(run.first), run.count))
          break;
        cuda::merge_parts<D, kWarps>(request, workspace, all ? &item : nullptr, set, parts, run,
                                     merge_barrier, merge_parity, shared, merge_bytes);
        if (all) break;
      }
    }
    begin = set.first_tile + static_cast<unsigned>(last);
    if (begin == plan.end) break;
    RowSet next = cuda::row_set(request, selection, plan.index + ++part);
    next.first_tile = set.first_tile + set.tiles();
    set = next;
    transfer::cuda::release_to_copies();
    __syncthreads();  // no thread uses the tiles' memory, the states or the flag any more
  }
  if (placed) {
    transfer::cuda::wait_for_previous();
    transfer::cuda::let_next_start();
  }
  if (request.flags != nullptr && !request.pages_on_device) {
    count_found(request, workspace, plan.blocks, in_pages);
  }
}

int attribute(cudaDeviceAttr which) {
  int device = 0;
  int value = 0;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  KVTIER_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

/// Tiles per warp: what lets two blocks stay on an SM, or one where that leaves a single tile.
int num_stages(int stage_bytes, int fixed_bytes) {
  constexpr int kStaticBytes = 2048;  // of the kernel, and what the system takes of each block
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int share = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / kBlocksPerSm;
  const int stages = (std::min(most, share) - kStaticBytes - fixed_bytes) / stage_bytes;
  const int alone = (most - kStaticBytes - fixed_bytes) / stage_bytes;
  return std::clamp(stages >= 2 ? stages : alone, 1, kMaxStages);
}

template <typename T, int D, int NT, bool kInt8>
void launch_attend(void* stream, const AttendRequest& request, const QueryItems& items,
                   const SelectionView& selection, const OutputBatch& outputs,
                   const Workspace& workspace) {
  using Shape = BlockShape<T, D, NT>;
  const auto kernel = attend_kernel<T, D, NT, kInt8>;
  const int stages = num_stages(Shape::kStageBytes, Shape::kQueryBytes);
  const int per_sm = request.places.lists != nullptr ? kBlocksPerSmBeside : kBlocksPerSm;
  const int blocks = std::min(per_sm * attribute(cudaDevAttrMultiProcessorCount), kMaxBlocks);
  const int bytes = std::max(stages * Shape::kStageBytes, Shape::kMergeBytes) + Shape::kQueryBytes;
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  transfer::cuda::launch_overlapping(transfer::cuda::stream_of(stream), kernel,
                                     dim3(static_cast<unsigned>(blocks)), Shape::kThreads,
                                     static_cast<std::size_t>(bytes), request, items, selection,
                                     outputs, workspace, stages);
}

template <typename T, bool kInt8, typename... Args>
void launch_shape(const transfer::KvGeometry& kv, const Args&... args) {
  assert(kv.group <= kMaxGroup);
  transfer::cuda::with_head_dim(kv.head_dim, [&](auto head_dim) {
    if (kv.group > 8) return launch_attend<T, head_dim(), 2, kInt8>(args...);
    launch_attend<T, head_dim(), 1, kInt8>(args...);
  });
}

}  // namespace

namespace cuda {

std::size_t workspace_bytes(const FlashDecodeLimits& limits) {
  std::size_t bytes = 0;
  (void)workspace_in(nullptr, limits, &bytes);
  return bytes;
}

void attend(void* stream, const AttendRequest& request, const SelectionView& selection,
            const FlashDecodeLimits& limits, std::byte* memory, const OutputBatch& outputs) {
  if (request.query_batch.count == 0) return;
  const Workspace workspace = workspace_in(memory, limits);
  const QueryItems items =
      request.items != nullptr
          ? *request.items
          : transfer::cuda::packed_items(request.queries, request.query_batch.count,
                                         request.kv.query_heads(), request.kv.head_dim);
  if (request.kv.dtype == DType::kFloat16) {
    return launch_shape<__half, false>(request.kv, stream, request, items, selection, outputs,
                                       workspace);
  }
  if (request.kv.int8_pages) {
    return launch_shape<__nv_bfloat16, true>(request.kv, stream, request, items, selection, outputs,
                                             workspace);
  }
  launch_shape<__nv_bfloat16, false>(request.kv, stream, request, items, selection, outputs,
                                     workspace);
}

}  // namespace cuda

}  // namespace kvtier::attention
