#pragma once

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvtier::services {

/// Bytes in several pieces, one after another. Does not own them.
using ByteRuns = std::vector<std::span<const std::byte>>;

/// Reads a protobuf message that lies in several pieces of memory, so that its long fields need not
/// be copied into one. Every function throws `kInvalidArgument` where the bytes are no message.
/// The bytes must outlive the cursor.
class MessageCursor {
 public:
  explicit MessageCursor(const ByteRuns& runs);

  /// Moves to the next field. Returns false at the end.
  [[nodiscard]] bool next();
  /// Number of the field.
  [[nodiscard]] int field() const noexcept { return field_; }

  /// The field's value, which must be of this kind: read it, or skip it, once.
  [[nodiscard]] std::uint64_t varint();
  [[nodiscard]] std::uint32_t fixed32();
  [[nodiscard]] ByteRuns bytes();
  /// As `bytes`, copied; at most `max_bytes`.
  [[nodiscard]] std::string text(std::size_t max_bytes);
  void skip();

 private:
  void expect(unsigned wire_type) const;
  [[nodiscard]] std::uint64_t raw_varint();
  [[nodiscard]] ByteRuns take(std::uint64_t count);

  std::deque<google::protobuf::io::ArrayInputStream> runs_;
  std::vector<google::protobuf::io::ZeroCopyInputStream*> run_pointers_;
  std::optional<google::protobuf::io::ConcatenatingInputStream> bytes_;
  std::optional<google::protobuf::io::CodedInputStream> input_;
  std::size_t size_ = 0;  ///< Of all runs.
  int field_ = 0;
  unsigned wire_type_ = 0;
};

/// Appends fields as protobuf writes them.
void append_varint(std::string& to, std::uint64_t value);
/// The head of a field of `size` bytes, which follow it.
void append_bytes_head(std::string& to, int field, std::size_t size);

}  // namespace kvtier::services
