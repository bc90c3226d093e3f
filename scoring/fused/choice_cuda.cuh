#pragma once

#include "scoring/fused/chosen_cuda.cuh"

#include <cstdint>

/// The second half of a selection on chip: the k best of the group's tokens by their keys, which
/// order as the combined scores do. A round counts tokens by bins and finds the bin of the k-th
/// best; a few tokens of that bin are then compared one by one.
namespace kvtier::scoring::cuda {

/// Keys order as combined scores do, which are sums of the heads' shares or, for order, their
/// logarithms. A sum from kLeastSum on is its own key, the bits of the float with the sign bit set.
/// Lower sums have the keys of their logarithms, which are negative, so that the keys are less.
inline constexpr float kLeastSum = 0x1p-100F;
/// The first round counts sixteenths of octaves, from 2^-28 to 2^4, which no sum of at most 8 heads
/// exceeds; lower ones count in the first bin, and priorities that are higher in the last.
inline constexpr std::uint32_t kFusedKeyBase = 0x80000000U + ((127U - 28U) << 23);
inline constexpr std::uint32_t kFusedBinShift = 23 - 4;

/// The bins of a first round: kFusedBins of 2^kShift keys from kBase on. What is below counts in
/// the first; what is above, if `kOpen` says that it may be there, in the last.
struct ShareBins {
  static constexpr std::uint32_t kBase = kFusedKeyBase;
  static constexpr std::uint32_t kShift = kFusedBinShift;
  static constexpr bool kOpen = true;
};

template <typename Bins>
__device__ int first_bin_of(std::uint32_t key) {
  const std::uint32_t bin = (max(key, Bins::kBase) - Bins::kBase) >> Bins::kShift;
  return static_cast<int>(Bins::kOpen ? min(bin, kFusedBins - 1U) : bin);
}

__device__ inline float sum_of_row(const uint2& four, int row) {
  const std::uint32_t two = row < 2 ? four.x : four.y;
  return static_cast<float>(static_cast<std::int16_t>(row % 2 == 0 ? two & 0xFFFFU : two >> 16));
}

/// The key of a sum, or priority, with this base-2 logarithm, of which the sum is below kLeastSum.
__device__ inline std::uint32_t key_of_log(float log) {
  if (log >= -100.0F) return __float_as_uint(fmaxf(exp2f(log), kLeastSum)) | 0x80000000U;
  return max(ordered_key(log), 1U);
}

/// The key of a token with a sum below kLeastSum, which is divided by `uniform`. `sums`: of head 0
/// and the token's row of a tile.
template <int kQuads>
__device__ __noinline__ std::uint32_t low_key(const uint2* sums, int row, const FusedNorms& norm,
                                              float uniform, const FusedShared& shared) {
  const auto value_of = [&](int h) {
    const float sum = sum_of_row(sums[h / 4 * 32 + h % 4], row);
    return fmaf(shared.factors[h] * sum, norm.key, norm.log_value) - shared.references[h];
  };
  float most = kLowestValue;
  float sum = 0.0F;
#pragma unroll 1
  for (int h = 0; h < 4 * kQuads; ++h) most = fmaxf(most, value_of(h));
#pragma unroll 1
  for (int h = 0; h < 4 * kQuads; ++h) sum += exp2_fast(value_of(h) - most);
  return key_of_log(most + log2_norm(sum) - log2_norm(uniform));
}

/// The keys in question: low to high.
struct FusedWindow {
  std::uint32_t low = 0;
  std::uint32_t high = 0xFFFFFFFEU;  ///< No key is higher.
  std::uint32_t shift = 32;          ///< Of the bins of a later round; 32 in the first.

  [[nodiscard]] __device__ bool has(std::uint32_t key) const { return key - low <= high - low; }
  [[nodiscard]] __device__ bool unknown() const { return shift == 32; }
  /// Is the keys `from` to `to`.
  __device__ void set(std::uint32_t from, std::uint32_t to) {
    constexpr int kBinBits = 9;
    static_assert(kFusedBins == 1 << kBinBits);
    low = from;
    high = to;
    shift = static_cast<std::uint32_t>(max(0, 32 - kBinBits - __clz(static_cast<int>(high - low))));
  }
  /// Goes on with a bin of the last round.
  template <typename Bins>
  __device__ void narrow(int bin) {
    const bool first = unknown();
    const std::uint32_t width = first ? Bins::kShift : shift;
    const std::uint32_t from =
        (first ? Bins::kBase : low) + (static_cast<std::uint32_t>(bin) << width);
    const std::uint32_t last = from + ((1U << width) - 1);
    static_assert(kFusedBins == 32 << (23 - kFusedBinShift));
    const bool open = Bins::kOpen && first && bin == kFusedBins - 1;
    set(first && bin == 0 ? 1 : from, open ? high : min(high, last));
  }
};

/// The least key of a token that an error target selects: a priority of p / u, where p is the mean
/// of the heads' shares.
__device__ inline std::uint32_t least_key_of(const ScoreParams& params, int group) {
  const float least_sum = params.threshold * static_cast<float>(group);
  return __float_as_uint(fmaxf(least_sum, kLeastSum)) | 0x80000000U;
}

/// Turns scores into keys, 0 for tokens that are not eligible or, if kBounded, below `least_key`,
/// and counts the others in `shared.bins`. Returns how many of them the thread has. `keys` may be
/// the norms of `scores`. All threads.
template <int kQuads, bool kBounded>
__device__ unsigned write_keys(const ScoreParams& params, const FusedWork& work,
                               const FusedScores& scores, std::uint32_t least_key,
                               FusedShared& shared, std::uint32_t* keys) {
  constexpr int kHeads = 4 * kQuads;
  const FusedPriorities priorities(params, work.kv_head);
  const float weight = params.weighting == ValueWeighting::kLogit ? 1.0F : 0.0F;
  float factors[kHeads];
  float references[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    factors[h] = shared.factors[h];
    references[h] = shared.references[h];
  }
  unsigned counted = 0;
  // A thread takes the four tokens of a lane quad.
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < work.count / 4; quad += kFusedThreads) {
    const int tile = quad / 8;
    const int g = quad % 8;
    const uint4 packed = reinterpret_cast<const uint4*>(scores.norms)[quad];
    const std::uint32_t norms[4] = {packed.x, packed.y, packed.z, packed.w};
    const uint2* const sums = scores.sums + std::int64_t{tile} * kQuads * 32 + g * 4;
    uint2 four[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; h += 2) {
      const uint4 two = *reinterpret_cast<const uint4*>(sums + h / 4 * 32 + h % 4);
      four[h] = make_uint2(two.x, two.y);
      four[h + 1] = make_uint2(two.z, two.w);
    }
    std::uint32_t own[4];
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const FusedNorms norm = PackedNorms::unpack(norms[row], weight);
      float sum = 0.0F;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        sum += exp2_fast(fmaf(factors[h] * sum_of_row(four[h], row), norm.key, norm.log_value) -
                         references[h]);
      }
      const auto token = static_cast<unsigned>(tile * kFusedTile + row * 8 + g - work.begin);
      const bool eligible = token < static_cast<unsigned>(work.end - work.begin);
      own[row] = 0;
      if (!eligible) continue;
      float uniform = 1.0F;
      if (priorities.used) {
        uniform = priorities.uniform(work.first_token + tile * kFusedTile + row * 8 + g);
      }
      own[row] = __float_as_uint(__fdividef(sum, uniform)) | 0x80000000U;
      if (!(sum >= kLeastSum)) own[row] = low_key<kQuads>(sums, row, norm, uniform, shared);
      if (kBounded && own[row] < least_key) {
        own[row] = 0;
        continue;
      }
      ++counted;
      atomicAdd(&shared.bins[first_bin_of<ShareBins>(own[row])], 1U);
    }
    reinterpret_cast<uint4*>(keys)[quad] = make_uint4(own[0], own[1], own[2], own[3]);
  }
  return counted;
}

/// Tells all the block's counts, and finds the bin that has the `wanted`-th best token of the
/// group. The counts, `shared.bins`, are complete and are clear afterwards. All threads; begins
/// and ends with a barrier.
template <typename Exchange>
__device__ void find_bin(std::uint32_t wanted, int round, const BlockExchange& peers,
                         Exchange& exchange, FusedShared& shared) {
  auto& counts = peers.box.counts[round & 1];
  const std::uint32_t stage = kFirstRoundStage + static_cast<std::uint32_t>(round);
  const auto thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  constexpr bool kWide = sizeof(exchange.counts[0][0]) == 4;
  constexpr int kBinsOfVector = kWide ? 2 : 4;
  constexpr int kVectors = kFusedBins / kBinsOfVector;
  constexpr int kAtOnce = kFusedThreads / kVectors;
  constexpr int kMost = Exchange::kBlocks / kAtOnce;
  const int vector = thread % kVectors;
  const int first = thread / kVectors;
  uint2 of_blocks[kMost] = {};
  if (thread < kVectors) {
    if constexpr (kWide) {
      of_blocks[0] = reinterpret_cast<const uint2*>(shared.bins)[thread];
    } else {
      const uint4 four = reinterpret_cast<const uint4*>(shared.bins)[thread];
      of_blocks[0] = make_uint2(four.x | four.y << 16, four.z | four.w << 16);
    }
    if (!peers.alone()) {
      peers.post_pair(&counts[peers.rank][2 * thread], stage, of_blocks[0].x, of_blocks[0].y);
    }
  }
  const int present = (static_cast<int>(peers.blocks) - first + kAtOnce - 1) / kAtOnce;
  if (!peers.alone()) {
    peers.fetch<kMost>(&counts[first][2 * vector], kAtOnce * kFusedBins, present, stage, of_blocks);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i >= present) continue;
    reinterpret_cast<uint2*>(exchange.counts[first + i * kAtOnce])[vector] = of_blocks[i];
  }
  __syncthreads();                          // the counts of all blocks are there
  const int bin = kFusedBins - 1 - thread;  // the best first
  std::uint32_t count = 0;
  std::uint32_t most = 0;
  std::uint32_t earlier = 0;
#pragma unroll 8
  for (unsigned block = 0; block < peers.blocks; ++block) {
    const std::uint32_t of_block = exchange.counts[block][bin];
    count += of_block;
    most = max(most, of_block);
    if (block < peers.rank) earlier += of_block;
  }
  std::uint32_t total = 0;
  const std::uint32_t before = block_exclusive_sum(count, &total);
  shared.bins[thread] = 0;
  if (before < wanted && before + count >= wanted) {
    shared.bin = bin;
    shared.above = before;
    shared.count = count;
    shared.most = most;
    shared.before = earlier;
  }
  __syncthreads();
  const std::uint32_t better = __reduce_add_sync(kFullWarp, bin > shared.bin ? earlier : 0);
  if (thread % 32 == 0 && better > 0) atomicAdd(&shared.chosen_before, better);
}

/// Clears the keys of all tokens of the window but the first `take`, in token order.
__device__ inline void take_in_order(const FusedWindow& window, std::uint32_t take, int count,
                                     std::uint32_t* keys) {
  std::uint32_t seen = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += kFusedThreads) {
    const int token = base + static_cast<int>(threadIdx.x);
    const unsigned i = FusedScores::entry_of(static_cast<unsigned>(token));
    const bool tie = token < count && window.has(keys[i]);
    std::uint32_t total = 0;
    const std::uint32_t before = seen + block_exclusive_sum(tie ? 1 : 0, &total);
    seen += total;
    if (tie && before >= take) keys[i] = 0;
  }
}

/// Lists the block's keys of the window, as far as there is room: their number is
/// `shared.list_count`. Adds those above it to `shared.above`, if `kCounts`. All threads; begins
/// and ends with a barrier.
template <bool kCounts, typename Exchange>
__device__ void list_window(const FusedWindow& window, int count, const std::uint32_t* keys,
                            Exchange& exchange, FusedShared& shared) {
  if (threadIdx.x < kFusedList) shared.list[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.list_count = 0;
    if (kCounts) shared.above = 0;
    shared.finalists = 0;
    shared.better_before = 0;
    shared.ties_before = 0;
  }
  __syncthreads();
  [[maybe_unused]] unsigned above = 0;
#pragma unroll 1
  for (int four = static_cast<int>(threadIdx.x); four < count / 4; four += kFusedThreads) {
    const uint4 own = reinterpret_cast<const uint4*>(keys)[four];
    const std::uint32_t key[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kCounts) above += key[i] > window.high ? 1 : 0;
      if (!window.has(key[i])) continue;
      const std::uint32_t at = atomicAdd(&shared.list_count, 1U);
      if (kCounts && at >= Exchange::kList) continue;
      shared.list[at] = key[i];
      exchange.list_entries[at] = static_cast<unsigned>(four * 4 + i);
    }
  }
  if constexpr (kCounts) {
    above = __reduce_add_sync(kFullWarp, above);
    if (threadIdx.x % 32 == 0 && above > 0) atomicAdd(&shared.above, above);
  }
  __syncthreads();  // the list is complete
}

/// The keys that all blocks of the group have listed, a few of each thread.
template <typename Exchange>
class ListedKeys {
 public:
  /// Posts the first `most` keys of the block's list, or 0 past its end, by threads `from` on.
  __device__ static void post(int most, int from, std::uint32_t stage, const BlockExchange& peers,
                              const FusedShared& shared) {
    const int pair = static_cast<int>(threadIdx.x) - from;
    if (pair < 0 || 2 * pair >= most || peers.alone()) return;
    const uint2 keys = reinterpret_cast<const uint2*>(shared.list)[pair];
    peers.post_pair(&peers.box.lists[peers.rank][2 * pair], stage, keys.x, keys.y);
  }
  /// Waits for as many of each block, 1 to `Exchange::kList`. A thread has the same pair of several
  /// blocks.
  __device__ ListedKeys(int most, std::uint32_t stage, const BlockExchange& peers,
                        const FusedShared& shared) {
    const int pairs = (most + 1) / 2;
    first_ = small_quotient(static_cast<int>(threadIdx.x), pairs);
    const int at = static_cast<int>(threadIdx.x) - first_ * pairs;
    step_ = small_quotient(kFusedThreads, pairs);
    const int after = static_cast<int>(peers.blocks) - first_;
    const bool used = first_ < step_ && after > 0;
    count_ = used ? small_quotient(after + step_ - 1, step_) : 0;
    if (!peers.alone()) {
      peers.fetch<kPairs>(&peers.box.lists[first_][2 * at], step_ * kFusedList, count_, stage,
                          pairs_);
    } else if (used) {
      pairs_[0] = reinterpret_cast<const uint2*>(shared.list)[at];
    }
  }
  /// Calls `use` with each key of the thread, or 0 past the end of a list, and its block.
  template <typename Use>
  __device__ void for_each(const Use& use) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (i >= count_) break;
      const auto block = static_cast<unsigned>(first_ + i * step_);
      use(pairs_[i].x, block);
      use(pairs_[i].y, block);
    }
  }

 private:
  static constexpr int kPairs = Exchange::kBlocks * Exchange::kList / 2 / kFusedThreads;
  static_assert(kPairs > 0);

  uint2 pairs_[kPairs];
  int first_;
  int step_;
  int count_;
};

/// Takes the `take` best of the keys of the window, which are listed, ties by lowest token; or, if
/// `cuts`, all of these but the last, of which the key goes to `shared.cut`. Clears the others'
/// keys. Returns how many of earlier blocks are taken. `shared.bins` are clear.
template <typename Exchange>
__device__ std::uint32_t take_best(const FusedWindow& window, std::uint32_t take, bool cuts,
                                   const ListedKeys<Exchange>& listed, const BlockExchange& peers,
                                   std::uint32_t* keys, Exchange& exchange, FusedShared& shared) {
  const unsigned lane = threadIdx.x % 32;
  const auto bin_of = [&](std::uint32_t key) {
    return static_cast<int>((key - window.low) >> window.shift);
  };
  listed.for_each([&](std::uint32_t key, unsigned) {
    if (key != 0) atomicAdd(&shared.bins[bin_of(key)], 1U);
  });
  __syncthreads();  // the keys of all blocks are counted
  const int bin = kFusedBins - 1 - static_cast<int>(threadIdx.x);
  const std::uint32_t in_bin = shared.bins[bin];
  std::uint32_t total = 0;
  const std::uint32_t above = block_exclusive_sum(in_bin, &total);
  if (above < take && above + in_bin >= take) {
    shared.bin = bin;
    shared.above = above;
    shared.count = in_bin;
  }
  __syncthreads();  // the bin of the last one that is taken is known
  const int last_bin = shared.bin;
  listed.for_each([&](std::uint32_t key, unsigned) {
    if (key != 0 && bin_of(key) == last_bin) {
      exchange.finalists[atomicAdd(&shared.finalists, 1U)] = key;
    }
  });
  __syncthreads();  // its keys are there
  const std::uint32_t rest = take - shared.above;
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < shared.count; i += kFusedThreads) {
    const std::uint32_t key = exchange.finalists[i];
    std::uint32_t better = 0;
    std::uint32_t equal = 0;
#pragma unroll 1
    for (std::uint32_t j = 0; j < shared.count; ++j) {
      const std::uint32_t other = exchange.finalists[j];
      better += other > key ? 1 : 0;
      equal += other == key ? 1 : 0;
    }
    if (better < rest && better + equal >= rest) {
      shared.last = key;
      shared.tied = equal;
      shared.ties = rest - better - (cuts ? 1U : 0U);
      if (cuts) shared.cut = key;
    }
  }
  __syncthreads();  // the last key that is taken is known, and how many of its like
  const std::uint32_t last = shared.last;
  std::uint32_t better = 0;
  std::uint32_t equal = 0;
  listed.for_each([&](std::uint32_t key, unsigned block) {
    if (block >= peers.rank) return;
    better += key > last ? 1 : 0;
    equal += key == last ? 1 : 0;
  });
  better = __reduce_add_sync(kFullWarp, better);
  equal = __reduce_add_sync(kFullWarp, equal);
  if (lane == 0 && better + equal > 0) {
    atomicAdd(&shared.better_before, better);
    atomicAdd(&shared.ties_before, equal);
  }
  __syncthreads();  // those of earlier blocks are counted
  const std::uint32_t ties = shared.ties;
  const std::uint32_t ties_before = shared.ties_before;
  if (threadIdx.x < shared.list_count) {
    const std::uint32_t key = shared.list[threadIdx.x];
    const unsigned entry = exchange.list_entries[threadIdx.x];
    bool taken = key > last || (key == last && ties > 0);
    if (key == last && ties > 0 && ties < shared.tied) {
      const unsigned token = FusedScores::token_of(entry);
      std::uint32_t equal_before = ties_before;
#pragma unroll 1
      for (std::uint32_t i = 0; i < shared.list_count; ++i) {
        const bool earlier = FusedScores::token_of(exchange.list_entries[i]) < token;
        equal_before += shared.list[i] == key && earlier ? 1 : 0;
      }
      taken = equal_before < ties;
    }
    if (!taken) keys[entry] = 0;
  }
  return shared.better_before + min(ties_before, ties);
}

/// The bound of the chosen keys, as arguments of `write_chosen`.
struct FusedCut {
  std::uint32_t cut = 0;
  std::uint32_t before = 0;
};

/// Finds the `plan.k` best of the keys of the group's tokens, which are counted in `shared.bins`;
/// those that are not among them, but equal to some that are, become 0. All blocks. `round`: rounds
/// that `find_bin` has had; advances it.
template <typename Bins, typename Exchange>
__device__ FusedCut find_best(const FilterArgs& args, const FusedWork& work,
                              const BlockExchange& peers, int& round, std::uint32_t* keys,
                              Exchange& exchange, FusedShared& shared) {
  auto wanted = static_cast<std::uint32_t>(work.plan.k);
  // By priority one more is looked for: what the others are above.
  const bool cuts = args.request.params.rule == SelectionRule::kPriority &&
                    work.plan.k < work.plan.end - work.plan.begin;
  if (cuts) ++wanted;
  if (threadIdx.x == 0) shared.cut = 0;
  FusedWindow window;
  FusedCut found;
#pragma unroll 1
  for (;;) {
    const std::uint32_t stage = kFirstRoundStage + static_cast<std::uint32_t>(round);
    find_bin(wanted, round++, peers, exchange, shared);
    window.narrow<Bins>(shared.bin);
    wanted -= shared.above;
    found.cut = window.low - 1;
    if (wanted == shared.count && !cuts) {
      found.before = shared.before;
      return found;
    }
    if (shared.most <= Exchange::kList) {
      const auto most = static_cast<int>(shared.most);
      list_window<false>(window, work.count, keys, exchange, shared);
      ListedKeys<Exchange>::post(most, 0, stage, peers, shared);
      const ListedKeys<Exchange> listed(most, stage, peers, shared);
      found.before = take_best(window, wanted, cuts, listed, peers, keys, exchange, shared);
      return found;
    }
    if (window.low == window.high) {
      if (cuts) --wanted;
      if (cuts && threadIdx.x == 0) shared.cut = window.low;
      found.before = min(shared.before, wanted);
      take_in_order(window, wanted - found.before, work.count, keys);
      return found;
    }
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < work.count; i += kFusedThreads) {
      const std::uint32_t key = keys[i];
      if (window.has(key)) atomicAdd(&shared.bins[(key - window.low) >> window.shift], 1U);
    }
  }
}

/// The same where the last of the best is expected in a window of few keys: the blocks exchange
/// these and the numbers of better ones at once, in the place of counts by bins. Returns false
/// where it is not there or a block has more of them than it can list; then `shared.bins` have the
/// counts by bins again, and nothing else has changed.
template <typename Bins, typename Exchange>
__device__ bool find_in_window(const FilterArgs& args, const FusedWork& work,
                               const FusedWindow& window, const BlockExchange& peers, int& round,
                               std::uint32_t* keys, Exchange& exchange, FusedCut& found,
                               FusedShared& shared) {
  const bool cuts = args.request.params.rule == SelectionRule::kPriority &&
                    work.plan.k < work.plan.end - work.plan.begin;
  const std::uint32_t wanted = static_cast<std::uint32_t>(work.plan.k) + (cuts ? 1 : 0);
  const std::uint32_t stage = kFirstRoundStage + static_cast<std::uint32_t>(round);
  auto& counts = peers.box.counts[round++ & 1];
  __syncthreads();  // the keys are counted
  shared.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.cut = 0;
  list_window<true>(window, work.count, keys, exchange, shared);
  if (threadIdx.x < 32) {
    const unsigned lane = threadIdx.x;
    uint2 of_block[1] = {
        make_uint2(lane == 0 ? shared.above : 0, lane == 0 ? shared.list_count : 0)};
    if (!peers.alone()) {
      if (lane == 0) {
        peers.post_pair(&counts[peers.rank][0], stage, of_block[0].x, of_block[0].y);
      }
      const bool has = lane < peers.blocks;
      peers.fetch<1>(&counts[has ? lane : 0][0], 0, has ? 1 : 0, stage, of_block);
    }
    const unsigned above = __reduce_add_sync(kFullWarp, of_block[0].x);
    const unsigned listed = __reduce_add_sync(kFullWarp, of_block[0].y);
    const unsigned most = __reduce_max_sync(kFullWarp, of_block[0].y);
    const unsigned earlier = __reduce_add_sync(kFullWarp, lane < peers.rank ? of_block[0].x : 0);
    if (lane == 0) {
      shared.above = above;
      shared.count = listed;
      shared.most = most;
      shared.before = earlier;
    }
  } else {
    ListedKeys<Exchange>::post(Exchange::kList, 32, stage, peers, shared);
  }
  __syncthreads();  // the numbers of all blocks are there
  const std::uint32_t above = shared.above;
  const std::uint32_t most = shared.most;
  if (most > Exchange::kList || above >= wanted || above + shared.count < wanted) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < work.count; i += kFusedThreads) {
      if (keys[i] != 0) atomicAdd(&shared.bins[first_bin_of<Bins>(keys[i])], 1U);
    }
    return false;
  }
  if (threadIdx.x == 0) shared.chosen_before = shared.before;
  const ListedKeys<Exchange> listed(static_cast<int>(most), stage, peers, shared);
  found.cut = window.low - 1;
  found.before = take_best(window, wanted - above, cuts, listed, peers, keys, exchange, shared);
  return true;
}

/// Posts the block's count of chosen tokens; returns that of all blocks of the group, and adds
/// those of earlier ones to `shared.chosen_before`. All threads; begins and ends with a barrier.
__device__ inline std::uint32_t exchange_counts(unsigned of_thread, int round,
                                                const BlockExchange& peers, FusedShared& shared) {
  std::uint32_t own = 0;
  (void)block_exclusive_sum(of_thread, &own);
  if (peers.alone()) return own;
  auto& counts = peers.box.counts[round & 1];
  const std::uint32_t stage = kFirstRoundStage + static_cast<std::uint32_t>(round);
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    if (lane == 0) peers.post_pair(&counts[peers.rank][0], stage, own, 0);
    uint2 of_block[1];
    const bool has = lane < peers.blocks;
    peers.fetch<1>(&counts[has ? lane : 0][0], 0, has ? 1 : 0, stage, of_block);
    const unsigned total = __reduce_add_sync(kFullWarp, of_block[0].x);
    const unsigned earlier = __reduce_add_sync(kFullWarp, lane < peers.rank ? of_block[0].x : 0);
    if (lane == 0) {
      shared.count = total;
      shared.chosen_before = earlier;
    }
  }
  __syncthreads();
  return shared.count;
}

/// Takes all tokens whose keys are not 0, or the `plan.k` best where there are more: of an error
/// target, after keys below `least_key` have become 0. Advances `round`. Returns how many. All
/// threads.
template <typename Bins, typename Exchange>
__device__ std::uint32_t choose_bounded(const FilterArgs& args, const FusedWork& work,
                                        const BlockExchange& peers, std::uint32_t least_key,
                                        unsigned counted, int& round, std::uint32_t* keys,
                                        Exchange& exchange, FusedCut& cut, FusedShared& shared) {
  const auto most = static_cast<std::uint32_t>(work.plan.k);
  const std::uint32_t total = exchange_counts(counted, round++, peers, shared);
  if (threadIdx.x == 0) shared.cut = least_key;
  if (total <= most) return total;
  if (threadIdx.x == 0) shared.chosen_before = 0;
  cut = find_best<Bins>(args, work, peers, round, keys, exchange, shared);
  return most;
}

/// Writes the `chosen` tokens of the group with keys above that of `cut`, and their number.
/// `posted`: as of `ChosenTokens`.
__device__ inline void write_choice(const FilterArgs& args, const FusedWork& work,
                                    const BlockExchange& peers, const FusedCut& cut,
                                    std::int64_t chosen, const std::uint32_t* keys,
                                    TaggedWord* posted, FusedShared& shared) {
  write_chosen(args, work, peers, cut.cut, cut.before, keys, posted, shared);
  if (peers.rank == 0 && threadIdx.x == 0) {
    args.selection.counts[work.group_index] = static_cast<std::int32_t>(chosen);
  }
}

/// Chooses among the keys of all tokens of the group and writes what is chosen.
template <typename Bins, typename Exchange>
__device__ void choose_best(const FilterArgs& args, const FusedWork& work,
                            const BlockExchange& peers, std::uint32_t* keys, TaggedWord* posted,
                            Exchange& exchange, FusedShared& shared) {
  int round = 0;
  const FusedCut found = find_best<Bins>(args, work, peers, round, keys, exchange, shared);
  write_choice(args, work, peers, found, work.plan.k, keys, posted, shared);
}

}  // namespace kvtier::scoring::cuda
