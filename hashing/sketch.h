#pragma once

#include "hashing/planes.h"
#include "transfer/device/batch.h"
#include "transfer/device/device.h"
#include "transfer/device/host_device.h"
#include "transfer/kv/rows.h"
#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>

namespace kvtier::hashing {

/// Tokens per sketch block, the unit of allocation.
inline constexpr int kBlockTokens = 1024;

/// A chunk is 128 sign bits: what one lane loads at once, and the depth of a binary matrix product.
inline constexpr int kChunkBits = 128;
inline constexpr int kChunkBytes = 16;
/// Bytes of the two norms of a token.
inline constexpr int kNormBytes = 4;

/// fp16 bits of the norm of a token with NaN or infinity in its key or value: such a token scores
/// lowest. Finite norms are clamped to [2^-24, 65504] and never have this value.
inline constexpr std::uint16_t kNonfiniteNorm = 0x7C00;

/// Layout of one sketch block of one layer, for all KV heads:
///
///     bits   [kv_heads][chunks][kBlockTokens][16 bytes]; of two chunks
///            [kv_heads][kBlockTokens][2][16 bytes]
///     norms  [kv_heads][kBlockTokens][key, value] fp16
///
/// So the bits of a token that is read at random are one sector of memory where two chunks hold
/// them. Of more chunks an estimator may read the first alone, of all tokens.
///
/// Bit i of a token (plane i) is bit 31 - i % 32 of 32-bit word i / 32 of its bit string: plane 0
/// is the most significant, so the bucket id of a table is P consecutive bits read as a big-endian
/// number. Words are stored in native (little-endian) order, word w in chunk w / 4. Bits past
/// `num_planes` are 0. Of a scalar code (hashing/scalar_code.h) plane t is bits t * head_dim on,
/// and the factor of its estimate (`scalar_norm`) takes the place of the key norm.
struct SketchGeometry {
  int kv_heads = 0;
  int num_planes = 0;

  KVTIER_HOST_DEVICE int chunks() const { return (num_planes + kChunkBits - 1) / kChunkBits; }
  KVTIER_HOST_DEVICE std::int64_t bits_bytes() const {
    return std::int64_t{kv_heads} * chunks() * kBlockTokens * kChunkBytes;
  }
  KVTIER_HOST_DEVICE std::int64_t block_bytes() const {
    return bits_bytes() + std::int64_t{kv_heads} * kBlockTokens * kNormBytes;
  }
  /// Bytes from a token's chunk to the same chunk of the next token, and to its own next chunk.
  KVTIER_HOST_DEVICE int token_stride() const { return (chunks() == 2 ? 2 : 1) * kChunkBytes; }
  KVTIER_HOST_DEVICE int chunk_stride() const {
    return (chunks() == 2 ? 1 : kBlockTokens) * kChunkBytes;
  }
  /// Offset of a token's chunk inside its block.
  KVTIER_HOST_DEVICE std::int64_t chunk_offset(int kv_head, int chunk, int token_in_block) const {
    return std::int64_t{kv_head} * chunks() * kBlockTokens * kChunkBytes +
           std::int64_t{chunk} * chunk_stride() + std::int64_t{token_in_block} * token_stride();
  }
  /// Offset of a token's norms, that of its key first: one 32-bit word.
  KVTIER_HOST_DEVICE std::int64_t norms_offset(int kv_head, int token_in_block) const {
    return bits_bytes() + (std::int64_t{kv_head} * kBlockTokens + token_in_block) * kNormBytes;
  }
  KVTIER_HOST_DEVICE std::int64_t key_norm_offset(int kv_head, int token_in_block) const {
    return norms_offset(kv_head, token_in_block);
  }
  KVTIER_HOST_DEVICE std::int64_t value_norm_offset(int kv_head, int token_in_block) const {
    return norms_offset(kv_head, token_in_block) + kNormBytes / 2;
  }
  /// Sketch bytes of one token and KV head that an estimator reads: bits, and one or both norms.
  KVTIER_HOST_DEVICE std::int64_t token_bytes() const {
    return std::int64_t{chunks()} * kChunkBytes + kNormBytes;
  }
};

/// New tokens to sketch of one sequence: those of `transfer::AppendItem`, and where their blocks
/// are.
struct SketchItem {
  std::byte* const* blocks = nullptr;  ///< Device array of block addresses.
  transfer::SequenceCounters* counters = nullptr;
  std::int32_t tokens = 0;
  std::int64_t packed_offset = 0;
  /// Device array `[tokens]`: where each token goes instead of behind the length, below 0 or from
  /// `capacity` on for nowhere; or nullptr.
  const std::int32_t* slots = nullptr;

  /// Returns how many of the tokens, from the first, may have a place.
  [[nodiscard]] KVTIER_HOST_DEVICE std::int64_t tokens_placed() const {
    return slots != nullptr ? tokens : transfer::tokens_stored(*counters, tokens);
  }
};
using SketchBatch = transfer::Batch<SketchItem>;

/// Sketches packed rows (the output of `transfer::pack_rows`) at tokens length .. length + tokens -
/// 1 of each sequence: bits and norms as above, by fp32 accumulation. Must be enqueued
/// before `append_done`. Costs the same at any length. Tokens past the capacity are dropped.
/// `squares`, unless null, are those that `pack_rows` has written of these rows: norms may be taken
/// from them, so that long appends need not read values.
///
/// A projection within rounding of zero may differ between backends, and between long and short
/// appends.
void sketch_keys(transfer::Stream& stream, const PlanesView& planes, const transfer::KvGeometry& kv,
                 const SketchGeometry& geometry, const SketchBatch& batch, const std::byte* packed,
                 const transfer::RowSquares* squares = nullptr);

}  // namespace kvtier::hashing
