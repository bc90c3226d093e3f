#include "scoring/fused/attention_cuda.cuh"
#include "scoring/fused/choice_cuda.cuh"
#include "scoring/fused/launch_cuda.cuh"
#include "scoring/fused/static_cuda.cuh"
#include "scoring/stream/collisions_cuda.cuh"
#include "scoring/stream/recall_cuda.cuh"
#include "scoring/stream/stream_cuda.h"
#include "scoring/two_phase.h"
#include "transfer/device/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

struct ChoiceShape {
  unsigned blocks;     ///< Per (query, KV head).
  ScoreParams second;  ///< Of the second of two phases.
};

/// Adds the masses of the always-attended tokens to base-2 logarithms of sums, of each head; each
/// times its value norm, if `weighted`, as the weighting says. All threads; begins and ends with a
/// barrier. `memory`: room for the group's queries.
__device__ void add_static(const FilterArgs& args, const FusedWork& work,
                           const BlockExchange& peers, bool weighted, float* memory,
                           StreamQueries& queries, float* log_sums) {
  const transfer::KvGeometry& kv = args.request.kv;
  const int group = kv.group;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float* const from =
      args.request.queries + work.group_index * group * std::int64_t{kv.head_dim};
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < group * kv.head_dim; i += kFusedThreads) {
    memory[i] = from[i];
  }
  __syncthreads();  // the queries are there
  const FusedSum own = static_sum(args.request, work.query_index, work.kv_head, weighted,
                                  peers.rank, peers.blocks, memory, kv.head_dim);
  if (lane < kMaxGroup) queries.warp_sums[warp][lane] = {own.most, own.sum};
  __syncthreads();  // the sums of all warps are there
  if (warp < group) {
    FusedSum total = sum_of_group(sum_of_block(queries, warp), peers, warp);
    if (log_sums[warp] > -INFINITY) total.add(log_sums[warp], 1.0F);
    if (lane == 0) log_sums[warp] = total.sum > 0.0F ? normaliser(total) : -INFINITY;
  }
  __syncthreads();
}

/// Least and largest of what approximate keys exceed the exact ones by, base 2.
struct KeyError {
  float least;
  float most;
};

/// The blocks of the pass that have parts of a group, first to last.
struct StreamParts {
  std::int64_t index;  ///< That of part 0: parts are numbered by the blocks.
  int first;
  int last;

  __device__ StreamParts(const FilterArgs& args, std::int64_t group_index)
      : index(args.place_of(group_index)),
        first(__ldcg(&args.filter.stream_groups[group_index].first_block)),
        last(__ldcg(&args.filter.stream_groups[group_index].last_block)) {}
};

/// A thread's share of the counts by bins of approximate keys; kByScore: of those of the scores.
template <bool kByScore>
__device__ uint4 sum_counts(const FilterArgs& args, const StreamParts& parts) {
  constexpr int kVectors = kFusedBins / 4;
  const auto thread = static_cast<int>(threadIdx.x);
  uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll 8
  for (int block = parts.first + thread / kVectors; block <= parts.last;
       block += kFusedThreads / kVectors) {
    const std::uint32_t* counts =
        args.filter.stream_counts + ((parts.index + block) * 2 + (kByScore ? 1 : 0)) * kFusedBins;
    const uint4 part = __ldcg(reinterpret_cast<const uint4*>(counts) + thread % kVectors);
    sum = make_uint4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
  }
  return sum;
}

/// Adds all shares to `shared.bins`, which are clear. A barrier must follow.
__device__ void add_counts(const uint4& sum, FusedShared& shared) {
  std::uint32_t* const bins = shared.bins + threadIdx.x % (kFusedBins / 4) * 4;
  atomicAdd(bins, sum.x);
  atomicAdd(bins + 1, sum.y);
  atomicAdd(bins + 2, sum.z);
  atomicAdd(bins + 3, sum.w);
}

/// Adds up the parts of the normalisers: fills `shared.references`, for heads past the group with
/// infinity. `counts`: counts approximate keys in `shared.bins`, too, which are clear. All threads;
/// ends with a barrier.
__device__ void add_parts(const FilterArgs& args, const StreamParts& parts, bool counts,
                          FusedShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32;
  static_assert(kFusedWarps >= kMaxGroup);
  const auto part_of = [&](int block) {
    return __ldcg(args.filter.stream_sums + (parts.index + block) * kMaxGroup + head);
  };
  const bool summed = head < args.request.kv.group;
  // Reads of both are under way together.
  float2 part{kLowestValue, 0.0F};
  if (summed && parts.first + lane <= parts.last) part = part_of(parts.first + lane);
  uint4 sum{};
  if (counts) sum = sum_counts<false>(args, parts);
  if (summed) {
    FusedSum total;
    total.add(part.x, part.y);
    for (int block = parts.first + lane + 32; block <= parts.last; block += 32) {
      part = part_of(block);
      total.add(part.x, part.y);
    }
    total = sum_lanes(total);
    if (lane == 0) shared.references[head] = normaliser(total);
  } else if (head < kMaxGroup && lane == 0) {
    shared.references[head] = INFINITY;
  }
  if (counts) add_counts(sum, shared);
  __syncthreads();
}

__device__ KeyError key_error(int group, const StreamQueries& queries, const FusedShared& shared) {
  KeyError error{INFINITY, -INFINITY};
  for (int head = 0; head < group; ++head) {
    // Keys are logarithms of shares, from which a larger reference subtracts.
    const float off = shared.references[head] - queries.references[head];
    error.least = fminf(error.least, off);
    error.most = fmaxf(error.most, off);
  }
  return error;
}

/// The same of soft collisions; fills the least shares of the heads in `shared.factors`, too.
__device__ void add_value_parts(const FilterArgs& args, const StreamParts& parts, bool counts,
                                FusedShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32;
  uint4 bins{};
  if (counts) bins = sum_counts<false>(args, parts);
  if (head < args.request.kv.group) {
    float total = 0.0F;
    float share = 1.0F;
    for (int block = parts.first + lane; block <= parts.last; block += 32) {
      const float2 part =
          __ldcg(args.filter.stream_sums + (parts.index + block) * kMaxGroup + head);
      share = fminf(share, part.x);
      total += part.y;
    }
    total = warp_sum(total);
    const unsigned least = __reduce_min_sync(kFullWarp, __float_as_uint(share));
    if (lane == 0) {
      shared.references[head] = total > 0.0F ? __log2f(total) : 0.0F;
      shared.factors[head] = __uint_as_float(least);
    }
  }
  if (counts) add_counts(bins, shared);
  __syncthreads();
}

/// The exact combined value over the one with references is a mean of what their heads' factors are
/// off by, weighted by the heads' shares. These are no less than the least ones; what is left of 1
/// may be of any head.
__device__ KeyError value_error(int group, const StreamQueries& queries,
                                const FusedShared& shared) {
  constexpr float kRounded = 1.0F - 1e-5F;
  float sum = 0.0F;
  float rest = 1.0F;
  float least = INFINITY;
  float most = 0.0F;
  for (int head = 0; head < group; ++head) {
    const float off = exp2f(queries.references[head] - shared.references[head]);
    const float share = shared.factors[head] * kRounded;
    sum = fmaf(share, off, sum);
    rest -= share;
    least = fminf(least, off);
    most = fmaxf(most, off);
  }
  rest = fmaxf(rest, 0.0F);
  return {.least = -__log2f(fmaf(rest, most, sum)), .most = -__log2f(fmaf(rest, least, sum))};
}

/// Shares, base 2, whose exact keys are those of floats.
constexpr float kLeastLogOfShare = -99.0F;
/// Steps that the rounding of an approximate key takes at most.
constexpr float kRounding = 2.0F;

/// The least approximate key of a token whose exact key, base 2, may be `exact` or more.
/// `rounding`: steps that the approximate key may be lower by.
template <typename Keys>
__device__ int least_approximate(float exact, const KeyError& error, float rounding) {
  const float bound = exact + error.least;
  if (!(bound >= kLeastLogSum) || !(error.most < kMostLogShare)) return 1;
  const float steps = floorf((bound + Keys::kOffset) * Keys::kSteps) - rounding;
  return static_cast<int>(fminf(fmaxf(steps, 1.0F), 65535.0F));
}

/// The least approximate key of tokens that may be among the `wanted` best, by the counts in
/// `shared.bins`, which are clear afterwards. `rounding`: as of `least_approximate`. All threads;
/// begins after a barrier and ends with one.
template <typename Keys>
__device__ int least_of_best(std::uint32_t wanted, const KeyError& error, float rounding,
                             FusedShared& shared) {
  const int bin = kFusedBins - 1 - static_cast<int>(threadIdx.x);  // the best first
  if (threadIdx.x == 0) shared.bin = 0;
  const std::uint32_t count = shared.bins[bin];
  std::uint32_t total = 0;
  const std::uint32_t before = block_exclusive_sum(count, &total);
  shared.bins[bin] = 0;
  if (before < wanted && before + count >= wanted) shared.bin = bin;
  __syncthreads();  // the bin of the last one is known
  if (shared.bin == 0) return 1;
  // As many tokens have approximate keys of at least this one, so exact keys of at least that.
  const float least = static_cast<float>(Keys::least_of(shared.bin)) / Keys::kSteps - Keys::kOffset;
  return least_approximate<Keys>(least - error.most, error, rounding);
}

/// The exact keys among which the last of the `wanted` best is, after `least_of_best` of shares, if
/// they are known.
template <typename Keys>
__device__ FusedWindow window_of_best(const KeyError& error, const FusedShared& shared) {
  constexpr float kOfStep = 1.0F / Keys::kSteps;
  constexpr float kRoundedLogs = 1e-4F;
  const float low = (static_cast<float>(Keys::least_of(shared.bin)) - kRounding) * kOfStep -
                    Keys::kOffset - error.most - kRoundedLogs;
  const float high = (static_cast<float>(Keys::least_of(shared.bin + 1)) + kRounding) * kOfStep -
                     Keys::kOffset - error.least + kRoundedLogs;
  FusedWindow window;
  const bool known = shared.bin > 0 && shared.bin < kFusedBins - 1 && error.most < kMostLogShare &&
                     low > kLeastLogOfShare && high < kMostLogShare;
  if (!known) return window;
  window.set(__float_as_uint(exp2f(low)) | 0x80000000U, __float_as_uint(exp2f(high)) | 0x80000000U);
  return window;
}

/// The least approximate key of tokens that are among the `wanted` best for certain, after
/// `least_of_best`: fewer tokens have approximate keys above the bin which that has found, so one
/// of the best has a key below its end.
constexpr int kNeverCertain = 1 << 16;
template <typename Keys>
__device__ int least_certain(const KeyError& error, const FusedShared& shared) {
  if (shared.bin == kFusedBins - 1 || !(error.most < kMostLogShare)) return kNeverCertain;
  const float steps = ceilf((error.most - error.least) * Keys::kSteps) + kRounding;
  return Keys::least_of(shared.bin + 1) + static_cast<int>(fminf(steps, 65536.0F));
}

/// Writes the listed tokens with keys above `found_cut.cut`. `params`: of the selection. `biases`:
/// of an earlier phase for each listed token, or null. All threads; begins with a barrier.
__device__ void write_listed(const FilterArgs& args, const ScoreParams& params,
                             const FusedWork& work, const BlockExchange& peers,
                             const FusedCut& found_cut, const Candidates& found,
                             const float* biases, TaggedWord* posted, FusedShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int each = (found.padded() / kFusedTile + kFusedWarps - 1) / kFusedWarps * kFusedTile;
  const int begin = min(warp * each, found.padded());
  const int end = min(begin + each, found.padded());
  const std::uint32_t* const keys = found.keys + FusedScores::entry_of(static_cast<unsigned>(lane));
  __syncthreads();  // the keys are final
  unsigned mine = 0;
#pragma unroll 4
  for (int base = begin; base < end; base += kFusedTile) mine += keys[base] > found_cut.cut ? 1 : 0;
  mine = __reduce_add_sync(kFullWarp, mine);
  if (lane == 0) shared.warp_counts[warp] = mine;
  __syncthreads();  // the counts of all warps are there
  std::int64_t at = std::int64_t{shared.chosen_before} + found_cut.before +
                    __reduce_add_sync(kFullWarp, lane < warp ? shared.warp_counts[lane] : 0);
  const ChosenTokens chosen(args, params, work, peers, posted, shared.cut);
#pragma unroll 2
  for (int base = begin; base < end; base += kFusedTile) {
    const std::uint32_t key = keys[base];
    const unsigned votes = __ballot_sync(kFullWarp, key > found_cut.cut);
    if (key > found_cut.cut) {
      chosen.write(at + __popc(votes & ((1U << lane) - 1)), found.tokens[base + lane], key,
                   biases != nullptr ? biases[base + lane] : 0.0F);
    }
    at += __popc(votes);
  }
}

/// Finds the best of the listed tokens, as `find_best`. `window`: where the last of them may be
/// expected, unless `window.unknown()`.
template <typename Keys>
__device__ FusedCut find_listed(const FilterArgs& args, const FusedWork& work,
                                const FusedWindow& window, const BlockExchange& peers, int& round,
                                const Candidates& found, ChoiceMemory& memory,
                                FusedShared& shared) {
  // Of more tokens for each square of the blocks the window has too many: rows that more blocks
  // share are longer and have more references, and so a narrower window.
  constexpr std::int64_t kMostOfSquare = 32;
  FusedWork listed = work;
  listed.count = found.padded();
  FusedCut cut;
  if (!window.unknown() && work.plan.k <= kMostOfSquare * peers.blocks * peers.blocks &&
      find_in_window<typename Keys::ExactBins>(args, listed, window, peers, round, found.keys,
                                               memory.exchange, cut, shared)) {
    return cut;
  }
  return find_best<typename Keys::ExactBins>(args, listed, peers, round, found.keys,
                                             memory.exchange, shared);
}

/// Finds how many of the best tokens reach a recall target, and what the missed mass is made from.
/// Advances `round`. All threads; ends with a barrier.
template <typename Kernel>
__device__ std::uint32_t find_count(const FilterArgs& args, const FusedWork& work,
                                    const StreamParts& parts, const KeyError& error,
                                    const BlockExchange& peers, int& round, ChoiceMemory& memory,
                                    StreamQueries& queries, RecallShared& recall,
                                    FusedShared& shared) {
  const int group = args.request.kv.group;
  const std::int64_t eligible = work.plan.end - work.plan.begin;
  if (threadIdx.x < kFusedHeads) recall.statics[threadIdx.x] = -INFINITY;
  add_static(args, work, peers, false, reinterpret_cast<float*>(&memory), queries, recall.statics);
  weigh_heads(args, work, peers.rank, queries, recall);
  auto count = static_cast<std::uint32_t>(work.plan.k);
  if (args.recall.missed > 0.0 && count > 0) {
    if (threadIdx.x == 0) {
      float shares = 0.0F;
      for (int head = 0; head < group; ++head) shares += recall.shares[head];
      recall.all = __float2ull_rn(shares / static_cast<float>(group) * kMassUnits);
    }
    int least = 1;
    if (work.plan.k < eligible) {
      add_counts(sum_counts<true>(args, parts), shared);
      __syncthreads();  // the counts of all blocks of the pass are there
      least = least_of_best<ShareKeys>(count, error, kRounding + 1.0F, shared);
    }
    const ApproximateKeys approximate(args, work);
    const Candidates found = list_candidates<true>(args, work, approximate, least, memory, shared);
    std::uint32_t* const masses =
        args.filter.masses + work.group_index * args.max_tokens + work.first_token;
    (void)write_exact_keys<ExactKeys::kMasses, Kernel>(args, args.request.params, work, found, 1,
                                                       queries, &recall, masses, memory, shared);
    __syncthreads();  // keys and masses are there
    count = count_by_mass(args, work, peers, found, masses, round, memory.exchange, recall, shared);
  }
  if (count >= eligible && peers.rank == 0 && static_cast<int>(threadIdx.x) < group) {
    args.estimates[work.group_index * group + threadIdx.x].total = 0;  // nothing is missed
  }
  return count;
}

/// Counts the tokens that are scored or, in two phases, what these read of the sketches, of all
/// queries of a launch: each addition for the host crosses the link. A whole warp.
template <bool kTwice>
__device__ void count_all(const FilterArgs& args) {
  const SelectRequest& request = args.request;
  if (request.flags == nullptr) return;
  const hashing::SketchGeometry first{.kv_heads = request.kv.kv_heads,
                                      .num_planes = request.params.num_planes()};
  std::int64_t sum = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 32; i < args.part.count; i += 32) {
    const QueryPlan plan = plan_of_query(args, request.params, args.part.first + i, true);
    if (plan.end <= plan.begin) continue;
    const std::int64_t eligible = plan.end - plan.begin;
    sum +=
        kTwice ? eligible * first.token_bytes() + plan.k * request.sketch.token_bytes() : eligible;
  }
  sum = warp_sum(sum) * request.kv.kv_heads;
  if (threadIdx.x % 32 != 0 || sum == 0) return;
  transfer::cuda::raise(kTwice ? &request.flags->sketch_bytes : &request.flags->tokens_scored,
                        static_cast<unsigned long long>(sum));
}

/// The second of two phases, after `first` has been found: chooses among its tokens by the whole
/// code. Advances `round`. `biases` receives those of the first phase, at the places of `found`.
template <typename Kernel>
__device__ FusedCut choose_again(const FilterArgs& args, const ScoreParams& second, FusedWork& work,
                                 const BlockExchange& peers, const Candidates& found,
                                 const FusedCut& first, int& round, float* biases,
                                 ChoiceMemory& memory, StreamQueries& queries,
                                 FusedShared& shared) {
  using Whole = StreamKernel<Kernel::kQuads, 0, kFusedMostBits>;
  const ScoreParams& params = args.request.params;
  const FusedPriorities priorities(params, work.kv_head);
  __syncthreads();  // the keys are final
  for (int i = static_cast<int>(threadIdx.x); i < found.count; i += kFusedThreads) {
    const std::uint32_t key = found.keys[FusedScores::entry_of(static_cast<unsigned>(i))];
    biases[i] = key > first.cut ? priorities.bias(key, found.tokens[i], shared.cut) : -1.0F;
  }
  args.filter.stream_groups[work.group_index].load_whole<Kernel::kBits>(params, second,
                                                                        Kernel::kQuads, queries);
  shared.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.chosen_before = 0;
  __syncthreads();  // columns, biases and clear bins are there
  (void)write_exact_keys<ExactKeys::kSecond, Whole>(args, second, work, found, 1, queries, nullptr,
                                                    reinterpret_cast<std::uint32_t*>(biases),
                                                    memory, shared);
  // What is chosen from are the tokens of the first phase.
  const std::int64_t candidates = work.plan.k;
  work.plan = plan_of_query(args, second, work.query_index);
  work.plan.end = work.plan.begin + candidates;
  work.plan.k = min(work.plan.k, candidates);
  return find_listed<typename Kernel::Keys>(args, work, {}, peers, round, found, memory, shared);
}

/// Chooses for a (query, KV head) of which something is eligible. Returns how many tokens are
/// chosen. kTwice: in two phases, of which `args` has the first.
template <bool kRecall, bool kTwice, typename Kernel>
__device__ int choose(const FilterArgs& args, FusedWork& work, const StreamParts& parts,
                      const BlockExchange& peers, TaggedWord* posted, ChoiceMemory& memory,
                      StreamQueries& queries, [[maybe_unused]] RecallShared* recall,
                      [[maybe_unused]] const ScoreParams& second, FusedShared& shared) {
  using Keys = typename Kernel::Keys;
  const ScoreParams& params = args.request.params;
  const int group = args.request.kv.group;
  const bool prioritised = params.rule == SelectionRule::kPriority;
  const bool bounded = !kRecall && !kTwice && prioritised && params.threshold > 0.0F;
  const std::int64_t eligible = work.plan.end - work.plan.begin;
  const bool counts = !kRecall && !bounded && work.plan.k < eligible;
  prefetch_blocks(work);
  const ApproximateKeys approximate(args, work);
  add_parts(args, parts, counts, shared);
  if (bounded) {
    add_static(args, work, peers, true, reinterpret_cast<float*>(&memory), queries,
               shared.references);
  }
  const KeyError error = key_error(group, queries, shared);
  int rounds = 0;
  if constexpr (kRecall) {
    work.plan.k = find_count<Kernel>(args, work, parts, error, peers, rounds, memory, queries,
                                     *recall, shared);
    if (work.plan.k < eligible) {
      add_counts(sum_counts<false>(args, parts), shared);
      __syncthreads();  // the counts of all blocks of the pass are there
    }
  }
  int least = 1;
  FusedWindow window;
  std::uint32_t least_key = 1;
  if (bounded) {
    const float least_sum = params.threshold * static_cast<float>(group);
    least = least_approximate<Keys>(log2_norm(least_sum), error, kRounding);
    least_key = least_key_of(params, group);
  } else if (work.plan.k < eligible) {
    const auto wanted = static_cast<std::uint32_t>(work.plan.k + (prioritised ? 1 : 0));
    least = least_of_best<Keys>(wanted, error, kRounding, shared);
    window = window_of_best<Keys>(error, shared);
  }
  const Candidates found = list_candidates<false>(args, work, approximate, least, memory, shared);
  const unsigned counted = write_exact_keys<ExactKeys::kOrder, Kernel>(
      args, params, work, found, least_key, queries, nullptr, nullptr, memory, shared);
  auto chosen = static_cast<std::uint32_t>(work.plan.k);
  FusedCut cut;
  float* biases = nullptr;
  if (bounded) {
    FusedWork listed = work;
    listed.count = found.padded();
    chosen = choose_bounded<typename Keys::ExactBins>(
        args, listed, peers, least_key, counted, rounds, found.keys, memory.exchange, cut, shared);
  } else {
    cut = find_listed<Keys>(args, work, window, peers, rounds, found, memory, shared);
  }
  if constexpr (kTwice) {
    biases = reinterpret_cast<float*>(args.filter.masses) + work.group_index * args.max_tokens +
             work.first_token;
    cut = choose_again<Kernel>(args, second, work, peers, found, cut, rounds, biases, memory,
                               queries, shared);
    chosen = static_cast<std::uint32_t>(work.plan.k);
  }
  write_listed(args, kTwice ? second : params, work, peers, cut, found, biases, posted, shared);
  if (peers.rank == 0 && threadIdx.x == 0) {
    args.selection.counts[work.group_index] = static_cast<std::int32_t>(chosen);
  }
  return static_cast<int>(chosen);
}

/// The same of soft collisions.
template <int kHeads>
__device__ int choose_values(const FilterArgs& args, const FusedWork& work,
                             const StreamParts& parts, const BlockExchange& peers,
                             TaggedWord* posted, ChoiceMemory& memory, const StreamQueries& queries,
                             FusedShared& shared) {
  const bool chooses = work.plan.k < work.plan.end - work.plan.begin;
  auto* const pairs = reinterpret_cast<std::uint32_t*>(memory.norms);
  prefetch_blocks(work);
  const ApproximateKeys approximate(args, work);
  load_pairs<kHeads>(args, work.group_index, pairs);
  add_value_parts(args, parts, chooses, shared);
  const KeyError error = value_error(args.request.kv.group, queries, shared);
  int least = 1;
  int certain = kNeverCertain;
  if (chooses) {
    least = least_of_best<CollisionKeys>(static_cast<std::uint32_t>(work.plan.k), error, kRounding,
                                         shared);
    certain = least_certain<CollisionKeys>(error, shared);
  }
  const Candidates found = list_candidates<false>(args, work, approximate, least, memory, shared);
  write_exact_keys<kHeads>(args, work, found, certain, pairs, shared);
  int round = 0;
  const FusedCut cut =
      find_listed<CollisionKeys>(args, work, {}, peers, round, found, memory, shared);
  write_listed(args, args.request.params, work, peers, cut, found, nullptr, posted, shared);
  if (peers.rank == 0 && threadIdx.x == 0) {
    args.selection.counts[work.group_index] = static_cast<std::int32_t>(work.plan.k);
  }
  return static_cast<int>(work.plan.k);
}

// `shape.blocks` blocks per (query, KV head), a group, have runs of neighbouring units. The blocks
// exchange counts by bins of exact keys and the keys of the last bin, or where they choose few, the
// keys of a window at once; each waits for all the others' part before it posts the next. Then they
// attend, if that is wanted. Dynamic shared memory: `ChoiceMemory`, in the place of which attention
// works. kRecall: as many as a recall target says. kTwice: in two phases, of which `args` has the
// first. kCached: attention is through the row cache.
template <bool kRecall, bool kTwice, bool kCached, typename Kernel>
__global__ __launch_bounds__(kFusedThreads, 1) void choose_from_stream(
    const __grid_constant__ FilterArgs args, const __grid_constant__ FusedInput input,
    const __grid_constant__ FusedAttention attention, const __grid_constant__ ChoiceShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) FusedShared shared;
  __shared__ __align__(16) StreamQueries queries;
  __shared__ FusedRows rows;
  const int query_index = args.part.first + static_cast<int>(blockIdx.y);
  const int kv_head = small_quotient(static_cast<int>(blockIdx.x), static_cast<int>(shape.blocks));
  const unsigned rank = blockIdx.x - static_cast<unsigned>(kv_head) * shape.blocks;
  shared.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.chosen_before = 0;
  FusedWork work(args, query_index, kv_head, rank, shape.blocks, true);
  const std::int64_t place = args.place_of(work.group_index);
  // There are fewer boxes than places only where no group has two blocks, and none is used.
  const BlockExchange peers(args, min(place, std::int64_t{kFusedParts - 1}), rank, shape.blocks);
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();
  // Of a query of which nothing is eligible they are of no use.
  const StreamParts parts(args, work.group_index);
  if constexpr (Kernel::kCollisions) {
    args.filter.stream_groups[work.group_index].load_references(queries);
  } else {
    args.filter.stream_groups[work.group_index].load(queries);
  }
  if (rank == 0 && threadIdx.x == 0 && work.empty()) args.selection.counts[work.group_index] = 0;
  const bool counts = blockIdx.x == 0 && blockIdx.y == 0;  // for all of the launch
  if (counts && threadIdx.x / 32 == kFusedWarps - 1) count_all<kTwice>(args);
  const bool attends = attention.tiles > 0;
  if (attends) {
    if (threadIdx.x == 0) rows.fill(args, query_index, 0);
    prefetch_pages(args, query_index, work.plan.end);
    if constexpr (kCached) {
      OwnSets::prefetch_few(args, attention.cache, peers, query_index, kv_head);
    }
  }
  if (!work.empty()) {  // as all of the group
    TaggedWord* const posted = attends ? posted_ids(args, place, attention.id_stride) : nullptr;
    auto& memory = *reinterpret_cast<ChoiceMemory*>(dynamic);
    RecallShared* recall = nullptr;
    if constexpr (kRecall) {
      __shared__ RecallShared of_group;
      recall = &of_group;
    }
    int chosen = 0;
    if constexpr (Kernel::kCollisions) {
      chosen =
          choose_values<Kernel::kHeads>(args, work, parts, peers, posted, memory, queries, shared);
    } else {
      chosen = choose<kRecall, kTwice, Kernel>(args, work, parts, peers, posted, memory, queries,
                                               recall, shape.second, shared);
    }
    if (attends && threadIdx.x == 0) rows.count = rows.num_static + chosen;
  }
  if (attends) {
    attend_query<8, kCached>(args, input, attention, peers, rows, query_index, kv_head, place,
                             dynamic);
  }
  if (work.empty() && !attends) return;  // nothing was posted
  __syncthreads();                       // all have posted: this block has read from all
  if (attends || !peers.alone()) peers.next_epoch();
#endif
}

}  // namespace

bool stream_serves(const SelectShape& shape) {
  const ScoreParams& params = shape.params;
  if (params.coarse_bits > 0) {
    // Columns of the first phase are turned into those of the second by words.
    const ScoreParams first = coarse_phase(params);
    return params.query_bits == 4 && params.projections % 32 == 0 && one_set(shape) &&
           first.weight_bits() == 4 && sign_chunks(first) == 1 &&
           params.weight_bits() <= kFusedMostBits && sign_chunks(params) <= kFusedChunks;
  }
  if (params.estimator == Estimator::kSoftCollision) return stream_serves_collisions(shape);
  return params.estimator == Estimator::kNormAware && params.query_bits > 0 && one_set(shape) &&
         params.weight_bits() <= kFusedMostBits && sign_chunks(params) <= kFusedChunks &&
         static_readable(shape);
}

bool stream_serves_recall(const SelectShape& shape) {
  const ScoreParams& params = shape.params;
  return params.estimator == Estimator::kNormAware && params.query_bits > 0 && one_set(shape) &&
         params.threshold == 0.0F && params.weight_bits() <= kFusedMostBits &&
         sign_chunks(params) <= kFusedChunks && shape.group <= kFusedHeads &&
         (!shape.int8_rows || shape.fp16_sinks);
}

void plan_stream(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan) {
  constexpr std::int64_t kLeastTokens = 2048;
  const std::int64_t useful = (shape.max_length + kLeastTokens - 1) / kLeastTokens;
  const int groups = shape.kv_heads * shape.num_queries;
  const bool collides = shape.params.estimator == Estimator::kSoftCollision;
  plan.path = SelectionPath::kStream;
  plan.reads_queries = !collides;
  plan.blocks = static_cast<unsigned>(std::clamp<std::int64_t>(
      std::min<std::int64_t>(device.processors / groups, useful), 1, kChoiceBlocks));
  plan.bytes = collides ? choice_bytes_of_collisions(shape.group)
                        : static_cast<int>(sizeof(ChoiceMemory)) +
                              kFusedWarps * fused_unit_bytes(sign_chunks(shape.params));
}

void enqueue_stream_choice(cudaStream_t stream, const FilterArgs& args, const ScoreParams* second,
                           const SelectionPlan& plan) {
  const SelectRequest& request = args.request;
  int bytes = plan.bytes;
  const FusedInput input = fused_input(request);
  const FusedAttention attention = fused_attention(args, bytes);
  const auto plain = [](auto made) {
    return choose_from_stream<false, false, false, decltype(made)>;
  };
  const auto cached = [](auto made) {
    return choose_from_stream<false, false, true, decltype(made)>;
  };
  const auto of_recall = [](auto made) {
    return choose_from_stream<true, false, false, decltype(made)>;
  };
  const auto of_recall_cached = [](auto made) {
    return choose_from_stream<true, false, true, decltype(made)>;
  };
  const auto in_two = [](auto made) {
    return choose_from_stream<false, true, false, decltype(made)>;
  };
  const bool through_cache = request.cached != nullptr;
  const auto kernel = args.recall.active  ? through_cache
                                                ? visit_recall_shape(request, of_recall_cached)
                                                : visit_recall_shape(request, of_recall)
                       : second != nullptr ? visit_phase_shape(request, in_two)
                      : request.params.estimator == Estimator::kSoftCollision
                          ? visit_collision_shape(request, plain)
                      : through_cache ? visit_stream_shape(request, cached)
                                      : visit_stream_shape(request, plain);
  allow_shape(kernel);
  const dim3 grid(static_cast<unsigned>(request.kv.kv_heads) * plan.blocks,
                  static_cast<unsigned>(args.part.count));
  transfer::cuda::launch_overlapping(
      stream, kernel, grid, kFusedThreads, static_cast<std::size_t>(bytes), args, input, attention,
      ChoiceShape{.blocks = plan.blocks, .second = second != nullptr ? *second : ScoreParams{}});
}

void enqueue_stream(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan) {
  const ScoreParams& params = args.request.params;
  if (params.coarse_bits > 0) {
    FilterArgs first = args;
    first.request.params = coarse_phase(params);
    const ScoreParams second = fine_phase(params);
    enqueue_stream_pass(stream, first, stream_blocks());
    return enqueue_stream_choice(stream, first, &second, plan);
  }
  if (params.estimator == Estimator::kSoftCollision) {
    enqueue_collision_pass(stream, args);
  } else if (args.part.first == 0) {
    enqueue_stream_pass(stream, args, stream_blocks());
  } else {
    // A part of a batch runs beside the choice of the one before, on the SMs that this leaves.
    // Blocks that find none wait for it to end.
    FilterArgs pass = args;
    const int blocks = stream_blocks();
    if (args.part.first_place > 0) pass.first_block = blocks;
    const int chosen = plan.part_queries * args.request.kv.kv_heads * static_cast<int>(plan.blocks);
    enqueue_stream_pass(
        stream, pass, std::min(std::max(blocks - chosen, blocks / 2), kMostStreamBlocks - blocks));
  }
  enqueue_stream_choice(stream, args, nullptr, plan);
}

}  // namespace kvtier::scoring::cuda
