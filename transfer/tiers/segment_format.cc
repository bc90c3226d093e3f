#include "transfer/tiers/segment_format.h"

#include "transfer/tiers/crc32c.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvtier::tiers {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::uint64_t kSegmentMagic = 0x31304745'53544B56;  // "VKTSEG01", read backwards
constexpr std::uint64_t kRecordMagic = 0x31304745'52544B56;
constexpr std::size_t kCrcAt = kBlockBytes - sizeof(std::uint32_t);

class Writer {
 public:
  explicit Writer(Block to) : to_(to) { std::fill(to.begin(), to.end(), std::byte{0}); }
  template <typename T>
  void put(const T& value) {
    std::memcpy(to_.data() + at_, &value, sizeof value);
    at_ += sizeof value;
  }
  void finish() {
    at_ = kCrcAt;
    put(crc32c(to_.first(kCrcAt)));
  }

 private:
  Block to_;
  std::size_t at_ = 0;
};

class Reader {
 public:
  explicit Reader(ConstBlock from) : from_(from) {}
  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, from_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  [[nodiscard]] bool whole() const {
    std::uint32_t crc = 0;
    std::memcpy(&crc, from_.data() + kCrcAt, sizeof crc);
    return crc == crc32c(from_.first(kCrcAt));
  }

 private:
  ConstBlock from_;
  std::size_t at_ = 0;
};

}  // namespace

void encode(const SegmentHeader& header, Block to) {
  Writer writer(to);
  writer.put(kSegmentMagic);
  writer.put(header.generation);
  writer.put(header.nonce);
  writer.put(header.bytes);
  writer.finish();
}

void encode(const RecordHeader& header, const SegmentHeader& segment, Block to) {
  Writer writer(to);
  writer.put(kRecordMagic);
  writer.put(segment.generation);
  writer.put(segment.nonce);
  writer.put(header.offset);
  writer.put(header.length);
  writer.put(header.durable_end);
  writer.put(static_cast<std::uint32_t>(header.kind));
  writer.put(header.page_crc);
  writer.put(header.key);
  writer.finish();
}

void encode_dead(RecordHeader header, const SegmentHeader& segment, Block to) {
  header.kind = RecordKind::kDead;
  header.durable_end = kBlockBytes;
  encode(header, segment, to);
}

std::optional<SegmentHeader> decode_segment(ConstBlock from) {
  Reader reader(from);
  if (reader.get<std::uint64_t>() != kSegmentMagic || !reader.whole()) return std::nullopt;
  SegmentHeader header;
  header.generation = reader.get<std::uint64_t>();
  header.nonce = reader.get<std::uint64_t>();
  header.bytes = reader.get<std::uint64_t>();
  return header;
}

std::optional<RecordHeader> decode_record(ConstBlock from, const SegmentHeader& segment,
                                          std::uint64_t offset) {
  Reader reader(from);
  if (reader.get<std::uint64_t>() != kRecordMagic || !reader.whole()) return std::nullopt;
  const bool of_this_segment = reader.get<std::uint64_t>() == segment.generation &&
                               reader.get<std::uint64_t>() == segment.nonce &&
                               reader.get<std::uint64_t>() == offset;
  if (!of_this_segment) return std::nullopt;
  RecordHeader header;
  header.offset = offset;
  header.length = reader.get<std::uint64_t>();
  header.durable_end = reader.get<std::uint64_t>();
  header.kind = static_cast<RecordKind>(reader.get<std::uint32_t>());
  header.page_crc = reader.get<std::uint32_t>();
  header.key = reader.get<PageKey>();
  if (header.kind < RecordKind::kPage || header.kind > RecordKind::kSeal) return std::nullopt;
  if (header.length > segment.bytes || offset + record_bytes(header.length) > segment.bytes) {
    return std::nullopt;
  }
  return header;
}

}  // namespace kvtier::tiers
