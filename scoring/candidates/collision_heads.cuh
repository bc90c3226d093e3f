#pragma once

#include "scoring/soft/spans.cuh"

#include <cstdint>

/// Every head's value of every token.
namespace kvtier::scoring::cuda {

/// What the pass needs of a (query, KV head), in shared memory.
struct GroupState {
  FilterHead heads[kMaxGroup];
  HeadFactors factors[kMaxGroup];
};

/// Fills it. All threads; no barrier.
__device__ inline void open_group(const FilterArgs& args, std::int64_t first_head, int group,
                                  GroupState& state) {
  if (threadIdx.x >= group) return;
  const std::int64_t head = first_head + threadIdx.x;
  state.heads[threadIdx.x] = args.filter.heads[head];
  state.factors[threadIdx.x] = head_factors(args.request.params, args.tables.scalars[head]);
}

/// Soft collisions, from what `fill_pairs` has filled.
template <bool kP10L60>
struct SoftCollisions {
  static constexpr bool kHeld = kP10L60;  // sketches wait in registers
  static constexpr int kHeads = kP10L60 ? 4 : kMaxGroup;
  const std::uint32_t* tables;
  TableShape shape;
  int group;

  /// What sums are to be multiplied by.
  [[nodiscard]] __device__ float scale() const { return shape.sum_scale(); }
  __device__ void sums(const P10L60Code& code, float (&values)[kHeads]) const {
    p10_l60_sums(tables, code, values);
  }
  __device__ void sums(const uint4* chunks, float (&values)[kHeads]) const {
    any_sums(shape, tables, group, chunks, values);
  }
};

/// Goes through the warp's segments of a span: writes candidates and the heads' sums of shares.
template <typename Collisions>
__device__ void head_segments(const FilterArgs& args, const GroupState& state, const Span& span,
                              const QueryPlan& plan, const Start<Collisions::kHeld>& first,
                              const Collisions& collisions_of) {
  const SelectRequest& request = args.request;
  const hashing::SketchGeometry& sketch = request.sketch;
  const ScoreParams& params = request.params;
  const int group = request.kv.group();
  const bool together = params.selection == Selection::kPerKvHead || group == 1;
  const bool logit_like = params.logit_like();
  const float threshold = args.filter.groups[span.group_index].threshold;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t segment = span.begin + threadIdx.x / 32;
  if (segment >= span.end) return;
  const Lane mine(sketch, span.kv_head);
  constexpr int kHeads = Collisions::kHeads;
  Cursor cursor = first.cursor;
  // Both norms of a token that is not finite say so.
  const bool calibrated = params.weighting == ValueWeighting::kCalibrated;
  std::uint16_t value_ahead = first.value_norm;
  [[maybe_unused]] P10L60Code code_ahead = first.code;
  std::uint16_t key_ahead = calibrated ? mine.key_norm(cursor, 0) : value_ahead;
  for (; segment < span.end; segment += kPassWarps) {
    const Cursor following(plan, segment + kPassWarps < span.end ? segment + kPassWarps : segment);
    const Eligible eligible(plan, segment);
    const std::int64_t place = span.group_index * args.segments + segment;
    const std::int64_t slots = span.group_index * args.max_tokens + segment * kSegmentTokens;
    int written = 0;
    float totals[kHeads] = {};
    for (int g = 0; g < kGroupsOf32; ++g) {
      const bool more = g + 1 < kGroupsOf32;
      const Cursor next(more ? cursor.block : following.block,
                        more ? cursor.in_block : following.in_block);
      const int next_group = more ? g + 1 : 0;
      const Norms norms = make_norms(key_ahead, value_ahead);
      value_ahead = mine.value_norm(next, next_group);
      key_ahead = calibrated ? mine.key_norm(next, next_group) : value_ahead;
      float values[kHeads];
      if constexpr (Collisions::kHeld) {
        const P10L60Code code = code_ahead;
        code_ahead = read_p10_l60(mine.chunks(next, next_group));
        collisions_of.sums(code, values);
      } else {
        collisions_of.sums(mine.chunks(cursor, g), values);
      }
      const bool inside = eligible.has(g * 32 + lane);
      float sum = 0.0F;
      bool pass = false;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= group) break;
        const float collisions = values[h] * collisions_of.scale();
        values[h] = norms.finite ? collision_value(params, state.factors[h], collisions, norms.key,
                                                   norms.value)
                                 : kLowestValue;
        const float share =
            inside ? share_of(logit_like, values[h], state.heads[h].reference) : 0.0F;
        totals[h] += share;
        sum += share;
        pass = pass || share >= state.heads[h].threshold;
      }
      if (together) pass = sum >= threshold;
      const unsigned votes = __ballot_sync(kFullWarp, pass && inside);
      if ((votes >> lane & 1U) != 0) {
        const std::int64_t slot = slots + written + __popc(votes & lanes_below());
        args.ids[slot] = static_cast<std::int32_t>(segment * kSegmentTokens + g * 32 + lane);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h >= group) break;
          args.values[slot * group + h] = values[h];
        }
      }
      written += __popc(votes);
    }
    if (lane == 0) args.filter.counts[place] = static_cast<std::uint32_t>(written);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= group) break;
      const float total = warp_sum(totals[h]);
      if (lane == 0) args.filter.partials[place * group + h] = total;
    }
    cursor = following;
  }
}

}  // namespace kvtier::scoring::cuda
