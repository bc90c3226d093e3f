#include "scoring/generic/scores_cuda.cuh"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvtier::scoring::cuda {
namespace {

// Shared memory of tables that a block may use on every chip since sm_80, sm_86 included.
constexpr int kTableBudget = 96 * 1024;
constexpr int kMaxHeadsPerBlock = 8;

// Bits of a table of the lookup kernel when the estimator is norm-aware with float weights: 32
// entries are one row of the shared memory's banks, so that any pattern of reads is free of
// conflicts.
constexpr int kSignTableBits = 5;

// Shape of the lookup kernel's tables, `[tables][heads][row]` floats in shared memory.
struct LookupShape {
  int bits;      // of a bucket
  int low_bits;  // of the second factor's index; 0: one factor
  int row;
  int tables;
};

template <int kBits, bool kFactored>
__host__ __device__ LookupShape lookup_shape(const ScoreParams& params) {
  LookupShape shape{};
  shape.bits = kBits > 0 ? kBits : params.planes_per_table;
  shape.low_bits = kFactored ? shape.bits / 2 : 0;
  shape.row = 1 << (shape.bits - shape.low_bits);
  if (kFactored) shape.row += 1 << shape.low_bits;
  shape.tables = kFactored ? params.tables : (params.num_planes + shape.bits - 1) / shape.bits;
  return shape;
}

template <int kHeads, bool kFactored>
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
      if (h < work.heads && kFactored) {
        value = entries[i];
      } else if (h < work.heads) {
        for (int bit = 0; bit < shape.bits; ++bit) {
          const int plane = table * shape.bits + bit;
          if (plane >= args.params.num_planes) break;
          const bool set = ((entry >> (shape.bits - 1 - bit)) & 1) != 0;
          value += set ? entries[plane] : -entries[plane];
        }
      }
      tables[(table * kHeads + h) * shape.row + entry] = value;
    }
  }
}

// Soft collision (`kFactored`: a bucket's probability is a product of two entries), and norm-aware
// with float weights. A thread scores one token for `kHeads` heads; `kBits` 0: known at run time.
template <int kHeads, int kBits, bool kFactored>
__global__ __launch_bounds__(kScoreThreads, kBlocksPerProcessor) void lookup_scores(
    const __grid_constant__ ScoreArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* tables = reinterpret_cast<float*>(shared_bytes);
  const Work work = block_work(args);
  const std::int64_t first = work.plan.begin / kScoreThreads + blockIdx.x;
  const std::int64_t end = (work.plan.end + kScoreThreads - 1) / kScoreThreads;
  if (first >= end) return;

  const LookupShape shape = lookup_shape<kBits, kFactored>(args.params);
  fill_lookup<kHeads, kFactored>(args, work, shape, tables);
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
        if constexpr (kFactored) {
          sums[h] += entry[h * shape.row] * low_entry[h * shape.row];
        } else {
          sums[h] += entry[h * shape.row];
        }
      }
      table += kHeads * shape.row;
      --left;
    };
    uint4 ahead = __ldg(codes);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const std::uint32_t words[kWordsPerChunk] = {ahead.x, ahead.y, ahead.z, ahead.w};
      if (chunk + 1 < chunks) ahead = __ldg(codes + (chunk + 1) * kChunkStride);
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
    if (!kFactored && left > 0) {  // the last table's planes end past the last word
      reader.push(0);
      visit();
    }
    write_scores(args, work, token, norms, sums);
  }
}

// Hard collision. A thread scores one token for `kHeads` heads: the query's buckets are packed as a
// sketch is, and a table agrees when none of its bits differs.
template <int kHeads>
__global__ __launch_bounds__(kScoreThreads, kBlocksPerProcessor) void agreement_scores(
    const __grid_constant__ ScoreArgs args) {
  constexpr int kMaxWords = 1024 / 32 + 1;
  __shared__ std::uint32_t query[kMaxWords][kHeads];
  __shared__ std::uint32_t starts[kMaxWords];
  const Work work = block_work(args);
  const std::int64_t first = work.plan.begin / kScoreThreads + blockIdx.x;
  const std::int64_t end = (work.plan.end + kScoreThreads - 1) / kScoreThreads;
  if (first >= end) return;

  const int planes = args.params.planes_per_table;
  const int chunks = (args.params.planes_read() + hashing::kChunkBits - 1) / hashing::kChunkBits;
  const int words = chunks * kWordsPerChunk + 1;
  for (int i = static_cast<int>(threadIdx.x); i < words * kHeads; i += kScoreThreads) {
    const int word = i / kHeads;
    const int h = i - word * kHeads;
    const float* buckets =
        args.tables.entries + (work.first_head + h) * args.tables.entries_per_head;
    std::uint32_t packed = 0;
    for (int bit = 0; h < work.heads && bit < 32; ++bit) {
      const int table = (word * 32 + bit) / planes;
      if (table >= args.params.tables) break;
      const int shift = planes - 1 - (word * 32 + bit - table * planes);
      const auto bucket = static_cast<std::uint32_t>(__float_as_int(buckets[table]));
      packed |= ((bucket >> shift) & 1U) << (31 - bit);
    }
    query[word][h] = packed;
    if (h == 0) starts[word] = table_starts(word, planes, args.params.tables);
  }
  __syncthreads();

  for (std::int64_t tile = first; tile < end; tile += gridDim.x) {
    const std::int64_t token = tile * kScoreThreads + threadIdx.x;
    if (token < work.plan.begin || token >= work.plan.end) continue;
    const std::byte* block = work.plan.blocks[token / hashing::kBlockTokens];
    const int in_block = static_cast<int>(token % hashing::kBlockTokens);
    const auto* codes =
        reinterpret_cast<const uint4*>(block + args.sketch.chunk_offset(work.kv_head, 0, in_block));
    const Norms norms = load_norms(args.sketch, block, work.kv_head, in_block);

    int agreements[kHeads] = {};
    uint4 ahead = __ldg(codes);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint4 code = ahead;
      ahead =
          chunk + 1 < chunks ? __ldg(codes + (chunk + 1) * kChunkStride) : make_uint4(0, 0, 0, 0);
      const std::uint32_t bits[kWordsPerChunk + 1] = {code.x, code.y, code.z, code.w, ahead.x};
#pragma unroll
      for (int w = 0; w < kWordsPerChunk; ++w) {
        const int word = chunk * kWordsPerChunk + w;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          agreements[h] += agreeing_tables(bits[w] ^ query[word][h],
                                           bits[w + 1] ^ query[word + 1][h], planes, starts[word]);
        }
      }
    }
    float sums[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] = static_cast<float>(agreements[h]);
    write_scores(args, work, token, norms, sums);
  }
}

/// Returns the kernel for a number of heads, a power of two; `of` has that of a constant.
template <typename Of>
ScoreKernel kernel_of(int heads, const Of& of) {
  switch (heads) {
    case 1:
      return of(std::integral_constant<int, 1>{});
    case 2:
      return of(std::integral_constant<int, 2>{});
    case 4:
      return of(std::integral_constant<int, 4>{});
    default:
      return of(std::integral_constant<int, kMaxHeadsPerBlock>{});
  }
}

// Divides a group among as few blocks as their tables allow, evenly. Returns the heads that the
// kernel is compiled for, a power of two.
int share_group(ScoreArgs& args, int table_bytes) {
  int most = kMaxHeadsPerBlock;
  while (most > 1 && most * table_bytes > kTableBudget) most /= 2;
  args.subsets = (args.group + most - 1) / most;
  args.heads_per_block = (args.group + args.subsets - 1) / args.subsets;
  int compiled = 1;
  while (compiled < args.heads_per_block) compiled *= 2;
  return compiled;
}

template <int kBits, bool kFactored>
ScoreLaunch lookup_launch(ScoreArgs& args) {
  const LookupShape shape = lookup_shape<kBits, kFactored>(args.params);
  const int table_bytes = shape.tables * shape.row * static_cast<int>(sizeof(float));
  const int heads = share_group(args, table_bytes);
  const auto of = [](auto made) { return lookup_scores<made(), kBits, kFactored>; };
  return {kernel_of(heads, of), kScoreThreads, heads * table_bytes};
}

}  // namespace

ScoreLaunch collision_launch(ScoreArgs& args) {
  switch (args.params.estimator) {
    case Estimator::kHardCollision:
      return {kernel_of(share_group(args, 0), [](auto made) { return agreement_scores<made()>; }),
              kScoreThreads, 0};
    case Estimator::kNormAware:
      return lookup_launch<kSignTableBits, false>(args);
    case Estimator::kSoftCollision:
      break;
  }
  constexpr int kP10L60Bits = 10;
  return args.params.planes_per_table == kP10L60Bits ? lookup_launch<kP10L60Bits, true>(args)
                                                     : lookup_launch<0, true>(args);
}

}  // namespace kvtier::scoring::cuda
