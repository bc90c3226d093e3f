#pragma once

#include "scoring/fused/scores_cuda.cuh"
#include "transfer/kv/convert_cuda.cuh"

#include <cstdint>

/// The masses of the always-attended tokens, by which an error target and a recall target normalise
/// too. Their logits are exact: a warp has a token, the blocks of a group share them out.
namespace kvtier::scoring::cuda {

/// What the warp's tokens add to the normalisers, base 2: lane h has head h of the group.
/// `weighted`: each times its value norm, as the weighting says. `queries`: fp32 in shared memory,
/// `pitch` floats from head to head. The block has `rank` among `blocks_of_group` of kFusedThreads.
/// No barrier.
__device__ inline FusedSum static_sum(const SelectRequest& request, int query_index, int kv_head,
                                      bool weighted, unsigned rank, unsigned blocks_of_group,
                                      const float* queries, int pitch) {
  using transfer::cuda::kPiece;
  const transfer::KvGeometry& kv = request.kv;
  const int group = kv.group;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool has_piece = lane < kv.head_dim / kPiece;
  const transfer::QueryToken& query = request.query_batch[query_index];
  const transfer::SequenceView& sequence = request.sequences[query.sequence];
  const transfer::AttendedSpans spans =
      transfer::attended_spans(request.rule, sequence.counters->length, query);
  const std::byte* const* blocks = request.sketches[query.sequence];
  const std::int64_t resident_begin = sequence.counters->resident_begin;
  FusedSum own;
#pragma unroll 1
  for (std::int64_t i = rank * kFusedWarps + threadIdx.x / 32; i < spans.num_static();
       i += std::int64_t{blocks_of_group} * kFusedWarps) {
    const std::int64_t token = i < spans.sink_end ? i : spans.tail_begin + i - spans.sink_end;
    uint4 piece{};
    if (has_piece) {
      piece = reinterpret_cast<const uint4*>(
          transfer::row_address(kv, sequence, resident_begin, kv_head, token))[lane];
    }
    float log_weight = 0.0F;
    if (weighted && request.params.weighting != ValueWeighting::kNone) {
      log_weight = logf(load_norms(request.sketch, blocks[token / hashing::kBlockTokens], kv_head,
                                   static_cast<int>(token % hashing::kBlockTokens))
                            .value);
    }
    const unsigned pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
      float product = 0.0F;
      if (has_piece) {
        const auto* from = reinterpret_cast<const float2*>(queries + head * pitch + lane * kPiece);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = transfer::cuda::widen_pair(pairs[j], kv.dtype);
          product = fmaf(from[j].x, two.x, fmaf(from[j].y, two.y, product));
        }
      }
      const float logit = fmaf(warp_sum(product), request.params.logit_scale, log_weight);
      if (lane == head && isfinite(logit)) own.add(logit * kLog2E, 1.0F);
    }
  }
  return own;
}

}  // namespace kvtier::scoring::cuda
