#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

namespace kvtier::services {

/// Work for nothing that clients have made gRPC begin, in streams: it leaves at `kPerSecond`, which
/// gRPC gets rid of with a tenth of two cores, and is too much for a second at most after the last.
/// For any thread.
class Http2Waste {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  static constexpr double kMost = 1024;
  static constexpr double kPerSecond = 256;

  void add(double streams, TimePoint now);
  /// Returns whether there is more than `kMost`.
  [[nodiscard]] bool too_much(TimePoint now);

 private:
  void go_on_to(TimePoint now);

  std::mutex mutex_;
  double streams_ = 0;
  TimePoint at_{};
};

/// Follows the frames of HTTP/2 (RFC 9113, section 4.1) that a client sends on one connection, and
/// says when it makes gRPC 1.51 take memory for nothing: a block of headers costs 25 times its
/// bytes, and a stream that is reset as soon as it is open some 70 KB, until a thread gets to it.
/// Not for several threads at once.
class Http2Limits {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  enum class Verdict : std::uint8_t { kGoOn, kHeaders, kResets };

  /// Most bytes, and frames, of one block of headers. gRPC refuses metadata of more than 8 KiB by
  /// itself, with an error of the call.
  static constexpr std::size_t kMaxBlockBytes = std::size_t{32} << 10;
  static constexpr int kMaxBlockFrames = 8;
  /// Bytes of a block that cost as much as a stream that is reset.
  static constexpr std::size_t kBytesPerStream = std::size_t{2} << 10;
  /// A reset counts where its stream is younger than twice this, and may.
  static constexpr std::chrono::milliseconds kYoung{50};
  /// As `kYoung`, of streams that a connection leaves open when it ends.
  static constexpr std::chrono::milliseconds kFresh{5};
  /// Such resets of the connection at once, and per second; and while there is too much waste.
  static constexpr int kMaxResets = 256;
  static constexpr int kMaxResetsAmidWaste = 16;
  /// Streams that gRPC lets be open at once on a connection.
  static constexpr int kMaxStreams = 128;

  /// `waste`, of all connections, must outlive this.
  explicit Http2Limits(Http2Waste& waste) : waste_(&waste) {}

  /// Reads what has come on the connection next. Anything but `kGoOn` stays the answer: the
  /// connection is to be ended.
  [[nodiscard]] Verdict read(std::span<const std::byte> bytes, TimePoint now);
  /// The connection has ended: those of its fresh streams that may be open were for nothing.
  void end(TimePoint now);

 private:
  static constexpr std::size_t kPrefaceBytes = 24;
  static constexpr std::size_t kHeaderBytes = 9;

  [[nodiscard]] Verdict begin_frame();
  [[nodiscard]] Verdict add_to_block(std::size_t bytes, bool ends);
  [[nodiscard]] Verdict count(double streams, Verdict verdict);
  /// Lets streams become old, and forgets resets.
  void go_on_to(TimePoint now);

  Http2Waste* waste_;
  std::size_t skip_ = kPrefaceBytes;  ///< Bytes to come that are in no header of a frame.
  std::array<std::uint8_t, kHeaderBytes> header_{};
  std::size_t header_size_ = 0;
  std::size_t block_bytes_ = 0;
  int block_frames_ = 0;
  /// Distinguishes streams that have been open for some time from others.
  struct Ages {
    std::chrono::milliseconds period;
    TimePoint tick{};
    std::uint32_t newest = 0;  ///< Stream when `tick` was.
    std::uint32_t old = 0;     ///< Up to this one they are older than `period`.

    void go_on_to(TimePoint now, std::uint32_t newest_now);
  };

  std::uint32_t newest_ = 0;  ///< Stream that has been opened.
  Ages young_{.period = kYoung};
  Ages fresh_{.period = kFresh};
  double resets_ = 0;  ///< Lately.
  TimePoint now_{};
  Verdict verdict_ = Verdict::kGoOn;
};

}  // namespace kvtier::services
