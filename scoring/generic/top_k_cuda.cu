#include "scoring/block/block_cuda.cuh"
#include "scoring/generic/recall_cuda.cuh"
#include "scoring/generic/tile_range.cuh"
#include "scoring/plan/selector_cuda.h"
#include "scoring/score_math.h"
#include "transfer/device/cuda_check.h"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

// Exact top-k by radix select on ordered keys, high bits first: each pass counts the keys that
// match the bits known so far by their next bits, and the last block of a set picks the bin of the
// k-th best.
constexpr int kSteps = kSegmentTokens / 32;

struct TopKArgs {
  Scratch scratch;
  ScoreParams params;
  const float* scores;       // [queries][sets][max_tokens]
  const float* normalisers;  // [queries][query_heads] of scores that are not combined, or null
  float* given;              // [queries][query_heads][max_tokens] the caller's biases
  std::uint16_t* token_mask;
  std::int32_t* counts;
  std::int64_t max_tokens;
  std::int64_t capacity;
  int sets;  // per query: KV heads, or query heads
  int query_heads;
  int kv_heads;
};

// What the tokens of a selection are ordered by.
class SetOrder {
 public:
  __device__ SetOrder(const TopKArgs& args, std::int64_t query_index, int set)
      : scores_(args.scores + (query_index * args.sets + set) * args.max_tokens),
        prioritised_(args.params.rule == SelectionRule::kPriority),
        key_(prioritised_ ? priority_key(args.params, set) : 0) {}

  [[nodiscard]] __device__ std::uint32_t key(std::int64_t token) const {
    const float score = scores_[token];
    if (!prioritised_ || !(score > kLowestScore)) return ordered_key(score);
    return ordered_key(score - logf(priority_uniform(key_, static_cast<std::uint32_t>(token))));
  }
  [[nodiscard]] __device__ float score(std::int64_t token) const { return scores_[token]; }

 private:
  const float* scores_;
  bool prioritised_;
  std::uint32_t key_;
};

// The bin, from the top, at which the count reaches `state.remaining`. Clears the histogram.
template <int kShift, int kBins>
__device__ void pick_bin(std::uint32_t* histogram, SetState& state) {
  constexpr int kPerThread = kBins / kTileThreads;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPerThread;
  const std::uint32_t remaining = state.remaining;
  std::uint32_t counts[kPerThread];
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    counts[i] = __ldcg(histogram + top - i);
    histogram[top - i] = 0;
    sum += counts[i];
  }
  std::uint32_t total = 0;
  std::uint32_t before = block_exclusive_sum(sum, &total);
  if (remaining <= before || remaining > before + sum) return;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (before < remaining && remaining <= before + counts[i]) {
      state.threshold |= static_cast<std::uint32_t>(top - i) << kShift;
      state.remaining = remaining - before;
      state.all_ties = counts[i] == remaining - before ? 1 : 0;
    }
    before += counts[i];
  }
}

// Grid: tiles x sets x queries.
template <int kShift, int kBins>
__global__ __launch_bounds__(kTileThreads) void radix_pass(const __grid_constant__ TopKArgs args) {
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  const TileRange tiles(plan);
  if (plan.k <= 0 || !tiles.has_block()) return;
  const std::int64_t set = std::int64_t{blockIdx.z} * args.query_heads + blockIdx.y;
  SetState& state = args.scratch.states[set];
  const std::uint32_t known = state.threshold;
  __shared__ std::uint32_t histogram[kBins];
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kTileThreads) {
    histogram[bin] = 0;
  }
  __syncthreads();

  const SetOrder order(args, blockIdx.z, static_cast<int>(blockIdx.y));
  const unsigned lane = threadIdx.x % 32;
  for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
    const std::int64_t token =
        std::int64_t{blockIdx.x} * kTileTokens + step * kTileThreads + threadIdx.x;
    unsigned bin = kBins;  // of no token
    if (token >= plan.begin && token < plan.end) {
      const std::uint32_t key = order.key(token);
      // Before the first pass no bit is known, and shifts stay below 32.
      const std::uint32_t differs = kShift + 11 < 32 ? (key ^ known) / kBins >> kShift : 0;
      if (differs == 0) bin = (key >> kShift) & (kBins - 1);
    }
    if (!__any_sync(kFullWarp, bin < kBins)) continue;
    const unsigned peers = __match_any_sync(kFullWarp, bin);
    const bool leads = lane + 1 == static_cast<unsigned>(__ffs(static_cast<int>(peers)));
    if (leads && bin < kBins) {
      atomicAdd(&histogram[bin], static_cast<std::uint32_t>(__popc(peers)));
    }
  }
  __syncthreads();
  std::uint32_t* shared_by_blocks = args.scratch.histogram + set * kRadixBins;
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kTileThreads) {
    if (histogram[bin] != 0) atomicAdd(&shared_by_blocks[bin], histogram[bin]);
  }
  if (!last_block(&state.ticket, tiles.count())) return;
  pick_bin<kShift, kBins>(shared_by_blocks, state);
}

// A thread per set. Begins the search for the k + 1 best by priority.
__global__ void begin_priorities(const __grid_constant__ TopKArgs args, bool counted) {
  const auto query_index = static_cast<std::int64_t>(blockIdx.x);
  const QueryPlan plan = args.scratch.plans[query_index];
  const auto eligible = static_cast<std::uint32_t>(max(plan.end - plan.begin, std::int64_t{0}));
  for (int s = static_cast<int>(threadIdx.x); s < args.sets; s += static_cast<int>(blockDim.x)) {
    SetState& state = args.scratch.states[query_index * args.query_heads + s];
    if (counted) {
      const std::int64_t head = query_index * args.query_heads + s * (args.query_heads / args.sets);
      const std::uint32_t found = args.scratch.estimates[head].count + state.remaining;
      state.wanted = min(state.wanted, found);
    }
    state.threshold = 0;
    state.all_ties = 0;
    state.remaining = state.wanted < eligible ? state.wanted + 1 : state.wanted;
  }
}

// A thread per set. The last of the k + 1 best is what the others are above, unless the threshold
// is higher.
__global__ void cut_priorities(const __grid_constant__ TopKArgs args) {
  const auto query_index = static_cast<std::int64_t>(blockIdx.x);
  const QueryPlan plan = args.scratch.plans[query_index];
  const auto eligible = static_cast<std::uint32_t>(max(plan.end - plan.begin, std::int64_t{0}));
  for (int s = static_cast<int>(threadIdx.x); s < args.sets; s += static_cast<int>(blockDim.x)) {
    SetState& state = args.scratch.states[query_index * args.query_heads + s];
    if (state.wanted < eligible) {
      state.cut = score_of_key(state.threshold);
      state.remaining -= 1;
      state.all_ties = 0;
    } else {
      state.cut = -INFINITY;
      state.threshold = 0;
      state.all_ties = 1;
    }
    if (!(args.params.threshold > 0.0F)) continue;
    float least = logf(args.params.threshold);
    if (args.normalisers != nullptr) {
      least +=
          args.normalisers[query_index * args.query_heads + s * (args.query_heads / args.sets)];
    }
    if (state.cut >= least) continue;
    state.cut = least;
    state.threshold = ordered_key(least);
    state.all_ties = 1;
  }
}

// Counts the keys equal to the threshold before each segment, where not all of them are taken.
// Grid: tiles x sets x queries, a warp per segment.
__global__ __launch_bounds__(kTileThreads) void count_ties(const __grid_constant__ TopKArgs args) {
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  const TileRange tiles(plan);
  if (plan.k <= 0 || !tiles.has_block()) return;
  const std::int64_t set = std::int64_t{blockIdx.z} * args.query_heads + blockIdx.y;
  SetState& state = args.scratch.states[set];
  if (state.all_ties != 0) return;

  const SetOrder order(args, blockIdx.z, static_cast<int>(blockIdx.y));
  std::uint32_t* ties = args.scratch.ties + set * args.scratch.segments;
  const std::int64_t segment = std::int64_t{blockIdx.x} * (kTileThreads / 32) + threadIdx.x / 32;
  std::uint32_t count = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t token = segment * kSegmentTokens + step * 32 + threadIdx.x % 32;
    const bool equal =
        token >= plan.begin && token < plan.end && order.key(token) == state.threshold;
    count += static_cast<std::uint32_t>(__popc(__ballot_sync(kFullWarp, equal)));
  }
  if (threadIdx.x % 32 == 0) ties[segment] = count;
  if (!last_block(&state.ticket, tiles.count())) return;
  constexpr int kSegments = kTileTokens / kSegmentTokens;
  (void)exclusive_scan_in_place(ties + tiles.first * kSegments,
                                std::int64_t{tiles.count()} * kSegments);
}

// Writes the masks of a segment's eligible tokens, and how many are not 0; the last block of a KV
// head turns these counts into offsets and writes the size of the selection.
__device__ void write_masks(const TopKArgs& args, const QueryPlan& plan, const TileRange& tiles,
                            const std::uint16_t (&masks)[kSteps]) {
  const std::int64_t list = std::int64_t{blockIdx.z} * args.kv_heads + blockIdx.y;
  std::uint16_t* token_mask = args.token_mask + list * args.max_tokens;
  std::uint32_t* chosen = args.scratch.chosen + list * args.scratch.segments;
  const std::int64_t segment = std::int64_t{blockIdx.x} * (kTileThreads / 32) + threadIdx.x / 32;
  std::uint32_t count = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t token = segment * kSegmentTokens + step * 32 + threadIdx.x % 32;
    if (token >= plan.begin && token < plan.end) token_mask[token] = masks[step];
    count += static_cast<std::uint32_t>(__popc(__ballot_sync(kFullWarp, masks[step] != 0)));
  }
  if (threadIdx.x % 32 == 0) chosen[segment] = count;
  SetState& state = args.scratch.states[std::int64_t{blockIdx.z} * args.query_heads + blockIdx.y];
  if (!last_block(&state.ticket, tiles.count())) return;
  constexpr int kSegments = kTileTokens / kSegmentTokens;
  const std::uint32_t total = exclusive_scan_in_place(chosen + tiles.first * kSegments,
                                                      std::int64_t{tiles.count()} * kSegments);
  if (threadIdx.x == 0) {
    args.counts[list] = static_cast<std::int32_t>(total < args.capacity ? total : args.capacity);
  }
}

// Grid: tiles x KV heads x queries, a warp per segment.
__global__ __launch_bounds__(kTileThreads) void mark_best(const __grid_constant__ TopKArgs args) {
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  const TileRange tiles(plan);
  if (!tiles.has_block()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t segment = std::int64_t{blockIdx.x} * (kTileThreads / 32) + threadIdx.x / 32;
  const int sets = args.sets / args.kv_heads;
  const int group = args.query_heads / args.kv_heads;

  std::uint16_t masks[kSteps] = {};
  for (int s = 0; s < sets && plan.k > 0; ++s) {
    const int set_of_row = static_cast<int>(blockIdx.y) * sets + s;
    const std::int64_t set = std::int64_t{blockIdx.z} * args.query_heads + set_of_row;
    const SetState state = args.scratch.states[set];
    const SetOrder order(args, blockIdx.z, set_of_row);
    const bool all_ties = state.all_ties != 0;
    std::uint32_t rank = all_ties ? 0 : args.scratch.ties[set * args.scratch.segments + segment];
    const auto bits = static_cast<std::uint16_t>(sets == 1 ? (1U << group) - 1 : 1U << s);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t token = segment * kSegmentTokens + step * 32 + lane;
      const bool eligible = token >= plan.begin && token < plan.end;
      const std::uint32_t key = eligible ? order.key(token) : 0;
      const bool equal = eligible && key == state.threshold;
      const unsigned ties = __ballot_sync(kFullWarp, equal);
      const auto earlier = static_cast<std::uint32_t>(__popc(ties & ((1U << lane) - 1)));
      const bool taken = equal && (all_ties || rank + earlier < state.remaining);
      rank += static_cast<std::uint32_t>(__popc(ties));
      if (taken || (eligible && key > state.threshold)) {
        masks[step] = static_cast<std::uint16_t>(masks[step] | bits);
      }
    }
  }
  write_masks(args, plan, tiles, masks);
}

// As `mark_best`, of masks that are already in `token_mask`.
__global__ __launch_bounds__(kTileThreads) void count_marks(const __grid_constant__ TopKArgs args) {
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  const TileRange tiles(plan);
  if (!tiles.has_block()) return;
  const std::uint16_t* token_mask =
      args.token_mask + (std::int64_t{blockIdx.z} * args.kv_heads + blockIdx.y) * args.max_tokens;
  std::uint16_t masks[kSteps] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t token = std::int64_t{blockIdx.x} * kTileTokens +
                               threadIdx.x / 32 * kSegmentTokens + step * 32 + threadIdx.x % 32;
    if (token >= plan.begin && token < plan.end) masks[step] = token_mask[token];
  }
  write_masks(args, plan, tiles, masks);
}

// Grid: tiles x KV heads x queries.
__global__ __launch_bounds__(kTileThreads) void clear_marks(const __grid_constant__ TopKArgs args,
                                                            int bias_heads) {
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  std::uint16_t* token_mask =
      args.token_mask + (std::int64_t{blockIdx.z} * args.kv_heads + blockIdx.y) * args.max_tokens;
  const int group = args.query_heads / args.kv_heads;
  float* given = args.given + (std::int64_t{blockIdx.z} * args.query_heads + blockIdx.y * group) *
                                  args.max_tokens;
  for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
    const std::int64_t token =
        std::int64_t{blockIdx.x} * kTileTokens + step * kTileThreads + threadIdx.x;
    if (token < plan.begin || token >= plan.end) continue;
    token_mask[token] = 0;
    for (int h = 0; h < bias_heads; ++h) given[h * args.max_tokens + token] = 0.0F;
  }
}

// Grid: blocks of ids x heads of `ids` x queries.
__global__ __launch_bounds__(kTileThreads) void mark_ids(const __grid_constant__ TopKArgs args,
                                                         const __grid_constant__ IdTensor ids,
                                                         const __grid_constant__ IdFloats bias) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kTileThreads + threadIdx.x;
  if (i >= ids.n) return;
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  const int head = static_cast<int>(blockIdx.y);
  const std::int32_t id = ids.data[blockIdx.z * ids.query_stride + head * ids.head_stride + i];
  if (id < plan.begin || id >= plan.end) return;
  const int group = args.query_heads / args.kv_heads;
  const bool shared = ids.heads <= args.kv_heads;
  const unsigned bits = shared ? (1U << group) - 1 : 1U << head % group;
  const float given =
      bias.data == nullptr
          ? 0.0F
          : fmaxf(bias.data[blockIdx.z * bias.query_stride + head * bias.head_stride + i], 0.0F);
  // The masks of tokens 2 i and 2 i + 1 of the whole array are one word; atomics have no 16-bit
  // form.
  auto* words = reinterpret_cast<unsigned*>(args.token_mask);
  const int first = shared ? head : head / group;
  const int last = ids.heads == 1 ? args.kv_heads - 1 : first;  // one head is for all KV heads
  for (int kv_head = first; kv_head <= last; ++kv_head) {
    const std::int64_t index =
        (std::int64_t{blockIdx.z} * args.kv_heads + kv_head) * args.max_tokens + id;
    atomicOr(&words[index / 2], bits << (index % 2 * 16));
    if (bias.data == nullptr) continue;
    const int slot = shared ? kv_head * group : head;
    float* to =
        args.given + (std::int64_t{blockIdx.z} * args.query_heads + slot) * args.max_tokens + id;
    // Numbers that are not negative order as their bits do.
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(given));
  }
}

// What is added to the logits of a token that is selected, for the head of the group that has its
// own bias, or all.
__device__ float bias_of(const TopKArgs& args, BiasSource source, int head, std::int64_t token) {
  const std::int64_t query_index = blockIdx.z;
  const int group = args.query_heads / args.kv_heads;
  if (source == BiasSource::kGiven) {
    const std::int64_t slot = query_index * args.query_heads + blockIdx.y * group + head;
    return args.given[slot * args.max_tokens + token];
  }
  const int sets = args.sets / args.kv_heads;
  const int set = static_cast<int>(blockIdx.y) * sets + head;
  const float score = SetOrder(args, query_index, set).score(token);
  return priority_bias(args.scratch.states[query_index * args.query_heads + set].cut, score);
}

// Grid: tiles x KV heads x queries, a warp per segment.
__global__ __launch_bounds__(kTileThreads) void compact(
    const __grid_constant__ TopKArgs args, const __grid_constant__ transfer::SelectionView out,
    BiasSource biases) {
  const QueryPlan plan = args.scratch.plans[blockIdx.z];
  if (!TileRange(plan).has_block()) return;
  const std::int64_t list = std::int64_t{blockIdx.z} * args.kv_heads + blockIdx.y;
  const std::uint16_t* token_mask = args.token_mask + list * args.max_tokens;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t segment = std::int64_t{blockIdx.x} * (kTileThreads / 32) + threadIdx.x / 32;
  std::int64_t offset = args.scratch.chosen[list * args.scratch.segments + segment];
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t token = segment * kSegmentTokens + step * 32 + lane;
    const std::uint16_t mask =
        token >= plan.begin && token < plan.end ? token_mask[token] : std::uint16_t{0};
    const unsigned marked = __ballot_sync(kFullWarp, mask != 0);
    const std::int64_t position = offset + __popc(marked & ((1U << lane) - 1));
    if (mask != 0 && position < out.capacity) {
      out.ids[list * out.capacity + position] = static_cast<std::int32_t>(token);
      out.head_mask[list * out.capacity + position] = mask;
      float* bias = out.bias + (list * out.capacity + position) * out.bias_heads;
      for (int h = 0; h < out.bias_heads && biases != BiasSource::kNone; ++h) {
        bias[h] = ((mask >> h) & 1) != 0 ? bias_of(args, biases, h, token) : 0.0F;
      }
    }
    offset += __popc(marked);
  }
}

TopKArgs make_args(const Stage& stage) {
  const bool combined = stage.order() == stage.workspace.combined;
  return {.scratch = stage.scratch,
          .params = stage.request.params,
          .scores = stage.order(),
          .normalisers = combined ? nullptr : stage.scratch.normalisers,
          .given = stage.workspace.scores,
          .token_mask = stage.workspace.token_mask,
          .counts = stage.workspace.selection.counts,
          .max_tokens = stage.workspace.limits.max_tokens,
          .capacity = stage.workspace.selection.capacity,
          .sets = stage.num_sets(),
          .query_heads = stage.request.kv.query_heads,
          .kv_heads = stage.request.kv.kv_heads};
}

dim3 tile_grid(const Stage& stage, int heads) {
  return {stage.num_tiles(), static_cast<unsigned>(heads),
          static_cast<unsigned>(stage.num_queries())};
}

}  // namespace

void enqueue_top_k(const Stage& stage) {
  const TopKArgs args = make_args(stage);
  const dim3 sets_grid = tile_grid(stage, args.sets);
  radix_pass<21, 2048><<<sets_grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  radix_pass<10, 2048><<<sets_grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  radix_pass<0, 1024><<<sets_grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void enqueue_priorities(const Stage& stage, bool counted) {
  const TopKArgs args = make_args(stage);
  const auto num_queries = static_cast<unsigned>(stage.num_queries());
  begin_priorities<<<num_queries, kTileThreads, 0, stage.stream>>>(args, counted);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  enqueue_top_k(stage);
  cut_priorities<<<num_queries, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void enqueue_marks(const Stage& stage) {
  const TopKArgs args = make_args(stage);
  count_ties<<<tile_grid(stage, args.sets), kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  mark_best<<<tile_grid(stage, args.kv_heads), kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void enqueue_adopt(const Stage& stage, const IdTensor& ids, const IdFloats& bias) {
  const TopKArgs args = make_args(stage);
  const dim3 lists_grid = tile_grid(stage, args.kv_heads);
  const int bias_heads = bias.data != nullptr ? stage.workspace.selection.bias_heads : 0;
  clear_marks<<<lists_grid, kTileThreads, 0, stage.stream>>>(args, bias_heads);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  if (ids.n > 0) {
    const dim3 ids_grid(static_cast<unsigned>((ids.n + kTileThreads - 1) / kTileThreads),
                        static_cast<unsigned>(ids.heads),
                        static_cast<unsigned>(stage.num_queries()));
    mark_ids<<<ids_grid, kTileThreads, 0, stage.stream>>>(args, ids, bias);
    KVTIER_CUDA_CHECK(cudaGetLastError());
  }
  count_marks<<<lists_grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void enqueue_compact(const Stage& stage, BiasSource biases) {
  compact<<<tile_grid(stage, stage.request.kv.kv_heads), kTileThreads, 0, stage.stream>>>(
      make_args(stage), stage.workspace.selection, biases);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
