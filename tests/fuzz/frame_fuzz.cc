#include "kvtier/error.h"

#include "services/dataplane/frame.h"
#include "tests/fuzz/fuzz.h"

#include <cstdlib>
#include <span>

namespace kvtier::services {
namespace {

/// What decodes must encode to the bytes that it was.
template <typename Decode>
void round_trip(std::span<const std::byte> control, Decode decode) {
  try {
    const auto body = decode(control);
    const Bytes again = encode(body);
    if (!std::equal(again.begin(), again.end(), control.begin(), control.end())) std::abort();
  } catch (const Error&) {
  }
}

}  // namespace
}  // namespace kvtier::services

/// The input is a frame: its header, then a body that every decoder reads.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvtier::services;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  if (bytes.size() >= kFrameHeaderBytes) {
    try {
      const FrameHeader header = decode_header(bytes.first<kFrameHeaderBytes>());
      if (header.control_bytes > kMaxControlBytes || header.payload_bytes() > kMaxPayloadBytes) {
        std::abort();
      }
      check_control(header, bytes.subspan(kFrameHeaderBytes));
    } catch (const kvtier::Error&) {
    }
  }
  const auto control = bytes.size() > kFrameHeaderBytes ? bytes.subspan(kFrameHeaderBytes) : bytes;
  round_trip(control, decode_attached);
  round_trip(control, decode_call);
  round_trip(control, decode_reply);
  round_trip(control, decode_descriptors);
  round_trip(control, decode_write);
  round_trip(control, decode_outcomes);
  return 0;
}
