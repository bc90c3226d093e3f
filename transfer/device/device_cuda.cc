#include "transfer/device/device_cuda.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/device/cuda_check.h"
#include "transfer/device/event_pool.h"
#include "transfer/device/pinned_cuda.h"
#include "transfer/device/pinned_pages.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <string>

namespace kvtier::transfer::cuda {
namespace {

constexpr int kMinComputeCapability = 8;

class CudaEvent final : public EventState {
 public:
  explicit CudaEvent(EventPool<CudaEvent>& pool) : pool_(pool) {
    KVTIER_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  CudaEvent(const CudaEvent&) = delete;  // owns event_
  CudaEvent& operator=(const CudaEvent&) = delete;
  ~CudaEvent() override { check_in_destructor(cudaEventDestroy(event_)); }

  /// An event of a capture orders nodes of the graph; there is nothing that the host could ask.
  [[nodiscard]] bool done() const override {
    if (captured_) return true;
    const OutsideCapture guard;
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check(status, "cudaEventQuery(event_)");
    return true;
  }
  void wait() const override {
    if (captured_) return;
    const OutsideCapture guard;
    KVTIER_CUDA_CHECK(cudaEventSynchronize(event_));
  }
  void release() noexcept override { pool_.put_back(this); }

  void record(cudaStream_t stream, bool captured) {
    captured_ = captured;
    KVTIER_CUDA_CHECK(cudaEventRecord(event_, stream));
  }
  [[nodiscard]] cudaEvent_t native() const noexcept { return event_; }
  [[nodiscard]] bool captured() const noexcept { return captured_; }

 private:
  EventPool<CudaEvent>& pool_;
  cudaEvent_t event_ = nullptr;
  bool captured_ = false;
};

class CudaStream final : public Stream {
 public:
  CudaStream(EventPool<CudaEvent>& events, cudaStream_t stream, bool owned)
      : events_(events), stream_(stream), owned_(owned) {}
  ~CudaStream() override {
    if (owned_) check_in_destructor(cudaStreamDestroy(stream_));
  }

  [[nodiscard]] void* native() const noexcept override { return stream_; }
  void run(Task /*task*/) override {
    throw Error(ErrorCode::kInternal, "stream: expected work of the CUDA backend, found a task");
  }
  void copy(std::span<const CopyRun> runs) override {
    for (CopyRun run : runs) {
      while (run.bytes != 0) {
        const std::size_t part =
            std::min({run.bytes, bytes_to_chunk_end(run.to), bytes_to_chunk_end(run.from)});
        KVTIER_CUDA_CHECK(cudaMemcpyAsync(run.to, run.from, part, cudaMemcpyDefault, stream_));
        run.to = static_cast<std::byte*>(run.to) + part;
        run.from = static_cast<const std::byte*>(run.from) + part;
        run.bytes -= part;
      }
    }
  }
  void fill(void* to, std::uint8_t value, std::size_t bytes) override {
    while (bytes != 0) {
      const std::size_t part = std::min(bytes, bytes_to_chunk_end(to));
      KVTIER_CUDA_CHECK(cudaMemsetAsync(to, value, part, stream_));
      to = static_cast<std::byte*>(to) + part;
      bytes -= part;
    }
  }
  [[nodiscard]] Event record() override {
    CudaEvent* state = events_.take();
    Event event(state);  // gives the state back if recording throws
    state->record(stream_, capturing());
    return event;
  }
  void wait(const Event& event) override {
    if (event.state() == nullptr) return;
    auto* state = dynamic_cast<CudaEvent*>(event.state());
    if (state == nullptr) {
      throw Error(ErrorCode::kInternal, "event: expected one of the CUDA backend, found another");
    }
    if (!state->captured() && capturing()) {
      // Waiting on the device for work outside the graph would break the capture.
      if (state->done()) return;
      throw Error(ErrorCode::kFailedPrecondition,
                  "capture: expected all work that the step depends on to be finished or captured, "
                  "found an event still pending");
    }
    KVTIER_CUDA_CHECK(cudaStreamWaitEvent(stream_, state->native(), 0));
  }
  void synchronize() override { KVTIER_CUDA_CHECK(cudaStreamSynchronize(stream_)); }
  [[nodiscard]] std::uint64_t capture_id() const override {
    constexpr std::uint64_t kInvalidated = ~std::uint64_t{0};
    if (stream_ == cudaStreamLegacy) return 0;  // asking would end another thread's capture
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    KVTIER_CUDA_CHECK(cudaStreamGetCaptureInfo(stream_, &status, &id));
    if (status == cudaStreamCaptureStatusNone) return 0;
    return status == cudaStreamCaptureStatusActive ? id : kInvalidated;
  }

 private:
  EventPool<CudaEvent>& events_;
  cudaStream_t stream_;
  bool owned_;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const UsableDevice& device)
      : index_(device.index),
        name_(device.name + ", " + std::to_string(device.multiprocessors) + " SMs") {}

  [[nodiscard]] Buffer allocate(Space space, std::size_t bytes,
                                const PinOptions& options) override {
    if (bytes == 0) return {};
    use();
    const OutsideCapture guard;
    if (space == Space::kDevice) return allocate_device(bytes);
    return allocate_pinned(index_, bytes, options);
  }
  [[nodiscard]] std::unique_ptr<Stream> make_stream() override {
    use();
    cudaStream_t stream = nullptr;
    KVTIER_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return std::make_unique<CudaStream>(events_, stream, true);
  }
  [[nodiscard]] std::unique_ptr<Stream> adopt(StreamRef external) override {
    assert(external.given());
    use();
    cudaStream_t stream = stream_of(external.handle());
    check_adoptable(stream);
    return std::make_unique<CudaStream>(events_, stream != nullptr ? stream : cudaStreamLegacy,
                                        false);
  }
  [[nodiscard]] MemoryInfo memory() const override {
    use();
    MemoryInfo info;
    KVTIER_CUDA_CHECK(cudaMemGetInfo(&info.free_bytes, &info.total_bytes));
    return info;
  }
  [[nodiscard]] Backend backend() const noexcept override { return Backend::kCuda; }
  [[nodiscard]] std::string_view name() const noexcept override { return name_; }
  [[nodiscard]] int index() const noexcept override { return index_; }
  [[nodiscard]] int make_current() const override {
    int before = 0;
    KVTIER_CUDA_CHECK(cudaGetDevice(&before));
    if (before == index_) return -1;
    use();
    return before;
  }
  void restore_current(int index) const noexcept override {
    check_in_destructor(cudaSetDevice(index));
  }

 private:
  void check_adoptable(cudaStream_t stream) const {
    if (stream == cudaStreamPerThread) {
      throw_invalid("stream", "one that all threads share",
                    "cudaStreamPerThread, a stream of each thread");
    }
    if (stream == nullptr || stream == cudaStreamLegacy) return;  // that of this device
    const OutsideCapture guard;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    KVTIER_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    if (status != cudaStreamCaptureStatusNone) return;  // CUDA does not say, and ends the capture
    int found = 0;
    KVTIER_CUDA_CHECK(cudaStreamGetDevice(stream, &found));
    if (found == index_) return;
    throw_invalid("stream", join("one of GPU ", index_, ", which the engine uses"),
                  join("one of GPU ", found));
  }
  /// Makes the device current in the calling thread, where its kernels are about to be launched.
  void use() const { KVTIER_CUDA_CHECK(cudaSetDevice(index_)); }

  [[nodiscard]] Buffer allocate_device(std::size_t bytes) const {
    const MemoryInfo info = memory();
    void* data = nullptr;
    const cudaError_t status =
        bytes > info.total_bytes ? cudaErrorMemoryAllocation : cudaMalloc(&data, bytes);
    if (status == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      throw_error(ErrorCode::kResourceExhausted, "device memory: wanted ", bytes, " bytes, found ",
                  info.free_bytes, " free of ", info.total_bytes);
    }
    check(status, "cudaMalloc(&data, bytes)");
    return {static_cast<std::byte*>(data), bytes, free_memory<cudaFree>, nullptr};
  }

  int index_;
  std::string name_;
  EventPool<CudaEvent> events_;
};

/// Returns whether a device fits; leaves it current in the calling thread if it does.
bool usable(int index, cudaDeviceProp& properties, std::string& why_not) {
  cudaError_t status = cudaGetDeviceProperties(&properties, index);
  if (status == cudaSuccess && properties.major < kMinComputeCapability) {
    why_not = std::string(properties.name) + ": expected compute capability " +
              std::to_string(kMinComputeCapability) + ".0 or later, found " +
              std::to_string(properties.major) + "." + std::to_string(properties.minor);
    return false;
  }
  int same_pointer = 0;
  if (status == cudaSuccess) status = cudaSetDevice(index);
  if (status == cudaSuccess) {
    status =
        cudaDeviceGetAttribute(&same_pointer, cudaDevAttrCanUseHostPointerForRegisteredMem, index);
  }
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    why_not = "GPU " + std::to_string(index) + ": " + cudaGetErrorString(status);
    return false;
  }
  if (same_pointer == 0) {
    why_not = std::string(properties.name) + ": cannot read registered host memory in place";
    return false;
  }
  if (has_kernel_image(why_not)) return true;
  why_not = std::string(properties.name) + ": " + why_not;
  return false;
}

}  // namespace

UsableDevice find_usable_device(std::string& why_not) {
  UsableDevice found;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    static_cast<void>(cudaGetLastError());
    why_not = status != cudaSuccess ? cudaGetErrorString(status) : "no CUDA device found";
    return found;
  }
  for (int index = 0; index < count && found.index < 0; ++index) {
    cudaDeviceProp properties;
    if (!usable(index, properties, why_not)) continue;
    found.index = index;
    found.name = properties.name;
    found.multiprocessors = properties.multiProcessorCount;
    std::memcpy(found.uuid.data(), properties.uuid.bytes, found.uuid.size());
  }
  return found;
}

std::unique_ptr<Device> make_cuda_device(std::string& why_not) {
  static std::atomic<bool> made_before = false;
  const UsableDevice found = find_usable_device(why_not);
  if (found.index < 0) {
    if (!made_before) return nullptr;
    throw_error(ErrorCode::kInternal, "a GPU that this process has used is lost: ", why_not);
  }
  auto device = std::make_unique<CudaDevice>(found);
  made_before = true;
  return device;
}

}  // namespace kvtier::transfer::cuda
