#include "transfer/kv/frame_pool.h"

#include "kvtier/error.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace kvtier::transfer {
namespace {

constexpr std::size_t kFrameAlignment = 4096;
/// Beyond this many batches they are polled even when frames are plenty, so that events go back to
/// their pool.
constexpr std::size_t kManyRetiring = 64;

std::byte* align_up(std::byte* data, std::size_t alignment) {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(data) % alignment;
  return past == 0 ? data : data + (alignment - past);
}

}  // namespace

FramePool::FramePool(Device& device, Space space, std::size_t frame_bytes, std::size_t bytes,
                     const PinOptions& options)
    : frame_bytes_(frame_bytes), num_frames_(frame_bytes == 0 ? 0 : bytes / frame_bytes) {
  if (frame_bytes == 0) {
    throw Error(ErrorCode::kInvalidArgument, "frame_bytes: expected at least 1, found 0");
  }
  if (num_frames_ == 0) return;
  const std::size_t payload = num_frames_ * frame_bytes;
  const bool whole_pages = frame_bytes % kFrameAlignment == 0;
  const bool over = whole_pages && space == Space::kDevice;  // pinned memory is page aligned
  memory_ = device.allocate(space, payload + (over ? kFrameAlignment : 0), options);
  std::byte* const first = whole_pages ? align_up(memory_.data(), kFrameAlignment) : memory_.data();
  first_ = first;
  host_writes_ = space == Space::kPinnedHost || device.backend() == Backend::kCpu;
  free_.resize(num_frames_);
  for (std::size_t i = 0; i < num_frames_; ++i) {
    free_[num_frames_ - 1 - i] = first + i * frame_bytes;  // taken from the back: lowest first
  }
}

bool FramePool::take_all(std::span<std::byte*> frames, Stream* stream) {
  std::vector<Retiring> borrowed;
  std::size_t from_free = 0;
  {
    const std::lock_guard lock(mutex_);
    if (free_.size() < frames.size() || retiring_.size() > kManyRetiring) collect_locked();
    from_free = std::min(free_.size(), frames.size());
    if (from_free < frames.size()) {
      if (stream == nullptr) return false;
      borrowed = borrow_locked(frames.size() - from_free);
      if (borrowed.empty()) return false;
    }
    for (std::size_t i = 0; i < from_free; ++i) {
      frames[i] = free_.back();
      free_.pop_back();
    }
    num_used_ += frames.size();
  }
  try {
    for (const Retiring& batch : borrowed) stream->wait(*batch.last_use);
  } catch (...) {
    return_frames(frames.first(from_free), std::move(borrowed));
    throw;
  }
  auto out = frames.begin() + static_cast<std::ptrdiff_t>(from_free);
  for (const Retiring& batch : borrowed) out = std::ranges::copy(batch.frames, out).out;
  return true;
}

void FramePool::give_back(std::span<std::byte* const> frames, Event last_use) {
  if (frames.empty()) return;
  const std::lock_guard lock(mutex_);
  assert(frames.size() <= num_used_);
  std::vector<std::byte*> given(frames.begin(), frames.end());
  num_used_ -= given.size();
  if (last_use.state() == nullptr) {
    std::ranges::reverse(given);
    free_locked(given);
  } else {
    retiring_.push_back({std::make_shared<Event>(std::move(last_use)), std::move(given)});
  }
}

std::size_t FramePool::num_used() const {
  const std::lock_guard lock(mutex_);
  return num_used_;
}

void FramePool::free_locked(std::span<std::byte* const> frames) {
  if (kPoisons && host_writes_) {
    for (std::byte* frame : frames) std::memset(frame, std::to_integer<int>(kPoison), frame_bytes_);
  }
  free_.insert(free_.end(), frames.begin(), frames.end());
}

void FramePool::collect_locked() {
  for (auto batch = retiring_.begin(); batch != retiring_.end();) {
    if (!batch->last_use->done()) {
      ++batch;
      continue;
    }
    free_locked(batch->frames);
    batch = retiring_.erase(batch);
  }
}

std::vector<FramePool::Retiring> FramePool::borrow_locked(std::size_t count) {
  std::size_t retiring = 0;
  for (const Retiring& batch : retiring_) retiring += batch.frames.size();
  std::vector<Retiring> borrowed;
  if (retiring < count) return borrowed;
  while (count > 0) {
    Retiring& oldest = retiring_.front();
    if (oldest.frames.size() <= count) {
      count -= oldest.frames.size();
      borrowed.push_back(std::move(oldest));
      retiring_.pop_front();
      continue;
    }
    const auto split = oldest.frames.end() - static_cast<std::ptrdiff_t>(count);
    borrowed.push_back({oldest.last_use, std::vector<std::byte*>(split, oldest.frames.end())});
    oldest.frames.erase(split, oldest.frames.end());
    count = 0;
  }
  return borrowed;
}

void FramePool::return_frames(std::span<std::byte* const> free, std::vector<Retiring> borrowed) {
  const std::lock_guard lock(mutex_);
  num_used_ -= free.size();
  free_.insert(free_.end(), free.rbegin(), free.rend());
  for (Retiring& batch : borrowed) {
    num_used_ -= batch.frames.size();
    retiring_.push_back(std::move(batch));
  }
}

}  // namespace kvtier::transfer
