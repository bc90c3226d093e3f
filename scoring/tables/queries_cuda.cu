#include "scoring/block/block_cuda.cuh"
#include "scoring/estimator_kernels.h"
#include "scoring/score_math.h"
#include "scoring/tables/estimator_cuda.cuh"
#include "transfer/device/launch_cuda.cuh"
#include "transfer/device/tensor_core.cuh"
#include "transfer/kv/convert_cuda.cuh"

#include <algorithm>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

using transfer::cuda::HeadSource;
using transfer::cuda::kPiece;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kClusterBlocks = 8;  ///< They share the planes of a query head.
/// Query heads of one query that a cluster takes at a time: few for few queries, so that there are
/// more clusters; many keep all warps busy and read the planes less often.
constexpr int kFewHeads = 4;
constexpr int kManyHeads = 16;
/// Query heads of a launch from which a cluster takes many (H200, 256 heads, 256 planes: 6.5 us for
/// 8.6 us).
constexpr int kManyFrom = 256;
/// Query heads of a launch up to which this is faster than two kernels (H200: norm-aware with 256
/// planes 13.9 us for 14.8 us with 1024 heads, 25.4 us for 25.1 us with 2048; soft collision with
/// 600 planes 10.1 us for 12.1 us with 128, 18.1 us for 15.6 us with 256).
constexpr int kMostHeads = 1024;
constexpr int kMostCollisionHeads = 128;
constexpr int kMaxHeadDim = 256;
/// Planes of a block: an eighth of 1024, and up to a table more.
constexpr int kMaxPlanes = 160;
constexpr int kMaxSlots = kClusterBlocks * kMaxPlanes / 32;
/// Clusters worth having before one takes a second group of heads: three blocks per SM of an H200.
constexpr int kMaxClusters = 48;
constexpr int kMaxHalfBits = 6;  ///< Planes of half a table.

struct QueryArgs {
  transfer::QueryItems items;
  ScoreParams params;
  hashing::PlanesView planes;
  float* queries;
  float* entries;
  QueryScalars* scalars;
  std::int64_t entries_per_head;
  int query_heads;
  int head_groups;   // of a query
  int num_groups;    // of all queries
  int block_units;   // tables of a block, or planes for norm-aware
  int block_planes;  // planes of a block
  bool after_append;
};

template <int kHeads>
struct Shared {
  alignas(16) float query[kHeads][kMaxHeadDim];
  // soft: probability that a clear bit agrees, then a set bit; else the projection
  float2 planes[kHeads][kMaxPlanes];
  float largest[2][kHeads][kMaxSlots];     // of each block and warp; written by all blocks
  double agreement[2][kHeads][kMaxSlots];  // of the cluster's first block
  float norms[kHeads];
};

__device__ unsigned cluster_rank() {
  unsigned rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
/// Writes to the same variable of another block of the cluster.
__device__ void store_at(float* to, unsigned rank, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .u32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.f32 [a], %2; }" ::"r"(
          transfer::cuda::shared_address(to)),
      "r"(rank), "f"(value)
      : "memory");
#endif
}
__device__ void store_at(double* to, unsigned rank, double value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .u32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.f64 [a], %2; }" ::"r"(
          transfer::cuda::shared_address(to)),
      "r"(rank), "d"(value)
      : "memory");
#endif
}

/// What a block has of the planes, and of the heads at hand.
struct Part {
  int first_unit;  // table, or plane for norm-aware
  int units;
  int first_plane;
  int planes;
  int plane_warps;  // the same in all blocks
  int query_index;
  int head;   // the first of the group
  int heads;  // 1..kHeads
};

__device__ void load_planes(const hashing::PlanesView& planes, const Part& part, int pitch,
                            std::byte* to) {
  const int pieces = planes.head_dim / kPiece;
  const unsigned base = transfer::cuda::shared_address(to);
  for (int i = static_cast<int>(threadIdx.x); i < part.planes * pieces; i += kThreads) {
    const int plane = small_quotient(i, pieces);
    const int piece = i - plane * pieces;
    transfer::cuda::copy_async_16(
        base + static_cast<unsigned>(plane * pitch + piece * 2 * kPiece),
        planes.bf16 + std::int64_t{part.first_plane + plane} * planes.head_dim + piece * kPiece,
        true);
  }
  transfer::cuda::copy_async_commit();
}

/// Brings the group's heads to shared memory. Returns 1 when this thread has found NaN or infinity
/// in the query; one block of a query looks.
template <int kHeads>
__device__ int read_heads(const QueryArgs& args, const Part& part, unsigned rank,
                          Shared<kHeads>& shared) {
  const int dim = args.planes.head_dim;
  const int pieces = dim / kPiece;
  const transfer::QueryItem& item = args.items[part.query_index];
  int nonfinite = 0;
  if (part.head == 0 && rank == kClusterBlocks - 1) {
    for (int i = static_cast<int>(threadIdx.x); i < args.query_heads * pieces; i += kThreads) {
      const int head = small_quotient(i, pieces);
      const HeadSource source = transfer::cuda::head_source(item.query, item.token, head);
      float x[kPiece];
      transfer::cuda::to_floats(transfer::cuda::load_piece(source, i - head * pieces), source.dtype,
                                x);
      for (const float value : x) nonfinite |= isfinite(value) ? 0 : 1;
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < (part.heads + 1) / 2 * 2 * pieces;
       i += kThreads) {
    const int head = small_quotient(i, pieces);
    const int piece = i - head * pieces;
    const int at = piece * kPiece;
    float x[kPiece] = {};
    if (head < part.heads) {
      const HeadSource source =
          transfer::cuda::head_source(item.query, item.token, part.head + head);
      transfer::cuda::to_floats(transfer::cuda::load_piece(source, piece), source.dtype, x);
    }
    auto* local = reinterpret_cast<float4*>(&shared.query[head][at]);
    local[0] = {x[0], x[1], x[2], x[3]};
    local[1] = {x[4], x[5], x[6], x[7]};
  }
  return nonfinite;
}

/// Each block writes its share of the heads to `queries`, a thread what it has brought. Last of
/// all: a barrier of the cluster waits for stores to memory.
template <int kHeads>
__device__ void write_heads(const QueryArgs& args, const Part& part, unsigned rank,
                            const Shared<kHeads>& shared) {
  const int pieces = args.planes.head_dim / kPiece;
  const std::int64_t first_head = std::int64_t{part.query_index} * args.query_heads + part.head;
  for (int i = static_cast<int>(threadIdx.x); i < part.heads * pieces; i += kThreads) {
    if (static_cast<unsigned>(i) % kClusterBlocks != rank) continue;
    const int head = small_quotient(i, pieces);
    const auto* local =
        reinterpret_cast<const float4*>(&shared.query[head][(i - head * pieces) * kPiece]);
    auto* global = reinterpret_cast<float4*>(args.queries + (first_head * pieces + i) * kPiece);
    global[0] = local[0];
    global[1] = local[1];
  }
}

/// Projections of two heads onto one plane. Sums in the order of the coordinates, as every backend
/// does, so that integer weights agree.
__device__ float2 project(const std::byte* plane, const float* first, const float* second,
                          int head_dim) {
  float2 sum{0.0F, 0.0F};
#pragma unroll 4
  for (int i = 0; i < head_dim / kPiece; ++i) {
    const uint4 loaded = reinterpret_cast<const uint4*>(plane)[i];
    const unsigned pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    float a[kPiece];
    float b[kPiece];
    *reinterpret_cast<float4*>(a) = reinterpret_cast<const float4*>(first)[2 * i];
    *reinterpret_cast<float4*>(a + 4) = reinterpret_cast<const float4*>(first)[2 * i + 1];
    *reinterpret_cast<float4*>(b) = reinterpret_cast<const float4*>(second)[2 * i];
    *reinterpret_cast<float4*>(b + 4) = reinterpret_cast<const float4*>(second)[2 * i + 1];
#pragma unroll
    for (int x = 0; x < kPiece; ++x) {
      const unsigned pair = pairs[x / 2];
      const float w = __uint_as_float(x % 2 == 0 ? pair << 16 : pair & 0xFFFF0000U);
      sum.x = fmaf(a[x], w, sum.x);
      sum.y = fmaf(b[x], w, sum.y);
    }
  }
  return sum;
}

/// Projects all heads of the group onto the block's planes. A warp has 32 planes and two heads. The
/// warp's largest weight goes to every block of the cluster, its agreement to the first.
template <int kHeads>
__device__ void project_heads(const QueryArgs& args, const Part& part, unsigned rank, int turn,
                              int pitch, const std::byte* planes, Shared<kHeads>& shared) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int dim = args.planes.head_dim;
  const float scale = 1.0F / (sqrtf(static_cast<float>(dim)) * args.params.tau);
  for (int unit = static_cast<int>(threadIdx.x / 32);
       unit < part.plane_warps * ((part.heads + 1) / 2); unit += kWarps) {
    const int pair = small_quotient(unit, part.plane_warps);
    const int slice = unit - pair * part.plane_warps;
    const int head = pair * 2;
    const int plane = slice * 32 + lane;
    const bool present = plane < part.planes;
    float2 sums{0.0F, 0.0F};
    if (present) {
      sums = project(planes + plane * pitch, shared.query[head], shared.query[head + 1], dim);
    }
    const int slot = static_cast<int>(rank) * part.plane_warps + slice;
    if (args.params.estimator == Estimator::kSoftCollision) {
      double agreement[2] = {0.0, 0.0};
      if (present) {
        const PlaneChances first = plane_chances(sums.x, scale);
        const PlaneChances second = plane_chances(sums.y, scale);
        shared.planes[head][plane] = {first.clear, first.set};
        shared.planes[head + 1][plane] = {second.clear, second.set};
        agreement[0] = static_cast<double>(first.agreement);
        agreement[1] = static_cast<double>(second.agreement);
      }
      for (double& sum : agreement) sum = warp_sum(sum);
      if (lane < 2) {
        store_at(&shared.agreement[turn][head + lane][slot], 0,
                 lane == 0 ? agreement[0] : agreement[1]);
      }
      continue;
    }
    if (present) {
      shared.planes[head][plane].x = sums.x;
      shared.planes[head + 1][plane].x = sums.y;
    }
    if (args.params.estimator != Estimator::kNormAware) continue;
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const float first = reduce_warp(fabsf(sums.x), larger);
    const float second = reduce_warp(fabsf(sums.y), larger);
    if (lane < 2 * kClusterBlocks) {
      const int which = lane / kClusterBlocks;
      store_at(&shared.largest[turn][head + which][slot],
               static_cast<unsigned>(lane % kClusterBlocks), which == 0 ? first : second);
    }
  }
}

/// Norms of the heads, a warp each, in double.
template <int kHeads>
__device__ void measure_heads(int head_dim, int heads, Shared<kHeads>& shared) {
  for (int head = kWarps - 1 - static_cast<int>(threadIdx.x / 32); head < heads; head += kWarps) {
    double square = 0.0;
    for (int x = static_cast<int>(threadIdx.x % 32); x < head_dim; x += 32) {
      const auto value = static_cast<double>(shared.query[head][x]);
      square += value * value;
    }
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) shared.norms[head] = static_cast<float>(sqrt(square));
  }
}

__device__ float* entries_of(const QueryArgs& args, const Part& part, int head) {
  const std::int64_t at = std::int64_t{part.query_index} * args.query_heads + part.head + head;
  return args.entries + at * args.entries_per_head;
}

/// A warp fills one half of one table of one head at a time.
template <int kHeads>
__device__ void write_soft_tables(const QueryArgs& args, const Part& part,
                                  const Shared<kHeads>& shared) {
  const int low_bits = args.params.planes_per_table / 2;
  const int high_bits = args.params.planes_per_table - low_bits;
  const int row = (1 << high_bits) + (1 << low_bits);
  for (int i = static_cast<int>(threadIdx.x / 32); i < part.heads * part.units * 2; i += kWarps) {
    const bool high = i % 2 == 0;
    const int head = small_quotient(i / 2, part.units);
    const int table = i / 2 - head * part.units;
    const int bits = high ? high_bits : low_bits;
    const float2* factors =
        &shared.planes[head][table * args.params.planes_per_table + (high ? 0 : high_bits)];
    float* to = entries_of(args, part, head) + (part.first_unit + table) * row +
                (high ? 0 : 1 << high_bits);
    for (int pattern = static_cast<int>(threadIdx.x % 32); pattern < 1 << bits; pattern += 32) {
      float product = 1.0F;
#pragma unroll
      for (int bit = 0; bit < kMaxHalfBits; ++bit) {
        if (bit >= bits) break;
        const float2 factor = factors[bit];
        product *= (pattern >> (bits - 1 - bit) & 1) != 0 ? factor.y : factor.x;
      }
      to[pattern] = product;
    }
  }
}

template <int kHeads>
__device__ void write_buckets(const QueryArgs& args, const Part& part,
                              const Shared<kHeads>& shared) {
  const int bits = args.params.planes_per_table;
  for (int i = static_cast<int>(threadIdx.x); i < part.heads * part.units; i += kThreads) {
    const int head = i / part.units;
    const int table = i % part.units;
    int bucket = 0;
    for (int bit = 0; bit < bits; ++bit) {
      bucket = 2 * bucket + (shared.planes[head][table * bits + bit].x >= 0.0F ? 1 : 0);
    }
    entries_of(args, part, head)[part.first_unit + table] = __int_as_float(bucket);
  }
}

/// The largest weight of a head over all planes.
template <int kHeads>
__device__ float largest_weight(const Part& part, int turn, int head,
                                const Shared<kHeads>& shared) {
  float largest = 0.0F;
  for (int slot = 0; slot < kClusterBlocks * part.plane_warps; ++slot) {
    largest = fmaxf(largest, shared.largest[turn][head][slot]);
  }
  return largest;
}

__device__ bool usable(float largest) { return largest > 0.0F && largest <= 3.4028235e38F; }

template <int kHeads>
__device__ void write_weights(const QueryArgs& args, const Part& part, int turn,
                              const Shared<kHeads>& shared) {
  const bool integers = args.params.query_bits > 0;
  const float levels = integers ? weight_levels(args.params.query_bits) : 1.0F;
  for (int i = static_cast<int>(threadIdx.x / 32); i < part.heads * part.plane_warps; i += kWarps) {
    const int head = small_quotient(i, part.plane_warps);
    const int slice = i - head * part.plane_warps;
    const int plane = slice * 32 + static_cast<int>(threadIdx.x % 32);
    const float largest = largest_weight(part, turn, head, shared);
    if (plane >= part.planes) continue;
    float weight = shared.planes[head][plane].x;
    if (integers) weight = usable(largest) ? quantised_weight(weight, largest, levels) : 0.0F;
    write_weight(args.params, weight, entries_of(args, part, head) + part.first_plane + plane);
  }
}

/// By a thread per head of the cluster's first block, once all blocks have written to it.
template <int kHeads>
__device__ void write_scalars(const QueryArgs& args, const Part& part, int turn,
                              const Shared<kHeads>& shared) {
  const auto head = static_cast<int>(threadIdx.x);
  if (head >= part.heads) return;
  const ScoreParams& params = args.params;
  QueryScalars scalars;
  scalars.query_norm = shared.norms[head];
  if (params.estimator == Estimator::kSoftCollision) {
    double agreement = 0.0;
    for (int slot = 0; slot < kClusterBlocks * part.plane_warps; ++slot) {
      agreement += shared.agreement[turn][head][slot];
    }
    scalars.mean_agreement = static_cast<float>(agreement / params.planes_read());
  }
  if (params.estimator == Estimator::kNormAware && params.query_bits > 0) {
    const float largest = largest_weight(part, turn, head, shared);
    scalars.weight_step = usable(largest) ? largest / weight_levels(params.query_bits) : 0.0F;
  }
  args.scalars[std::int64_t{part.query_index} * args.query_heads + part.head + head] = scalars;
}

/// A cluster takes groups of heads of a query, its blocks an eighth of the planes each. Shared
/// memory: the block's planes, padded so that eight of them lie in eight groups of banks.
///
/// Without `after_append` nothing is touched before the wait. With it, the kernel before is the
/// append, which starts this one only when all work before the append is done: the caller's queries
/// are there, and no kernel reads `queries`, `entries` and `scalars` of the last step any more. The
/// append touches none of these, so the wait for it may come last.
template <int kHeads>
__global__ void __launch_bounds__(kThreads)
    read_queries_kernel(const __grid_constant__ QueryArgs args) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared<kHeads>*>(memory);
  std::byte* planes = memory + sizeof(Shared<kHeads>);
  const unsigned rank = cluster_rank();
  const int dim = args.planes.head_dim;
  const int pitch = 2 * dim + 16;
  const bool by_plane = args.params.estimator == Estimator::kNormAware;
  Part part{};
  const int units = by_plane ? args.params.query_planes() : args.params.tables;
  const int planes_per_unit = by_plane ? 1 : args.params.planes_per_table;
  part.first_unit = min(static_cast<int>(rank) * args.block_units, units);
  part.units = min(units - part.first_unit, args.block_units);
  part.first_plane = part.first_unit * planes_per_unit;
  part.planes = part.units * planes_per_unit;
  part.plane_warps = (args.block_planes + 31) / 32;

  cluster_arrive();
  load_planes(args.planes, part, pitch, planes);
  if (!args.after_append) transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();

  const int clusters = static_cast<int>(gridDim.x) / kClusterBlocks;
  bool first = true;
  int turn = 0;  // Slots of one turn are read while those of the next are written.
  for (int group = static_cast<int>(blockIdx.x) / kClusterBlocks; group < args.num_groups;
       group += clusters, turn ^= 1) {
    part.query_index = small_quotient(group, args.head_groups);
    part.head = (group - part.query_index * args.head_groups) * kHeads;
    part.heads = min(args.query_heads - part.head, kHeads);
    const int nonfinite = read_heads(args, part, rank, shared);
    transfer::cuda::copy_async_wait<0>();
    // The heads and the planes are there, and no thread reads those of the last pass.
    if (__syncthreads_or(nonfinite) != 0 && threadIdx.x == 0) {
      transfer::cuda::raise_nonfinite(args.items[part.query_index]);
    }
    if (first) cluster_wait();  // every block has started: its shared memory may be written
    first = false;
    project_heads(args, part, rank, turn, pitch, planes, shared);
    if (rank == 0) measure_heads(dim, part.heads, shared);
    cluster_arrive();
    if (args.params.estimator != Estimator::kNormAware) {
      __syncthreads();  // all planes of the block are projected
      if (part.units > 0) {
        if (args.params.estimator == Estimator::kSoftCollision) {
          write_soft_tables(args, part, shared);
        } else {
          write_buckets(args, part, shared);
        }
      }
    }
    cluster_wait();  // all slots are written
    if (by_plane) write_weights(args, part, turn, shared);
    if (rank == 0) write_scalars(args, part, turn, shared);
    write_heads(args, part, rank, shared);
  }
  if (args.after_append) transfer::cuda::wait_for_previous();
}

}  // namespace

bool reads_queries_at_once(const ScoreParams& params, const QueryInput& input) {
  const int most = params.estimator == Estimator::kNormAware ? kMostHeads : kMostCollisionHeads;
  return input.items.count * input.kv.query_heads() <= most && transfer::cuda::overlaps_kernels();
}

void read_queries(void* stream, const ScoreParams& params, const hashing::PlanesView& planes,
                  const QueryInput& input, float* queries, float* entries, QueryScalars* scalars) {
  if (input.items.count == 0) return;
  const bool many = input.items.count * input.kv.query_heads() >= kManyFrom;
  const int heads = many ? kManyHeads : kFewHeads;
  const int head_groups = (input.kv.query_heads() + heads - 1) / heads;
  const bool by_plane = params.estimator == Estimator::kNormAware;
  const int units = by_plane ? params.query_planes() : params.tables;
  const int block_units = (units + kClusterBlocks - 1) / kClusterBlocks;
  const QueryArgs args{.items = input.items,
                       .params = params,
                       .planes = planes,
                       .queries = queries,
                       .entries = entries,
                       .scalars = scalars,
                       .entries_per_head = entries_per_head(params),
                       .query_heads = input.kv.query_heads(),
                       .head_groups = head_groups,
                       .num_groups = input.items.count * head_groups,
                       .block_units = block_units,
                       .block_planes = block_units * (by_plane ? 1 : params.planes_per_table),
                       .after_append = input.after_append};
  const std::size_t bytes = (many ? sizeof(Shared<kManyHeads>) : sizeof(Shared<kFewHeads>)) +
                            static_cast<std::size_t>(args.block_planes) *
                                static_cast<std::size_t>(2 * planes.head_dim + 16);
  const auto kernel = many ? read_queries_kernel<kManyHeads> : read_queries_kernel<kFewHeads>;
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)));
  // An SM changes its share of shared memory when it is empty, and the next kernel needs the most.
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared));
  const int clusters = std::min(args.num_groups, kMaxClusters);
  transfer::cuda::launch_overlapping_clusters(
      transfer::cuda::stream_of(stream), kernel,
      dim3(static_cast<unsigned>(clusters * kClusterBlocks)), kClusterBlocks, kThreads, bytes,
      args);
}

}  // namespace kvtier::scoring::cuda
