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

}  // namespace

void read_message(const ByteRuns& message, int field, google::protobuf::Message& rest,
                  const std::function<void(const ByteRuns&)>& take) {
  std::deque<google::protobuf::io::ArrayInputStream> runs;
  std::vector<google::protobuf::io::ZeroCopyInputStream*> streams;
  for (const auto& run : message) {
    streams.push_back(&runs.emplace_back(run.data(), static_cast<int>(run.size())));
  }
  google::protobuf::io::ConcatenatingInputStream bytes(streams.data(),
                                                       static_cast<int>(streams.size()));
  CodedInputStream input(&bytes);
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
