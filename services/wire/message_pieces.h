#pragma once

#include <google/protobuf/message.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace kvtier::services {

/// Bytes in several pieces, one after another. Does not own them.
using ByteRuns = std::vector<std::span<const std::byte>>;

/// Reads a protobuf message that lies in several pieces of memory without copying its long field
/// `field`, of bytes or messages: `take` is called with where each of its values lies, in their
/// order. `rest` receives the other fields, which have at most 4 KiB together; fields that it does
/// not have are passed over. Throws `kInvalidArgument` where the bytes are no such message, and
/// what `take` throws.
void read_message(const ByteRuns& message, int field, google::protobuf::Message& rest,
                  const std::function<void(const ByteRuns&)>& take);

/// Most fields of a message that is read whole, those of its parts included. Of a field of two
/// bytes protobuf makes some 250, of one that the type does not have 64. The largest batch has
/// 60,000.
inline constexpr int kMaxFields = 1 << 17;

/// Returns whether a message of `type` has at most `kMaxFields` fields. Numbers of fields that the
/// type has are not counted. Bytes that are no message have few.
[[nodiscard]] bool has_few_fields(const ByteRuns& message,
                                  const google::protobuf::Descriptor& type);

/// Appends the head of a field of `size` bytes, which follow it, as protobuf writes it.
void append_bytes_head(std::string& to, int field, std::size_t size);

}  // namespace kvtier::services
