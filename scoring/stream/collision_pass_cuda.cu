#include "hashing/append.h"
#include "scoring/fused/launch_cuda.cuh"
#include "scoring/stream/collisions_cuda.cuh"
#include "scoring/stream/stream_cuda.h"
#include "transfer/device/launch_cuda.cuh"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

/// Makes the references of a group from a token of each thread, spread over the sequence and the
/// same in every block. All threads; begins with a barrier, behind which the tables are, and ends
/// with one.
template <int kHeads>
__device__ void find_references(const FilterArgs& args, const StreamWork& work,
                                const CollisionToken& token, const std::uint32_t* pairs,
                                WarpTotals<kHeads>& of_warps, float* references) {
  const SumWeigher weigher(args.request.params);
  float values[kHeads];
  float totals[kHeads] = {};
  __syncthreads();
  p10_l60_sums(pairs, token.code, values);
  weigher.weigh(token.norm, true, values, totals);
  store_totals(totals, of_warps);
  __syncthreads();  // the sums of all warps are there
  const auto head = static_cast<int>(threadIdx.x);
  if (head < kMaxGroup) {
    float total = head < kHeads ? block_total(of_warps, min(head, kHeads - 1)) : 0.0F;
    total *= static_cast<float>(work.end - work.begin) / static_cast<float>(kFusedThreads);
    references[head] = total > 0.0F ? __log2f(total) : 0.0F;
  }
  __syncthreads();
}

/// Writes the approximate keys of the block's units, counts them in `bins`, adds up the values, and
/// finds the least share that each head has in a combined value.
template <int kHeads>
__device__ void write_approximate_keys(const FilterArgs& args, const StreamWork& work,
                                       TileReader& reader, const std::uint32_t* pairs,
                                       const float* references, std::uint32_t* bins,
                                       WarpTotals<kHeads>& of_warps,
                                       WarpTotals<kHeads>& shares_of_warps) {
  const SumWeigher weigher(args.request.params);
  const CollisionSum<kHeads> combine(args.request.kv.group, work.end - work.begin, references);
  std::uint16_t* const keys = args.filter.stream_keys + work.group_index * args.max_tokens;
  float totals[kHeads] = {};
  float shares[kHeads];
#pragma unroll
  for (float& share : shares) share = 1.0F;
  std::int64_t token = 0;
  P10L60Code code;
  std::uint16_t norm = 0;
  while (reader.next(token, code, norm)) {
    float values[kHeads];
    p10_l60_sums(pairs, code, values);
    const bool eligible = work.begin <= token && token < work.end;
    weigher.weigh(norm, eligible, values, totals);
    unsigned key = 0;
    if (eligible) {
      const float combined = fmaxf(combine(values), 0.0F);
      if (combined > 0.0F) {
        const float inverse = __fdividef(1.0F, combined);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          shares[h] = fminf(shares[h], values[h] * combine.factor(h) * inverse);
        }
      }
      key = approximate_key<CollisionKeys>(log2_norm(combined), true);
      atomicAdd(bins + CollisionKeys::bin_of(key), 1U);
    }
    keys[token] = static_cast<std::uint16_t>(key);
  }
  store_totals(totals, of_warps);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    // Positive floats compare as their bits do.
    const unsigned least = __reduce_min_sync(kFullWarp, __float_as_uint(fmaxf(shares[h], 0.0F)));
    if (threadIdx.x % 32 == 0) shares_of_warps[threadIdx.x / 32][h] = __uint_as_float(least);
  }
}

// As `stream_pass`, of soft collisions, whose tables are in memory. Dynamic shared memory: half
// pairs of the group's heads. `early`: the first sketches are read before the wait.
template <int kHeads>
__global__ __launch_bounds__(kFusedThreads,
                             1) void collision_pass(const __grid_constant__ FilterArgs args,
                                                    const bool early) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::uint32_t pairs[];
  __shared__ StreamUnits units;
  __shared__ WarpTotals<kHeads> of_warps;
  __shared__ WarpTotals<kHeads> shares_of_warps;
  __shared__ float references[kMaxGroup];
  __shared__ std::uint32_t bins[kFusedBins];
  const auto thread = static_cast<int>(threadIdx.x);
  const auto block = static_cast<int>(blockIdx.x);
  const auto blocks = static_cast<int>(gridDim.x);
  TileReader reader(args, 0);
  const auto start = [&](const StreamWork& work) {
    reader = TileReader(args, work.kv_head);
    reader.start(work.blocks, work.first, work.first + work.count);
  };
  StreamWork prepared{};
  if (early) {  // as in stream/pass_cuda.cu
    units.fill(args, blocks, StreamUnits::read_length(args.request), false);
    const int at = block * units.each;
    if (at < units.total()) {
      prepared = StreamWork(args, units, at, at + units.each);
      start(prepared);
    }
  }
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();
  units.fill(args, blocks, StreamUnits::read_length(args.request), early);
  const int end = min((block + 1) * units.each, units.total());
#pragma unroll 1
  for (int at = block * units.each; at < end;) {
    const StreamWork work(args, units, at, end);
    if (!work.prepares_same(prepared)) start(work);
    prepared = {};
    const std::int64_t eligible = work.end - work.begin;
    const CollisionToken token(args.request.sketch, work.blocks, work.kv_head,
                               work.begin + static_cast<int>(thread * eligible / kFusedThreads));
    load_pairs<kHeads>(args, work.group_index, pairs);
    bins[thread] = 0;
    find_references(args, work, token, pairs, of_warps, references);
    if (work.first_of_group()) {
      args.filter.stream_groups[work.group_index].keep_references(references, block,
                                                                  work.last_block(block));
    }
    write_approximate_keys(args, work, reader, pairs, references, bins, of_warps, shares_of_warps);
    __syncthreads();  // the sums and counts of all warps are there
    // Pairs of a group and a block that has units of it, in order, differ in this sum.
    const std::int64_t part = work.group_index + block;
    args.filter.stream_counts[part * 2 * kFusedBins + thread] = bins[thread];
    if (thread < args.request.kv.group) {
      float share = 1.0F;
      for (const auto& of_warp : shares_of_warps) share = fminf(share, of_warp[thread]);
      args.filter.stream_sums[part * kMaxGroup + thread] = {share, block_total(of_warps, thread)};
    }
    __syncthreads();  // the next group may use the memory
    at += work.taken;
  }
#endif
}

}  // namespace

bool stream_serves_collisions(const SelectShape& shape) {
  return keeps_values(shape.params) && one_set(shape);
}

void enqueue_collision_pass(cudaStream_t stream, const FilterArgs& args) {
  visit_collision_shape(args.request, [&](auto made) {
    const auto kernel = collision_pass<made.kHeads>;
    const int bytes = group_pair_bytes(made.kHeads);
    allow_shape(kernel);
    const bool early = args.request.rule.recent_tokens >= hashing::kMostOverlappedTokens;
    transfer::cuda::launch_overlapping(stream, kernel, dim3(static_cast<unsigned>(stream_blocks())),
                                       kFusedThreads, static_cast<std::size_t>(bytes), args, early);
  });
}

}  // namespace kvtier::scoring::cuda
