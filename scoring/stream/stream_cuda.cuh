#pragma once

#include "scoring/fused/choice_cuda.cuh"

#include <cstdint>

/// Selection by a stream of keys: a selection per KV head of any length, number of queries and
/// group of query heads, norm-aware with integer weights or of soft collisions, whose method
/// differs in part (stream/collisions_cuda.cuh).
///
/// 1. `stream_pass` (stream/pass_cuda.cu) reads every sketch once. Its blocks share out evenly the
///    units of all queries that it serves and of all KV heads. Of each token it writes a 16-bit
///    *approximate key*, the combined score with *reference* normalisers that a few units give, and
///    it sums the exact normalisers.
/// 2. `choose_from_stream` (stream/choose_cuda.cu) finds the approximate key of the k-th best. With
///    the exact normalisers it knows how far approximate keys can be off. It scores again, exactly,
///    the tokens that may belong to the k best, and chooses among them; where the rows are on the
///    device it can attend to them, too.
///
/// The bound of step 2 is a proof, so the selection is exact whatever the references are: bad ones
/// make more tokens be scored again.
namespace kvtier::scoring::cuda {

/// Approximate keys of sums of shares: 1/128 octaves above 2^-300, 1 the least of an eligible
/// token, 0 of others.
struct ShareKeys {
  static constexpr float kSteps = 128.0F;
  static constexpr float kOffset = 300.0F;
  using ExactBins = ShareBins;  ///< Of the choice.

  /// The bin of a key, of 1/8 octaves from 2^-44 to 2^20: what is below counts in the first, what
  /// is above in the last. The first has a count of no use: tokens that are not eligible count,
  /// too.
  __device__ static unsigned bin_of(unsigned key) {
    constexpr unsigned kEnd = kBinBase + (kFusedBins << kBinShift);
    return (min(max(key, unsigned{kBinBase}), kEnd - 1) >> kBinShift) - (kBinBase >> kBinShift);
  }
  /// The least key of a bin but the first.
  __device__ static int least_of(int bin) { return kBinBase + (bin << kBinShift); }
  static constexpr int kBinBase = 256 * 128;
  static constexpr int kBinShift = 4;
};

/// The approximate key of a token, of the base-2 logarithm of what it is ranked by, -infinity of
/// one that is not eligible.
template <typename Keys>
__device__ unsigned approximate_key(float log, bool eligible) {
  const float steps = fmaf(log, Keys::kSteps, Keys::kOffset * Keys::kSteps);
  return static_cast<unsigned>(fminf(fmaxf(steps, eligible ? 1.0F : 0.0F), 65535.0F));
}

/// Sums of shares below this one, base 2, may have underflowed: bounds below it take every token.
inline constexpr float kLeastLogSum = -110.0F;
/// References further below the exact normalisers than this may have let shares overflow.
inline constexpr float kMostLogShare = 64.0F;

/// Units of the eligible tokens of `args.part`, each once for every KV head, and how the blocks of
/// the pass share them: runs of `each` neighbours of all pairs of a unit and a KV head. Where that
/// costs little, no block has units of two KV heads: then the units of each are rounded up to whole
/// runs.
struct StreamUnits {
  int begin[transfer::kMaxBatch];       ///< Eligible tokens of a row;
  int end[transfer::kMaxBatch];         ///< no more than `begin` where there are none.
  int padded[transfer::kMaxBatch];      ///< Pairs of a KV head,
  int before[transfer::kMaxBatch + 1];  ///< and of the rows before a row.
  int each;

  /// First unit of a query, and how many it has.
  [[nodiscard]] __device__ int first(int query_index) const {
    return begin[query_index] / kFusedUnit;
  }
  [[nodiscard]] __device__ int count(int query_index) const {
    return end[query_index] > begin[query_index]
               ? (end[query_index] + kFusedUnit - 1) / kFusedUnit - first(query_index)
               : 0;
  }
  /// The length of the sequence of the row that a thread has in `fill`. A load that is issued after
  /// copies to shared memory returns after them, so nothing should wait for it at once.
  [[nodiscard]] static __device__ std::int64_t read_length(const SelectRequest& request) {
    const auto query_index = static_cast<int>(threadIdx.x);
    if (query_index >= request.query_batch.count) return 0;
    const int sequence = request.query_batch[query_index].sequence;
    return __ldcg(&request.sequences[sequence].counters->length);
  }
  /// Shares the units among so many blocks. `length`: what `read_length` has returned. Where they
  /// were shared before, `again`, and no row has more or fewer units, nothing but `end` changes.
  /// All threads of a block of at least kMaxBatch; begins and ends with a barrier.
  __device__ void fill(const FilterArgs& args, int blocks, std::int64_t length, bool again) {
    const SelectRequest& request = args.request;
    const auto query_index = static_cast<int>(threadIdx.x);
    int changed = again ? 0 : 1;
    if (query_index < request.query_batch.count) {
      const transfer::QueryToken& query = request.query_batch[query_index];
      const transfer::AttendedSpans spans = transfer::attended_spans(request.rule, length, query);
      const int had = again ? count(query_index) : -1;
      const int had_first = again ? first(query_index) : -1;
      begin[query_index] = static_cast<int>(spans.sink_end);
      end[query_index] =
          args.part.has(query_index) ? static_cast<int>(spans.eligible_end) : begin[query_index];
      if (had != count(query_index) || had_first != first(query_index)) changed = 1;
    }
    if (__syncthreads_or(changed) == 0) return;
    if (threadIdx.x < 32) share(request, blocks);
    __syncthreads();
  }
  [[nodiscard]] __device__ int total() const { return before[transfer::kMaxBatch]; }
  /// The query that has pair `at`.
  [[nodiscard]] __device__ int query_of(int at) const {
    int query_index = 0;
    for (int step = transfer::kMaxBatch / 2; step > 0; step /= 2) {
      if (before[query_index + step] <= at) query_index += step;
    }
    return query_index;
  }

 private:
  /// The first warp.
  __device__ void share(const SelectRequest& request, int blocks) {
    constexpr int kRowsOfLane = transfer::kMaxBatch / 32;
    static_assert(kRowsOfLane == 2);
    // What a block takes for a second KV head: tables and references, a unit for each warp a few
    // times over.
    constexpr int kUnitsOfChange = 3 * kFusedWarps;
    const int lane = static_cast<int>(threadIdx.x);
    const int kv_heads = request.kv.kv_heads;
    int own[kRowsOfLane];
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int at = lane * kRowsOfLane + i;
      own[i] = at < request.query_batch.count ? count(at) : 0;
    }
    const auto all = static_cast<int>(
        __reduce_add_sync(kFullWarp, static_cast<unsigned>((own[0] + own[1]) * kv_heads)));
    const int evenly = max((all + blocks - 1) / blocks, 1);
    // A lane tries a number of units: whether there are blocks enough if none has two KV heads.
    const int tried = evenly + kUnitsOfChange * lane / 31;
    int wanted = 0;
#pragma unroll 1
    for (int query_index = 0; query_index < request.query_batch.count && wanted <= blocks;
         ++query_index) {
      wanted += (count(query_index) + tried - 1) / tried * kv_heads;
    }
    const unsigned enough = __ballot_sync(kFullWarp, wanted <= blocks);
    const int size =
        enough != 0 ? __shfl_sync(kFullWarp, tried, __ffs(static_cast<int>(enough)) - 1) : evenly;
    for (int i = 0; i < kRowsOfLane; ++i) {
      if (enough != 0) own[i] = (own[i] + size - 1) / size * size;
      const int at = lane * kRowsOfLane + i;
      padded[at] = own[i];
      own[i] *= kv_heads;
    }
    const int through = inclusive_warp_sum(own[0] + own[1]);
    before[lane * kRowsOfLane + 1] = through - own[1];
    before[lane * kRowsOfLane + 2] = through;
    if (lane == 0) {
      before[0] = 0;
      each = size;
    }
  }
};

/// `count` tokens from `begin` on.
struct EligibleTokens {
  int begin;
  unsigned count;

  [[nodiscard]] __device__ bool has(int token) const {
    return static_cast<unsigned>(token - begin) < count;
  }
};

/// What a block scores of one (query, KV head): `references` units that are spread over the
/// sequence, the same in every block, then its own.
struct StreamWork {
  const std::byte* const* blocks;  ///< Sketch blocks of the row.
  int begin;                       ///< Eligible tokens of the row.
  int end;
  std::int64_t group_index;
  int query_index;
  int kv_head;
  int first_of_query;  ///< First unit of the query,
  int of_query;        ///< how many it has.
  int references;
  int first;  ///< First unit of the block,
  int count;  ///< how many it has,
  int taken;  ///< and with those that fill the run of the KV head's last block.
  int each;   ///< Units of every block.

  static constexpr int kUnitsPerReference = 4096;
  static constexpr int kFewestReferences = 2 * kFusedWarps;
  static constexpr int kMostReferences = 8 * kFusedWarps;

  StreamWork() = default;
  /// `at`: a pair of a unit and a KV head. Of no more units than the block has, and of one KV head.
  __device__ StreamWork(const FilterArgs& args, const StreamUnits& units, int at, int block_end)
      : query_index(units.query_of(at)), each(units.each) {
    const int in_row = at - units.before[query_index];
    const int padded = units.padded[query_index];
    of_query = units.count(query_index);
    kv_head = in_row / padded;
    const int in_head = in_row - kv_head * padded;
    const SelectRequest& request = args.request;
    blocks = request.sketches[request.query_batch[query_index].sequence];
    begin = units.begin[query_index];
    end = units.end[query_index];
    group_index = std::int64_t{query_index} * request.kv.kv_heads + kv_head;
    first_of_query = units.first(query_index);
    first = first_of_query + in_head;
    count = max(min(of_query - in_head, block_end - at), 0);
    taken = min(padded - in_head, block_end - at);
    // Not of the last one, in which an append makes more tokens eligible.
    const int wanted = (of_query + kUnitsPerReference - 1) / kUnitsPerReference * kFusedWarps;
    references = min(min(max(wanted, kFewestReferences), kMostReferences), max(of_query - 1, 1));
  }
  [[nodiscard]] __device__ EligibleTokens eligible() const {
    return {begin, static_cast<unsigned>(end - begin)};
  }
  [[nodiscard]] __device__ bool first_of_group() const { return first == first_of_query; }
  /// The last block that has units of the group, of which `block` has the first `count`.
  [[nodiscard]] __device__ int last_block(int block) const {
    return block + (of_query - count + each - 1) / each;
  }
  /// Whether the same units are copied for both, and references are equal.
  [[nodiscard]] __device__ bool prepares_same(const StreamWork& other) const {
    return group_index == other.group_index && first == other.first && count == other.count &&
           of_query == other.of_query && begin == other.begin && (of_query > 1 || end == other.end);
  }
  /// Units of a warp that give references; the others follow.
  [[nodiscard]] __device__ int warp_references(int warp) const {
    return max(references - warp + kFusedWarps - 1, 0) / kFusedWarps;
  }
  [[nodiscard]] __device__ int warp_units(int warp) const {
    return max(count - warp + kFusedWarps - 1, 0) / kFusedWarps;
  }
  /// The warp's unit i of those that give references.
  [[nodiscard]] __device__ int reference_unit(int warp, int i) const {
    return first_of_query + (warp + i * kFusedWarps) * max(of_query - 1, 1) / references;
  }
  [[nodiscard]] __device__ int unit(int warp, int i) const {
    return first + warp + i * kFusedWarps;
  }
};

inline constexpr int kUnitTiles = kFusedUnit / kFusedTile;

/// A launch of the pass.
struct StreamShape {
  int table_bytes;  ///< Of shared memory, for the tables while they are made.
  bool early;       ///< Whether sketches may be read before the wait.
};

inline constexpr int kStreamColumns = kMaxGroup / 4 * kFusedChunks * kFusedMostBits / 2 * 32;

/// Sums over eligible tokens of one head, for a recall target. y is the base-2 logit of a token,
/// without its value norm, less the reference of the head.
struct RecallSums {
  float weights[4];  ///< Of 2^(slope y) y^i.
  float first;       ///< Of y,
  float second;      ///< y^2,
  float key_squares;
  float count;

  __device__ void add(const RecallSums& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] += other.weights[i];
    first += other.first;
    second += other.second;
    key_squares += other.key_squares;
    count += other.count;
  }
};
static_assert(sizeof(RecallSums) == kRecallSums * sizeof(float));

/// Slope of a head's weights (docs/algorithm.md, section 3), 0 to 1, from the mean and the mean
/// square of its base-2 logits. `noise`: variance of their noise, base 2.
__device__ inline float recall_slope(float mean, float mean_square, float noise) {
  const float variance = mean_square - mean * mean;
  return variance > noise ? 1.0F - noise / variance : 0.0F;
}
/// Variance of the noise of a head's base-2 logits.
__device__ inline float recall_noise(const FilterArgs& args, float query_norm,
                                     float mean_key_square) {
  const float norm = query_norm * kLog2E;
  return static_cast<float>(args.recall.noise) * norm * norm * mean_key_square;
}

/// What scoring needs of the heads of one group.
struct StreamWeights {
  alignas(16) std::uint32_t columns[kStreamColumns];
  int weight_sums[kMaxGroup];
  float factors[kMaxGroup];     ///< Turn sums into base-2 logits; 0 past the group.
  float references[kMaxGroup];  ///< Base-2 normalisers; infinity past the group.
  float slopes[kMaxGroup];      ///< Of the weights of a recall target, in the pass.
  float norms[kMaxGroup];       ///< Of the queries.
};

/// The same in shared memory.
struct StreamQueries : StreamWeights {
  std::uint32_t largest[kMaxGroup];  ///< Bits of the largest projections, in the pass.
  float2 warp_sums[kFusedWarps][kMaxGroup];
};

/// What the pass leaves of a (query, KV head) of which something is eligible.
struct StreamGroup {
  StreamWeights weights;
  int first_block;  ///< Blocks of the pass that have units of it.
  int last_block;

  /// All threads of a block; nothing of `queries` may change before a barrier. `slopes` are of use
  /// with a recall target only.
  __device__ void keep(const StreamQueries& queries, int first, int last) {
    const auto* const from = reinterpret_cast<const uint4*>(&queries);
    for (int i = static_cast<int>(threadIdx.x); i < kVectors; i += kFusedThreads) {
      reinterpret_cast<uint4*>(&weights)[i] = from[i];
    }
    keep_blocks(first, last);
  }
  /// The same of collisions, which have references only.
  __device__ void keep_references(const float* of_group, int first, int last) {
    if (threadIdx.x < kMaxGroup) weights.references[threadIdx.x] = of_group[threadIdx.x];
    keep_blocks(first, last);
  }
  __device__ void load_references(StreamQueries& queries) const {
    if (threadIdx.x < kMaxGroup) {
      queries.references[threadIdx.x] = __ldcg(weights.references + threadIdx.x);
    }
  }
  /// As `keep` the other way, without a barrier.
  __device__ void load(StreamQueries& queries) const {
    const auto* const from = reinterpret_cast<const uint4*>(&weights);
    for (int i = static_cast<int>(threadIdx.x); i < kVectors; i += kFusedThreads) {
      reinterpret_cast<uint4*>(&queries)[i] = __ldcg(from + i);
    }
  }
  /// The columns of a whole code, of `kFusedMostBits` bits a weight, from those of its first bits:
  /// both have the same weights of the query, of `kBits` bits, each times the significance of a
  /// plane. Weight sums and factors, too. No barrier.
  template <int kBits>
  __device__ void load_whole(const ScoreParams& first, const ScoreParams& whole, int quads,
                             StreamQueries& queries) const {
    constexpr int kProducts = kFusedMostBits / 2;
    const auto thread = static_cast<int>(threadIdx.x);
    const int chunks = sign_chunks(whole);
    const int words = whole.projections / 32;  // of the planes of one bit of the code
    for (int i = thread; i < quads * chunks * kProducts * 32; i += kFusedThreads) {
      const int product = i / 32 % kProducts;
      const int chunk = i / 32 / kProducts % chunks;
      const int quad = i / 32 / kProducts / chunks;
      const int column = i % 32 / kWordsPerChunk;
      const int word = chunk * kWordsPerChunk + i % kWordsPerChunk;
      // Times 2^n is n bits further; those above are the sign.
      const int bit =
          product * 2 + column % 2 - (whole.code_bits - 1 - small_quotient(word, words));
      std::uint32_t set = 0;
      if (bit >= 0 && word < whole.code_bits * words) {
        const int from = min(bit, kBits - 1);
        const int last = (first.code_bits - 1) * words + word % words;
        const int holder = (column / 2 * 2 + from % 2) * kWordsPerChunk + last % kWordsPerChunk;
        const int of_first = quad * sign_chunks(first) + last / kWordsPerChunk;
        set = __ldcg(weights.columns + (of_first * (kBits / 2) + from / 2) * 32 + holder);
      }
      queries.columns[i] = set;
    }
    if (thread < kMaxGroup) {
      const int sum = __ldcg(weights.weight_sums + thread) / ((1 << first.code_bits) - 1);
      queries.weight_sums[thread] = sum * ((1 << whole.code_bits) - 1);
      queries.factors[thread] =
          __ldcg(weights.factors + thread) * (whole.sign_scale / first.sign_scale);
    }
  }

 private:
  static constexpr int kVectors = sizeof(StreamWeights) / sizeof(uint4);
  static_assert(sizeof(StreamWeights) % sizeof(uint4) == 0);

  __device__ void keep_blocks(int first, int last) {
    if (threadIdx.x != 0) return;
    first_block = first;
    last_block = last;
  }
};

/// Scores of units of 64 tokens in shared memory, by a warp. Lane 4 g + t has tokens r * 8 + g of
/// each tile, r = 0 .. 3, and head t of each quad. kWhole: all tiles of a unit are scored, by
/// unrolled loops.
template <int kQuads, int kChunks, int kBits, bool kWhole = false>
class UnitScorer {
 public:
  /// `norms`: room for the norms of a unit, of this warp.
  __device__ UnitScorer(const SelectRequest& request, const ScoreParams& params,
                        const StreamQueries& queries, int chunks, FusedNorms* norms)
      : whole_(UnitVectors<kChunks>(request.sketch, chunks).whole()),
        norms_(norms),
        chunks_(kChunks > 0 ? kChunks : chunks),
        weight_(params.weighting == ValueWeighting::kLogit ? 1.0F : 0.0F) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      columns_[quad].load(queries.columns + quad * chunks_ * (kBits / 2) * 32);
      factors_[quad] = queries.factors[quad * 4 + lane % 4];
      offsets_[quad] = kExact + static_cast<float>(queries.weight_sums[quad * 4 + lane % 4]);
    }
  }
  /// Takes the norms of a unit, of tokens from `first` on; those that are not eligible are left
  /// out.
  __device__ void begin_unit(const std::byte* unit, int first, const EligibleTokens& eligible) {
    unit_ = unit;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint2 two = reinterpret_cast<const uint2*>(unit + chunks_ * kFusedPiece)[lane];
    if constexpr (kHoldsBits) {
#pragma unroll
      for (int tile = 0; tile < kUnitTiles; ++tile) load_bits(tile, bits_[tile]);
    }
    FusedNorms own[2] = {PackedNorms::unpack(PackedNorms::pack(two.x), weight_),
                         PackedNorms::unpack(PackedNorms::pack(two.y), weight_)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!eligible.has(first + lane * 2 + i)) own[i].log_value = -INFINITY;
    }
    __syncwarp();  // all lanes have read those of the unit before
    *reinterpret_cast<float4*>(norms_ + lane * 2) =
        make_float4(own[0].key, own[0].log_value, own[1].key, own[1].log_value);
    __syncwarp();
  }
  /// Base-2 logits of the lane's tokens of a tile, of its head of a quad, with value norms as the
  /// weighting says.
  __device__ void score(int quad, int tile, float (&values)[4]) const {
    float logits[4];
    score(quad, tile, values, logits);
  }
  /// Key norm of the lane's token `row` of a tile.
  [[nodiscard]] __device__ float key_norm(int tile, int row) const {
    return norms_[tile * kFusedTile + static_cast<int>(threadIdx.x) % 32 / 4 + row * 8].key;
  }
  /// The same, and without value norms: -infinity of tokens that are left out.
  __device__ void score(int quad, int tile, float (&values)[4], float (&logits)[4]) const {
    int counts[2][kBits / 2][4];
    if constexpr (kHoldsBits) {
      count_planes(bits_[tile], columns_[quad], chunks_, counts);
    } else {
      TileBits<kChunks> bits_of_tile;
      load_bits(tile, bits_of_tile);
      count_planes(bits_of_tile, columns_[quad], chunks_, counts);
    }
    const FusedNorms* norms = norms_ + tile * kFusedTile + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      // The bits of kExact + n are those of kExact, and n.
      int bits = __float_as_int(kExact);
#pragma unroll
      for (int bit = 0; bit < kBits; ++bit) {
        bits += 2 * plane_weight<kBits>(bit) * counts[row / 2][bit / 2][row % 2 * 2 + bit % 2];
      }
      const float sum = __int_as_float(bits) - offsets_[quad];
      const FusedNorms norm = norms[row * 8];
      values[row] = fmaf(factors_[quad] * sum, norm.key, norm.log_value);
      logits[row] = norm.log_value > -INFINITY ? factors_[quad] * sum * norm.key : -INFINITY;
    }
  }

 private:
  /// Whether the bits of a unit are read before its norms, which are on their way longer.
  static constexpr bool kHoldsBits = kWhole && kQuads == 1 && kChunks > 0;

  __device__ void load_bits(int tile, TileBits<kChunks>& bits) const {
    bits.load(transfer::cuda::shared_address(unit_), kFusedPiece, tile, whole_);
  }

  /// Integers of up to 22 bits, added to it, are exact.
  static constexpr float kExact = 0x1.8p23F;

  const std::byte* unit_ = nullptr;
  bool whole_;
  FusedNorms* norms_;
  int chunks_;
  float weight_;
  TileBits<kChunks> bits_[kHoldsBits ? kUnitTiles : 1];
  FusedColumns<kChunks, kBits> columns_[kQuads];
  float factors_[kQuads];
  float offsets_[kQuads];  // of the sum of a head's weights, which clear bits subtract
};

/// Token of a tile that a lane has after `reduce_heads`.
__device__ inline int own_token() {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  return lane % 4 * 8 + lane / 4;
}

/// Reduces over the lanes of a quad what each has of four tokens; lane t gets the result of token
/// t * 8 + g.
template <typename Combine>
__device__ float reduce_heads(const float (&values)[4], const Combine& combine) {
  const bool odd = (threadIdx.x & 1U) != 0;
  const bool high = (threadIdx.x & 2U) != 0;
  const float low_pair = __shfl_xor_sync(kFullWarp, odd ? values[0] : values[1], 1);
  const float high_pair = __shfl_xor_sync(kFullWarp, odd ? values[2] : values[3], 1);
  const float first = combine(odd ? values[1] : values[0], low_pair);
  const float second = combine(odd ? values[3] : values[2], high_pair);
  const float other = __shfl_xor_sync(kFullWarp, high ? first : second, 2);
  return combine(high ? second : first, other);
}

/// Bits of the weights that the kernels multiply, for so many chunks.
[[nodiscard]] inline int stream_weight_bits(const SelectRequest& request) {
  const int bits = request.params.weight_bits();
  if (bits <= 4) return 4;
  return bits <= 6 && known_chunks(request) == 2 ? 6 : 8;
}

/// What the kernels are made for: quads of heads, chunks of planes (0: any), bits of a weight.
template <int kQuadsOf, int kChunksOf, int kBitsOf>
struct StreamKernel {
  using Keys = ShareKeys;
  static constexpr bool kCollisions = false;
  static constexpr int kQuads = kQuadsOf;
  static constexpr int kChunks = kChunksOf;
  static constexpr int kBits = kBitsOf;
};

/// Calls `visit` with the `StreamKernel` that serves a request, and returns what it returns.
template <typename Visit>
auto visit_stream_shape(const SelectRequest& request, const Visit& visit) {
  const int quads = (request.kv.group + 3) / 4;
  const int chunks = known_chunks(request);
  const int bits = stream_weight_bits(request);
  if (quads == 1) {
    if (bits == 4 && chunks == 1) return visit(StreamKernel<1, 1, 4>{});
    if (bits == 4 && chunks == 2) return visit(StreamKernel<1, 2, 4>{});
    if (bits == 4) return visit(StreamKernel<1, 0, 4>{});
    if (bits == 6) return visit(StreamKernel<1, 2, 6>{});
    return visit(StreamKernel<1, 0, 8>{});
  }
  if (quads == 2) {
    if (bits == 4 && chunks == 2) return visit(StreamKernel<2, 2, 4>{});
    if (bits == 6) return visit(StreamKernel<2, 2, 6>{});
    return visit(StreamKernel<2, 0, 8>{});
  }
  if (bits == 4 && chunks == 2) return visit(StreamKernel<4, 2, 4>{});
  if (bits == 6) return visit(StreamKernel<4, 2, 6>{});
  return visit(StreamKernel<4, 0, 8>{});
}

/// The same of the first of two phases, of one chunk of planes and weights of 4 bits.
template <typename Visit>
auto visit_phase_shape(const SelectRequest& request, const Visit& visit) {
  const int quads = (request.kv.group + 3) / 4;
  if (quads == 1) return visit(StreamKernel<1, 1, 4>{});
  return quads == 2 ? visit(StreamKernel<2, 0, 8>{}) : visit(StreamKernel<4, 0, 8>{});
}

/// The same for a recall target, of groups of up to kFusedHeads: fewer kernels, since each is used
/// less.
template <typename Visit>
auto visit_recall_shape(const SelectRequest& request, const Visit& visit) {
  const bool wide = request.kv.group > 4;
  const int bits = stream_weight_bits(request);
  if (bits == 4 && known_chunks(request) == 2) {
    return wide ? visit(StreamKernel<2, 2, 4>{}) : visit(StreamKernel<1, 2, 4>{});
  }
  if (bits == 6) return wide ? visit(StreamKernel<2, 2, 6>{}) : visit(StreamKernel<1, 2, 6>{});
  return wide ? visit(StreamKernel<2, 0, 8>{}) : visit(StreamKernel<1, 0, 8>{});
}

}  // namespace kvtier::scoring::cuda
