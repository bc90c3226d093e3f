#pragma once

#include "scoring/fused/tables_cuda.cuh"
#include "scoring/stream/stream_cuda.cuh"

#include <cstdint>

/// The weights of the queries, which each block of the pass makes for itself, beside an append.
namespace kvtier::scoring::cuda {

/// Where they are made, in shared memory: a group's queries, its projections, and planes, as many
/// at a time as there is room for.
struct StreamTables {
  static constexpr int kLeastPlaneBytes = 16 * 1024;

  /// Bytes of the queries and the projections of a group.
  __host__ __device__ static int products_at(int group, int head_dim) {
    return group * FusedTables::query_pitch(head_dim) * 4;
  }
  __host__ __device__ static int planes_at(int group, int head_dim, int projections) {
    return products_at(group, head_dim) + group * projections * 4;
  }
};

/// Makes the weights of one group after another in `memory`.
class StreamQueryMaker {
 public:
  __device__ StreamQueryMaker(const FilterArgs& args, const FusedInput& input, int chunks,
                              std::byte* memory, int bytes)
      : args_(args),
        input_(input),
        chunks_(chunks),
        dim_(args.request.planes.head_dim),
        all_(projections_of(args.request.params, chunks)),
        queries_(reinterpret_cast<float*>(memory)) {
    const int group = args.request.kv.group;
    const int planes_at = StreamTables::planes_at(group, dim_, all_);
    products_ = reinterpret_cast<float*>(memory + StreamTables::products_at(group, dim_));
    planes_ = memory + planes_at;
    at_once_ =
        min(small_quotient(bytes - planes_at, plane_pitch(dim_)), args.request.params.projections);
  }

  /// Starts to copy the first planes, which no kernel writes. The memory is free.
  __device__ void start() const { copy_planes(0); }
  /// Fills columns, weight sums, factors and norms for the heads of a group, once `start` was
  /// called. `meanwhile` is called when all copies of planes are under way, and starts `kGroups`
  /// groups of copies. All threads; ends with a barrier, after which the memory is free.
  template <int kBits, int kGroups, typename Meanwhile>
  __device__ void make(int query_index, int kv_head, const Meanwhile& meanwhile,
                       StreamQueries& queries) const {
    const int group = args_.request.kv.group;
    const int num_planes = args_.request.params.projections;
    const auto thread = static_cast<int>(threadIdx.x);
    load_heads(query_index, kv_head);
    for (int i = thread; i < kStreamColumns; i += kFusedThreads) queries.columns[i] = 0;
    if (thread < kMaxGroup) {
      queries.weight_sums[thread] = 0;
      queries.largest[thread] = 0;
    }
#pragma unroll 1
    for (int first = 0; first < num_planes; first += at_once_) {
      if (first > 0) copy_planes(first);
      if (first + at_once_ >= num_planes) {
        meanwhile();
        transfer::cuda::copy_async_wait<kGroups>();
      } else {
        transfer::cuda::copy_async_wait<0>();
      }
      __syncthreads();  // heads and planes are there
      const int count = min(at_once_, num_planes - first);
#pragma unroll 1
      for (int i = thread; i < count * group; i += kFusedThreads) {
        // The lanes of a warp have neighbouring planes, and read the head together.
        const int head = small_quotient(i, count);
        const int plane = i - head * count;
        const float product = project(planes_ + plane * plane_pitch(dim_),
                                      queries_ + head * FusedTables::query_pitch(dim_), dim_);
        products_[head * all_ + first + plane] = product;
      }
      __syncthreads();  // the projections are there, and no thread needs the planes any more
    }
    measure(queries);
    __syncthreads();  // the largest are known
    write_weights<kBits>(queries);
    __syncthreads();  // columns and factors are there, and no thread needs the projections any more
  }

 private:
  __device__ void copy_planes(int first) const {
    const hashing::PlanesView& planes = args_.request.planes;
    const int pieces = dim_ / kPiece;
    const int count = min(at_once_, args_.request.params.projections - first);
    const unsigned to = transfer::cuda::shared_address(planes_);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count * pieces; i += kFusedThreads) {
      const int plane = small_quotient(i, pieces);
      const int piece = i - plane * pieces;
      transfer::cuda::copy_async_16(
          to + static_cast<unsigned>(plane * plane_pitch(dim_) + piece * 2 * kPiece),
          planes.bf16 + std::int64_t{first + plane} * dim_ + piece * kPiece, true);
    }
    transfer::cuda::copy_async_commit();
  }
  /// Brings the heads to shared memory; a barrier must follow.
  __device__ void load_heads(int query_index, int kv_head) const {
    const int group = args_.request.kv.group;
    const int pieces = dim_ / kPiece;
    const transfer::QueryItem& item = input_.items[query_index];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < group * pieces; i += kFusedThreads) {
      const int head = small_quotient(i, pieces);
      const int piece = i - head * pieces;
      float x[kPiece];
      transfer::cuda::load_floats(item, kv_head * group + head, piece, x);
      transfer::cuda::store_floats(
          queries_ + head * FusedTables::query_pitch(dim_) + piece * kPiece, x);
    }
  }
  /// Finds the largest magnitude of each head's projections, and its norm. A warp has a head.
  __device__ void measure(StreamQueries& queries) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int head = static_cast<int>(threadIdx.x) / 32;
    static_assert(kFusedWarps >= kMaxGroup);
    if (head >= args_.request.kv.group) return;
    float largest = 0.0F;
    for (int i = lane; i < args_.request.params.projections; i += 32) {
      largest = fmaxf(largest, fabsf(products_[head * all_ + i]));  // NaN does not count
    }
    float square = 0.0F;
    for (int i = lane; i < dim_; i += 32) {
      const float x = queries_[head * FusedTables::query_pitch(dim_) + i];
      square = fmaf(x, x, square);
    }
    square = warp_sum(square);
    const unsigned most = __reduce_max_sync(kFullWarp, __float_as_uint(largest));
    if (lane == 0) {
      queries.largest[head] = most;
      queries.norms[head] = sqrtf(square);
    }
  }
  template <int kBits>
  __device__ void write_weights(StreamQueries& queries) const {
    const ScoreParams& params = args_.request.params;
    const int group = args_.request.kv.group;
    const float levels = weight_levels(params.query_bits);
    static_assert(kBits % 2 == 0);
    write_weight_columns<kBits>(params, group, 0, chunks_, all_, levels, products_, queries.largest,
                                queries.columns, queries.weight_sums);
    if (threadIdx.x < kMaxGroup) {
      const auto head = static_cast<int>(threadIdx.x);
      queries.factors[head] =
          head < group ? weight_factor(params, __uint_as_float(queries.largest[head]), levels)
                       : 0.0F;
    }
  }

  const FilterArgs& args_;
  const FusedInput& input_;
  int chunks_;
  int dim_;
  int all_;
  int at_once_ = 0;
  float* queries_;
  float* products_ = nullptr;
  std::byte* planes_ = nullptr;
};

/// Writes the queries of rows as fp32 where they are wanted, and counts rows with NaN or
/// infinity. The last blocks of the launch have a row each. All threads.
__device__ inline void pack_rows(const FilterArgs& args, const FusedInput& input) {
  if (input.queries == nullptr) return;
  const int heads = args.request.kv.query_heads();
  const int dim = args.request.planes.head_dim;
#pragma unroll 1
  for (int i = static_cast<int>(gridDim.x - 1 - blockIdx.x); i < args.part.count;
       i += static_cast<int>(gridDim.x)) {
    const int query_index = args.part.first + i;
    transfer::cuda::pack_query(input.items[query_index], heads, dim,
                               input.queries + std::int64_t{query_index} * heads * dim);
  }
}

}  // namespace kvtier::scoring::cuda
