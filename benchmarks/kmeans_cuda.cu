#include "benchmarks/kmeans_cuda.h"
#include "transfer/device/cuda_check.h"

#include <vector>

namespace kvtier::bench {
namespace {

constexpr int kDim = 64;
constexpr int kCentroids = 64;
constexpr int kSpaceFloats = kCentroids * kDim;
constexpr int kThreads = 256;
constexpr int kTokensPerBlock = 4096;

struct Arrays {
  float* centroids;  // [spaces][kCentroids][kDim]
  float* sums;       // as well
  float* counts;     // [spaces][kCentroids]
  float* squares;    // [spaces]
};

Arrays arrays(float* memory, int spaces) {
  const std::int64_t floats = std::int64_t{spaces} * kSpaceFloats;
  return {memory, memory + floats, memory + 2 * floats,
          memory + 2 * floats + std::int64_t{spaces} * kCentroids};
}

std::size_t num_floats(int spaces) {
  return static_cast<std::size_t>(spaces) * (2 * kSpaceFloats + kCentroids + 1);
}

// One block per subspace.
__global__ void begin(const __nv_bfloat16* keys, Arrays a, std::int64_t stride) {
  const std::int64_t space = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < kSpaceFloats; i += kThreads) {
    a.centroids[space * kSpaceFloats + i] =
        __bfloat162float(keys[i / kDim * stride + space * kDim + i % kDim]);
  }
}

// Grid: parts of the tokens x subspaces. A thread holds one token at a time in registers; centroids
// and sums of the block are in 33 KiB of shared memory.
__global__ __launch_bounds__(kThreads) void assign(const __nv_bfloat16* keys, Arrays a,
                                                   std::int64_t tokens, std::int64_t stride) {
  __shared__ float centroids[kSpaceFloats];
  __shared__ float sums[kSpaceFloats];
  __shared__ float counts[kCentroids];
  __shared__ float squares;
  const std::int64_t space = blockIdx.y;
  for (int i = static_cast<int>(threadIdx.x); i < kSpaceFloats; i += kThreads) {
    centroids[i] = a.centroids[space * kSpaceFloats + i];
    sums[i] = 0.0F;
    if (i < kCentroids) counts[i] = 0.0F;
  }
  if (threadIdx.x == 0) squares = 0.0F;
  __syncthreads();  // the centroids are there, the sums are empty
  const std::int64_t first = std::int64_t{blockIdx.x} * kTokensPerBlock;
  for (int t = static_cast<int>(threadIdx.x); t < kTokensPerBlock && first + t < tokens;
       t += kThreads) {
    const auto* row =
        reinterpret_cast<const __nv_bfloat162*>(keys + (first + t) * stride) + space * (kDim / 2);
    float2 key[kDim / 2];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) key[i] = __bfloat1622float2(row[i]);
    int best = 0;
    float least = INFINITY;
    for (int c = 0; c < kCentroids; ++c) {
      const auto* centroid = reinterpret_cast<const float2*>(centroids + c * kDim);
      float square = 0.0F;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) {
        const float x = key[i].x - centroid[i].x, y = key[i].y - centroid[i].y;
        square += x * x + y * y;
      }
      if (square < least) {
        least = square;
        best = c;
      }
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      atomicAdd(&sums[best * kDim + 2 * i], key[i].x);
      atomicAdd(&sums[best * kDim + 2 * i + 1], key[i].y);
    }
    atomicAdd(&counts[best], 1.0F);
    atomicAdd(&squares, least);
  }
  __syncthreads();  // the block's sums are complete
  for (int i = static_cast<int>(threadIdx.x); i < kSpaceFloats; i += kThreads) {
    atomicAdd(&a.sums[space * kSpaceFloats + i], sums[i]);
    if (i < kCentroids) atomicAdd(&a.counts[space * kCentroids + i], counts[i]);
  }
  if (threadIdx.x == 0) atomicAdd(&a.squares[space], squares);
}

// One block per subspace. A centroid without tokens stays where it is.
__global__ void average(Arrays a) {
  const std::int64_t space = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < kSpaceFloats; i += kThreads) {
    const float count = a.counts[space * kCentroids + i / kDim];
    const std::int64_t at = space * kSpaceFloats + i;
    if (count > 0.0F) a.centroids[at] = a.sums[at] / count;
  }
}

}  // namespace

KMeans::KMeans(std::int64_t tokens, int kv_heads) : tokens_(tokens), spaces_(2 * kv_heads) {
  KVTIER_CUDA_CHECK(cudaMalloc(&memory_, num_floats(spaces_) * sizeof(float)));
}

KMeans::~KMeans() { cudaFree(memory_); }

void KMeans::run(cudaStream_t stream, const __nv_bfloat16* keys, int iterations) {
  const Arrays a = arrays(memory_, spaces_);
  const std::int64_t stride = std::int64_t{spaces_} * kDim;
  const auto spaces = static_cast<unsigned>(spaces_);
  begin<<<spaces, kThreads, 0, stream>>>(keys, a, stride);
  const dim3 grid(static_cast<unsigned>((tokens_ + kTokensPerBlock - 1) / kTokensPerBlock), spaces);
  for (int i = 0; i < iterations; ++i) {
    const std::size_t cleared = num_floats(spaces_) - static_cast<std::size_t>(a.sums - memory_);
    KVTIER_CUDA_CHECK(cudaMemsetAsync(a.sums, 0, cleared * sizeof(float), stream));
    assign<<<grid, kThreads, 0, stream>>>(keys, a, tokens_, stride);
    average<<<spaces, kThreads, 0, stream>>>(a);
  }
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

double KMeans::mean_square(cudaStream_t stream) const {
  std::vector<float> squares(static_cast<std::size_t>(spaces_));
  KVTIER_CUDA_CHECK(cudaMemcpyAsync(squares.data(), arrays(memory_, spaces_).squares,
                                    squares.size() * sizeof(float), cudaMemcpyDefault, stream));
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(stream));
  double sum = 0.0;
  for (const float square : squares) sum += static_cast<double>(square);
  return sum / (static_cast<double>(tokens_) * static_cast<double>(spaces_));
}

}  // namespace kvtier::bench
