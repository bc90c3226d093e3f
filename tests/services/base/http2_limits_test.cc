#include "services/base/http2_limits.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

namespace kvtier::services {
namespace {

using std::chrono::milliseconds;
using Verdict = Http2Limits::Verdict;

constexpr char kData = 0, kHeaders = 1, kReset = 3, kContinuation = 9;
constexpr char kEndHeaders = 4;
const std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string frame(char type, char flags, std::uint32_t stream, std::size_t size) {
  std::string bytes;
  for (int shift = 16; shift >= 0; shift -= 8) bytes += static_cast<char>(size >> shift);
  bytes += {type, flags};
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(stream >> shift);
  return bytes + std::string(size, '\x09');  // looks like headers of frames itself
}

/// A connection that has said its preface, alone or beside others.
class Connection {
 public:
  explicit Connection(Http2Waste* waste = nullptr) : limits_(waste == nullptr ? own_ : *waste) {
    (void)read(kPreface);
  }

  Verdict read(const std::string& text) {
    return limits_.read(std::as_bytes(std::span(text)), now_);
  }
  void pass(milliseconds time) { now_ += time; }
  void end() { limits_.end(now_); }
  [[nodiscard]] Http2Limits::TimePoint now() const { return now_; }

 private:
  Http2Waste own_;
  Http2Limits limits_;
  Http2Limits::TimePoint now_{std::chrono::hours(1)};
};

TEST(Http2Limits, BoundTheBytesAndFramesOfABlock) {
  const std::size_t most = Http2Limits::kMaxBlockBytes;
  const std::string first = frame(kHeaders, 0, 1, most / 2);
  Connection fits, large, many, anew;
  EXPECT_EQ(fits.read(first + frame(kContinuation, kEndHeaders, 1, most / 2)), Verdict::kGoOn);
  EXPECT_EQ(large.read(first), Verdict::kGoOn);
  EXPECT_EQ(large.read(frame(kContinuation, kEndHeaders, 1, most / 2 + 1)), Verdict::kHeaders);
  EXPECT_EQ(large.read(""), Verdict::kHeaders) << "it stays so";

  EXPECT_EQ(many.read(frame(kHeaders, 0, 1, 0)), Verdict::kGoOn);
  for (int i = 2; i < Http2Limits::kMaxBlockFrames; ++i) {
    EXPECT_EQ(many.read(frame(kContinuation, 0, 1, 0)), Verdict::kGoOn);
  }
  EXPECT_EQ(many.read(frame(kContinuation, 0, 1, 0)), Verdict::kHeaders);

  for (std::uint32_t stream = 1; stream < 100; stream += 2) {
    anew.pass(milliseconds(100));
    EXPECT_EQ(anew.read(frame(kHeaders, kEndHeaders, stream, most)), Verdict::kGoOn);
    EXPECT_EQ(anew.read(frame(kData, 1, stream, 1 << 14)), Verdict::kGoOn);
  }
}

TEST(Http2Limits, FollowFramesInPiecesOfAnySize) {
  std::string bytes = frame(kData, 0, 1, 1000) + frame(kHeaders, 0, 3, 10) +
                      frame(kContinuation, kEndHeaders, 3, 10);
  const std::size_t calm = bytes.size();
  bytes += frame(kHeaders, kEndHeaders, 5, Http2Limits::kMaxBlockBytes + 1);
  for (const std::size_t piece : {1U, 2U, 3U, 7U, 8U, 9U, 10U, 100U, 5000U}) {
    SCOPED_TRACE(piece);
    Connection connection;
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      const std::string part = bytes.substr(at, piece);
      const bool seen = at + part.size() >= calm + 9;  // the header of the last frame
      EXPECT_EQ(connection.read(part), seen ? Verdict::kHeaders : Verdict::kGoOn);
    }
  }
}

std::string opened_and_reset(std::uint32_t stream) {
  return frame(kHeaders, kEndHeaders, stream, 20) + frame(kReset, 0, stream, 4);
}

TEST(Http2Limits, CountLargeBlocksAsResets) {
  constexpr std::size_t kStreams = 4;
  Connection connection;
  std::uint32_t stream = 1;
  for (std::size_t i = 0; i < Http2Limits::kMaxResets / kStreams; ++i, stream += 2) {
    const std::size_t bytes = kStreams * Http2Limits::kBytesPerStream;
    ASSERT_EQ(connection.read(frame(kHeaders, kEndHeaders, stream, bytes)), Verdict::kGoOn);
  }
  EXPECT_EQ(connection.read(frame(kHeaders, kEndHeaders, stream, Http2Limits::kBytesPerStream - 1)),
            Verdict::kGoOn);
  EXPECT_EQ(connection.read(frame(kHeaders, kEndHeaders, stream, Http2Limits::kBytesPerStream)),
            Verdict::kHeaders);
}

// A client that comes again and again, or many clients.
TEST(Http2Limits, AreThoseOfAllConnectionsTogether) {
  Http2Waste waste;
  double streams = 0;
  while (!waste.too_much(Connection().now())) {
    ASSERT_LE(streams, Http2Waste::kMost);
    Connection connection(&waste);
    for (std::uint32_t stream = 1; stream < 200; stream += 2) {
      ASSERT_EQ(connection.read(frame(kHeaders, kEndHeaders, stream, 20)), Verdict::kGoOn);
    }
    connection.end();
    streams += 100;
  }
  Connection hasty(&waste), calm(&waste);
  std::uint32_t stream = 1;
  for (int i = 0; i < Http2Limits::kMaxResetsAmidWaste; ++i, stream += 2) {
    ASSERT_EQ(hasty.read(opened_and_reset(stream)), Verdict::kGoOn);
  }
  EXPECT_EQ(hasty.read(opened_and_reset(stream)), Verdict::kResets);
  EXPECT_EQ(calm.read(opened_and_reset(1) + frame(kHeaders, kEndHeaders, 3, 20)), Verdict::kGoOn);
  EXPECT_FALSE(waste.too_much(calm.now() + std::chrono::seconds(1))) << "it is done by then";
}

TEST(Http2Limits, LetAClientEndAfterManyCalls) {
  Http2Waste waste;
  Connection connection(&waste);
  for (std::uint32_t stream = 1; stream < 20'000; stream += 2) {
    ASSERT_EQ(connection.read(frame(kHeaders, kEndHeaders, stream, 20)), Verdict::kGoOn);
  }
  connection.end();
  EXPECT_FALSE(waste.too_much(connection.now())) << "all but the last 128 have been answered";
}

TEST(Http2Limits, CountResetsOfYoungStreams) {
  Connection hasty, steady, patient;
  std::uint32_t stream = 1;
  for (int i = 0; i < Http2Limits::kMaxResets; ++i, stream += 2) {
    ASSERT_EQ(hasty.read(opened_and_reset(stream)), Verdict::kGoOn);
  }
  EXPECT_EQ(hasty.read(opened_and_reset(stream)), Verdict::kResets);

  stream = 1;
  for (int i = 0; i < 20 * Http2Limits::kMaxResets; ++i, stream += 2) {
    steady.pass(milliseconds(4));
    ASSERT_EQ(steady.read(opened_and_reset(stream)), Verdict::kGoOn) << "250 a second";
  }

  for (int round = 0; round < 20; ++round) {
    const std::uint32_t begin = 1 + 2000 * static_cast<std::uint32_t>(round);
    for (std::uint32_t i = 0; i < 1000; ++i) {
      ASSERT_EQ(patient.read(frame(kHeaders, kEndHeaders, begin + 2 * i, 20)), Verdict::kGoOn);
    }
    for (int i = 0; i < 3; ++i) {
      patient.pass(Http2Limits::kYoung);
      ASSERT_EQ(patient.read(frame(kData, 0, begin, 1)), Verdict::kGoOn);
    }
    for (std::uint32_t i = 0; i < 1000; ++i) {
      ASSERT_EQ(patient.read(frame(kReset, 0, begin + 2 * i, 4)), Verdict::kGoOn)
          << "streams whose deadline has passed";
    }
  }
}

TEST(Http2Limits, AreUnharmedByLengthsAndStreamsOfAnySize) {
  std::string bytes;
  std::uint32_t state = 1;
  for (int i = 0; i < 1 << 20; ++i) {
    state = state * 1664525U + 1013904223U;
    bytes += static_cast<char>(state >> 24);
  }
  Connection connection;
  (void)connection.read(bytes);
}

}  // namespace
}  // namespace kvtier::services
