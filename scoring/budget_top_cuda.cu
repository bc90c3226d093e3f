#include "scoring/budget_cuda.cuh"
#include "transfer/cuda_check.h"

#include <cstddef>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

// A share goes to a block's sums in two parts: 2^20 of each token of a tile fit in 32 bits.
constexpr int kLowShareBits = 20;

// What of the attention of a head's visible tokens a weight of 1 is; 0 when nothing has any.
__device__ float share_of_unit(const HeadEstimate& estimate) {
  LogSum all;
  all.max = estimate.log_always;
  all.sum = isfinite(estimate.log_always) ? 1.0F : 0.0F;
  LogSum eligible;
  eligible.max = estimate.log_unit;
  eligible.sum = static_cast<float>(estimate.total) / kWeightUnits;
  all.merge(eligible);
  return all.sum > 0.0F ? expf(estimate.log_unit - all.log()) : 0.0F;
}

// The set of a block: its query heads from `first_head` of [rows][query_heads] on.
struct Set {
  int kv_head;
  int heads;
  std::int64_t first_head;
  std::int64_t index;  // in arrays per set
  const float* order;
};

__device__ Set block_set(const BudgetArgs& args) {
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
// `least` and the mass that is wanted. Clears the histograms.
template <int kShift, int kBins>
__device__ void pick_bin(const BudgetArgs& args, std::uint64_t most, std::uint32_t* counts,
                         std::uint64_t* masses, SetState& state, HeadEstimate& progress) {
  constexpr int kPerThread = kBins / kTileThreads;
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
  std::uint64_t count_before = block_exclusive_sum(count, &all_count);
  std::uint64_t mass_before = block_exclusive_sum(mass, &all_mass);
  std::uint64_t wanted = 0;
  if constexpr (kShift + 11 >= 32) {  // the first pass, whose masses are those of all tokens
    const auto spare = static_cast<std::uint64_t>(args.budget.missed * double{kShareUnits});
    wanted = all_mass - min(spare, all_mass);
  } else {
    wanted = progress.wanted;
  }
  count_before += progress.count;
  mass_before += progress.mass;
  __syncthreads();  // all have read the progress that one of them changes
  const auto least = static_cast<std::uint64_t>(args.budget.least);
  const auto enough = [&](std::uint64_t tokens, std::uint64_t of_mass) {
    return tokens >= most || (tokens >= least && of_mass >= wanted);
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
  state.threshold |= static_cast<std::uint32_t>(top - bin) << kShift;
  progress.wanted = wanted;
  progress.count = static_cast<std::uint32_t>(count_before);
  progress.mass = mass_before;
  if constexpr (kShift == 0) {
    // Tokens of equal score count with their mean mass.
    const std::uint64_t ties = bin_counts[bin];
    const std::uint64_t each = max(bin_masses[bin] / ties, std::uint64_t{1});
    const std::uint64_t missing = wanted > mass_before ? wanted - mass_before : 0;
    const std::uint64_t by_mass = min((missing + each - 1) / each, ties);
    const std::uint64_t by_least = least > count_before ? least - count_before : 0;
    const std::uint64_t taken = min(max(by_mass, by_least), min(most - count_before, ties));
    state.remaining = static_cast<std::uint32_t>(taken);
    state.all_ties = taken == ties ? 1 : 0;
  }
}

// One pass of a radix select by mass (top_k_cuda.cu has the one by count). Grid: tiles x sets x
// rows.
template <int kShift, int kBins>
__global__ __launch_bounds__(kTileThreads) void mass_pass(const __grid_constant__ BudgetArgs args) {
  __shared__ std::uint32_t counts[kBins];
  __shared__ std::uint32_t low[kBins];
  __shared__ std::uint32_t high[kBins];
  __shared__ float units[kMaxGroup];
  const RowPlan plan = args.scratch.plans[blockIdx.z];
  const TileRange tiles(plan);
  if (plan.k <= 0 || !tiles.has_block()) return;
  const Set set = block_set(args);
  const HeadEstimate* estimates = args.scratch.estimates + set.first_head;
  SetState& state = args.scratch.states[set.index];
  const std::uint32_t known = state.threshold;
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kTileThreads) {
    counts[bin] = low[bin] = high[bin] = 0;
  }
  if (static_cast<int>(threadIdx.x) < set.heads) {
    units[threadIdx.x] = share_of_unit(estimates[threadIdx.x]) / static_cast<float>(set.heads);
  }
  __syncthreads();

  const float* scores = args.scores + set.first_head * args.max_tokens;
  for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
    const std::int64_t token =
        std::int64_t{blockIdx.x} * kTileTokens + step * kTileThreads + threadIdx.x;
    if (token < plan.begin || token >= plan.end) continue;
    const std::uint32_t key = ordered_key(set.order[token]);
    // Before the first pass no bit is known, and shifts stay below 32.
    if (kShift + 11 < 32 && (key ^ known) / kBins >> kShift != 0) continue;
    const unsigned bin = (key >> kShift) & (kBins - 1);
    const float of_value = log_value(args, norms_of(args, plan, set.kv_head, token));
    float share = 0.0F;
    for (int h = 0; h < set.heads; ++h) {
      share += units[h] * weight_of(estimates[h], scores[h * args.max_tokens + token], of_value);
    }
    const std::uint64_t mass = in_units(share, kShareUnits);
    const auto low_part = static_cast<std::uint32_t>(mass & ((1U << kLowShareBits) - 1));
    const auto high_part = static_cast<std::uint32_t>(mass >> kLowShareBits);
    atomicAdd(&counts[bin], 1U);
    atomicAdd(&low[bin], low_part);
    if (high_part != 0) atomicAdd(&high[bin], high_part);
  }
  __syncthreads();
  std::uint32_t* all_counts = args.scratch.histogram + set.index * kRadixBins;
  std::uint64_t* all_masses = args.scratch.masses + set.index * kRadixBins;
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kTileThreads) {
    if (counts[bin] == 0) continue;
    atomicAdd(&all_counts[bin], counts[bin]);
    add(&all_masses[bin], (std::uint64_t{high[bin]} << kLowShareBits) + low[bin]);
  }
  if (!last_block(&state.ticket, tiles.count())) return;
  pick_bin<kShift, kBins>(args, static_cast<std::uint64_t>(plan.k), all_counts, all_masses, state,
                          args.scratch.estimates[set.first_head]);
}

}  // namespace

void enqueue_top_of_budget(const Stage& stage, const Budget& budget) {
  const BudgetArgs args = budget_args(stage, budget);
  const auto bins = std::int64_t{stage.num_rows()} * args.kv.query_heads * kRadixBins;
  KVTIER_CUDA_CHECK(cudaMemsetAsync(args.scratch.masses, 0,
                                    static_cast<std::size_t>(bins) * sizeof(std::uint64_t),
                                    stage.stream));
  const dim3 grid = budget_grid(stage.num_tiles(), args.sets, stage);
  mass_pass<21, 2048><<<grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  mass_pass<10, 2048><<<grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  mass_pass<0, 1024><<<grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
