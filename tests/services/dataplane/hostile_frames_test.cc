#include "services/client/data_socket.h"
#include "tests/services/dataplane/killed_client.h"
#include "tests/services/dataplane/plane_fixture.h"
#include "tests/support/memory.h"
#include "tests/support/unix_socket.h"

#include <gmock/gmock.h>

#include <deque>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;

/// Bytes on a socket, with no regard for what they should be.
class RawSocket {
 public:
  explicit RawSocket(const std::string& endpoint)
      : socket_(kvtier::testing::connect_unix(endpoint.substr(std::string_view("unix:").size()))) {}

  bool write(std::span<const std::byte> bytes) {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  void write_frame(FrameType type, std::uint32_t flags, std::span<const std::byte> control,
                   std::uint64_t claimed_payload = 0) {
    const HeaderBytes header = encode_header(make_header(type, flags, 1, control, claimed_payload));
    (void)write(header);
    (void)write(control);
  }
  /// Whether the server has ended the connection, or sent something.
  [[nodiscard]] bool readable() const {
    pollfd waiting{socket_.get(), POLLIN, 0};
    return ::poll(&waiting, 1, 0) == 1;
  }
  /// With descriptors of /dev/null beside one byte.
  void write_descriptors(std::size_t count) {
    const std::vector<int> descriptors(count, null_.get());
    std::byte byte{};
    iovec piece{&byte, 1};
    std::vector<char> control(CMSG_SPACE(count * sizeof(int)));
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(count * sizeof(int));
    std::memcpy(CMSG_DATA(part), descriptors.data(), count * sizeof(int));
    EXPECT_EQ(::sendmsg(socket_.get(), &message, MSG_NOSIGNAL), 1);
  }
  /// Everything until the end of the connection.
  std::string read_to_end() { return kvtier::testing::read_to_end(socket_.get()); }
  /// The message of the kGoAway that ends the connection.
  std::string last_words() {
    const std::string all = read_to_end();
    std::span<const std::byte> rest = std::as_bytes(std::span(all));
    while (rest.size() >= kFrameHeaderBytes) {
      const FrameHeader header = decode_header(rest.first<kFrameHeaderBytes>());
      rest = rest.subspan(kFrameHeaderBytes);
      if (header.type == FrameType::kGoAway) {
        v1::ItemStatus status;
        EXPECT_TRUE(status.ParseFromArray(rest.data(), static_cast<int>(header.control_bytes)));
        return status.reason() + ": " + status.message();
      }
      rest = rest.subspan(header.body_bytes);
    }
    return "nothing";
  }

 private:
  Descriptor socket_;
  Descriptor null_{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
};

class HostileFrames : public PlaneTest {
 protected:
  void SetUp() override {
    PlaneTest::SetUp();
    start_with_times(kBusy, kBusy);
  }
  /// Starts the plane, anew where there is one, with these times for a token and for a frame.
  void start_with_times(std::chrono::milliseconds token, std::chrono::milliseconds frame) {
    plane_.reset();
    attach_time_ = token;
    DataPlaneOptions options;
    options.limits.frame_time = frame;
    start(small_options(), options);
  }
  static constexpr std::chrono::minutes kBusy{5};  ///< Does not pass on a busy machine.
  [[nodiscard]] std::string endpoint() const { return plane_->endpoints()[0].text(); }
  /// An attached socket.
  RawSocket attached() {
    RawSocket raw(endpoint());
    const std::string once = token();
    raw.write_frame(FrameType::kAttach, 0, std::as_bytes(std::span(once)));
    return raw;
  }
  void expect_still_serving() {
    EXPECT_TRUE(all_is_free());
    (void)attach();
  }
};

TEST_F(HostileFrames, EndTheConnectionWithAReason) {
  const auto words_after = [&](auto write) {
    RawSocket raw = attached();
    write(raw);
    return raw.last_words();
  };
  HeaderBytes bad = encode_header({.type = FrameType::kCall});
  bad[0] ^= std::byte{1};
  EXPECT_THAT(words_after([&](RawSocket& raw) { raw.write(bad); }), HasSubstr("magic"));
  bad[0] ^= std::byte{1};
  bad[39] ^= std::byte{1};
  EXPECT_THAT(words_after([&](RawSocket& raw) { raw.write(bad); }), HasSubstr("header_crc"));
  FrameHeader header{
      .type = FrameType::kCall, .control_bytes = 4, .body_bytes = 4, .control_crc = 1};
  const HeaderBytes wrong_crc = encode_header(header);
  EXPECT_THAT(words_after([&](RawSocket& raw) {
                raw.write(wrong_crc);
                raw.write(Bytes(4));
              }),
              HasSubstr("control_crc"));
  header.body_bytes = std::uint64_t{1} << 63U;
  EXPECT_THAT(words_after([&](RawSocket& raw) { raw.write(encode_header(header)); }),
              HasSubstr("payload"));
  EXPECT_THAT(words_after([&](RawSocket& raw) { raw.write_frame(FrameType::kCall, 0, Bytes(7)); }),
              HasSubstr("method: expected"));
  EXPECT_THAT(words_after([&](RawSocket& raw) {
                raw.write_frame(FrameType::kReadPages, 0, Bytes(4, std::byte{0xFF}));
              }),
              HasSubstr("count"));
  for (const FrameType type : {FrameType::kAttach, FrameType::kAttached, FrameType::kReply,
                               FrameType::kPages, FrameType::kWritten, FrameType::kGoAway}) {
    EXPECT_THAT(words_after([&](RawSocket& raw) { raw.write_frame(type, 0, {}); }),
                HasSubstr("INVALID_ARGUMENT"));
  }
  EXPECT_GE(plane_->counters().broken_frames, 12U);
  expect_still_serving();
}

TEST_F(HostileFrames, AreRefusedBeforeTheToken) {
  for (const FrameType type : {FrameType::kCall, FrameType::kReadPages, FrameType::kWritePages}) {
    RawSocket raw(endpoint());
    raw.write_frame(type, 0, Bytes(4));
    EXPECT_THAT(raw.last_words(), HasSubstr("expected a token first"));
  }
  RawSocket raw(endpoint());
  raw.write_frame(FrameType::kAttach, 0, Bytes(33));
  EXPECT_THAT(raw.last_words(), HasSubstr("expected a token first"));
  expect_still_serving();
}

TEST_F(HostileFrames, ThatNeverComeAreNotWaitedFor) {
  constexpr std::chrono::milliseconds kShort{100};
  start_with_times(kShort, kBusy);
  RawSocket silent(endpoint());
  EXPECT_THAT(silent.last_words(), HasSubstr("STREAM_IDLE"));
  EXPECT_EQ(plane_->counters().timeouts, 1U);
  start_with_times(kBusy, kShort);
  RawSocket amid = attached();
  amid.write(encode_header({.type = FrameType::kCall, .control_bytes = 9, .body_bytes = 9}));
  EXPECT_THAT(amid.last_words(), HasSubstr("STREAM_IDLE"));
  RawSocket within_header = attached();
  within_header.write(Bytes(1, std::byte{0x4B}));
  EXPECT_THAT(within_header.last_words(), HasSubstr("STREAM_IDLE"));
  EXPECT_EQ(plane_->counters().timeouts, 2U);
  expect_still_serving();
}

TEST_F(HostileFrames, WithDescriptorsEndTheConnection) {
  const auto no_connections = [&] { return plane_->counters().connections == 0; };
  (void)attach();  // the first takes what all share
  ASSERT_TRUE(eventually(no_connections));
  const std::size_t before = open_descriptors();
  for (const std::size_t count : {1U, 2U, 16U, 100U}) {
    RawSocket raw = attached();
    raw.write_descriptors(count);
    (void)raw.read_to_end();
  }
  EXPECT_TRUE(eventually(no_connections));
  EXPECT_TRUE(eventually([&] { return open_descriptors() == before; }));
}

TEST_F(HostileFrames, OfClientsKilledAmidThemLeaveNothing) {
  (void)attach();  // the first takes what all share
  ASSERT_TRUE(all_is_free());
  const std::size_t before = open_descriptors();
  for (int i = 0; i < 10; ++i) {
    // A third of a header, or a header and half of its control.
    const std::size_t bytes = i % 2 == 0 ? 13 : kFrameHeaderBytes + 50;
    ASSERT_NO_FATAL_FAILURE(run_and_kill_client(endpoint(), token(), {std::to_string(bytes)}));
  }
  EXPECT_TRUE(all_is_free());
  EXPECT_TRUE(eventually([&] { return open_descriptors() == before; }));
}

TEST_F(HostileFrames, OfRandomBytesEndNothingElse) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    RawSocket raw = attached();
    Bytes control(random() % 200);
    for (std::byte& byte : control) byte = std::byte(random() % 3 == 0 ? random() & 255U : 0U);
    raw.write_frame(static_cast<FrameType>(1 + random() % 9),
                    static_cast<std::uint32_t>(random() % 8), control);
    if (random() % 2 == 0) (void)raw.write(Bytes(kFrameHeaderBytes, std::byte(round)));
  }
  expect_still_serving();
}

TEST_F(HostileFrames, StopBeingReadWhileTheirRepliesAreNot) {
  const auto lease = open_lease();
  std::vector<PageDescriptor> descriptors;
  std::vector<std::vector<std::byte>> expected;
  for (std::uint64_t i = 0; i < 24; ++i) {
    descriptors.push_back(descriptor_of(store_page(*lease, i)));
    expected.push_back(random_bytes(kPageBytes, i));
  }
  const auto channel = attach();

  // 24 MiB of replies, of which none is read.
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 16; ++i) {
    ids.push_back(channel->send(FrameType::kReadPages, kInline, encode(descriptors)));
  }
  ASSERT_TRUE(eventually([&] { return plane_->counters().pauses > 0; }));
  const ConnectionLimits limits;
  EXPECT_LE(plane_->counters().queued_bytes,
            limits.max_queued_bytes + static_cast<std::int64_t>(kMaxPayloadBytes));
  EXPECT_LE(pages_->stats().pinned_pages, descriptors.size());
  const auto other = attach();  // is served meanwhile
  EXPECT_EQ(reason_of([&] {
              (void)other->reply_to(other->send(FrameType::kReadPages, 0, encode(descriptors)));
            }),
            "OK");

  // Once they are read, all come, in order.
  for (const std::uint64_t id : ids) {
    std::size_t seen = 0;
    bool more = true;
    while (more) {
      const DataChannel::Frame frame = channel->reply_to(id);
      for (const PageOutcome& page : decode_outcomes(frame.control())) {
        const auto bytes = frame.payload().subspan(page.offset, page.bytes);
        ASSERT_EQ(bytes.size(), expected.at(seen).size());
        ASSERT_EQ(std::memcmp(bytes.data(), expected[seen++].data(), bytes.size()), 0);
      }
      more = (frame.header.flags & kMore) != 0;
    }
    ASSERT_EQ(seen, descriptors.size());
  }
  // A page is let go after its last byte has left.
  EXPECT_TRUE(eventually([&] { return pages_->stats().pinned_pages == 0; }));
}

TEST_F(HostileFrames, OfAClientThatReadsTooSlowlyEndItsConnectionAlone) {
  const auto lease = open_lease();
  std::vector<PageDescriptor> descriptors;
  for (std::uint64_t i = 0; i < 24; ++i) {
    descriptors.push_back(descriptor_of(store_page(*lease, i)));
  }
  const auto slow = attach();
  const auto other = attach();
  const auto ask = [&](DataChannel& channel) {
    return channel.send(FrameType::kReadPages, kInline, encode(descriptors));
  };
  for (int i = 0; i < 16; ++i) (void)ask(*slow);  // 24 MiB, of which none is read
  ASSERT_TRUE(eventually([&] { return plane_->counters().pauses > 0; }));

  const TimePoint now = std::chrono::steady_clock::now();
  for (int window = 1; window <= 2; ++window) {  // in the first, sockets took some
    EXPECT_EQ(reason_of([&] { (void)other->reply_to(ask(*other)); }), "OK");
    plane_->sweep(now + window * std::chrono::seconds(31));
  }

  EXPECT_TRUE(eventually([&] { return plane_->counters().connections == 1; }));
  EXPECT_EQ(plane_->counters().slow, 1U);
  EXPECT_TRUE(eventually([&] { return plane_->counters().queued_bytes == 0; }));
  // A page is let go after its last byte has left.
  EXPECT_TRUE(eventually([&] { return pages_->stats().pinned_pages == 0; }));
  EXPECT_EQ(reason_of([&] { (void)other->reply_to(ask(*other)); }), "OK");
}

using kvtier::testing::reset_peak;
using kvtier::testing::status_kib;

/// A batch of `items` whose tensors are each of `bytes` at the begin of what there is.
CallBody overlapping_batch(int items, std::uint64_t bytes) {
  v1::BatchAttendRequest request;
  CallBody body;
  body.method = Method::kBatchAttend;
  for (int i = 0; i < items; ++i) {
    request.add_items();
    body.tensors.push_back({0, bytes});
  }
  body.message = request.SerializeAsString();
  return body;
}

TEST_F(HostileFrames, WhoseTensorsOverlapTakeNoMemory) {
  const auto channel = attach();
  const std::uint64_t bytes = channel->staging().size();
  ASSERT_TRUE(reset_peak());
  const std::int64_t before = status_kib("RssAnon");
  for (const std::uint32_t flags : {0U, kInline}) {
    Bytes inline_bytes(flags == 0 ? 0 : bytes);
    const std::vector<iovec> payload{{inline_bytes.data(), inline_bytes.size()}};
    const Bytes control = encode(overlapping_batch(1000, bytes));
    EXPECT_EQ(reason_of([&] {
                (void)channel->reply_to(channel->send(FrameType::kCall, flags, control, payload));
              }),
              "INVALID_ARGUMENT");
  }
  // 1,000 MiB each, were they copied.
  EXPECT_LT(status_kib("VmHWM") - before, 128 << 10);
  EXPECT_EQ(reason_of([&] {
              (void)channel->reply_to(channel->send(FrameType::kReadPages, 0, Bytes(4)));
            }),
            "OK");
}

TEST_F(HostileFrames, OfTooManyItemsAreRefusedBeforeTheyAreParsed) {
  const auto channel = attach();
  CallBody body;
  body.method = Method::kBatchAttend;
  for (int i = 0; i < 500'000; ++i) body.message += std::string("\x0A\0", 2);  // an empty item
  ASSERT_TRUE(reset_peak());
  const std::int64_t before = status_kib("RssAnon");
  EXPECT_EQ(reason_of([&] {
              (void)channel->reply_to(channel->send(FrameType::kCall, kInline, encode(body)));
            }),
            "INVALID_ARGUMENT");
  EXPECT_LT(status_kib("VmHWM") - before, 64 << 10);
}

TEST_F(HostileFrames, TakeMemoryAsTheirBytesCome) {
  constexpr std::size_t kConnections = 64;
  std::deque<RawSocket> sockets;
  for (std::size_t i = 0; i < kConnections; ++i) sockets.push_back(attached());
  ASSERT_TRUE(eventually([&] { return plane_->counters().attached == kConnections; }));
  ASSERT_TRUE(reset_peak());
  const std::int64_t before = status_kib("RssAnon");
  for (RawSocket& socket : sockets) {
    socket.write_frame(FrameType::kCall, kInline, Bytes(1), kMaxPayloadBytes);
  }
  const std::uint64_t bytes = kConnections * (2 * kFrameHeaderBytes + kAttachTokenBytes + 1);
  ASSERT_TRUE(eventually([&] { return plane_->counters().bytes_read == bytes; }));
  // 513 MiB, were it taken for what the headers say.
  EXPECT_LT(status_kib("VmHWM") - before, 64 << 10);
  EXPECT_LE(core_->inflight_bytes(), static_cast<std::int64_t>(kConnections * (64 << 10)));
  sockets.clear();
  expect_still_serving();
}

TEST_F(HostileFrames, WithoutATokenMakeRoomForThoseThatCome) {
  plane_.reset();
  DataPlaneOptions options;
  options.limits.max_unattached = 4;
  start(small_options(), options);
  const auto attached_before = attach();
  std::deque<RawSocket> silent;
  for (int i = 0; i < 10; ++i) silent.emplace_back(endpoint());
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(silent[i].read_to_end().size(), 0U) << i;
  for (std::size_t i = 6; i < 10; ++i) EXPECT_FALSE(silent[i].readable()) << i;
  EXPECT_EQ(
      reason_of([&] {
        (void)attached_before->reply_to(attached_before->send(FrameType::kReadPages, 0, Bytes(4)));
      }),
      "OK");
  (void)attach();
}

TEST_F(HostileFrames, ThatComeWhileRepliesPassTheLimitAreRefusedAndTheConnectionGoesOn) {
  const auto channel = attach();
  std::shared_ptr<InflightReservation> replies = core_->admit(tenant(), 0);
  replies->cover(small_options().max_inflight_bytes + 1);  // as replies do, which are there already
  const auto reason = [&] {
    return reason_of(
        [&] { (void)channel->reply_to(channel->send(FrameType::kReadPages, 0, Bytes(4))); });
  };
  EXPECT_EQ(reason(), "OVERLOADED");
  replies.reset();
  EXPECT_EQ(reason(), "OK");
  EXPECT_EQ(plane_->counters().broken_frames, 0U);
}

TEST_F(HostileFrames, ThatFindNoRoomAreRefusedAndTheConnectionGoesOn) {
  plane_.reset();
  ServiceCoreOptions core = small_options();
  core.max_inflight_bytes = 1 << 20;
  start(core, {});
  const auto channel = attach();
  Bytes bytes(4 << 20);
  const std::vector<iovec> payload{{bytes.data(), bytes.size()}};
  const Bytes control = encode(overlapping_batch(1, 8));
  for (const FrameType type : {FrameType::kCall, FrameType::kReadPages, FrameType::kWritePages}) {
    EXPECT_EQ(
        reason_of([&] { (void)channel->reply_to(channel->send(type, kInline, control, payload)); }),
        "OVERLOADED");
  }
  v1::GetStatsResponse stats;
  core_->get_stats(stats);
  EXPECT_EQ(stats.service().rejected(), 3U);
  EXPECT_EQ(reason_of([&] {
              (void)channel->reply_to(channel->send(FrameType::kReadPages, 0, Bytes(4)));
            }),
            "OK");
  EXPECT_TRUE(eventually([&] { return core_->inflight_bytes() == 0; }));
}

}  // namespace
}  // namespace kvtier::services::testing
