#include "scoring/filter_cuda.cuh"
#include "scoring/sign_products.cuh"
#include "transfer/cuda_check.h"

#include <cooperative_groups.h>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kSampleThreads = 512;
constexpr int kSampleBlocks = 8;  // of a cluster: one (row, KV head)
constexpr int kSamplesPerBlock = 1024;
constexpr int kSamples = kSampleBlocks * kSamplesPerBlock;
/// Shares fall into bins by their exponent and 5 bits of mantissa: 3 % wide.
constexpr int kBinShift = 18;
constexpr int kBins = 1 << 13;
constexpr int kBinsPerBlock = kBins / kSampleBlocks;

struct SampleShared {
  std::uint32_t histogram[kBins];
  std::uint32_t slice_total;  // of this block's slice of all histograms
  float2 partial[kMaxGroup];  // max and sum of 2^(value - max) of this block
  float references[kMaxGroup];
};

// The sample's token i of `total`: spread evenly.
__device__ std::int64_t sampled_token(const RowPlan& plan, std::int64_t total, std::int64_t i) {
  const std::int64_t eligible = plan.end - plan.begin;
  return plan.begin + (total == eligible ? i : i * eligible / total);
}

// Base-2 logit of a token.
__device__ float sign_value(const ScoreParams& params, float factor, int sum, const Norms& norms) {
  if (!norms.finite) return kLowestValue;
  const float logit = factor * static_cast<float>(sum) * norms.key;
  return params.weighting == ValueWeighting::kLogit ? logit + __log2f(norms.value) : logit;
}

template <int kBits>
__device__ void sample_values(const FilterArgs& args, const RowPlan& plan,
                              const std::uint32_t* columns, const std::int32_t* weight_sums,
                              int kv_head, std::int64_t first_head, std::int64_t total,
                              std::int64_t per_block, int rank, float* values) {
  constexpr int kProducts = kBits / 2;
  const SelectRequest& request = args.request;
  const int group = request.kv.group();
  const int chunks = sign_chunks(request.params);
  const int quads = (group + 3) / 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // All loads of a warp's samples are in flight before the first product.
  constexpr int kGroups = kSamplesPerBlock / (kSampleThreads / 32) / 16;
  const int first = static_cast<int>(threadIdx.x) / 32 * 16;
  constexpr int kStep = kSampleThreads / 32 * 16;
  const std::uint32_t* codes[kGroups][2];
  Norms norms[kGroups][2];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t i = rank * per_block + first + g * kStep + half * 8 + lane / 4;
      const std::int64_t token = sampled_token(plan, total, min(i, total - 1));
      const std::byte* block = plan.blocks[token / hashing::kBlockTokens];
      const int in_block = static_cast<int>(token % hashing::kBlockTokens);
      norms[g][half] = load_norms(request.sketch, block, kv_head, in_block);
      codes[g][half] = reinterpret_cast<const std::uint32_t*>(
                           block + request.sketch.chunk_offset(kv_head, 0, in_block)) +
                       lane % 4;
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int base = first + g * kStep;
    if (base >= per_block) break;
    for (int quad = 0; quad < quads; ++quad) {
      int counts[kProducts][4] = {};
#pragma unroll 2
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const std::uint32_t low = __ldg(codes[g][0] + chunk * kChunkStride * kWordsPerChunk);
        const std::uint32_t high = __ldg(codes[g][1] + chunk * kChunkStride * kWordsPerChunk);
#pragma unroll
        for (int product = 0; product < kProducts; ++product) {
          multiply_bits(counts[product], low, high,
                        columns[((quad * chunks + chunk) * kProducts + product) * 32 + lane]);
        }
      }
      const int head = quad * 4 + lane % 4;
      if (head >= group) continue;
      const float factor =
          sign_factor(request.params, args.tables.scalars[first_head + head]) * kLog2E;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int sum = signed_sum<kBits>(counts, half, weight_sums[head]);
        values[head * kSamplesPerBlock + base + half * 8 + lane / 4] =
            sign_value(request.params, factor, sum, norms[g][half]);
      }
    }
  }
}

__device__ int bin_of(float share) {
  return share > 0.0F ? min(static_cast<int>(__float_as_uint(share) >> kBinShift), kBins - 1) : 0;
}

#if defined(KVTIER_HAS_CLUSTERS)

// Writes to `threshold` the largest share that at least `rank` of the cluster's shares reach, to
// within a bin. The shares of each block's samples have been counted in its histogram. A block of
// the cluster sums one slice of all histograms; slices and bins are walked from the top.
__device__ void sampled_threshold(const cg::cluster_group& cluster, SampleShared& shared,
                                  std::uint32_t rank, float* threshold) {
  constexpr int kBinsPerThread = kBinsPerBlock / kSampleThreads;
  static_assert(kBinsPerThread == 2);
  cluster.sync();
  const int slice = kSampleBlocks - 1 - static_cast<int>(cluster.block_rank());
  // Thread 0 has the slice's top bins.
  const int low = slice * kBinsPerBlock + (kSampleThreads - 1 - static_cast<int>(threadIdx.x)) * 2;
  std::uint32_t upper = 0;
  std::uint32_t lower = 0;
#pragma unroll
  for (unsigned block = 0; block < kSampleBlocks; ++block) {
    const auto* remote = cluster.map_shared_rank(shared.histogram, block);
    const uint2 pair = *reinterpret_cast<const uint2*>(remote + low);
    lower += pair.x;
    upper += pair.y;
  }
  std::uint32_t total = 0;
  std::uint32_t before = block_exclusive_sum(upper + lower, &total);
  if (threadIdx.x == 0) shared.slice_total = total;
  cluster.sync();
  for (unsigned block = 0; block < cluster.block_rank(); ++block) {
    before += *cluster.map_shared_rank(&shared.slice_total, block);
  }
  if (before < rank && before + upper + lower >= rank) {
    const int bin = before + upper >= rank ? low + 1 : low;
    *threshold = __uint_as_float(static_cast<std::uint32_t>(bin) << kBinShift);
  }
  cluster.sync();  // nobody clears or leaves a histogram that others read
}

#endif

// Cluster per (row, KV head).
template <int kBits>
__global__ KVTIER_CLUSTER(kSampleBlocks)
    __launch_bounds__(kSampleThreads) void sign_sample(const __grid_constant__ FilterArgs args) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ float values[];  // [group][kSamplesPerBlock], then the columns
  __shared__ SampleShared shared;
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const SelectRequest& request = args.request;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int row = static_cast<int>(blockIdx.z);
  const int group = request.kv.group();
  const std::int64_t group_index = std::int64_t{row} * request.kv.kv_heads + kv_head;
  const std::int64_t first_head = group_index * group;
  const RowPlan plan = plan_of_row(args, row);
  const std::int64_t eligible = plan.end - plan.begin;
  if (rank == 0 && threadIdx.x == 0) {
    if (kv_head == 0) {
      if (row == 0) *args.filter.ticket = 0;
      args.plans[row] = plan;
      if (eligible > 0 && request.flags != nullptr) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->tokens_scored),
                  static_cast<unsigned long long>(eligible * request.kv.kv_heads));
      }
    }
    args.filter.groups[group_index].again = 0;
    args.selection.counts[group_index] = 0;
  }
  if (plan.k <= 0) return;  // the whole cluster

  const int chunks = sign_chunks(request.params);
  const int quads = (group + 3) / 4;
  std::uint32_t* columns = args.filter.columns + group_index * args.filter.columns_stride;
  __shared__ int weight_sums[kMaxGroup];
  auto* my_columns = reinterpret_cast<std::uint32_t*>(values + group * kSamplesPerBlock);
  fill_columns<kBits, kSampleThreads>(args.tables, request.params.num_planes, first_head, group,
                                      chunks, quads, my_columns, weight_sums);
  if (rank == 0) {
    const int words = quads * chunks * (kBits / 2) * 32;
    for (int i = static_cast<int>(threadIdx.x); i < words; i += kSampleThreads) {
      columns[i] = my_columns[i];
    }
    if (threadIdx.x < group)
      args.filter.weight_sums[first_head + threadIdx.x] = weight_sums[threadIdx.x];
  }

  // Some 64 of the k best are to be in the sample.
  const std::int64_t enough =
      max(std::int64_t{kSamples / 2}, min(std::int64_t{kSamples}, 64 * eligible / plan.k));
  const std::int64_t total = min(eligible, enough);
  const std::int64_t per_block = (total + kSampleBlocks - 1) / kSampleBlocks;
  sample_values<kBits>(args, plan, my_columns, weight_sums, kv_head, first_head, total, per_block,
                       rank, values);
  __syncthreads();
  const int mine = static_cast<int>(max(std::int64_t{0}, min(per_block, total - rank * per_block)));

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int h = warp; h < group; h += kSampleThreads / 32) {
    const float* of_head = values + h * kSamplesPerBlock;
    float most = -INFINITY;
    for (int i = lane; i < mine; i += 32) most = fmaxf(most, of_head[i]);
    for (int offset = 16; offset > 0; offset /= 2) {
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, offset));
    }
    float sum = 0.0F;
    for (int i = lane; i < mine; i += 32) {
      if (of_head[i] > kLowestValue) sum += exp2f(of_head[i] - most);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, offset);
    }
    if (lane == 0) shared.partial[h] = make_float2(most, sum);
  }
  cluster.sync();
  if (threadIdx.x < group) {
    float most = -INFINITY;
    for (unsigned block = 0; block < kSampleBlocks; ++block) {
      most = fmaxf(most, cluster.map_shared_rank(shared.partial, block)[threadIdx.x].x);
    }
    float sum = 0.0F;
    for (unsigned block = 0; block < kSampleBlocks; ++block) {
      const float2 part = cluster.map_shared_rank(shared.partial, block)[threadIdx.x];
      if (part.y > 0.0F) sum += part.y * exp2f(part.x - most);
    }
    const float share = static_cast<float>(eligible) / static_cast<float>(total);
    shared.references[threadIdx.x] = sum > 0.0F ? most + log2f(sum * share) : 0.0F;
  }

  // More than the k expected: five standard deviations of the sample's count, and a tenth for the
  // error of the references.
  const float expected =
      static_cast<float>(plan.k) * static_cast<float>(total) / static_cast<float>(eligible);
  const auto wanted =
      static_cast<std::uint32_t>(ceilf(1.1F * expected + 5.0F * sqrtf(expected) + 4.0F));
  const bool together = request.params.selection == Selection::kPerKvHead || group == 1;
  for (int h = 0; h < (together ? 1 : group); ++h) {
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kSampleThreads)
      shared.histogram[i] = 0;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < mine; i += kSampleThreads) {
      float share = 0.0F;
      for (int g = together ? 0 : h; g < (together ? group : h + 1); ++g) {
        share += share_of(true, values[g * kSamplesPerBlock + i], shared.references[g]);
      }
      atomicAdd(&shared.histogram[bin_of(share)], 1U);
    }
    float* threshold = together ? &args.filter.groups[group_index].threshold
                                : &args.filter.heads[first_head + h].threshold;
    if (wanted < total) {
      sampled_threshold(cluster, shared, wanted, threshold);
    } else if (rank == 0 && threadIdx.x == 0) {
      *threshold = 0.0F;
    }
    __syncthreads();
  }
  if (rank == 0 && threadIdx.x < group) {
    args.filter.heads[first_head + threadIdx.x].reference = shared.references[threadIdx.x];
  }
  cluster.sync();  // the statistics outlive the others' reads
#endif
}

}  // namespace

void enqueue_sign_sample(cudaStream_t stream, const FilterArgs& args) {
  const SelectRequest& request = args.request;
  const int group = request.kv.group();
  const int products = request.params.query_bits / 2;
  const int columns = (group + 3) / 4 * sign_chunks(request.params) * products * 32;
  const std::size_t shared =
      static_cast<std::size_t>(group * kSamplesPerBlock + columns) * sizeof(float);
  const auto kernel = request.params.query_bits == 8 ? sign_sample<8> : sign_sample<4>;
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared)));
  const dim3 grid(kSampleBlocks, static_cast<unsigned>(request.kv.kv_heads),
                  static_cast<unsigned>(request.rows.count));
  kernel<<<grid, kSampleThreads, shared, stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
