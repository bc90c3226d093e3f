// Tutorial 03: a decode step as a CUDA graph, captured once and replayed while the sequence grows.
// Needs a GPU; exits with 77 where there is none. docs/tutorials/03-graphs.md explains it.

#include "kvtier/engine.h"
#include "kvtier/error.h"

#include "tutorials/tensors.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

namespace {

constexpr int kNoGpu = 77;
constexpr std::int64_t kPrompt = 4000;
constexpr int kReplays = 100;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// A tensor on the device, at an address that the graph keeps.
class DeviceTensor {
 public:
  explicit DeviceTensor(const tutorial::Tensor& host)
      : view_(host.view()), bytes_(host.values().size() * sizeof(float)) {
    check(cudaMalloc(&data_, bytes_));
    view_.space = kvtier::MemorySpace::kDevice;
  }
  DeviceTensor(const DeviceTensor&) = delete;  // owns the memory
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  ~DeviceTensor() { (void)cudaFree(data_); }

  [[nodiscard]] kvtier::TensorView view() const {
    kvtier::TensorView view = view_;
    view.data = data_;
    return view;
  }
  [[nodiscard]] kvtier::MutableTensorView output() const {
    kvtier::MutableTensorView view(data_, view_.dtype,
                                   {view_.shape[0], view_.shape[1], view_.shape[2]},
                                   kvtier::MemorySpace::kDevice);
    return view;
  }
  void upload(const tutorial::Tensor& host, cudaStream_t stream) const {
    check(cudaMemcpyAsync(data_, host.values().data(), bytes_, cudaMemcpyHostToDevice, stream));
    check(cudaStreamSynchronize(stream));
  }
  void download(tutorial::Tensor& host, cudaStream_t stream) const {
    check(cudaMemcpyAsync(host.row(0, 0), data_, bytes_, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
  }

 private:
  kvtier::TensorView view_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace

int main() try {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: skipped\n");
    return kNoGpu;
  }
  using tutorial::Tensor;
  kvtier::Config config;
  config.backend = kvtier::Backend::kCuda;
  config.model = {.layers = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 64};
  config.memory.host_bytes = 32 * kvtier::MiB;
  config.memory.max_session_tokens = 8192;
  config.retrieval.top_k = 256;
  kvtier::Engine engine(config);
  kvtier::Session session = engine.open(), eager = engine.open();
  const Tensor keys = Tensor::random(kPrompt, 2, 64, 1), values = Tensor::random(kPrompt, 2, 64, 2);
  session.append(0, keys.view(), values.view());
  eager.append(0, keys.view(), values.view());

  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Tensor query(1, 8, 64), token(1, 2, 64), out(1, 8, 64), expected(1, 8, 64);
  const DeviceTensor device_query(query), device_token(token), device_out(out);
  kvtier::DecodeInputs inputs;
  inputs.query = device_query.view();
  inputs.key = device_token.view();
  inputs.value = device_token.view();
  kvtier::AttendOutputs outputs;
  outputs.out = device_out.output();

  // Room for the tokens to come, then the capture. Nothing runs yet.
  session.reserve(kReplays, kvtier::StreamRef::of(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t step = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  session.decode(0, inputs, outputs, kvtier::StreamRef::of(stream));
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&step, graph, 0));

  // Each replay appends one token; the host learns of it by advance().
  for (unsigned i = 0; i < kReplays; ++i) {
    query = Tensor::random(1, 8, 64, 100 + i, 2.0F);
    token = Tensor::random(1, 2, 64, 300 + i);
    device_query.upload(query, stream);
    device_token.upload(token, stream);
    check(cudaGraphLaunch(step, stream));
    session.advance(0, 1);
  }
  device_out.download(out, stream);

  // The same steps without a graph.
  for (unsigned i = 0; i < kReplays; ++i) {
    query = Tensor::random(1, 8, 64, 100 + i, 2.0F);
    token = Tensor::random(1, 2, 64, 300 + i);
    kvtier::DecodeInputs host;
    host.query = query.view();
    host.key = token.view();
    host.value = token.view();
    kvtier::AttendOutputs host_outputs;
    host_outputs.out = expected.view();
    eager.decode(0, host, host_outputs);
  }
  const double error = tutorial::relative_error(out, expected);
  std::printf("%lld tokens after %d replays: differs from eager steps by %.1e\n",
              static_cast<long long>(session.length()), kReplays, error);
  check(cudaGraphExecDestroy(step));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  return error < 1e-5 && session.length() == eager.length() ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
