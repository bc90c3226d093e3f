#pragma once

#include "scoring/fused/block_exchange_cuda.cuh"

#include <cuda_fp16.h>

#include <cstdint>

/// The first half of a selection on chip: a block copies the sketches of its tokens unit by unit,
/// and leaves in shared memory the integer sums and the norms of each, and of each head the part of
/// its normaliser.
namespace kvtier::scoring::cuda {

/// Addresses of the sketch blocks of a warp's units, which are kFusedWarps apart, so each in the
/// block after that of the one before. A lane has one of 32 units, and that of the next 32: a load
/// that is issued after copies returns after them, and nothing may wait for it. Whole warps only.
class UnitBlocks {
 public:
  /// Of `count` units from `first` on.
  __device__ void start(const std::byte* const* blocks, int first, int count) {
    static_assert(kFusedWarps * kFusedUnit == hashing::kBlockTokens);
    blocks_ = blocks + first / kFusedWarps;
    count_ = count;
    own_ = load(static_cast<int>(threadIdx.x) % 32);
    next_ = load(static_cast<int>(threadIdx.x) % 32 + 32);
  }
  /// That of unit `i`; one after another.
  __device__ const std::byte* at(int i) {
    const unsigned in_lane = static_cast<unsigned>(i) % 32;
    if (in_lane == 0 && i > 0) {
      own_ = next_;
      next_ = load(i + 32 + static_cast<int>(threadIdx.x) % 32);
    }
    return reinterpret_cast<const std::byte*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(own_), in_lane));
  }

 private:
  [[nodiscard]] __device__ const std::byte* load(int i) const {
    return i < count_ ? blocks_[i] : nullptr;
  }

  const std::byte* const* blocks_ = nullptr;
  int count_ = 0;
  const std::byte* own_ = nullptr;
  const std::byte* next_ = nullptr;
};

/// The bits of a unit in shared memory: those of the next chunk or, where two chunks lie side by
/// side, of the next tile are `stride` bytes away.
struct FusedUnitBits {
  unsigned first;
  unsigned stride;
};

/// The vectors of 16 bytes of a unit's codes that the lanes of a warp copy: two each for each
/// chunk. Where the two chunks of a token lie side by side, in the sketch and in shared memory
/// (`TileBits`), neighbouring lanes have them. kChunks: as of `known_chunks`.
template <int kChunks>
class UnitVectors {
 public:
  __device__ UnitVectors(const hashing::SketchGeometry& sketch, int chunks)
      : whole_(kChunks > 0 ? kChunks == 2 : chunks == 2 && sketch.chunks() == 2),
        token_bytes_(kChunks > 0 ? kChunks * hashing::kChunkBytes : sketch.token_stride()) {}

  /// Whether two chunks lie side by side.
  [[nodiscard]] __device__ bool whole() const { return kChunks > 0 ? kChunks == 2 : whole_; }
  /// Bytes of a sketch block from a unit's codes to the lane's first vector,
  [[nodiscard]] __device__ int lane_from() const { return lane() * vector_bytes(); }
  /// and from the first copy to the `i`-th of `chunk`, of two for each.
  [[nodiscard]] __device__ int from(int chunk, int i) const {
    constexpr int kStrideBytes = hashing::kBlockTokens * hashing::kChunkBytes;
    return chunk * (whole() ? kFusedPiece : kStrideBytes) + i * 32 * vector_bytes();
  }
  /// Bytes of a sketch block from a unit's codes to those of the next.
  [[nodiscard]] __device__ int unit_bytes() const { return kFusedUnit * token_bytes_; }
  /// The lane's place in 512 bytes of shared memory.
  [[nodiscard]] __device__ unsigned lane_to() const {
    const unsigned swapped = whole() ? threadIdx.x / 8 % 2 : 0;
    return (threadIdx.x % 32 ^ swapped) * 16;
  }

 private:
  [[nodiscard]] __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  [[nodiscard]] __device__ int vector_bytes() const { return whole() ? 16 : token_bytes_; }

  bool whole_;
  int token_bytes_;  // from a token's vector of a chunk to that of the next
};

/// The units of one warp on their way through its ring of stages: every kFusedWarps-th of the
/// block's. Whole warps only. `FusedLayout` says where they lie.
template <int kQuads, int kChunks>
class FusedRing {
 public:
  __device__ FusedRing(const FilterArgs& args, int kv_head, const FusedShape& shape, int chunks,
                       std::byte* memory)
      : policy_(transfer::cuda::read_once_policy()),
        vectors_(args.request.sketch, chunks),
        spare_bytes_(shape.spare),
        chunks_(chunks),
        stages_(shape.stages) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int units = shape.capacity / kFusedUnit;
    norms_to_ = transfer::cuda::shared_address(memory) + warp * kNormBytes;
    const unsigned sums = transfer::cuda::shared_address(memory) + shape.sums;
    last_place_ = sums + (units - 1 - (units - 1 - warp) % kFusedWarps) * kSumsBytes;
    spare_ = sums + units * kSumsBytes + warp * shape.spare;
    const hashing::SketchGeometry& sketch = args.request.sketch;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    codes_ = sketch.chunk_offset(kv_head, 0, 0) + vectors_.lane_from();
    norms_ = sketch.norms_offset(kv_head, 0) + lane * 16;
    copies_norms_ = lane * 16 < kNormBytes;
  }

  /// Starts to copy the first units. What an earlier call has started has come to nothing.
  __device__ void start(const std::byte* const* blocks, const FusedShare& share) {
    transfer::cuda::copy_async_wait<0>();
    __syncwarp();
    first_ = share.first + static_cast<int>(threadIdx.x / 32);
    count_ = max(share.last - first_ + kFusedWarps - 1, 0) / kFusedWarps;
    next_ = 0;
    const int before = max(count_ - 1, 0);
    stage_ = before - small_quotient(before, stages_) * stages_;
    blocks_.start(blocks, first_, count_);
#pragma unroll 1
    for (int i = 0; i < stages_; ++i) fill_next();
  }
  /// As of `UnitVectors`.
  [[nodiscard]] __device__ bool whole() const { return vectors_.whole(); }
  /// Waits for the next unit: its norms are in their place, and its bits where this returns.
  __device__ FusedUnitBits wait() {
    if (stages_ == 2) {
      transfer::cuda::copy_async_wait<1>();
    } else {
      transfer::cuda::copy_async_wait<2>();
    }
    __syncwarp();  // the copies of all lanes
    return bits_of(stage_);
  }
  /// Gives the unit's stage to the copies.
  __device__ void release() {
    __syncwarp();  // all lanes have read it
    fill_next();
  }

 private:
  /// One group of copies per call, empty past the end, so that waiting can count groups.
  __device__ void fill_next() {
    if (next_ < count_) fill();
    transfer::cuda::copy_async_commit();
    ++next_;
    stage_ = (stage_ == 0 ? stages_ : stage_) - 1;
  }
  [[nodiscard]] __device__ unsigned piece_at(int piece) const {
    const int at = piece * kFusedPiece;
    if (kQuads == 1 || at < spare_bytes_) return spare_ + at;
    const int over = at - spare_bytes_;
    return last_place_ - over / kSumsBytes * (kFusedWarps * kSumsBytes) + over % kSumsBytes;
  }
  [[nodiscard]] __device__ FusedUnitBits bits_of(int stage) const {
    const unsigned first = piece_at(stage * chunks_);
    return {first, kQuads == 1 ? kFusedPiece : piece_at(stage * chunks_ + 1) - first};
  }
  __device__ void fill() {
    constexpr int kUnitsPerBlock = hashing::kBlockTokens / kFusedUnit;
    const std::byte* block = blocks_.at(next_);
    const int unit = first_ % kUnitsPerBlock;  // of the block, as of every unit of the warp
    const FusedUnitBits bits = bits_of(stage_);
    const unsigned to = bits.first + vectors_.lane_to();
    const std::byte* codes = block + codes_ + unit * vectors_.unit_bytes();
    if (copies_norms_) {
      transfer::cuda::copy_async_16_once(
          norms_to_ + static_cast<unsigned>(next_ * kFusedWarps * kNormBytes) +
              threadIdx.x % 32 * 16,
          block + norms_ + unit * kNormBytes, policy_);
    }
#pragma unroll(kChunks > 0 ? kChunks : 1)
    for (int chunk = 0; chunk < chunks_; ++chunk) {
#pragma unroll
      for (int i = 0; i < kFusedPiece / 512; ++i) {
        transfer::cuda::copy_async_16_once(
            to + static_cast<unsigned>(chunk) * bits.stride + i * 512,
            codes + vectors_.from(chunk, i), policy_);
      }
    }
  }

  static constexpr int kNormBytes = kFusedUnit * hashing::kNormBytes;
  static constexpr int kSumsBytes = fused_sums_bytes(kQuads);

  unsigned norms_to_;    // of the warp's first unit
  unsigned last_place_;  // of the sums of its last one
  unsigned spare_;
  std::uint64_t policy_;
  UnitBlocks blocks_;
  UnitVectors<kChunks> vectors_;
  std::int64_t codes_;  // of the lane's first vector in a block
  std::int64_t norms_;
  int spare_bytes_;
  int chunks_;
  int stages_;
  int first_ = 0;  // unit of the warp,
  int count_ = 0;  // how many it has,
  int next_ = 0;   // and the next to copy
  int stage_ = 0;
  bool copies_norms_;
};

/// The column operands of a quad, one word per chunk and product, in shared memory. kKnownChunks 0:
/// their number is known at run time only, and they are read again for every product.
template <int kKnownChunks, int kWeightBits>
class FusedColumns {
 public:
  static constexpr int kBits = kWeightBits;
  static constexpr int kChunks = kKnownChunks;
  static constexpr int kProducts = kBits / 2;

  __device__ void load(const std::uint32_t* columns) {
    columns_ = columns + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kChunks * kProducts; ++i) held_[i] = columns_[i * 32];
  }
  __device__ std::uint32_t word(int chunk, int product) const {
    const int at = chunk * kProducts + product;
    return kChunks > 0 ? held_[kChunks > 0 ? at : 0] : columns_[at * 32];
  }

 private:
  const std::uint32_t* columns_ = nullptr;
  std::uint32_t held_[kChunks > 0 ? kChunks* kProducts : 1];
};

/// Base-2 logarithm of a norm, which is no subnormal; -infinity for 0.
__device__ inline float log2_norm(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// The two norms of a token in one word, 0 for one that is not finite.
struct PackedNorms {
  /// Of those in a sketch block, of which none exceeds `kNonfiniteNorm`.
  __device__ static std::uint32_t pack(std::uint32_t norms) {
    constexpr std::uint32_t kToSign = 0x8000U - hashing::kNonfiniteNorm;
    return ((norms + (kToSign << 16 | kToSign)) & 0x80008000U) == 0 ? norms : 0U;
  }
  /// `weight`: what the logarithm of the value norm counts, 0 or 1.
  __device__ static FusedNorms unpack(std::uint32_t packed, float weight) {
    const float key = norm_value(static_cast<std::uint16_t>(packed));
    const float log_value =
        weight * log2_norm(norm_value(static_cast<std::uint16_t>(packed >> 16)));
    return {key, packed != 0 ? log_value : -INFINITY};
  }
};

/// The block's (query, KV head), and its tokens.
struct FusedWork {
  QueryPlan plan;
  std::int64_t group_index;
  int query_index;
  int kv_head;
  int first_token;
  int count;  // of the block's tokens, in whole units
  int begin;  // of the eligible ones among them
  int end;

  /// `early`: as of `plan_of_query`.
  __device__ FusedWork(const FilterArgs& args, int query_index_, int kv_head_, unsigned rank,
                       unsigned blocks, bool early = false)
      : plan(plan_of_query(args, args.request.params, query_index_, early)),
        group_index(std::int64_t{query_index_} * args.request.kv.kv_heads + kv_head_),
        query_index(query_index_),
        kv_head(kv_head_) {
    const FusedShare share(plan.begin, plan.end, rank, blocks);
    first_token = share.first * kFusedUnit;
    count = share.units() * kFusedUnit;
    begin = static_cast<int>(plan.begin - first_token);
    end = static_cast<int>(min(plan.end - first_token, std::int64_t{count}));
  }
  /// Whether the query has nothing to choose from. `plan.k` takes a division of doubles.
  [[nodiscard]] __device__ bool empty() const { return plan.end <= plan.begin; }
};

/// The share of a block before the wait, when an append under way may or may not have counted its
/// tokens. All that are eligible were stored by earlier launches: appends that overlap with a
/// selection add no more tokens than are recent.
__device__ inline FusedShare early_share(const SelectRequest& request, int query_index,
                                         unsigned rank, unsigned blocks) {
  const transfer::QueryToken& query = request.query_batch[query_index];
  const transfer::SequenceCounters* counters = request.sequences[query.sequence].counters;
  const transfer::AttendedSpans spans =
      transfer::attended_spans(request.rule, __ldcg(&counters->length), query);
  return {spans.sink_end, spans.eligible_end, rank, blocks};
}

/// Counts the tokens that a query's first kernel scores. One thread of a (query, KV head).
__device__ inline void count_scored(const FilterArgs& args, const QueryPlan& plan, int kv_head,
                                    std::int64_t group_index) {
  const SelectRequest& request = args.request;
  const bool empty = plan.end <= plan.begin;
  if (empty) args.selection.counts[group_index] = 0;
  if (kv_head == 0 && !empty && request.flags != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->tokens_scored),
              static_cast<unsigned long long>((plan.end - plan.begin) * request.kv.kv_heads));
  }
}

/// Adds up what lanes have whose numbers are alike but for multiples of `kFirst`; these all get
/// next to the same.
template <int kFirst = 1>
__device__ FusedSum sum_lanes(FusedSum total) {
#pragma unroll
  for (int distance = kFirst; distance < 32; distance *= 2) {
    const float most = __shfl_xor_sync(kFullWarp, total.most, distance);
    const float sum = __shfl_xor_sync(kFullWarp, total.sum, distance);
    total.add(most, sum);
  }
  return total;
}

/// Scores the block's tokens to `scores`, and fills `queries.warp_sums` with their sums and
/// `others`: lane h has what is added to head h. A lane has one head of each quad. `factors` is of
/// the heads in whole quads.
template <int kQuads, int kChunks, int kBits>
__device__ void score_tokens(const ScoreParams& params, FusedRing<kQuads, kChunks>& ring,
                             const FusedWork& work, int chunks, const float* factors,
                             const FusedScores& scores, FusedQueries& queries,
                             const FusedSum* others) {
  static_assert(kFusedUnit == 2 * kFusedTile);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const float weight = params.weighting == ValueWeighting::kLogit ? 1.0F : 0.0F;
  constexpr int kTiles = kFusedUnit / kFusedTile;
  FusedColumns<kChunks, kBits> columns[kQuads];
  FusedColumns<kChunks, 2> last_columns[(kQuads + 1) / 2];  // of an odd number of bits
  float own_factors[kQuads];
  int weight_sums[kQuads];
  FusedSum totals[kQuads];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    columns[quad].load(queries.columns + quad * chunks * (kBits / 2) * 32);
    if constexpr (kBits % 2 == 1) {
      const int products = kQuads * chunks * (kBits / 2) + quad / 2 * chunks;
      last_columns[quad / 2].load(queries.columns + products * 32);
    }
    own_factors[quad] = factors[quad * 4 + lane % 4];
    weight_sums[quad] = queries.weight_sums[quad * 4 + lane % 4];
  }
  uint2* sums_to = scores.sums + warp * kTiles * kQuads * 32 + lane;
#pragma unroll 1
  for (int first = warp * kFusedUnit; first < work.count; first += kFusedWarps * kFusedUnit) {
    const FusedUnitBits bits = ring.wait();
    std::uint32_t* const packed_to = scores.norms + first;
    std::uint32_t packed[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      packed[tile] = PackedNorms::pack(packed_to[tile * kFusedTile + lane]);
    }
    __syncwarp();  // all lanes have read what packed norms replace
    FusedNorms norms[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      packed_to[tile * kFusedTile + FusedScores::entry_of(static_cast<unsigned>(lane))] =
          packed[tile];
      FusedNorms own = PackedNorms::unpack(packed[tile], weight);
      const int token = first + tile * kFusedTile + lane;
      if (token < work.begin || token >= work.end) own.log_value = -INFINITY;
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int from = row * 8 + lane / 4;
        norms[tile][row] = {__shfl_sync(kFullWarp, own.key, from),
                            __shfl_sync(kFullWarp, own.log_value, from)};
      }
    }
    TileBits<kChunks> tile_bits[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      tile_bits[tile].load(bits.first, bits.stride, tile, ring.whole());
    }
    int last[kTiles][2][1][4];
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float values[kTiles][4];
      float most = totals[quad].most;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (kBits % 2 == 1 && quad % 2 == 0) {
          count_planes(tile_bits[tile], last_columns[quad / 2], chunks, last[tile]);
        }
        int sums[4];
        signed_sums(tile_bits[tile], columns[quad], chunks, weight_sums[quad], last[tile], quad % 2,
                    sums);
        sums_to[(tile * kQuads + quad) * 32] = make_uint2(__byte_perm(sums[0], sums[1], 0x5410),
                                                          __byte_perm(sums[2], sums[3], 0x5410));
#pragma unroll
        for (int row = 0; row < 4; ++row) {
          const FusedNorms norm = norms[tile][row];
          values[tile][row] =
              fmaf(own_factors[quad] * static_cast<float>(sums[row]), norm.key, norm.log_value);
          most = fmaxf(most, values[tile][row]);
        }
      }
      float sum = totals[quad].sum * exp2_fast(totals[quad].most - most);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int row = 0; row < 4; ++row) sum += exp2_fast(values[tile][row] - most);
      }
      totals[quad] = {most, sum};
    }
    sums_to += kFusedWarps * kTiles * kQuads * 32;
    ring.release();
  }
  transfer::cuda::copy_async_wait<0>();
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    totals[quad] = sum_lanes<4>(totals[quad]);
    if (others != nullptr) {
      totals[quad].add(__shfl_sync(kFullWarp, others->most, quad * 4 + lane % 4),
                       __shfl_sync(kFullWarp, others->sum, quad * 4 + lane % 4));
    }
    if (lane < 4) queries.warp_sums[warp][quad * 4 + lane] = {totals[quad].most, totals[quad].sum};
  }
}

/// The block's sum for a head. A whole warp, after a barrier.
template <typename Queries>
__device__ FusedSum sum_of_block(const Queries& queries, int head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  FusedSum total;
  if (lane < kFusedWarps) {
    const float2 of_warp = queries.warp_sums[lane][head];
    total = {of_warp.x, of_warp.y};
  }
  return sum_lanes(total);
}

/// Base-2 log-sum-exp.
__device__ inline float normaliser(const FusedSum& total) {
  return total.sum > 0.0F ? total.most + __log2f(total.sum) : 0.0F;
}

/// Adds up what the blocks of the group have for a head. A whole warp; all lanes get the same.
__device__ inline FusedSum sum_of_group(const FusedSum& of_block, const BlockExchange& peers,
                                        int head) {
  if (peers.alone()) return of_block;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  static_assert(kFusedBlocks <= 32);
  auto& sums = peers.box.sums;
  if (lane == 0) {
    peers.post_pair(sums[peers.rank][head], kSumsStage, __float_as_uint(of_block.most),
                    __float_as_uint(of_block.sum));
  }
  uint2 bits[1];
  const bool has = static_cast<unsigned>(lane) < peers.blocks;
  peers.fetch<1>(sums[has ? lane : 0][head], 0, has ? 1 : 0, kSumsStage, bits);
  FusedSum total;
  if (has) total = {__uint_as_float(bits[0].x), __uint_as_float(bits[0].y)};
  return sum_lanes(total);
}

/// Exchanges the parts of the normalisers: fills `shared.references`, for heads past the group with
/// infinity. All threads; begins and ends with a barrier.
__device__ inline void exchange_sums(const FusedQueries& queries, const BlockExchange& peers,
                                     int group, int heads, FusedShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32;
  static_assert(kFusedWarps >= kMaxGroup);
  __syncthreads();  // the sums of all warps are there, and no warp uses the ring any more
  if (head < group) {
    const FusedSum total = sum_of_group(sum_of_block(queries, head), peers, head);
    if (lane == 0) shared.references[head] = normaliser(total);
  } else if (head < heads && lane == 0) {
    shared.references[head] = INFINITY;
  }
  __syncthreads();
}

}  // namespace kvtier::scoring::cuda
