#include "scoring/generic/recall_cuda.cuh"
#include "scoring/miss_tolerance.h"
#include "transfer/device/cuda_check.h"

#include <cstddef>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

// A share goes to a block's sums in two parts, so that of `kMostTokensOfPart` tokens each fits in
// 32 bits.
constexpr int kLowShareBits = 12;

// At once on a multiprocessor, for which a thread has 64 registers.
constexpr int kBlocks = 4;

// The first pass counts by steps of 1/64 below the best score, which spreads the tokens that have
// attention over many bins; 32 below it or more are one bin. The others go by the bits of a key.
constexpr int kStepsPass = 32;
constexpr float kSteps = 64.0F;

// What of the attention of a head's visible tokens a weight of 1 is; 0 when nothing has any.
__device__ float share_of_unit(const HeadEstimate& estimate) {
  LogSum all;
  all.max = estimate.log_static;
  all.sum = isfinite(estimate.log_static) ? 1.0F : 0.0F;
  LogSum eligible;
  eligible.max = estimate.log_unit;
  eligible.sum = static_cast<float>(estimate.total) / kWeightUnits;
  all.merge(eligible);
  return all.sum > 0.0F ? expf(estimate.log_unit - all.log()) : 0.0F;
}

// The set of a block: its query heads from `first_head` of [queries][query_heads] on.
struct Set {
  int kv_head;
  int heads;
  std::int64_t first_head;
  std::int64_t index;  // in arrays per set
  const float* order;
};

__device__ Set block_set(const RecallArgs& args) {
  Set set;
  set.heads = args.kv.query_heads / args.sets;
  set.kv_head = static_cast<int>(blockIdx.y) * set.heads / args.kv.group();
  const std::int64_t first_of_row = std::int64_t{blockIdx.z} * args.kv.query_heads;
  set.first_head = first_of_row + blockIdx.y * set.heads;
  set.index = first_of_row + blockIdx.y;
  set.order = args.order + (std::int64_t{blockIdx.z} * args.sets + blockIdx.y) * args.max_tokens;
  return set;
}

// Finds the bin, from the top, with whose tokens the set has enough: `most` of them, or both
// `least` and what leaves out no more than is allowed. Clears the histograms.
template <int kShift, int kBins>
__device__ void pick_bin(const RecallArgs& args, const QueryPlan& plan, std::uint32_t* counts,
                         std::uint64_t* masses, SetState& state, HeadEstimate& progress) {
  constexpr int kPerThread = kBins / kRecallThreads;
  const MissTolerance tolerance(args.recall_params.missed * double{kShareUnits},
                                plan.end - plan.begin, plan.k);
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPerThread;
  std::uint32_t bin_counts[kPerThread];
  std::uint64_t bin_masses[kPerThread];
  std::uint32_t count = 0;
  std::uint64_t mass = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    count += bin_counts[i] = __ldcg(counts + top - i);
    mass += bin_masses[i] = __ldcg(masses + top - i);
    counts[top - i] = 0;
    masses[top - i] = 0;
  }
  std::uint32_t all_count = 0;
  std::uint64_t all_mass = 0;
  std::uint32_t count_before = block_exclusive_sum(count, &all_count);
  std::uint64_t mass_before = block_exclusive_sum(mass, &all_mass);
  // The first pass sees the masses of all tokens.
  const std::uint64_t all = kShift == kStepsPass ? all_mass : progress.all;
  count_before += progress.count;
  mass_before += progress.mass;
  __syncthreads();  // all have read the progress that one of them changes
  const auto most = static_cast<std::uint32_t>(plan.k);
  const auto least = static_cast<std::uint32_t>(args.recall_params.least);
  const auto enough = [&](std::uint32_t tokens, std::uint64_t of_mass) {
    if (tokens >= most) return true;
    const double spare = tolerance.of(static_cast<std::int32_t>(tokens));
    return tokens >= least && of_mass + static_cast<std::uint64_t>(spare) >= all;
  };
  if (enough(count_before, mass_before) || !enough(count_before + count, mass_before + mass)) {
    return;
  }
  int bin = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (enough(count_before + bin_counts[i], mass_before + bin_masses[i])) {
      bin = i;
      break;
    }
    count_before += bin_counts[i];
    mass_before += bin_masses[i];
  }
  if constexpr (kShift == kStepsPass) {
    progress.bin = static_cast<std::uint32_t>(top - bin);
  } else {
    state.threshold |= static_cast<std::uint32_t>(top - bin) << kShift;
  }
  progress.all = all;
  progress.count = count_before;
  progress.mass = mass_before;
  if constexpr (kShift == 0) {
    // Tokens of equal score count with their mean mass.
    const std::uint32_t ties = bin_counts[bin];
    const std::uint64_t each = max(bin_masses[bin] / ties, std::uint64_t{1});
    std::uint32_t taken = 1;  // the fewest that are enough
    for (std::uint32_t last = ties; taken < last;) {
      const std::uint32_t middle = (taken + last) / 2;
      if (enough(count_before + middle, mass_before + middle * each)) {
        last = middle;
      } else {
        taken = middle + 1;
      }
    }
    state.remaining = taken;
    state.all_ties = taken == ties ? 1 : 0;
  }
}

template <int kBins>
__device__ unsigned bin_of_step(float best, float score) {
  const float steps = fminf((best - score) * kSteps, static_cast<float>(kBins - 1));
  return static_cast<unsigned>(kBins - 1) - static_cast<unsigned>(steps);
}

// One pass of a radix select by mass (generic/top_k_cuda.cu has the one by count). Grid: parts x
// sets x queries.
template <int kShift, int kBins>
__global__ __launch_bounds__(kRecallThreads,
                             kBlocks) void mass_pass(const __grid_constant__ RecallArgs args) {
  constexpr int kFirstBins = 2048;
  __shared__ std::uint32_t counts[kBins];
  __shared__ std::uint32_t low[kBins];
  __shared__ std::uint32_t high[kBins];
  __shared__ HeadEstimate estimates[kMaxGroup];
  __shared__ float units[kMaxGroup];
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  if (plan.k <= 0 || plan.begin >= plan.end) return;
  const Set set = block_set(args);
  SetState& state = args.scratch.states[set.index];
  const std::uint32_t known = state.threshold;
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kRecallThreads) {
    counts[bin] = low[bin] = high[bin] = 0;
  }
  if (static_cast<int>(threadIdx.x) < set.heads) {
    const HeadEstimate& mine = args.scratch.estimates[set.first_head + threadIdx.x];
    estimates[threadIdx.x] = mine;
    units[threadIdx.x] = share_of_unit(mine) / static_cast<float>(set.heads);
  }
  __syncthreads();
  const float best = score_of_key(estimates[0].best);
  const unsigned first_bin = estimates[0].bin;

  const float* scores = args.scores + set.first_head * args.max_tokens;
  Tokens tokens(plan);
  for (; tokens.any(); tokens.advance()) {
    const float4 order = tokens.scores(set.order);
    unsigned bins[kTokensAtOnce];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const float score = element(order, i);
      bins[i] = kBins;  // of no token
      if (!tokens.eligible(i)) continue;
      const unsigned step = bin_of_step<kFirstBins>(best, score);
      if constexpr (kShift == kStepsPass) {
        bins[i] = step;
      } else if (step == first_bin) {
        const std::uint32_t key = ordered_key(score);
        // Before the first pass by keys no bit is known, and shifts stay below 32.
        const std::uint32_t differs = kShift + 11 < 32 ? (key ^ known) / kBins >> kShift : 0;
        if (differs == 0) bins[i] = (key >> kShift) & (kBins - 1);
      }
      any = any || bins[i] < kBins;
    }
    if (!any) continue;
    TokenNorms norms;
    norms.load(args, plan, set.kv_head, tokens);
    float shares[kTokensAtOnce] = {};
    for (int first = 0; first < set.heads; first += kHeadsAtOnce) {
      const int heads = min(kHeadsAtOnce, set.heads - first);
      float4 of_heads[kHeadsAtOnce];
      tokens.scores(scores + first * args.max_tokens, args.max_tokens, heads, of_heads);
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        if (h >= heads) break;
#pragma unroll
        for (int i = 0; i < kTokensAtOnce; ++i) {
          shares[i] += units[first + h] *
                       weight_of(estimates[first + h], element(of_heads[h], i), norms.log_value[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      if (bins[i] == kBins) continue;
      const std::uint64_t mass = in_units(shares[i], kShareUnits);
      const auto high_part = static_cast<std::uint32_t>(mass >> kLowShareBits);
      atomicAdd(&counts[bins[i]], 1U);
      atomicAdd(&low[bins[i]], static_cast<std::uint32_t>(mass & ((1U << kLowShareBits) - 1)));
      if (high_part != 0) atomicAdd(&high[bins[i]], high_part);
    }
  }
  __syncthreads();
  std::uint32_t* all_counts = args.scratch.histogram + set.index * kRadixBins;
  std::uint64_t* all_masses = args.scratch.masses + set.index * kRadixBins;
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kRecallThreads) {
    if (counts[bin] == 0) continue;
    atomicAdd(&all_counts[bin], counts[bin]);
    add(&all_masses[bin], (std::uint64_t{high[bin]} << kLowShareBits) + low[bin]);
  }
  if (!last_block(&state.ticket, gridDim.x)) return;
  pick_bin<kShift, kBins>(args, plan, all_counts, all_masses, state,
                          args.scratch.estimates[set.first_head]);
}

}  // namespace

void enqueue_top_of_recall(const Stage& stage, const RecallParams& recall_params) {
  const RecallArgs args = recall_args(stage, recall_params);
  const auto bins = std::int64_t{stage.num_queries()} * args.kv.query_heads * kRadixBins;
  KVTIER_CUDA_CHECK(cudaMemsetAsync(args.scratch.masses, 0,
                                    static_cast<std::size_t>(bins) * sizeof(std::uint64_t),
                                    stage.stream));
  const dim3 grid = scan_grid(args.sets, stage);
  mass_pass<kStepsPass, 2048><<<grid, kRecallThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  mass_pass<21, 2048><<<grid, kRecallThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  mass_pass<10, 2048><<<grid, kRecallThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  mass_pass<0, 1024><<<grid, kRecallThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
