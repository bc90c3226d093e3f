#include "scoring/candidates/scorers.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/device/launch_cuda.cuh"

#include <algorithm>
#include <cooperative_groups.h>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

namespace cg = cooperative_groups;

/// Bins of shares between two bounds. Positive floats compare as their bits do: bins are equally
/// wide within an octave.
struct Bins {
  std::uint32_t least;
  int shift;

  __device__ explicit Bins(float2 range) {
    least = __float_as_uint(range.x);
    const std::uint32_t width = __float_as_uint(range.y) - least;
    shift = max(0, 32 - __clz(width | 1U) - 11);
    static_assert(kBins == 1 << 11);
  }
  [[nodiscard]] __device__ int of(float share) const {
    const std::uint32_t bits = __float_as_uint(fmaxf(share, 0.0F));
    return bits <= least ? 0 : static_cast<int>(min((bits - least) >> shift, kBins - 1U));
  }
  [[nodiscard]] __device__ float edge(int bin) const {
    return __uint_as_float(least + (static_cast<std::uint32_t>(bin) << shift));
  }
};

__device__ float warp_least(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = fminf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}
__device__ float warp_most(float value) { return -warp_least(-value); }
__device__ float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

/// How the warps divide heads and samples for statistics.
struct Division {
  int head;
  int part;
  int parts;

  __device__ explicit Division(int group) {
    int width = 1;
    while (width < group) width *= 2;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    head = warp % width;
    part = warp / width;
    parts = min(kSampleWarps / width, kMostParts);
  }
  [[nodiscard]] __device__ bool works(int group) const { return head < group && part < parts; }
  [[nodiscard]] __device__ int first() const {
    return part * 32 + static_cast<int>(threadIdx.x) % 32;
  }
  [[nodiscard]] __device__ int step() const { return parts * 32; }
};

__device__ void measure(const Division& mine, const float* values, int samples, bool logit_like,
                        SampleShared& shared) {
  const float* of_head = values + mine.head * kSamplesPerBlock;
  float most = kLowestValue;
  float least = -kLowestValue;
  for (int i = mine.first(); i < samples; i += mine.step()) {
    most = fmaxf(most, of_head[i]);
    least = fminf(least, of_head[i]);
  }
  most = warp_most(most);
  least = warp_least(least);
  float sum = 0.0F;
  float square = 0.0F;
  for (int i = mine.first(); i < samples; i += mine.step()) {
    if (of_head[i] <= kLowestValue) continue;
    const float weight = logit_like ? exp2f(of_head[i] - most) : of_head[i];
    sum += weight;
    square += weight * weight;
  }
  sum = warp_sum(sum);
  square = warp_sum(square);
  if (threadIdx.x % 32 == 0) shared.statistics[mine.part][mine.head] = {most, least, sum, square};
}

#if defined(KVTIER_HAS_CLUSTERS)

/// Merges the statistics of the cluster: a warp per head.
__device__ void set_references(const cg::cluster_group& cluster, int parts, int group,
                               std::int64_t samples, std::int64_t eligible, bool logit_like,
                               SampleShared& shared) {
  const int head = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (head >= group) return;
  Statistics mine{kLowestValue, -kLowestValue, 0.0F, 0.0F};
  if (lane / kSampleBlocks < parts) {
    mine = cluster.map_shared_rank(
        shared.statistics, static_cast<unsigned>(lane % kSampleBlocks))[lane / kSampleBlocks][head];
  }
  const float most = warp_most(mine.most);
  const float least = warp_least(mine.least);
  const float weight = logit_like ? exp2f(mine.most - most) : 1.0F;
  const float sum = warp_sum(mine.sum > 0.0F ? mine.sum * weight : 0.0F);
  const float square = warp_sum(mine.sum > 0.0F ? mine.square * weight * weight : 0.0F);
  if (lane != 0) return;
  float reference = 0.0F;
  float error = 0.0F;
  if (sum > 0.0F) {
    const float total = sum * static_cast<float>(eligible) / static_cast<float>(samples);
    reference = logit_like ? most + log2f(total) : 1.0F / total;
    if (samples < eligible) {
      error = sqrtf(fmaxf(square / (sum * sum) - 1.0F / static_cast<float>(samples), 0.0F));
    }
  }
  shared.errors[head] = error;
  shared.references[head] = reference;
  shared.ranges[head] = make_float2(0.999F * share_of(logit_like, least, reference),
                                    1.001F * share_of(logit_like, most, reference));
}

/// Returns, to the thread that finds it, the largest share that at least `rank` of the cluster's
/// samples reach, to within a bin; to others -1. Every block has counted its samples in
/// `histogram`.
__device__ float sampled_threshold(const cg::cluster_group& cluster, std::uint32_t* histogram,
                                   const Bins& bins, std::uint32_t rank) {
  constexpr int kPerThread = kBins / kSampleThreads;
  static_assert(kPerThread == 4);
  // Thread 0 has the top bins.
  const int low = (kSampleThreads - 1 - static_cast<int>(threadIdx.x)) * kPerThread;
  std::uint32_t counts[kPerThread] = {};
#pragma unroll
  for (unsigned block = 0; block < kSampleBlocks; ++block) {
    const uint4 four =
        *reinterpret_cast<const uint4*>(cluster.map_shared_rank(histogram, block) + low);
    counts[0] += four.x;
    counts[1] += four.y;
    counts[2] += four.z;
    counts[3] += four.w;
  }
  const std::uint32_t mine = counts[0] + counts[1] + counts[2] + counts[3];
  std::uint32_t total = 0;
  std::uint32_t before = block_exclusive_sum(mine, &total);
  if (before >= rank || before + mine < rank) return -1.0F;
  int bin = kPerThread - 1;
  while (before + counts[bin] < rank) before += counts[bin--];
  return bins.edge(low + bin);
}

#endif

/// What the pass wants to know of the samples whose sum of shares is below the threshold.
__device__ void measure_others(const FilterArgs& args, const Division& mine, const float* values,
                               const Sample& sample, int samples, int group, SampleShared& shared) {
  if (mine.works(group)) {
    SampleRest rest{0.0F, 0.0F, 0.0F, INFINITY, 0.0F};
    for (int i = mine.first(); i < samples; i += mine.step()) {
      float all = 0.0F;
      float own = 0.0F;
      for (int h = 0; h < group; ++h) {
        const float share = share_of(false, values[h * kSamplesPerBlock + i], shared.references[h]);
        if (h == mine.head) own = share;
        all += share;
      }
      rest.least = fminf(rest.least, all);
      rest.most = fmaxf(rest.most, all);
      if (all >= shared.threshold) continue;
      const float difference = own - all / static_cast<float>(group);
      rest.count += 1.0F;
      rest.sum += own;
      rest.square += difference * difference;
    }
    rest = {warp_sum(rest.count), warp_sum(rest.sum), warp_sum(rest.square), warp_least(rest.least),
            warp_most(rest.most)};
    if (threadIdx.x % 32 == 0) shared.others[mine.part][mine.head] = rest;
  }
  __syncthreads();
  if (threadIdx.x >= group) return;
  SampleRest all = shared.others[0][threadIdx.x];
  for (int part = 1; part < mine.parts; ++part) {
    const SampleRest& other = shared.others[part][threadIdx.x];
    all = {all.count + other.count, all.sum + other.sum, all.square + other.square,
           fminf(all.least, other.least), fmaxf(all.most, other.most)};
  }
  args.filter.others[(sample.first_head + threadIdx.x) * kSampleBlocks + sample.rank] = all;
}

// Cluster per (query, KV head).
template <typename Scorer>
__global__ KVTIER_CLUSTER(kSampleBlocks)
    __launch_bounds__(kSampleThreads, 1) void take_sample(const __grid_constant__ FilterArgs args) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(16) float values[];  // [group][kSamplesPerBlock], then the tables
  __shared__ SampleShared shared;
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();
  const cg::cluster_group cluster = cg::this_cluster();
  const SelectRequest& request = args.request;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int query_index = static_cast<int>(blockIdx.z);
  const int group = request.kv.group();
  const std::int64_t group_index = std::int64_t{query_index} * request.kv.kv_heads + kv_head;
  const typename Scorer::Early early(args.tables, group_index * group, group);
  Sample sample{.plan = plan_of_query(args, query_index),
                .first_head = group_index * group,
                .total = 0,
                .per_block = 0,
                .kv_head = kv_head,
                .rank = static_cast<int>(cluster.block_rank()),
                .stride = 0};
  const std::int64_t eligible = sample.plan.end - sample.plan.begin;
  if (sample.rank == 0 && threadIdx.x == 0) {
    if (kv_head == 0) {
      args.plans[query_index] = sample.plan;
      if (eligible > 0 && request.flags != nullptr) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->tokens_scored),
                  static_cast<unsigned long long>(eligible * request.kv.kv_heads));
      }
    }
    args.filter.groups[group_index].again = 0;
    args.selection.counts[group_index] = 0;
  }
  if (sample.plan.k <= 0) return;  // the whole cluster

  // Some 64 of the k best are to be in the sample.
  const std::int64_t enough =
      max(std::int64_t{kSamples / 2}, min(std::int64_t{kSamples}, 64 * eligible / sample.plan.k));
  sample.total = eligible <= enough ? eligible : enough / Sample::kRun * Sample::kRun;
  sample.per_block = (sample.total + kSampleBlocks - 1) / kSampleBlocks;
  sample.stride =
      (static_cast<std::uint64_t>(eligible) << 32) / static_cast<std::uint64_t>(sample.total);
  auto* tables = reinterpret_cast<std::uint32_t*>(values + group * kSamplesPerBlock);
  Scorer::score(args, early, sample, shared, tables, values);
  __syncthreads();

  const bool logit_like = request.params.logit_like();
  const bool together = request.params.selection == Selection::kPerKvHead || group == 1;
  const int sets = together ? 1 : group;
  const auto samples = static_cast<int>(
      max(std::int64_t{0}, min(sample.per_block, sample.total - sample.rank * sample.per_block)));
  const Division division(group);
  if (division.works(group)) measure(division, values, samples, logit_like, shared);
  std::uint32_t* histograms = tables;
  for (int i = static_cast<int>(threadIdx.x); i < sets * kBins; i += kSampleThreads) {
    histograms[i] = 0;
  }
  if (threadIdx.x == 0) shared.threshold = 0.0F;
  cluster.sync();
  set_references(cluster, division.parts, group, sample.total, eligible, logit_like, shared);
  __syncthreads();

  float2 range = make_float2(0.0F, 0.0F);
  float error = 0.0F;
  for (int h = 0; together && h < group; ++h) {
    range.x += shared.ranges[h].x;
    range.y += shared.ranges[h].y;
    error = fmaxf(error, shared.errors[h]);
  }
  // A normaliser that one token may have spoilt asks for a lower threshold, lest the proof fail.
  constexpr float kUsualError = 0.05F;
  const float lower = 1.0F / (1.0F + 2.0F * fmaxf(error - kUsualError, 0.0F));
  const Bins common(range);
  for (int i = static_cast<int>(threadIdx.x); i < samples; i += kSampleThreads) {
    float sum = 0.0F;
    for (int h = 0; h < group; ++h) {
      const float share =
          share_of(logit_like, values[h * kSamplesPerBlock + i], shared.references[h]);
      sum += share;
      if (!together) atomicAdd(&histograms[h * kBins + Bins(shared.ranges[h]).of(share)], 1U);
    }
    if (together) atomicAdd(&histograms[common.of(sum)], 1U);
  }
  cluster.sync();

  // More than the k expected: four standard deviations of the sample's count, and a tenth for the
  // error of the references.
  const float expected = static_cast<float>(sample.plan.k) * static_cast<float>(sample.total) /
                         static_cast<float>(eligible);
  const auto wanted =
      static_cast<std::uint32_t>(ceilf(1.1F * expected + 4.0F * sqrtf(expected) + 4.0F));
  for (int set = sample.rank; set < sets; set += kSampleBlocks) {
    float* threshold = together ? &args.filter.groups[group_index].threshold
                                : &args.filter.heads[sample.first_head + set].threshold;
    if (wanted >= sample.total) {
      if (threadIdx.x == 0) *threshold = 0.0F;
      continue;
    }
    const Bins bins = together ? common : Bins(shared.ranges[set]);
    float found = sampled_threshold(cluster, histograms + set * kBins, bins, wanted);
    if (found < 0.0F) continue;
    found *= lower;
    *threshold = found;
    for (unsigned block = 0; together && block < kSampleBlocks; ++block) {
      *cluster.map_shared_rank(&shared.threshold, block) = found;
    }
  }
  if (sample.rank == 0 && threadIdx.x < group) {
    args.filter.heads[sample.first_head + threadIdx.x].reference = shared.references[threadIdx.x];
  }
  cluster.sync();  // the histograms outlive the others' reads, and the threshold has arrived
  if (sums_suffice(request.params, group)) {
    measure_others(args, division, values, sample, samples, group, shared);
  }
#endif
}

using SampleKernel = void (*)(FilterArgs);

SampleKernel sample_kernel(const SelectRequest& request) {
  const ScoreParams& params = request.params;
  const bool p10_l60 = TableShape(params).p10_l60() && request.kv.group() <= 4;
  return p10_l60 ? take_sample<CollisionScorer<true>> : take_sample<CollisionScorer<false>>;
}

int table_words(const ScoreParams& params, int group) {
  const TableShape shape(params);
  return stored_pairs(shape, group) * shape.entries();
}

}  // namespace

int sample_bytes(const ScoreParams& params, int group) {
  const bool together = params.selection == Selection::kPerKvHead || group == 1;
  const int histograms = (together ? 1 : group) * kBins;
  return (group * kSamplesPerBlock + std::max(table_words(params, group), histograms)) * 4;
}

void enqueue_sample(cudaStream_t stream, const FilterArgs& args) {
  const SelectRequest& request = args.request;
  const SampleKernel kernel = sample_kernel(request);
  const int shared = sample_bytes(request.params, request.kv.group());
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      most_table_bytes(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))));
  const dim3 grid(kSampleBlocks, static_cast<unsigned>(request.kv.kv_heads),
                  static_cast<unsigned>(request.query_batch.count));
  transfer::cuda::launch_overlapping(stream, kernel, grid, kSampleThreads,
                                     static_cast<std::size_t>(shared), args);
}

}  // namespace kvtier::scoring::cuda
