#include "hashing/append_codes_cuda.cuh"
#include "hashing/append_cuda.cuh"
#include "hashing/append_kernels.h"
#include "hashing/sketch_cuda.cuh"
#include "transfer/device/launch_cuda.cuh"
#include "transfer/device/tensor_core.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/int8_cuda.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvtier::hashing::cuda {
namespace {

using transfer::KvGeometry;
using transfer::cuda::kFullWarp;
using transfer::cuda::kPiece;

/// Tokens of a launch, sequences times the longest append, up to which one kernel is faster (H200,
/// head_dim 128: 64 sequences of 2 tokens 11.2 us for 18.5 us with 256 planes, 21.5 us for 28.3 us
/// with 600).
constexpr std::int64_t kMostTokens = 128;

/// Blocks of an SM, for which a thread has 64 registers: then a block of a kernel that selects fits
/// beside one (scoring/soft/smem_cuda.cu).
constexpr int kLeastBlocks = 6;
/// Blocks worth having before a block is given more than one tile: two per SM of an H200.
constexpr int kEnoughBlocks = 264;

struct Shared : Books {
  alignas(16) std::byte planes[kBlockPlanes * kMaxPitch];
  alignas(16) std::byte keys[2][kTileRows * kMaxPitch];  // an fp16 key is the sum of two in bf16
  unsigned signs[kTileRows];
};

struct Row {
  int item;
  int head;
  int token;
};

__device__ Row row_at(const AppendArgs& args, int index) {
  const auto tokens = static_cast<unsigned>(args.tokens);
  const auto heads = static_cast<unsigned>(args.kv.kv_heads);
  const unsigned lane = static_cast<unsigned>(index) / tokens;
  const unsigned item = lane / heads;
  return {static_cast<int>(item), static_cast<int>(lane - item * heads),
          static_cast<int>(static_cast<unsigned>(index) - lane * tokens)};
}

__device__ RowTarget target_of(const AppendArgs& args, const Row& row, bool norms) {
  RowTarget target{};
  const transfer::AppendItem& item = args.batch[row.item];
  const transfer::SequenceView& sequence = item.sequence;
  const std::int64_t length = sequence.counters->length;
  const std::int64_t stored = transfer::tokens_stored(*sequence.counters, item.tokens);
  const std::int64_t token = length + row.token;
  if (norms) target.token = token;
  if (row.token >= stored) return target;
  std::byte* block = args.blocks[row.item][token / kBlockTokens];
  const auto in_block = static_cast<int>(token % kBlockTokens);
  target.norms = block + args.geometry.norms_offset(row.head, in_block);
  if (!norms) {
    const auto word = static_cast<int>(blockIdx.x);
    target.sketch = block + args.geometry.chunk_offset(row.head, word / 4, in_block) + word % 4 * 4;
    return target;
  }
  if (!args.stores) return target;
  const KvGeometry& kv = args.kv;
  const std::int64_t row_bytes = kv.row_bytes();
  const auto number = static_cast<unsigned>(token);  // 64-bit divisions have much code
  target.page = transfer::page_row<float>(
      kv, const_cast<std::byte*>(sequence.pages[kv.page_of(number)]), row.head, token);
  if (token < kv.sink_capacity) {
    target.sink =
        sequence.sink_rows + (std::int64_t{row.head} * kv.sink_capacity + token) * row_bytes;
  }
  // Earlier tokens would share a slot of the ring with later ones.
  if (token >= length + stored - kv.recent_capacity) {
    const std::int64_t slot = number % static_cast<unsigned>(kv.recent_capacity);
    target.ring =
        sequence.recent_rows + (std::int64_t{row.head} * kv.recent_capacity + slot) * row_bytes;
  }
  return target;
}

/// Items of which block y has rows, absent tokens included: [first, last].
struct ItemRange {
  int first;
  int last;
};

__device__ ItemRange items_of(const AppendArgs& args, int first_row, int count) {
  const int item_rows = args.tokens * args.kv.kv_heads;
  return {first_row / item_rows, (first_row + count - 1) / item_rows};
}

/// Blocks that have rows of an item.
__device__ unsigned readers_of(const AppendArgs& args, int item) {
  const int item_rows = args.tokens * args.kv.kv_heads;
  const int first = item * item_rows / args.block_rows;
  const int last = ((item + 1) * item_rows - 1) / args.block_rows;
  return gridDim.x * static_cast<unsigned>(last - first + 1);
}

__device__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

/// Asks L2 for the entries of the tables that this kernel needs, and for the block table, which the
/// next ones read. The length may be about to grow: then other lines are asked for, no harm done.
__device__ void prefetch_tables(const AppendArgs& args, const ItemRange& items) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  for (int item = items.first; item <= items.last; ++item) {
    const transfer::SequenceView& sequence = args.batch[item].sequence;
    const std::int64_t length = __ldcg(&sequence.counters->length);
    if (lane == 0) prefetch(sequence.pages + args.kv.page_of(length));
    constexpr int kLine = 128 / sizeof(void*);
    const std::int64_t last = length / kBlockTokens;
    for (std::int64_t i = last - lane * kLine; i >= 0; i -= 32 * kLine) {
      prefetch(args.blocks[item] + i);
    }
  }
}

/// The warp beside the workers: says where rows go, and lets an item's counters grow once every
/// block has read them. What the other blocks write need not be done then, for the end of the
/// kernel orders all of it. The addresses come first, for the workers wait for them.
__device__ void keep_books(const AppendArgs& args, int first, int count, Books& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const ItemRange items = items_of(args, first, count);
  prefetch_tables(args, items);
  transfer::cuda::wait_for_previous();
  // Not before the wait: the next kernel may count on the work before this one.
  transfer::cuda::let_next_start();
  const bool norms = blockIdx.x + 1 == gridDim.x;
  for (int r = lane; r < count; r += 32) {
    shared.targets[r] = target_of(args, row_at(args, first + r), norms);
  }
  __syncwarp();
  publish_targets();
  if (!args.advances) return;

  for (int item = items.first + lane; item <= items.last; item += 32) {
    transfer::SequenceCounters& counters = *args.batch[item].sequence.counters;
    __threadfence();
    if (atomicAdd(&counters.append_ticket, 1U) != readers_of(args, item) - 1) continue;
    __threadfence();
    transfer::count_appended(args.kv, counters, args.batch[item].tokens);
    counters.append_ticket = 0;
  }
}

/// Workers fill `sources`; null for tokens that an item does not have.
__device__ void find_sources(const AppendArgs& args, int first, int count, Books& shared) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * count; i += kWorkers) {
    const Row row = row_at(args, first + i / 2);
    const transfer::AppendItem& item = args.batch[row.item];
    shared.sources[i] = {};
    if (row.token >= item.tokens) continue;
    shared.sources[i] =
        transfer::cuda::head_source(i % 2 == 0 ? item.keys : item.values, row.token, row.head);
  }
  if (threadIdx.x < kMaxTiles) shared.nonfinite[threadIdx.x] = 0;
}

/// A warp multiplies the tile's keys by its eight planes, in the order of the kernel for many
/// tokens, and writes its byte of each row's word.
template <typename T>
__device__ void write_signs(int head_dim, int pitch, Shared& shared) {
  constexpr int kParts = std::is_same_v<T, __half> ? 2 : 1;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const unsigned keys = transfer::cuda::shared_address(shared.keys) +
                        static_cast<unsigned>(lane % 16 * pitch + lane / 16 * 16);
  const unsigned planes = transfer::cuda::shared_address(shared.planes) +
                          static_cast<unsigned>((warp * 8 + lane % 8) * pitch + lane / 8 * 16);
  float c[4] = {};
#pragma unroll 4
  for (int step = 0; step < head_dim / 32; ++step) {
    unsigned b[4];
    transfer::cuda::load_matrices(b, planes + static_cast<unsigned>(step * 64));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        unsigned a[4];
        transfer::cuda::load_matrices(
            a, keys + static_cast<unsigned>(part * kTileRows * kMaxPitch + step * 64 + half * 32));
        transfer::cuda::multiply_add<__nv_bfloat16>(c, a, b[2 * half], b[2 * half + 1]);
      }
    }
  }
  const int bit = 7 - lane % 4 * 2;  // of the first of this lane's two planes
  unsigned bytes = (c[0] >= 0.0F ? 1U : 0U) << bit | (c[1] >= 0.0F ? 1U : 0U) << (bit - 1) |
                   (c[2] >= 0.0F ? 1U : 0U) << (bit + 8) | (c[3] >= 0.0F ? 1U : 0U) << (bit + 7);
  bytes |= __shfl_xor_sync(kFullWarp, bytes, 1);
  bytes |= __shfl_xor_sync(kFullWarp, bytes, 2);
  if (lane % 4 != 0) return;
  auto* signs = reinterpret_cast<std::uint8_t*>(shared.signs);
  signs[lane / 4 * 4 + 3 - warp] = static_cast<std::uint8_t>(bytes);
  signs[(lane / 4 + 8) * 4 + 3 - warp] = static_cast<std::uint8_t>(bytes >> 8);
}

/// Blocks that write one word of 32 planes of each row.
template <typename T>
__device__ void sketch_tiles(const AppendArgs& args, int count, Shared& shared) {
  const int pitch = pitch_of(args.kv);
  const unsigned mask =
      plane_mask(args.geometry.num_planes - static_cast<int>(blockIdx.x) * kBlockPlanes);
  for (int tile = 0; tile * kTileRows < count; ++tile) {
    const int rows = min(count - tile * kTileRows, kTileRows);
    stage_keys<T>(args, shared.sources + 2 * kTileRows * tile, rows, pitch, shared.nonfinite[tile],
                  shared.keys[0], kTileRows * kMaxPitch);
    if (tile == 0) transfer::cuda::copy_async_wait<0>();
    sync_workers();  // keys and planes are there
    write_signs<T>(args.kv.head_dim, pitch, shared);
    if (tile == 0) {
      await_targets();  // signs too are there
    } else {
      sync_workers();
    }
    const auto row = static_cast<int>(threadIdx.x);
    if (row >= rows) continue;
    std::byte* to = shared.targets[tile * kTileRows + row].sketch;
    if (to == nullptr) continue;
    const bool nonfinite = (shared.nonfinite[tile] >> row & 1U) != 0;
    *reinterpret_cast<unsigned*>(to) = nonfinite ? 0U : shared.signs[row] & mask;
  }
}

/// Blocks that write the rows and their norms, the key norms of sign sketches only.
template <typename T, bool kScalar>
__device__ void store_tiles(const AppendArgs& args, int first, int count, Books& shared) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int pieces = args.kv.head_dim / kPiece;
  PieceWalk walk(shared.sources, count, pieces);
  await_targets();
  float key_sum = 0.0F;
  float value_sum = 0.0F;
  bool nonfinite = false;
#pragma unroll 1
  while (walk.next()) {
    const RowTarget& to = shared.targets[walk.row];
    uint4 stored{};
    if (walk.present()) {
      stored = walk.stored<T>();
      nonfinite |= transfer::cuda::is_nonfinite(stored, kStored<T>);
      const float sum = transfer::cuda::sum_of_squares(stored, kStored<T>);
      (walk.of_keys() ? key_sum : value_sum) += sum;
    }
    float scale = 0.0F;
    if (args.kv.int8_pages) {
      const int half = walk.of_keys() ? 0 : 1;
      scale = transfer::cuda::int8_scale_of_lanes(stored, walk.present() ? half : 2);
    }
    if (walk.present() && to.page.bytes != nullptr) {
      if (args.kv.int8_pages) {
        stored = transfer::cuda::store_int8(to.page, stored, walk.index, pieces, scale);
        args.factors.store(args.kv, to.page.bytes, walk.index, pieces, scale);
      } else {
        reinterpret_cast<uint4*>(to.page.bytes)[walk.index] = stored;
      }
      if (to.sink != nullptr) reinterpret_cast<uint4*>(to.sink)[walk.index] = stored;
      if (to.ring != nullptr) reinterpret_cast<uint4*>(to.ring)[walk.index] = stored;
    }
    if (!walk.last) continue;
    key_sum = transfer::cuda::warp_sum(key_sum);
    value_sum = transfer::cuda::warp_sum(value_sum);
    const bool bad = __any_sync(kFullWarp, nonfinite);
    if (lane == 0 && to.norms != nullptr) {
      if constexpr (!kScalar) {
        *reinterpret_cast<std::uint16_t*>(to.norms) = bad ? kNonfiniteNorm : norm_bits(key_sum);
      }
      *reinterpret_cast<std::uint16_t*>(to.norms + kNormBytes / 2) =
          bad ? kNonfiniteNorm : norm_bits(value_sum);
    }
    if (lane == 0 && bad && args.stores) {
      const transfer::AppendItem& item = args.batch[row_at(args, first + walk.row).item];
      if (item.flags != nullptr) {
        transfer::cuda::raise_nonfinite(*item.flags, &transfer::StepFlags::nonfinite_tokens, 1,
                                        {.token = to.token, .layer = item.layer});
      }
    }
    key_sum = value_sum = 0.0F;
    nonfinite = false;
  }
}

/// Block (x, y) has rows [y * block_rows, ...); the last x stores them and their norms, the others
/// write word x of their sketch, or the one other all of it with scalar codes.
template <typename T, bool kScalar>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    append_kernel(const __grid_constant__ AppendArgs args) {
  __shared__ std::conditional_t<kScalar, CodeShared, Shared> shared;
  const int first = static_cast<int>(blockIdx.y) * args.block_rows;
  const int count = min(args.num_rows - first, args.block_rows);
  if (threadIdx.x >= kWorkers) {
    keep_books(args, first, count, shared);
    return;
  }
  const bool stores = blockIdx.x + 1 == gridDim.x;
  if constexpr (kScalar) {
    if (!stores) CodeLayout<T>(args.kv).load(args.planes, 0, shared);
  } else {
    const int plane = static_cast<int>(blockIdx.x) * kBlockPlanes;
    if (!stores) load_planes(args.planes, plane, kBlockPlanes, pitch_of(args.kv), shared.planes);
  }
  find_sources(args, first, count, shared);
  sync_workers();
  transfer::cuda::wait_for_previous();
  if (stores) {
    store_tiles<T, kScalar>(args, first, count, shared);
  } else if constexpr (kScalar) {
    encode_tiles<T>(args, count, shared);
  } else {
    sketch_tiles<T>(args, count, shared);
  }
}

int most_tokens(const transfer::AppendBatch& batch) {
  int tokens = 0;
  for (int i = 0; i < batch.count; ++i) tokens = std::max(tokens, batch[i].tokens);
  return tokens;
}

}  // namespace

bool is_small(const transfer::AppendBatch& batch) {
  return std::int64_t{batch.count} * most_tokens(batch) <= kMostTokens &&
         most_tokens(batch) <= kMostOverlappedTokens;
}

void append_small(void* stream, const KvGeometry& kv, const transfer::AppendBatch& batch,
                  std::span<const SketchTarget> sketches, const transfer::FrameFactors& factors) {
  const int tokens = most_tokens(batch);
  if (tokens == 0) return;
  for (const SketchTarget& target : sketches) {
    AppendArgs args{.kv = kv,
                    .batch = batch,
                    .factors = factors,
                    .blocks = target.blocks,
                    .planes = target.planes,
                    .geometry = target.geometry,
                    .tokens = tokens,
                    .num_rows = batch.count * tokens * kv.kv_heads,
                    .block_rows = target.planes.code_bits > 0 ? kCodeRows : kTileRows,
                    .stores = &target == &sketches.front(),
                    .advances = &target == &sketches.back()};
    const bool scalar = target.planes.code_bits > 0;
    const int parts = scalar ? 2 : target.geometry.chunks() * (kChunkBits / kBlockPlanes) + 1;
    const int tiles = (args.num_rows + args.block_rows - 1) / args.block_rows;
    args.block_rows *= std::clamp(tiles * parts / kEnoughBlocks, 1, kMaxTiles);
    const int groups = (args.num_rows + args.block_rows - 1) / args.block_rows;
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(groups));
    const auto of_bf16 =
        scalar ? append_kernel<__nv_bfloat16, true> : append_kernel<__nv_bfloat16, false>;
    const auto of_fp16 = scalar ? append_kernel<__half, true> : append_kernel<__half, false>;
    const auto kernel = kv.dtype == DType::kFloat16 ? of_fp16 : of_bf16;
    // An SM changes its share of shared memory when it is empty, and the next kernels need the
    // most.
    KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared));
    transfer::cuda::launch_overlapping(transfer::cuda::stream_of(stream), kernel, grid, kThreads, 0,
                                       args);
  }
}

}  // namespace kvtier::hashing::cuda
