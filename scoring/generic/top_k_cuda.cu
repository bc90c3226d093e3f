#include "scoring/generic/recall_cuda.cuh"
#include "scoring/miss_tolerance.h"
#include "scoring/score_math.h"

#include <cstddef>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

// Exact top-k by radix select on ordered keys, high bits first: each pass counts the keys that
// match the bits known so far by their next bits, and the last block of a set picks the bin of the
// k-th best. For a recall target the bins have masses too, and the last token is the first with
// which the set has enough.
constexpr int kSteps = kSegmentTokens / 32;

// A mass goes to a block's sums in two parts, so that of a tile each fits in 32 bits.
constexpr int kLowMassBits = 12;

// What the tokens of a set are ordered by.
class SetOrder {
 public:
  __device__ SetOrder(const GenericArgs& args, int set)
      : scores_(args.row(args.order, std::int64_t{blockIdx.z} * args.sets + set)),
        prioritised_(args.request.params.rule == SelectionRule::kPriority),
        key_(prioritised_ ? priority_key(args.request.params, set) : 0) {}

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

// What share of the attention of a set's heads its tokens have, in shared memory.
struct SetMasses {
  HeadEstimate estimates[kMaxGroup];
  float units[kMaxGroup];  // share of a head that a weight of 1 is; 0 when nothing has any

  // A barrier must follow.
  __device__ void load(const GenericArgs& args) {
    const auto head = static_cast<int>(threadIdx.x);
    const int heads = args.request.kv.query_heads() / args.sets;
    if (head >= heads) return;
    const HeadEstimate estimate = args.scratch.estimates[first_head(args) + head];
    LogSum all;
    if (isfinite(estimate.log_static)) all.add(estimate.log_static);
    LogSum eligible;
    eligible.max = estimate.log_unit;
    eligible.sum = static_cast<float>(estimate.total) / kWeightUnits;
    all.merge(eligible);
    estimates[head] = estimate;
    units[head] =
        all.sum > 0.0F ? expf(estimate.log_unit - all.log()) / static_cast<float>(heads) : 0.0F;
  }
  // In `kShareUnits`.
  [[nodiscard]] __device__ std::uint64_t of(const GenericArgs& args, const QueryPlan& plan,
                                            std::int64_t token) const {
    const int heads = args.request.kv.query_heads() / args.sets;
    const int kv_head = static_cast<int>(blockIdx.y) * heads / args.request.kv.group;
    const float of_value = log_value(args, norms_of(args, plan, kv_head, token));
    float share = 0.0F;
    for (int h = 0; h < heads; ++h) {
      const float score = args.row(args.workspace.scores, first_head(args) + h)[token];
      share += units[h] * weight_of(estimates[h], score, of_value);
    }
    return in_units(share, kShareUnits);
  }

 private:
  __device__ static std::int64_t first_head(const GenericArgs& args) {
    const int query_heads = args.request.kv.query_heads();
    return std::int64_t{blockIdx.z} * query_heads + blockIdx.y * (query_heads / args.sets);
  }
};

// The bin, from the top, with whose tokens a set has as many as are sought or, kByMass, enough.
// Clears the histograms.
template <int kShift, int kBins, bool kByMass>
__device__ void pick_bin(const GenericArgs& args, const QueryPlan& plan, std::uint32_t* counts,
                         std::uint64_t* masses, SetState& state) {
  constexpr int kPerThread = kBins / kTileThreads;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPerThread;
  std::uint32_t bin_counts[kPerThread];
  std::uint64_t bin_masses[kPerThread] = {};
  std::uint32_t count = 0;
  std::uint64_t mass = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    count += bin_counts[i] = __ldcg(counts + top - i);
    counts[top - i] = 0;
    if constexpr (kByMass) {
      mass += bin_masses[i] = __ldcg(masses + top - i);
      masses[top - i] = 0;
    }
  }
  const std::uint32_t sought = state.sought;
  std::uint32_t all_count = 0;
  std::uint64_t all_mass = 0;
  std::uint32_t count_before = state.above + block_exclusive_sum<kTileThreads>(count, &all_count);
  std::uint64_t mass_before = 0;
  if constexpr (kByMass) {
    mass_before = state.mass + block_exclusive_sum<kTileThreads>(mass, &all_mass);
    // The first pass sees the masses of all tokens.
    if (kShift + 11 < 32) all_mass = state.all;
  }
  const MassTarget target(args.recall, double{kShareUnits}, plan.end - plan.begin, plan.k,
                          all_mass);
  const auto enough = [&](std::uint32_t tokens, std::uint64_t of_mass) {
    return kByMass ? target.reached(tokens, of_mass) : tokens >= sought;
  };
  __syncthreads();  // all have read the state that one of them changes
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
  state.above = count_before;
  state.mass = mass_before;
  state.all = all_mass;
  if constexpr (kShift == 0) {
    const std::uint32_t ties = bin_counts[bin];
    state.remaining = kByMass ? target.fewest(count_before, mass_before, ties, bin_masses[bin])
                              : sought - count_before;
    state.all_ties = state.remaining == ties ? 1 : 0;
  }
}

// Grid: tiles x sets x queries. kByMass: by score, for a recall target.
template <int kShift, int kBins, bool kByMass>
__global__ __launch_bounds__(kTileThreads) void radix_pass(
    const __grid_constant__ GenericArgs args) {
  const TileWork work(args);
  if (work.plan.k <= 0 || !work.any()) return;
  SetState& state = args.scratch.states[work.index];
  const std::uint32_t known = state.threshold;
  __shared__ std::uint32_t counts[kBins];
  __shared__ std::uint32_t low[kByMass ? kBins : 1];
  __shared__ std::uint32_t high[kByMass ? kBins : 1];
  __shared__ SetMasses set_masses;
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kTileThreads) {
    counts[bin] = 0;
    if constexpr (kByMass) low[bin] = high[bin] = 0;
  }
  if constexpr (kByMass) set_masses.load(args);
  __syncthreads();

  const SetOrder order(args, static_cast<int>(blockIdx.y));
  const unsigned lane = threadIdx.x % 32;
  for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
    const std::int64_t token =
        std::int64_t{blockIdx.x} * kTileTokens + step * kTileThreads + threadIdx.x;
    unsigned bin = kBins;  // of no token
    if (work.eligible(token)) {
      const std::uint32_t key = kByMass ? ordered_key(order.score(token)) : order.key(token);
      // Before the first pass no bit is known, and shifts stay below 32.
      const std::uint32_t differs = kShift + 11 < 32 ? (key ^ known) / kBins >> kShift : 0;
      if (differs == 0) bin = (key >> kShift) & (kBins - 1);
    }
    if (!__any_sync(kFullWarp, bin < kBins)) continue;
    const unsigned peers = __match_any_sync(kFullWarp, bin);
    if (bin == kBins) continue;
    if (lane + 1 == static_cast<unsigned>(__ffs(static_cast<int>(peers)))) {
      atomicAdd(&counts[bin], static_cast<std::uint32_t>(__popc(peers)));
    }
    if constexpr (kByMass) {
      const std::uint64_t mass = set_masses.of(args, work.plan, token);
      const auto high_part = static_cast<std::uint32_t>(mass >> kLowMassBits);
      atomicAdd(&low[bin], static_cast<std::uint32_t>(mass & ((1U << kLowMassBits) - 1)));
      if (high_part != 0) atomicAdd(&high[bin], high_part);
    }
  }
  __syncthreads();
  std::uint32_t* all_counts = args.scratch.histogram + work.index * kRadixBins;
  std::uint64_t* all_masses = args.scratch.masses + work.index * kRadixBins;
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kTileThreads) {
    if (counts[bin] == 0) continue;
    atomicAdd(&all_counts[bin], counts[bin]);
    if constexpr (kByMass) {
      add(&all_masses[bin], (std::uint64_t{high[bin]} << kLowMassBits) + low[bin]);
    }
  }
  if (!last_block(&state.ticket, work.count())) return;
  pick_bin<kShift, kBins, kByMass>(args, work.plan, all_counts, all_masses, state);
}

// A thread per set. Begins the search for the k + 1 best by priority. `counted`: for as many tokens
// as were enough.
__global__ void begin_priorities(const __grid_constant__ GenericArgs args, bool counted) {
  const auto query_index = static_cast<std::int64_t>(blockIdx.x);
  const QueryPlan plan = args.scratch.plans[query_index];
  const auto eligible = static_cast<std::uint32_t>(max(plan.end - plan.begin, std::int64_t{0}));
  for (int s = static_cast<int>(threadIdx.x); s < args.sets; s += static_cast<int>(blockDim.x)) {
    SetState& state = args.scratch.states[query_index * args.request.kv.query_heads() + s];
    if (counted) state.wanted = min(state.wanted, state.above + state.remaining);
    state.threshold = 0;
    state.above = 0;
    state.sought = state.wanted < eligible ? state.wanted + 1 : state.wanted;
  }
}

// A thread per set. The last of the k + 1 best is what the others are above, unless the threshold
// is higher.
__global__ void cut_priorities(const __grid_constant__ GenericArgs args) {
  const auto query_index = static_cast<std::int64_t>(blockIdx.x);
  const QueryPlan plan = args.scratch.plans[query_index];
  const int query_heads = args.request.kv.query_heads();
  const float threshold = args.request.params.threshold;
  const auto eligible = static_cast<std::uint32_t>(max(plan.end - plan.begin, std::int64_t{0}));
  for (int s = static_cast<int>(threadIdx.x); s < args.sets; s += static_cast<int>(blockDim.x)) {
    SetState& state = args.scratch.states[query_index * query_heads + s];
    if (state.wanted < eligible) {
      state.cut = score_of_key(state.threshold);
      state.remaining -= 1;
      state.all_ties = 0;
    } else {
      state.cut = -INFINITY;
      state.threshold = 0;
      state.all_ties = 1;
    }
    if (!(threshold > 0.0F)) continue;
    float least = logf(threshold);
    // Combined scores are normalised.
    if (args.order == args.workspace.scores) {
      least += args.scratch.normalisers[query_index * query_heads + s * (query_heads / args.sets)];
    }
    if (state.cut >= least) continue;
    state.cut = least;
    state.threshold = ordered_key(least);
    state.all_ties = 1;
  }
}

// Counts the keys equal to the threshold before each segment, where not all of them are taken.
// Grid: tiles x sets x queries.
__global__ __launch_bounds__(kTileThreads) void count_ties(
    const __grid_constant__ GenericArgs args) {
  const TileWork work(args);
  if (work.plan.k <= 0 || !work.any()) return;
  SetState& state = args.scratch.states[work.index];
  if (state.all_ties != 0) return;

  const SetOrder order(args, static_cast<int>(blockIdx.y));
  std::uint32_t* ties = args.scratch.ties + work.index * args.scratch.segments;
  std::uint32_t count = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t token = work.token_of_segment(step);
    const bool equal = work.eligible(token) && order.key(token) == state.threshold;
    count += static_cast<std::uint32_t>(__popc(__ballot_sync(kFullWarp, equal)));
  }
  if (threadIdx.x % 32 == 0) ties[work.segment] = count;
  if (last_block(&state.ticket, work.count())) (void)work.scan_segments(ties);
}

// Writes the masks of a segment's eligible tokens, and how many are not 0; the last block of a KV
// head turns these counts into offsets and writes the size of the selection.
__device__ void write_masks(const GenericArgs& args, const TileWork& work,
                            const std::uint16_t (&masks)[kSteps]) {
  std::uint16_t* token_mask = args.row(args.workspace.token_mask, work.list);
  std::uint32_t* chosen = args.scratch.chosen + work.list * args.scratch.segments;
  std::uint32_t count = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t token = work.token_of_segment(step);
    if (work.eligible(token)) token_mask[token] = masks[step];
    count += static_cast<std::uint32_t>(__popc(__ballot_sync(kFullWarp, masks[step] != 0)));
  }
  if (threadIdx.x % 32 == 0) chosen[work.segment] = count;
  if (!last_block(&args.scratch.states[work.index].ticket, work.count())) return;
  const std::int64_t total = work.scan_segments(chosen);
  if (threadIdx.x == 0) {
    const transfer::SelectionView& out = args.workspace.selection;
    out.counts[work.list] = static_cast<std::int32_t>(min(total, out.capacity));
  }
}

// Grid: tiles x KV heads x queries.
__global__ __launch_bounds__(kTileThreads) void mark_best(
    const __grid_constant__ GenericArgs args) {
  const TileWork work(args);
  if (!work.any()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const transfer::KvGeometry& kv = args.request.kv;
  const int sets = args.sets / kv.kv_heads;

  std::uint16_t masks[kSteps] = {};
  for (int s = 0; s < sets && work.plan.k > 0; ++s) {
    const int set_of_row = static_cast<int>(blockIdx.y) * sets + s;
    const std::int64_t set = std::int64_t{blockIdx.z} * kv.query_heads() + set_of_row;
    const SetState state = args.scratch.states[set];
    const SetOrder order(args, set_of_row);
    const bool all_ties = state.all_ties != 0;
    std::uint32_t rank =
        all_ties ? 0 : args.scratch.ties[set * args.scratch.segments + work.segment];
    const auto bits = static_cast<std::uint16_t>(sets == 1 ? (1U << kv.group) - 1 : 1U << s);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t token = work.token_of_segment(step);
      const bool eligible = work.eligible(token);
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
  write_masks(args, work, masks);
}

// As `mark_best`, of masks that are already in `token_mask`.
__global__ __launch_bounds__(kTileThreads) void count_marks(
    const __grid_constant__ GenericArgs args) {
  const TileWork work(args);
  if (!work.any()) return;
  const std::uint16_t* token_mask = args.row(args.workspace.token_mask, work.list);
  std::uint16_t masks[kSteps] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t token = work.token_of_segment(step);
    if (work.eligible(token)) masks[step] = token_mask[token];
  }
  write_masks(args, work, masks);
}

// Grid: tiles x KV heads x queries.
__global__ __launch_bounds__(kTileThreads) void clear_marks(
    const __grid_constant__ GenericArgs args, int bias_heads) {
  const TileWork work(args);
  std::uint16_t* token_mask = args.row(args.workspace.token_mask, work.list);
  const std::int64_t first_head = work.list * args.request.kv.group;
  work.visit_tokens([&](std::int64_t token) {
    token_mask[token] = 0;
    for (int h = 0; h < bias_heads; ++h) {
      args.row(args.workspace.scores, first_head + h)[token] = 0.0F;
    }
  });
}

// Biases take the place of scores. Grid: blocks of ids x heads of `ids` x queries.
__global__ __launch_bounds__(kTileThreads) void mark_ids(const __grid_constant__ GenericArgs args,
                                                         const __grid_constant__ IdTensor ids,
                                                         const __grid_constant__ IdFloats bias) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kTileThreads + threadIdx.x;
  if (i >= ids.n) return;
  const TileWork work(args);
  const transfer::KvGeometry& kv = args.request.kv;
  const int head = static_cast<int>(blockIdx.y);
  const std::int32_t id = ids.data[blockIdx.z * ids.query_stride + head * ids.head_stride + i];
  if (!work.eligible(id)) return;
  const int group = kv.group;
  const bool shared = ids.heads <= kv.kv_heads;
  const unsigned bits = shared ? (1U << group) - 1 : 1U << head % group;
  const float given =
      bias.data == nullptr
          ? 0.0F
          : fmaxf(bias.data[blockIdx.z * bias.query_stride + head * bias.head_stride + i], 0.0F);
  // The masks of tokens 2 i and 2 i + 1 of the whole array are one word; atomics have no 16-bit
  // form.
  auto* words = reinterpret_cast<unsigned*>(args.workspace.token_mask);
  const int first = shared ? head : head / group;
  const int last = ids.heads == 1 ? kv.kv_heads - 1 : first;  // one head is for all KV heads
  for (int kv_head = first; kv_head <= last; ++kv_head) {
    const std::int64_t index =
        (std::int64_t{blockIdx.z} * kv.kv_heads + kv_head) * args.workspace.limits.max_tokens + id;
    atomicOr(&words[index / 2], bits << (index % 2 * 16));
    if (bias.data == nullptr) continue;
    const int slot = shared ? kv_head * group : head;
    float* to =
        args.row(args.workspace.scores, std::int64_t{blockIdx.z} * kv.query_heads() + slot) + id;
    // Numbers that are not negative order as their bits do.
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(given));
  }
}

// What is added to the logits of a token that is selected, for the head of the group that has its
// own bias, or all.
__device__ float bias_of(const GenericArgs& args, BiasSource source, int head, std::int64_t token) {
  const transfer::KvGeometry& kv = args.request.kv;
  const std::int64_t first = std::int64_t{blockIdx.z} * kv.query_heads();
  if (source == BiasSource::kGiven) {
    return args.row(args.workspace.scores, first + blockIdx.y * kv.group + head)[token];
  }
  const int set = static_cast<int>(blockIdx.y) * (args.sets / kv.kv_heads) + head;
  return priority_bias(args.scratch.states[first + set].cut, SetOrder(args, set).score(token));
}

// Grid: tiles x KV heads x queries.
__global__ __launch_bounds__(kTileThreads) void compact(const __grid_constant__ GenericArgs args,
                                                        BiasSource biases) {
  const TileWork work(args);
  if (!work.any()) return;
  const transfer::SelectionView& out = args.workspace.selection;
  const std::uint16_t* token_mask = args.row(args.workspace.token_mask, work.list);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t offset = args.scratch.chosen[work.list * args.scratch.segments + work.segment];
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t token = work.token_of_segment(step);
    const std::uint16_t mask = work.eligible(token) ? token_mask[token] : std::uint16_t{0};
    const unsigned marked = __ballot_sync(kFullWarp, mask != 0);
    const std::int64_t position = offset + __popc(marked & ((1U << lane) - 1));
    if (mask != 0 && position < out.capacity) {
      const std::int64_t entry = work.list * out.capacity + position;
      out.ids[entry] = static_cast<std::int32_t>(token);
      out.head_mask[entry] = mask;
      float* bias = out.bias + entry * out.bias_heads;
      for (int h = 0; h < out.bias_heads && biases != BiasSource::kNone; ++h) {
        bias[h] = ((mask >> h) & 1) != 0 ? bias_of(args, biases, h, token) : 0.0F;
      }
    }
    offset += __popc(marked);
  }
}

template <bool kByMass>
void enqueue_radix(const Stage& stage, const GenericArgs& args) {
  const dim3 grid = tile_grid(stage, args.sets);
  launch(stage, radix_pass<21, 2048, kByMass>, grid, args);
  launch(stage, radix_pass<10, 2048, kByMass>, grid, args);
  launch(stage, radix_pass<0, 1024, kByMass>, grid, args);
}

}  // namespace

void enqueue_top_k(const Stage& stage) { enqueue_radix<false>(stage, generic_args(stage)); }

void enqueue_top_of_recall(const Stage& stage, const RecallParams& recall_params) {
  const auto bins = std::int64_t{stage.num_queries()} * stage.request.kv.query_heads() * kRadixBins;
  KVTIER_CUDA_CHECK(cudaMemsetAsync(stage.scratch.masses, 0,
                                    static_cast<std::size_t>(bins) * sizeof(std::uint64_t),
                                    stage.stream));
  enqueue_radix<true>(stage, generic_args(stage, recall_params));
}

void enqueue_priorities(const Stage& stage, bool counted) {
  const GenericArgs args = generic_args(stage);
  const dim3 queries(static_cast<unsigned>(stage.num_queries()));
  launch(stage, begin_priorities, queries, args, counted);
  enqueue_radix<false>(stage, args);
  launch(stage, cut_priorities, queries, args);
}

void enqueue_marks(const Stage& stage) {
  const GenericArgs args = generic_args(stage);
  launch(stage, count_ties, tile_grid(stage, args.sets), args);
  launch(stage, mark_best, tile_grid(stage, args.request.kv.kv_heads), args);
}

void enqueue_adopt(const Stage& stage, const IdTensor& ids, const IdFloats& bias) {
  const GenericArgs args = generic_args(stage);
  const dim3 lists_grid = tile_grid(stage, args.request.kv.kv_heads);
  const int bias_heads = bias.data != nullptr ? stage.workspace.selection.bias_heads : 0;
  launch(stage, clear_marks, lists_grid, args, bias_heads);
  if (ids.n > 0) {
    dim3 ids_grid = tile_grid(stage, ids.heads);
    ids_grid.x = static_cast<unsigned>((ids.n + kTileThreads - 1) / kTileThreads);
    launch(stage, mark_ids, ids_grid, args, ids, bias);
  }
  launch(stage, count_marks, lists_grid, args);
}

void enqueue_compact(const Stage& stage, BiasSource biases) {
  launch(stage, compact, tile_grid(stage, stage.request.kv.kv_heads), generic_args(stage), biases);
}

}  // namespace kvtier::scoring::cuda
