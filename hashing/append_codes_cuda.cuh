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

/// Rows of a tile of scalar codes, half of a matrix product. With 16, 16 sequences of 32K tokens
/// took 181 us a step for 171, since the kernel after the append waits for its slowest block.
inline constexpr int kCodeRows = 8;

/// Of a block that writes scalar codes. The whole rotation of head_dim 128 is there before the work
/// that came before the kernel is done, so a step waits for the keys only. That fewer blocks fit on
/// an SM is no matter.
struct CodeShared : Books {
  static constexpr int kPoolBytes = (2 * kCodeRows + 128) * (2 * 128 + 16);
  alignas(16) std::byte pool[kPoolBytes];  // the parts of the keys, then groups of planes
  float sums[kWorkerWarps][kCodeRows];
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
        part_bytes(kCodeRows * pitch),
        groups(kv.head_dim / kBlockPlanes),
        slots(min(min(groups, kWorkerWarps),
                  (CodeShared::kPoolBytes - kParts * part_bytes) / (kBlockPlanes * pitch))) {}
  /// Starts the copy of the groups from `first` on.
  __device__ void load(const PlanesView& planes, int first, CodeShared& shared) const {
    load_planes(planes, first * kBlockPlanes, slots * kBlockPlanes, pitch,
                shared.pool + kParts * part_bytes);
  }
};

/// Products of the tile's keys with the 32 planes in a slot, and this lane's part of the sum of
/// squares of row g. The rows g + 8 of the product are the same.
template <typename T>
__device__ void multiply_group(const CodeLayout<T>& layout, int slot, int head_dim,
                               const CodeShared& shared, float (&c)[4][4], float& squares) {
  constexpr int kParts = CodeLayout<T>::kParts;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const unsigned pool = transfer::cuda::shared_address(shared.pool);
  const unsigned keys =
      pool + static_cast<unsigned>(lane % kCodeRows * layout.pitch + lane / 16 * 16);
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
      for (int i = 0; i < 4; i += 2) {
        float2 x = widen<__nv_bfloat16>(a[half][0][i]);
        if constexpr (kParts == 2) {
          const float2 low = widen<__nv_bfloat16>(a[half][1][i]);
          x = {x.x + low.x, x.y + low.y};
        }
        squares += x.x * x.x + x.y * x.y;
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
  const int row = lane / 4;
  for (int tile = 0; tile * kCodeRows < count; ++tile) {
    const int first_row = tile * kCodeRows;
    const int rows = min(count - first_row, kCodeRows);
    if (tile > 0) sync_workers();  // the keys and sums of the last tile have been read
    stage_keys<T>(args, shared.sources + 2 * first_row, rows, layout.pitch, shared.nonfinite[tile],
                  shared.pool, layout.part_bytes);
    const auto target = [&] { return row < rows ? shared.targets[first_row + row] : RowTarget{}; };
    const auto is_nonfinite = [&] { return (shared.nonfinite[tile] >> row & 1U) != 0; };
    float norm = 0.0F;
    float sum = 0.0F;
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
      LaneCodes codes;
      if (takes) {
        float c[4][4] = {};
        float squares = 0.0F;
        multiply_group<T>(layout, warp, dim, shared, c, squares);
        norm = sqrtf(sum_quad(squares));
        ScalarEncoder encoder(norm, bits);
        codes = encoder.encode([&](int n, int j) { return c[n][j]; });
        sum += encoder.sum();
      }
      if (tile == 0 && first == 0) await_targets();
      if (takes) {
        store_codes(args.geometry, dim, bits, group, codes, is_nonfinite(), target().sketch);
      }
    }
    sum = sum_quad(sum);
    if (lane % 4 == 0) shared.sums[warp][row] = sum;
    sync_workers();  // the sums are there
    std::byte* to = target().norms;
    if (warp != 0 || lane % 4 != 0 || to == nullptr) continue;
    float all = 0.0F;
    for (int w = 0; w < kWorkerWarps; ++w) all += shared.sums[w][row];
    *reinterpret_cast<std::uint16_t*>(to) =
        is_nonfinite() ? kNonfiniteNorm : scalar_norm_bits(norm, all, bits, dim);
  }
}

}  // namespace kvtier::hashing::cuda
