#include "scoring/generic/scores_cuda.cuh"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

// Shared memory that a launch may use without asking, and the most that any of ours uses, on every
// chip since sm_80, sm_86 included. The limit of a kernel is never set lower than that, since
// captured graphs may hold larger launches of it.
constexpr int kDefaultSharedBytes = 48 * 1024;
constexpr int kMostSharedBytes = 96 * 1024;
constexpr int kMaxHeadsPerBlock = 8;

// Bits of a table of the lookup kernel when the estimator is norm-aware with float weights: 32
// entries are one row of the shared memory's banks, so that any pattern of reads is free of
// conflicts.
constexpr int kSignTableBits = 5;

// What a table adds to the score of a token that has a bucket in it.
enum class Lookup {
  kProduct,  // of two entries: soft collision
  kEntry,    // norm-aware with float weights
  kMatch,    // 1 if its one entry is the bucket: hard collision
};

// Shape of the lookup kernel's tables, `[tables][heads][row]` floats in shared memory.
struct LookupShape {
  int bits;      // of a bucket
  int low_bits;  // of the second factor's index; 0: one factor
  int row;
  int tables;
};

template <int kBits, Lookup kLookup>
__host__ __device__ LookupShape lookup_shape(const ScoreParams& params) {
  LookupShape shape{};
  shape.bits = kBits > 0 ? kBits : params.planes_per_table;
  shape.low_bits = kLookup == Lookup::kProduct ? shape.bits / 2 : 0;
  shape.row = kLookup == Lookup::kMatch ? 1 : 1 << (shape.bits - shape.low_bits);
  if (kLookup == Lookup::kProduct) shape.row += 1 << shape.low_bits;
  shape.tables = kLookup == Lookup::kEntry ? (params.num_planes() + shape.bits - 1) / shape.bits
                                           : params.tables;
  return shape;
}

template <int kHeads, Lookup kLookup>
__device__ void fill_lookup(const ScoreArgs& args, const Work& work, const LookupShape& shape,
                            float* tables) {
  const int per_head = shape.tables * shape.row;
  for (int h = 0; h < kHeads; ++h) {
    const float* entries =
        args.tables.entries + (work.first_head + h) * args.tables.entries_per_head;
    for (int i = static_cast<int>(threadIdx.x); i < per_head; i += kScoreThreads) {
      const int table = i / shape.row;
      const int entry = i - table * shape.row;
      float value = 0.0F;
      if (h < work.heads && kLookup != Lookup::kEntry) {
        value = entries[i];
      } else if (h < work.heads) {
        for (int bit = 0; bit < shape.bits; ++bit) {
          const int plane = table * shape.bits + bit;
          if (plane >= args.params.num_planes()) break;
          const bool set = ((entry >> (shape.bits - 1 - bit)) & 1) != 0;
          value += set ? entries[plane] : -entries[plane];
        }
      }
      tables[(table * kHeads + h) * shape.row + entry] = value;
    }
  }
}

// A thread scores one token for `kHeads` heads; `kBits` 0: known at run time.
template <int kHeads, int kBits, Lookup kLookup>
__global__ __launch_bounds__(kScoreThreads, kBlocksPerProcessor) void lookup_scores(
    const __grid_constant__ ScoreArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* tables = reinterpret_cast<float*>(shared_bytes);
  const Work work = block_work(args);
  const std::int64_t first = work.plan.begin / kScoreThreads + blockIdx.x;
  const std::int64_t end = (work.plan.end + kScoreThreads - 1) / kScoreThreads;
  if (first >= end) return;

  const LookupShape shape = lookup_shape<kBits, kLookup>(args.params);
  fill_lookup<kHeads, kLookup>(args, work, shape, tables);
  __syncthreads();

  const int chunks = (args.params.planes_read() + hashing::kChunkBits - 1) / hashing::kChunkBits;
  const std::uint32_t low_mask = (1U << shape.low_bits) - 1;
  const int low_row = shape.row - (1 << shape.low_bits);
  for (std::int64_t tile = first; tile < end; tile += gridDim.x) {
    const std::int64_t token = tile * kScoreThreads + threadIdx.x;
    if (token < work.plan.begin || token >= work.plan.end) continue;
    const std::byte* block = work.plan.blocks[token / hashing::kBlockTokens];
    const int in_block = static_cast<int>(token % hashing::kBlockTokens);
    const auto* codes =
        reinterpret_cast<const uint4*>(block + args.sketch.chunk_offset(work.kv_head, 0, in_block));
    const Norms norms = load_norms(args.sketch, block, work.kv_head, in_block);

    float sums[kHeads] = {};
    BucketReader reader(shape.bits);
    const float* table = tables;
    int left = shape.tables;
    const auto visit = [&] {
      const std::uint32_t bucket = reader.next();
      const float* entry = table + (bucket >> shape.low_bits);
      const float* low_entry = table + low_row + (bucket & low_mask);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if constexpr (kLookup == Lookup::kProduct) {
          sums[h] += entry[h * shape.row] * low_entry[h * shape.row];
        } else if constexpr (kLookup == Lookup::kEntry) {
          sums[h] += entry[h * shape.row];
        } else {
          sums[h] += __float_as_uint(table[h]) == bucket ? 1.0F : 0.0F;
        }
      }
      table += kHeads * shape.row;
      --left;
    };
    const int chunk_vectors = args.sketch.chunk_stride() / hashing::kChunkBytes;
    uint4 ahead = __ldg(codes);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const std::uint32_t words[kWordsPerChunk] = {ahead.x, ahead.y, ahead.z, ahead.w};
      if (chunk + 1 < chunks) ahead = __ldg(codes + (chunk + 1) * chunk_vectors);
#pragma unroll
      for (int w = 0; w < kWordsPerChunk; ++w) {
        reader.push(words[w]);
        if constexpr (kBits > 0) {
          // A word brings at least this many buckets, and one more when enough bits were left over.
#pragma unroll
          for (int i = 0; i < 32 / kBits; ++i) {
            if (left > 0) visit();
          }
          if (reader.ready() && left > 0) visit();
        } else {
          while (reader.ready() && left > 0) visit();
        }
      }
    }
    if (kLookup == Lookup::kEntry && left > 0) {  // the last table's planes end past the last word
      reader.push(0);
      visit();
    }
    write_scores(args, work, token, norms, sums);
  }
}

// Divides a group among as few blocks as their tables allow, evenly. Returns the heads that the
// kernel is compiled for, a power of two.
int share_group(ScoreArgs& args, int table_bytes) {
  int most = kMaxHeadsPerBlock;
  while (most > 1 && most * table_bytes > kMostSharedBytes) most /= 2;
  args.subsets = (args.group + most - 1) / most;
  args.heads_per_block = (args.group + args.subsets - 1) / args.subsets;
  int compiled = 1;
  while (compiled < args.heads_per_block) compiled *= 2;
  return compiled;
}

template <int kBits, Lookup kLookup>
ScoreLaunch lookup_launch(ScoreArgs& args) {
  const LookupShape shape = lookup_shape<kBits, kLookup>(args.params);
  const int table_bytes = shape.tables * shape.row * static_cast<int>(sizeof(float));
  const int heads = share_group(args, table_bytes);
  static constexpr ScoreKernel kOfHeads[] = {
      lookup_scores<1, kBits, kLookup>, lookup_scores<2, kBits, kLookup>,
      lookup_scores<4, kBits, kLookup>, lookup_scores<kMaxHeadsPerBlock, kBits, kLookup>};
  return {kOfHeads[std::countr_zero(static_cast<unsigned>(heads))], kScoreThreads,
          heads * table_bytes};
}

// Soft, hard, and norm-aware with float weights.
ScoreLaunch collision_launch(ScoreArgs& args) {
  switch (args.params.estimator) {
    case Estimator::kHardCollision:
      return lookup_launch<0, Lookup::kMatch>(args);
    case Estimator::kNormAware:
      return lookup_launch<kSignTableBits, Lookup::kEntry>(args);
    case Estimator::kSoftCollision:
      break;
  }
  constexpr int kP10L60Bits = 10;
  return args.params.planes_per_table == kP10L60Bits
             ? lookup_launch<kP10L60Bits, Lookup::kProduct>(args)
             : lookup_launch<0, Lookup::kProduct>(args);
}

}  // namespace

void enqueue_scores(const Stage& stage) {
  const SelectRequest& request = stage.request;
  ScoreArgs args{.params = request.params,
                 .sketch = request.sketch,
                 .plans = stage.scratch.plans,
                 .tables = stage.workspace.tables,
                 .scores = stage.workspace.scores,
                 .max_tokens = stage.workspace.limits.max_tokens,
                 .query_heads = request.kv.query_heads(),
                 .group = request.kv.group,
                 .heads_per_block = request.kv.group,
                 .subsets = 1,
                 .slot_block = request.slots.blocks == nullptr ? 0 : request.slots.block_tokens};
  const bool integers =
      args.params.estimator == Estimator::kNormAware && args.params.query_bits > 0;
  const ScoreLaunch launch = integers ? sign_launch(args) : collision_launch(args);

  const std::int64_t per_iteration =
      std::int64_t{request.kv.kv_heads} * args.subsets * stage.num_queries();
  const std::int64_t tiles =
      (request.max_length + launch.tokens_per_block - 1) / launch.tokens_per_block;
  const std::int64_t share = std::max<std::int64_t>(
      1, kBlocksPerProcessor * device_attribute(cudaDevAttrMultiProcessorCount) / per_iteration);
  const dim3 grid(static_cast<unsigned>(std::min(tiles, share)),
                  static_cast<unsigned>(request.kv.kv_heads * args.subsets),
                  static_cast<unsigned>(stage.num_queries()));
  const ScoreKernel kernel = launch.kernel;
  const auto shared_bytes = static_cast<std::size_t>(launch.shared_bytes);
  assert(launch.shared_bytes <= kMostSharedBytes);
  if (launch.shared_bytes > kDefaultSharedBytes) {
    KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           kMostSharedBytes));
  }
  kernel<<<grid, kScoreThreads, shared_bytes, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
