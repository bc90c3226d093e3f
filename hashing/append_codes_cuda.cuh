#pragma once

#include "hashing/append_cuda.cuh"
#include "hashing/sketch_cuda.cuh"
#include "transfer/device/tensor_core.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

/// Scalar codes of an append of few tokens (hashing/append_cuda.cu).
namespace kvtier::hashing::cuda {

/// Of a block that writes scalar codes. The whole rotation of head_dim 128 is there before the work
/// that came before the kernel is done, so a step waits for the keys only. A launch for a step has
/// one such block per 16 rows: that fewer fit on an SM is no matter.
struct CodeShared : Books {
  static constexpr int kPoolBytes = (2 * kTileRows + 128) * (2 * 128 + 16);
  alignas(16) std::byte pool[kPoolBytes];  // the parts of the keys, then groups of planes
  float sums[kWorkerWarps][kTileRows];
};
/// What a kernel may have without a request for more.
static_assert(sizeof(CodeShared) <= 48 * 1024);

/// Where a block has the keys of a tile and the rotation of scalar codes, as many groups of 32
/// planes at once as fit: one per warp, two or one of head_dim 256.
template <typename T>
struct CodeLayout {
  static constexpr int kParts = std::is_same_v<T, __half> ? 2 : 1;
  int pitch, part_bytes, groups, slots;

  __device__ explicit CodeLayout(const transfer::KvGeometry& kv)
      : pitch(pitch_of(kv)),
        part_bytes(kTileRows * pitch),
        groups(kv.head_dim / kBlockPlanes),
        slots(min(min(groups, kWorkerWarps),
                  (CodeShared::kPoolBytes - kParts * part_bytes) / (kBlockPlanes * pitch))) {}
  /// Starts the copy of the groups from `first` on.
  __device__ void load(const PlanesView& planes, int first, CodeShared& shared) const {
    load_planes(planes, first * kBlockPlanes, slots * kBlockPlanes, pitch,
                shared.pool + kParts * part_bytes);
  }
};

/// Products of the tile's keys with the 32 planes in a slot, and this lane's part of the sums of
/// squares of rows g and, with `kBoth`, g + 8.
template <typename T, bool kBoth>
__device__ void multiply_group(const CodeLayout<T>& layout, int slot, int head_dim,
                               const CodeShared& shared, float (&c)[4][4], float (&squares)[2]) {
  constexpr int kParts = CodeLayout<T>::kParts;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const unsigned pool = transfer::cuda::shared_address(shared.pool);
  const unsigned keys = pool + static_cast<unsigned>(lane % 16 * layout.pitch + lane / 16 * 16);
  const unsigned planes =
      pool + static_cast<unsigned>(kParts * layout.part_bytes +
                                   (slot * kBlockPlanes + lane % 8) * layout.pitch + lane / 8 * 16);
#pragma unroll 1
  for (int step = 0; step < head_dim / 32; ++step) {
    unsigned a[2][kParts][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        transfer::cuda::load_matrices(
            a[half][part],
            keys + static_cast<unsigned>(part * layout.part_bytes + step * 64 + half * 32));
      }
#pragma unroll
      for (int i = 0; i < 4; i += kBoth ? 1 : 2) {
        float2 x = widen<__nv_bfloat16>(a[half][0][i]);
        if constexpr (kParts == 2) {
          const float2 low = widen<__nv_bfloat16>(a[half][1][i]);
          x = {x.x + low.x, x.y + low.y};
        }
        squares[i % 2] += x.x * x.x + x.y * x.y;
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      unsigned b[4];
      transfer::cuda::load_matrices(
          b, planes + static_cast<unsigned>(n * 8 * layout.pitch + step * 64));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          transfer::cuda::multiply_add<__nv_bfloat16>(c[n], a[half][part], b[2 * half],
                                                      b[2 * half + 1]);
        }
      }
    }
  }
}

/// The block that writes scalar codes, and what takes the place of key norms: a warp has 32
/// coordinates of each row at a time.
template <typename T>
__device__ void encode_tiles(const AppendArgs& args, int count, CodeShared& shared) {
  const CodeLayout<T> layout(args.kv);
  const int dim = args.kv.head_dim;
  const int bits = args.planes.code_bits;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  for (int tile = 0; tile * kTileRows < count; ++tile) {
    const int rows = min(count - tile * kTileRows, kTileRows);
    // A step of one sequence of eight KV heads has rows in the first half alone.
    const bool both = rows > kTileRows / 2;
    if (tile > 0) sync_workers();  // the keys and sums of the last tile have been read
    stage_keys<T>(args, tile, rows, layout.pitch, shared, shared.pool, layout.part_bytes);
    float norms[2] = {};
    float sums[2] = {};
#pragma unroll 1
    for (int first = 0; first < layout.groups; first += layout.slots) {
      if (layout.slots < layout.groups && (tile > 0 || first > 0)) {
        sync_workers();  // the last planes have been read
        layout.load(args.planes, first, shared);
      }
      transfer::cuda::copy_async_wait<0>();
      sync_workers();  // keys and planes are there
      const int group = first + warp;
      const bool takes = warp < layout.slots && group < layout.groups;
      LaneCodes codes[2];
      if (takes) {
        float c[4][4] = {};
        float squares[2] = {};
        if (both) {
          multiply_group<T, true>(layout, warp, dim, shared, c, squares);
        } else {
          multiply_group<T, false>(layout, warp, dim, shared, c, squares);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i == 1 && !both) break;
          norms[i] = sqrtf(sum_quad(squares[i]));
          ScalarEncoder encoder(norms[i], bits);
          codes[i] = encoder.encode([&](int n, int j) { return c[n][2 * i + j]; });
          sums[i] += encoder.sum();
        }
      }
      if (tile == 0 && first == 0) await_targets();
      if (!takes) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !both) break;
        const int row = lane / 4 + 8 * i;
        std::byte* to = row < rows ? shared.targets[tile * kTileRows + row].sketch : nullptr;
        const bool nonfinite = (shared.nonfinite[tile] >> row & 1U) != 0;
        store_codes(args.geometry, dim, bits, group, codes[i], nonfinite, to);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && !both) break;
      const float sum = sum_quad(sums[i]);
      if (lane % 4 == 0) shared.sums[warp][lane / 4 + 8 * i] = sum;
    }
    sync_workers();  // the sums are there
    if (warp != 0 || lane % 4 != 0) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && !both) break;
      const int row = lane / 4 + 8 * i;
      std::byte* to = row < rows ? shared.targets[tile * kTileRows + row].norms : nullptr;
      if (to == nullptr) continue;
      float sum = 0.0F;
      for (int w = 0; w < kWorkerWarps; ++w) sum += shared.sums[w][row];
      const bool nonfinite = (shared.nonfinite[tile] >> row & 1U) != 0;
      *reinterpret_cast<std::uint16_t*>(to) =
          nonfinite ? kNonfiniteNorm : scalar_norm_bits(norms[i], sum, bits, dim);
    }
  }
}

}  // namespace kvtier::hashing::cuda
