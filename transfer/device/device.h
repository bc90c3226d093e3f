#pragma once

#include "kvtier/config.h"
#include "kvtier/tensor.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

/// The only interface between CPU and CUDA. Above it there is no CUDA header; below it each kernel
/// chooses its backend once, at its front door:
///
///     void f(Stream& stream, Args args) { enqueue<cpu::f, cuda::f>(stream, args); }
///
/// (transfer/device/with_cuda.h)
namespace kvtier::transfer {

/// True when the CUDA half is compiled in: `kWithCuda` for those who need not know as they compile.
bool has_cuda_half();

/// Kinds of memory. On the CPU backend both are host memory.
enum class Space : std::uint8_t { kDevice, kPinnedHost };

/// A unit of work for the CPU backend: any callable of at most `kBytes` bytes, stored in place.
class Task {
 public:
  static constexpr std::size_t kBytes = 12 * 1024;

  Task() = default;
  template <typename F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, Task>)
      Task(F&& f) {  // NOLINT(google-explicit-constructor): callers pass lambdas
    using Callable = std::remove_cvref_t<F>;
    static_assert(sizeof(Callable) <= kBytes, "the callable captures too much");
    static_assert(alignof(Callable) <= alignof(std::max_align_t));
    ::new (static_cast<void*>(storage_)) Callable(std::forward<F>(f));
    invoke_ = [](void* p) { (*static_cast<Callable*>(p))(); };
    relocate_ = [](void* from, void* to) {
      auto* source = static_cast<Callable*>(from);
      if (to != nullptr) ::new (to) Callable(std::move(*source));
      source->~Callable();
    };
  }
  Task(Task&& other) noexcept { take(other); }
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~Task() { reset(); }

  void operator()() { invoke_(storage_); }
  [[nodiscard]] bool empty() const noexcept { return invoke_ == nullptr; }

 private:
  void take(Task& other) noexcept {
    if (other.invoke_ != nullptr) other.relocate_(other.storage_, storage_);
    invoke_ = std::exchange(other.invoke_, nullptr);
    relocate_ = std::exchange(other.relocate_, nullptr);
  }
  void reset() noexcept {
    if (invoke_ != nullptr) relocate_(storage_, nullptr);
    invoke_ = nullptr;
  }

  alignas(std::max_align_t) std::byte storage_[kBytes];
  void (*invoke_)(void*) = nullptr;
  void (*relocate_)(void*, void*) = nullptr;
};

/// State behind an `Event`; made and pooled by a device.
class EventState {
 public:
  virtual ~EventState() = default;
  [[nodiscard]] virtual bool done() const = 0;
  virtual void wait() const = 0;        ///< Blocks the host.
  virtual void release() noexcept = 0;  ///< Returns the state to its device's pool.
};

/// A point in a stream's work. Move-only; an empty event counts as done. Must not outlive its
/// device.
class Event {
 public:
  Event() = default;
  explicit Event(EventState* state) noexcept : state_(state) {}
  Event(Event&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    if (this != &other) {
      if (state_ != nullptr) state_->release();
      state_ = std::exchange(other.state_, nullptr);
    }
    return *this;
  }
  ~Event() {
    if (state_ != nullptr) state_->release();
  }

  /// Returns whether all work before the event is finished. Throws `kInternal` on a CUDA fault.
  [[nodiscard]] bool done() const { return state_ == nullptr || state_->done(); }
  /// Blocks the host until done. Never called inside a step.
  void wait() const {
    if (state_ != nullptr) state_->wait();
  }
  [[nodiscard]] EventState* state() const noexcept { return state_; }

 private:
  EventState* state_ = nullptr;
};

/// A contiguous copy; any space to any space.
struct CopyRun {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

/// In-order queue of work. Used by one thread at a time.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;  // a queue has one owner
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream() = default;

  /// `cudaStream_t`; nullptr on the CPU backend.
  [[nodiscard]] virtual void* native() const noexcept = 0;
  /// Enqueues work of the CPU backend. Calling it on a CUDA stream is a logic error (`kInternal`).
  virtual void run(Task task) = 0;
  /// Enqueues copies, in order. Sources and targets stay valid until the stream has passed them.
  virtual void copy(std::span<const CopyRun> runs) = 0;
  /// Enqueues a fill with one byte value.
  virtual void fill(void* to, std::uint8_t value, std::size_t bytes) = 0;
  /// Marks the work enqueued so far. The event comes from a pool: nothing is created in a step.
  [[nodiscard]] virtual Event record() = 0;
  /// Makes later work of this stream wait for `event`, on the device. With `record` on another
  /// stream this forks and joins, also while a graph is captured.
  virtual void wait(const Event& event) = 0;
  /// Blocks the host until all enqueued work is done; throws what it threw. Never inside a step.
  virtual void synchronize() = 0;
  /// Returns the number of the CUDA graph that is being captured of the stream, or 0. A stream that
  /// was forked from a captured one is in that capture until it ends, also after it was joined.
  [[nodiscard]] virtual std::uint64_t capture_id() const = 0;
  [[nodiscard]] bool capturing() const { return capture_id() != 0; }
};

/// Owns one allocation. Move-only; returns its memory when destroyed, so it must outlive the work
/// that uses it.
class Buffer {
 public:
  using Deleter = void (*)(void* context, std::byte* data, std::size_t bytes) noexcept;

  Buffer() = default;
  Buffer(std::byte* data, std::size_t bytes, Deleter deleter, void* context) noexcept
      : data_(data), bytes_(bytes), deleter_(deleter), context_(context) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) deleter_(context_, data_, bytes_);
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// Views the memory as `T`s.
  template <typename T>
  [[nodiscard]] T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(deleter_, other.deleter_);
    std::swap(context_, other.context_);
  }

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Deleter deleter_ = nullptr;
  void* context_ = nullptr;
};

struct MemoryInfo {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

/// How pinned memory is obtained and prepared.
struct PinOptions {
  /// Of the CUDA backend. `kAuto` is `kManaged`, which suits large memory that is mostly read.
  HostAllocation allocation = HostAllocation::kRegistered;
  /// Throws when `allocation` is refused, instead of trying `kRegistered` and then `kDriver`. If
  /// not, `kManaged` is refused for more memory than the device has.
  bool only = false;
  int threads = 0;  ///< Threads of the first touch; 0: all.
  /// Called with (bytes ready, bytes in all), from the calling thread.
  std::function<void(std::size_t, std::size_t)> progress{};
  /// Called when one way is refused and another is tried.
  std::function<void(LogLevel, std::string_view)> log{};
};

/// Owns the context, the event pool, and every allocation made through it. Thread-safe.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;  // allocations and events point back to it
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  /// Allocates at least 256-byte aligned memory, contents undefined. `kPinnedHost` memory is
  /// obtained as `options` say, page aligned, and readable by kernels at the same address. Throws
  /// `kResourceExhausted` with the sizes, everything already obtained given back.
  [[nodiscard]] virtual Buffer allocate(Space space, std::size_t bytes,
                                        const PinOptions& options = {}) = 0;
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream() = 0;
  /// Wraps a caller's stream, which is not destroyed. Throws `kInvalidArgument` on the CPU backend,
  /// for a stream of another GPU, unless it is being captured, and for `cudaStreamPerThread`.
  [[nodiscard]] virtual std::unique_ptr<Stream> adopt(StreamRef external) = 0;
  [[nodiscard]] virtual MemoryInfo memory() const = 0;
  [[nodiscard]] virtual Backend backend() const noexcept = 0;
  /// The number of the GPU among those of the process; -1 on the CPU backend.
  [[nodiscard]] virtual int index() const noexcept { return -1; }
  /// Makes the GPU current in the calling thread. Returns the number of the one that was, -1 where
  /// nothing has changed.
  [[nodiscard]] virtual int make_current() const { return -1; }
  virtual void restore_current(int /*index*/) const noexcept {}
  /// "CPU, 8 threads" or "NVIDIA H200, 132 SMs".
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
};

/// Makes a device current in the calling thread, as launches on its streams need, and at its end
/// the one before. Nothing on the CPU backend.
class CurrentDevice {
 public:
  explicit CurrentDevice(const Device& device) : device_(device), before_(device.make_current()) {}
  CurrentDevice(const CurrentDevice&) = delete;  // restores once
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (before_ >= 0) device_.restore_current(before_);
  }

 private:
  const Device& device_;
  int before_;
};

/// Makes the device. `kAuto` falls back to the CPU and says why through `log`; `kCuda` throws
/// `kUnimplemented` when CUDA is not compiled in or no usable GPU is found. Both throw `kInternal`
/// when a GPU fails that this process has used.
[[nodiscard]] std::unique_ptr<Device> make_device(
    Backend wanted, const std::function<void(LogLevel, std::string_view)>& log = {});

}  // namespace kvtier::transfer
