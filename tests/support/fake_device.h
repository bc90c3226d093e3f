#pragma once

#include "transfer/device/device.h"

#include <cstddef>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

namespace kvtier::testing {

class FakeEvent;
class FakeStream;

/// A device without threads. Work of its streams is held until the test releases it, in any order
/// that is legal: in order within a stream, an event's waiters after its record. Used by one
/// thread. Device memory is aligned to 256 bytes and to no more; pinned memory to 4096.
class FakeDevice final : public transfer::Device {
 public:
  FakeDevice();
  ~FakeDevice() override;

  [[nodiscard]] transfer::Buffer allocate(transfer::Space space, std::size_t bytes,
                                          const transfer::PinOptions& options) override;
  using transfer::Device::allocate;
  [[nodiscard]] std::unique_ptr<transfer::Stream> make_stream() override;
  [[nodiscard]] std::unique_ptr<transfer::Stream> adopt(StreamRef external) override;
  [[nodiscard]] transfer::MemoryInfo memory() const override;
  [[nodiscard]] Backend backend() const noexcept override { return Backend::kCpu; }
  [[nodiscard]] std::string_view name() const noexcept override { return "fake"; }

  /// Runs the next task of a stream of this device. Returns false, having run nothing, when there
  /// is none or when it waits for an event that is not done.
  bool step(transfer::Stream& stream);
  /// Runs everything. Throws `std::logic_error` when what is left can never run.
  void run_all();
  /// Tasks held on a stream.
  [[nodiscard]] std::size_t pending(const transfer::Stream& stream) const;

  /// Makes the n-th allocation, or call of `Stream::copy`, from now throw (1: the next).
  void fail_allocation(int n) { allocations_to_failure_ = n; }
  void fail_copy(int n) { copies_to_failure_ = n; }
  /// Makes the n-th `Stream::wait` on an unfinished event from now throw.
  void fail_wait(int n) { waits_to_failure_ = n; }

  [[nodiscard]] std::size_t live_bytes() const noexcept { return live_bytes_; }
  /// Events held by a handle or by a task.
  [[nodiscard]] std::size_t live_events() const noexcept { return live_events_; }

 private:
  friend class FakeEvent;
  friend class FakeStream;

  std::vector<FakeStream*> streams_;
  int allocations_to_failure_ = 0;
  int copies_to_failure_ = 0;
  int waits_to_failure_ = 0;
  std::size_t live_bytes_ = 0;
  std::size_t live_events_ = 0;
};

}  // namespace kvtier::testing
