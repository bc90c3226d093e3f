#include "services/wire/message_cursor.h"

#include "kvtier/error.h"

#include <algorithm>
#include <array>

namespace kvtier::services {
namespace {

constexpr unsigned kVarint = 0;
constexpr unsigned kFixed64 = 1;
constexpr unsigned kBytes = 2;
constexpr unsigned kFixed32 = 5;

[[noreturn]] void bad(const std::string& expected, const std::string& found) {
  throw Error(ErrorCode::kInvalidArgument, "message: expected " + expected + ", found " + found);
}

}  // namespace

MessageCursor::MessageCursor(const ByteRuns& runs) {
  for (const auto& run : runs) {
    size_ += run.size();
    run_pointers_.push_back(&runs_.emplace_back(run.data(), static_cast<int>(run.size())));
  }
  bytes_.emplace(run_pointers_.data(), static_cast<int>(run_pointers_.size()));
  input_.emplace(&*bytes_);
}

std::uint64_t MessageCursor::raw_varint() {
  std::uint64_t value = 0;
  if (!input_->ReadVarint64(&value)) bad("a number of up to 10 bytes", "none");
  return value;
}

ByteRuns MessageCursor::take(std::uint64_t count) {
  const std::uint64_t left = size_ - static_cast<std::size_t>(input_->CurrentPosition());
  if (count > left) bad(std::to_string(count) + " more bytes", std::to_string(left));
  ByteRuns taken;
  const void* data = nullptr;
  for (int size = 0; count > 0; count -= static_cast<std::uint64_t>(size)) {
    if (!input_->GetDirectBufferPointer(&data, &size)) bad("more bytes", "the end");
    size = static_cast<int>(std::min<std::uint64_t>(count, static_cast<std::uint64_t>(size)));
    taken.emplace_back(static_cast<const std::byte*>(data), static_cast<std::size_t>(size));
    input_->Skip(size);
  }
  return taken;
}

bool MessageCursor::next() {
  const std::uint32_t tag = input_->ReadTag();
  if (tag == 0 && input_->ConsumedEntireMessage()) return false;
  field_ = static_cast<int>(tag >> 3U);
  wire_type_ = tag & 7U;
  if (field_ == 0) bad("the number of a field", "none");
  return true;
}

void MessageCursor::expect(unsigned wire_type) const {
  if (wire_type_ == wire_type) return;
  bad("field " + std::to_string(field_) + " of wire type " + std::to_string(wire_type),
      std::to_string(wire_type_));
}

std::uint64_t MessageCursor::varint() {
  expect(kVarint);
  return raw_varint();
}

std::uint32_t MessageCursor::fixed32() {
  expect(kFixed32);
  std::uint32_t value = 0;
  if (!input_->ReadLittleEndian32(&value)) bad("4 more bytes", "the end");
  return value;
}

ByteRuns MessageCursor::bytes() {
  expect(kBytes);
  return take(raw_varint());
}

std::string MessageCursor::text(std::size_t max_bytes) {
  expect(kBytes);
  const std::uint64_t size = raw_varint();
  if (size > max_bytes)
    bad("at most " + std::to_string(max_bytes) + " bytes", std::to_string(size));
  std::string text;
  for (const auto& run : take(size)) {
    text.append(reinterpret_cast<const char*>(run.data()), run.size());
  }
  return text;
}

void MessageCursor::skip() {
  switch (wire_type_) {
    case kVarint:
      static_cast<void>(raw_varint());
      return;
    case kFixed64:
      static_cast<void>(take(8));
      return;
    case kBytes:
      static_cast<void>(take(raw_varint()));
      return;
    case kFixed32:
      static_cast<void>(take(4));
      return;
    default:
      bad("a wire type of proto3", std::to_string(wire_type_));
  }
}

void append_varint(std::string& to, std::uint64_t value) {
  std::array<std::uint8_t, 10> bytes{};
  const auto* end =
      google::protobuf::io::CodedOutputStream::WriteVarint64ToArray(value, bytes.data());
  to.append(bytes.begin(), bytes.begin() + (end - bytes.data()));
}

void append_bytes_head(std::string& to, int field, std::size_t size) {
  append_varint(to, static_cast<std::uint64_t>(field) << 3U | kBytes);
  append_varint(to, size);
}

}  // namespace kvtier::services
