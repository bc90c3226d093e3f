#include "services/wire/message_pieces.h"

#include "kvtier/error.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>

namespace kvtier::services {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::io::StringOutputStream;
using Wire = google::protobuf::internal::WireFormatLite;

constexpr int kMostCopied = 4096;

[[noreturn]] void bad() {
  throw Error(ErrorCode::kInvalidArgument, "message: expected one of its type, found other bytes");
}

/// Whether `type` has the field of `tag`. Throws where it has it as another type, which protobuf
/// would keep as an unknown field, of many times its bytes.
bool has_field(const Descriptor& type, std::uint32_t tag) {
  const FieldDescriptor* field = type.FindFieldByNumber(Wire::GetTagFieldNumber(tag));
  if (field == nullptr) return false;
  const auto wire_type = Wire::WireTypeForFieldType(static_cast<Wire::FieldType>(field->type()));
  if (Wire::GetTagWireType(tag) != wire_type) bad();
  return true;
}

/// The pieces of a field of bytes, whose tag has been read.
ByteRuns read_bytes(CodedInputStream& input) {
  std::uint32_t left = 0;
  if (!input.ReadVarint32(&left)) bad();
  ByteRuns taken;
  const void* data = nullptr;
  for (int size = 0; left > 0; left -= static_cast<std::uint32_t>(size)) {
    if (!input.GetDirectBufferPointer(&data, &size)) bad();
    size = static_cast<int>(std::min(left, static_cast<std::uint32_t>(size)));
    taken.emplace_back(static_cast<const std::byte*>(data), static_cast<std::size_t>(size));
    input.Skip(size);
  }
  return taken;
}

/// Reads pieces of memory, one after another.
class RunStream {
 public:
  explicit RunStream(const ByteRuns& message) {
    for (const auto& run : message) {
      streams_.push_back(&runs_.emplace_back(run.data(), static_cast<int>(run.size())));
    }
    all_.emplace(streams_.data(), static_cast<int>(streams_.size()));
  }
  [[nodiscard]] google::protobuf::io::ZeroCopyInputStream* get() { return &*all_; }

 private:
  std::deque<google::protobuf::io::ArrayInputStream> runs_;
  std::vector<google::protobuf::io::ZeroCopyInputStream*> streams_;
  std::optional<google::protobuf::io::ConcatenatingInputStream> all_;
};

/// Counts `left` down by the fields of a message, perhaps below 0. Returns false where there are
/// more, or the bytes are no message.
bool count_fields(CodedInputStream& input, const Descriptor& type, int& left) {
  while (const std::uint32_t tag = input.ReadTag()) {
    const FieldDescriptor* field = type.FindFieldByNumber(Wire::GetTagFieldNumber(tag));
    const auto wire_type = Wire::GetTagWireType(tag);
    const bool has_bytes = wire_type == Wire::WIRETYPE_LENGTH_DELIMITED;
    if ((field == nullptr || has_bytes) && --left < 0) return false;
    // What is in a group is counted as if it were beside it.
    if (wire_type == Wire::WIRETYPE_START_GROUP || wire_type == Wire::WIRETYPE_END_GROUP) {
      if (field != nullptr && --left < 0) return false;
    } else if (has_bytes && field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      std::uint32_t size = 0;
      if (!input.ReadVarint32(&size)) return false;
      const auto limit = input.PushLimit(static_cast<int>(size));
      if (!count_fields(input, *field->message_type(), left)) return false;
      if (input.BytesUntilLimit() > 0) return false;
      input.PopLimit(limit);
    } else if (!Wire::SkipField(&input, tag)) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool has_few_fields(const ByteRuns& message, const google::protobuf::Descriptor& type) {
  std::size_t size = 0;
  for (const auto& run : message) size += run.size();
  if (size <= std::size_t{kMaxFields}) return true;  // a field has a byte at least
  RunStream bytes(message);
  CodedInputStream input(bytes.get());
  int left = kMaxFields;
  static_cast<void>(count_fields(input, type, left));
  return left >= 0;
}

void read_message(const ByteRuns& message, int field, google::protobuf::Message& rest,
                  const std::function<void(const ByteRuns&)>& take) {
  RunStream bytes(message);
  CodedInputStream input(bytes.get());
  const std::uint32_t taken = Wire::MakeTag(field, Wire::WIRETYPE_LENGTH_DELIMITED);
  std::string copied;
  {
    StringOutputStream stream(&copied);
    CodedOutputStream output(&stream);
    while (const std::uint32_t tag = input.ReadTag()) {
      if (tag == taken) {
        take(read_bytes(input));
      } else if (has_field(*rest.GetDescriptor(), tag)) {
        const auto limit = input.PushLimit(std::max(kMostCopied - output.ByteCount(), 0));
        if (!Wire::SkipField(&input, tag, &output)) bad();
        input.PopLimit(limit);
      } else if (!Wire::SkipField(&input, tag)) {
        bad();
      }
    }
  }
  if (!input.ConsumedEntireMessage() || !rest.ParseFromString(copied)) bad();
}

void append_bytes_head(std::string& to, int field, std::size_t size) {
  std::array<std::uint8_t, 20> head{};
  const std::uint32_t tag = Wire::MakeTag(field, Wire::WIRETYPE_LENGTH_DELIMITED);
  std::uint8_t* const end = CodedOutputStream::WriteVarint64ToArray(
      size, CodedOutputStream::WriteVarint32ToArray(tag, head.data()));
  to.append(head.data(), end);
}

}  // namespace kvtier::services
