#pragma once

#include "scoring/fused/scores_cuda.cuh"

#include <cstdint>

/// Where a selection on chip goes: ids in token order, and of a selection by priority the biases,
/// which are made from the keys.
namespace kvtier::scoring::cuda {

/// What the keys of a selection by priority are made from and turned back with.
struct FusedPriorities {
  bool used;
  std::uint32_t set;  ///< Key of the set (`priority_key`).

  __device__ FusedPriorities(const ScoreParams& params, int kv_head)
      : used(params.rule == SelectionRule::kPriority), set(priority_key(params, kv_head)) {}

  /// u of a token.
  [[nodiscard]] __device__ float uniform(int token) const {
    return priority_uniform(set, static_cast<std::uint32_t>(token));
  }
  /// Base-2 logarithm of the sum, or of the priority, that a key stands for.
  [[nodiscard]] __device__ static float log2_of(std::uint32_t key) {
    if ((key & 0x80000000U) != 0) return __log2f(__uint_as_float(key & 0x7FFFFFFFU));
    return __uint_as_float(~key);
  }
  /// The bias of a token that is taken. `cut`: the best key that is not, or 0.
  [[nodiscard]] __device__ float bias(std::uint32_t key, int token, std::uint32_t cut) const {
    constexpr float kLn2 = 0.69314718F;
    if (cut == 0) return 0.0F;
    const float below = log2_of(cut) - log2_of(key) - __log2f(uniform(token));
    return below > 0.0F && below < 1e30F ? below * kLn2 : 0.0F;
  }
};

/// Where chosen tokens are written, in token order. The group reads them at `posted`, unless that
/// is null, two words for each where there are biases.
class ChosenTokens {
 public:
  /// `params`: of the priorities that the keys stand for.
  __device__ ChosenTokens(const FilterArgs& args, const ScoreParams& params, const FusedWork& work,
                          const BlockExchange& peers, TaggedWord* posted,
                          std::uint32_t cut_priority)
      : out_(args.selection),
        list_(work.group_index * args.selection.capacity),
        peers_(peers),
        posted_(posted),
        priorities_(params, work.kv_head),
        cut_(cut_priority),
        mask_(static_cast<std::uint16_t>((1U << args.request.kv.group) - 1)) {}

  /// `earlier_bias`: of a selection from which this one is made.
  __device__ void write(std::int64_t at, int token, std::uint32_t key,
                        float earlier_bias = 0.0F) const {
    if (priorities_.used) {
      const float bias = priorities_.bias(key, token, cut_) + earlier_bias;
      out_.bias[list_ + at] = bias;
      if (posted_ != nullptr) {
        peers_.post_pair(posted_ + 2 * at, kIdsStage, static_cast<std::uint32_t>(token),
                         __float_as_uint(bias));
      }
    } else if (posted_ != nullptr) {
      peers_.post(posted_ + at, kIdsStage, static_cast<std::uint32_t>(token));
    }
    out_.ids[list_ + at] = token;
    out_.head_mask[list_ + at] = mask_;
  }

 private:
  const transfer::SelectionView& out_;
  std::int64_t list_;
  const BlockExchange& peers_;
  TaggedWord* posted_;
  FusedPriorities priorities_;
  std::uint32_t cut_;
  std::uint16_t mask_;
};

/// Writes the tokens with keys above `cut`. `before`: tokens of the last window that are chosen in
/// earlier blocks.
__device__ inline void write_chosen(const FilterArgs& args, const FusedWork& work,
                                    const BlockExchange& peers, std::uint32_t cut,
                                    std::uint32_t before, const std::uint32_t* keys,
                                    TaggedWord* posted, FusedShared& shared) {
  constexpr int kRun = 32 * kFusedTile;
  const int count = work.count;
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  // A warp has neighbouring tokens.
  const int per_warp = (count + kFusedThreads - 1) / kFusedThreads * 32;
  const int begin = min(static_cast<int>(warp) * per_warp, count);
  const int end = min(begin + per_warp, count);  // whole tiles
  const std::uint32_t* own = keys + FusedScores::entry_of(lane);
  // The lane's of 32 tiles from a token on: a bit per token that is chosen.
  const auto votes_of_run = [&](int run) {
    std::uint32_t votes = 0;
    const int tiles = min(end - run, kRun) / kFusedTile;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const std::uint32_t of_tile = __ballot_sync(kFullWarp, own[run + tile * kFusedTile] > cut);
      if (tile == static_cast<int>(lane)) votes = of_tile;
    }
    return votes;
  };
  __syncthreads();  // the keys are final
  std::uint32_t votes = votes_of_run(begin);
  std::uint32_t mine = __popc(votes);
#pragma unroll 1
  for (int run = begin + kRun; run < end; run += kRun) mine += __popc(votes_of_run(run));
  mine = __reduce_add_sync(kFullWarp, mine);
  if (lane == 0) shared.warp_counts[warp] = mine;
  __syncthreads();
  const std::uint32_t of_warps =
      __reduce_add_sync(kFullWarp, lane < warp ? shared.warp_counts[lane] : 0);
  const ChosenTokens chosen(args, args.request.params, work, peers, posted, shared.cut);
  std::int64_t at = std::int64_t{shared.chosen_before} + before + of_warps;
#pragma unroll 1
  for (int run = begin; run < end; run += kRun) {
    if (run > begin) votes = votes_of_run(run);
    const auto of_lane = static_cast<std::uint32_t>(__popc(votes));
    const std::uint32_t through = inclusive_warp_sum(of_lane);
    std::int64_t to = at + through - of_lane;
    const int tile = run + static_cast<int>(lane) * kFusedTile;
    for (; votes != 0; votes &= votes - 1) {
      const int local = tile + __ffs(static_cast<int>(votes)) - 1;
      chosen.write(to++, work.first_token + local,
                   keys[FusedScores::entry_of(static_cast<unsigned>(local))]);
    }
    at += __shfl_sync(kFullWarp, through, 31);
  }
}

}  // namespace kvtier::scoring::cuda
