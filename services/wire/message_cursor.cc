#include "services/wire/message_cursor.h"

#include "kvtier/error.h"

#include <algorithm>

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

MessageCursor::MessageCursor(const ByteRuns& runs) : runs_(runs) {
  for (const auto& run : runs_) left_ += run.size();
}

std::byte MessageCursor::byte() {
  if (left_ == 0) bad("more bytes", "the end");
  while (offset_ == runs_[run_].size()) {
    ++run_;
    offset_ = 0;
  }
  --left_;
  return runs_[run_][offset_++];
}

std::uint64_t MessageCursor::raw_varint() {
  std::uint64_t value = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    const auto next = std::to_integer<std::uint64_t>(byte());
    value |= (next & 127U) << shift;
    if (next < 128) return value;
  }
  bad("a number of up to 10 bytes", "a longer one");
}

ByteRuns MessageCursor::take(std::uint64_t count) {
  if (count > left_) bad(std::to_string(count) + " more bytes", std::to_string(left_));
  ByteRuns taken;
  left_ -= count;
  while (count > 0) {
    const std::size_t here = std::min<std::size_t>(count, runs_[run_].size() - offset_);
    if (here > 0) taken.push_back(runs_[run_].subspan(offset_, here));
    count -= here;
    offset_ += here;
    if (offset_ == runs_[run_].size() && count > 0) {
      ++run_;
      offset_ = 0;
    }
  }
  return taken;
}

bool MessageCursor::next() {
  if (left_ == 0) return false;
  const std::uint64_t tag = raw_varint();
  if (tag >> 3U == 0 || tag >> 32U != 0) bad("the number of a field", std::to_string(tag >> 3U));
  field_ = static_cast<int>(tag >> 3U);
  wire_type_ = static_cast<unsigned>(tag & 7U);
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
  for (unsigned shift = 0; shift < 32; shift += 8) {
    value |= std::to_integer<std::uint32_t>(byte()) << shift;
  }
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
  for (; value >= 128; value >>= 7U) to += static_cast<char>((value & 127U) | 128U);
  to += static_cast<char>(value);
}

void append_bytes_head(std::string& to, int field, std::size_t size) {
  append_varint(to, static_cast<std::uint64_t>(field) << 3U | kBytes);
  append_varint(to, size);
}

}  // namespace kvtier::services
