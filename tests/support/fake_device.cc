#include "support/fake_device.h"

#include "kvtier/error.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvtier::testing {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kDeviceOffset = 256;  // keeps device memory from being better aligned

/// Counts down; tells when this is the call that fails.
bool fails_now(int& countdown) { return countdown > 0 && --countdown == 0; }

}  // namespace

class FakeEvent final : public transfer::EventState {
 public:
  explicit FakeEvent(FakeDevice& device) : device_(device) { ++device_.live_events_; }
  ~FakeEvent() override { --device_.live_events_; }

  [[nodiscard]] bool done() const override { return done_; }
  void wait() const override {
    device_.run_all();
    if (!done_) throw std::logic_error("an event that nothing completes");
  }
  void release() noexcept override {
    if (--holders_ == 0) delete this;
  }
  void hold() { ++holders_; }
  void set() { done_ = true; }

 private:
  FakeDevice& device_;
  int holders_ = 2;  // the handle and the task that sets it
  bool done_ = false;
};

class FakeStream final : public transfer::Stream {
 public:
  explicit FakeStream(FakeDevice& device) : device_(device) { device_.streams_.push_back(this); }
  ~FakeStream() override {
    while (!entries_.empty() && device_.step(*this)) {
    }
    if (!entries_.empty()) device_.run_all();
    std::erase(device_.streams_, this);
  }

  [[nodiscard]] void* native() const noexcept override { return nullptr; }
  void run(transfer::Task task) override {
    entries_.push_back({.task = std::move(task), .sets = nullptr, .waits = nullptr});
  }
  void copy(std::span<const transfer::CopyRun> runs) override {
    if (fails_now(device_.copies_to_failure_)) {
      throw Error(ErrorCode::kInternal, "copy: made to fail");
    }
    for (const transfer::CopyRun& one : runs) {
      run([one] {
        if (one.bytes != 0) std::memmove(one.to, one.from, one.bytes);
      });
    }
  }
  void fill(void* to, std::uint8_t value, std::size_t bytes) override {
    run([=] {
      if (bytes != 0) std::memset(to, value, bytes);
    });
  }
  [[nodiscard]] transfer::Event record() override {
    auto* event = new FakeEvent(device_);
    entries_.push_back({.task = {}, .sets = event, .waits = nullptr});
    return transfer::Event(event);
  }
  void wait(const transfer::Event& event) override {
    if (event.done()) return;
    if (fails_now(device_.waits_to_failure_)) {
      throw Error(ErrorCode::kInternal, "wait: made to fail");
    }
    auto* state = static_cast<FakeEvent*>(event.state());
    state->hold();
    entries_.push_back({.task = {}, .sets = nullptr, .waits = state});
  }
  void synchronize() override {
    device_.run_all();
    assert(entries_.empty());
  }
  [[nodiscard]] std::uint64_t capture_id() const override { return 0; }

  bool step() {
    if (entries_.empty()) return false;
    Entry& next = entries_.front();
    if (next.waits != nullptr && !next.waits->done()) return false;
    Entry entry = std::move(next);
    entries_.pop_front();
    if (entry.waits != nullptr) {
      entry.waits->release();
    } else if (entry.sets != nullptr) {
      entry.sets->set();
      entry.sets->release();
    } else {
      entry.task();
    }
    return true;
  }
  [[nodiscard]] std::size_t pending() const { return entries_.size(); }

 private:
  struct Entry {
    transfer::Task task;
    FakeEvent* sets;
    FakeEvent* waits;
  };

  FakeDevice& device_;
  std::deque<Entry> entries_;
};

FakeDevice::FakeDevice() = default;
FakeDevice::~FakeDevice() { assert(streams_.empty() && live_events_ == 0 && live_bytes_ == 0); }

transfer::Buffer FakeDevice::allocate(transfer::Space space, std::size_t bytes,
                                      const transfer::PinOptions& options) {
  if (fails_now(allocations_to_failure_)) {
    throw Error(ErrorCode::kResourceExhausted,
                "memory: made to fail at " + std::to_string(bytes) + " bytes");
  }
  if (bytes == 0) return {};
  const bool pinned = space == transfer::Space::kPinnedHost;
  const std::size_t offset = pinned ? 0 : kDeviceOffset;
  auto* base = static_cast<std::byte*>(::operator new (bytes + offset, std::align_val_t{kPage}));
  live_bytes_ += bytes;
  if (pinned && options.progress) options.progress(bytes, bytes);
  const auto deleter = [](void* context, std::byte* data, std::size_t size) noexcept {
    const bool page_aligned = reinterpret_cast<std::uintptr_t>(data) % kPage == 0;
    ::operator delete (page_aligned ? data : data - kDeviceOffset, std::align_val_t{kPage});
    static_cast<FakeDevice*>(context)->live_bytes_ -= size;
  };
  return {base + offset, bytes, deleter, this};
}

std::unique_ptr<transfer::Stream> FakeDevice::make_stream() {
  return std::make_unique<FakeStream>(*this);
}

std::unique_ptr<transfer::Stream> FakeDevice::adopt(StreamRef /*external*/) {
  throw Error(ErrorCode::kInvalidArgument, "stream: expected none, found a caller's stream");
}

transfer::MemoryInfo FakeDevice::memory() const {
  return {.free_bytes = std::size_t{1} << 40, .total_bytes = std::size_t{1} << 40};
}

bool FakeDevice::step(transfer::Stream& stream) { return static_cast<FakeStream&>(stream).step(); }

void FakeDevice::run_all() {
  for (bool progress = true; progress;) {
    progress = false;
    for (FakeStream* stream : streams_) {
      while (stream->step()) progress = true;
    }
  }
  for (const FakeStream* stream : streams_) {
    if (stream->pending() != 0) throw std::logic_error("a stream waits for ever");
  }
}

std::size_t FakeDevice::pending(const transfer::Stream& stream) const {
  return static_cast<const FakeStream&>(stream).pending();
}

}  // namespace kvtier::testing
