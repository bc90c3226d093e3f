#include "scoring/candidates/collision_heads.cuh"
#include "transfer/device/launch_cuda.cuh"
#include "transfer/device/tensor_core.cuh"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

/// One selection per KV head, scores that are sums of collisions. Such a set ranks by a sum over
/// heads, sum_h r_h A_h[high] B_h[low] with r the references, which four heads' entries in bytes
/// give in one dot product. Bytes are rounded up, so that no token's sum is below its true one, and
/// only tokens that may reach the threshold are scored head by head.
///
/// The normalisers need every head's sum over all tokens. Those of candidates are added up, and
/// each other token counts with the mean of those in the sample that are below the threshold, as
/// long as that cannot move a token further than a near-tie (docs/algorithm.md, section "Select").
/// Where it could, the pass scores some of the other tokens too, as many as the mean needs; and
/// where those were too many, it scores every token head by head.

/// Scale of the bytes of a table's halves, whose greatest entries are `peaks`: the products of
/// bytes are in proportion to those of entries times the reference, for all heads and tables alike.
/// `most`: the greatest of all products.
__device__ float2 byte_factors(float2 peaks, float reference, float most) {
  constexpr float kRoundUp = 1.0F + 2e-6F;  // the quotients and the root are not quite exact
  const float product = peaks.x * peaks.y * reference;
  if (!(product > 0.0F)) return make_float2(0.0F, 0.0F);
  float root = 0.0F;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(__fdividef(product, most)));
  root *= 255.0F * kRoundUp;
  return make_float2(__fdividef(root, peaks.x), __fdividef(root, peaks.y));
}
__device__ std::uint32_t byte_of(float entry, float factor) {
  return min(__float2uint_ru(entry * factor), 255U);
}
/// What a sum of products is to be multiplied by to be no less than the sum of shares.
__device__ float byte_unit(float most) { return most / (255.0F * 255.0F) * (1.0F + 1e-5F); }

// Positive floats compare as their bits do.
__device__ float warp_peak(float value) {
  return __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(value)));
}
__device__ float block_peak(float value) {
  return block_reduce(value, [](float a, float b) { return fmaxf(a, b); });
}

/// Entries of up to four heads' tables of the P10 L60 shape, on their way to shared memory.
constexpr int kP10L60Entries = kP10L60Tables * kP10L60RowBytes / 4;
__device__ void start_p10_l60(const QueryTables& tables, std::int64_t first_head, int group,
                              float* entries) {
  const float* from = tables.entries + first_head * tables.entries_per_head;
#pragma unroll 1
  for (int h = 0; h < group; ++h) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kP10L60Entries / 4; i += kPassThreads) {
      transfer::cuda::copy_async_16(
          transfer::cuda::shared_address(entries + h * kP10L60Entries + i * 4),
          from + h * tables.entries_per_head + i * 4, true);
    }
  }
}

/// Fills `pairs` as `fill_pairs` does and `bytes` [quads][entries] from `entries`, and returns the
/// `byte_unit`. A warp takes a table, a lane an entry of each half; `factors` [tables][4] has their
/// peaks on the way. Begins and ends with a barrier.
__device__ float fill_p10_l60(const float* entries, int group, const float* references,
                              float2* factors, std::uint32_t* pairs, std::uint32_t* bytes) {
  constexpr int kRow = kP10L60RowBytes / 4;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The maximum turns NaN, of a query that is not finite, into 0.
  const auto entry_of = [&](int h, int place) {
    return h < group ? fmaxf(entries[h * kP10L60Entries + place], 0.0F) : 0.0F;
  };
  transfer::cuda::copy_async_wait<0>();
  __syncthreads();
#pragma unroll 1
  for (int table = warp; table < kP10L60Tables; table += kPassWarps) {
    constexpr float kScale = 32.0F;
    const int place = table * kRow + lane;
    float of[4][2];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      of[h][0] = entry_of(h, place);
      of[h][1] = entry_of(h, place + 32);
      const float2 peaks = {warp_peak(of[h][0]), warp_peak(of[h][1])};
      if (lane == 0) factors[table * 4 + h] = peaks;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // pair i / 2, half i % 2
      const int h = i / 2 * 2;
      const __half2 both = __floats2half2_rn(of[h][i % 2] * kScale, of[h + 1][i % 2] * kScale);
      pairs[i / 2 * kP10L60Entries + place + i % 2 * 32] =
          *reinterpret_cast<const std::uint32_t*>(&both);
    }
  }
  __syncthreads();
  static_assert(kP10L60Tables * 4 <= kPassThreads);
  const auto thread = static_cast<int>(threadIdx.x);
  const bool mine = thread < kP10L60Tables * 4;
  const float2 peaks = mine ? factors[thread] : make_float2(0.0F, 0.0F);
  const float reference = references[thread % 4];
  const float most = block_peak(peaks.x * peaks.y * reference);
  if (mine) factors[thread] = byte_factors(peaks, reference, most);
  __syncthreads();
#pragma unroll 1
  for (int table = warp; table < kP10L60Tables; table += kPassWarps) {
    const int place = table * kRow + lane;
    std::uint32_t high = 0;
    std::uint32_t low = 0;
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float2 factor = factors[table * 4 + h];
      high |= byte_of(entry_of(h, place), factor.x) << (8 * h);
      low |= byte_of(entry_of(h, place + 32), factor.y) << (8 * h);
    }
    bytes[place] = high;
    bytes[place + 32] = low;
  }
  __syncthreads();
  return byte_unit(most);
}

/// The same for any shape, but for the pairs.
__device__ float fill_bytes(const QueryTables& tables, const TableShape& shape,
                            std::int64_t first_head, int group, const float* references,
                            std::uint32_t* bytes) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto row_of = [&](int head, int table) {
    return tables.entries + (first_head + head) * tables.entries_per_head + table * shape.row;
  };
  const auto peaks_of = [&](const float* row) {
    float high = 0.0F;
    float low = 0.0F;
#pragma unroll 1
    for (int i = lane; i < shape.row; i += 32) {
      const float entry = __ldg(row + i);
      (i < shape.high_size ? high : low) = fmaxf(i < shape.high_size ? high : low, entry);
    }
    return make_float2(warp_peak(high), warp_peak(low));
  };
  float most = 0.0F;
#pragma unroll 1
  for (int i = warp; i < shape.tables * group; i += kPassWarps) {
    const int head = i % group;
    const float2 peaks = peaks_of(row_of(head, i / group));
    most = fmaxf(most, peaks.x * peaks.y * references[head]);
  }
  most = block_peak(most);

  const int quads = (group + 3) / 4;
#pragma unroll 1
  for (int i = warp; i < shape.tables * quads; i += kPassWarps) {
    const int table = i / quads;
    const int quad = i - table * quads;
    std::uint32_t* to = bytes + (quad * shape.tables + table) * shape.row;
    for (int entry = lane; entry < shape.row; entry += 32) to[entry] = 0;
#pragma unroll 1
    for (int head = quad * 4; head < min(quad * 4 + 4, group); ++head) {
      const float* row = row_of(head, table);
      const float2 factors = byte_factors(peaks_of(row), references[head], most);
#pragma unroll 1
      for (int entry = lane; entry < shape.row; entry += 32) {
        const float factor = entry < shape.high_size ? factors.x : factors.y;
        to[entry] |= byte_of(fmaxf(__ldg(row + entry), 0.0F), factor) << (8 * (head % 4));
      }
    }
  }
  __syncthreads();
  return byte_unit(most);
}

/// Tokens that wait for their exact score, in a ring: a full warp's and one more push.
constexpr int kQueueTokens = 64;
constexpr std::uint32_t kNoSlot = 0xFFFFFFFFU;
struct Waiting {
  std::uint32_t slot;  // of a candidate, or kNoSlot
  std::uint32_t token;
  float weight;  // of its collisions; negative: not finite
};
/// Of the P10 L60 shape the sketches wait in shared memory too, since L2 does not keep them so
/// long.
constexpr int kQueueBytes = kPassWarps * kQueueTokens * P10L60Code::kChunks * hashing::kChunkBytes;

__device__ uint4* queue_chunks(std::uint32_t* after_tables, unsigned entry) {
  const unsigned place = threadIdx.x / 32 * kQueueTokens + entry % kQueueTokens;
  return reinterpret_cast<uint4*>(after_tables) + place * P10L60Code::kChunks;
}

struct SumShared {
  SpanShared spans;
  GroupState state;
  bool dispersed;
  std::uint32_t scored_part;  // of all tokens below the threshold, times 2^32
  SampleRest rests[kMaxGroup];
  float references[kMaxGroup];
  float others[kMaxGroup];  // mean share of tokens below the threshold
  float2 factors[kP10L60Tables * 4];
  Waiting queues[kPassWarps][kQueueTokens];
};

struct SumState {
  QueryPlan plan;
  TableShape shape;
  int group;
  float unit;  // upper bound of a share, per unit of the byte sums
  float threshold;
  unsigned queue_begin = 0;
  int queued = 0;
  std::int64_t counted = 0;   // eligible tokens of the warp that are below the threshold
  float total = 0.0F;         // lane h: shares of head h of the warp's candidates
  float others_total = 0.0F;  // the same of those that are counted as `others`
  int others = 0;             // of the warp's tokens below the threshold
};

/// Tells whether a token below the threshold is scored too. Multiples of the golden ratio spread
/// evenly, whatever the part, and have no period.
__device__ bool is_scored(const SumShared& shared, std::uint32_t token) {
  return token * 0x9E3779B1U < shared.scored_part;
}

/// Scores the first `count` waiting tokens head by head.
template <bool kP10L60>
__device__ void settle(const FilterArgs& args, const SumShared& shared, const Span& span,
                       const std::uint32_t* pairs, std::uint32_t* queue, int count,
                       SumState& state) {
  const SelectRequest& request = args.request;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned entry = state.queue_begin + static_cast<unsigned>(lane < count ? lane : 0);
  const Waiting mine = shared.queues[threadIdx.x / 32][entry % kQueueTokens];
  const bool finite = mine.weight >= 0.0F;
  const float factor = state.shape.sum_scale() * mine.weight;

  constexpr int kHeads = kP10L60 ? 4 : kMaxGroup;
  float sums[kHeads];
  if constexpr (kP10L60) {
    p10_l60_sums(pairs, P10L60Code(queue_chunks(queue, entry), 1), sums);
  } else {
    const std::byte* block = state.plan.blocks[mine.token / hashing::kBlockTokens];
    const int in_block = static_cast<int>(mine.token % hashing::kBlockTokens);
    any_sums(state.shape, pairs, state.group,
             reinterpret_cast<const uint4*>(block +
                                            request.sketch.chunk_offset(span.kv_head, 0, in_block)),
             sums);
  }
  float share = 0.0F;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= state.group) break;
    sums[h] = finite ? sums[h] * factor : kLowestValue;
    if (finite) share += sums[h] * shared.references[h];
    if (lane < count && mine.slot != kNoSlot) {
      args.values[(span.group_index * args.max_tokens + mine.slot) * state.group + h] = sums[h];
    }
  }
  const bool counts = lane < count && finite && share >= state.threshold;
  state.counted -= __popc(__ballot_sync(kFullWarp, counts));
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= state.group) break;
    const float all = warp_sum(counts ? sums[h] * shared.references[h] : 0.0F);
    if (lane == h) state.total += all;
  }
  if (shared.scored_part == 0) return;
  const bool other = lane < count && !counts && is_scored(shared, mine.token);
  state.others += __popc(__ballot_sync(kFullWarp, other));
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= state.group) break;
    const float all = warp_sum(other && finite ? sums[h] * shared.references[h] : 0.0F);
    if (lane == h) state.others_total += all;
  }
}

/// Byte sums of one token of any shape.
__device__ std::uint32_t any_byte_sum(const TableShape& shape, const std::uint32_t* bytes,
                                      int group, const uint4* chunks) {
  const std::uint32_t low_mask = (1U << shape.low_bits) - 1;
  std::uint32_t sum = 0;
  walk_any(shape, chunks, [&](int table, std::uint32_t bucket) {
    const std::uint32_t* high = bytes + table * shape.row + (bucket >> shape.low_bits);
    const std::uint32_t* low = bytes + table * shape.row + shape.high_size + (bucket & low_mask);
    for (int quad = 0; quad * 4 < group; ++quad) {
      sum = __dp4a(high[quad * shape.entries()], low[quad * shape.entries()], sum);
    }
  });
  return sum;
}

/// Goes through the warp's segments of a span.
template <bool kP10L60>
__device__ void sum_segments(const FilterArgs& args, SumShared& shared, const Span& span,
                             const std::uint32_t* pairs, const std::uint32_t* bytes,
                             std::uint32_t* queue, const Start<kP10L60>& first, bool again,
                             SumState& state) {
  const hashing::SketchGeometry& sketch = args.request.sketch;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool weighted = args.request.params.weighting == ValueWeighting::kLinear;
  std::int64_t segment = span.begin + warp;
  if (segment >= span.end) return;
  const Lane mine(sketch, span.kv_head);
  Cursor cursor = first.cursor;
  std::uint16_t ahead = first.value_norm;
  [[maybe_unused]] P10L60Code code_ahead = first.code;
  for (; segment < span.end; segment += kPassWarps) {
    // Past the last segment it is read once more.
    const Cursor following(state.plan,
                           segment + kPassWarps < span.end ? segment + kPassWarps : segment);
    const Eligible eligible(state.plan, segment);
    const std::int64_t place = span.group_index * args.segments + segment;
    std::int32_t* ids = args.ids + span.group_index * args.max_tokens;
    int written = 0;
    for (int g = 0; g < kGroupsOf32; ++g) {
      const bool more = g + 1 < kGroupsOf32;
      const Cursor next(more ? cursor.block : following.block,
                        more ? cursor.in_block : following.in_block);
      const int next_group = more ? g + 1 : 0;
      const std::uint16_t norm = ahead;
      ahead = mine.value_norm(next, next_group);
      std::uint32_t sum = 0;
      [[maybe_unused]] const P10L60Code code = code_ahead;
      if constexpr (kP10L60) {
        std::uint32_t halves[2] = {0, 0};
        code_ahead = read_p10_l60(mine.chunks(next, next_group));
        walk_p10_l60(code, [&](int table, std::uint32_t high, std::uint32_t low) {
          const std::uint32_t a = word_at(bytes, high + table * kP10L60RowBytes);
          const std::uint32_t b =
              word_at(bytes, low + table * kP10L60RowBytes + kP10L60RowBytes / 2);
          halves[table % 2] = __dp4a(a, b, halves[table % 2]);
        });
        sum = halves[0] + halves[1];
      } else {
        sum = any_byte_sum(state.shape, bytes, state.group, mine.chunks(cursor, g));
      }
      const bool finite = norm != hashing::kNonfiniteNorm;
      float bound = static_cast<float>(sum) * state.unit;
      if (weighted) bound *= norm_value(norm);
      const auto token = static_cast<std::uint32_t>(segment * kSegmentTokens + g * 32 + lane);
      const bool inside = eligible.has(g * 32 + lane);
      const bool pass = inside && (finite ? bound : 0.0F) >= state.threshold;
      const bool waits = pass || (inside && is_scored(shared, token));
      const unsigned votes = __ballot_sync(kFullWarp, pass);
      const unsigned waiting = __ballot_sync(kFullWarp, waits);
      if (waits) {
        const auto slot = static_cast<std::uint32_t>(segment * kSegmentTokens + written +
                                                     __popc(votes & lanes_below()));
        const unsigned entry =
            state.queue_begin +
            static_cast<unsigned>(state.queued + __popc(waiting & lanes_below()));
        if (pass) ids[slot] = static_cast<std::int32_t>(token);
        const float weight = weighted ? norm_value(norm) : 1.0F;
        shared.queues[warp][entry % kQueueTokens] = {pass ? slot : kNoSlot, token,
                                                     finite ? weight : -1.0F};
        if constexpr (kP10L60) {
          uint4* to = queue_chunks(queue, entry);
#pragma unroll
          for (int chunk = 0; chunk < P10L60Code::kChunks; ++chunk) to[chunk] = code.chunk(chunk);
        }
      }
      written += __popc(votes);
      state.queued += __popc(waiting);
      const bool last = segment + kPassWarps >= span.end && g + 1 == kGroupsOf32;
      while (state.queued >= 32 || (last && state.queued > 0)) {
        const int count = min(state.queued, 32);
        __syncwarp();
        settle<kP10L60>(args, shared, span, pairs, queue, count, state);
        state.queued -= count;
        state.queue_begin += static_cast<unsigned>(count);
        __syncwarp();
      }
    }
    state.counted += eligible.end - eligible.begin;
    if (lane == 0) args.filter.counts[place] = static_cast<std::uint32_t>(written);
    if (lane < state.group) {
      float total = 0.0F;
      if (segment + kPassWarps >= span.end) {
        const float mean = state.others > 0 ? state.others_total / static_cast<float>(state.others)
                                            : shared.others[lane];
        total = state.total + static_cast<float>(state.counted) * mean;
      }
      // References that the first pass has settled stay: they add up to 1.
      if (again) total = segment == first_segment(state.plan) ? 1.0F : 0.0F;
      args.filter.partials[place * state.group + lane] = total;
    }
    cursor = following;
  }
}

/// Reads what the sample tells of tokens below the threshold. One warp.
__device__ void read_others(const FilterArgs& args, const QueryPlan& plan, std::int64_t first_head,
                            int group, float threshold, bool again, SumShared& shared) {
  const int head = static_cast<int>(threadIdx.x);
  // Lane 4 b + h reads what block b tells of head h.
  static_assert(kSampleBlocks == 8);
#pragma unroll 1
  for (int first = 0; first < group; first += 4) {
    const int mine = min(first + head % 4, group - 1);
    SampleRest part = args.filter.others[(first_head + mine) * kSampleBlocks + head / 4];
    for (int offset = 4; offset < 32; offset *= 2) {
      part.count += __shfl_xor_sync(kFullWarp, part.count, offset);
      part.sum += __shfl_xor_sync(kFullWarp, part.sum, offset);
      part.square += __shfl_xor_sync(kFullWarp, part.square, offset);
      part.least = fminf(part.least, __shfl_xor_sync(kFullWarp, part.least, offset));
      part.most = fmaxf(part.most, __shfl_xor_sync(kFullWarp, part.most, offset));
    }
    if (head < 4) shared.rests[mine] = part;
  }
  __syncwarp();
  SampleRest all{0.0F, 0.0F, 0.0F, INFINITY, 0.0F};
  if (head < group) all = shared.rests[head];
  const float mean = all.count > 0.0F ? all.sum / all.count : 0.0F;
  const float deviation = all.count > 0.0F ? sqrtf(all.square / all.count) : 0.0F;
  // Error of the mean beside that which all heads share, and how far it can move a token that is
  // at the threshold: by no more than the heads' shares of it differ.
  float error = mean > 0.0F ? deviation / (mean * sqrtf(all.count)) : 0.0F;
  float sum = head < group ? mean : 0.0F;
  float most_deviation = deviation;
  for (int offset = 16; offset > 0; offset /= 2) {
    error = fmaxf(error, __shfl_xor_sync(kFullWarp, error, offset));
    sum += __shfl_xor_sync(kFullWarp, sum, offset);
    most_deviation = fmaxf(most_deviation, __shfl_xor_sync(kFullWarp, most_deviation, offset));
  }
  constexpr float kDeviations = 3.0F;
  // Of the range of scores: three quarters of a near-tie. Rounding of sums has the last.
  constexpr float kMostMoved = 0.75F * 0x1p-9F;
  if (head == 0) {
    const float differ = sum > 0.0F ? fminf(kDeviations * most_deviation / sum, 1.0F) : 0.0F;
    const float moved = kDeviations * error * differ * threshold;
    // With few tokens the sample is all of them; with no threshold, all are candidates.
    const auto tokens = static_cast<float>(plan.end - plan.begin);
    const bool exact = plan.end - plan.begin <= kSamples / 2;
    const float limit = kMostMoved * (all.most - all.least);
    float part = 0.0F;  // of the tokens: the error falls as the root of their number
    if (!exact && moved > limit) part = 1.2F * all.count * moved * moved / (limit * limit * tokens);
    // Another token costs some two of those that are bounded.
    constexpr float kMostPart = 0.25F;
    shared.dispersed = threshold <= 0.0F || !(part <= kMostPart);
    shared.scored_part = 0;
    if (!again && !shared.dispersed) {
      shared.scored_part = static_cast<std::uint32_t>(part * 0x1p32F);
    }
  }
  shared.references[head % kMaxGroup] = 0.0F;
  __syncwarp();
  if (head >= group) return;
  shared.references[head] = args.filter.heads[first_head + head].reference;
  shared.others[head] = mean;
}

// Persistent blocks; a warp goes through segments of its own.
template <bool kP10L60>
__global__ __launch_bounds__(kPassThreads, 1) void sum_pass(const __grid_constant__ FilterArgs args,
                                                            int tile_segments, bool again) {
  extern __shared__ __align__(128) std::uint32_t tables[];  // half pairs, bytes, queue
  __shared__ SumShared shared;
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();
  const SelectRequest& request = args.request;
  const int group = request.kv.group();
  const TableShape shape(request.params);
  std::uint32_t* bytes = tables + stored_pairs(shape, group) * shape.entries();
  std::uint32_t* queue = bytes + (group + 3) / 4 * shape.entries();
  for_each_span(args, shared.spans, tile_segments, again, [&](const Span& span) {
    __syncthreads();  // the tables of the span before are no longer read
    const std::int64_t first_head = span.group_index * group;
    const QueryPlan plan = args.plans[span.query_index];
    const float threshold = args.filter.groups[span.group_index].threshold;
    open_group(args, first_head, group, shared.state);
    auto* entries = reinterpret_cast<float*>(queue);  // which is empty as yet
    if constexpr (kP10L60) start_p10_l60(args.tables, first_head, group, entries);
    const Start<kP10L60> first(request.sketch, plan, span);
    float unit = 0.0F;
    if (threadIdx.x < 32) read_others(args, plan, first_head, group, threshold, again, shared);
    if constexpr (kP10L60) {
      unit = fill_p10_l60(entries, group, shared.references, shared.factors, tables, bytes);
    } else {
      fill_pairs(args.tables, shape, first_head, group, tables);
      __syncthreads();
      unit = fill_bytes(args.tables, shape, first_head, group, shared.references, bytes);
    }
    SumState state{
        .plan = plan, .shape = shape, .group = group, .unit = unit, .threshold = threshold};
    // The references that the first pass has settled stay.
    if (shared.dispersed && !again) {
      head_segments(args, shared.state, span, plan, first,
                    SoftCollisions<kP10L60>{tables, shape, group});
    } else {
      sum_segments<kP10L60>(args, shared, span, tables, bytes, queue, first, again, state);
    }
  });
}

}  // namespace

int collision_queue_bytes() { return kQueueBytes; }

CollisionPass collision_sums_pass(bool p10_l60) {
  return p10_l60 ? sum_pass<true> : sum_pass<false>;
}

}  // namespace kvtier::scoring::cuda
