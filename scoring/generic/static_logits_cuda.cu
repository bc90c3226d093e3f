#include "scoring/generic/recall_cuda.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/kv/convert_cuda.cuh"

#include <cstdint>

namespace kvtier::scoring::cuda {

namespace {

constexpr int kThreads = kRecallThreads;
constexpr int kWarps = kThreads / 32;

// ln of the sum of e^logit over the tokens that are always attended. A warp takes a row; lane h
// sums for head h. Grid: parts x KV heads x queries. The last block merges the parts in their
// order. `with_values`: each times its value norm, as the weighting says.
__global__ __launch_bounds__(kThreads) void sum_static_logits(
    const __grid_constant__ RecallArgs args, bool with_values) {
  __shared__ alignas(8) float queries[kMaxGroup * 256];
  __shared__ float2 sums[kWarps][kMaxGroup];
  const transfer::KvGeometry& kv = args.kv;
  const transfer::QueryToken& query = args.query_batch[static_cast<int>(blockIdx.z)];
  const transfer::SequenceView& sequence = args.sequences[query.sequence];
  const transfer::AttendedSpans spans =
      transfer::attended_spans(args.rule, sequence.counters->length, query);
  if (spans.num_eligible() <= 0) return;
  const std::int64_t resident_begin = sequence.counters->resident_begin;
  const int group = kv.group();
  const int kv_head = static_cast<int>(blockIdx.y);
  const std::int64_t first_head = std::int64_t{blockIdx.z} * kv.query_heads + kv_head * group;
  for (int i = static_cast<int>(threadIdx.x); i < group * kv.head_dim; i += kThreads) {
    queries[i] = args.queries[first_head * kv.head_dim + i];
  }
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  LogSum mine;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + warp; i < spans.num_static();
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t token = i < spans.sink_end ? i : spans.tail_begin + i - spans.sink_end;
    const auto* key = reinterpret_cast<const unsigned*>(
        transfer::row_address(kv, sequence, resident_begin, kv_head, token));
    float products[kMaxGroup] = {};
    for (int x = lane; x < kv.head_dim / 2; x += 32) {
      const float2 pair = transfer::cuda::widen_pair(key[x], kv.dtype);
#pragma unroll
      for (int h = 0; h < kMaxGroup; ++h) {
        if (h >= group) break;
        const float2 q = reinterpret_cast<const float2*>(queries + h * kv.head_dim)[x];
        products[h] = fmaf(q.x, pair.x, fmaf(q.y, pair.y, products[h]));
      }
    }
    float logit = 0.0F;
#pragma unroll
    for (int h = 0; h < kMaxGroup; ++h) {
      if (h >= group) break;
      const float product = warp_sum(products[h]);
      if (lane == h) logit = product * args.params.logit_scale;
    }
    if (with_values && args.params.weighting != ValueWeighting::kNone) {
      const std::byte* block = args.scratch.plans[blockIdx.z].blocks[token / hashing::kBlockTokens];
      logit += logf(
          load_norms(args.sketch, block, kv_head, static_cast<int>(token % hashing::kBlockTokens))
              .value);
    }
    if (isfinite(logit)) mine.add(logit);
  }
  if (lane < group) sums[warp][lane] = make_float2(mine.max, mine.sum);
  __syncthreads();

  HeadEstimate* estimates = args.scratch.estimates + first_head;
  float2* partials = args.scratch.partials + first_head * args.scratch.tiles;
  const int head = static_cast<int>(threadIdx.x);
  if (head < group) {
    LogSum of_block;
    for (int w = 0; w < kWarps; ++w) of_block.merge(log_sum(sums[w][head]));
    partials[head * args.scratch.tiles + blockIdx.x] = make_float2(of_block.max, of_block.sum);
  }
  if (!last_block(&estimates->ticket, gridDim.x)) return;
  static_assert(kMostRecallParts <= 32);
  for (int h = warp; h < group; h += kWarps) {
    LogSum all;
    if (lane < static_cast<int>(gridDim.x)) {
      all = log_sum(__ldcg(partials + h * args.scratch.tiles + lane));
    }
    merge_lanes(all);
    if (lane == 0) {
      (with_values ? estimates[h].log_static_weighted : estimates[h].log_static) = all.log();
    }
  }
}

}  // namespace

void clear_estimates(const Stage& stage) {
  const auto heads = std::int64_t{stage.num_queries()} * stage.request.kv.query_heads;
  KVTIER_CUDA_CHECK(
      cudaMemsetAsync(stage.scratch.estimates, 0, estimates_bytes(heads), stage.stream));
}

void enqueue_static(const Stage& stage, bool with_values) {
  const RecallArgs args = recall_args(stage, {});
  sum_static_logits<<<recall_grid(kMostRecallParts, args.kv.kv_heads, stage), kThreads, 0,
                      stage.stream>>>(args, with_values);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
