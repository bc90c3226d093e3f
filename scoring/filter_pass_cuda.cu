#include "scoring/filter_cuda.cuh"
#include "scoring/sign_products.cuh"
#include "transfer/cuda_check.h"

#include <algorithm>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

constexpr int kMaxPassWarps = 16;
constexpr int kMaxStages = 4;
/// Tokens that are copied at once: half a segment.
constexpr int kUnitTokens = 128;
constexpr int kUnitsPerSegment = kSegmentTokens / kUnitTokens;
constexpr int kNormBytes = kUnitTokens * 2;

__device__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void barrier_init(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ void bulk_copy(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Walks the segments of all rows and KV heads in one order, from any of them on.
class SegmentWalk {
 public:
  int row = 0;
  int kv_head = 0;
  std::int64_t segment = 0;
  bool wanted = false;

  /// `starts[row]` is the number of segments before a row's, over all its KV heads.
  __device__ SegmentWalk(const FilterArgs& args, const std::int64_t* starts, std::int64_t number,
                         bool again)
      : args_(args), again_(again) {
    while (row + 1 < args.request.rows.count && starts[row + 1] <= number) ++row;
    open_row();
    const std::int64_t local = number - starts[row];
    kv_head = static_cast<int>(local / (end_ - first_));
    segment = first_ + local % (end_ - first_);
    open_head();
  }
  __device__ void advance() {
    if (++segment < end_) return;
    if (++kv_head == args_.request.kv.kv_heads) {
      kv_head = 0;
      do {
        if (++row == args_.request.rows.count) return;  // past the last: never used
        open_row();
      } while (first_ >= end_);
    }
    segment = first_;
    open_head();
  }
  [[nodiscard]] __device__ std::int64_t group_index() const {
    return std::int64_t{row} * args_.request.kv.kv_heads + kv_head;
  }

 private:
  __device__ void open_row() {
    const RowPlan& plan = args_.plans[row];
    first_ = plan.begin / kSegmentTokens;
    end_ = plan.k > 0 ? (plan.end + kSegmentTokens - 1) / kSegmentTokens : first_;
  }
  __device__ void open_head() { wanted = !again_ || args_.filter.groups[group_index()].again != 0; }

  const FilterArgs& args_;
  bool again_;
  std::int64_t first_ = 0;
  std::int64_t end_ = 0;
};

/// Copies a warp's units ahead of their use. Lane 0 alone works.
class Producer {
 public:
  __device__ Producer(const FilterArgs& args, const SegmentWalk& walk, std::int64_t segments,
                      std::byte* ring, int stages, int stage_bytes, std::uint64_t* barriers)
      : args_(args),
        walk_(walk),
        units_(segments * kUnitsPerSegment),
        ring_(ring),
        stages_(stages),
        stage_bytes_(stage_bytes),
        barriers_(barriers) {}

  /// Starts the copies of the warp's next unit, if there is one.
  __device__ void next(int chunks) {
    if (units_ == 0) return;
    --units_;
    if (walk_.wanted) {
      fetch(chunks);
    } else {
      barrier_expect(&barriers_[stage_], 0);
    }
    if (++stage_ == stages_) stage_ = 0;
    if (++unit_ == kUnitsPerSegment) {
      unit_ = 0;
      if (units_ > 0) walk_.advance();
    }
  }

 private:
  __device__ void fetch(int chunks) {
    const hashing::SketchGeometry& sketch = args_.request.sketch;
    const std::int64_t token = walk_.segment * kSegmentTokens + unit_ * kUnitTokens;
    const std::int64_t number = token / hashing::kBlockTokens;
    if (number != block_number_ || walk_.row != block_row_) {
      block_ = args_.plans[walk_.row].blocks[number];
      block_number_ = number;
      block_row_ = walk_.row;
    }
    const int in_block = static_cast<int>(token % hashing::kBlockTokens);
    constexpr std::uint32_t kChunk = kUnitTokens * hashing::kChunkBytes;
    std::byte* stage = ring_ + stage_ * stage_bytes_;
    std::uint64_t* barrier = &barriers_[stage_];
    barrier_expect(barrier, static_cast<std::uint32_t>(chunks) * kChunk + 2 * kNormBytes);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      bulk_copy(stage + chunk * kChunk,
                block_ + sketch.chunk_offset(walk_.kv_head, chunk, in_block), kChunk, barrier);
    }
    std::byte* norms = stage + chunks * kChunk;
    bulk_copy(norms, block_ + sketch.key_norm_offset(walk_.kv_head, in_block), kNormBytes, barrier);
    bulk_copy(norms + kNormBytes, block_ + sketch.value_norm_offset(walk_.kv_head, in_block),
              kNormBytes, barrier);
  }

  const FilterArgs& args_;
  SegmentWalk walk_;
  std::int64_t units_;
  std::byte* ring_;
  int stages_;
  int stage_bytes_;
  std::uint64_t* barriers_;
  int stage_ = 0;
  int unit_ = 0;
  std::int64_t block_number_ = -1;
  int block_row_ = -1;
  const std::byte* block_ = nullptr;
};

/// 2^x, 0 below 2^-126.
__device__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Adds, over the four lanes of a quad, the values of four rows; lane t of a quad gets row t's sum.
__device__ float sum_rows(const float (&rows)[4], int lane) {
  const bool odd = (lane & 1) != 0;
  const float low =
      (odd ? rows[1] : rows[0]) + __shfl_xor_sync(kFullWarp, odd ? rows[0] : rows[1], 1);
  const float high =
      (odd ? rows[3] : rows[2]) + __shfl_xor_sync(kFullWarp, odd ? rows[2] : rows[3], 1);
  const bool upper = (lane & 2) != 0;
  return (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, 2);
}

/// What a warp keeps of the (row, KV head) and the segment it is at. kQuads: 4 heads each.
template <int kQuads>
struct SegmentState {
  std::int64_t group_index = -1;
  std::int64_t segment;
  std::int64_t plan_begin;
  std::int64_t plan_end;
  int begin;  // eligible tokens, relative to the segment
  int end;
  float group_threshold;
  float factors[kQuads];
  float references[kQuads];
  float thresholds[kQuads];
  float totals[kQuads];
  int sums[kQuads];
  int written;

  __device__ void open(const FilterArgs& args, const SegmentWalk& walk) {
    if (walk.group_index() != group_index) open_group(args, walk);
    segment = walk.segment;
    const std::int64_t from = segment * kSegmentTokens;
    begin = static_cast<int>(max(plan_begin - from, std::int64_t{0}));
    end = static_cast<int>(min(plan_end - from, std::int64_t{kSegmentTokens}));
    written = 0;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) totals[quad] = 0.0F;
  }

  __device__ void open_group(const FilterArgs& args, const SegmentWalk& walk) {
    const SelectRequest& request = args.request;
    const int group = request.kv.group();
    group_index = walk.group_index();
    plan_begin = args.plans[walk.row].begin;
    plan_end = args.plans[walk.row].end;
    group_threshold = args.filter.groups[group_index].threshold;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int head = quad * 4 + static_cast<int>(threadIdx.x) % 4;
      const bool has_head = head < group;
      const std::int64_t index = group_index * group + (has_head ? head : 0);
      factors[quad] = sign_factor(request.params, args.tables.scalars[index]) * kLog2E;
      const FilterHead of_head = args.filter.heads[index];
      // A lane without a head adds nothing: its shares are 2^-infinity.
      references[quad] = has_head ? of_head.reference - kShareShift : INFINITY;
      thresholds[quad] = has_head ? of_head.threshold : INFINITY;
      sums[quad] = args.filter.weight_sums[index];
    }
  }

  __device__ void close(const FilterArgs& args) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int group = args.request.kv.group();
    const std::int64_t place = group_index * args.segments + segment;
    // Rows of a head are spread over 8 lanes.
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float total = totals[quad];
      total += __shfl_xor_sync(kFullWarp, total, 4);
      total += __shfl_xor_sync(kFullWarp, total, 8);
      total += __shfl_xor_sync(kFullWarp, total, 16);
      const int head = quad * 4 + lane;
      if (lane < 4 && head < group) args.filter.partials[place * group + head] = total;
    }
    if (lane == 0) args.filter.counts[place] = static_cast<std::uint32_t>(written);
  }
};

/// Writes the candidates among 32 tokens: bit r of a lane's `mine` says that the token of row r of
/// its quad is one.
template <int kQuads>
__device__ void write_candidates(const FilterArgs& args, SegmentState<kQuads>& state, int base,
                                 unsigned mine, const float (&values)[kQuads][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = args.request.kv.group();
  const std::int64_t slot_base =
      state.group_index * args.max_tokens + state.segment * kSegmentTokens;
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    const unsigned votes = __ballot_sync(kFullWarp, (mine >> row & 1U) != 0);
    // One bit per token: the four lanes of a quad hold heads of the same token.
    const unsigned any = (votes | votes >> 1 | votes >> 2 | votes >> 3) & 0x11111111U;
    const unsigned own = 1U << (lane / 4 * 4);
    if ((any & own) != 0) {
      const std::int64_t slot = slot_base + state.written + __popc(any & (own - 1));
      if (lane % 4 == 0) {
        args.ids[slot] =
            static_cast<std::int32_t>(state.segment * kSegmentTokens + base + row * 8 + lane / 4);
      }
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int head = quad * 4 + lane % 4;
        if (head < group) args.values[slot * group + head] = values[quad][row];
      }
    }
    state.written += __popc(any);
  }
}

/// Scores one unit, 32 tokens at a time: rows r * 8 + lane / 4 for r = 0 .. 3. kChunks 0: their
/// number is read at run time.
template <int kBits, int kQuads, int kChunks, bool kTogether>
__device__ void pass_unit(const FilterArgs& args, SegmentState<kQuads>& state, int unit,
                          const std::byte* stage) {
  constexpr int kProducts = kBits / 2;
  const SelectRequest& request = args.request;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = request.kv.group();
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(request.params);
  const bool weighted = request.params.weighting == ValueWeighting::kLogit;
  const std::uint32_t* columns =
      args.filter.columns + state.group_index * args.filter.columns_stride + lane;
  std::uint32_t held[kChunks > 0 ? kQuads * kChunks * kProducts : 1];
  if constexpr (kChunks > 0) {
#pragma unroll
    for (int i = 0; i < kQuads * kChunks * kProducts; ++i) held[i] = __ldg(columns + i * 32);
  }
  const auto* codes = reinterpret_cast<const std::uint32_t*>(stage) + lane;
  const auto* key_norms =
      reinterpret_cast<const std::uint16_t*>(stage + chunks * kUnitTokens * hashing::kChunkBytes);
  const std::uint16_t* value_norms = key_norms + kUnitTokens;

#pragma unroll 2
  for (int local = 0; local < kUnitTokens; local += 32) {
    const int base = unit * kUnitTokens + local;
    // Norms of token `lane` of the 32; an eligible token has a finite logarithm.
    const Norms own = make_norms(key_norms[local + lane], value_norms[local + lane]);
    float key_norm = own.finite ? own.key : 0.0F;
    float log_value = weighted ? __log2f(own.value) : 0.0F;
    if (!own.finite) log_value = -INFINITY;
    const bool all_eligible = state.begin <= base && base + 32 <= state.end;
    const bool eligible = all_eligible || (base + lane >= state.begin && base + lane < state.end);
    if (!eligible) log_value = -INFINITY;

    float values[kQuads][4];
    float shares[4] = {0.0F, 0.0F, 0.0F, 0.0F};
    unsigned mine = 0;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if (quad * 4 >= group) break;
      int counts[2][kProducts][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < (kChunks > 0 ? kChunks : chunks); ++chunk) {
        std::uint32_t rows[4];
#pragma unroll
        for (int row = 0; row < 4; ++row) {
          rows[row] = codes[(chunk * kUnitTokens + local + row * 8) * 4];
        }
#pragma unroll
        for (int product = 0; product < kProducts; ++product) {
          const int at = (quad * chunks + chunk) * kProducts + product;
          const std::uint32_t column =
              kChunks > 0 ? held[kChunks > 0 ? at : 0] : __ldg(columns + at * 32);
          multiply_bits(counts[0][product], rows[0], rows[1], column);
          multiply_bits(counts[1][product], rows[2], rows[3], column);
        }
      }
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int sum = signed_sum<kBits>(counts[row / 2], row % 2, state.sums[quad]);
        const float norm = __shfl_sync(kFullWarp, key_norm, row * 8 + lane / 4);
        const float log_norm = __shfl_sync(kFullWarp, log_value, row * 8 + lane / 4);
        const float value = fmaf(state.factors[quad] * static_cast<float>(sum), norm, log_norm);
        const float share = exp2_fast(fminf(value - state.references[quad], kShareLimit));
        values[quad][row] = value;
        state.totals[quad] += share;
        shares[row] += share;
        if (!kTogether && share >= state.thresholds[quad]) mine |= 1U << row;
      }
    }
    if (kTogether) {
      const bool pass = sum_rows(shares, lane) >= state.group_threshold;
      const unsigned votes = __ballot_sync(kFullWarp, pass);
      if (votes == 0) continue;
      // Lane 4 q + r of the votes is row r of quad q.
      mine = votes >> (lane / 4 * 4) & 0xFU;
    } else if (__any_sync(kFullWarp, mine != 0) == 0) {
      continue;
    }
    if (!all_eligible) {
      // A threshold of 0 lets everything pass, tokens out of range too.
      const unsigned in_range = __ballot_sync(kFullWarp, eligible);
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        if ((in_range >> (row * 8 + lane / 4) & 1U) == 0) mine &= ~(1U << row);
      }
    }
    write_candidates(args, state, base, mine, values);
  }
}

// Persistent blocks; each warp streams its own segments through its own ring of stages.
template <int kBits, int kQuads, int kChunks, bool kTogether>
__global__ __launch_bounds__(kMaxPassWarps * 32,
                             1) void sign_pass(const __grid_constant__ FilterArgs args, int stages,
                                               int stage_bytes, bool again) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ std::uint64_t barriers[kMaxPassWarps][kMaxStages];
  __shared__ std::int64_t starts[transfer::kMaxBatch + 1];
  __shared__ unsigned any_again;
  const SelectRequest& request = args.request;
  const int kv_heads = request.kv.kv_heads;
  if (threadIdx.x == 0) {
    std::int64_t total = 0;
    for (int row = 0; row < request.rows.count; ++row) {
      starts[row] = total;
      const RowPlan& plan = args.plans[row];
      if (plan.k <= 0) continue;
      const std::int64_t segments =
          (plan.end + kSegmentTokens - 1) / kSegmentTokens - plan.begin / kSegmentTokens;
      total += segments * kv_heads;
    }
    starts[request.rows.count] = total;
    any_again = 0;
  }
  __syncthreads();
  if (again) {
    for (int i = static_cast<int>(threadIdx.x); i < request.rows.count * kv_heads;
         i += static_cast<int>(blockDim.x)) {
      if (args.filter.groups[i].again != 0) any_again = 1;
    }
    __syncthreads();
    if (any_again == 0) return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunks = sign_chunks(request.params);
  std::byte* stage_of_warp = ring + static_cast<std::int64_t>(warp) * stages * stage_bytes;
  if (lane < stages) barrier_init(&barriers[warp][lane]);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();

  // A warp walks neighbouring segments, so that it seldom changes its head.
  const std::int64_t total = starts[request.rows.count];
  const std::int64_t num_warps = std::int64_t{gridDim.x} * (blockDim.x / 32);
  const std::int64_t number = std::int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  const std::int64_t first = total * number / num_warps;
  const std::int64_t segments = total * (number + 1) / num_warps - first;
  if (segments == 0) return;
  SegmentWalk walk(args, starts, first, again);
  Producer producer(args, walk, segments, stage_of_warp, stages, stage_bytes, barriers[warp]);
  if (lane == 0) {
    for (int i = 0; i < stages; ++i) producer.next(chunks);
  }
  int stage = 0;
  std::uint32_t parity = 0;
  SegmentState<kQuads> state;
  for (std::int64_t segment = 0; segment < segments; ++segment) {
    if (walk.wanted) state.open(args, walk);
    for (int unit = 0; unit < kUnitsPerSegment; ++unit) {
      barrier_wait(&barriers[warp][stage], parity);
      if (walk.wanted) {
        pass_unit<kBits, kQuads, kChunks, kTogether>(args, state, unit,
                                                     stage_of_warp + stage * stage_bytes);
      }
      __syncwarp();
      if (lane == 0) producer.next(chunks);
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (walk.wanted) state.close(args);
    if (segment + 1 < segments) walk.advance();
  }
#endif
}

using PassKernel = void (*)(FilterArgs, int, int, bool);

template <bool kTogether>
PassKernel pass_kernel(const SelectRequest& request) {
  const int chunks = sign_chunks(request.params);
  const bool one_quad = request.kv.group() <= 4;
  if (request.params.query_bits == 8) return sign_pass<8, 4, 0, kTogether>;
  if (one_quad && chunks == 1) return sign_pass<4, 1, 1, kTogether>;
  if (one_quad && chunks == 2) return sign_pass<4, 1, 2, kTogether>;
  return one_quad ? sign_pass<4, 1, 0, kTogether> : sign_pass<4, 4, 0, kTogether>;
}

}  // namespace

void enqueue_sign_pass(cudaStream_t stream, const FilterArgs& args, bool again) {
  const int chunks = sign_chunks(args.request.params);
  const int stage_bytes = chunks * kUnitTokens * hashing::kChunkBytes + 2 * kNormBytes;
  // Long bit strings: fewer warps, so that each has at least two stages to copy ahead.
  constexpr int kRingBytes = 216 * 1024;
  int warps = kMaxPassWarps;
  while (warps > 2 && kRingBytes / (warps * stage_bytes) < 2) warps /= 2;
  const int stages = std::min(kRingBytes / (warps * stage_bytes), kMaxStages);
  const bool together =
      args.request.params.selection == Selection::kPerKvHead || args.request.kv.group() == 1;
  const PassKernel kernel =
      together ? pass_kernel<true>(args.request) : pass_kernel<false>(args.request);
  const int shared = warps * stages * stage_bytes;
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const auto grid = static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount));
  kernel<<<grid, static_cast<unsigned>(warps * 32), static_cast<std::size_t>(shared), stream>>>(
      args, stages, stage_bytes, again);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
