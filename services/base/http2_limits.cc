#include "services/base/http2_limits.h"

#include <algorithm>

namespace kvtier::services {
namespace {

// Of RFC 9113, section 6.
constexpr std::uint8_t kHeaders = 1;
constexpr std::uint8_t kRstStream = 3;
constexpr std::uint8_t kContinuation = 9;
constexpr std::uint8_t kEndHeaders = 4;

std::uint32_t big_endian(std::span<const std::uint8_t> bytes) {
  std::uint32_t value = 0;
  for (const std::uint8_t byte : bytes) value = value << 8 | byte;
  return value;
}

}  // namespace

void Http2Waste::add(double streams, TimePoint now) {
  const std::lock_guard lock(mutex_);
  go_on_to(now);
  streams_ = std::min(streams_ + streams, kMost + kPerSecond);
}

bool Http2Waste::too_much(TimePoint now) {
  const std::lock_guard lock(mutex_);
  go_on_to(now);
  return streams_ > kMost;
}

void Http2Waste::go_on_to(TimePoint now) {
  if (now <= at_) return;  // of another thread
  const std::chrono::duration<double> passed = now - at_;
  streams_ = std::max(0.0, streams_ - kPerSecond * passed.count());
  at_ = now;
}

Http2Limits::Verdict Http2Limits::read(std::span<const std::byte> bytes, TimePoint now) {
  go_on_to(now);
  while (!bytes.empty() && verdict_ == Verdict::kGoOn) {
    if (const std::size_t skipped = std::min(skip_, bytes.size()); skipped > 0) {
      skip_ -= skipped;
      bytes = bytes.subspan(skipped);
      continue;
    }
    header_[header_size_++] = std::to_integer<std::uint8_t>(bytes.front());
    bytes = bytes.subspan(1);
    if (header_size_ < kHeaderBytes) continue;
    header_size_ = 0;
    verdict_ = begin_frame();
  }
  return verdict_;
}

Http2Limits::Verdict Http2Limits::begin_frame() {
  const std::span<const std::uint8_t> header(header_);
  skip_ = big_endian(header.first(3));
  const std::uint32_t stream = big_endian(header.last(4)) & 0x7FFFFFFFU;
  switch (header[3]) {
    case kHeaders:
      newest_ = std::max(newest_, stream);
      block_bytes_ = 0;
      block_frames_ = 0;
      return add_to_block(skip_, (header[4] & kEndHeaders) != 0);
    case kContinuation:
      return add_to_block(skip_, (header[4] & kEndHeaders) != 0);
    case kRstStream:
      return stream <= young_.old ? Verdict::kGoOn : count(1, Verdict::kResets);
    default:
      return Verdict::kGoOn;
  }
}

Http2Limits::Verdict Http2Limits::add_to_block(std::size_t bytes, bool ends) {
  block_bytes_ += bytes;
  ++block_frames_;
  const bool fits =
      block_bytes_ <= kMaxBlockBytes && block_frames_ + (ends ? 0 : 1) <= kMaxBlockFrames;
  if (!fits) return Verdict::kHeaders;
  const std::size_t streams = ends ? block_bytes_ / kBytesPerStream : 0;
  return streams == 0 ? Verdict::kGoOn : count(static_cast<double>(streams), Verdict::kHeaders);
}

Http2Limits::Verdict Http2Limits::count(double streams, Verdict verdict) {
  resets_ += streams;
  waste_->add(streams, now_);
  const bool amid_waste = resets_ > kMaxResetsAmidWaste && waste_->too_much(now_);
  return resets_ > kMaxResets || amid_waste ? verdict : Verdict::kGoOn;
}

void Http2Limits::end(TimePoint now) {
  go_on_to(now);
  const double fresh = (newest_ - fresh_.old) / 2.0;
  waste_->add(std::clamp(fresh - resets_, 0.0, double{kMaxStreams}), now);
}

void Http2Limits::go_on_to(TimePoint now) {
  if (now_ != TimePoint{}) {
    const std::chrono::duration<double> passed = now - now_;
    resets_ = std::max(0.0, resets_ - kMaxResets * passed.count());
  }
  now_ = now;
  young_.go_on_to(now, newest_);
  fresh_.go_on_to(now, newest_);
}

void Http2Limits::Ages::go_on_to(TimePoint now, std::uint32_t newest_now) {
  if (now - tick < period) return;
  old = now - tick < 2 * period ? newest : newest_now;
  newest = newest_now;
  tick = now;
}

}  // namespace kvtier::services
