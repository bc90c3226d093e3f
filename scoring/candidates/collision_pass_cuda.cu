#include "scoring/candidates/collision_heads.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/device/launch_cuda.cuh"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

template <bool kP10L60>
__global__ __launch_bounds__(kPassThreads,
                             1) void heads_pass(const __grid_constant__ FilterArgs args,
                                                int tile_segments, bool again) {
  extern __shared__ __align__(128) std::uint32_t tables[];
  __shared__ SpanShared spans;
  __shared__ GroupState state;
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();
  const SelectRequest& request = args.request;
  const int group = request.kv.group();
  const TableShape shape(request.params);
  for_each_span(args, spans, tile_segments, again, [&](const Span& span) {
    __syncthreads();  // the tables of the span before are no longer read
    const std::int64_t first_head = span.group_index * group;
    open_group(args, first_head, group, state);
    const QueryPlan plan = args.plans[span.query_index];
    const Start<kP10L60> first(request.sketch, plan, span);
    if constexpr (kP10L60) {
      P10L60Entries(args.tables, first_head, group).store_pairs(tables);
    } else {
      fill_pairs(args.tables, shape, first_head, group, tables);
    }
    __syncthreads();
    head_segments(args, state, span, plan, first, SoftCollisions<kP10L60>{tables, shape, group});
  });
}

/// Segments of a tile: no fewer than blocks need to have equal shares.
int choose_tile(const SelectRequest& request, int blocks) {
  const std::int64_t segments = (request.max_length + kSegmentTokens - 1) / kSegmentTokens;
  const std::int64_t heads = std::int64_t{request.query_batch.count} * request.kv.kv_heads;
  const auto share = [&](int tile) {  // of the block with the most
    const std::int64_t tiles = (segments + tile - 1) / tile * heads;
    return (tiles + blocks - 1) / blocks * tile;
  };
  int tile = 16;
  while (tile > 1 && share(tile / 2) < share(tile)) tile /= 2;
  return tile;
}

/// Blocks of a pass. Where they have little to do each, no block crosses from one (query, KV head)
/// to the next, at equal lengths: it would fill its tables twice.
int choose_blocks(const SelectRequest& request) {
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int heads = request.query_batch.count * request.kv.kv_heads;
  const int whole = processors / heads * heads;
  const std::int64_t segments = request.max_length / kSegmentTokens * heads;
  // H200: tables take some microseconds, a segment of a block a little less than one.
  constexpr std::int64_t kFewSegments = 128;
  const bool few = segments < kFewSegments * processors;
  return few && whole * 20 >= processors * 19 ? whole : processors;
}

}  // namespace

CollisionPass collision_heads_pass(bool p10_l60) {
  return p10_l60 ? heads_pass<true> : heads_pass<false>;
}

int collision_pass_bytes(const ScoreParams& params, int group) {
  const TableShape shape(params);
  const bool p10_l60 = shape.p10_l60() && group <= 4;
  const int pairs = stored_pairs(shape, group) * shape.entries() * 4;
  if (!sums_suffice(params, group)) return pairs;
  const int bytes = (group + 3) / 4 * shape.entries() * 4;
  return pairs + bytes + (p10_l60 ? collision_queue_bytes() : 0);
}

void enqueue_collision_pass(cudaStream_t stream, const FilterArgs& args, bool again) {
  const ScoreParams& params = args.request.params;
  const int group = args.request.kv.group();
  const bool p10_l60 = TableShape(params).p10_l60() && group <= 4;
  const CollisionPass kernel =
      sums_suffice(params, group) ? collision_sums_pass(p10_l60) : collision_heads_pass(p10_l60);
  const int shared = collision_pass_bytes(params, group);
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      most_table_bytes(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))));
  const int blocks = choose_blocks(args.request);
  transfer::cuda::launch_overlapping(stream, kernel, dim3(static_cast<unsigned>(blocks)),
                                     kPassThreads, static_cast<std::size_t>(shared), args,
                                     choose_tile(args.request, blocks), again);
}

}  // namespace kvtier::scoring::cuda
