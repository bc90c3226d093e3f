#include "transfer/convert_cuda.cuh"
#include "transfer/cuda_check.h"
#include "transfer/float8_cuda.cuh"
#include "transfer/row_checks.h"

#include <cuda_runtime.h>

#include <algorithm>

namespace kvtier::transfer {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr std::int64_t kMaxBlocks = 1056;  ///< Enough for 132 SMs to hold 8 each.

__device__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

/// What eight elements of a row add, piece `index`.
__device__ std::uint32_t check_of_piece(const uint4& piece, int index) {
  const auto first = static_cast<std::uint32_t>(4 * index);
  return check_of_word(piece.x, first) + check_of_word(piece.y, first + 1) +
         check_of_word(piece.z, first + 2) + check_of_word(piece.w, first + 3);
}

/// What the factors of a row of fp8 add.
__device__ std::uint32_t check_of_scales(int head_dim, float key, float value) {
  const auto first = static_cast<std::uint32_t>(head_dim);
  return check_of_word(__float_as_uint(key), first) +
         check_of_word(__float_as_uint(value), first + 1);
}

/// The check of a row that an append is about to store; a warp calls it.
__device__ std::uint32_t check_of_new_row(const KvGeometry& geometry, const AppendItem& item,
                                          std::int64_t i, int head, std::int64_t token) {
  const int pieces = geometry.head_dim / cuda::kPiece;
  std::uint32_t sum = lane_id() == 0 ? check_of_place(token, head) : 0;
  bool nonfinite = false;
  for (int begin = 0; begin < 2 * pieces; begin += kWarp) {
    const int at = begin + lane_id();
    const bool present = at < 2 * pieces;
    uint4 piece{};
    if (present) {
      const TokenTensor& tensor = at < pieces ? item.keys : item.values;
      const cuda::HeadSource source = cuda::head_source(tensor, i, head);
      piece = cuda::store_piece(cuda::load_piece(source, at % pieces), source.dtype, geometry.dtype,
                                nonfinite);
    }
    if (geometry.float8_pages) {
      const float scale = cuda::float8_scale_of_lanes(piece, present ? at / pieces : 2);
      const uint2 bits = cuda::to_float8(piece, scale);
      piece = cuda::from_float8(bits.x, bits.y, scale);
      const auto word = static_cast<std::uint32_t>(geometry.head_dim);
      if (at == 0) sum += check_of_word(__float_as_uint(scale), word);
      if (at == pieces) sum += check_of_word(__float_as_uint(scale), word + 1);
    }
    if (present) sum += check_of_piece(piece, at);
  }
  sum = __reduce_add_sync(kAllLanes, sum);
  return __any_sync(kAllLanes, nonfinite) != 0 ? kNotChecked : sum;
}

/// A warp per (token, KV head); blockIdx.y is the item.
__global__ void __launch_bounds__(kThreads)
    write_row_checks_kernel(const __grid_constant__ KvGeometry geometry,
                            const __grid_constant__ AppendBatch batch) {
  const AppendItem& item = batch[static_cast<int>(blockIdx.y)];
  const SequenceView& sequence = item.sequence;
  const std::int64_t length = sequence.counters->length;
  const std::int64_t stored = tokens_stored(*sequence.counters, item.tokens);
  for (std::int64_t pair = std::int64_t{blockIdx.x} * kWarps + warp_id();
       pair < stored * geometry.kv_heads; pair += std::int64_t{gridDim.x} * kWarps) {
    const auto head = static_cast<int>(pair / stored);
    const std::int64_t i = pair % stored;
    const std::int64_t token = length + i;
    const std::uint32_t check = check_of_new_row(geometry, item, i, head, token);
    auto* page = const_cast<std::byte*>(sequence.pages[token / geometry.page_tokens]);
    if (lane_id() == 0) *check_in_page<std::uint32_t>(geometry, page, head, token) = check;
  }
}

/// A row that attention is about to read; a lane holds one.
struct Reading {
  std::int64_t token = 0;
  const std::byte* page = nullptr;  ///< Null: none, or not in a page.
  std::byte* staged = nullptr;      ///< Null: it is read in its page.
  std::uint32_t check = 0;
  float2 scales{};
};

/// Row `entry` of those of a (query row, KV head): always-attended tokens, then the list.
__device__ Reading reading_at(const KvGeometry& geometry, const RowReading& rows,
                              const SequenceView& sequence, const AttendedSpans& spans,
                              std::int64_t list, int head, std::int64_t entry) {
  Reading reading;
  const SelectionView& selection = rows.selection;
  const std::int64_t always = spans.num_always();
  if (entry < spans.sink_end) {
    reading.token = entry;
  } else if (entry < always) {
    reading.token = entry - spans.sink_end + spans.tail_begin;
  } else {
    const std::int64_t i = entry - always;
    reading.token = selection.ids[list * selection.capacity + i];
    if (i < selection.staged_capacity) {
      reading.staged =
          selection.staged + (list * selection.staged_capacity + i) * geometry.row_bytes();
    }
  }
  if (row_is_resident(geometry, sequence.counters->resident_begin, reading.token)) return reading;
  reading.page = sequence.pages[reading.token / geometry.page_tokens];
  reading.check = *check_in_page<const std::uint32_t>(geometry, reading.page, head, reading.token);
  if (geometry.float8_pages) {
    const float* scales = page_row<const float>(geometry, reading.page, head, reading.token).scales;
    reading.scales = {scales[0], scales[1]};
  }
  return reading;
}

/// The sum over a row, where it will be read; a warp calls it, all lanes with the same row.
__device__ std::uint32_t check_of_row(const KvGeometry& geometry, const Reading& reading,
                                      int head) {
  const int pieces = geometry.head_dim / cuda::kPiece;
  std::uint32_t sum = 0;
  if (lane_id() == 0) {
    sum = check_of_place(reading.token, head);
    if (geometry.float8_pages) {
      sum += check_of_scales(geometry.head_dim, reading.scales.x, reading.scales.y);
    }
  }
  const bool narrow = geometry.float8_pages && reading.staged == nullptr;
  const std::byte* row = reading.staged;
  if (row == nullptr) {
    row = page_row<const float>(geometry, reading.page, head, reading.token).bytes;
  }
  for (int at = lane_id(); at < 2 * pieces; at += kWarp) {
    uint4 piece{};
    if (narrow) {
      const uint2 bits = reinterpret_cast<const uint2*>(row)[at];
      piece = cuda::from_float8(bits.x, bits.y, at < pieces ? reading.scales.x : reading.scales.y);
    } else {
      piece = reinterpret_cast<const uint4*>(row)[at];
    }
    sum += check_of_piece(piece, at);
  }
  return __reduce_add_sync(kAllLanes, sum);
}

template <typename T>
__device__ T* of_lane(T* pointer, int lane) {
  return reinterpret_cast<T*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

/// A warp takes 32 rows at a time: their checks come together. Block (x, KV head, query row).
__global__ void __launch_bounds__(kThreads)
    verify_rows_kernel(const __grid_constant__ KvGeometry geometry,
                       const __grid_constant__ RowReading rows) {
  const int head = static_cast<int>(blockIdx.y);
  const QueryRow& query = rows.rows[static_cast<int>(blockIdx.z)];
  const SequenceView& sequence = rows.sequences[query.sequence];
  const AttendedSpans spans = attended_spans(rows.rule, sequence.counters->length, query);
  const std::int64_t list = std::int64_t{blockIdx.z} * geometry.kv_heads + head;
  const std::int64_t listed = rows.selection.ids == nullptr ? 0 : rows.selection.counts[list];
  const std::int64_t count = spans.num_always() + listed;
  unsigned corrupt = 0;
  for (std::int64_t first = (std::int64_t{blockIdx.x} * kWarps + warp_id()) * kWarp; first < count;
       first += std::int64_t{gridDim.x} * kWarps * kWarp) {
    Reading mine;
    if (first + lane_id() < count) {
      mine = reading_at(geometry, rows, sequence, spans, list, head, first + lane_id());
    }
    unsigned left = __ballot_sync(kAllLanes, mine.page != nullptr);
    while (left != 0) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      Reading reading;
      reading.token = __shfl_sync(kAllLanes, mine.token, lane);
      reading.page = of_lane(mine.page, lane);
      reading.staged = of_lane(mine.staged, lane);
      reading.check = __shfl_sync(kAllLanes, mine.check, lane);
      reading.scales = {__shfl_sync(kAllLanes, mine.scales.x, lane),
                        __shfl_sync(kAllLanes, mine.scales.y, lane)};
      const std::uint32_t found = check_of_row(geometry, reading, head);
      if (found == reading.check || reading.check == kNotChecked) continue;
      ++corrupt;
      if (reading.staged == nullptr) continue;
      const uint4 nan{kAllLanes, kAllLanes, kAllLanes, kAllLanes};
      for (int at = lane_id(); at < geometry.head_dim / 4; at += kWarp) {
        reinterpret_cast<uint4*>(reading.staged)[at] = nan;
      }
    }
  }
  StepFlags* flags = rows.flags[query.sequence];
  if (lane_id() == 0 && flags != nullptr) cuda::raise(&flags->rows_corrupt, corrupt);
}

}  // namespace

namespace cuda {

void write_row_checks(void* stream, const KvGeometry& geometry, const AppendBatch& batch) {
  if (batch.count == 0) return;
  std::int64_t pairs = 1;
  for (int i = 0; i < batch.count; ++i) {
    pairs = std::max(pairs, std::int64_t{batch[i].tokens} * geometry.kv_heads);
  }
  const dim3 grid(static_cast<unsigned>(std::min((pairs + kWarps - 1) / kWarps, kMaxBlocks)),
                  static_cast<unsigned>(batch.count));
  write_row_checks_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(geometry, batch);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void verify_rows(void* stream, const KvGeometry& geometry, const RowReading& reading) {
  const std::int64_t lanes = std::int64_t{reading.rows.count} * geometry.kv_heads;
  if (lanes == 0) return;
  const dim3 grid(static_cast<unsigned>(std::max<std::int64_t>(kMaxBlocks / lanes, 1)),
                  static_cast<unsigned>(geometry.kv_heads),
                  static_cast<unsigned>(reading.rows.count));
  verify_rows_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(geometry, reading);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace cuda

}  // namespace kvtier::transfer
