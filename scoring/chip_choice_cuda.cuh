#pragma once

#include "scoring/chip_scores_cuda.cuh"

#include <cstdint>

/// The second half of a selection on chip: the k best of the cluster's tokens by their keys, which
/// order as the combined scores do. A round counts tokens by bins and finds the bin of the k-th
/// best; a few tokens of that bin are then compared one by one.
namespace kvtier::scoring::cuda {

/// Keys order as combined scores do, which are sums of the heads' shares or, for order, their
/// logarithms. A sum from kLeastSum on is its own key, the bits of the float with the sign bit set.
/// Lower sums have the keys of their logarithms, which are negative, so that the keys are less.
inline constexpr float kLeastSum = 0x1p-100F;
/// The first round counts sixteenths of octaves, from 2^-28 to 2^4, which no sum of at most 8 heads
/// exceeds; lower ones count in the first bin.
inline constexpr std::uint32_t kChipKeyBase = 0x80000000U + ((127U - 28U) << 23);
inline constexpr std::uint32_t kChipBinShift = 23 - 4;

__device__ inline int first_bin_of(std::uint32_t key) {
  return static_cast<int>((max(key, kChipKeyBase) - kChipKeyBase) >> kChipBinShift);
}

__device__ inline float sum_of_row(const uint2& four, int row) {
  const std::uint32_t two = row < 2 ? four.x : four.y;
  return static_cast<float>(static_cast<std::int16_t>(row % 2 == 0 ? two & 0xFFFFU : two >> 16));
}

/// The key of a token with a sum below kLeastSum. `sums`: of head 0 and the token's row of a tile.
template <int kQuads>
__device__ __noinline__ std::uint32_t low_key(const uint2* sums, int row, const ChipNorms& norm,
                                              const ChipShared& shared) {
  ChipSum total;
#pragma unroll 1
  for (int h = 0; h < 4 * kQuads; ++h) {
    const float value = fmaf(shared.factors[h] * sum_of_row(sums[h / 4 * 32 + h % 4], row),
                             norm.key, norm.log_value) -
                        shared.references[h];
    if (value > total.most) total.add(value, 1.0F);
  }
  // Heads that came before a larger one count too.
  total.sum = 0.0F;
#pragma unroll 1
  for (int h = 0; h < 4 * kQuads; ++h) {
    const float value = fmaf(shared.factors[h] * sum_of_row(sums[h / 4 * 32 + h % 4], row),
                             norm.key, norm.log_value) -
                        shared.references[h];
    total.sum += exp2_fast(value - total.most);
  }
  return max(ordered_key(total.most + log2_norm(total.sum)), 1U);
}

/// The keys in question: low to high.
struct ChipWindow {
  std::uint32_t low = 0;
  std::uint32_t high = 0xFFFFFFFEU;  ///< No key is higher.
  std::uint32_t shift = 32;          ///< Of the bins of a later round; 32 in the first.

  [[nodiscard]] __device__ bool has(std::uint32_t key) const { return key - low <= high - low; }
  /// Goes on with a bin of the last round.
  __device__ void narrow(int bin) {
    const bool first = shift == 32;
    const std::uint32_t from = (first ? kChipKeyBase : low) +
                               (static_cast<std::uint32_t>(bin) << (first ? kChipBinShift : shift));
    const std::uint32_t last = from + ((1U << (first ? kChipBinShift : shift)) - 1);
    low = first && bin == 0 ? 1 : from;
    high = min(high, last);
    constexpr int kBinBits = 9;
    static_assert(kChipBins == 1 << kBinBits && kChipBins == 32 << (23 - kChipBinShift));
    shift = static_cast<std::uint32_t>(max(0, 32 - kBinBits - __clz(static_cast<int>(high - low))));
  }
};

/// Turns scores into keys, 0 for tokens that are not eligible, and counts them in `shared.bins`.
/// `keys` may be the norms of `scores`. All threads.
template <int kQuads>
__device__ void write_keys(const ScoreParams& params, const ChipWork& work,
                           const ChipScores& scores, ChipShared& shared, std::uint32_t* keys) {
  constexpr int kHeads = 4 * kQuads;
  const float weight = params.weighting == ValueWeighting::kLogit ? 1.0F : 0.0F;
  float factors[kHeads];
  float references[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    factors[h] = shared.factors[h];
    references[h] = shared.references[h];
  }
  // A thread takes the four tokens of a lane quad.
#pragma unroll 2
  for (int quad = static_cast<int>(threadIdx.x); quad < work.count / 4; quad += kChipThreads) {
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
      const ChipNorms norm = PackedNorms::unpack(norms[row], weight);
      float sum = 0.0F;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        sum += exp2_fast(fmaf(factors[h] * sum_of_row(four[h], row), norm.key, norm.log_value) -
                         references[h]);
      }
      const auto token = static_cast<unsigned>(tile * kChipTile + row * 8 + g - work.begin);
      const bool eligible = token < static_cast<unsigned>(work.end - work.begin);
      own[row] = 0;
      if (!eligible) continue;
      own[row] = __float_as_uint(fminf(sum, 15.0F)) | 0x80000000U;
      if (!(sum >= kLeastSum)) own[row] = low_key<kQuads>(sums, row, norm, shared);
      atomicAdd(&shared.bins[first_bin_of(own[row])], 1U);
    }
    reinterpret_cast<uint4*>(keys)[quad] = make_uint4(own[0], own[1], own[2], own[3]);
  }
}

/// Sends the block's counts to all, and finds the bin that has the `wanted`-th best token of the
/// cluster. The counts, `shared.bins`, are complete and are clear afterwards. All threads; begins
/// and ends with a barrier.
__device__ inline void find_bin(std::uint32_t wanted, int round, unsigned rank, unsigned blocks,
                                ChipExchange& exchange, ChipShared& shared) {
  constexpr int kVector = 8;  // counts
  constexpr unsigned kVectors = kChipBins / kVector;
  auto& counts = exchange.counts[round & 1];
  Inbox& inbox = shared.round_inbox[round & 1];
  __syncthreads();
  if (threadIdx.x == 0) inbox.expect(blocks * kChipBins * sizeof(std::uint16_t));
  const unsigned vector = threadIdx.x % kVectors;
  const uint4 low = *reinterpret_cast<const uint4*>(shared.bins + vector * kVector);
  const uint4 high = *reinterpret_cast<const uint4*>(shared.bins + vector * kVector + 4);
  const uint4 packed = {low.x | low.y << 16, low.z | low.w << 16, high.x | high.y << 16,
                        high.z | high.w << 16};
  const auto* to = reinterpret_cast<const uint4*>(counts[rank]) + vector;
  for (unsigned block = threadIdx.x / kVectors; block < blocks; block += kChipThreads / kVectors) {
    inbox.send(to, block, packed);
  }
  inbox.wait(static_cast<std::uint32_t>(round >> 1 & 1));
  const int bin = kChipBins - 1 - static_cast<int>(threadIdx.x);  // the best first
  std::uint32_t count = 0;
  std::uint32_t most = 0;
#pragma unroll 4
  for (unsigned block = 0; block < blocks; ++block) {
    const std::uint32_t of_block = counts[block][bin];
    count += of_block;
    most = max(most, of_block);
  }
  std::uint32_t total = 0;
  const std::uint32_t before = block_exclusive_sum(count, &total);
  shared.bins[threadIdx.x] = 0;
  if (before < wanted && before + count >= wanted) {
    shared.bin = bin;
    shared.above = before;
    shared.count = count;
    shared.most = most;
  }
  __syncthreads();
}

/// Raises the keys of the first `take` tokens of the window to the highest, in token order, and
/// clears those of its others.
__device__ inline void take_in_order(const ChipWindow& window, std::uint32_t take, int count,
                                     std::uint32_t* keys) {
  std::uint32_t seen = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += kChipThreads) {
    const int token = base + static_cast<int>(threadIdx.x);
    const unsigned i = ChipScores::entry_of(static_cast<unsigned>(token));
    const bool tie = token < count && window.has(keys[i]);
    std::uint32_t total = 0;
    const std::uint32_t before = seen + block_exclusive_sum(tie ? 1 : 0, &total);
    seen += total;
    if (tie) keys[i] = before < take ? 0xFFFFFFFFU : 0;
  }
}

/// The same for the `take` best of the window, ties by lowest token. No block has more than `most`
/// of them, kChipList at most.
__device__ inline void take_best(const ChipWindow& window, std::uint32_t take, std::uint32_t most,
                                 int count, unsigned rank, unsigned blocks, std::uint32_t* keys,
                                 ChipExchange& exchange, ChipShared& shared) {
  const std::uint32_t vectors = (most + 3) / 4;
  if (threadIdx.x < kChipList) shared.list[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.list_count = 0;
    shared.list_inbox.expect(blocks * vectors * sizeof(uint4));
  }
  __syncthreads();
#pragma unroll 2
  for (int four = static_cast<int>(threadIdx.x); four < count / 4; four += kChipThreads) {
    const uint4 own = reinterpret_cast<const uint4*>(keys)[four];
    const std::uint32_t key[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!window.has(key[i])) continue;
      const std::uint32_t at = atomicAdd(&shared.list_count, 1U);
      shared.list[at] = key[i];
      shared.list_entries[at] = static_cast<unsigned>(four * 4 + i);
    }
  }
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  static_assert(kChipList / 4 == 32);
  if (lane < vectors) {
    const uint4 four = reinterpret_cast<const uint4*>(shared.list)[lane];
    const auto* to = reinterpret_cast<const uint4*>(exchange.lists[rank]) + lane;
    for (unsigned block = warp; block < blocks; block += kChipWarps) {
      shared.list_inbox.send(to, block, four);
    }
  }
  shared.list_inbox.wait(0);
#pragma unroll 1
  for (std::uint32_t mine = warp; mine < shared.list_count; mine += kChipWarps) {
    const std::uint32_t key = shared.list[mine];
    const unsigned entry = shared.list_entries[mine];
    const unsigned token = ChipScores::token_of(entry);
    std::uint32_t better = 0;
#pragma unroll 1
    for (std::uint32_t at = lane; at < most; at += 32) {
#pragma unroll 4
      for (unsigned block = 0; block < blocks; ++block) {
        const std::uint32_t other = exchange.lists[block][at];  // 0 past the last
        // Of equal keys those of earlier blocks are earlier.
        if (block < rank ? other >= key : other > key) ++better;
      }
      if (shared.list[at] == key && ChipScores::token_of(shared.list_entries[at]) < token) ++better;
    }
    better = __reduce_add_sync(kFullWarp, better);
    if (lane == 0) keys[entry] = better < take ? 0xFFFFFFFFU : 0;
  }
}

/// Writes the tokens with keys above `cut`, in token order. All blocks.
__device__ inline void write_chosen(const FilterArgs& args, const ChipWork& work, std::uint32_t cut,
                                    unsigned rank, unsigned blocks, const std::uint32_t* keys,
                                    ChipShared& shared) {
  const transfer::SelectionView& out = args.selection;
  const int count = work.count;
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  // A warp has neighbouring tokens.
  const int per_warp = (count + kChipThreads - 1) / kChipThreads * 32;
  const int begin = min(static_cast<int>(warp) * per_warp, count);
  const int end = min(begin + per_warp, count);  // whole tiles
  const std::uint32_t* own = keys + ChipScores::entry_of(lane);
  const auto votes_at = [&](int base) { return __ballot_sync(kFullWarp, own[base] > cut); };
  __syncthreads();  // the keys are final
  std::uint32_t mine = 0;
#pragma unroll 4
  for (int base = begin; base < end; base += kChipTile) mine += __popc(votes_at(base));
  if (lane == 0) shared.warp_counts[warp] = mine;
  __syncthreads();
  const std::uint32_t of_lane = lane < kChipWarps ? shared.warp_counts[lane] : 0;
  const std::uint32_t total = __reduce_add_sync(kFullWarp, of_lane);
  if (threadIdx.x < blocks) shared.chosen_inbox.send(&shared.chosen[rank], threadIdx.x, total);
  const std::uint32_t of_warps = __reduce_add_sync(kFullWarp, lane < warp ? of_lane : 0);
  shared.chosen_inbox.wait(0);
  const std::uint32_t of_blocks =
      __reduce_add_sync(kFullWarp, lane < rank ? shared.chosen[lane] : 0);
  const auto mask = static_cast<std::uint16_t>((1U << args.request.kv.group()) - 1);
  std::int64_t at = work.group_index * out.capacity + of_blocks + of_warps;
#pragma unroll 2
  for (int base = begin; base < end; base += kChipTile) {
    const unsigned votes = votes_at(base);
    if ((votes >> lane & 1U) != 0) {
      const std::int64_t to = at + __popc(votes & ((1U << lane) - 1));
      out.ids[to] = work.first_token + base + static_cast<int>(lane);
      out.head_mask[to] = mask;
    }
    at += __popc(votes);
  }
  if (rank == blocks - 1 && threadIdx.x == 0) {
    out.counts[work.group_index] = static_cast<std::int32_t>(of_blocks + total);
  }
}

/// Chooses among the keys of the cluster's tokens, which are counted in `shared.bins`. All blocks.
__device__ inline void choose_best(const FilterArgs& args, const ChipWork& work, unsigned rank,
                                   unsigned blocks, std::uint32_t* keys, ChipExchange& exchange,
                                   ChipShared& shared) {
  auto wanted = static_cast<std::uint32_t>(work.plan.k);
  ChipWindow window;
  std::uint32_t cut = 0;  // keys above it are chosen
#pragma unroll 1
  for (int round = 0;; ++round) {
    find_bin(wanted, round, rank, blocks, exchange, shared);
    window.narrow(shared.bin);
    wanted -= shared.above;
    cut = window.high;
    if (wanted == shared.count) {
      cut = window.low - 1;
      break;
    }
    if (shared.most <= kChipList) {
      take_best(window, wanted, shared.most, work.count, rank, blocks, keys, exchange, shared);
      break;
    }
    if (window.low == window.high) {
      std::uint32_t before = 0;
      for (unsigned block = 0; block < rank; ++block) {
        before += exchange.counts[round & 1][block][shared.bin];
      }
      take_in_order(window, before < wanted ? wanted - before : 0, work.count, keys);
      break;
    }
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < work.count; i += kChipThreads) {
      const std::uint32_t key = keys[i];
      if (window.has(key)) atomicAdd(&shared.bins[(key - window.low) >> window.shift], 1U);
    }
  }
  write_chosen(args, work, cut, rank, blocks, keys, shared);
}

}  // namespace kvtier::scoring::cuda
