#include "hashing/sketch_cuda.cuh"
#include "hashing/sketch_kernels.h"
#include "hashing/sketch_prefill_cuda.h"
#include "transfer/device/cuda_check.h"
#include "transfer/device/tensor_core.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cassert>
#include <type_traits>

namespace kvtier::hashing {
namespace {

using transfer::KvGeometry;
using transfer::cuda::kFullWarp;
using transfer::cuda::SplitPair;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = 16;  ///< (token, KV head) pairs of one warp.
constexpr int kTileRows = kWarps * kWarpRows;
constexpr int kWordsPerChunk = kChunkBits / 32;
/// Blocks worth having before a block is given more than one chunk: two per SM of an H200.
constexpr std::int64_t kEnoughBlocks = 264;

/// Shared memory: the planes of one chunk, padded so that eight of them lie in eight different
/// groups of banks.
template <int D>
struct PlanesLayout {
  static constexpr int kPitch = 2 * D + 16;
  static constexpr int kBytes = kChunkBits * kPitch;
};

/// Keys of 16 rows as A fragments. A product of bf16 values is exact in fp32; an fp16 key is the
/// exact sum of two bf16 values, so it takes two products.
template <typename T, int D>
struct KeyFragments {
  static constexpr int kParts = std::is_same_v<T, __half> ? 2 : 1;
  unsigned a[kParts][D / 16][4];

  /// Lane 4 g + t reads rows g and g + 8 of the warp.
  __device__ void load(const std::byte* row_g, const std::byte* row_g8) {
    const auto* low = reinterpret_cast<const unsigned*>(row_g) + threadIdx.x % 4;
    const auto* high = reinterpret_cast<const unsigned*>(row_g8) + threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      set(step, 0, low[step * 8]);
      set(step, 1, high[step * 8]);
      set(step, 2, low[step * 8 + 4]);
      set(step, 3, high[step * 8 + 4]);
    }
  }

 private:
  __device__ void set(int step, int i, unsigned pair) {
    if constexpr (kParts == 1) {
      a[0][step][i] = pair;
    } else {
      const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      const SplitPair split = transfer::cuda::split_pair<__nv_bfloat16>(values.x, values.y);
      a[0][step][i] = split.high;
      a[1][step][i] = split.low;
    }
  }
};

/// Norms of the warp's rows: lane r has those of row r, and bit r of `nonfinite` is set when the
/// row has NaN or infinity.
struct RowNorms {
  std::uint16_t key = 0;
  std::uint16_t value = 0;
  unsigned nonfinite = 0;
  float key_squares = 0.0F;
};

template <typename T, int D>
__device__ RowNorms row_norms(const std::byte* rows, std::int64_t count) {
  constexpr int kVectors = D / 4;  // of 16 bytes, the first half of them the key's
  const int lane = static_cast<int>(threadIdx.x % 32);
  RowNorms norms;
#pragma unroll 4
  for (int r = 0; r < kWarpRows && r < count; ++r) {
    const auto* row = reinterpret_cast<const uint4*>(rows + std::int64_t{r} * (4 * D));
    float key_sum = 0.0F;
    float value_sum = 0.0F;
    bool nonfinite = false;
#pragma unroll
    for (int i = 0; i < (kVectors + 31) / 32; ++i) {
      const int vector = i * 32 + lane;
      if (vector >= kVectors) continue;
      const uint4 loaded = row[vector];
      const float sum = cuda::sum_of_squares<T>(loaded, nonfinite);
      (vector < kVectors / 2 ? key_sum : value_sum) += sum;
    }
    key_sum = transfer::cuda::warp_sum(key_sum);
    value_sum = transfer::cuda::warp_sum(value_sum);
    const bool bad = __any_sync(kFullWarp, nonfinite);
    if (bad) norms.nonfinite |= 1U << r;
    if (lane == r) {
      norms.key_squares = key_sum;
      norms.key = bad ? kNonfiniteNorm : cuda::norm_bits(key_sum);
      norms.value = bad ? kNonfiniteNorm : cuda::norm_bits(value_sum);
    }
  }
  return norms;
}

/// The block copies the planes of a chunk to shared memory, zeros past the last plane.
template <int D>
__device__ void load_planes(const PlanesView& planes, int chunk, unsigned shared) {
  constexpr int kVectors = D / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kChunkBits * kVectors; i += kThreads) {
    const int row = i / kVectors;
    const int vector = i % kVectors;
    const int plane = chunk * kChunkBits + row;
    const bool present = plane < planes.num_planes;
    const std::uint16_t* from = planes.bf16 + (present ? std::int64_t{plane} * D + vector * 8 : 0);
    transfer::cuda::copy_async_16(
        shared + static_cast<unsigned>(row * PlanesLayout<D>::kPitch + vector * 16), from, present);
  }
  transfer::cuda::copy_async_commit();
  transfer::cuda::copy_async_wait<0>();
}

/// Products of the warp's 16 rows with 32 planes, four times 8.
template <typename T, int D>
__device__ void multiply(const KeyFragments<T, D>& keys, unsigned planes, float (&c)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const unsigned base =
      planes + static_cast<unsigned>((lane % 8 + lane / 16 * 8) * PlanesLayout<D>::kPitch +
                                     lane / 8 % 2 * 16);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    unsigned b[2][4];  // b0 and b1 of planes 0-7, then of planes 8-15; of 16-23, of 24-31
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transfer::cuda::load_matrices(
          b[half], base + static_cast<unsigned>(half * 16 * PlanesLayout<D>::kPitch + step * 32));
    }
#pragma unroll
    for (int part = 0; part < KeyFragments<T, D>::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        transfer::cuda::multiply_add<__nv_bfloat16>(c[n], keys.a[part][step], b[n / 2][n % 2 * 2],
                                                    b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

/// Their signs, bit 31 - i for plane i: those of rows g and g + 8 in every lane 4 g + t.
__device__ uint2 sign_words(const float (&c)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint2 words{0, 0};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int bit = 31 - 8 * n - lane % 4 * 2;
    words.x |= (c[n][0] >= 0.0F ? 1U : 0U) << bit | (c[n][1] >= 0.0F ? 1U : 0U) << (bit - 1);
    words.y |= (c[n][2] >= 0.0F ? 1U : 0U) << bit | (c[n][3] >= 0.0F ? 1U : 0U) << (bit - 1);
  }
  for (int distance = 1; distance < 4; distance *= 2) {
    words.x |= __shfl_xor_sync(kFullWarp, words.x, distance);
    words.y |= __shfl_xor_sync(kFullWarp, words.y, distance);
  }
  return words;
}

/// Where a (token, KV head) pair of an append goes; nowhere when `block` is null.
struct PairAddress {
  std::byte* block = nullptr;
  int head = 0;
  int token_in_block = 0;
};

__device__ PairAddress pair_address(const SketchItem& item, int kv_heads, std::int64_t length,
                                    std::int64_t pair) {
  std::int64_t token = length + pair / kv_heads;
  if (item.slots != nullptr) {
    token = item.slots[pair / kv_heads];
    if (token < 0 || token >= item.counters->capacity) return {};
  }
  return {item.blocks[token / kBlockTokens], static_cast<int>(pair % kv_heads),
          static_cast<int>(token % kBlockTokens)};
}

/// Scalar codes of the warp's rows g and g + 8, and the sums that their factors are made of.
template <int D>
class CodeWriter {
 public:
  /// `sketches` are the places of word 0 of the two rows; null: nothing is written.
  __device__ CodeWriter(const RowNorms& norms, int bits, std::byte* const (&sketches)[2])
      : bits_(bits),
        sketches_{sketches[0], sketches[1]},
        nonfinite_(norms.nonfinite >> (threadIdx.x % 32 / 4)),
        lengths_{length(norms, 0), length(norms, 1)},
        encoders_{{lengths_[0], bits}, {lengths_[1], bits}} {}

  /// Of coordinates 32 group .. 32 group + 31.
  __device__ void write(const SketchGeometry& geometry, int group, const float (&c)[4][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const cuda::LaneCodes codes =
          encoders_[i].encode([&](int n, int j) { return c[n][2 * i + j]; });
      cuda::store_codes(geometry, D, bits_, group, codes, nonfinite(i), sketches_[i]);
    }
  }
  /// In place of the key norm of row g + 8 i, when all coordinates have been written.
  [[nodiscard]] __device__ std::uint16_t key_norm(int i) const {
    const float sum = cuda::sum_quad(encoders_[i].sum());
    return nonfinite(i) ? kNonfiniteNorm : cuda::scalar_norm_bits(lengths_[i], sum, bits_, D);
  }

 private:
  __device__ static float length(const RowNorms& norms, int i) {
    const int row = static_cast<int>(threadIdx.x % 32 / 4) + 8 * i;
    return sqrtf(__shfl_sync(kFullWarp, norms.key_squares, row));
  }
  [[nodiscard]] __device__ bool nonfinite(int i) const { return (nonfinite_ >> 8 * i & 1U) != 0; }

  int bits_;
  std::byte* sketches_[2];
  unsigned nonfinite_;
  float lengths_[2];
  cuda::ScalarEncoder encoders_[2];
};

/// Block (tile of 128 pairs, group of chunks, item). Planes in shared memory: the first barrier of
/// a chunk lets it be overwritten, the second makes it complete.
template <typename T, int D, bool kScalar>
__global__ void __launch_bounds__(kThreads, D == 256 ? 1 : 2)
    sketch_kernel(const __grid_constant__ PlanesView planes, const __grid_constant__ KvGeometry kv,
                  const __grid_constant__ SketchGeometry geometry,
                  const __grid_constant__ SketchBatch batch, const std::byte* packed) {
  extern __shared__ __align__(16) std::byte shared[];
  const SketchItem& item = batch[static_cast<int>(blockIdx.z)];
  const std::int64_t length = item.counters->length;
  const std::int64_t pairs = item.tokens_placed() * kv.kv_heads;
  if (std::int64_t{blockIdx.x} * kTileRows >= pairs) return;

  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first = std::int64_t{blockIdx.x} * kTileRows + threadIdx.x / 32 * kWarpRows;
  const std::int64_t count = min(pairs - first, std::int64_t{kWarpRows});  // may be negative
  const std::byte* rows = packed + (item.packed_offset * kv.kv_heads + first) * (4 * D);
  KeyFragments<T, D> keys;
  RowNorms norms;
  if (count > 0) {
    norms = row_norms<T, D>(rows, count);
    if (blockIdx.y == 0 && lane < count) {
      const PairAddress pair = pair_address(item, kv.kv_heads, length, first + lane);
      if (pair.block != nullptr) {
        if constexpr (!kScalar) {
          *reinterpret_cast<std::uint16_t*>(
              pair.block + geometry.key_norm_offset(pair.head, pair.token_in_block)) = norms.key;
        }
        *reinterpret_cast<std::uint16_t*>(
            pair.block + geometry.value_norm_offset(pair.head, pair.token_in_block)) = norms.value;
      }
    }
    const std::int64_t last_row = count - 1;  // stands in for rows past the end
    keys.load(rows + min(std::int64_t{lane / 4}, last_row) * (4 * D),
              rows + min(std::int64_t{lane / 4 + 8}, last_row) * (4 * D));
  }
  std::byte* to[2] = {};  // rows g and g + 8, word 0
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane / 4 + 8 * i;
    if (row >= count) continue;
    const PairAddress pair = pair_address(item, kv.kv_heads, length, first + row);
    if (pair.block == nullptr) continue;
    to[i] = pair.block + geometry.chunk_offset(pair.head, 0, pair.token_in_block);
  }

  if constexpr (kScalar) {
    CodeWriter<D> writer(norms, planes.code_bits, to);
#pragma unroll 1
    for (int group = 0; group < D / 32; ++group) {
      if (group % kWordsPerChunk == 0) {
        __syncthreads();
        load_planes<D>(planes, group / kWordsPerChunk, transfer::cuda::shared_address(shared));
        __syncthreads();
      }
      if (count <= 0) continue;
      float c[4][4] = {};
      multiply<T, D>(
          keys,
          transfer::cuda::shared_address(shared) +
              static_cast<unsigned>(group % kWordsPerChunk * 32 * PlanesLayout<D>::kPitch),
          c);
      writer.write(geometry, group, c);
    }
    if (count <= 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint16_t norm = writer.key_norm(i);
      if (to[i] == nullptr || lane % 4 != 0) continue;
      const PairAddress pair = pair_address(item, kv.kv_heads, length, first + lane / 4 + 8 * i);
      *reinterpret_cast<std::uint16_t*>(
          pair.block + geometry.key_norm_offset(pair.head, pair.token_in_block)) = norm;
    }
  } else {
    // Lane 4 g + t writes word t of each chunk.
    for (int chunk = static_cast<int>(blockIdx.y); chunk < geometry.chunks();
         chunk += static_cast<int>(gridDim.y)) {
      __syncthreads();
      load_planes<D>(planes, chunk, transfer::cuda::shared_address(shared));
      __syncthreads();
      if (count <= 0) continue;
      uint2 kept{0, 0};
#pragma unroll 1  // the planes of several words would not fit in registers
      for (int w = 0; w < kWordsPerChunk; ++w) {
        float c[4][4] = {};
        multiply<T, D>(keys,
                       transfer::cuda::shared_address(shared) +
                           static_cast<unsigned>(w * 32 * PlanesLayout<D>::kPitch),
                       c);
        const uint2 signs = sign_words(c);
        if (lane % 4 == w) kept = signs;
      }
      const unsigned mask =
          cuda::plane_mask(geometry.num_planes - chunk * kChunkBits - lane % 4 * 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (to[i] == nullptr) continue;
        const bool nonfinite = (norms.nonfinite >> (lane / 4 + 8 * i) & 1U) != 0;
        *reinterpret_cast<std::uint32_t*>(to[i] + geometry.chunk_offset(0, chunk, 0) +
                                          lane % 4 * 4) =
            nonfinite ? 0U : (i == 0 ? kept.x : kept.y) & mask;
      }
    }
  }
}

template <typename T, int D, bool kScalar>
void launch(void* stream, const PlanesView& planes, const KvGeometry& kv,
            const SketchGeometry& geometry, const SketchBatch& batch, const std::byte* packed) {
  std::int64_t tokens = 0;
  for (int i = 0; i < batch.count; ++i) {
    tokens = std::max(tokens, std::int64_t{batch[i].tokens});
  }
  if (tokens == 0) return;
  const std::int64_t tiles = (tokens * kv.kv_heads + kTileRows - 1) / kTileRows;
  const std::int64_t per_chunk = tiles * batch.count;
  // A block sees all coordinates of a scalar code.
  const std::int64_t chunks = kScalar ? 1 : geometry.chunks();
  const std::int64_t groups =
      std::clamp<std::int64_t>((kEnoughBlocks + per_chunk - 1) / per_chunk, 1, chunks);
  constexpr int kBytes = PlanesLayout<D>::kBytes;
  const auto kernel = sketch_kernel<T, D, kScalar>;
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(groups),
                  static_cast<unsigned>(batch.count));
  kernel<<<grid, kThreads, kBytes, transfer::cuda::stream_of(stream)>>>(planes, kv, geometry, batch,
                                                                        packed);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

template <typename T, bool kScalar>
void launch_head_dim(void* stream, const PlanesView& planes, const KvGeometry& kv,
                     const SketchGeometry& geometry, const SketchBatch& batch,
                     const std::byte* packed) {
  switch (kv.head_dim) {
    case 64:
      return launch<T, 64, kScalar>(stream, planes, kv, geometry, batch, packed);
    case 96:
      return launch<T, 96, kScalar>(stream, planes, kv, geometry, batch, packed);
    case 128:
      return launch<T, 128, kScalar>(stream, planes, kv, geometry, batch, packed);
    default:
      assert(kv.head_dim == 256);
      return launch<T, 256, kScalar>(stream, planes, kv, geometry, batch, packed);
  }
}

std::int32_t least_tokens(const SketchBatch& batch) {
  std::int32_t tokens = batch[0].tokens;
  for (int i = 1; i < batch.count; ++i) tokens = std::min(tokens, batch[i].tokens);
  return tokens;
}

}  // namespace

namespace cuda {

void sketch_keys(void* stream, const PlanesView& planes, const KvGeometry& kv,
                 const SketchGeometry& geometry, const SketchBatch& batch, const std::byte* packed,
                 const transfer::RowSquares* squares) {
  const bool in_order = batch.count > 0 && batch[0].slots == nullptr;
  if (squares != nullptr && in_order && sketches_prefill(kv, least_tokens(batch))) {
    transfer::Batch<KeySource> keys;
    const std::int64_t token_bytes = kv.kv_heads * kv.row_bytes();
    for (int i = 0; i < batch.count; ++i) {
      keys.push({.data = packed + batch[i].packed_offset * token_bytes,
                 .token_bytes = token_bytes,
                 .head_bytes = kv.row_bytes()});
    }
    return sketch_prefill(stream, planes, kv, geometry, batch, keys, squares);
  }
  const bool scalar = planes.code_bits > 0;
  const auto of_bf16 =
      scalar ? launch_head_dim<__nv_bfloat16, true> : launch_head_dim<__nv_bfloat16, false>;
  const auto of_fp16 = scalar ? launch_head_dim<__half, true> : launch_head_dim<__half, false>;
  (kv.dtype == DType::kFloat16 ? of_fp16 : of_bf16)(stream, planes, kv, geometry, batch, packed);
}

}  // namespace cuda

}  // namespace kvtier::hashing
