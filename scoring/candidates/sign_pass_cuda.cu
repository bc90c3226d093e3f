#include "scoring/block/sign_tile.cuh"
#include "scoring/candidates/walk.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/device/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

constexpr int kMaxPassWarps = 16;

/// Adds, over the four lanes of a quad, the values of four rows; lane t of a quad gets row t's sum.
__device__ float sum_rows(const float (&rows)[4], int lane) {
  const bool odd = (lane & 1) != 0;
  const float low =
      (odd ? rows[1] : rows[0]) + __shfl_xor_sync(kFullWarp, odd ? rows[0] : rows[1], 1);
  const float high =
      (odd ? rows[3] : rows[2]) + __shfl_xor_sync(kFullWarp, odd ? rows[2] : rows[3], 1);
  const bool upper = (lane & 2) != 0;
  return (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, 2);
}

/// What a warp keeps of the (row, KV head) and the segment it is at. kQuads: 4 heads each.
template <int kQuads>
struct SegmentState {
  std::int32_t* ids;   // where the next candidate goes
  float* values;       // likewise, for head lane % 4
  std::int64_t place;  // of the segment in counts
  int token;           // first of the segment
  int begin;           // eligible tokens, relative to the segment
  int end;
  int written;
  bool prioritised;
  std::uint32_t set;  // of the priorities
  float group_threshold;
  float factors[kQuads];
  float references[kQuads];
  float thresholds[kQuads];
  float totals[kQuads];
  int sums[kQuads];
  unsigned present[kQuads];  // all bits, or none where the lane has no head

  __device__ void open_run(const FilterArgs& args, const SegmentRun& run) {
    const SelectRequest& request = args.request;
    const int group = request.kv.group();
    const RowPlan& plan = args.plans[run.row];
    const std::int64_t group_index = std::int64_t{run.row} * request.kv.kv_heads + run.kv_head;
    token = run.first * kSegmentTokens;
    begin = static_cast<int>(plan.begin) - token;
    end = static_cast<int>(plan.end) - token;
    ids = args.ids + group_index * args.max_tokens + token;
    values = args.values + (group_index * args.max_tokens + token) * group + threadIdx.x % 4;
    place = group_index * args.segments + run.first;
    written = 0;
    prioritised = request.params.rule == SelectionRule::kPriority;
    set = priority_key(request.params, run.kv_head);
    group_threshold = args.filter.groups[group_index].threshold;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int head = quad * 4 + static_cast<int>(threadIdx.x) % 4;
      const bool has_head = head < group;
      const std::int64_t index = group_index * group + (has_head ? head : 0);
      factors[quad] = sign_factor(request.params, args.tables.scalars[index]) * kLog2E;
      const FilterHead of_head = args.filter.heads[index];
      // A lane without a head adds nothing: its shares are 2^-infinity.
      references[quad] = has_head ? of_head.reference - kShareShift : INFINITY;
      thresholds[quad] = has_head ? of_head.threshold : INFINITY;
      present[quad] = has_head ? 0xFFFFFFFFU : 0U;
      totals[quad] = 0.0F;
      sums[quad] = args.filter.weight_sums[index];
    }
  }

  /// Writes what choose needs of the segment and goes to the next.
  __device__ void close(const FilterArgs& args) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int group = args.request.kv.group();
    // Rows of a head are spread over 8 lanes.
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float total = totals[quad];
      total += __shfl_xor_sync(kFullWarp, total, 4);
      total += __shfl_xor_sync(kFullWarp, total, 8);
      total += __shfl_xor_sync(kFullWarp, total, 16);
      const int head = quad * 4 + lane;
      if (lane < 4 && head < group) args.filter.partials[place * group + head] = total;
      totals[quad] = 0.0F;
    }
    if (lane == 0) args.filter.counts[place] = static_cast<std::uint32_t>(written);
    ++place;
    ids += kSegmentTokens - written;
    values += (kSegmentTokens - written) * group;
    token += kSegmentTokens;
    begin -= kSegmentTokens;
    end -= kSegmentTokens;
    written = 0;
  }
};

/// What a score needs of a token beside its bits.
struct alignas(8) TokenNorms {
  float key;
  float log_value;  ///< Base 2; -infinity for a token that is not finite or not eligible.
};
constexpr int kWarpNormBytes = kUnitTokens * static_cast<int>(sizeof(TokenNorms));

/// Base-2 logarithm of a norm, which is no subnormal.
__device__ float log2_fast(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Fills `norms` of a unit. `weight`: what the logarithm of the value norm counts, 0 or 1. Tokens
/// of [begin, end) of the unit are eligible.
__device__ void prepare_norms(const std::byte* raw, float weight, int begin, int end,
                              TokenNorms* norms) {
  constexpr int kPerLane = kUnitTokens / 32;
  static_assert(kPerLane == 4 && hashing::kNonfiniteNorm == 0x7C00, "infinity in fp16");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto* key_pairs = reinterpret_cast<const __half2*>(raw) + lane * 2;
  const auto* value_pairs = reinterpret_cast<const __half2*>(raw + kUnitNormBytes) + lane * 2;
  TokenNorms own[kPerLane];
#pragma unroll
  for (int pair = 0; pair < kPerLane / 2; ++pair) {
    const float2 keys = __half22float2(key_pairs[pair]);
    const float2 values = __half22float2(value_pairs[pair]);
    const auto settle = [&](float key, float value) {
      const bool finite = fmaxf(key, value) < INFINITY;
      return TokenNorms{finite ? key : 0.0F, finite ? weight * log2_fast(value) : -INFINITY};
    };
    own[pair * 2] = settle(keys.x, values.x);
    own[pair * 2 + 1] = settle(keys.y, values.y);
  }
  if (begin > 0 || end < kUnitTokens) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int token = lane * kPerLane + i;
      if (token < begin || token >= end) own[i].log_value = -INFINITY;
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    *reinterpret_cast<float4*>(norms + lane * kPerLane + i) =
        make_float4(own[i].key, own[i].log_value, own[i + 1].key, own[i + 1].log_value);
  }
}

/// Gathers what the lanes know of 32 tokens, bit i for token i: lane 4 g + t of token t * 8 + g.
__device__ unsigned in_token_order(bool mine, int lane) {
  return __ballot_sync(kFullWarp, __shfl_sync(kFullWarp, mine ? 1 : 0, lane % 8 * 4 + lane / 8));
}

/// Bits [begin, end) of a word, for any begin and end.
__device__ unsigned bits_between(int begin, int end) {
  const unsigned below_end = end <= 0 ? 0U : 0xFFFFFFFFU >> (32 - min(end, 32));
  return begin <= 0 ? below_end : begin >= 32 ? 0U : below_end & 0xFFFFFFFFU << begin;
}

/// Writes the candidates `tokens` of the 32 tokens from `base` of the segment on. Without branches:
/// every third token may be one.
template <int kQuads>
__device__ void write_candidates(SegmentState<kQuads>& state, int group, int base, unsigned tokens,
                                 const float (&values)[kQuads][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if ((tokens >> lane & 1U) != 0) {
    state.ids[__popc(tokens & ((1U << lane) - 1))] = state.token + base + lane;
  }
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    const unsigned own = 1U << (row * 8 + lane / 4);
    const int to = __popc(tokens & (own - 1)) * group;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      // Lanes without a head have a null mask.
      if ((tokens & own & state.present[quad]) != 0)
        state.values[to + quad * 4] = values[quad][row];
    }
  }
  const int count = __popc(tokens);
  state.ids += count;
  state.values += count * group;
  state.written += count;
}

/// Scores of 32 tokens.
template <int kQuads>
struct TileScores {
  float values[kQuads][4];  ///< Of tokens row * 8 + lane / 4 and heads quad * 4 + lane % 4.
  unsigned tokens;          ///< The candidates, bit i for token i.
};

/// Scores the 32 tokens from `local` of unit `unit` of the segment on. kChunks 0: their number is
/// read at run time.
template <int kBits, int kQuads, int kChunks, bool kTogether>
__device__ TileScores<kQuads> score_tile(SegmentState<kQuads>& state,
                                         const QuadColumns<kBits, kChunks> (&columns)[kQuads],
                                         int chunks, int group, const std::byte* stage, int unit,
                                         int local, const TokenNorms* norms) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  TileScores<kQuads> scores;
  float shares[4];
  unsigned rows = 0;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    if (quad > 0 && quad * 4 >= group) break;
    int sums[4];
    signed_sums<kUnitTokens>(stage + local * hashing::kChunkBytes, columns[quad], chunks,
                             state.sums[quad], sums);
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const TokenNorms norm = norms[local + row * 8 + lane / 4];
      const float value =
          fmaf(state.factors[quad] * static_cast<float>(sums[row]), norm.key, norm.log_value);
      const float share = exp2_fast(value - state.references[quad]);
      scores.values[quad][row] = value;
      state.totals[quad] += share;
      shares[row] = quad == 0 ? share : shares[row] + share;
      if (!kTogether && share >= state.thresholds[quad]) rows |= 1U << row;
    }
  }
  bool found = false;  // of token lane % 4 * 8 + lane / 4
  if (kTogether) {
    float sum = sum_rows(shares, lane);
    if (state.prioritised) {
      const int token = state.token + unit * kUnitTokens + local + lane % 4 * 8 + lane / 4;
      sum = __fdividef(sum, priority_uniform(state.set, static_cast<std::uint32_t>(token)));
    }
    found = sum >= state.group_threshold;
  } else {
    rows |= __shfl_xor_sync(kFullWarp, rows, 1);
    rows |= __shfl_xor_sync(kFullWarp, rows, 2);
    found = (rows >> lane % 4 & 1U) != 0;
  }
  scores.tokens = in_token_order(found, lane);
  return scores;
}

template <int kBits, int kQuads, int kChunks, bool kTogether>
__device__ void pass_unit(const FilterArgs& args, SegmentState<kQuads>& state,
                          const QuadColumns<kBits, kChunks> (&columns)[kQuads], int unit,
                          const std::byte* stage, TokenNorms* norms) {
  const SelectRequest& request = args.request;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(request.params);
  const int group = request.kv.group();
  const int begin = state.begin - unit * kUnitTokens;
  const int end = state.end - unit * kUnitTokens;
  prepare_norms(stage + chunks * kUnitChunkBytes,
                request.params.weighting == ValueWeighting::kLogit ? 1.0F : 0.0F, begin, end,
                norms);
  __syncwarp();
  // Two tiles together hide each other's latency where registers allow.
  constexpr int kTiles = kQuads == 1 ? 2 : 1;
#pragma unroll 1
  for (int local = 0; local < kUnitTokens; local += 32 * kTiles) {
    TileScores<kQuads> scores[kTiles];
    unsigned any = 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      scores[tile] = score_tile<kBits, kQuads, kChunks, kTogether>(
          state, columns, chunks, group, stage, unit, local + tile * 32, norms);
      any |= scores[tile].tokens;
    }
    if (any == 0) continue;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int first = local + tile * 32;
      // A threshold of 0 lets everything pass, tokens out of range too.
      const unsigned tokens = scores[tile].tokens & bits_between(begin - first, end - first);
      if (tokens != 0) {
        write_candidates(state, group, unit * kUnitTokens + first, tokens, scores[tile].values);
      }
    }
  }
}

// Persistent blocks; each warp streams its own segments through its own ring of stages.
template <int kBits, int kQuads, int kChunks, bool kTogether>
__global__ __launch_bounds__(kMaxPassWarps * 32,
                             1) void sign_pass(const __grid_constant__ FilterArgs args, int stages,
                                               bool again) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte shared[];  // of every warp its norms and its stages
  __shared__ std::int64_t starts[transfer::kMaxBatch + 1];
  const int kv_heads = args.request.kv.kv_heads;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(args.request.params);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::byte* own = shared + warp * (kWarpNormBytes + stages * unit_bytes(chunks));
  auto* norms = reinterpret_cast<TokenNorms*>(own);
  UnitRing<kChunks> ring(chunks, own + kWarpNormBytes, stages);
  transfer::cuda::wait_for_previous();
  int wanted = 0;
  if (again) {
    const int groups = args.request.rows.count * kv_heads;
    for (int base = 0; base < groups; base += static_cast<int>(blockDim.x)) {
      const int i = base + static_cast<int>(threadIdx.x);
      wanted += __syncthreads_count(i < groups && args.filter.groups[i].again != 0 ? 1 : 0);
    }
    if (wanted == 0) return;
  }
  if (threadIdx.x == 0) count_segments(args, starts);
  __syncthreads();

  WorkShare share(starts[args.request.rows.count], static_cast<int>(blockIdx.x) * warps + warp,
                  static_cast<int>(gridDim.x) * warps, args.filter.ticket);
  RunWalk walk(args, starts, share.first(), share.count());
  AgainWalk again_walk(args, wanted);
  SegmentState<kQuads> state;
  QuadColumns<kBits, kChunks> columns[kQuads];
  for (SegmentRun run;;) {
    if (again) {
      if (!again_walk.next(run)) break;
    } else if (!walk.next(run)) {
      if (!share.take()) break;
      walk = RunWalk(args, starts, share.first(), share.count());
      continue;
    }
    ring.open(args, run);
    state.open_run(args, run);
    ring.start();
    const std::int64_t group_index = std::int64_t{run.row} * kv_heads + run.kv_head;
    for (int quad = 0; quad < kQuads; ++quad) {
      columns[quad].load(args.filter.columns + group_index * args.filter.columns_stride +
                         quad * chunks * (kBits / 2) * 32);
    }
    for (int segment = 0; segment < run.count; ++segment) {
#pragma unroll 1
      for (int unit = 0; unit < kUnitsPerSegment; ++unit) {
        pass_unit<kBits, kQuads, kChunks, kTogether>(args, state, columns, unit, ring.wait(),
                                                     norms);
        ring.release();
      }
      state.close(args);
    }
  }
#endif
}

using PassKernel = void (*)(FilterArgs, int, bool);

template <bool kTogether>
PassKernel pass_kernel(const SelectRequest& request) {
  const int chunks = sign_chunks(request.params);
  const int group = request.kv.group();
  const int bits = filter_weight_bits(request.params, group);
  if (bits == 8) return sign_pass<8, 4, 0, kTogether>;
  if (bits == 6) return sign_pass<6, 1, 2, kTogether>;
  if (group <= 4 && chunks == 1) return sign_pass<4, 1, 1, kTogether>;
  if (group <= 4 && chunks == 2) return sign_pass<4, 1, 2, kTogether>;
  if (group <= 8 && chunks == 2) return sign_pass<4, 2, 2, kTogether>;
  return group <= 4 ? sign_pass<4, 1, 0, kTogether> : sign_pass<4, 4, 0, kTogether>;
}

}  // namespace

void enqueue_sign_pass(cudaStream_t stream, const FilterArgs& args, bool again) {
  const int chunks = sign_chunks(args.request.params);
  const int stage_bytes = unit_bytes(chunks);
  // Long bit strings: fewer warps, so that each has at least two stages to copy ahead.
  constexpr int kRingBytes = 222 * 1024;
  const auto stages_of = [&](int warps) {
    return (kRingBytes / warps - kWarpNormBytes) / stage_bytes;
  };
  int warps = kMaxPassWarps;
  while (warps > 2 && stages_of(warps) < 2) warps /= 2;
  const int stages = std::min(stages_of(warps), UnitRing<0>::kMaxStages);
  const bool together =
      args.request.params.selection == Selection::kPerKvHead || args.request.kv.group() == 1;
  const PassKernel kernel =
      together ? pass_kernel<true>(args.request) : pass_kernel<false>(args.request);
  const int shared = warps * (stages * stage_bytes + kWarpNormBytes);
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const auto grid = static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount));
  transfer::cuda::launch_overlapping(stream, kernel, dim3(grid), static_cast<unsigned>(warps * 32),
                                     static_cast<std::size_t>(shared), args, stages, again);
}

}  // namespace kvtier::scoring::cuda
