#pragma once

#include "transfer/tiers/page_tier.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace kvtier::tiers {

/// Everything in a segment begins at a multiple of this, as O_DIRECT wants it.
inline constexpr std::size_t kBlockBytes = 4096;

using Block = std::span<std::byte, kBlockBytes>;
using ConstBlock = std::span<const std::byte, kBlockBytes>;

/// The first block of a segment file. `nonce` is random and repeated in every record, so that the
/// bytes of a page never pass for a record.
struct SegmentHeader {
  std::uint64_t generation = 0;  ///< Of two records with one key that of the later segment counts.
  std::uint64_t nonce = 0;
  std::uint64_t bytes = 0;  ///< Of the file.
};

enum class RecordKind : std::uint32_t {
  kPage = 1,
  kDead = 2,  ///< Was a page; its length still says where the next record begins.
  kSeal = 3,  ///< Nothing follows, and all before is on the disk.
};

/// One block, followed by the page, zeros up to the next multiple of a block, and the next record.
/// The last four bytes of the block are the CRC-32C of those before.
struct RecordHeader {
  RecordKind kind = RecordKind::kPage;
  PageKey key{};
  std::uint64_t offset = 0;    ///< Of this block in its segment.
  std::uint64_t length = 0;    ///< Of the page.
  std::uint32_t page_crc = 0;  ///< CRC-32C of the page.
  /// All records before this offset were on the disk when this one was written. Those after the
  /// largest such offset of a segment are read and verified before a restart takes them as stored.
  std::uint64_t durable_end = 0;
};

[[nodiscard]] constexpr std::uint64_t round_to_blocks(std::uint64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}
/// Header, page and padding.
[[nodiscard]] constexpr std::uint64_t record_bytes(std::uint64_t length) {
  return kBlockBytes + round_to_blocks(length);
}

void encode(const SegmentHeader& header, Block to);
void encode(const RecordHeader& header, const SegmentHeader& segment, Block to);
/// What is written over the header of a record to make it dead. It vouches for no other record.
void encode_dead(RecordHeader header, const SegmentHeader& segment, Block to);

/// Return nothing when the block is anything but a header: of this version, whole, and in the case
/// of a record of this segment, at this offset and inside the file.
[[nodiscard]] std::optional<SegmentHeader> decode_segment(ConstBlock from);
[[nodiscard]] std::optional<RecordHeader> decode_record(ConstBlock from,
                                                        const SegmentHeader& segment,
                                                        std::uint64_t offset);

}  // namespace kvtier::tiers
