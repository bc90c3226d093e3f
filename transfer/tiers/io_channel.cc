#include "transfer/tiers/io_channel.h"

#include <cerrno>
#include <utility>

namespace kvtier::tiers {

IoChannel::IoChannel(std::size_t num_slots, std::size_t slot_bytes)
    : slot_bytes_(slot_bytes), memory_(num_slots * slot_bytes), transfers_(num_slots) {
  for (std::size_t i = 0; i < num_slots; ++i) free_.push_back(num_slots - 1 - i);
}

void IoChannel::begin() { ++call_; }

std::optional<std::size_t> IoChannel::take_slot() {
  if (free_.empty()) return std::nullopt;
  const std::size_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void IoChannel::give_slot(std::size_t slot) { free_.push_back(slot); }

std::span<std::byte> IoChannel::bytes(std::size_t slot) {
  return memory_.bytes().subspan(slot * slot_bytes_, slot_bytes_);
}

void IoChannel::start(Kind kind, const std::shared_ptr<Segment>& file, std::uint64_t offset,
                      std::size_t size, std::size_t slot, std::uint32_t tag, bool detached) {
  transfers_[slot] = {.kind = kind,
                      .file = file,
                      .offset = offset,
                      .size = size,
                      .done = 0,
                      .call = detached ? 0 : call_,
                      .tag = tag,
                      .slot = slot};
  ++num_running_;
  submit(transfers_[slot]);
}

std::optional<IoChannel::Done> IoChannel::wait(Deadline deadline) {
  while (const auto completion = reap(deadline)) {
    Transfer& transfer = transfers_[completion->slot];
    int error = 0;
    if (completion->result < 0) {
      error = static_cast<int>(-completion->result);
      if (error == EINTR || error == EAGAIN) {
        submit(transfer);
        continue;
      }
    } else if (transfer.kind != Kind::kSync) {
      transfer.done += static_cast<std::size_t>(completion->result);
      if (completion->result == 0) {
        error = transfer.kind == Kind::kRead ? FileOps::kEndOfFile : EIO;
      } else if (transfer.done < transfer.size) {
        submit(transfer);
        continue;
      }
    }
    --num_running_;
    transfer.file.reset();
    if (transfer.call != call_) {
      give_slot(transfer.slot);
      return Done{.tag = kForgotten, .slot = transfer.slot, .error = error};
    }
    return Done{.tag = transfer.tag, .slot = transfer.slot, .error = error};
  }
  return std::nullopt;
}

void IoChannel::drain() {
  begin();  // so that `wait` reports nothing of them
  while (num_running_ > 0) {
    static_cast<void>(wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(100)));
  }
}

ChannelPool::ChannelPool(std::vector<std::unique_ptr<IoChannel>> channels)
    : channels_(std::move(channels)) {
  for (std::size_t i = 0; i < channels_.size(); ++i) free_.push_back(i);
}

std::optional<std::size_t> ChannelPool::take(IoChannel::Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline, [&] { return !free_.empty(); })) return std::nullopt;
  const std::size_t index = free_.back();
  free_.pop_back();
  channels_[index]->begin();
  return index;
}

void ChannelPool::give_back(std::size_t index) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(index);
  }
  changed_.notify_one();
}

}  // namespace kvtier::tiers
