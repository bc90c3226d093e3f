#pragma once

#include "scoring/soft/cluster_cuda.cuh"
#include "scoring/soft/tiles.cuh"

#include <cstdint>

/// The choice of a selection per query head, among values in memory: the blocks of a cluster share
/// the tokens of a (query, KV head), and search for the k-th best of each query head at once. A
/// round counts tokens by bins; a few tokens of the bin that has the k-th are then compared one by
/// one.
namespace kvtier::scoring::cuda {

inline constexpr int kValueHeads = 4;
inline constexpr int kSetThreads = 1024;
inline constexpr int kSetWarps = kSetThreads / 32;
inline constexpr unsigned kSetBlocks = 8;  ///< Most blocks of a cluster.
/// Of all sets together: bins, and tokens of a block that are compared one by one.
inline constexpr int kAllBins = 1024;
inline constexpr int kAllListed = 1024;

/// What the blocks of a cluster send one another, each to all.
struct SetExchange {
  alignas(16) std::uint32_t counts[kSetBlocks][kAllBins];   // [set][bin]
  alignas(16) std::uint32_t lists[kSetBlocks][kAllListed];  // [set][entry]
};

/// Where the k-th best key of a set is: from low to high.
struct SetWindow {
  enum State : std::uint32_t {
    kSearch,   ///< There are too many to compare them.
    kCompare,  ///< One by one.
    kAll,      ///< All are chosen.
    kTies,     ///< They are equal; the first are chosen.
  };
  std::uint32_t low;
  std::uint32_t high;
  std::uint32_t shift;   ///< Of the bins; 32 before the first round.
  std::uint32_t wanted;  ///< How many of the window are chosen.
  std::uint32_t most;    ///< No block has more tokens in it.
  std::uint32_t before;  ///< How many of it earlier blocks have.
  State state;

  [[nodiscard]] __device__ bool has(std::uint32_t key) const { return key - low <= high - low; }
};

struct SetShared {
  alignas(16) float references[kValueHeads];  // 0 past the group
  alignas(16) std::uint32_t bins[kAllBins];
  SetWindow windows[kValueHeads];
  std::uint32_t scan[kSetWarps];
  // This block's tokens that are compared.
  alignas(16) std::uint32_t list[kAllListed];
  int list_tokens[kAllListed];
  std::uint32_t list_counts[kValueHeads];
  std::uint32_t warp_counts[kSetWarps];
  Inbox round_inbox;
  Inbox list_inbox;
  Inbox chosen_inbox;
  std::uint32_t chosen[kSetBlocks];
};

#if defined(KVTIER_HAS_CLUSTERS)

/// Values of four heads of a token, 0 past the group.
__device__ inline float4 get_values(const float* from, int heads) {
  if (heads >= kValueHeads) return __ldcg(reinterpret_cast<const float4*>(from));
  return make_float4(from[0], heads > 1 ? from[1] : 0.0F, heads > 2 ? from[2] : 0.0F, 0.0F);
}
inline constexpr std::uint32_t kHighestKey = 0xFFFFFFFEU;

/// The search of a block, for each of up to four heads: the sets.
struct SetSearch {
  static constexpr int kSets = kValueHeads;
  static constexpr int kBins = kAllBins / kSets;
  static constexpr int kBinBits = 8;
  static constexpr unsigned kListed = kAllListed / kSets;
  static constexpr unsigned kThreadsPerSet = kSetThreads / kSets;
  static_assert(kBins == 1 << kBinBits && kBins == kThreadsPerSet);

  const FusedWork& work;
  const float* values;  // of the block's tokens
  int group;            // heads, and so sets
  unsigned rank;
  unsigned blocks;
  SetExchange& exchange;
  SetShared& shared;
  std::uint8_t* masks;  // of the block's tokens: the sets that chose it

  [[nodiscard]] __device__ const float* values_of(int token) const {
    return values + std::int64_t{token} * group;
  }
  /// Keys of an eligible token with these values.
  __device__ static void keys_of(const float4& own, const float4& references,
                                 std::uint32_t (&of)[kSets]) {
    of[0] = key_of_value(own.x * references.x);
    of[1] = key_of_value(own.y * references.y);
    of[2] = key_of_value(own.z * references.z);
    of[3] = key_of_value(own.w * references.w);
  }
  /// Calls `visit(token, keys)` for the block's eligible tokens.
  template <typename Visit>
  __device__ void for_tokens(Visit&& visit) const {
    const float4 references = *reinterpret_cast<const float4*>(shared.references);
    const int first = max(work.begin, 0) + static_cast<int>(threadIdx.x);
    constexpr int kAtOnce = 4;  // values on their way
#pragma unroll 1
    for (int base = first; base < work.end; base += kAtOnce * kSetThreads) {
      float4 own[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        own[i] = get_values(values_of(min(base + i * kSetThreads, work.end - 1)), group);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = base + i * kSetThreads;
        if (token >= work.end) break;
        std::uint32_t of[kSets];
        keys_of(own[i], references, of);
        visit(token, of);
      }
    }
  }

  /// The bins of the first round are of equally many floats from 3/4 to 3; those at the ends take
  /// what is less and more.
  static constexpr std::uint32_t kFirstKey = 0x3F400000U + 2;
  static constexpr int kFirstShift = 24 - kBinBits;
  __device__ static int first_bin(std::uint32_t key) {
    return min(max((static_cast<int>(key) - static_cast<int>(kFirstKey)) >> kFirstShift, 0),
               kBins - 1);
  }

  /// Goes on with a bin of the window.
  __device__ static void narrow(SetWindow& window, int bin, std::uint32_t above,
                                std::uint32_t count, std::uint32_t most) {
    const bool first = window.shift == 32;
    const std::uint32_t shift = first ? kFirstShift : window.shift;
    const std::uint32_t from =
        (first ? kFirstKey : window.low) + (static_cast<std::uint32_t>(bin) << shift);
    window.low = first && bin == 0 ? 1 : from;
    if (!first || bin < kBins - 1) window.high = min(window.high, from + ((1U << shift) - 1));
    window.shift = static_cast<std::uint32_t>(
        max(0, 32 - kBinBits - __clz(static_cast<int>(window.high - window.low))));
    window.wanted -= above;
    window.most = most;
    window.state = window.wanted == count      ? SetWindow::kAll
                   : most <= kListed           ? SetWindow::kCompare
                   : window.low == window.high ? SetWindow::kTies
                                               : SetWindow::kSearch;
  }

  /// Ends a round of the sets in a state: a thread has a bin's count, of all blocks and of earlier
  /// ones, the best bins first. Begins after a barrier of warps at least; ends with a barrier.
  __device__ void pick(SetWindow::State state, std::uint32_t count, std::uint32_t most,
                       std::uint32_t earlier) const {
    const unsigned lane = threadIdx.x % 32;
    const unsigned warp = threadIdx.x / 32;
    const unsigned set = threadIdx.x / kThreadsPerSet;
    const std::uint32_t through = inclusive_warp_sum(count);
    if (lane == 31) shared.scan[warp] = through;
    __syncthreads();  // and the bins have been read
    const unsigned first_warp = set * (kThreadsPerSet / 32);
    const std::uint32_t of_lane =
        first_warp + lane < warp && lane < kThreadsPerSet / 32 ? shared.scan[first_warp + lane] : 0;
    const std::uint32_t before = __reduce_add_sync(kFullWarp, of_lane) + through - count;
    SetWindow& window = shared.windows[set];
    const bool mine = static_cast<int>(set) < group && window.state == state &&
                      before < window.wanted && before + count >= window.wanted;
    shared.bins[threadIdx.x] = 0;
    __syncthreads();  // all have seen the window
    if (mine) {
      narrow(window, bin_of_thread(), before, count, most);
      window.before = earlier;
    }
    __syncthreads();
  }
  __device__ static int bin_of_thread() {
    return static_cast<int>(kThreadsPerSet - 1 - threadIdx.x % kThreadsPerSet);
  }

  /// Sends the block's counts to all, and finds the bins of the sets that are searched.
  /// `shared.bins` is complete but for a barrier, and is clear afterwards.
  __device__ void find_bins(std::uint32_t parity) const {
    constexpr unsigned kVectors = kAllBins / 4;
    __syncthreads();
    if (threadIdx.x == 0) shared.round_inbox.expect(blocks * kAllBins * sizeof(std::uint32_t));
    const unsigned vector = threadIdx.x % kVectors;
    const uint4 four = reinterpret_cast<const uint4*>(shared.bins)[vector];
    for (unsigned block = threadIdx.x / kVectors; block < blocks; block += kSetThreads / kVectors) {
      shared.round_inbox.send(reinterpret_cast<const uint4*>(exchange.counts[rank]) + vector, block,
                              four);
    }
    shared.round_inbox.wait(parity);
    const int at =
        static_cast<int>(threadIdx.x / kThreadsPerSet * kThreadsPerSet) + bin_of_thread();
    std::uint32_t count = 0;
    std::uint32_t most = 0;
    std::uint32_t earlier = 0;
#pragma unroll
    for (unsigned block = 0; block < kSetBlocks; ++block) {
      if (block >= blocks) break;
      const std::uint32_t of_block = exchange.counts[block][at];
      count += of_block;
      most = max(most, of_block);
      if (block < rank) earlier += of_block;
    }
    pick(SetWindow::kSearch, count, most, earlier);
  }

  /// Finds the windows: every set's k-th best is in its window, or all of that are chosen.
  __device__ void find_windows() const {
    for_tokens([&](int, const std::uint32_t(&of)[kSets]) {
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        if (set < group) atomicAdd(&shared.bins[set * kBins + first_bin(of[set])], 1U);
      }
    });
    cluster_wait();  // the blocks have begun, and their inboxes are open
    find_bins(0);
#pragma unroll 1
    for (std::uint32_t round = 1;; ++round) {
      bool open = false;
      for (int set = 0; set < group; ++set) {
        open = open || shared.windows[set].state == SetWindow::kSearch;
      }
      if (!open) return;
      cluster_sync();  // no block reads the counts of the round before
      for_tokens([&](int, const std::uint32_t(&of)[kSets]) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          if (set >= group) break;
          const SetWindow& window = shared.windows[set];
          if (window.state != SetWindow::kSearch || !window.has(of[set])) continue;
          atomicAdd(
              &shared.bins[set * kBins + static_cast<int>((of[set] - window.low) >> window.shift)],
              1U);
        }
      });
      find_bins(round & 1);
    }
  }

  __device__ void add_to_mask(int token, int set) const {
    atomicOr(reinterpret_cast<unsigned*>(masks) + token / 4, 1U << (token % 4 * 8 + set));
  }

  /// Fills `masks` but for what is compared or taken in order, and lists what is compared. Ends
  /// with a barrier.
  __device__ void mark() const {
    static_assert(kAllListed == kSetThreads);
    shared.list[threadIdx.x] = 0;
    if (threadIdx.x < kValueHeads) shared.list_counts[threadIdx.x] = 0;
    __syncthreads();
    std::uint32_t least[kSets];  // keys from here on are looked at,
    std::uint32_t cut[kSets];    // those above are chosen, the others compared
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const SetWindow& window = shared.windows[set];
      cut[set] = window.state == SetWindow::kAll ? window.low - 1 : window.high;
      least[set] = window.state == SetWindow::kCompare ? window.low : cut[set] + 1;
      if (set >= group) least[set] = 0xFFFFFFFFU;
    }
    for_tokens([&](int token, const std::uint32_t(&of)[kSets]) {
      bool any = false;
#pragma unroll
      for (int set = 0; set < kSets; ++set) any = any || of[set] >= least[set];
      if (!any) return;
      unsigned mask = 0;
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        if (of[set] < least[set]) continue;
        if (of[set] > cut[set]) {
          mask |= 1U << set;
        } else {
          const std::uint32_t at = set * kListed + atomicAdd(&shared.list_counts[set], 1U);
          shared.list[at] = of[set];
          shared.list_tokens[at] = token;
        }
      }
      masks[token] = static_cast<std::uint8_t>(mask);
    });
    __syncthreads();
  }

  /// Compares the listed tokens of all blocks: adds the best to `masks`, ties by lowest token.
  __device__ void compare() const {
    const unsigned lane = threadIdx.x % 32;
    const unsigned warp = threadIdx.x / 32;
    std::uint32_t listed[kSets];
    std::uint32_t vectors = 0;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const bool has = set < group && shared.windows[set].state == SetWindow::kCompare;
      listed[set] = has ? shared.windows[set].most : 0;
      vectors += (listed[set] + 3) / 4;
    }
    if (vectors == 0) return;
    if (threadIdx.x == 0) shared.list_inbox.expect(blocks * vectors * sizeof(uint4));
    constexpr unsigned kWarpsPerBlock = kSetWarps / kSetBlocks;
    const unsigned of_block = warp / kWarpsPerBlock;
    const unsigned first = warp % kWarpsPerBlock * 32 + lane;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      for (unsigned i = first; of_block < blocks && i < (listed[set] + 3) / 4;
           i += kWarpsPerBlock * 32) {
        const unsigned at = set * (kListed / 4) + i;
        shared.list_inbox.send(reinterpret_cast<const uint4*>(exchange.lists[rank]) + at, of_block,
                               reinterpret_cast<const uint4*>(shared.list)[at]);
      }
    }
    shared.list_inbox.wait(0);
    // One more round without the others: all blocks have all lists.
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const SetWindow& window = shared.windows[set];
      for (unsigned i = first; of_block < blocks && i < listed[set]; i += kWarpsPerBlock * 32) {
        const std::uint32_t key = exchange.lists[of_block][set * kListed + i];  // 0 past the last
        if (!window.has(key)) continue;
        atomicAdd(&shared.bins[set * kBins + static_cast<int>((key - window.low) >> window.shift)],
                  1U);
      }
    }
    __syncthreads();
    const int at =
        static_cast<int>(threadIdx.x / kThreadsPerSet * kThreadsPerSet) + bin_of_thread();
    pick(SetWindow::kCompare, shared.bins[at], 0, 0);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (listed[set] > 0) take_listed(set, listed[set]);
    }
  }

  /// Adds the block's listed tokens of a set whose window has been narrowed once more.
  __device__ void take_listed(int set, std::uint32_t listed) const {
    const unsigned lane = threadIdx.x % 32;
    const SetWindow window = shared.windows[set];
    const std::uint32_t* list = shared.list + set * kListed;
    const int* tokens = shared.list_tokens + set * kListed;
#pragma unroll 1
    for (std::uint32_t mine = threadIdx.x / 32; mine < shared.list_counts[set]; mine += kSetWarps) {
      const std::uint32_t key = list[mine];
      if (key < window.low) continue;
      const int token = tokens[mine];
      std::uint32_t better = 0;
      if (key <= window.high && window.state != SetWindow::kAll) {
#pragma unroll 1
        for (std::uint32_t at = lane; at < listed; at += 32) {
#pragma unroll 1
          for (unsigned block = 0; block < blocks; ++block) {
            const std::uint32_t other = exchange.lists[block][set * kListed + at];
            // Of equal keys those of earlier blocks are earlier.
            if (window.has(other) && (block < rank ? other >= key : other > key)) ++better;
          }
          if (list[at] == key && tokens[at] < token) ++better;
        }
        better = __reduce_add_sync(kFullWarp, better);
        if (better >= window.wanted) continue;
      }
      if (lane == 0) add_to_mask(token, set);
    }
  }

  /// Adds the first tokens of the windows that hold equal ones. All threads.
  __device__ void take_ties() const {
#pragma unroll 1
    for (int set = 0; set < group; ++set) {
      const SetWindow window = shared.windows[set];
      if (window.state != SetWindow::kTies) continue;
      std::uint32_t seen = window.before;
      const float4 references = *reinterpret_cast<const float4*>(shared.references);
#pragma unroll 1
      for (int base = 0; base < work.count; base += kSetThreads) {
        const int token = base + static_cast<int>(threadIdx.x);
        std::uint32_t of[kSets] = {};
        if (token >= work.begin && token < work.end) {
          keys_of(get_values(values_of(token), group), references, of);
        }
        std::uint32_t own = of[0];
#pragma unroll
        for (int i = 1; i < kSets; ++i) own = set == i ? of[i] : own;
        const bool tie = own == window.low;
        std::uint32_t total = 0;
        const std::uint32_t before = seen + block_exclusive_sum<kSetThreads>(tie ? 1 : 0, &total);
        seen += total;
        if (tie && before < window.wanted) add_to_mask(token, set);
      }
    }
  }

  /// Writes the tokens with masks, in token order.
  __device__ void write(const transfer::SelectionView& out) const {
    const unsigned lane = threadIdx.x % 32;
    const unsigned warp = threadIdx.x / 32;
    // A warp has neighbouring tokens.
    const int per_warp = (work.count + kSetThreads - 1) / kSetThreads * 32;
    const int begin = min(static_cast<int>(warp) * per_warp, work.count);
    const int end = min(begin + per_warp, work.count);  // whole tiles
    const std::uint8_t* own = masks + lane;
    __syncthreads();  // the masks are final
    std::uint32_t mine = 0;
    for (int word = begin / 4 + static_cast<int>(lane); word < end / 4; word += 32) {
      std::uint32_t four = reinterpret_cast<const std::uint32_t*>(masks)[word];
      four |= four >> 2;  // masks have four bits
      mine += __popc((four | four >> 1) & 0x01010101U);
    }
    mine = __reduce_add_sync(kFullWarp, mine);
    if (lane == 0) shared.warp_counts[warp] = mine;
    __syncthreads();
    const std::uint32_t of_lane = shared.warp_counts[lane];
    static_assert(kSetWarps == 32);
    const std::uint32_t total = __reduce_add_sync(kFullWarp, of_lane);
    if (threadIdx.x < blocks) shared.chosen_inbox.send(&shared.chosen[rank], threadIdx.x, total);
    const std::uint32_t of_warps = __reduce_add_sync(kFullWarp, lane < warp ? of_lane : 0);
    shared.chosen_inbox.wait(0);
    const std::uint32_t of_blocks =
        __reduce_add_sync(kFullWarp, lane < rank ? shared.chosen[lane] : 0);
    std::int64_t at = work.group_index * out.capacity + of_blocks + of_warps;
#pragma unroll 2
    for (int base = begin; base < end; base += 32) {
      const unsigned mask = own[base];
      const unsigned votes = __ballot_sync(kFullWarp, mask != 0);
      if (votes == 0) continue;
      if (mask != 0) {
        const std::int64_t to = at + __popc(votes & ((1U << lane) - 1));
        out.ids[to] = work.first_token + base + static_cast<int>(lane);
        out.head_mask[to] = static_cast<std::uint16_t>(mask);
      }
      at += __popc(votes);
    }
    if (rank == blocks - 1 && threadIdx.x == 0) {
      out.counts[work.group_index] = static_cast<std::int32_t>(of_blocks + total);
    }
  }
};

#endif

}  // namespace kvtier::scoring::cuda
