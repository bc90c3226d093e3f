#include "scoring/budget_cuda.cuh"
#include "transfer/convert_cuda.cuh"
#include "transfer/cuda_check.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvtier::scoring::cuda {

namespace {

// Blocks over the tokens always attended of a (row, KV head), and over a list of selected tokens:
// enough that a few hundred rows take a block one trip, few enough to be merged at once.
constexpr int kMostParts = 8;
constexpr int kThreads = 256;

__device__ LogSum log_sum(float2 parts) {
  LogSum sum;
  sum.max = parts.x;
  sum.sum = parts.y;
  return sum;
}

// ln of the sum of e^logit over the tokens that are always attended. A warp takes a row; lane h
// sums for head h. Grid: parts x KV heads x rows. The last block merges the parts in their order.
__global__ __launch_bounds__(kThreads) void weigh_always(const __grid_constant__ BudgetArgs args) {
  constexpr int kWarps = kThreads / 32;
  __shared__ alignas(8) float queries[kMaxGroup * 256];
  __shared__ float2 sums[kWarps][kMaxGroup];
  const transfer::KvGeometry& kv = args.kv;
  const transfer::QueryRow& row = args.rows[static_cast<int>(blockIdx.z)];
  const transfer::SequenceView& sequence = args.sequences[row.sequence];
  const transfer::AttendedSpans spans =
      transfer::attended_spans(args.rule, sequence.counters->length, row);
  if (spans.num_eligible() <= 0) return;
  const std::int64_t resident_begin = sequence.counters->resident_begin;
  const int group = kv.group();
  const int kv_head = static_cast<int>(blockIdx.y);
  const std::int64_t first_head = std::int64_t{blockIdx.z} * kv.query_heads + kv_head * group;
  for (int i = static_cast<int>(threadIdx.x); i < group * kv.head_dim; i += kThreads) {
    queries[i] = args.queries[first_head * kv.head_dim + i];
  }
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  LogSum mine;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + warp; i < spans.num_always();
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t token = i < spans.sink_end ? i : spans.tail_begin + i - spans.sink_end;
    const auto* key = reinterpret_cast<const unsigned*>(
        transfer::row_address(kv, sequence, resident_begin, kv_head, token));
    float products[kMaxGroup] = {};
    for (int x = lane; x < kv.head_dim / 2; x += 32) {
      const float2 pair = transfer::cuda::widen_pair(key[x], kv.dtype);
#pragma unroll
      for (int h = 0; h < kMaxGroup; ++h) {
        if (h >= group) break;
        const float2 q = reinterpret_cast<const float2*>(queries + h * kv.head_dim)[x];
        products[h] = fmaf(q.x, pair.x, fmaf(q.y, pair.y, products[h]));
      }
    }
    float logit = 0.0F;
#pragma unroll
    for (int h = 0; h < kMaxGroup; ++h) {
      if (h >= group) break;
      for (int offset = 16; offset > 0; offset /= 2) {
        products[h] += __shfl_xor_sync(kFullWarp, products[h], offset);
      }
      if (lane == h) logit = products[h] * args.params.logit_scale;
    }
    if (isfinite(logit)) mine.add(logit);
  }
  if (lane < group) sums[warp][lane] = make_float2(mine.max, mine.sum);
  __syncthreads();

  HeadEstimate* estimates = args.scratch.estimates + first_head;
  float2* partials = args.scratch.partials + first_head * args.scratch.tiles;
  const int head = static_cast<int>(threadIdx.x);
  if (head < group) {
    LogSum of_block;
    for (int w = 0; w < kWarps; ++w) of_block.merge(log_sum(sums[w][head]));
    partials[head * args.scratch.tiles + blockIdx.x] = make_float2(of_block.max, of_block.sum);
  }
  if (!last_block(&estimates->ticket, gridDim.x)) return;
  if (head >= group) return;
  LogSum all;
  for (unsigned part = 0; part < gridDim.x; ++part) {
    all.merge(log_sum(__ldcg(partials + head * args.scratch.tiles + part)));
  }
  estimates[head].log_always = all.log();
}

// Of the logits of one tile. Those of a row take the place of the counts of ties, which come later.
struct Moments {
  double sum;
  double squares;
  double key_squares;
  float max;
  std::uint32_t count;
};
static_assert(sizeof(Moments) == kTileTokens / kSegmentTokens * sizeof(std::uint32_t));

__device__ Moments block_moments(const Moments& mine) {
  const auto plus = [](auto a, auto b) { return a + b; };
  return {.sum = block_reduce(mine.sum, plus),
          .squares = block_reduce(mine.squares, plus),
          .key_squares = block_reduce(mine.key_squares, plus),
          .max = block_reduce(mine.max, [](float a, float b) { return fmaxf(a, b); }),
          .count = block_reduce(mine.count, plus)};
}

__device__ void merge(Moments& into, const Moments& other) {
  into.sum += other.sum;
  into.squares += other.squares;
  into.key_squares += other.key_squares;
  into.max = fmaxf(into.max, other.max);
  into.count += other.count;
}

// logit = mean + slope * (x - mean) + slope * noise / 2, where x is the score without value norm.
__device__ void settle(const BudgetArgs& args, const Moments& all, float query_norm,
                       HeadEstimate& estimate) {
  if (all.count == 0) return;
  const double mean = all.sum / all.count;
  const double variance = fmax(0.0, all.squares / all.count - mean * mean);
  const auto norm = static_cast<double>(query_norm);
  const double noise = args.budget.noise * norm * norm * all.key_squares / all.count;
  const double slope = variance > noise ? 1.0 - noise / variance : 0.0;
  const double base = (1.0 - slope) * mean + slope * noise / 2.0;
  const double unit = base + slope * static_cast<double>(all.max);
  estimate.slope = static_cast<float>(slope);
  estimate.offset = static_cast<float>(base - unit);
  estimate.log_unit = static_cast<float>(unit);
}

// Grid: tiles x query heads x rows. The last block of a head merges the tiles in their order.
__global__ __launch_bounds__(kTileThreads) void find_moments(
    const __grid_constant__ BudgetArgs args) {
  const RowPlan plan = args.scratch.plans[blockIdx.z];
  const TileRange tiles(plan);
  if (!tiles.has_block()) return;
  const int kv_head = static_cast<int>(blockIdx.y) / args.kv.group();
  const std::int64_t head = std::int64_t{blockIdx.z} * args.kv.query_heads + blockIdx.y;
  const float* scores = args.scores + head * args.max_tokens;
  const Moments none{0.0, 0.0, 0.0, -std::numeric_limits<float>::infinity(), 0};
  Moments mine = none;
  for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
    const std::int64_t token =
        std::int64_t{blockIdx.x} * kTileTokens + step * kTileThreads + threadIdx.x;
    if (token < plan.begin || token >= plan.end || !(scores[token] > kLowestScore)) continue;
    const Norms norms = norms_of(args, plan, kv_head, token);
    const float logit = scores[token] - log_value(args, norms);
    const auto x = static_cast<double>(logit);
    const auto key = static_cast<double>(norms.key);
    merge(mine, {x, x * x, key * key, logit, 1});
  }
  const Moments of_tile = block_moments(mine);
  auto* partials = reinterpret_cast<Moments*>(args.scratch.ties + head * args.scratch.segments);
  if (threadIdx.x == 0) partials[blockIdx.x] = of_tile;
  if (!last_block(&args.scratch.states[head].ticket, tiles.count())) return;

  Moments merged = none;
  for (std::int64_t i = tiles.first + threadIdx.x; i <= tiles.last; i += kTileThreads) {
    const auto* words = reinterpret_cast<const uint4*>(partials + i);
    union {
      uint4 raw[2];
      Moments value;
    } partial{.raw = {__ldcg(words), __ldcg(words + 1)}};
    merge(merged, partial.value);
  }
  const Moments all = block_moments(merged);
  if (threadIdx.x == 0) {
    settle(args, all, args.scalars[head].query_norm, args.scratch.estimates[head]);
  }
}

// Grid: tiles x query heads x rows.
__global__ __launch_bounds__(kTileThreads) void weigh_eligible(
    const __grid_constant__ BudgetArgs args) {
  const RowPlan plan = args.scratch.plans[blockIdx.z];
  if (!TileRange(plan).has_block()) return;
  const int kv_head = static_cast<int>(blockIdx.y) / args.kv.group();
  const std::int64_t head = std::int64_t{blockIdx.z} * args.kv.query_heads + blockIdx.y;
  const float* scores = args.scores + head * args.max_tokens;
  HeadEstimate& estimate = args.scratch.estimates[head];
  std::uint64_t mine = 0;
  for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
    const std::int64_t token =
        std::int64_t{blockIdx.x} * kTileTokens + step * kTileThreads + threadIdx.x;
    if (token < plan.begin || token >= plan.end) continue;
    const float of_value = log_value(args, norms_of(args, plan, kv_head, token));
    mine += in_units(weight_of(estimate, scores[token], of_value), kWeightUnits);
  }
  const std::uint64_t sum =
      block_reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; });
  if (threadIdx.x == 0) add(&estimate.total, sum);
}

// Grid: parts x KV heads x rows. The last block of a KV head writes the shares of its query heads.
__global__ __launch_bounds__(kThreads) void write_missed(
    const __grid_constant__ BudgetArgs args, const __grid_constant__ transfer::SelectionView view,
    const __grid_constant__ MissedBatch batch) {
  const auto row = static_cast<int>(blockIdx.z);
  const MissedItem& item = batch[row];
  if (item.missed == nullptr) return;
  const RowPlan plan = args.scratch.plans[row];
  const int group = args.kv.group();
  const int kv_head = static_cast<int>(blockIdx.y);
  const std::int64_t list = std::int64_t{row} * args.kv.kv_heads + kv_head;
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
  HeadEstimate& estimate = estimates[head];
  const std::uint64_t attended = __ldcg(&estimate.attended);
  estimate.attended = 0;
  const std::uint64_t rest = estimate.total - attended;
  float share = 0.0F;
  if (rest > 0) {
    const float log_rest = logf(static_cast<float>(rest) / kWeightUnits) + estimate.log_unit;
    const float lse = item.lse[(kv_head * group + head) * item.lse_stride];
    share = 1.0F / (1.0F + expf(lse - log_rest));
  }
  item.missed[(kv_head * group + head) * item.missed_stride] = share;
}

}  // namespace

BudgetArgs budget_args(const Stage& stage, const Budget& budget) {
  const SelectRequest& request = stage.request;
  assert(request.params.estimator == Estimator::kNormAware);
  return {.budget = budget,
          .params = request.params,
          .kv = request.kv,
          .sketch = request.sketch,
          .rule = request.rule,
          .sequences = request.sequences,
          .rows = request.rows,
          .scratch = stage.scratch,
          .scalars = stage.workspace.tables.scalars,
          .queries = request.queries,
          .scores = stage.workspace.scores,
          .order = stage.order(),
          .max_tokens = stage.workspace.limits.max_tokens,
          .sets = stage.num_sets(),
          .parts = static_cast<int>(std::min<std::int64_t>(kMostParts, stage.scratch.tiles))};
}

std::size_t estimates_bytes(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(HeadEstimate);
}

void enqueue_estimates(const Stage& stage, const Budget& budget) {
  const BudgetArgs args = budget_args(stage, budget);
  const auto heads = std::int64_t{stage.num_rows()} * args.kv.query_heads;
  KVTIER_CUDA_CHECK(
      cudaMemsetAsync(args.scratch.estimates, 0, estimates_bytes(heads), stage.stream));
  weigh_always<<<budget_grid(static_cast<unsigned>(args.parts), args.kv.kv_heads, stage), kThreads,
                 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  const dim3 grid = budget_grid(stage.num_tiles(), args.kv.query_heads, stage);
  find_moments<<<grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  weigh_eligible<<<grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void enqueue_missed(const Stage& stage, const MissedBatch& batch) {
  const BudgetArgs args = budget_args(stage, {});
  write_missed<<<budget_grid(static_cast<unsigned>(args.parts), args.kv.kv_heads, stage), kThreads,
                 0, stage.stream>>>(args, stage.workspace.selection, batch);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
