#include "kvtier/error.h"

#include "services/tools/stress/device.h"

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

namespace kvtier::services {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    throw Error(ErrorCode::kUnimplemented,
                std::string("no usable GPU: ") + cudaGetErrorString(error));
  }
  const ErrorCode code =
      error == cudaErrorMemoryAllocation ? ErrorCode::kResourceExhausted : ErrorCode::kInternal;
  throw Error(code, std::string(call) + ": expected success, found " + cudaGetErrorName(error) +
                        " (" + cudaGetErrorString(error) + ")");
}

class CudaTensorDevice final : public TensorDevice {
 public:
  CudaTensorDevice() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~CudaTensorDevice() override {
    drop_graph();
    static_cast<void>(cudaStreamDestroy(stream_));
    for (const Mirror& mirror : mirrors_) {
      static_cast<void>(cudaFree(mirror.device));
      static_cast<void>(cudaFreeHost(mirror.host));
    }
  }

  [[nodiscard]] Mirror allocate(std::size_t bytes) override {
    mirrors_.push_back({.bytes = bytes});
    Mirror& mirror = mirrors_.back();
    void* memory = nullptr;
    check(cudaMallocHost(&memory, bytes), "cudaMallocHost");
    mirror.host = static_cast<std::byte*>(memory);
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    mirror.device = static_cast<std::byte*>(memory);
    return mirror;
  }
  void upload(const Mirror& mirror, std::size_t bytes) override {
    check(cudaMemcpyAsync(mirror.device, mirror.host, bytes, cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync");
  }
  void download(const Mirror& mirror, std::size_t bytes) override {
    check(cudaMemcpyAsync(mirror.host, mirror.device, bytes, cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
  }
  void synchronize() override { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  [[nodiscard]] StreamRef stream() const override { return StreamRef::of(stream_); }
  [[nodiscard]] MemorySpace space() const override { return MemorySpace::kDevice; }

  void set_step(std::function<void()> step) override {
    drop_graph();
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    try {
      step();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream_, &graph));
      if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    const cudaError_t made = cudaGraphInstantiate(&graph_, graph, 0);
    static_cast<void>(cudaGraphDestroy(graph));
    check(made, "cudaGraphInstantiate");
  }
  void run_step() override { check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch"); }
  [[nodiscard]] bool replays() const override { return true; }

  [[nodiscard]] std::optional<std::size_t> free_bytes() const override {
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  }

 private:
  void drop_graph() {
    if (graph_ != nullptr) static_cast<void>(cudaGraphExecDestroy(graph_));
    graph_ = nullptr;
  }

  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  std::vector<Mirror> mirrors_;
};

}  // namespace

std::unique_ptr<TensorDevice> make_cuda_tensor_device() {
  return std::make_unique<CudaTensorDevice>();
}

}  // namespace kvtier::services
