#include "scoring/generic/recall_cuda.cuh"
#include "scoring/score_math.h"

#include <cstdint>
#include <limits>

namespace kvtier::scoring::cuda {
namespace {

/// Of the logits of eligible tokens, their scores without value norms.
struct Moments {
  double sum = 0.0;
  double squares = 0.0;
  double key_squares = 0.0;
  float max = -std::numeric_limits<float>::infinity();
  std::uint32_t count = 0;

  __device__ void add(float x, float key) {
    sum += static_cast<double>(x);
    squares += static_cast<double>(x) * static_cast<double>(x);
    key_squares += static_cast<double>(key) * static_cast<double>(key);
    max = fmaxf(max, x);
    ++count;
  }
  __device__ void merge(const Moments& other) {
    sum += other.sum;
    squares += other.squares;
    key_squares += other.key_squares;
    max = fmaxf(max, other.max);
    count += other.count;
  }
};
// Those of a head's tiles take the place of the counts of ties, which come later.
static_assert(sizeof(Moments) == TileWork::kTileSegments * sizeof(std::uint32_t));

// logit = mean + slope * (x - mean) + slope * noise / 2, where x is the score without value norm.
__device__ void settle(const GenericArgs& args, const Moments& all, float query_norm,
                       HeadEstimate& estimate) {
  if (all.count == 0) return;
  const double mean = all.sum / all.count;
  const double variance = fmax(0.0, all.squares / all.count - mean * mean);
  const auto norm = static_cast<double>(query_norm);
  const double noise = args.recall.noise * norm * norm * all.key_squares / all.count;
  const double slope = variance > noise ? 1.0 - noise / variance : 0.0;
  const double base = (1.0 - slope) * mean + slope * noise / 2.0;
  const double unit = base + slope * static_cast<double>(all.max);
  estimate.slope = static_cast<float>(slope);
  estimate.offset = static_cast<float>(base - unit);
  estimate.log_unit = static_cast<float>(unit);
}

// Grid: tiles x query heads x queries. The last block of a head merges the tiles in their order.
// kMoments: makes the estimates of a recall target, too.
template <bool kMoments>
__global__ __launch_bounds__(kTileThreads) void normalise_heads(
    const __grid_constant__ GenericArgs args) {
  const TileWork work(args);
  if (!work.any()) return;
  const float* scores = args.row(args.workspace.scores, work.index);
  const int kv_head = static_cast<int>(blockIdx.y) / args.request.kv.group;
  const bool logit_like = args.request.params.logit_like();

  LogSum mine;
  [[maybe_unused]] Moments moments;
  work.visit_tokens([&](std::int64_t token) {
    const float score = scores[token];
    if (score == kLowestScore) return;
    if (logit_like) {
      mine.add(score);
    } else {
      mine.sum += score;
    }
    if constexpr (kMoments) {
      const Norms norms = norms_of(args, work.plan, kv_head, token);
      moments.add(score - log_value(args, norms), norms.key);
    }
  });
  if (!logit_like) mine.max = 0.0F;
  const LogSum of_tile = block_log_sum<kTileThreads>(mine);
  float2* partials = args.scratch.partials + work.index * args.scratch.tiles;
  if (threadIdx.x == 0) partials[blockIdx.x] = make_float2(of_tile.max, of_tile.sum);
  [[maybe_unused]] auto* const parts =
      reinterpret_cast<Moments*>(args.scratch.ties + work.index * args.scratch.segments);
  if constexpr (kMoments) {
    moments = block_merge<kTileThreads>(moments);
    if (threadIdx.x == 0) parts[blockIdx.x] = moments;
  }
  if (!last_block(&args.scratch.states[work.index].ticket, work.count())) return;

  LogSum merged;
  moments = {};
  for (std::int64_t i = work.first + threadIdx.x; i <= work.last; i += kTileThreads) {
    const float2 of_part = __ldcg(partials + i);
    merged.merge({of_part.x, of_part.y});
    if constexpr (kMoments) {
      const auto* words = reinterpret_cast<const uint4*>(parts + i);
      const uint4 raw[2] = {__ldcg(words), __ldcg(words + 1)};
      Moments others;
      memcpy(&others, raw, sizeof(others));
      moments.merge(others);
    }
  }
  LogSum all = block_log_sum<kTileThreads>(merged);
  if constexpr (kMoments) moments = block_merge<kTileThreads>(moments);
  if (threadIdx.x != 0) return;
  HeadEstimate& estimate = args.scratch.estimates[work.index];
  if (args.request.params.threshold > 0.0F && isfinite(estimate.log_static_weighted)) {
    all.merge({estimate.log_static_weighted, 1.0F});
  }
  args.scratch.normalisers[work.index] = logit_like ? all.log() : all.sum;
  if constexpr (kMoments) {
    settle(args, moments, args.workspace.tables.scalars[work.index].query_norm, estimate);
  }
}

// `group` heads share a score, which is written for `copies` KV heads. Grid: tiles x such groups x
// queries.
__global__ __launch_bounds__(kTileThreads) void combine_heads(
    const __grid_constant__ GenericArgs args, int group, int copies) {
  const TileWork work(args);
  if (!work.any()) return;
  const std::int64_t query_index = blockIdx.z;
  const std::int64_t first_head = query_index * args.request.kv.query_heads() + blockIdx.y * group;
  const float* normalisers = args.scratch.normalisers + first_head;
  const bool logit_like = args.request.params.logit_like();
  const auto heads = static_cast<float>(group);
  const std::int64_t max_tokens = args.workspace.limits.max_tokens;
  float* combined = args.row(args.workspace.combined,
                             query_index * args.request.kv.kv_heads + blockIdx.y * copies);

  work.visit_tokens([&](std::int64_t token) {
    const float* scores = args.row(args.workspace.scores, first_head) + token;
    LogSum exponentials;
    float shares = 0.0F;
    bool finite = false;
    for (int h = 0; h < group; ++h) {
      const float score = scores[h * max_tokens];
      if (score == kLowestScore) continue;
      finite = true;
      if (logit_like) {
        exponentials.add(score - normalisers[h]);
      } else if (normalisers[h] > 0.0F) {
        shares += score / normalisers[h];
      }
    }
    const float mean = logit_like ? exponentials.log() - logf(heads) : shares / heads;
    const float score = finite ? settled_score(mean) : kLowestScore;
    for (int i = 0; i < copies; ++i) combined[i * max_tokens + token] = score;
  });
}

}  // namespace

void enqueue_normalisers(const Stage& stage, const RecallParams& recall_params) {
  const GenericArgs args = generic_args(stage, recall_params);
  launch(stage, recall_params.active ? normalise_heads<true> : normalise_heads<false>,
         tile_grid(stage, args.request.kv.query_heads()), args);
}

void enqueue_combine(const Stage& stage) {
  const transfer::KvGeometry& kv = stage.request.kv;
  const int copies = stage.per_sequence() ? kv.kv_heads : 1;
  launch(stage, combine_heads, tile_grid(stage, kv.kv_heads / copies), generic_args(stage),
         kv.group * copies, copies);
}

}  // namespace kvtier::scoring::cuda
