#include "hashing/sketch_cuda.cuh"
#include "hashing/sketch_prefill_cuda.cuh"
#include "hashing/sketch_prefill_cuda.h"
#include "transfer/device/cuda_check.h"
#include "transfer/device/tensor_core.cuh"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

namespace kvtier::hashing::cuda {
namespace {

using transfer::KvGeometry;
using transfer::RowSquares;
using transfer::cuda::kFullWarp;

/// Warpgroups of a block, each with tiles of its own: while one loads keys or packs signs, others
/// keep the tensor cores busy.
constexpr int kGroups = 4;
constexpr int kThreads = 128 * kGroups;
[[maybe_unused]] constexpr int kTileTokens =
    64;  ///< Of one KV head, so that sign bits are written side by side.
/// Chunks whose planes a block keeps in shared memory: 160 KiB for head_dim 128.
constexpr int kMaxChunks = 5;

/// Where value e of a plane is in the depth of the products. A lane loads 16 bytes of a key, values
/// 32 j + 8 t .. + 7 (lane = 4 g + t), and uses them as they come as parts of two fragments of A;
/// the depth of B is permuted to match.
struct DepthOrder {
  int step = 0;  ///< Product.
  int k = 0;     ///< Depth in it.
  /// Of pair p of the 16 bytes that lane t loads at j.
  __device__ DepthOrder(int j, int t, int p) : step(2 * j + p / 2), k(2 * t + 8 * (p % 2)) {}
};

/// The block writes the planes of chunks [first, first + chunks) to shared memory as operand B,
/// zeros past the last plane.
template <int D>
__device__ void load_planes(const PlanesView& planes, int first, int chunks, std::byte* shared) {
  constexpr int kVectors = D / 8;
  const int rows = chunks * kChunkBits;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < rows * kVectors; i += kThreads) {
    const int row = i / kVectors;
    const int vector = i % kVectors;
    const int plane = first * kChunkBits + row;
    uint4 loaded{};
    if (plane < planes.num_planes) {
      loaded = *reinterpret_cast<const uint4*>(planes.bf16 + std::int64_t{plane} * D + vector * 8);
    }
    const unsigned pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const DepthOrder at(vector / 4, vector % 4, p);
      const int byte = (at.step % 4 * kProductDepth + at.k) * 2;
      *reinterpret_cast<unsigned*>(shared + (at.step / 4 * rows + row) * kOperandRowBytes +
                                   (byte ^ row % 8 * 16)) = pairs[p];
    }
  }
}

/// What a lane holds of keys g and g + 8 of its warp: every fourth 16 bytes.
template <int D>
struct KeyRows {
  static constexpr int kVectors = D / 32;
  /// Shared memory where a warp keeps its next keys: a place per vector and lane.
  static constexpr int kStageBytes = 2 * kVectors * 32 * 16;
  uint4 low[kVectors], high[kVectors];

  /// Part of A for one product, in the order of `DepthOrder`.
  __device__ void fragment(unsigned (&a)[4], int step) const {
    const uint4& g = low[step / 2];
    const uint4& g8 = high[step / 2];
    a[0] = step % 2 == 0 ? g.x : g.z;
    a[1] = step % 2 == 0 ? g8.x : g8.z;
    a[2] = step % 2 == 0 ? g.y : g.w;
    a[3] = step % 2 == 0 ? g8.y : g8.w;
  }
  /// `stage` is this lane's first place.
  __device__ void load_staged(const std::byte* stage) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      low[j] = *reinterpret_cast<const uint4*>(stage + 2 * j * 512);
      high[j] = *reinterpret_cast<const uint4*>(stage + (2 * j + 1) * 512);
    }
  }
  /// Starts copying a lane's part of two keys. It reads only what it has copied itself.
  __device__ static void stage(unsigned stage, const std::byte* row_g, const std::byte* row_g8) {
    const unsigned t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      transfer::cuda::copy_async_16(stage + static_cast<unsigned>(2 * j * 512),
                                    row_g + (static_cast<unsigned>(j * 4) + t) * 16, true);
      transfer::cuda::copy_async_16(stage + static_cast<unsigned>((2 * j + 1) * 512),
                                    row_g8 + (static_cast<unsigned>(j * 4) + t) * 16, true);
    }
  }
};

/// Signs of a row's 32 columns, those of this lane: each at its bit for t = 0, among others that do
/// not count. `c` points at the row's first fragment.
__device__ unsigned sign_word(const float* c) {
  unsigned word = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    word = __funnelshift_l(__float_as_uint(c[4 * n]), word, 1);
    word = __funnelshift_l(__float_as_uint(c[4 * n + 1]), word, 7);
  }
  return word;
}

/// Word t of the row's 128 signs, in lane 4 g + t.
[[maybe_unused]] __device__ unsigned own_word(const float* c) {
  const unsigned t = threadIdx.x % 4;
  constexpr unsigned kOwnBits = 0xC0C0C0C0U;
  unsigned words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = (sign_word(c + 16 * w) & kOwnBits) >> (2 * t);
  return ~own_of_quad(words);
}

/// Rows of one lane in a tile.
struct TileRows {
  int head = 0;
  int token = 0;  ///< Of row g, from the first of the item.
  const std::byte* row_g = nullptr;
  const std::byte* row_g8 = nullptr;
  std::int64_t squares = 0;  ///< Of row lane % 16: where they are.
};

/// Sketch of one row of scalar codes. `c` points at the row's first fragment, `sketch` at its word
/// 0 and `key_norm` at its key norm; null: nothing is written. `key_squares` is NaN of a row that
/// is not finite. All lanes call it.
template <int D>
[[maybe_unused]] __device__ void write_codes(const SketchGeometry& geometry, int bits,
                                             const float* c, float key_squares, std::byte* sketch,
                                             std::byte* key_norm) {
  constexpr int kWords = D / 32;  // of a plane of the code
  const int t = static_cast<int>(threadIdx.x % 4);
  const bool bad = isnan(key_squares);
  const float norm = sqrtf(key_squares);
  ScalarEncoder encoder(norm, bits);
  LaneCodes codes[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    codes[w] = encoder.encode([&](int n, int i) { return c[16 * w + 4 * n + i]; });
  }
  const float sum = sum_quad(encoder.sum());
  if (t == 0 && key_norm != nullptr) {
    *reinterpret_cast<std::uint16_t*>(key_norm) =
        bad ? kNonfiniteNorm : scalar_norm_bits(norm, sum, bits, D);
  }
#pragma unroll 1
  for (int chunk = 0; chunk < geometry.chunks(); ++chunk) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bit = bits - 1 - (4 * chunk + i) / kWords;
      words[i] = bit >= 0 ? codes[i % kWords].word(bit) : 0U;
    }
    const unsigned own = own_of_quad(words);
    if (sketch == nullptr) continue;
    *reinterpret_cast<unsigned*>(sketch + geometry.chunk_offset(0, chunk, 0) + t * 4) =
        bad ? 0U : own;
  }
}

/// Block (share of the tiles, group of chunks, item), 4 warpgroups; a tile is 64 tokens of one
/// head. The rotation of scalar codes is one chunk, of which all chunks of the sketch are made.
/// Shared memory: the planes of the block's chunks, written once; the barrier makes them
/// complete.
template <int D, bool kScalar>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ PlanesView planes, const __grid_constant__ KvGeometry kv,
                   const __grid_constant__ SketchGeometry geometry,
                   const __grid_constant__ SketchBatch batch,
                   const __grid_constant__ transfer::Batch<KeySource> keys_of_items,
                   const RowSquares* squares, const int chunks_per_block) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // else compiled empty
  extern __shared__ std::byte unaligned[];
  std::byte* shared =
      unaligned + (0U - transfer::cuda::shared_address(unaligned)) % kOperandGroupBytes;
  const int first_chunk = static_cast<int>(blockIdx.y) * chunks_per_block;
  const int chunks = min(chunks_per_block, geometry.chunks() - first_chunk);
  load_planes<D>(planes, first_chunk, chunks, shared);
  // The products read shared memory by another path than these stores.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  const SketchItem& item = batch[static_cast<int>(blockIdx.z)];
  const std::int64_t length = item.counters->length;
  const std::int64_t room = max(item.counters->capacity - length, std::int64_t{0});
  const int tokens = static_cast<int>(min(room, std::int64_t{item.tokens}));
  const int tiles = (tokens + kTileTokens - 1) / kTileTokens * kv.kv_heads;
  const int tile_step = static_cast<int>(gridDim.x) * kGroups;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row_in_tile = static_cast<int>(threadIdx.x % 128 / 32) * 16 + lane / 4;
  const KeySource& source = keys_of_items[static_cast<int>(blockIdx.z)];
  const unsigned operand = transfer::cuda::shared_address(shared);
  const auto half_bytes = static_cast<unsigned>(chunks * kChunkBits * kOperandRowBytes);
  const auto locate = [&](int tile) {
    TileRows rows{tile % kv.kv_heads, tile / kv.kv_heads * kTileTokens + row_in_tile};
    // Rows past the end are read as the last one.
    const auto key = [&](int token) {
      return source.data + min(token, tokens - 1) * source.token_bytes +
             rows.head * source.head_bytes;
    };
    rows.row_g = key(rows.token);
    rows.row_g8 = key(rows.token + 8);
    const int own = min(rows.token - lane / 4 + lane % 16, tokens - 1);
    rows.squares = (item.packed_offset + own) * kv.kv_heads + rows.head;
    return rows;
  };
  constexpr int kStageBytes = KeyRows<D>::kStageBytes;
  std::byte* stage = shared + chunks_per_block * kChunkBits * D * 2 +
                     static_cast<int>(threadIdx.x / 32) * kStageBytes + lane * 16;
  RowSquares ahead;  // of row `lane` of the warp's next 16
  const auto start_copy = [&](int tile) {
    if (tile < tiles) {
      const TileRows rows = locate(tile);
      KeyRows<D>::stage(transfer::cuda::shared_address(stage), rows.row_g, rows.row_g8);
      ahead = squares[rows.squares];
    }
    transfer::cuda::copy_async_commit();
  };

  const int group = static_cast<int>(threadIdx.x / 128);
  const int first_tile = static_cast<int>(blockIdx.x) * kGroups;
  start_copy(first_tile + group);
  for (int tile = first_tile + group; tile < tiles; tile += tile_step) {
    const TileRows rows = locate(tile);
    const auto [head, token] = std::pair(rows.head, rows.token);
    KeyRows<D> keys;
    transfer::cuda::copy_async_wait<0>();
    keys.load_staged(stage);
    const RowSquares mine = ahead;
    const unsigned nonfinite_rows = __ballot_sync(kFullWarp, isnan(mine.key));
    start_copy(tile + tile_step);  // all that was staged has been used

    // Rows g, g + 8 and `lane`; addresses that are used when the first products are under way.
    const int own = token - lane / 4 + lane % 16;
    const int places[3] = {token, token + 8, own};
    std::byte* blocks[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      blocks[i] = item.blocks[(length + min(places[i], tokens - 1)) / kBlockTokens];
    }

#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      constexpr int kSteps = D / kProductDepth;
      float c[64];
      products_begin();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned a[4];
        keys.fragment(a, step);
        const auto in_chunk = static_cast<unsigned>(chunk * kChunkBits * kOperandRowBytes +
                                                    step % 4 * kProductDepth * 2);
        start_product(
            c, a,
            operand_descriptor(operand + static_cast<unsigned>(step / 4) * half_bytes + in_chunk),
            step > 0);
      }
      products_commit();
      if (chunk == 0 && lane < 16 && own < tokens) {
        const auto in_block = static_cast<int>((length + own) % kBlockTokens);
        const bool bad = isnan(mine.key);
        if constexpr (!kScalar) {
          *reinterpret_cast<std::uint16_t*>(blocks[2] + geometry.key_norm_offset(head, in_block)) =
              bad ? kNonfiniteNorm : norm_bits(mine.key);
        }
        *reinterpret_cast<std::uint16_t*>(blocks[2] + geometry.value_norm_offset(head, in_block)) =
            bad ? kNonfiniteNorm : norm_bits(mine.value);
      }
      products_wait<0>();
      if constexpr (kScalar) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float key_squares = __shfl_sync(kFullWarp, mine.key, lane / 4 + 8 * i);
          const bool present = places[i] < tokens;
          const auto in_block = static_cast<int>((length + places[i]) % kBlockTokens);
          write_codes<D>(geometry, planes.code_bits, c + 2 * i, key_squares,
                         present ? blocks[i] + geometry.chunk_offset(head, 0, in_block) : nullptr,
                         present ? blocks[i] + geometry.key_norm_offset(head, in_block) : nullptr);
        }
      } else {
        const unsigned mask =
            plane_mask(geometry.num_planes - (first_chunk + chunk) * kChunkBits - lane % 4 * 32);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned word = own_word(c + 2 * i);
          if (places[i] >= tokens) continue;
          const auto in_block = static_cast<int>((length + places[i]) % kBlockTokens);
          const bool nonfinite = (nonfinite_rows >> (lane / 4 + 8 * i) & 1U) != 0;
          *reinterpret_cast<unsigned*>(blocks[i] +
                                       geometry.chunk_offset(head, first_chunk + chunk, in_block) +
                                       lane % 4 * 4) = nonfinite ? 0U : word & mask;
        }
      }
    }
  }
#endif
}

struct Processor {
  int major = 0, minor = 0, count = 0;
};

Processor current_processor() {
  int device = 0;
  Processor found;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  KVTIER_CUDA_CHECK(
      cudaDeviceGetAttribute(&found.major, cudaDevAttrComputeCapabilityMajor, device));
  KVTIER_CUDA_CHECK(
      cudaDeviceGetAttribute(&found.minor, cudaDevAttrComputeCapabilityMinor, device));
  KVTIER_CUDA_CHECK(cudaDeviceGetAttribute(&found.count, cudaDevAttrMultiProcessorCount, device));
  return found;
}

template <int D, bool kScalar>
void launch(void* stream, int processors, const PlanesView& planes, const KvGeometry& kv,
            const SketchGeometry& geometry, const SketchBatch& batch,
            const transfer::Batch<KeySource>& keys, const RowSquares* squares) {
  const int chunks = kScalar ? 1 : geometry.chunks();
  const int groups = (chunks + kMaxChunks - 1) / kMaxChunks;
  const int chunks_per_block = (chunks + groups - 1) / groups;
  constexpr int kStageBytes = KeyRows<D>::kStageBytes * kThreads / 32;
  const int planes_bytes = chunks_per_block * kChunkBits * D * 2 + kOperandGroupBytes;  // to align
  const int bytes = planes_bytes + kStageBytes;
  const auto kernel = prefill_kernel<D, kScalar>;
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int blocks = std::max(1, processors / (groups * batch.count));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(groups),
                  static_cast<unsigned>(batch.count));
  kernel<<<grid, kThreads, static_cast<std::size_t>(bytes), transfer::cuda::stream_of(stream)>>>(
      planes, kv, geometry, batch, keys, squares, chunks_per_block);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

bool sketches_prefill(const KvGeometry& kv, std::int32_t tokens) {
  if (kv.dtype != DType::kBFloat16 || (kv.head_dim != 64 && kv.head_dim != 128)) return false;
  if (tokens < kMinPrefillTokens) return false;
  const Processor processor = current_processor();
  return processor.major == 9 && processor.minor == 0;
}

void sketch_prefill(void* stream, const PlanesView& planes, const KvGeometry& kv,
                    const SketchGeometry& geometry, const SketchBatch& batch,
                    const transfer::Batch<KeySource>& keys, const RowSquares* squares) {
  const bool scalar = planes.code_bits > 0;
  const auto launch_64 = scalar ? launch<64, true> : launch<64, false>;
  const auto launch_128 = scalar ? launch<128, true> : launch<128, false>;
  const auto launch_head_dim = kv.head_dim == 64 ? launch_64 : launch_128;
  launch_head_dim(stream, current_processor().count, planes, kv, geometry, batch, keys, squares);
}

}  // namespace kvtier::hashing::cuda
