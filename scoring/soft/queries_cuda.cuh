#pragma once

#include "scoring/fused/tables_cuda.cuh"
#include "scoring/soft/tables.cuh"
#include "scoring/tables/estimator_cuda.cuh"

#include <cstdint>

/// The tables of soft collision of the P10 L60 shape, which a kernel that selects makes for itself:
/// each block of a group posts the chances of its share of the planes, and makes all tables.
namespace kvtier::scoring::cuda {

inline constexpr int kP10L60Bits = kP10L60Tables * kP10L60Planes;

/// Dynamic shared memory, before there are values.
struct CollisionTables {
  FusedTables queries;
  alignas(16) float2 chances[kPairHeads][kP10L60Bits];  ///< Of a clear bit and of a set one.
};

/// Projects the group's heads onto the block's share of the planes and posts their chances. The
/// workers.
__device__ inline void post_chances(const FilterArgs& args, const FusedInput& input,
                                    int query_index, int kv_head, const BlockExchange& peers,
                                    const FusedPlanes& share, FusedTables& tables) {
  const int group = args.request.kv.group;
  const auto dim = static_cast<float>(args.request.planes.head_dim);
  const float scale = 1.0F / (sqrtf(dim) * args.request.params.tau);
  const int staged =
      bring_heads(args, input, query_index, kv_head, kP10L60Bits, peers, share, tables);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < share.count * group; i += share.workers) {
    const int plane = small_quotient(i, group);
    const int head = i - plane * group;
    const PlaneChances chances =
        plane_chances(project(args, share, staged, kP10L60Bits, plane, head, tables), scale);
    const int place = head * kP10L60Bits + share.first + plane;
    static_assert(2 * kPairHeads * kP10L60Bits <= kMostProducts);
    peers.post_pair(peers.box.products + 2 * place, kProductsStage, __float_as_uint(chances.clear),
                    __float_as_uint(chances.set));
  }
}

/// Brings all chances to shared memory. All threads; ends with a barrier.
template <int kHeads>
__device__ void fetch_chances(int group, const BlockExchange& peers, CollisionTables& tables) {
  constexpr int kMost = (kHeads * kP10L60Bits + kFusedThreads - 1) / kFusedThreads;
  const auto thread = static_cast<int>(threadIdx.x);
  const int count = (group * kP10L60Bits - thread + kFusedThreads - 1) / kFusedThreads;
  uint2 bits[kMost];
  peers.fetch<kMost>(peers.box.products + 2 * thread, 2 * kFusedThreads, count, kProductsStage,
                     bits);
  float2* const chances = &tables.chances[0][0];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int place = thread + i * kFusedThreads;
    if (place >= kHeads * kP10L60Bits) break;
    // 0 past the group. The maximum turns NaN, of a query that is not finite, into 0 too.
    chances[place] = make_float2(fmaxf(__uint_as_float(bits[i].x), 0.0F),
                                 fmaxf(__uint_as_float(bits[i].y), 0.0F));
  }
  __syncthreads();
  peers.next_epoch();
}

/// Makes the tables: fills `pairs` as `P10L60Entries` does. All threads; ends with a barrier.
template <int kHeads>
__device__ void make_pairs(const CollisionTables& tables, std::uint32_t* pairs) {
  constexpr int kEntries = kP10L60Tables * kP10L60RowBytes / 4;
  constexpr int kHalfBits = kP10L60Planes / 2;
  constexpr int kHalves = 2 * kP10L60Tables;
  constexpr int kOwn = 16;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int flips = lane % kOwn;
  static_assert(kHeads / 2 * kHalves * 2 <= kFusedThreads);
  // A thread has half the entries of half of a table of two heads, those with the same highest bit.
  // It takes them in an order of its own, that of their numbers with the lane's bits flipped: so
  // the lanes of a warp write to different banks.
  if (const int unit = static_cast<int>(threadIdx.x) / 32 * kOwn + flips;
      unit < kHeads / 2 * kHalves) {
    const int half = unit % kHalves;
    const int pair = unit / kHalves;
    float2 products[kOwn];
#pragma unroll
    for (int bit = 0; bit < kHalfBits; ++bit) {
      const float2 first = tables.chances[2 * pair][half * kHalfBits + bit];
      const float2 second = tables.chances[2 * pair + 1][half * kHalfBits + bit];
      const bool set = bit == 0 ? lane >= kOwn : (flips >> (kHalfBits - 1 - bit) & 1) != 0;
      const float2 same = set ? make_float2(first.y, second.y) : make_float2(first.x, second.x);
      if (bit == 0) {
        products[0] = make_float2(kPairScale * same.x, kPairScale * same.y);
        continue;
      }
      const float2 other = set ? make_float2(first.x, second.x) : make_float2(first.y, second.y);
#pragma unroll
      for (int i = kOwn / 2 - 1; i >= 0; --i) {
        if (i >= 1 << (bit - 1)) continue;
        const float2 before = products[i];
        products[2 * i] = make_float2(before.x * same.x, before.y * same.y);
        products[2 * i + 1] = make_float2(before.x * other.x, before.y * other.y);
      }
    }
    std::uint32_t* const to = pairs + pair * kEntries + half * 32 + lane / kOwn * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const __half2 both = __floats2half2_rn(products[i].x, products[i].y);
      to[i ^ flips] = *reinterpret_cast<const std::uint32_t*>(&both);
    }
  }
  __syncthreads();
}

}  // namespace kvtier::scoring::cuda
