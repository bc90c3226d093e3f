#include "scoring/fused/launch_cuda.cuh"
#include "scoring/stream/recall_cuda.cuh"
#include "scoring/stream/stream_cuda.h"

#include <cstddef>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

// The missed mass after a selection by a stream of keys: scores the selected tokens again, adds up
// their weights, and takes them from the total that the selection has left. Grid: parts x KV heads
// x queries. Dynamic shared memory: the warps' norms, then a unit of each. The last block of a KV
// head writes the shares of its query heads.
template <int kQuads, int kChunks, int kBits>
__global__ __launch_bounds__(kFusedThreads,
                             1) void add_attended(const __grid_constant__ FilterArgs args,
                                                  const __grid_constant__ MissedBatch batch) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) StreamQueries queries;
  const auto query_index = static_cast<int>(blockIdx.z);
  const auto kv_head = static_cast<int>(blockIdx.y);
  const MissedItem& item = batch[query_index];
  if (item.missed == nullptr) return;
  const int group = args.request.kv.group;
  const FusedWork work(args, query_index, kv_head, 0, 1);
  HeadEstimate* const estimates = args.estimates + work.group_index * group;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(args.request.params);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (work.empty()) {  // nothing was written of it
    if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < group) {
      item.missed[(kv_head * group + threadIdx.x) * item.missed_stride] = 0.0F;
    }
    return;
  }
  args.filter.stream_groups[work.group_index].load(queries);
  __syncthreads();  // the queries are there
  auto* const norms = reinterpret_cast<FusedNorms*>(dynamic) + warp * kFusedUnit;
  std::byte* const unit =
      dynamic + kFusedWarps * kFusedUnit * sizeof(FusedNorms) + warp * fused_unit_bytes(chunks);
  UnitScorer<kQuads, kChunks, kBits> scorer(args.request, args.request.params, queries, chunks,
                                            norms);
  const Candidates selected{
      .keys = nullptr,
      .tokens = args.selection.ids + work.group_index * args.selection.capacity,
      .count = args.selection.counts[work.group_index]};
  float slopes[kQuads];
  float offsets[kQuads];
  std::uint64_t sums[kQuads] = {};
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const int head = quad * 4 + lane % 4;
    slopes[quad] = head < group ? estimates[head].slope : 0.0F;
    offsets[quad] = head < group ? estimates[head].offset : -INFINITY;
  }
  const int step = static_cast<int>(gridDim.x) * kFusedWarps * kFusedUnit;
#pragma unroll 1
  for (int base = (static_cast<int>(blockIdx.x) * kFusedWarps + warp) * kFusedUnit;
       base < selected.count; base += step) {
    gather_unit<kChunks>(args, work, selected, base, kUnitTiles, chunks, unit,
                         [](int) { return true; });
    transfer::cuda::copy_async_wait<0>();
    __syncwarp();  // the copies of all lanes
    scorer.begin_unit(unit, base, {0, static_cast<unsigned>(selected.count)});
#pragma unroll 1
    for (int tile = 0; tile < kUnitTiles; ++tile) {
      __syncwarp();  // binary products take whole warps
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        float values[4];
        float logits[4];
        scorer.score(quad, tile, values, logits);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float share = exp2_fast(fmaf(slopes[quad], logits[i], offsets[quad]));
          sums[quad] += logits[i] > -INFINITY ? in_units(share, kWeightUnits) : 0;
        }
      }
    }
    __syncwarp();  // all lanes have read the unit
  }
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      sums[quad] += __shfl_xor_sync(kFullWarp, sums[quad], distance);
    }
    const int head = quad * 4 + lane;
    if (lane < 4 && head < group) add(&estimates[head].attended, sums[quad]);
  }
  if (!last_block(&estimates->ticket, gridDim.x)) return;
  const auto head = static_cast<int>(threadIdx.x);
  if (head < group) write_missed_share(item, kv_head * group + head, estimates[head]);
#endif
}

}  // namespace

void enqueue_missed_of_stream(const Stage& stage, const MissedBatch& batch) {
  const FilterArgs args = path_args(stage, {});
  const SelectRequest& request = stage.request;
  const int chunks = sign_chunks(request.params);
  const int bytes =
      kFusedWarps * (kFusedUnit * static_cast<int>(sizeof(FusedNorms)) + fused_unit_bytes(chunks));
  const auto kernel = visit_recall_shape(
      request, [](auto made) { return add_attended<made.kQuads, made.kChunks, made.kBits>; });
  allow_shape(kernel);
  constexpr unsigned kParts = 8;
  const dim3 grid(kParts, static_cast<unsigned>(request.kv.kv_heads),
                  static_cast<unsigned>(request.query_batch.count));
  kernel<<<grid, kFusedThreads, static_cast<std::size_t>(bytes), stage.stream>>>(args, batch);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
