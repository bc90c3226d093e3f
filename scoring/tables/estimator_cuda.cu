#include "scoring/block/block_cuda.cuh"
#include "scoring/estimator_kernels.h"
#include "scoring/score_math.h"
#include "scoring/tables/estimator_cuda.cuh"
#include "transfer/device/cuda_check.h"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

constexpr int kMaxPlanes = 1024;
constexpr int kMaxHeadDim = 256;

struct TableArgs {
  ScoreParams params;
  hashing::PlanesView planes;
  const float* queries;
  std::int64_t entries_per_head;
  float* entries;
  QueryScalars* scalars;
};

// Sums in the order of the coordinates, as every backend does, so that integer weights agree.
__device__ void project(const hashing::PlanesView& planes, int count, const float* query,
                        float* projections) {
  for (int plane = static_cast<int>(threadIdx.x); plane < count;
       plane += static_cast<int>(blockDim.x)) {
    const float* column = planes.transposed + plane;
    float sum = 0.0F;
#pragma unroll 16
    for (int x = 0; x < planes.head_dim; ++x) {
      sum = fmaf(query[x], __ldg(column + std::int64_t{x} * planes.stride), sum);
    }
    projections[plane] = sum;
  }
}

// Returns the mean agreement. `projections` becomes the probability that a set bit agrees, `differ`
// that of a clear bit.
__device__ float soft_tables(const TableArgs& args, float* projections, float* differ,
                             float* entries) {
  const ScoreParams& params = args.params;
  const int count = params.planes_read();
  const float scale = 1.0F / (sqrtf(static_cast<float>(args.planes.head_dim)) * params.tau);
  double agreement = 0.0;
  for (int plane = static_cast<int>(threadIdx.x); plane < count;
       plane += static_cast<int>(blockDim.x)) {
    const PlaneChances chances = plane_chances(projections[plane], scale);
    agreement += static_cast<double>(chances.agreement);
    projections[plane] = chances.set;
    differ[plane] = chances.clear;
  }
  agreement = block_sum(agreement);

  const int low_bits = params.planes_per_table / 2;
  const int high_bits = params.planes_per_table - low_bits;
  const int high_size = 1 << high_bits;
  const int row = high_size + (1 << low_bits);
  for (int i = static_cast<int>(threadIdx.x); i < params.tables * row;
       i += static_cast<int>(blockDim.x)) {
    const int table = i / row;
    const int entry = i - table * row;
    const bool high = entry < high_size;
    const int bits = high ? high_bits : low_bits;
    const int pattern = high ? entry : entry - high_size;
    const int first = table * params.planes_per_table + (high ? 0 : high_bits);
    float product = 1.0F;
    for (int bit = 0; bit < bits; ++bit) {
      const bool set = ((pattern >> (bits - 1 - bit)) & 1) != 0;
      product *= set ? projections[first + bit] : differ[first + bit];
    }
    entries[i] = product;
  }
  return static_cast<float>(agreement / count);
}

__device__ void hard_buckets(const ScoreParams& params, const float* projections, float* entries) {
  for (int table = static_cast<int>(threadIdx.x); table < params.tables;
       table += static_cast<int>(blockDim.x)) {
    int bucket = 0;
    for (int i = 0; i < params.planes_per_table; ++i) {
      bucket = 2 * bucket + (projections[table * params.planes_per_table + i] >= 0.0F ? 1 : 0);
    }
    entries[table] = __int_as_float(bucket);
  }
}

// Returns the weight step.
__device__ float sign_weights(const ScoreParams& params, const float* projections, float* entries) {
  const bool integers = params.query_bits > 0;
  const int count = params.query_planes();
  float largest = 0.0F;
  for (int plane = static_cast<int>(threadIdx.x); plane < count;
       plane += static_cast<int>(blockDim.x)) {
    largest = fmaxf(largest, fabsf(projections[plane]));
  }
  largest = block_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
  const float levels = integers ? weight_levels(params.query_bits) : 1.0F;
  const bool usable = largest > 0.0F && largest <= 3.4028235e38F;
  for (int plane = static_cast<int>(threadIdx.x); plane < count;
       plane += static_cast<int>(blockDim.x)) {
    float weight = projections[plane];
    if (integers) weight = usable ? quantised_weight(weight, largest, levels) : 0.0F;
    write_weight(params, weight, entries + plane);
  }
  if (!integers) return 1.0F;
  return usable ? largest / levels : 0.0F;
}

// A block per (query, query head), a thread per plane.
__global__ __launch_bounds__(kBlockThreads) void query_tables(
    const __grid_constant__ TableArgs args) {
  __shared__ float query[kMaxHeadDim];
  __shared__ float projections[kMaxPlanes];
  __shared__ float differ[kMaxPlanes];
  const std::int64_t head = blockIdx.x;
  const int head_dim = args.planes.head_dim;
  double square = 0.0;
  for (int x = static_cast<int>(threadIdx.x); x < head_dim; x += static_cast<int>(blockDim.x)) {
    query[x] = args.queries[head * head_dim + x];
    square += static_cast<double>(query[x]) * static_cast<double>(query[x]);
  }
  square = block_sum(square);
  project(args.planes, args.params.query_planes(), query, projections);
  __syncthreads();

  float* entries = args.entries + head * args.entries_per_head;
  QueryScalars scalars;
  scalars.query_norm = static_cast<float>(sqrt(square));
  switch (args.params.estimator) {
    case Estimator::kSoftCollision:
      scalars.mean_agreement = soft_tables(args, projections, differ, entries);
      break;
    case Estimator::kHardCollision:
      hard_buckets(args.params, projections, entries);
      break;
    case Estimator::kNormAware:
      scalars.weight_step = sign_weights(args.params, projections, entries);
      break;
  }
  if (threadIdx.x == 0) args.scalars[head] = scalars;
}

}  // namespace

void build_query_tables(void* stream, const ScoreParams& params, const hashing::PlanesView& planes,
                        const float* queries, int num_queries, int query_heads, float* entries,
                        QueryScalars* scalars) {
  const std::int64_t heads = std::int64_t{num_queries} * query_heads;
  if (heads == 0) return;
  const TableArgs args{.params = params,
                       .planes = planes,
                       .queries = queries,
                       .entries_per_head = entries_per_head(params),
                       .entries = entries,
                       .scalars = scalars};
  query_tables<<<static_cast<unsigned>(heads), kBlockThreads, 0,
                 static_cast<cudaStream_t>(stream)>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
