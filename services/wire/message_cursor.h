#pragma once

#include <cstddef>
#include <cstdint>
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
  [[nodiscard]] std::byte byte();
  [[nodiscard]] ByteRuns take(std::uint64_t count);

  ByteRuns runs_;
  std::size_t run_ = 0;     ///< Of `runs_`.
  std::size_t offset_ = 0;  ///< In that run.
  std::size_t left_ = 0;
  int field_ = 0;
  unsigned wire_type_ = 0;
};

/// Appends fields as protobuf writes them.
void append_varint(std::string& to, std::uint64_t value);
/// The head of a field of `size` bytes, which follow it.
void append_bytes_head(std::string& to, int field, std::size_t size);

}  // namespace kvtier::services
