#include "hashing/append.h"
#include "scoring/fused/launch_cuda.cuh"
#include "scoring/stream/queries_cuda.cuh"
#include "scoring/stream/stream_cuda.h"
#include "transfer/device/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

/// Units that a warp has under way.
constexpr int stages_of(int known_chunks) { return known_chunks > 0 ? 4 : 2; }

/// The units of a warp on their way through its ring of stages. Whole warps only.
template <int kChunks>
class StreamRing {
 public:
  static constexpr int kStages = stages_of(kChunks);

  __device__ StreamRing(const FilterArgs& args, int chunks, std::byte* memory)
      : sketch_(args.request.sketch),
        chunks_(kChunks > 0 ? kChunks : chunks),
        warp_(static_cast<int>(threadIdx.x) / 32),
        memory_(memory + warp_ * fused_unit_bytes(chunks_)),
        codes_to_(transfer::cuda::shared_address(memory_) + vectors().lane_to()),
        norms_to_(transfer::cuda::shared_address(memory_) +
                  static_cast<unsigned>(chunks_ * kCodeBytes) + threadIdx.x % 32 * 16),
        policy_(transfer::cuda::read_once_policy()),
        copies_norms_(static_cast<int>(threadIdx.x) % 32 * 16 < kNormBytes) {}

  /// Looks up the addresses of the first units. No copies to the ring are under way: loads that are
  /// issued after copies return after them.
  __device__ void find(const StreamWork& work) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    codes_ = sketch_.chunk_offset(work.kv_head, 0, 0) + vectors().lane_from();
    norms_ = sketch_.norms_offset(work.kv_head, 0) + lane * 16;
    references_ = work.warp_references(warp_);
    end_ = references_ + work.warp_units(warp_);
    const int first = work.unit(warp_, 0);
    const int in_block = first % kUnitsPerBlock;  // as of every unit of the warp
    own_codes_ = codes_ + in_block * vectors().unit_bytes();
    own_norms_ = norms_ + in_block * kNormBytes;
    // A lane has one of the units that give references.
    static_assert(StreamWork::kMostReferences <= 32 * kFusedWarps);
    if (lane < references_) {
      reference_ = work.reference_unit(warp_, lane);
      reference_block_ = work.blocks[reference_ / kUnitsPerBlock];
    }
    blocks_.start(work.blocks, first, end_ - references_);
    next_ = 0;
    stage_ = 0;
  }
  /// Starts to copy the units that were found, to all stages but the last of all warps.
  __device__ void start() {
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) fill_next();
  }
  /// The last stage may be used now.
  __device__ void start_last() { fill_next(); }
  /// Waits for the next unit and returns it.
  __device__ const std::byte* wait() {
    transfer::cuda::copy_async_wait<kStages - 1>();
    __syncwarp();  // the copies of all lanes
    return memory_ + stage_ * kFusedWarps * fused_unit_bytes(chunks_);
  }
  /// Gives the unit's stage to the copies.
  __device__ void release() {
    __syncwarp();  // all lanes have read it
    fill_next();
  }
  /// The same of a unit behind those that give references.
  __device__ void release_own() {
    __syncwarp();  // all lanes have read it
    fill_own();
    end_fill();
  }

 private:
  [[nodiscard]] __device__ UnitVectors<kChunks> vectors() const { return {sketch_, chunks_}; }
  /// One group of copies per call, empty past the end, so that waiting can count groups.
  __device__ void fill_next() {
    if (next_ < references_) {
      const auto block = reinterpret_cast<unsigned long long>(reference_block_);
      const int unit = __shfl_sync(kFullWarp, reference_, next_);
      const auto* from = reinterpret_cast<const std::byte*>(__shfl_sync(kFullWarp, block, next_));
      const unsigned in_block = static_cast<unsigned>(unit) % kUnitsPerBlock;
      fill(from + codes_ + in_block * static_cast<unsigned>(vectors().unit_bytes()),
           from + norms_ + in_block * kNormBytes, true);
    } else {
      fill_own();
    }
    end_fill();
  }
  __device__ void fill_own() {
    const std::byte* block = blocks_.at(next_ - references_);
    fill(block + own_codes_, block + own_norms_, next_ < end_);
  }
  __device__ void end_fill() {
    transfer::cuda::copy_async_commit();
    ++next_;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }
  /// Copies a unit, of which a lane's first vector of the first chunk is at `codes`, if it is
  /// `wanted`.
  __device__ void fill(const std::byte* codes, const std::byte* norms, bool wanted) {
    const auto stage = static_cast<unsigned>(stage_ * kFusedWarps * fused_unit_bytes(chunks_));
#pragma unroll(kChunks > 0 ? kChunks : 1)
    for (int chunk = 0; chunk < chunks_; ++chunk) {
#pragma unroll
      for (int i = 0; i < kCodeBytes / 512; ++i) {
        copy(codes_to_ + stage + chunk * kCodeBytes + i * 512, codes + vectors().from(chunk, i),
             wanted);
      }
    }
    copy(norms_to_ + stage, norms, wanted && copies_norms_);
  }
  __device__ void copy(unsigned to, const std::byte* from, bool wanted) const {
    // nvcc 13.0 makes an illegal instruction of the policy where the number of chunks is not known.
    if constexpr (kChunks > 0) {
      transfer::cuda::copy_async_16_once(to, from, policy_, wanted);
    } else {
      if (wanted) transfer::cuda::copy_async_16(to, from);
    }
  }

  static constexpr int kUnitsPerBlock = hashing::kBlockTokens / kFusedUnit;
  static constexpr int kCodeBytes = kFusedUnit * hashing::kChunkBytes;  // of a chunk
  static constexpr int kNormBytes = kFusedUnit * hashing::kNormBytes;

  const hashing::SketchGeometry& sketch_;
  int chunks_;
  int warp_;
  std::byte* memory_;
  unsigned codes_to_;  // of the lane's first vector,
  unsigned norms_to_;  // and that of its norms
  std::uint64_t policy_;
  bool copies_norms_;
  std::int64_t codes_ = 0;  // of the lane's first vector in a block
  std::int64_t norms_ = 0;
  std::int64_t own_codes_ = 0;  // the same of the warp's own units
  std::int64_t own_norms_ = 0;
  int references_ = 0;
  int end_ = 0;
  int next_ = 0;
  int stage_ = 0;
  UnitBlocks blocks_;
  int reference_ = 0;
  const std::byte* reference_block_ = nullptr;
};

/// Parts of the heads' normalisers that the lanes of a warp have. A lane has one head of each quad.
template <int kQuads>
struct LaneSums {
  FusedSum heads[kQuads];

  __device__ void add(int quad, const float (&values)[kUnitTiles][4]) {
    float most = heads[quad].most;
    for (const auto& tile : values) {
      for (const float value : tile) most = fmaxf(most, value);
    }
    float sum = heads[quad].sum * exp2_fast(heads[quad].most - most);
    for (const auto& tile : values) {
      for (const float value : tile) sum += exp2_fast(value - most);
    }
    heads[quad] = {most, sum};
  }
  /// Writes the warp's sums.
  __device__ void store(StreamQueries& queries) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      heads[quad] = sum_lanes<4>(heads[quad]);
      if (lane < 4) {
        queries.warp_sums[threadIdx.x / 32][quad * 4 + lane] = {heads[quad].most, heads[quad].sum};
      }
    }
  }
};

/// Of the warps, in shared memory.
using RecallParts = RecallSums[kFusedHeads];

/// What the lanes of a warp sum for a recall target. A lane has one head of each quad.
template <int kQuads>
struct LaneRecall {
  RecallSums heads[kQuads] = {};

  /// Of a tile. `slope`: of the weights, of which none exceeds 2^60.
  template <bool kWeights>
  __device__ void add(int quad, const float (&logits)[4], const float (&keys)[4], float reference,
                      float slope) {
    constexpr float kMostLog = 60.0F;
    RecallSums& sums = heads[quad];
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const bool counts = logits[row] > -INFINITY;
      const float y = counts ? logits[row] - reference : 0.0F;
      sums.first += y;
      sums.second = fmaf(y, y, sums.second);
      if (quad == 0) {
        sums.key_squares = counts ? fmaf(keys[row], keys[row], sums.key_squares) : sums.key_squares;
        sums.count += counts ? 1.0F : 0.0F;
      }
      if constexpr (kWeights) {
        float weight = counts ? exp2_fast(fminf(slope * y, kMostLog)) : 0.0F;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums.weights[i] += weight;
          weight *= y;
        }
      }
    }
  }
  /// Writes the warp's sums.
  __device__ void store(RecallParts* parts) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      heads[quad].key_squares = heads[0].key_squares;  // of the same tokens
      heads[quad].count = heads[0].count;
    }
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        heads[quad].add(of_other_lane(heads[quad], distance));
      }
      if (lane < 4) parts[threadIdx.x / 32][quad * 4 + lane] = heads[quad];
    }
  }
};

/// The block's sums for a head. A whole warp, after a barrier.
__device__ inline RecallSums block_recall(const RecallParts* parts, int head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RecallSums total{};
  if (lane < kFusedWarps) total = parts[lane][head];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) total.add(of_other_lane(total, distance));
  return total;
}

/// Turns the warps' sums into references and, with `parts`, slopes. All threads; begins and ends
/// with a barrier.
__device__ inline void make_references(const FilterArgs& args, const RecallParts* parts,
                                       StreamQueries& queries) {
  const int group = args.request.kv.group;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32;
  static_assert(kFusedWarps >= kMaxGroup);
  __syncthreads();  // the sums of all warps are there
  if (head < kMaxGroup) {
    float reference = INFINITY;
    if (head < group) reference = normaliser(sum_of_block(queries, head));
    if (parts != nullptr && head < group) {
      const RecallSums sums = block_recall(parts, head);
      const float of_one = sums.count > 0.0F ? 1.0F / sums.count : 0.0F;
      const float noise = recall_noise(args, queries.norms[head], sums.key_squares * of_one);
      if (lane == 0) {
        queries.slopes[head] = recall_slope(sums.first * of_one, sums.second * of_one, noise);
      }
    }
    if (lane == 0) queries.references[head] = reference;
  }
  __syncthreads();
}

/// Key norms of the lane's tokens of a tile.
template <typename Scorer>
__device__ void key_norms(const Scorer& scorer, int tile, float (&keys)[4]) {
#pragma unroll
  for (int row = 0; row < 4; ++row) keys[row] = scorer.key_norm(tile, row);
}

/// Scores the units that give references, and makes these. All threads; ends with a barrier.
template <bool kRecall, int kQuads, int kChunks, int kBits>
__device__ void find_references(const FilterArgs& args, const StreamWork& work,
                                StreamRing<kChunks>& ring,
                                UnitScorer<kQuads, kChunks, kBits, true>& scorer,
                                RecallParts* parts, StreamQueries& queries) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  LaneSums<kQuads> sums;
  [[maybe_unused]] LaneRecall<kQuads> recall;
#pragma unroll 1
  for (int i = 0; i < work.warp_references(warp); ++i) {
    const int first = work.reference_unit(warp, i) * kFusedUnit;
    scorer.begin_unit(ring.wait(), first, work.eligible());
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float values[kUnitTiles][4];
#pragma unroll
      for (int tile = 0; tile < kUnitTiles; ++tile) {
        float logits[4];
        scorer.score(quad, tile, values[tile], logits);
        if constexpr (kRecall) {
          float keys[4];
          key_norms(scorer, tile, keys);
          recall.template add<false>(quad, logits, keys, 0.0F, 0.0F);
        }
      }
      sums.add(quad, values);
    }
    ring.release();
  }
  sums.store(queries);
  if constexpr (kRecall) recall.store(parts);
  make_references(args, parts, queries);
}

/// Counts an approximate key in bins at a shared address.
__device__ inline void count_key(unsigned bins, unsigned key) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bins + ShareKeys::bin_of(key) * 4) : "memory");
}

/// Writes the approximate keys of the block's units, and its parts of the normalisers. Counts
/// tokens in `bins`, clear before; for a recall target by their scores, too, in the next
/// kFusedBins.
template <bool kRecall, int kQuads, int kChunks, int kBits>
__device__ void write_approximate_keys(const FilterArgs& args, const StreamWork& work,
                                       StreamRing<kChunks>& ring,
                                       UnitScorer<kQuads, kChunks, kBits, true>& scorer,
                                       RecallParts* parts_of_warps, std::uint32_t* bins,
                                       StreamQueries& queries) {
  // Shares that add up to more than this are summed with a maximum of their own.
  constexpr float kMostPart = 0x1p60F;
  const ScoreParams& params = args.request.params;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Without a branch: the two tiles of a unit are worked on together.
  const float priority = params.rule == SelectionRule::kPriority ? 1.0F : 0.0F;
  const std::uint32_t set = priority_key(params, work.kv_head);
  const EligibleTokens eligible = work.eligible();
  const unsigned bins_at = transfer::cuda::shared_address(bins);
  float references[kQuads];
  float parts[kQuads];  // relative to the references
  LaneSums<kQuads> far;
  [[maybe_unused]] LaneRecall<kQuads> recall;
  [[maybe_unused]] float slopes[kQuads];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    references[quad] = queries.references[quad * 4 + lane % 4];
    if constexpr (kRecall) slopes[quad] = queries.slopes[quad * 4 + lane % 4];
    parts[quad] = 0.0F;
  }
  const int units = work.warp_units(warp);
  int first = work.unit(warp, 0) * kFusedUnit;
  std::uint16_t* keys =
      args.filter.stream_keys + work.group_index * args.max_tokens + first + own_token();
#pragma unroll 1
  for (int i = 0; i < units; ++i) {
    scorer.begin_unit(ring.wait(), first, eligible);
    float shares[kUnitTiles][4];
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float values[kUnitTiles][4];
      float part = 0.0F;
#pragma unroll
      for (int tile = 0; tile < kUnitTiles; ++tile) {
        float logits[4];
        scorer.score(quad, tile, values[tile], logits);
        if constexpr (kRecall) {
          float key_norm[4];
          key_norms(scorer, tile, key_norm);
          recall.template add<true>(quad, logits, key_norm, references[quad], slopes[quad]);
        }
        float of_tile[4];
#pragma unroll
        for (int row = 0; row < 4; ++row) {
          of_tile[row] = exp2_fast(values[tile][row] - references[quad]);
          shares[tile][row] = quad == 0 ? of_tile[row] : shares[tile][row] + of_tile[row];
        }
        part += (of_tile[0] + of_tile[1]) + (of_tile[2] + of_tile[3]);
      }
      if (__all_sync(kFullWarp, part < kMostPart)) {
        parts[quad] += part;
      } else {
        far.add(quad, values);
      }
    }
    ring.release_own();
    float sums[kUnitTiles];
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
      sums[tile] = reduce_heads(shares[tile], [](float a, float b) { return a + b; });
    }
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
      const int token = first + tile * kFusedTile + own_token();
      const bool present = eligible.has(token);
      const float log = log2_norm(sums[tile]);
      const float log_uniform = log2_norm(priority_uniform(set, static_cast<std::uint32_t>(token)));
      const unsigned key = approximate_key<ShareKeys>(fmaf(-priority, log_uniform, log), present);
      keys[tile * kFusedTile] = static_cast<std::uint16_t>(key);
      count_key(bins_at, key);
      if constexpr (kRecall) {
        count_key(bins_at + kFusedBins * 4, approximate_key<ShareKeys>(log, present));
      }
    }
    first += kFusedWarps * kFusedUnit;
    keys += kFusedWarps * kFusedUnit;
    __syncwarp();  // binary products take whole warps
  }
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    if (parts[quad] > 0.0F) far.heads[quad].add(references[quad], parts[quad]);
  }
  far.store(queries);
  if constexpr (kRecall) recall.store(parts_of_warps);
  __syncthreads();  // the sums and counts of all warps are there
  // Pairs of a group and a block that has units of it, in order, differ in this sum.
  const std::int64_t part = args.place_of(work.group_index) + args.first_block + blockIdx.x;
  std::uint32_t* const counts = args.filter.stream_counts + part * 2 * kFusedBins + threadIdx.x;
  counts[0] = bins[threadIdx.x];
  if constexpr (kRecall) counts[kFusedBins] = bins[kFusedBins + threadIdx.x];
  const int head = warp;
  if (head < args.request.kv.group) {
    const FusedSum total = sum_of_block(queries, head);
    if (lane == 0) args.filter.stream_sums[part * kMaxGroup + head] = {total.most, total.sum};
    if constexpr (kRecall) {
      const RecallSums sums = block_recall(parts_of_warps, head);
      auto* const to = reinterpret_cast<RecallSums*>(args.filter.stream_recall);
      if (lane == 0) to[part * kFusedHeads + head] = sums;
    }
  }
}

/// What a block needs of its launch.
template <int kChunks>
struct StreamBlock {
  const FilterArgs& args;
  const StreamQueryMaker& maker;
  StreamRing<kChunks>& ring;
  FusedNorms* norms;  ///< Of the warp's unit.
  RecallParts* parts;
  std::uint32_t* bins;
  StreamQueries& queries;

  [[nodiscard]] __device__ int chunks() const {
    return kChunks > 0 ? kChunks : sign_chunks(args.request.params);
  }
};

/// Makes the tables of the group's queries and the references, starts the ring and clears the bins;
/// `maker` has started. Reads of what an append changes no more than `work`. Calls `between` when
/// the tables are there. All threads; ends with a barrier.
template <bool kRecall, int kQuads, int kChunks, int kBits, typename Between>
__device__ void prepare(const StreamBlock<kChunks>& block, const StreamWork& work,
                        const Between& between) {
  StreamRing<kChunks>& ring = block.ring;
  block.bins[threadIdx.x] = 0;
  if constexpr (kRecall) block.bins[kFusedBins + threadIdx.x] = 0;
  ring.find(work);
  block.maker.template make<kBits, StreamRing<kChunks>::kStages - 1>(
      work.query_index, work.kv_head, [&] { ring.start(); }, block.queries);
  ring.start_last();
  between();
  UnitScorer<kQuads, kChunks, kBits, true> scorer(block.args.request, block.args.request.params,
                                                  block.queries, block.chunks(), block.norms);
  find_references<kRecall>(block.args, work, ring, scorer, block.parts, block.queries);
}

/// Scores the block's units of a group, once that is prepared. All threads; ends with a barrier,
/// after which nothing of the block's memory is in use.
template <bool kRecall, int kQuads, int kChunks, int kBits>
__device__ void score_work(const StreamBlock<kChunks>& block, const StreamWork& work) {
  const FilterArgs& args = block.args;
  if (work.first_of_group()) {
    const int number = args.first_block + static_cast<int>(blockIdx.x);
    args.filter.stream_groups[work.group_index].keep(block.queries, number,
                                                     work.last_block(number));
  }
  UnitScorer<kQuads, kChunks, kBits, true> scorer(args.request, args.request.params, block.queries,
                                                  block.chunks(), block.norms);
  write_approximate_keys<kRecall>(args, work, block.ring, scorer, block.parts, block.bins,
                                  block.queries);
  transfer::cuda::copy_async_wait<0>();
  __syncthreads();  // all warps have used the queries
}

// Blocks have runs of (unit, KV head) pairs, which may be of several (query, KV head). Dynamic
// shared memory: the stages of all warps' rings, then the warps' norms; tables are made in the last
// stage and behind it, in `shape.table_bytes`. `shape.early`: tables are made before the wait, and
// references of units that were found before it. kRecall: sums of the heads' weights too.
template <bool kRecall, int kQuads, int kChunks, int kBits>
__global__ __launch_bounds__(kFusedThreads,
                             1) void stream_pass(const __grid_constant__ FilterArgs args,
                                                 const __grid_constant__ FusedInput input,
                                                 const __grid_constant__ StreamShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ StreamUnits units;
  __shared__ __align__(16) StreamQueries queries;
  __shared__ std::uint32_t bins[(kRecall ? 2 : 1) * kFusedBins];
  RecallParts* parts = nullptr;
  if constexpr (kRecall) {
    __shared__ RecallParts of_warps[kFusedWarps];
    parts = of_warps;
  }
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(args.request.params);
  const int stage_bytes = kFusedWarps * fused_unit_bytes(chunks);
  constexpr int kStages = StreamRing<kChunks>::kStages;
  const StreamQueryMaker maker(args, input, chunks, dynamic + (kStages - 1) * stage_bytes,
                               shape.table_bytes);
  StreamRing<kChunks> ring(args, chunks, dynamic);
  auto* const norms = reinterpret_cast<FusedNorms*>(dynamic + kStages * stage_bytes) +
                      static_cast<int>(threadIdx.x) / 32 * kFusedUnit;
  const StreamBlock<kChunks> block{args, maker, ring, norms, parts, bins, queries};
  maker.start();
  if (!input.after_append) transfer::cuda::wait_for_previous();
  pack_rows(args, input);
  const auto blocks = static_cast<int>(gridDim.x);
  StreamWork prepared{};
  bool started = true;       // the maker, and not the ring
  bool ahead = shape.early;  // of the wait
  int at = 0;
  int end = 0;
  std::int64_t length = 0;
  const auto wait = [&] {
    if (input.after_append) transfer::cuda::wait_for_previous();
    transfer::cuda::let_next_start();
    length = StreamUnits::read_length(args.request);
  };
  if (ahead) {
    length = StreamUnits::read_length(args.request);
  } else {
    wait();
  }
  // With `ahead`, an append under way may or may not have counted its tokens; all that are eligible
  // were stored by earlier launches. Where it makes no difference, what is prepared stays.
  const auto find_units = [&] {
    units.fill(args, blocks, length, shape.early && !ahead);
    at = static_cast<int>(blockIdx.x) * units.each;
    end = min(at + units.each, units.total());
  };
  bool found = false;
#pragma unroll 1
  for (;;) {
    if (!found) find_units();
    found = true;
    if (at < end) {
      const StreamWork work(args, units, at, end);
      if (!work.prepares_same(prepared)) {
        if (!started) {
          transfer::cuda::copy_async_wait<0>();  // what was copied is of no use
          __syncthreads();
          maker.start();
        }
        // The length is read while references are made.
        prepare<kRecall, kQuads, kChunks, kBits>(block, work, [&] {
          if (ahead) wait();
        });
        started = false;
      }
      if (ahead) {
        prepared = work;
      } else {
        score_work<kRecall, kQuads, kChunks, kBits>(block, work);
        prepared = {};
        at += work.taken;
      }
    }
    if (ahead) {
      if (at >= end) wait();
      found = ahead = false;
    } else if (at >= end) {
      break;
    }
  }
  transfer::cuda::copy_async_wait<0>();
#endif
}

}  // namespace

void enqueue_stream_pass(cudaStream_t stream, const FilterArgs& args, int blocks) {
  const SelectRequest& request = args.request;
  const FusedInput input = fused_input(request);
  const int chunks = sign_chunks(request.params);
  const int least_tables = StreamTables::planes_at(request.kv.group, request.planes.head_dim,
                                                   projections_of(request.params, chunks)) +
                           StreamTables::kLeastPlaneBytes;
  const auto launch = [&](auto kernel, int stages) {
    const StreamShape shape{.table_bytes = std::max(fused_ring_bytes(1, chunks), least_tables),
                            .early = input.after_append &&
                                     request.rule.recent_tokens >= hashing::kMostOverlappedTokens};
    const int bytes = (stages - 1) * kFusedWarps * fused_unit_bytes(chunks) + shape.table_bytes;
    allow_shape(kernel);
    transfer::cuda::launch_overlapping(stream, kernel, dim3(static_cast<unsigned>(blocks)),
                                       kFusedThreads, static_cast<std::size_t>(bytes), args, input,
                                       shape);
  };
  if (args.recall.active) {
    return visit_recall_shape(request, [&](auto made) {
      launch(stream_pass<true, made.kQuads, made.kChunks, made.kBits>, stages_of(made.kChunks));
    });
  }
  visit_stream_shape(request, [&](auto made) {
    launch(stream_pass<false, made.kQuads, made.kChunks, made.kBits>, stages_of(made.kChunks));
  });
}

std::int64_t stream_group_bytes() { return sizeof(StreamGroup); }

int stream_blocks() {
  return std::min(device_attribute(cudaDevAttrMultiProcessorCount), kMostStreamBlocks);
}

}  // namespace kvtier::scoring::cuda
