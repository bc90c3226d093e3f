#include "transfer/device/device_cpu.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "include/types/host_memory.h"
#include "transfer/device/event_pool.h"
#include "transfer/device/parallel.h"

#include <atomic>
#include <cassert>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace kvtier::transfer::cpu {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kMapThreshold = std::size_t{1} << 20;
constexpr std::size_t kQueueSlots = 64;

/// A latch. Held by its `Event`, by the task that sets it and by every task that waits for it; back
/// in the pool when the last of them lets go.
class CpuEvent final : public EventState {
 public:
  explicit CpuEvent(EventPool<CpuEvent>& pool) : pool_(pool) {}

  [[nodiscard]] bool done() const override { return done_.load(std::memory_order_acquire); }
  void wait() const override {
    std::unique_lock lock(mutex_);
    set_.wait(lock, [this] { return done(); });
  }
  void release() noexcept override {
    if (holders_.fetch_sub(1, std::memory_order_acq_rel) == 1) pool_.put_back(this);
  }

  void arm(int holders) {
    done_.store(false, std::memory_order_relaxed);
    holders_.store(holders, std::memory_order_relaxed);
  }
  void hold() { holders_.fetch_add(1, std::memory_order_relaxed); }
  void set() {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    set_.notify_all();
  }

 private:
  EventPool<CpuEvent>& pool_;
  std::atomic<bool> done_ = false;
  std::atomic<int> holders_ = 0;
  mutable std::mutex mutex_;
  mutable std::condition_variable set_;
};

class CpuStream final : public Stream {
 public:
  explicit CpuStream(EventPool<CpuEvent>& events)
      : events_(events), slots_(std::make_unique_for_overwrite<Slot[]>(kQueueSlots)) {
    worker_ = std::thread([this] { work(); });
  }
  ~CpuStream() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    pushed_.notify_all();
    worker_.join();
  }

  [[nodiscard]] void* native() const noexcept override { return nullptr; }
  void run(Task task) override {
    assert(!task.empty());
    push(std::move(task), Kind::kWork);
  }
  void copy(std::span<const CopyRun> runs) override {
    constexpr std::size_t kGroup = 64;
    struct Group {
      CopyRun runs[kGroup];
      std::size_t count = 0;
    };
    while (!runs.empty()) {
      Group group;
      group.count = std::min(runs.size(), kGroup);
      std::copy_n(runs.begin(), group.count, group.runs);
      runs = runs.subspan(group.count);
      run([group] {
        for (std::size_t i = 0; i < group.count; ++i) {
          const CopyRun& one = group.runs[i];
          if (one.bytes != 0) std::memmove(one.to, one.from, one.bytes);
        }
      });
    }
  }
  void fill(void* to, std::uint8_t value, std::size_t bytes) override {
    if (bytes == 0) return;
    run([=] { std::memset(to, value, bytes); });
  }
  [[nodiscard]] Event record() override {
    CpuEvent* event = events_.take();
    event->arm(2);
    push(Task([event] {
           event->set();
           event->release();
         }),
         Kind::kOrder);
    return Event(event);
  }
  void wait(const Event& event) override {
    if (event.done()) return;
    auto* state = dynamic_cast<CpuEvent*>(event.state());
    if (state == nullptr) {
      throw Error(ErrorCode::kInternal, "event: expected one of the CPU backend, found another");
    }
    state->hold();
    push(Task([state] {
           state->wait();
           state->release();
         }),
         Kind::kOrder);
  }
  void synchronize() override {
    record().wait();  // woken once, however many tasks there are
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  [[nodiscard]] std::uint64_t capture_id() const override { return 0; }

 private:
  /// Order is kept also after an error: a wait for an event must end.
  enum class Kind : std::uint8_t { kWork, kOrder };
  struct Slot {
    Task task;
    Kind kind;
  };

  void push(Task task, Kind kind) {
    std::unique_lock lock(mutex_);
    has_room_.wait(lock, [this] { return tail_ - head_ < kQueueSlots; });
    Slot& slot = slots_[tail_ % kQueueSlots];
    slot.task = std::move(task);
    slot.kind = kind;
    ++tail_;
    lock.unlock();
    pushed_.notify_one();
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      pushed_.wait(lock, [this] { return head_ != tail_ || closing_; });
      if (head_ == tail_) return;
      Slot& slot = slots_[head_ % kQueueSlots];
      const bool skip = slot.kind == Kind::kWork && error_ != nullptr;
      lock.unlock();
      std::exception_ptr thrown = execute(slot, skip);
      lock.lock();
      if (thrown) error_ = std::move(thrown);
      if (tail_ - head_++ == kQueueSlots) has_room_.notify_all();
    }
  }

  static std::exception_ptr execute(Slot& slot, bool skip) {
    Task task(std::move(slot.task));
    try {
      if (!skip) task();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  EventPool<CpuEvent>& events_;
  std::mutex mutex_;  // guards what follows but the slot that is being executed
  std::condition_variable pushed_;
  std::condition_variable has_room_;
  std::unique_ptr<Slot[]> slots_;
  std::size_t head_ = 0;
  std::size_t tail_ = 0;
  bool closing_ = false;
  std::exception_ptr error_;
  std::thread worker_;
};

std::size_t round_to_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

void unmap(void* /*context*/, std::byte* data, std::size_t bytes) noexcept {
  munmap(data, round_to_pages(bytes));
}

void free_aligned(void* /*context*/, std::byte* data, std::size_t /*bytes*/) noexcept {
  ::operator delete (data, std::align_val_t{kAlignment});
}

std::size_t bytes_of(int pages) {
  return static_cast<std::size_t>(sysconf(pages)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

class CpuDevice final : public Device {
 public:
  CpuDevice() : name_("CPU, " + std::to_string(parallel_threads()) + " threads") {}

  [[nodiscard]] Buffer allocate(Space space, std::size_t bytes,
                                const PinOptions& options) override {
    Buffer buffer = obtain(space, bytes);
    if (space == Space::kPinnedHost && options.progress) options.progress(bytes, bytes);
    return buffer;
  }
  [[nodiscard]] std::unique_ptr<Stream> make_stream() override {
    return std::make_unique<CpuStream>(events_);
  }
  [[nodiscard]] std::unique_ptr<Stream> adopt(StreamRef /*external*/) override {
    throw Error(ErrorCode::kInvalidArgument,
                "stream: expected none on the CPU backend, found a caller's stream");
  }
  [[nodiscard]] MemoryInfo memory() const override {
    return {.free_bytes = available_host_bytes().value_or(bytes_of(_SC_AVPHYS_PAGES)),
            .total_bytes = bytes_of(_SC_PHYS_PAGES)};
  }
  [[nodiscard]] Backend backend() const noexcept override { return Backend::kCpu; }
  [[nodiscard]] std::string_view name() const noexcept override { return name_; }

 private:
  [[nodiscard]] Buffer obtain(Space space, std::size_t bytes) const {
    if (bytes == 0) return {};
    if (space == Space::kDevice && bytes < kMapThreshold) {
      void* data = ::operator new (bytes, std::align_val_t{kAlignment}, std::nothrow);
      if (data == nullptr) fail(space, bytes);
      return {static_cast<std::byte*>(data), bytes, free_aligned, nullptr};
    }
    // Rounding wraps around to 0 for sizes near the end of the address space.
    const std::size_t mapped = round_to_pages(bytes);
    void* data = mapped < bytes ? MAP_FAILED
                                : mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) fail(space, bytes);
    return {static_cast<std::byte*>(data), bytes, unmap, nullptr};
  }
  [[noreturn]] void fail(Space space, std::size_t bytes) const {
    const MemoryInfo info = memory();
    throw_error(ErrorCode::kResourceExhausted, space == Space::kDevice ? "device" : "host",
                " memory: wanted ", bytes, " bytes, found ", info.free_bytes, " free of ",
                info.total_bytes);
  }

  EventPool<CpuEvent> events_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace kvtier::transfer::cpu
