#include "services/wire/frame.h"

#include "kvtier/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <random>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

/// CRC-32C bit by bit, as its definition has it.
std::uint32_t crc_by_bits(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const std::byte byte : bytes) {
    crc ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1U ^ ((crc & 1U) != 0 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

/// Makes the checksum of changed header bytes right again.
void sign(HeaderBytes& bytes) {
  const std::uint32_t crc = crc_by_bits(std::span(bytes).first(kFrameHeaderBytes - 4));
  std::memcpy(bytes.data() + kFrameHeaderBytes - 4, &crc, 4);
}

FrameHeader some_header() {
  return {.type = FrameType::kCall,
          .flags = kInline,
          .control_bytes = 100,
          .request_id = 0x0123456789ABCDEFU,
          .body_bytes = 300,
          .control_crc = 7};
}

std::string error_of_changed(std::size_t at, std::uint64_t value, std::size_t size) {
  HeaderBytes bytes = encode_header(some_header());
  std::memcpy(bytes.data() + at, &value, size);
  sign(bytes);
  return error_of([&] { (void)decode_header(bytes); });
}

TEST(FrameHeader, HasTheBytesOfItsDescription) {
  const HeaderBytes bytes = encode_header(some_header());

  EXPECT_EQ(std::memcmp(bytes.data(), "KVTF\1\0\3\0\1\0\0\0\x64\0\0\0", 16), 0);
  EXPECT_EQ(std::to_integer<int>(bytes[16]), 0xEF);
  EXPECT_EQ(std::to_integer<int>(bytes[24]), 300 & 255);
  std::uint32_t crc = 0;
  std::memcpy(&crc, bytes.data() + 36, 4);
  EXPECT_EQ(crc, crc_by_bits(std::span(bytes).first(36)));
  EXPECT_EQ(decode_header(bytes), some_header());
}

TEST(FrameHeader, IsRefusedWithAnyBitFlipped) {
  for (std::size_t bit = 0; bit < 8 * kFrameHeaderBytes; ++bit) {
    HeaderBytes bytes = encode_header(some_header());
    bytes[bit / 8] ^= std::byte(1U << bit % 8);
    EXPECT_THAT(error_of([&] { (void)decode_header(bytes); }), HasSubstr("expected")) << bit;
  }
}

TEST(FrameHeader, SaysWhatIsWrong) {
  EXPECT_THAT(error_of_changed(0, 1, 4), HasSubstr("magic"));
  EXPECT_THAT(error_of_changed(4, 2, 2), HasSubstr("version: expected 1, found 2"));
  EXPECT_THAT(error_of_changed(6, 0, 2), HasSubstr("type"));
  EXPECT_THAT(error_of_changed(6, 10, 2), HasSubstr("type"));
  EXPECT_THAT(error_of_changed(8, 1U << 31U, 4), HasSubstr("flags"));
}

TEST(FrameHeader, BoundsLengthsBeforeAnythingIsAllocated) {
  constexpr std::uint64_t kHuge = std::uint64_t{1} << 63U;
  EXPECT_THAT(error_of_changed(24, kHuge, 8), HasSubstr("payload"));
  EXPECT_THAT(error_of_changed(24, std::numeric_limits<std::uint64_t>::max(), 8),
              HasSubstr("payload"));
  EXPECT_THAT(error_of_changed(24, 99, 8), HasSubstr("body_bytes"));
  EXPECT_THAT(error_of_changed(12, kMaxControlBytes + 1, 4), HasSubstr("control_bytes"));
  EXPECT_THAT(error_of_changed(24, 100 + kMaxPayloadBytes + 1, 8), HasSubstr("payload"));
  EXPECT_THAT(error_of_changed(24, 100 + kMaxPayloadBytes, 8), HasSubstr("no error"));
  EXPECT_THAT(error_of_changed(8, 0, 4), HasSubstr("none without the flag"));
}

TEST(Frame, ChecksTheControl) {
  Bytes control(33, std::byte{5});
  const FrameHeader header = make_header(FrameType::kReply, 0, 1, control, 0);
  EXPECT_EQ(header.control_crc, crc_by_bits(control));
  check_control(header, control);
  for (std::size_t bit = 0; bit < 8 * control.size(); ++bit) {
    Bytes wrong = control;
    wrong[bit / 8] ^= std::byte(1U << bit % 8);
    EXPECT_THAT(error_of([&] { check_control(header, wrong); }), HasSubstr("control_crc"));
  }
}

CallBody some_call(std::mt19937_64& random) {
  CallBody call;
  call.method = static_cast<Method>(1 + random() % 9);
  call.timeout_ms = static_cast<std::uint32_t>(random());
  call.output = {random(), random()};
  call.tensors.resize(random() % 5);
  for (Extent& extent : call.tensors) extent = {random(), random()};
  call.message.assign(random() % 300, static_cast<char>(random()));
  return call;
}

std::vector<PageDescriptor> some_descriptors(std::mt19937_64& random) {
  std::vector<PageDescriptor> descriptors(random() % 70);
  for (PageDescriptor& descriptor : descriptors) {
    descriptor.handle.fill(static_cast<char>(random()));
    descriptor.offset = random();
    descriptor.bytes = random();
    descriptor.destination = random();
    descriptor.crc = static_cast<std::uint32_t>(random());
  }
  return descriptors;
}

std::vector<PageOutcome> some_outcomes(std::mt19937_64& random) {
  std::vector<PageOutcome> outcomes(random() % 70);
  for (PageOutcome& outcome : outcomes) {
    outcome.code = static_cast<std::uint32_t>(random());
    outcome.crc = static_cast<std::uint32_t>(random());
    outcome.slot = static_cast<std::uint32_t>(random());
    outcome.generation = static_cast<std::uint32_t>(random());
    outcome.offset = random();
    outcome.bytes = random();
  }
  return outcomes;
}

/// What is encoded decodes to the same, and neither a part of it nor more than it decodes at all.
template <typename Body, typename Decode>
void check_body(const Body& body, Decode decode) {
  Bytes bytes;
  if constexpr (requires { encode(body); }) {
    bytes = encode(body);
  } else {
    bytes = encode(std::span(body));
  }
  EXPECT_EQ(decode(bytes), body);
  for (std::size_t size = 0; size < bytes.size(); size += 1 + size / 8) {
    EXPECT_THAT(error_of([&] { (void)decode(std::span(bytes).first(size)); }),
                HasSubstr("expected"))
        << size << " of " << bytes.size();
  }
  bytes.push_back(std::byte{0});
  EXPECT_THAT(error_of([&] { (void)decode(bytes); }), HasSubstr("expected"));
}

TEST(FrameBodies, RefuseMethodsThatThereAreNot) {
  for (const int method : {0, 11, 65535}) {
    Bytes bytes = encode(CallBody{});
    bytes[0] = static_cast<std::byte>(method);
    bytes[1] = static_cast<std::byte>(method >> 8);
    EXPECT_THAT(error_of([&] { (void)decode_call(bytes); }),
                HasSubstr("frame.method: expected 1 to 10, found " + std::to_string(method)));
  }
}

TEST(FrameBodies, DecodeToWhatWasEncoded) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    check_body(some_call(random), decode_call);
    check_body(ReplyBody{some_call(random).tensors, some_call(random).message}, decode_reply);
    check_body(some_descriptors(random), decode_descriptors);
    check_body(WriteBody{"leases/x", some_descriptors(random)}, decode_write);
    check_body(some_outcomes(random), decode_outcomes);
    check_body(AttachedBody{1, {{RegionKind::kStaging, random()}, {RegionKind::kReadArena, 9}}},
               decode_attached);
  }
}

TEST(FrameBodies, BoundCountsByTheBytesAtHand) {
  for (const std::uint32_t count : {5U, 4096U, 4097U, 0xFFFFFFFFU}) {
    Bytes bytes(4);
    std::memcpy(bytes.data(), &count, 4);
    EXPECT_THAT(error_of([&] { (void)decode_descriptors(bytes); }), HasSubstr("count"));
    EXPECT_THAT(error_of([&] { (void)decode_outcomes(bytes); }), HasSubstr("count"));
    EXPECT_THAT(error_of([&] { (void)decode_reply(bytes); }), HasSubstr("count"));
  }
}

TEST(FrameBodies, SurviveRandomBytes) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes(random() % 120);
    for (std::byte& byte : bytes) byte = std::byte(random() % 4 == 0 ? random() & 255U : 0U);
    const auto survives = [&](auto decode) {
      try {
        EXPECT_EQ(encode(decode(bytes)), bytes);
      } catch (const Error&) {
      }
    };
    survives(decode_call);
    survives(decode_reply);
    survives(decode_descriptors);
    survives(decode_write);
    survives(decode_outcomes);
    survives(decode_attached);
  }
}

TEST(Extents, LieWithinWithoutOverflow) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  EXPECT_TRUE(lies_within({0, 0}, 0));
  EXPECT_TRUE(lies_within({8, 8}, 16));
  EXPECT_FALSE(lies_within({8, 9}, 16));
  EXPECT_FALSE(lies_within({17, 0}, 16));
  EXPECT_FALSE(lies_within({kMax - 7, 8}, 16));
  EXPECT_FALSE(lies_within({8, kMax - 7}, 16));
  EXPECT_FALSE(lies_within({kMax, kMax}, kMax - 1));
}

}  // namespace
}  // namespace kvtier::services
