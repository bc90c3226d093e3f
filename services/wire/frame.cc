#include "services/wire/frame.h"

#include "kvtier/error.h"

#include "transfer/tiers/crc32c.h"

#include <bit>
#include <cstring>
#include <type_traits>

namespace kvtier::services {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are copied as they are");

constexpr std::size_t kHeaderCrcAt = kFrameHeaderBytes - 4;
constexpr std::uint32_t kMaxRegions = 8;

[[noreturn]] void malformed(const std::string& field, const std::string& expected,
                            std::uint64_t found) {
  throw Error(ErrorCode::kInvalidArgument,
              "frame." + field + ": expected " + expected + ", found " + std::to_string(found));
}

class Writer {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_unsigned_v<T>);
    put_bytes(&value, sizeof(value));
  }
  void put(const Extent& extent) {
    put(extent.offset);
    put(extent.bytes);
  }
  void put_bytes(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
  }
  [[nodiscard]] Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    T value{};
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  Extent extent() {
    Extent extent;
    extent.offset = get<std::uint64_t>();
    extent.bytes = get<std::uint64_t>();
    return extent;
  }
  std::span<const std::byte> take(std::size_t size) {
    if (size > bytes_.size()) {
      malformed("control", std::to_string(size) + " more bytes", bytes_.size());
    }
    const std::span<const std::byte> taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }
  /// A number of things of which each has `size` bytes here.
  std::size_t count(std::size_t size, std::size_t limit) {
    const auto number = get<std::uint32_t>();
    if (number > limit) malformed("count", "at most " + std::to_string(limit), number);
    if (number > bytes_.size() / size) {
      malformed("count", "what the control has bytes for", number);
    }
    return number;
  }
  std::string text() {
    const auto size = get<std::uint32_t>();
    const std::span<const std::byte> taken = take(size);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  void finish() const {
    if (!bytes_.empty()) malformed("control", "its end", bytes_.size());
  }

 private:
  std::span<const std::byte> bytes_;
};

void put_text(Writer& out, const std::string& text) {
  out.put(static_cast<std::uint32_t>(text.size()));
  out.put_bytes(text.data(), text.size());
}

void put_extents(Writer& out, const std::vector<Extent>& extents) {
  out.put(static_cast<std::uint32_t>(extents.size()));
  for (const Extent& extent : extents) out.put(extent);
}

std::vector<Extent> get_extents(Reader& in) {
  std::vector<Extent> extents(in.count(16, kMaxDescriptors));
  for (Extent& extent : extents) extent = in.extent();
  return extents;
}

void put_descriptors(Writer& out, std::span<const PageDescriptor> descriptors) {
  out.put(static_cast<std::uint32_t>(descriptors.size()));
  for (const PageDescriptor& descriptor : descriptors) {
    out.put_bytes(descriptor.handle.data(), descriptor.handle.size());
    out.put(descriptor.offset);
    out.put(descriptor.bytes);
    out.put(descriptor.destination);
    out.put(descriptor.crc);
  }
}

std::vector<PageDescriptor> get_descriptors(Reader& in) {
  std::vector<PageDescriptor> descriptors(in.count(kPageHandleBytes + 28, kMaxDescriptors));
  for (PageDescriptor& descriptor : descriptors) {
    const std::span<const std::byte> handle = in.take(kPageHandleBytes);
    std::memcpy(descriptor.handle.data(), handle.data(), handle.size());
    descriptor.offset = in.get<std::uint64_t>();
    descriptor.bytes = in.get<std::uint64_t>();
    descriptor.destination = in.get<std::uint64_t>();
    descriptor.crc = in.get<std::uint32_t>();
  }
  return descriptors;
}

}  // namespace

HeaderBytes encode_header(const FrameHeader& header) noexcept {
  HeaderBytes bytes{};
  std::size_t at = 0;
  const auto put = [&](auto value) {
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    at += sizeof(value);
  };
  put(kFrameMagic);
  put(kFrameVersion);
  put(static_cast<std::uint16_t>(header.type));
  put(header.flags);
  put(header.control_bytes);
  put(header.request_id);
  put(header.body_bytes);
  put(header.control_crc);
  put(crc32c(std::span(bytes).first(kHeaderCrcAt)));
  return bytes;
}

FrameHeader decode_header(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  Reader in(bytes);
  const auto magic = in.get<std::uint32_t>();
  if (magic != kFrameMagic) malformed("magic", std::to_string(kFrameMagic), magic);
  const auto version = in.get<std::uint16_t>();
  if (version != kFrameVersion) malformed("version", std::to_string(kFrameVersion), version);
  const auto type = in.get<std::uint16_t>();
  FrameHeader header;
  header.type = static_cast<FrameType>(type);
  header.flags = in.get<std::uint32_t>();
  header.control_bytes = in.get<std::uint32_t>();
  header.request_id = in.get<std::uint64_t>();
  header.body_bytes = in.get<std::uint64_t>();
  header.control_crc = in.get<std::uint32_t>();
  const auto crc = in.get<std::uint32_t>();
  const std::uint32_t expected = crc32c(bytes.first(kHeaderCrcAt));
  if (crc != expected) malformed("header_crc", std::to_string(expected), crc);
  if (type < 1 || type > static_cast<std::uint16_t>(FrameType::kGoAway)) {
    malformed("type", "1 to 9", type);
  }
  if ((header.flags & ~kKnownFlags) != 0) {
    malformed("flags", "known ones", header.flags);
  }
  if (header.control_bytes > kMaxControlBytes) {
    malformed("control_bytes", "at most " + std::to_string(kMaxControlBytes), header.control_bytes);
  }
  if (header.body_bytes < header.control_bytes) {
    malformed("body_bytes", "at least the control's " + std::to_string(header.control_bytes),
              header.body_bytes);
  }
  if (header.payload_bytes() > kMaxPayloadBytes) {
    malformed("payload", "at most " + std::to_string(kMaxPayloadBytes) + " bytes",
              header.payload_bytes());
  }
  if (header.payload_bytes() > 0 && (header.flags & kInline) == 0) {
    malformed("payload", "none without the flag for it", header.payload_bytes());
  }
  return header;
}

void check_control(const FrameHeader& header, std::span<const std::byte> control) {
  const std::uint32_t crc = crc32c(control);
  if (crc != header.control_crc) malformed("control_crc", std::to_string(header.control_crc), crc);
}

FrameHeader make_header(FrameType type, std::uint32_t flags, std::uint64_t request_id,
                        std::span<const std::byte> control, std::uint64_t payload_bytes) {
  return {.type = type,
          .flags = flags,
          .control_bytes = static_cast<std::uint32_t>(control.size()),
          .request_id = request_id,
          .body_bytes = control.size() + payload_bytes,
          .control_crc = crc32c(control)};
}

Bytes encode(const AttachedBody& body) {
  Writer out;
  out.put(body.layout_version);
  out.put(static_cast<std::uint32_t>(body.regions.size()));
  for (const Region& region : body.regions) {
    out.put(static_cast<std::uint32_t>(region.kind));
    out.put(region.bytes);
  }
  return out.take();
}

AttachedBody decode_attached(std::span<const std::byte> control) {
  Reader in(control);
  AttachedBody body;
  body.layout_version = in.get<std::uint32_t>();
  body.regions.resize(in.count(12, kMaxRegions));
  for (Region& region : body.regions) {
    const auto kind = in.get<std::uint32_t>();
    if (kind < 1 || kind > 2) malformed("region.kind", "1 or 2", kind);
    region.kind = static_cast<RegionKind>(kind);
    region.bytes = in.get<std::uint64_t>();
  }
  in.finish();
  return body;
}

Bytes encode(const CallBody& body) {
  Writer out;
  out.put(static_cast<std::uint16_t>(body.method));
  out.put(std::uint16_t{0});
  out.put(body.timeout_ms);
  out.put(body.output);
  put_extents(out, body.tensors);
  put_text(out, body.message);
  return out.take();
}

CallBody decode_call(std::span<const std::byte> control) {
  Reader in(control);
  CallBody body;
  const auto method = in.get<std::uint16_t>();
  constexpr auto kLast = static_cast<std::uint16_t>(Method::kBatchLookupPages);
  if (method < 1 || method > kLast) malformed("method", "1 to " + std::to_string(kLast), method);
  body.method = static_cast<Method>(method);
  const auto reserved = in.get<std::uint16_t>();
  if (reserved != 0) malformed("reserved", "0", reserved);
  body.timeout_ms = in.get<std::uint32_t>();
  body.output = in.extent();
  body.tensors = get_extents(in);
  body.message = in.text();
  in.finish();
  return body;
}

Bytes encode(const ReplyBody& body) {
  Writer out;
  put_extents(out, body.tensors);
  put_text(out, body.message);
  return out.take();
}

ReplyBody decode_reply(std::span<const std::byte> control) {
  Reader in(control);
  ReplyBody body;
  body.tensors = get_extents(in);
  body.message = in.text();
  in.finish();
  return body;
}

Bytes encode(std::span<const PageDescriptor> descriptors) {
  Writer out;
  put_descriptors(out, descriptors);
  return out.take();
}

std::vector<PageDescriptor> decode_descriptors(std::span<const std::byte> control) {
  Reader in(control);
  std::vector<PageDescriptor> descriptors = get_descriptors(in);
  in.finish();
  return descriptors;
}

Bytes encode(const WriteBody& body) {
  Writer out;
  put_text(out, body.lease);
  put_descriptors(out, body.pages);
  return out.take();
}

WriteBody decode_write(std::span<const std::byte> control) {
  Reader in(control);
  WriteBody body;
  body.lease = in.text();
  body.pages = get_descriptors(in);
  in.finish();
  return body;
}

Bytes encode(std::span<const PageOutcome> outcomes) {
  Writer out;
  out.put(static_cast<std::uint32_t>(outcomes.size()));
  for (const PageOutcome& outcome : outcomes) {
    out.put(outcome.code);
    out.put(outcome.crc);
    out.put(outcome.slot);
    out.put(outcome.generation);
    out.put(outcome.offset);
    out.put(outcome.bytes);
  }
  return out.take();
}

std::vector<PageOutcome> decode_outcomes(std::span<const std::byte> control) {
  Reader in(control);
  std::vector<PageOutcome> outcomes(in.count(32, kMaxDescriptors));
  for (PageOutcome& outcome : outcomes) {
    outcome.code = in.get<std::uint32_t>();
    outcome.crc = in.get<std::uint32_t>();
    outcome.slot = in.get<std::uint32_t>();
    outcome.generation = in.get<std::uint32_t>();
    outcome.offset = in.get<std::uint64_t>();
    outcome.bytes = in.get<std::uint64_t>();
  }
  in.finish();
  return outcomes;
}

}  // namespace kvtier::services
