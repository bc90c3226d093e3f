#pragma once

#include "scoring/fused/choice_cuda.cuh"
#include "scoring/stream/stream_cuda.cuh"

#include <cstdint>

/// The second step of a selection by a stream of keys: tokens that may belong to the selection, by
/// their approximate keys, and their exact keys.
namespace kvtier::scoring::cuda {

/// Tokens that a block may list in shared memory; longer lists are in global memory.
inline constexpr int kListed = 8192;

/// Dynamic shared memory, before attention.
struct ChoiceMemory {
  alignas(16) std::uint32_t keys[kListed];
  std::int32_t tokens[kListed];
  alignas(16) FusedNorms norms[kFusedWarps][kFusedUnit];
  WideExchange exchange;
  // The warps' units follow.
};
static_assert(sizeof(ChoiceMemory) % 16 == 0);

/// The tokens of a block that may belong to the selection, in order, and their exact keys, at
/// `FusedScores::entry_of` and 0 past the last.
struct Candidates {
  std::uint32_t* keys;
  std::int32_t* tokens;
  int count;

  [[nodiscard]] __device__ int padded() const {
    return (count + kFusedTile - 1) / kFusedTile * kFusedTile;
  }
};

/// Masses of tokens are multiples of 2^-31.
inline constexpr float kMassUnits = 0x1p31F;

/// What a selection for a recall target knows of a (query, KV head), in shared memory. A token's
/// share of the attention of a head is 2^(slope x + offset), x its base-2 logit without the value
/// norm.
struct RecallShared {
  float slopes[kFusedHeads];
  float offsets[kFusedHeads];  ///< -infinity past the group.
  float shares[kFusedHeads];   ///< Of all eligible tokens.
  float statics[kFusedHeads];  ///< Base-2 logarithms of the always-attended tokens' masses.
  std::uint64_t all;           ///< Mean of `shares` over the heads, in `kMassUnits`.
  // The bin of a round that has the last token which is needed, and what is above it and in it.
  int bin;
  std::uint32_t count;
  std::uint32_t in_bin;
  std::uint64_t mass;
  std::uint64_t of_bin;
};

/// The approximate keys of a block's tokens, in vectors of eight, of which a warp has neighbours.
/// The first ones of a thread are under way when it is made.
class ApproximateKeys {
 public:
  static constexpr int kAtOnce = 4;

  int of_lane;  ///< Vectors of a lane, in whole words: of a warp, lanes have every 32nd.
  int begin;    ///< Those of the warp.
  int end;

  /// Vectors whose tokens have a bit each in a word; a unit has whole words.
  static constexpr int kOfWord = 4;
  static_assert(kFusedUnit % (8 * kOfWord) == 0);

  __device__ ApproximateKeys(const FilterArgs& args, const FusedWork& work)
      : of_lane((work.count / 8 + kFusedThreads * kOfWord - 1) / (kFusedThreads * kOfWord) *
                kOfWord),
        begin(min(static_cast<int>(threadIdx.x) / 32 * of_lane * 32, work.count / 8)),
        end(min(begin + of_lane * 32, work.count / 8)),
        vectors_(reinterpret_cast<const uint4*>(
            args.filter.stream_keys + work.group_index * args.max_tokens + work.first_token)) {
    load(first(), ahead_);
  }
  [[nodiscard]] __device__ uint4 at(int vector) const { return __ldcg(vectors_ + vector); }
  /// Calls `visit` with each of the thread's vectors and its number. Whole warps.
  template <typename Visit>
  __device__ void visit_own(const Visit& visit) const {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) loaded[j] = ahead_[j];
#pragma unroll 1
    for (int base = first(); base < end; base += kAtOnce * 32) {
      uint4 next[kAtOnce];
      load(base + kAtOnce * 32, next);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (base + j * 32 < end) visit(loaded[j], base + j * 32);
        loaded[j] = next[j];
      }
    }
  }

 private:
  [[nodiscard]] __device__ int first() const { return begin + static_cast<int>(threadIdx.x) % 32; }
  __device__ void load(int base, uint4 (&vectors)[kAtOnce]) const {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      vectors[j] = base + j * 32 < end ? at(base + j * 32) : make_uint4(0, 0, 0, 0);
    }
  }

  const uint4* vectors_;
  uint4 ahead_[kAtOnce];
};

/// Asks L1 for the addresses of the sketch blocks of a block's tokens.
__device__ inline void prefetch_blocks(const FusedWork& work) {
  constexpr int kLine = 128 / sizeof(void*);
  const int first = work.first_token / hashing::kBlockTokens;
  const int last = (work.first_token + work.count - 1) / hashing::kBlockTokens;
  const int i = first + static_cast<int>(threadIdx.x) * kLine;
  if (work.count > 0 && i < last + kLine) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(
        __cvta_generic_to_global(work.plan.blocks + min(i, last))));
  }
}

/// Lists the tokens with approximate keys of at least `least` or, where these are of priorities and
/// kByScore, with such keys of their scores, which are at most two steps lower than the exact ones.
/// All threads; begins and ends with a barrier.
template <bool kByScore>
__device__ Candidates list_candidates(const FilterArgs& args, const FusedWork& work,
                                      const ApproximateKeys& approximate, int least,
                                      ChoiceMemory& memory, FusedShared& shared) {
  constexpr int kOfWord = ApproximateKeys::kOfWord;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // A bit per token, of vectors whose bits have room in the place of the keys.
  auto* const kept = reinterpret_cast<std::uint8_t*>(memory.keys);
  constexpr int kKept = sizeof(memory.keys);
  [[maybe_unused]] const FusedPriorities priorities(args.request.params, work.kv_head);
  const auto order = [&](unsigned key, [[maybe_unused]] int token) {
    if constexpr (kByScore) {
      if (priorities.used && key != 0) {
        const float log_uniform = log2_norm(priorities.uniform(token));
        const float steps = floorf(fmaf(log_uniform, ShareKeys::kSteps, static_cast<float>(key)));
        return max(static_cast<int>(steps), 1);
      }
    }
    return static_cast<int>(key);
  };
  const auto votes_of = [&](const uint4& loaded, int vector) {
    const int token = work.first_token + vector * 8;
    unsigned votes = 0;
    const unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    if constexpr (!kByScore) {  // most vectors have none
      const unsigned most = __vmaxu2(__vmaxu2(words[0], words[1]), __vmaxu2(words[2], words[3]));
      if (static_cast<int>(max(most & 0xFFFFU, most >> 16)) < least) return votes;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (order(words[i] & 0xFFFFU, token + 2 * i) >= least) votes |= 1U << (2 * i);
      if (order(words[i] >> 16, token + 2 * i + 1) >= least) votes |= 2U << (2 * i);
    }
    return votes;
  };
  const auto votes_at = [&](int word) {
    if (word < kKept / kOfWord) return memory.keys[word];
    std::uint32_t votes = 0;
    for (int i = 0; i < kOfWord; ++i) {
      const int vector = word * kOfWord + i;
      votes |= votes_of(approximate.at(vector), vector) << (8 * i);
    }
    return votes;
  };
  __syncthreads();
  approximate.visit_own([&](const uint4& loaded, int vector) {
    if (vector < kKept) kept[vector] = static_cast<std::uint8_t>(votes_of(loaded, vector));
  });
  __syncwarp();  // the bits of all lanes
  // A lane lists the tokens of neighbouring vectors.
  const int first = min(approximate.begin + lane * approximate.of_lane, approximate.end) / kOfWord;
  const int last = min(first + approximate.of_lane / kOfWord, approximate.end / kOfWord);
  int count = 0;
#pragma unroll 4
  for (int i = first; i < last; ++i) count += __popc(votes_at(i));
  const int through = inclusive_warp_sum(count);
  if (lane == 31) shared.warp_counts[warp] = static_cast<std::uint32_t>(through);
  if (threadIdx.x == 0) shared.chosen_before = 0;  // of the keys that are exact
  __syncthreads();                                 // the counts of all warps are there
  const unsigned of_warp = lane < kFusedWarps ? shared.warp_counts[lane] : 0;
  Candidates found;
  found.count = static_cast<int>(__reduce_add_sync(kFullWarp, of_warp));
  auto at = static_cast<int>(__reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0));
  at += through - count;
  const bool listed = found.padded() <= kListed;
  const std::int64_t global = work.group_index * args.max_tokens + work.first_token;
  found.keys = listed ? memory.keys : reinterpret_cast<std::uint32_t*>(args.values) + global;
  found.tokens = listed ? memory.tokens : args.ids + global;
#pragma unroll 1
  for (int i = first; count > 0 && i < last; ++i) {
    for (std::uint32_t votes = votes_at(i); votes != 0; votes &= votes - 1) {
      found.tokens[at++] = work.first_token + i * 8 * kOfWord + __ffs(static_cast<int>(votes)) - 1;
    }
  }
  __syncthreads();  // the list is complete
  return found;
}

/// Starts to copy the sketches of listed tokens, those of `tiles` tiles from `base` on, to a unit.
/// `wanted` says of which; the others have norms of 0. Chunks that lie side by side are copied by
/// neighbouring lanes, so that they are read as one. A whole warp.
template <int kChunks, typename Wanted>
__device__ void gather_unit(const FilterArgs& args, const FusedWork& work, const Candidates& found,
                            int base, int tiles, int chunks, std::byte* unit,
                            const Wanted& wanted) {
  const hashing::SketchGeometry& sketch = args.request.sketch;
  const bool whole = UnitVectors<kChunks>(sketch, chunks).whole();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned to = transfer::cuda::shared_address(unit);
  const unsigned norms_to = to + static_cast<unsigned>(chunks * kFusedPiece);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = half * 32 + lane;
    const std::byte* codes = nullptr;
    const std::byte* norms = nullptr;
    if (half < tiles && base + i < found.count && wanted(base + i)) {
      const int token = found.tokens[base + i];
      const std::byte* block = work.plan.blocks[token / hashing::kBlockTokens];
      const int in_block = token % hashing::kBlockTokens;
      codes = block + sketch.chunk_offset(work.kv_head, 0, in_block);
      norms = block + sketch.norms_offset(work.kv_head, in_block);
    }
    transfer::cuda::copy_async_4(norms_to + static_cast<unsigned>(i * 4), norms, norms != nullptr);
    for (int copy = 0; copy < chunks; ++copy) {
      const int token = whole ? copy * 16 + lane / 2 : lane;
      const int chunk = whole ? lane % 2 : copy;
      const auto own = reinterpret_cast<unsigned long long>(codes);
      const auto* from = reinterpret_cast<const std::byte*>(
          kChunks == 1 ? own : __shfl_sync(kFullWarp, own, token));
      if (from == nullptr) continue;
      const int of_token = half * 32 + token;
      const int place =
          whole ? 2 * of_token + (chunk ^ of_token / 4 % 2) : chunk * kFusedUnit + of_token;
      transfer::cuda::copy_async_16_alone(to + static_cast<unsigned>(place * hashing::kChunkBytes),
                                          from + chunk * sketch.chunk_stride());
    }
  }
  transfer::cuda::copy_async_commit();
}

/// What `write_exact_keys` writes.
enum class ExactKeys {
  kOrder,   ///< Keys of the scores, or priorities,
  kMasses,  ///< of the scores, and the masses of the tokens at the same places, of which none
            ///< count;
  kSecond,  ///< the same as kOrder in the second of two phases: 0 of tokens that the first has
            ///< left.
};

/// Writes the exact keys of the listed tokens, 0 of those below `least`, and counts the others in
/// `shared.bins`. `params`: of the selection. `at_places`: for each listed token the mass that is
/// written, or the bias of the first phase, negative of those that it has left. Returns how many
/// tokens the thread has counted. No barrier at the end.
template <ExactKeys kOf, typename Kernel>
__device__ unsigned write_exact_keys(const FilterArgs& args, const ScoreParams& params,
                                     const FusedWork& work, const Candidates& found,
                                     std::uint32_t least, const StreamQueries& queries,
                                     [[maybe_unused]] const RecallShared* recall,
                                     [[maybe_unused]] std::uint32_t* at_places,
                                     ChoiceMemory& memory, FusedShared& shared) {
  constexpr int kQuads = Kernel::kQuads;
  constexpr int kChunks = Kernel::kChunks;
  constexpr bool kWeighs = kOf == ExactKeys::kMasses;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(params);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::byte* const unit =
      reinterpret_cast<std::byte*>(&memory + 1) + warp * fused_unit_bytes(chunks);
  UnitScorer<kQuads, kChunks, Kernel::kBits> scorer(args.request, params, queries, chunks,
                                                    memory.norms[warp]);
  const FusedPriorities priorities(params, work.kv_head);
  float references[kQuads];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad)
    references[quad] = shared.references[quad * 4 + lane % 4];
  const auto sum_of = [](float a, float b) { return a + b; };
  [[maybe_unused]] float slopes[kQuads];
  [[maybe_unused]] float offsets[kQuads];
  if constexpr (kWeighs) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      slopes[quad] = recall->slopes[quad * 4 + lane % 4];
      offsets[quad] = recall->offsets[quad * 4 + lane % 4];
    }
  }
  const float of_group = 1.0F / static_cast<float>(args.request.kv.group);
  // Whether the first phase has left a token.
  const auto left = [&]([[maybe_unused]] int i) {
    if constexpr (kOf != ExactKeys::kSecond) return false;
    return __uint_as_float(at_places[i]) < 0.0F;
  };
  unsigned counted = 0;
  // Of few tokens a tile for each warp, so that all have some.
  const int tiles = found.count <= kFusedWarps * kFusedTile ? 1 : kUnitTiles;
  const int step = tiles * kFusedTile;
#pragma unroll 1
  for (int base = warp * step; base < found.count; base += kFusedWarps * step) {
    gather_unit<kChunks>(args, work, found, base, tiles, chunks, unit,
                         [&](int i) { return !left(i); });
    transfer::cuda::copy_async_wait<0>();
    __syncwarp();  // the copies of all lanes
    scorer.begin_unit(unit, 0, {0, kFusedUnit});
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      __syncwarp();  // binary products take whole warps
      float shares[4] = {};
      [[maybe_unused]] float weights[4] = {};
      float most[4] = {kLowestValue, kLowestValue, kLowestValue, kLowestValue};
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        float values[4];
        float logits[4];
        scorer.score(quad, tile, values, logits);
#pragma unroll
        for (int row = 0; row < 4; ++row) {
          const float value = values[row] - references[quad];
          shares[row] += exp2_fast(value);
          most[row] = fmaxf(most[row], value);
          if constexpr (kWeighs) {
            const float share = exp2_fast(fmaf(slopes[quad], logits[row], offsets[quad]));
            weights[row] += logits[row] > -INFINITY ? share : 0.0F;
          }
        }
      }
      const float sum = reduce_heads(shares, sum_of);
      const int i = base + tile * kFusedTile + own_token();
      const bool present = i < found.count && !left(i);
      const int token = present ? found.tokens[i] : 0;
      float uniform = priorities.used && !kWeighs ? priorities.uniform(token) : 1.0F;
      if constexpr (kOf == ExactKeys::kSecond) {
        const float bias = present ? __uint_as_float(at_places[i]) : 0.0F;
        uniform *= exp2_fast(fminf(-bias * kLog2E, 0.0F));
      }
      std::uint32_t key = __float_as_uint(__fdividef(sum, uniform)) | 0x80000000U;
      if (__any_sync(kFullWarp, present && !(sum >= kLeastSum))) {
        // Sums that may have underflowed, relative to the largest of the heads.
        const float largest =
            fmaxf(reduce_heads(most, [](float a, float b) { return fmaxf(a, b); }), kLowestValue);
        float above[4] = {};
        for (int row = 0; row < 4; ++row)
          most[row] = __shfl_sync(kFullWarp, largest, lane / 4 * 4 + row);
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          float values[4];
          scorer.score(quad, tile, values);
#pragma unroll
          for (int row = 0; row < 4; ++row) {
            above[row] += exp2_fast(values[row] - references[quad] - most[row]);
          }
        }
        const float low = largest + log2_norm(reduce_heads(above, sum_of)) - log2_norm(uniform);
        if (!(sum >= kLeastSum)) key = key_of_log(low);
      }
      if (!present || key < least) key = 0;
      if constexpr (kWeighs) {
        const float mass = fminf(reduce_heads(weights, sum_of) * of_group, 1.0F);
        at_places[base + tile * kFusedTile + lane] =
            present ? __float2uint_rn(mass * kMassUnits) : 0U;
      } else if (key != 0) {
        atomicAdd(&shared.bins[first_bin_of<ShareBins>(key)], 1U);
        ++counted;
      }
      found.keys[base + tile * kFusedTile + lane] = key;  // at entry_of(i)
    }
    __syncwarp();  // all lanes have read the unit
  }
  return counted;
}

}  // namespace kvtier::scoring::cuda
