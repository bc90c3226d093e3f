#include "services/dataplane/incoming_frame.h"

#include <algorithm>

namespace kvtier::services {
namespace {

/// A body begins with so much room, and then has twice what has come.
constexpr std::size_t kFirstBytes = 64 << 10;

}  // namespace

void IncomingFrame::grow(std::size_t bytes) {
  if (bytes <= body_.size() || refusal_) return;
  const std::size_t wanted =
      std::min<std::size_t>(header_.body_bytes, std::max({bytes, kFirstBytes, 2 * body_.size()}));
  try {
    if (reservation_) reservation_->take(static_cast<std::int64_t>(wanted - body_.size()));
    body_.reserve(wanted);
    body_.resize(wanted);
  } catch (...) {
    refusal_ = to_service_error(std::current_exception());
    body_ = {};
    if (reservation_) reservation_->give(reservation_->bytes());
  }
}

std::size_t IncomingFrame::append(std::span<const std::byte> bytes) {
  const std::size_t taken = std::min<std::size_t>(bytes.size(), header_.body_bytes - received_);
  grow(received_ + taken);
  if (!refusal_) {
    std::ranges::copy(bytes.first(taken), body_.begin() + static_cast<std::ptrdiff_t>(received_));
  }
  received_ += taken;
  return taken;
}

std::span<std::byte> IncomingFrame::room(std::span<std::byte> scratch) {
  const std::size_t left = header_.body_bytes - received_;
  if (left > 0) grow(received_ + 1);
  if (!refusal_) return std::span(body_).subspan(received_);
  return scratch.first(std::min(left, scratch.size()));
}

}  // namespace kvtier::services
