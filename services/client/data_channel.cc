#include "services/client/data_channel.h"

#include "services/client/error_details.h"

#include <algorithm>
#include <cstring>

namespace kvtier::services {
namespace {

constexpr std::size_t kBufferBytes = 64 << 10;

[[noreturn]] void throw_status(std::span<const std::byte> control) {
  v1::ItemStatus status;
  if (!status.ParseFromArray(control.data(), static_cast<int>(control.size()))) {
    throw ClientError(ErrorCode::kUnavailable, "data plane: expected a status", "DISCONNECTED");
  }
  throw error_of(status);
}

}  // namespace

ClientError error_of(const v1::ItemStatus& status) {
  return {code_of(status.code()), status.message(), status.reason()};
}

DataChannel::DataChannel(DataChannelOptions options)
    : options_(std::move(options)),
      socket_(connect_data_socket(options_.endpoint, options_.tls,
                                  std::chrono::steady_clock::now() + options_.timeout)),
      buffer_(kBufferBytes) {
  attach();
}

void DataChannel::attach() {
  const auto token = std::as_bytes(std::span(options_.token));
  const std::uint64_t id = send(FrameType::kAttach, 0, token);
  std::vector<Descriptor> descriptors;
  const Frame frame = read_frame({}, &descriptors);
  if (frame.header.type == FrameType::kGoAway) throw_status(frame.control());
  if (frame.header.type != FrameType::kAttached || frame.header.request_id != id) {
    throw ClientError(ErrorCode::kUnavailable, "data plane: expected to be attached",
                      "DISCONNECTED");
  }
  const AttachedBody body = decode_attached(frame.control());
  if (descriptors.size() != body.regions.size()) {
    throw ClientError(ErrorCode::kUnavailable, "data plane: expected a descriptor per region",
                      "DISCONNECTED");
  }
  for (std::size_t i = 0; i < body.regions.size(); ++i) {
    const bool is_staging = body.regions[i].kind == RegionKind::kStaging;
    SharedRegion region =
        SharedRegion::map(std::move(descriptors[i]), body.regions[i].bytes, is_staging);
    (is_staging ? staging_ : pages_) = std::move(region);
  }
  if (!pages_.bytes().empty()) arena_ = ArenaView::of(pages_.bytes());
}

std::uint64_t DataChannel::send(FrameType type, std::uint32_t flags,
                                std::span<const std::byte> control,
                                std::span<const iovec> payload) {
  std::uint64_t payload_bytes = 0;
  for (const iovec& piece : payload) payload_bytes += piece.iov_len;
  HeaderBytes header = encode_header(make_header(type, flags, ++last_id_, control, payload_bytes));
  std::vector<iovec> pieces{{header.data(), header.size()},
                            {const_cast<std::byte*>(control.data()), control.size()}};
  pieces.insert(pieces.end(), payload.begin(), payload.end());
  deadline_ = std::chrono::steady_clock::now() + options_.timeout;
  broken_ = true;  // unless all goes well
  socket_->write(pieces, deadline_);
  broken_ = false;
  return last_id_;
}

/// Receives until `bytes` are in the buffer.
void DataChannel::fill(std::size_t bytes, std::vector<Descriptor>* descriptors) {
  if (begin_ == end_) begin_ = end_ = 0;
  if (begin_ + bytes > buffer_.size()) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  while (end_ - begin_ < bytes) {
    end_ += socket_->read(std::span(buffer_).subspan(end_), deadline_, options_.spin, descriptors);
  }
}

/// Fills `part`, first from what was received already.
void DataChannel::read_part(std::span<std::byte> part, std::vector<Descriptor>* descriptors) {
  std::size_t filled = std::min(part.size(), end_ - begin_);
  if (filled > 0) std::memcpy(part.data(), buffer_.data() + begin_, filled);
  begin_ += filled;
  while (filled < part.size()) {
    filled += socket_->read(part.subspan(filled), deadline_, {}, descriptors);
  }
}

DataChannel::Frame DataChannel::read_frame(std::span<std::byte> to,
                                           std::vector<Descriptor>* descriptors) {
  broken_ = true;  // unless all goes well
  Frame frame;
  fill(kFrameHeaderBytes, descriptors);
  frame.header = decode_header(std::span(buffer_).subspan(begin_).first<kFrameHeaderBytes>());
  begin_ += kFrameHeaderBytes;
  const std::uint64_t payload = frame.header.payload_bytes();
  const bool elsewhere = payload > 0 && payload <= to.size();
  frame.body.resize(elsewhere ? frame.header.control_bytes : frame.header.body_bytes);
  read_part(frame.body, descriptors);
  if (elsewhere) read_part(to.first(payload), descriptors);
  check_control(frame.header, frame.control());
  broken_ = false;
  return frame;
}

DataChannel::Frame DataChannel::receive(std::span<std::byte> to) {
  Frame frame = read_frame(to, nullptr);
  if (frame.header.type == FrameType::kGoAway) {
    broken_ = true;
    throw_status(frame.control());
  }
  return frame;
}

DataChannel::Frame DataChannel::reply_to(std::uint64_t request_id, std::span<std::byte> to) {
  for (;;) {
    Frame frame = receive(to);
    if (frame.header.request_id != request_id) continue;
    if ((frame.header.flags & kFailed) != 0) throw_status(frame.control());
    return frame;
  }
}

}  // namespace kvtier::services
