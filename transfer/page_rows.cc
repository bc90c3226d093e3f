#include "transfer/page_rows.h"

#include "transfer/float16.h"
#include "transfer/float8.h"
#include "transfer/row_convert.h"
#include "transfer/simd.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace kvtier::transfer::cpu {
namespace {

// A row in a page: its bytes and, of fp8, the factors of its keys and of its values.
template <typename Byte, typename Float>
struct Place {
  Byte* row;
  Float* scales;
};

template <typename Float, typename Byte>
Place<Byte, Float> place_of(const KvGeometry& g, Byte* page, std::int64_t kv_head,
                            std::int64_t token) {
  const std::int64_t index = kv_head * g.page_tokens + token % g.page_tokens;
  const std::int64_t rows = std::int64_t{g.kv_heads} * g.page_tokens;
  return {page + index * g.page_row_bytes(),
          reinterpret_cast<Float*>(page + rows * g.page_row_bytes()) + 2 * index};
}

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

KVTIER_SIMD_CLONES void to_float8(const std::uint16_t* from, std::int64_t n, float inverse,
                                  std::uint8_t* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(from[i]) << 16);
    to[i] = Float8::from_float(x * inverse).bits;
  }
}

KVTIER_SIMD_CLONES void from_float8(const std::uint8_t* from, std::int64_t n, float scale,
                                    float* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = Float8{from[i]}.to_float() * scale;
}

// A power of two times a number of 4 bits: the upper half of the fp32 is all of it.
KVTIER_SIMD_CLONES void from_float8(const std::uint8_t* from, std::int64_t n, float scale,
                                    std::uint16_t* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(Float8{from[i]}.to_float() * scale);
    to[i] = static_cast<std::uint16_t>(bits >> 16);
  }
}

template <typename Element>
void read_float8(const KvGeometry& g, const std::byte* page, std::int64_t kv_head,
                 std::int64_t token, Element* to) {
  const auto place = place_of<const float>(g, page, kv_head, token);
  const auto* from = reinterpret_cast<const std::uint8_t*>(place.row);
  for (std::int64_t half = 0; half < 2; ++half) {
    from_float8(from + half * g.head_dim, g.head_dim, place.scales[half], to + half * g.head_dim);
  }
}

}  // namespace

void store_page_row(const KvGeometry& geometry, std::byte* page, std::int64_t kv_head,
                    std::int64_t token, const std::byte* row, std::byte* kept) {
  const auto place = place_of<float>(geometry, page, kv_head, token);
  const auto bytes = static_cast<std::size_t>(geometry.row_bytes());
  if (!geometry.float8_pages) {
    std::memcpy(place.row, row, bytes);
    std::memcpy(kept, row, bytes);
    return;
  }
  const std::int64_t d = geometry.head_dim;
  const auto* from = reinterpret_cast<const std::uint16_t*>(row);
  auto* to = reinterpret_cast<std::uint8_t*>(place.row);
  for (std::int64_t half = 0; half < 2; ++half) {
    const float scale = float8_scale(largest_of(from + half * d, d));
    place.scales[half] = scale;
    // Of a NaN, which what is read has from the scale, no number is made.
    if (std::isnan(scale)) {
      std::memset(to + half * d, 0, static_cast<std::size_t>(d));
    } else {
      to_float8(from + half * d, d, 1.0F / scale, to + half * d);
    }
  }
  read_page_row(geometry, page, kv_head, token, kept);
}

void read_page_row(const KvGeometry& geometry, const std::byte* page, std::int64_t kv_head,
                   std::int64_t token, std::byte* row) {
  if (geometry.float8_pages) {
    return read_float8(geometry, page, kv_head, token, reinterpret_cast<std::uint16_t*>(row));
  }
  std::memcpy(row, place_of<const float>(geometry, page, kv_head, token).row,
              static_cast<std::size_t>(geometry.row_bytes()));
}

void read_row(const KvGeometry& geometry, const SequenceView& sequence, std::int64_t resident_begin,
              int kv_head, std::int64_t token, std::byte* row) {
  if (geometry.float8_pages && !row_is_resident(geometry, resident_begin, token)) {
    return read_page_row(geometry, sequence.pages[token / geometry.page_tokens], kv_head, token,
                         row);
  }
  std::memcpy(row, row_address(geometry, sequence, resident_begin, kv_head, token),
              static_cast<std::size_t>(geometry.row_bytes()));
}

void read_row(const KvGeometry& geometry, const SequenceView& sequence, std::int64_t resident_begin,
              int kv_head, std::int64_t token, float* row) {
  if (geometry.float8_pages && !row_is_resident(geometry, resident_begin, token)) {
    return read_float8(geometry, sequence.pages[token / geometry.page_tokens], kv_head, token, row);
  }
  (void)convert_to_float(row_address(geometry, sequence, resident_begin, kv_head, token),
                         geometry.dtype, row, std::int64_t{2} * geometry.head_dim);
}

}  // namespace kvtier::transfer::cpu
