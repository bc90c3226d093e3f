#pragma once

#include "scoring/generic/recall_cuda.cuh"
#include "scoring/miss_tolerance.h"
#include "scoring/stream/candidates_cuda.cuh"

#include <cstdint>

/// Recall targets in a selection by a stream of keys: how many tokens are enough, by the mass of
/// the best ones (docs/algorithm.md, section 3).
///
/// The pass sums the moments of all logits, of which the slopes of the weights follow, and the
/// weights. It knows the slopes only of the tokens that give references; what the exact slope
/// changes follows from the first three cumulants of the logits under the weights. Where all tokens
/// gave references, the slopes are equal.
namespace kvtier::scoring::cuda {

/// Adds up the parts of a head. A whole warp; all lanes get the same.
__device__ inline RecallSums sum_recall(const FilterArgs& args, std::int64_t group_index,
                                        int head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const StreamGroup& of_group = args.filter.stream_groups[group_index];
  const auto* parts = reinterpret_cast<const float4*>(args.filter.stream_recall);
  const int last = __ldcg(&of_group.last_block);
  RecallSums total{};
  for (int block = __ldcg(&of_group.first_block) + lane; block <= last; block += 32) {
    const std::int64_t part = (args.place_of(group_index) + block) * kFusedHeads + head;
    const float4 weights = __ldcg(parts + 2 * part);
    const float4 moments = __ldcg(parts + 2 * part + 1);
    total.add(
        {{weights.x, weights.y, weights.z, weights.w}, moments.x, moments.y, moments.z, moments.w});
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) total.add(of_other_lane(total, distance));
  return total;
}

/// Base-2 logarithm of 2^a + 2^b.
__device__ inline float log2_sum(float a, float b) {
  const float larger = fmaxf(a, b);
  if (!(larger > -INFINITY)) return larger;
  return larger + log2f(exp2f(a - larger) + exp2f(b - larger));
}

/// Fills `recall` but for `all`, and of the first block of a group the estimates of its heads. All
/// threads; begins and ends with a barrier. `recall.statics` is filled.
__device__ inline void weigh_heads(const FilterArgs& args, const FusedWork& work, unsigned rank,
                                   const StreamQueries& queries, RecallShared& recall) {
  constexpr float kLn2 = 0.69314718F;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32;
  const int group = args.request.kv.group;
  __syncthreads();
  if (head < group) {
    const RecallSums sums = sum_recall(args, work.group_index, head);
    const std::int64_t index = work.group_index * group + head;
    float slope = 0.0F;
    float base = 0.0F;
    float log_total = -INFINITY;
    if (sums.count > 0.0F && sums.weights[0] > 0.0F) {
      // y is a logit less the reference: its mean, and that of the logits.
      const float reference = queries.references[head];
      const float mean = sums.first / sums.count;
      const float noise = recall_noise(args, queries.norms[head], sums.key_squares / sums.count);
      slope = recall_slope(mean, sums.second / sums.count, noise);
      base = (1.0F - slope) * (mean + reference) + slope * noise * kLn2 / 2.0F;
      // Cumulants of y under the weights that were summed.
      const float first = sums.weights[1] / sums.weights[0];
      const float square = sums.weights[2] / sums.weights[0];
      const float cube = sums.weights[3] / sums.weights[0];
      const float second = square - first * first;
      const float third = cube - 3.0F * first * square + 2.0F * first * first * first;
      const float off = (slope - queries.slopes[head]) * kLn2;
      const float grown = off * (first + off * (second / 2.0F + off * third / 6.0F));
      log_total = base + slope * reference + log2f(sums.weights[0]) + grown / kLn2;
    }
    const float log_all = log2_sum(log_total, recall.statics[head]);
    if (lane == 0) {
      const bool any = log_total > -INFINITY;
      recall.slopes[head] = slope;
      recall.offsets[head] = any ? base - log_all : -INFINITY;
      recall.shares[head] = any ? exp2f(log_total - log_all) : 0.0F;
      if (rank == 0) {
        HeadEstimate& estimate = args.estimates[index];
        estimate.slope = slope;
        estimate.offset = any ? base - log_total : -INFINITY;
        estimate.log_unit = any ? log_total * kLn2 : 0.0F;
        estimate.attended = 0;
        estimate.ticket = 0;
        estimate.total = any ? static_cast<std::uint64_t>(kWeightUnits) : 0;
      }
    }
  } else if (head < kFusedHeads && lane == 0) {
    recall.slopes[head] = 0.0F;
    recall.offsets[head] = -INFINITY;
    recall.shares[head] = 0.0F;
  }
  __syncthreads();
}

/// Returns how many of the best tokens are enough, of the listed ones: `plan.k`, or both
/// `recall.least` and what misses no more than the target allows. `found.keys` order by score,
/// `masses` are in units of 2^-31. `round`: of the exchanges. All threads; begins and ends with a
/// barrier, `shared.bins` clear before and after.
__device__ inline std::uint32_t count_by_mass(const FilterArgs& args, const FusedWork& work,
                                              const BlockExchange& peers, const Candidates& found,
                                              const std::uint32_t* masses, int& round,
                                              WideExchange& exchange, RecallShared& recall,
                                              FusedShared& shared) {
  constexpr int kBinBits = 8;
  constexpr int kBins = 1 << kBinBits;
  constexpr int kBlocksOfThread = kChoiceBlocks / 2;
  static_assert(2 * kBins == kFusedThreads && 2 * kBins == kFusedBins);
  const auto thread = static_cast<int>(threadIdx.x);
  const MassTarget target(args.recall, double{kMassUnits}, work.plan.end - work.plan.begin,
                          work.plan.k, recall.all);
  auto* const half_counts = exchange.counts[0];
  auto* const half_masses = reinterpret_cast<std::uint64_t*>(exchange.counts[1]);
  std::uint32_t low = 1;
  std::uint32_t high = 0xFFFFFFFEU;
  std::uint32_t shift = 32;  // 32 in the first round
  std::uint32_t count = 0;   // of the tokens above the window,
  std::uint64_t mass = 0;    // and their mass
#pragma unroll 1
  for (;; ++round) {
    __syncthreads();  // the bins are clear, and all have read what the last round has found
    if (thread == 0) recall.bin = -1;
#pragma unroll 1
    for (int i = thread; i < found.padded(); i += kFusedThreads) {
      const std::uint32_t key = found.keys[i];
      if (key < low || key > high) continue;
      const std::uint32_t bin = shift == 32
                                    ? static_cast<std::uint32_t>(first_bin_of<ShareBins>(key)) / 2
                                    : (key - low) >> shift;
      atomicAdd(&shared.bins[bin], 1U);
      atomicAdd(&shared.bins[kBins + bin], masses[i]);
    }
    __syncthreads();  // the block's are complete
    auto& counts = peers.box.counts[round & 1];
    const std::uint32_t stage = kFirstRoundStage + static_cast<std::uint32_t>(round);
    const int vector = thread % kBins;
    const int first = thread / kBins;
    uint2 of_blocks[kBlocksOfThread] = {};
    if (first == 0) {
      of_blocks[0] = make_uint2(shared.bins[vector], shared.bins[kBins + vector]);
      if (!peers.alone()) {
        peers.post_pair(&counts[peers.rank][2 * vector], stage, of_blocks[0].x, of_blocks[0].y);
      }
    }
    if (!peers.alone()) {
      peers.fetch<kBlocksOfThread>(&counts[first][2 * vector], 2 * kFusedBins,
                                   (static_cast<int>(peers.blocks) - first + 1) / 2, stage,
                                   of_blocks);
    }
    std::uint32_t own_count = 0;
    std::uint64_t own_mass = 0;
#pragma unroll
    for (const uint2& of_block : of_blocks) {
      own_count += of_block.x;
      own_mass += of_block.y;
    }
    half_counts[thread] = own_count;
    half_masses[thread] = own_mass;
    __syncthreads();                     // the sums of both halves of the blocks are there
    const int bin = kBins - 1 - thread;  // the best first
    const std::uint32_t in_bin = bin >= 0 ? half_counts[bin] + half_counts[kBins + bin] : 0;
    const std::uint64_t of_bin = bin >= 0 ? half_masses[bin] + half_masses[kBins + bin] : 0;
    std::uint32_t total_count = 0;
    std::uint64_t total_mass = 0;
    const std::uint32_t count_before = count + block_exclusive_sum(in_bin, &total_count);
    const std::uint64_t mass_before = mass + block_exclusive_sum(of_bin, &total_mass);
    shared.bins[thread] = 0;
    if (bin >= 0 && !target.reached(count_before, mass_before) &&
        target.reached(count_before + in_bin, mass_before + of_bin)) {
      recall.bin = bin;
      recall.count = count_before;
      recall.mass = mass_before;
      recall.in_bin = in_bin;
      recall.of_bin = of_bin;
    }
    __syncthreads();  // the bin is known
    if (recall.bin < 0) {
      ++round;
      return target.most;
    }
    const auto chosen = static_cast<std::uint32_t>(recall.bin);
    const bool single = recall.in_bin == 1;
    count = recall.count;
    mass = recall.mass;
    if (shift == 32) {
      constexpr std::uint32_t kWidth = ShareBins::kShift + 1;
      const std::uint32_t from = ShareBins::kBase + (chosen << kWidth);
      low = chosen == 0 ? 1 : from;
      if (chosen != kBins - 1) high = from + ((1U << kWidth) - 1);
    } else {
      low += chosen << shift;
      high = min(high, low + ((1U << shift) - 1));
    }
    if (single || low == high) {
      ++round;
      return count + target.fewest(count, mass, recall.in_bin, recall.of_bin);
    }
    shift = static_cast<std::uint32_t>(max(0, 32 - kBinBits - __clz(static_cast<int>(high - low))));
  }
}

}  // namespace kvtier::scoring::cuda
