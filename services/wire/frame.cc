#include "services/wire/frame.h"

#include "include/types/failure.h"
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
  throw_invalid("frame." + field, expected, found);
}

template <typename T, typename Body>
concept Is = std::is_same_v<std::remove_const_t<T>, Body>;

// The fields of each body in their order, for writing and reading: `io` takes them all.
void fields(Is<FrameHeader> auto& header, auto& io) {
  io(header.type, header.flags, header.control_bytes, header.request_id, header.body_bytes,
     header.control_crc);
}
void fields(Is<Extent> auto& extent, auto& io) { io(extent.offset, extent.bytes); }
void fields(Is<Region> auto& region, auto& io) { io(region.kind, region.bytes); }
void fields(Is<AttachedBody> auto& body, auto& io) { io(body.layout_version, body.regions); }
void fields(Is<CallBody> auto& body, auto& io) {
  io(body.method);
  io.reserve();
  io(body.timeout_ms, body.output, body.tensors, body.message);
}
void fields(Is<ReplyBody> auto& body, auto& io) { io(body.tensors, body.message); }
void fields(Is<PageDescriptor> auto& page, auto& io) {
  io(page.handle, page.offset, page.bytes, page.destination, page.crc);
}
void fields(Is<WriteBody> auto& body, auto& io) { io(body.lease, body.pages); }
void fields(Is<PageOutcome> auto& outcome, auto& io) {
  io(outcome.code, outcome.crc, outcome.slot, outcome.generation, outcome.offset, outcome.bytes);
}

/// A number, or bytes, that are copied as they are.
template <typename T>
concept Plain = std::is_unsigned_v<T> || std::is_enum_v<T> ||
    std::is_same_v<T, std::array<char, kPageHandleBytes>>;

/// Bytes of an element of a list, whose fields are plain.
template <typename T>
constexpr std::size_t size_of() {
  T value{};
  std::size_t bytes = 0;
  const auto add = [&bytes](const auto&... field) { bytes += (sizeof(field) + ...); };
  fields(value, add);
  return bytes;
}

class Writer {
 public:
  void operator()(const auto&... values) { (put(values), ...); }
  void reserve() { put(std::uint16_t{0}); }
  [[nodiscard]] Bytes take() { return std::move(bytes_); }

 private:
  void put(const Plain auto& value) { put_bytes(&value, sizeof(value)); }
  void put(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    put_bytes(text.data(), text.size());
  }
  template <typename T>
  void put(std::span<const T> list) {
    put(static_cast<std::uint32_t>(list.size()));
    for (const T& element : list) fields(element, *this);
  }
  template <typename T>
  void put(const std::vector<T>& list) {
    put(std::span(list));
  }
  void put(const auto& body) { fields(body, *this); }
  void put_bytes(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
  }

  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  void operator()(auto&... values) { (get(values), ...); }
  void reserve() {
    std::uint16_t reserved = 0;
    get(reserved);
    if (reserved != 0) malformed("reserved", "0", reserved);
  }
  void finish() const {
    if (!bytes_.empty()) malformed("control", "its end", bytes_.size());
  }

 private:
  void get(Plain auto& value) {
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    check(value);
  }
  void get(std::string& text) {
    std::uint32_t size = 0;
    get(size);
    const std::span<const std::byte> taken = take(size);
    text.assign(reinterpret_cast<const char*>(taken.data()), taken.size());
  }
  template <typename T>
  void get(std::vector<T>& list) {
    constexpr std::size_t kLimit = std::is_same_v<T, Region> ? kMaxRegions : kMaxDescriptors;
    std::uint32_t count = 0;
    get(count);
    if (count > kLimit) malformed("count", "at most " + std::to_string(kLimit), count);
    if (count > bytes_.size() / size_of<T>()) {
      malformed("count", "what the control has bytes for", count);
    }
    list.resize(count);
    for (T& element : list) fields(element, *this);
  }
  void get(auto& body) { fields(body, *this); }
  std::span<const std::byte> take(std::size_t size) {
    if (size > bytes_.size()) {
      malformed("control", std::to_string(size) + " more bytes", bytes_.size());
    }
    const std::span<const std::byte> taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }
  static void check(const auto& /*value*/) {}
  static void check(const RegionKind& kind) {
    const auto number = static_cast<std::uint32_t>(kind);
    if (number < 1 || number > 2) malformed("region.kind", "1 or 2", number);
  }
  static void check(const Method& method) {
    const auto number = static_cast<std::uint16_t>(method);
    constexpr auto kLast = static_cast<std::uint16_t>(Method::kBatchLookupPages);
    if (number < 1 || number > kLast) malformed("method", "1 to " + std::to_string(kLast), number);
  }

  std::span<const std::byte> bytes_;
};

template <typename Body>
Bytes written(const Body& body) {
  Writer out;
  out(body);
  return out.take();
}

template <typename Body>
Body read(std::span<const std::byte> control) {
  Reader in(control);
  Body body;
  in(body);
  in.finish();
  return body;
}

}  // namespace

HeaderBytes encode_header(const FrameHeader& header) noexcept {
  HeaderBytes bytes{};
  std::size_t at = 0;
  const auto put = [&](const auto&... values) {
    ((std::memcpy(bytes.data() + at, &values, sizeof(values)), at += sizeof(values)), ...);
  };
  put(kFrameMagic, kFrameVersion);
  fields(header, put);
  put(crc32c(std::span(bytes).first(kHeaderCrcAt)));
  return bytes;
}

FrameHeader decode_header(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  Reader in(bytes);
  std::uint32_t magic = 0;
  std::uint16_t version = 0;
  FrameHeader header;
  std::uint32_t crc = 0;
  in(magic, version, header, crc);
  if (magic != kFrameMagic) malformed("magic", std::to_string(kFrameMagic), magic);
  if (version != kFrameVersion) malformed("version", std::to_string(kFrameVersion), version);
  const std::uint32_t expected = crc32c(bytes.first(kHeaderCrcAt));
  if (crc != expected) malformed("header_crc", std::to_string(expected), crc);
  const auto type = static_cast<std::uint16_t>(header.type);
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

Bytes encode(const AttachedBody& body) { return written(body); }
Bytes encode(const CallBody& body) { return written(body); }
Bytes encode(const ReplyBody& body) { return written(body); }
Bytes encode(std::span<const PageDescriptor> descriptors) { return written(descriptors); }
Bytes encode(const WriteBody& body) { return written(body); }
Bytes encode(std::span<const PageOutcome> outcomes) { return written(outcomes); }

AttachedBody decode_attached(std::span<const std::byte> control) {
  return read<AttachedBody>(control);
}
CallBody decode_call(std::span<const std::byte> control) { return read<CallBody>(control); }
ReplyBody decode_reply(std::span<const std::byte> control) { return read<ReplyBody>(control); }
std::vector<PageDescriptor> decode_descriptors(std::span<const std::byte> control) {
  return read<std::vector<PageDescriptor>>(control);
}
WriteBody decode_write(std::span<const std::byte> control) { return read<WriteBody>(control); }
std::vector<PageOutcome> decode_outcomes(std::span<const std::byte> control) {
  return read<std::vector<PageOutcome>>(control);
}

}  // namespace kvtier::services
