#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

/// The frames of the data plane, as bytes: no sockets, no allocation by a number that is not
/// checked against the bytes at hand. Numbers are little-endian. Decoders throw `Error`
/// (`kInvalidArgument`) with what was expected and found; the reader of a socket then closes
/// it.
///
///     frame   = header, control, payload
///     header  = magic, version, type, flags, control bytes, request id, body bytes, CRC of
///     control, CRC of header
///
/// `control` says what is asked or answered; `payload` has the bytes of tensors or pages of a frame
/// with `kInline`, and is empty where they lie in shared memory.
namespace kvtier::services {

inline constexpr std::size_t kFrameHeaderBytes = 40;
inline constexpr std::uint32_t kFrameMagic = 0x4654564BU;  ///< "KVTF"
inline constexpr std::uint16_t kFrameVersion = 1;
inline constexpr std::uint64_t kMaxControlBytes = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kMaxPayloadBytes = std::uint64_t{8} << 20;
inline constexpr std::size_t kMaxDescriptors = 4096;
inline constexpr std::size_t kAttachTokenBytes = 32;
inline constexpr std::size_t kPageHandleBytes = 32;

enum class FrameType : std::uint16_t {
  kAttach = 1,      ///< client: the token, before all else
  kAttached = 2,    ///< server: the regions, with their descriptors on a Unix socket
  kCall = 3,        ///< client: a call of AttentionService
  kReply = 4,       ///< server: its reply
  kReadPages = 5,   ///< client: descriptors
  kPages = 6,       ///< server: an outcome each
  kWritePages = 7,  ///< client: descriptors
  kWritten = 8,     ///< server: an outcome each
  kGoAway = 9,      ///< server: ItemStatus, then the end of the connection
};

inline constexpr std::uint32_t kInline = 1;  ///< The bytes are in the payload.
inline constexpr std::uint32_t kFailed = 2;  ///< `control` is an ItemStatus: nothing was done.
inline constexpr std::uint32_t kMore = 4;    ///< Another frame of the same reply follows.
/// Of pages: the server compares the checksums of those that are read, and takes those that are
/// written without one.
inline constexpr std::uint32_t kServerSums = 8;
inline constexpr std::uint32_t kKnownFlags = kInline | kFailed | kMore | kServerSums;

struct FrameHeader {
  FrameType type = FrameType::kAttach;
  std::uint32_t flags = 0;
  std::uint32_t control_bytes = 0;
  std::uint64_t request_id = 0;
  std::uint64_t body_bytes = 0;  ///< Control and payload.
  std::uint32_t control_crc = 0;

  [[nodiscard]] std::uint64_t payload_bytes() const noexcept { return body_bytes - control_bytes; }
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

using HeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

[[nodiscard]] HeaderBytes encode_header(const FrameHeader& header) noexcept;
/// Throws for a magic, version, type, flag, length or checksum that is none. The lengths returned
/// are within the limits above, and the control fits the body.
[[nodiscard]] FrameHeader decode_header(std::span<const std::byte, kFrameHeaderBytes> bytes);
/// Throws unless `control` has the checksum that the header gives.
void check_control(const FrameHeader& header, std::span<const std::byte> control);
/// A header for `control` and `payload_bytes`, with lengths and checksum filled in.
[[nodiscard]] FrameHeader make_header(FrameType type, std::uint32_t flags, std::uint64_t request_id,
                                      std::span<const std::byte> control,
                                      std::uint64_t payload_bytes);

/// What is shared with a client. The order of regions is that of their descriptors.
enum class RegionKind : std::uint32_t {
  kStaging = 1,    ///< The client's own, read and write.
  kReadArena = 2,  ///< Pages of the tenant, read only.
};

struct Region {
  RegionKind kind = RegionKind::kStaging;
  std::uint64_t bytes = 0;
  friend bool operator==(const Region&, const Region&) = default;
};

/// Reply to kAttach. The descriptors beside it are those of the regions, in their order.
struct AttachedBody {
  std::uint32_t layout_version = 1;
  std::vector<Region> regions;
  friend bool operator==(const AttachedBody&, const AttachedBody&) = default;
};

/// The calls of AttentionService, but for the last, that a frame may carry.
enum class Method : std::uint16_t {
  kAppend = 1,
  kSelect = 2,
  kAttend = 3,
  kDecode = 4,
  kBatchDecode = 5,
  kBatchAttend = 6,
  kFetch = 7,
  kBatchSelect = 8,
  kBatchFetch = 9,
  kBatchLookupPages = 10,  ///< Of PageService.
};

/// Bytes of a staging region, or of the payload.
struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// Tensors of a reply begin at multiples of this many bytes.
inline constexpr std::uint64_t kTensorAlignment = 64;
[[nodiscard]] constexpr std::uint64_t aligned_bytes(std::uint64_t bytes) noexcept {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}
/// Room that `output` must have for each query of `query_bytes` that is attended: as many bytes,
/// and at most 1/32 of them for the log-sum-exps.
[[nodiscard]] constexpr std::uint64_t output_bytes_for(std::uint64_t query_bytes) noexcept {
  return aligned_bytes(query_bytes) + aligned_bytes(query_bytes / 32);
}
/// Room for the missed shares of such a query.
[[nodiscard]] constexpr std::uint64_t missed_bytes_for(std::uint64_t query_bytes) noexcept {
  return aligned_bytes(query_bytes / 32);
}

/// kCall: a request of kvtier.v1 whose tensors have no data; `tensors` says where it is, in the
/// order in which they stand in the request, but for those that name device memory; together they
/// are at most as many bytes as there are, so they need not overlap. The reply's
/// tensors are written to `output`, which is empty with kInline.
struct CallBody {
  Method method = Method::kDecode;
  std::uint32_t timeout_ms = 0;  ///< 0: the server's limit.
  Extent output;
  std::vector<Extent> tensors;
  std::string message;
  friend bool operator==(const CallBody&, const CallBody&) = default;
};

/// kReply: the reply, its tensors without data, and where the data is.
struct ReplyBody {
  std::vector<Extent> tensors;
  std::string message;
  friend bool operator==(const ReplyBody&, const ReplyBody&) = default;
};

/// One page of kReadPages or kWritePages. A page is written, and committed, as a whole.
struct PageDescriptor {
  std::array<char, kPageHandleBytes> handle{};
  std::uint64_t offset = 0;  ///< Within the page.
  std::uint64_t bytes = 0;
  std::uint64_t destination = 0;  ///< kWritePages: of the bytes, in staging or the payload.
  std::uint32_t crc = 0;          ///< kWritePages: CRC-32C of the bytes.
  friend bool operator==(const PageDescriptor&, const PageDescriptor&) = default;
};

/// kWritePages: pages that the lease has reserved.
struct WriteBody {
  std::string lease;
  std::vector<PageDescriptor> pages;
  friend bool operator==(const WriteBody&, const WriteBody&) = default;
};

/// Code of a page that was written when another had been committed under its key: that one is kept,
/// and reserving the key again returns its handle. ALREADY_EXISTS.
inline constexpr std::uint32_t kPageExisted = 6;

/// The server's disk has the page that was written, synced.
inline constexpr std::uint64_t kDurable = 1;

/// What became of one descriptor. Without kInline, the page is at `slot` of the read arena, to be
/// read as page_layout.h says.
struct PageOutcome {
  std::uint32_t code = 0;  ///< As ItemStatus.code, or kPageExisted.
  std::uint32_t crc = 0;   ///< CRC-32C of the whole page.
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint64_t offset = 0;  ///< Of the bytes in this frame's payload; of kWritten, or `kDurable`.
  std::uint64_t bytes = 0;   ///< Of the range asked for; of the page in shared memory.
  friend bool operator==(const PageOutcome&, const PageOutcome&) = default;
};

using Bytes = std::vector<std::byte>;

[[nodiscard]] Bytes encode(const AttachedBody& body);
[[nodiscard]] Bytes encode(const CallBody& body);
[[nodiscard]] Bytes encode(const ReplyBody& body);
[[nodiscard]] Bytes encode(std::span<const PageDescriptor> descriptors);
[[nodiscard]] Bytes encode(const WriteBody& body);
[[nodiscard]] Bytes encode(std::span<const PageOutcome> outcomes);

[[nodiscard]] AttachedBody decode_attached(std::span<const std::byte> control);
[[nodiscard]] CallBody decode_call(std::span<const std::byte> control);
[[nodiscard]] ReplyBody decode_reply(std::span<const std::byte> control);
[[nodiscard]] std::vector<PageDescriptor> decode_descriptors(std::span<const std::byte> control);
[[nodiscard]] WriteBody decode_write(std::span<const std::byte> control);
[[nodiscard]] std::vector<PageOutcome> decode_outcomes(std::span<const std::byte> control);

/// Returns whether `extent` lies within `bytes`; does not overflow.
[[nodiscard]] constexpr bool lies_within(const Extent& extent, std::uint64_t bytes) noexcept {
  return extent.offset <= bytes && extent.bytes <= bytes - extent.offset;
}

}  // namespace kvtier::services
