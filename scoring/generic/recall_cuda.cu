#include "scoring/generic/recall_cuda.cuh"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvtier::scoring::cuda {

namespace {

constexpr int kThreads = kRecallThreads;
constexpr int kWarps = kThreads / 32;
// Heads that a thread of the first scan sums for, in 36 registers.
constexpr int kScanHeads = kHeadsAtOnce;
constexpr int kBlocks = 3;  // at once on a multiprocessor

// Of the logits of the tokens of one part, less a reference. Those of a head take the place of the
// counts of ties, which come later: a part has at least a tile.
struct Moments {
  double sum = 0.0;
  double squares = 0.0;
  double key_squares = 0.0;
  float max = -std::numeric_limits<float>::infinity();
  std::uint32_t count = 0;

  __device__ void merge(const Moments& other) {
    sum += other.sum;
    squares += other.squares;
    key_squares += other.key_squares;
    max = fmaxf(max, other.max);
    count += other.count;
  }
};
static_assert(sizeof(Moments) == kTileTokens / kSegmentTokens * sizeof(std::uint32_t));

__device__ Moments* moments_of(const RecallArgs& args, std::int64_t head) {
  return reinterpret_cast<Moments*>(args.scratch.ties + head * args.scratch.segments);
}

// What is known of one head.
struct HeadSums {
  LogSum scores;
  Moments moments;
};

// logit = mean + slope * (x - mean) + slope * noise / 2, where x is the score without value norm.
__device__ void settle(const RecallArgs& args, const Moments& all, float reference,
                       float query_norm, HeadEstimate& estimate) {
  if (all.count == 0) return;
  const double shifted = all.sum / all.count;
  const double mean = shifted + static_cast<double>(reference);
  const double variance = fmax(0.0, all.squares / all.count - shifted * shifted);
  const auto norm = static_cast<double>(query_norm);
  const double noise = args.recall_params.noise * norm * norm * all.key_squares / all.count;
  const double slope = variance > noise ? 1.0 - noise / variance : 0.0;
  const double base = (1.0 - slope) * mean + slope * noise / 2.0;
  const double unit =
      base + slope * (static_cast<double>(all.max) + static_cast<double>(reference));
  estimate.slope = static_cast<float>(slope);
  estimate.offset = static_cast<float>(base - unit);
  estimate.log_unit = static_cast<float>(unit);
}

// Sums of one head, over the tokens of a thread.
struct ThreadSums {
  LogSum scores;
  float sum = 0.0F;
  float squares = 0.0F;
  float key_squares = 0.0F;
  float max = -std::numeric_limits<float>::infinity();
  std::uint32_t count = 0;

  __device__ void add(const float4& four, const TokenNorms& norms, float reference) {
    const float best = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
    if (!(best > kLowestScore)) return;
    const float top = fmaxf(scores.max, best);
    scores.sum *= expf(scores.max - top);
    scores.max = top;
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const float score = element(four, i);
      const bool counts = score > kLowestScore;
      const float x = counts ? score - norms.log_value[i] - reference : 0.0F;
      const float key = counts ? norms.key[i] : 0.0F;
      scores.sum += expf(score - top);  // of the lowest, 0
      sum += x;
      squares = fmaf(x, x, squares);
      key_squares = fmaf(key, key, key_squares);
      max = counts ? fmaxf(max, x) : max;
      count += counts ? 1 : 0;
    }
  }
  __device__ Moments moments() const {
    return {static_cast<double>(sum), static_cast<double>(squares),
            static_cast<double>(key_squares), max, count};
  }
};

// Scores of a head less their value norm are near this one, so that fp32 sums of squares keep
// their variance.
__device__ float reference_of(const RecallArgs& args, const QueryPlan& plan, int kv_head,
                              const float* scores) {
  const float x = scores[plan.begin] - log_value(args, norms_of(args, plan, kv_head, plan.begin));
  return fabsf(x) < 1e30F ? x : 0.0F;
}

// Moments of the logits of each head, and the log-sum-exp of its scores. Grid: parts x (KV head,
// `kScanHeads` of its query heads) x queries. The last block of a KV head merges parts in their
// order.
__global__ __launch_bounds__(kThreads,
                             4) void scan_scores(const __grid_constant__ RecallArgs args) {
  static_assert(kScanHeads <= kWarps);
  __shared__ HeadSums of_warps[kWarps][kScanHeads];
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  if (plan.begin >= plan.end) return;
  const int group = args.kv.group();
  const int subsets = (group + kScanHeads - 1) / kScanHeads;
  const int kv_head = static_cast<int>(blockIdx.y) / subsets;
  const int offset = (static_cast<int>(blockIdx.y) - kv_head * subsets) * kScanHeads;
  const int heads = min(kScanHeads, group - offset);
  const std::int64_t first_head =
      std::int64_t{blockIdx.z} * args.kv.query_heads + kv_head * group + offset;
  const float* scores = args.scores + first_head * args.max_tokens;

  float reference[kScanHeads];
  ThreadSums mine[kScanHeads];
#pragma unroll
  for (int h = 0; h < kScanHeads; ++h) {
    reference[h] =
        h < heads ? reference_of(args, plan, kv_head, scores + h * args.max_tokens) : 0.0F;
  }
  Tokens tokens(plan);
  for (; tokens.any(); tokens.advance()) {
    TokenNorms norms;
    norms.load(args, plan, kv_head, tokens);
    float4 of_heads[kScanHeads];
    tokens.scores(scores, args.max_tokens, heads, of_heads);
#pragma unroll
    for (int h = 0; h < kScanHeads; ++h) {
      if (h < heads) mine[h].add(of_heads[h], norms, reference[h]);
    }
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < kScanHeads; ++h) {
    if (h >= heads) break;
    HeadSums sums{mine[h].scores, mine[h].moments()};
    merge_lanes(sums.scores);
    merge_lanes(sums.moments);
    if (lane == 0) of_warps[warp][h] = sums;
  }
  __syncthreads();
  // From here on a warp is for a head.
  const std::int64_t head = first_head + warp;
  float2* partials = args.scratch.partials + head * args.scratch.tiles;
  if (warp < heads && lane == 0) {
    HeadSums sums;
    for (int w = 0; w < kWarps; ++w) {
      sums.scores.merge(of_warps[w][warp].scores);
      sums.moments.merge(of_warps[w][warp].moments);
    }
    moments_of(args, head)[blockIdx.x] = sums.moments;
    partials[blockIdx.x] = make_float2(sums.scores.max, sums.scores.sum);
  }
  if (!last_block(&args.scratch.states[first_head].ticket, gridDim.x) || warp >= heads) return;

  HeadSums sums;
  for (unsigned part = static_cast<unsigned>(lane); part < gridDim.x; part += 32) {
    const auto* words = reinterpret_cast<const uint4*>(moments_of(args, head) + part);
    const uint4 raw[2] = {__ldcg(words), __ldcg(words + 1)};
    Moments of_part;
    memcpy(&of_part, raw, sizeof(of_part));
    sums.moments.merge(of_part);
    sums.scores.merge(log_sum(__ldcg(partials + part)));
  }
  merge_lanes(sums.scores);
  merge_lanes(sums.moments);
  if (lane != 0) return;
  HeadEstimate& estimate = args.scratch.estimates[head];
  const float* of_head = args.scores + head * args.max_tokens;
  settle(args, sums.moments, reference_of(args, plan, kv_head, of_head),
         args.scalars[head].query_norm, estimate);
  if (args.order != args.combined) estimate.best = ordered_key(sums.scores.max);
  if (args.params.threshold > 0.0F) sums.scores.merge(sum_of_static(estimate));
  args.scratch.normalisers[head] = sums.scores.log();
}

// Adds e^(score - normaliser) of some heads to the sums of their tokens.
__device__ void add_heads(const float4 (&of_heads)[kHeadsAtOnce], int heads,
                          const float* normalisers, LogSum (&exponentials)[kTokensAtOnce]) {
#pragma unroll
  for (int i = 0; i < kTokensAtOnce; ++i) {
    float logs[kHeadsAtOnce];
    float best = kLowestScore;
    bool any = false;
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      const float score = h < heads ? element(of_heads[h], i) : kLowestScore;
      any = any || score > kLowestScore;
      logs[h] = score - (h < heads ? normalisers[h] : 0.0F);
      best = fmaxf(best, logs[h]);
    }
    LogSum sum;
    sum.max = best;
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) sum.sum += expf(logs[h] - best);
    if (any) exponentials[i].merge(sum);
  }
}

// Adds up the weights of each head and, for selections per KV head, combines the scores of its
// heads (generic/combine_cuda.cu). A thread's sums are its own words of shared memory. Grid: parts
// x KV heads x queries.
__global__ __launch_bounds__(kThreads,
                             kBlocks) void weigh_eligible(const __grid_constant__ RecallArgs args) {
  __shared__ std::uint64_t sums[kMaxGroup][kThreads];
  __shared__ HeadEstimate estimates[kMaxGroup];
  __shared__ float normalisers[kMaxGroup];
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  if (plan.begin >= plan.end) return;
  const int group = args.kv.group();
  const auto kv_head = static_cast<int>(blockIdx.y);
  const std::int64_t first_head = std::int64_t{blockIdx.z} * args.kv.query_heads + kv_head * group;
  if (static_cast<int>(threadIdx.x) < group) {
    estimates[threadIdx.x] = args.scratch.estimates[first_head + threadIdx.x];
    normalisers[threadIdx.x] = args.scratch.normalisers[first_head + threadIdx.x];
  }
  for (int h = 0; h < group; ++h) sums[h][threadIdx.x] = 0;
  __syncthreads();

  const float* scores = args.scores + first_head * args.max_tokens;
  float* combined =
      args.combined + (std::int64_t{blockIdx.z} * args.kv.kv_heads + kv_head) * args.max_tokens;
  float best = kLowestScore;
  Tokens tokens(plan);
  for (; tokens.any(); tokens.advance()) {
    TokenNorms norms;
    norms.load(args, plan, kv_head, tokens);
    LogSum exponentials[kTokensAtOnce];
    for (int first = 0; first < group; first += kHeadsAtOnce) {
      const int heads = min(kHeadsAtOnce, group - first);
      float4 of_heads[kHeadsAtOnce];
      tokens.scores(scores + first * args.max_tokens, args.max_tokens, heads, of_heads);
      add_heads(of_heads, heads, normalisers + first, exponentials);
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        if (h >= heads) break;
        std::uint64_t sum = 0;
#pragma unroll
        for (int i = 0; i < kTokensAtOnce; ++i) {
          const float weight =
              weight_of(estimates[first + h], element(of_heads[h], i), norms.log_value[i]);
          sum += in_units(weight, kWeightUnits);
        }
        sums[first + h][threadIdx.x] += sum;
      }
    }
    if (!args.combines) continue;
    float4 mean;
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      element(mean, i) =
          exponentials[i].sum > 0.0F
              ? settled_score(exponentials[i].log() - logf(static_cast<float>(group)))
              : kLowestScore;
      best = fmaxf(best, element(mean, i));
    }
    *reinterpret_cast<float4*>(combined + tokens.first()) = mean;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int h = static_cast<int>(threadIdx.x) / 32; h < group; h += kWarps) {
    std::uint64_t sum = 0;
    for (int i = lane; i < kThreads; i += 32) sum += sums[h][i];
    sum = warp_sum(sum);
    if (lane == 0) add(&args.scratch.estimates[first_head + h].total, sum);
  }
  if (args.order != args.combined) return;
  best = block_reduce(best, [](float a, float b) { return fmaxf(a, b); });
  if (threadIdx.x == 0) atomicMax(&args.scratch.estimates[first_head].best, ordered_key(best));
}

// Grid: parts x KV heads x queries. The last block of a KV head writes the shares of its query
// heads.
__global__ __launch_bounds__(kThreads) void write_missed(
    const __grid_constant__ RecallArgs args, const __grid_constant__ transfer::SelectionView view,
    const __grid_constant__ MissedBatch batch) {
  const auto query_index = static_cast<int>(blockIdx.z);
  const MissedItem& item = batch[query_index];
  if (item.missed == nullptr) return;
  const QueryPlan plan = args.scratch.plans[query_index];
  const int group = args.kv.group();
  const int kv_head = static_cast<int>(blockIdx.y);
  const std::int64_t list = std::int64_t{query_index} * args.kv.kv_heads + kv_head;
  const std::int64_t first_head = list * group;
  const std::int64_t count = view.counts[list];
  HeadEstimate* estimates = args.scratch.estimates + first_head;
  for (int h = 0; h < group; ++h) {
    const float* scores = args.scores + (first_head + h) * args.max_tokens;
    std::uint64_t mine = 0;
    for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * kThreads) {
      if (((view.head_mask[list * view.capacity + i] >> h) & 1) == 0) continue;
      const std::int64_t token = view.ids[list * view.capacity + i];
      const float of_value = log_value(args, norms_of(args, plan, kv_head, token));
      mine += in_units(weight_of(estimates[h], scores[token], of_value), kWeightUnits);
    }
    const std::uint64_t sum =
        block_reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; });
    if (threadIdx.x == 0) add(&estimates[h].attended, sum);
  }
  if (!last_block(&estimates->ticket, gridDim.x)) return;
  const auto head = static_cast<int>(threadIdx.x);
  if (head >= group) return;
  write_missed_share(item, kv_head * group + head, estimates[head]);
}

}  // namespace

RecallArgs recall_args(const Stage& stage, const RecallParams& recall_params) {
  const SelectRequest& request = stage.request;
  return {.recall_params = recall_params,
          .params = request.params,
          .kv = request.kv,
          .sketch = request.sketch,
          .rule = request.rule,
          .sequences = request.sequences,
          .query_batch = request.query_batch,
          .scratch = stage.scratch,
          .scalars = stage.workspace.tables.scalars,
          .queries = request.queries,
          .scores = stage.workspace.scores,
          .combined = stage.workspace.combined,
          .order = stage.order(),
          .max_tokens = stage.workspace.limits.max_tokens,
          .sets = stage.num_sets(),
          .combines = stage.shared()};
}

dim3 recall_grid(std::int64_t parts, int heads, const Stage& stage) {
  return {static_cast<unsigned>(std::min(parts, stage.scratch.tiles)), static_cast<unsigned>(heads),
          static_cast<unsigned>(stage.num_queries())};
}

dim3 scan_grid(int heads, const Stage& stage) {
  const std::int64_t rows = std::int64_t{heads} * stage.num_queries();
  const std::int64_t blocks =
      std::int64_t{kScanBlocksPerProcessor} * device_attribute(cudaDevAttrMultiProcessorCount);
  const std::int64_t least = stage.request.max_length / kMostTokensOfPart + 1;
  const std::int64_t parts = std::max({(blocks + rows - 1) / rows, least});
  return recall_grid(std::clamp<std::int64_t>(stage.num_tiles(), 1, parts), heads, stage);
}

std::size_t estimates_bytes(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(HeadEstimate);
}

void enqueue_estimates(const Stage& stage, const RecallParams& recall_params) {
  const RecallArgs args = recall_args(stage, recall_params);
  assert(args.params.estimator == Estimator::kNormAware);
  enqueue_static(stage, false);
  const int subsets = (args.kv.group() + kScanHeads - 1) / kScanHeads;
  scan_scores<<<scan_grid(args.kv.kv_heads * subsets, stage), kThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  weigh_eligible<<<scan_grid(args.kv.kv_heads, stage), kThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void enqueue_missed(const Stage& stage, const MissedBatch& batch) {
  const RecallArgs args = recall_args(stage, {});
  write_missed<<<recall_grid(kMostRecallParts, args.kv.kv_heads, stage), kThreads, 0,
                 stage.stream>>>(args, stage.workspace.selection, batch);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
