#include "transfer/kv/page_rows.h"

#include "include/types/float16.h"
#include "transfer/device/simd.h"
#include "transfer/device/with_cuda.h"
#include "transfer/kv/int8.h"
#include "transfer/kv/row_checks.h"
#include "transfer/kv/row_convert.h"
#include "transfer/kv/rows_kernels.h"

#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>

namespace kvtier::transfer {

void read_sinks(Stream& stream, const KvGeometry& geometry, const SequenceView& sequence,
                std::int64_t tokens) {
  assert(geometry.int8_pages && tokens <= geometry.sink_capacity);
  enqueue<cpu::read_sinks, cuda::read_sinks>(stream, geometry, sequence, tokens);
}

namespace cpu {
namespace {

KVTIER_SIMD_CLONES float largest_of(const std::uint16_t* from, std::int64_t n) {
  // Bits of magnitudes order as these do; NaN comes last.
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<std::uint32_t>(from[i] & 0x7FFF);
    largest = magnitude > largest ? magnitude : largest;
  }
  return std::bit_cast<float>(largest << 16);
}

KVTIER_SIMD_CLONES void round_half(const std::uint16_t* from, std::int64_t n, float inverse,
                                   std::int8_t* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = to_int8(std::bit_cast<float>(static_cast<std::uint32_t>(from[i]) << 16), inverse);
  }
}

/// Reads a half of a row: as bf16, or as the floats of those.
KVTIER_SIMD_CLONES void widen_half(const std::int8_t* from, std::int64_t n, float scale,
                                   std::uint16_t* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = BFloat16::from_float(static_cast<float>(from[i]) * scale).bits;
  }
}
KVTIER_SIMD_CLONES void widen_half(const std::int8_t* from, std::int64_t n, float scale,
                                   float* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = BFloat16::from_float(static_cast<float>(from[i]) * scale).to_float();
  }
}

template <typename Element>
void read_int8(const KvGeometry& g, const std::byte* page, std::int64_t kv_head, std::int64_t token,
               Element* to) {
  const auto place = page_row<const float>(g, page, kv_head, token);
  const auto* from = reinterpret_cast<const std::int8_t*>(place.bytes);
  for (std::int64_t half = 0; half < 2; ++half) {
    widen_half(from + half * g.head_dim, g.head_dim, place.scales[half], to + half * g.head_dim);
  }
}

void store_check(const KvGeometry& geometry, std::byte* page, std::int64_t kv_head,
                 std::int64_t token, const std::byte* row) {
  if (!geometry.row_checks) return;
  const auto head = static_cast<int>(kv_head);
  *check_in_page<std::uint32_t>(geometry, page, head, token) =
      row_check(geometry, page, head, token, row);
}

}  // namespace

void store_page_row(const KvGeometry& geometry, std::byte* page, std::int64_t kv_head,
                    std::int64_t token, const std::byte* row, std::byte* kept) {
  const auto place = page_row<float>(geometry, page, kv_head, token);
  const auto bytes = static_cast<std::size_t>(geometry.row_bytes());
  if (!geometry.int8_pages) {
    std::memcpy(place.bytes, row, bytes);
    std::memcpy(kept, row, bytes);
    return store_check(geometry, page, kv_head, token, kept);
  }
  const std::int64_t d = geometry.head_dim;
  const auto* from = reinterpret_cast<const std::uint16_t*>(row);
  auto* to = reinterpret_cast<std::int8_t*>(place.bytes);
  for (std::int64_t half = 0; half < 2; ++half) {
    const float scale = int8_scale(largest_of(from + half * d, d));
    place.scales[half] = scale;
    // Of a NaN, which what is read has from the scale, no number is made.
    if (std::isnan(scale)) {
      std::memset(to + half * d, 0, static_cast<std::size_t>(d));
    } else {
      round_half(from + half * d, d, 1.0F / scale, to + half * d);
    }
  }
  read_page_row(geometry, page, kv_head, token, kept);
  store_check(geometry, page, kv_head, token, kept);
}

void read_page_row(const KvGeometry& geometry, const std::byte* page, std::int64_t kv_head,
                   std::int64_t token, std::byte* row) {
  if (geometry.int8_pages) {
    return read_int8(geometry, page, kv_head, token, reinterpret_cast<std::uint16_t*>(row));
  }
  std::memcpy(row, page_row<const float>(geometry, page, kv_head, token).bytes,
              static_cast<std::size_t>(geometry.row_bytes()));
}

void read_row(const KvGeometry& geometry, const SequenceView& sequence, std::int64_t resident_begin,
              int kv_head, std::int64_t token, std::byte* row) {
  if (geometry.int8_pages && !row_is_resident(geometry, resident_begin, token)) {
    return read_page_row(geometry, sequence.pages[geometry.page_of(token)], kv_head, token, row);
  }
  std::memcpy(row, row_address(geometry, sequence, resident_begin, kv_head, token),
              static_cast<std::size_t>(geometry.row_bytes()));
}

void read_row(const KvGeometry& geometry, const SequenceView& sequence, std::int64_t resident_begin,
              int kv_head, std::int64_t token, float* row) {
  if (geometry.int8_pages && !row_is_resident(geometry, resident_begin, token)) {
    return read_int8(geometry, sequence.pages[geometry.page_of(token)], kv_head, token, row);
  }
  to_float(row_address(geometry, sequence, resident_begin, kv_head, token), geometry.dtype, row,
           std::int64_t{2} * geometry.head_dim);
}

void read_sinks(const KvGeometry& geometry, const SequenceView& sequence, std::int64_t tokens) {
  for (std::int64_t head = 0; head < geometry.kv_heads; ++head) {
    for (std::int64_t token = 0; token < tokens; ++token) {
      read_page_row(
          geometry, sequence.pages[geometry.page_of(token)], head, token,
          sequence.sink_rows + (head * geometry.sink_capacity + token) * geometry.row_bytes());
    }
  }
}

}  // namespace cpu

}  // namespace kvtier::transfer
