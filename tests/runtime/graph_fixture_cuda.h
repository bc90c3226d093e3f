#pragma once

#include "runtime/engine_fixture.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

/// A caller's streams, device tensors and graphs.
namespace kvtier::testing {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// A stream of the caller's.
class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  OwnStream(const OwnStream&) = delete;  // owns the stream
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }

  [[nodiscard]] StreamRef ref() const { return StreamRef::of(stream_); }
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void synchronize() const { check(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Device memory.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes));
    check(cudaMemset(data_, 0xA5, bytes));
    check(cudaStreamSynchronize(nullptr));  // other streams do not wait for the legacy one
  }
  explicit DeviceBytes(const std::vector<std::byte>& values) : DeviceBytes(values.size()) {
    upload(0, values.data(), bytes_);
  }
  DeviceBytes(const DeviceBytes&) = delete;  // owns the memory
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { (void)cudaFree(data_); }

  void upload(std::size_t offset, const void* from, std::size_t bytes) const {
    check(cudaMemcpy(at(offset), from, bytes, cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));
  }
  [[nodiscard]] std::byte* at(std::size_t offset = 0) const {
    return static_cast<std::byte*>(data_) + offset;
  }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  [[nodiscard]] std::vector<std::byte> download() const {
    std::vector<std::byte> values(bytes_);
    check(cudaMemcpy(values.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

/// The tensors of one call on the device, at addresses that a graph can hold on to.
struct DeviceCall {
  explicit DeviceCall(const CallTensors& host)
      : tokens(host.query.tokens()),
        kv_heads(host.key.heads()),
        query_heads(host.query.heads()),
        head_dim(host.query.n()),
        num_ids(host.ids.n),
        key(host.key.bytes()),
        value(host.value.bytes()),
        query(host.query.bytes()),
        out(host.out.bytes().size()),
        lse(host.lse.bytes().size()),
        ids(host.ids.data.size() * sizeof(std::int32_t)) {}

  [[nodiscard]] TensorView input(const DeviceBytes& bytes, int heads) const {
    return {bytes.at(), DType::kBFloat16, {tokens, heads, head_dim}, MemorySpace::kDevice};
  }
  [[nodiscard]] DecodeInputs inputs() const {
    return {.query = input(query, query_heads),
            .key = input(key, kv_heads),
            .value = input(value, kv_heads),
            .selected = {}};
  }
  [[nodiscard]] AttendInputs attend_inputs() const {
    return {.query = input(query, query_heads), .selected = {}};
  }
  [[nodiscard]] AttendOutputs outputs() const {
    return {
        .out = {out.at(), DType::kFloat32, {tokens, query_heads, head_dim}, MemorySpace::kDevice},
        .lse = {lse.at(), DType::kFloat32, {tokens, query_heads}, MemorySpace::kDevice},
        .selected = {
            ids.at(), DType::kInt32, {tokens, query_heads, num_ids}, MemorySpace::kDevice}};
  }
  /// Enqueues copies of another call's inputs over this one's.
  void take_inputs(const DeviceCall& other, cudaStream_t stream) const {
    copy(key, other.key, stream);
    copy(value, other.value, stream);
    copy(query, other.query, stream);
  }
  /// Enqueues copies of this call's results to another's.
  void give_results(const DeviceCall& other, cudaStream_t stream) const {
    copy(other.out, out, stream);
    copy(other.lse, lse, stream);
    copy(other.ids, ids, stream);
  }
  void download(CallTensors& to) const {
    check(cudaMemcpy(to.out.mutable_view().data, out.at(), out.size(), cudaMemcpyDeviceToHost));
    check(cudaMemcpy(to.lse.mutable_view().data, lse.at(), lse.size(), cudaMemcpyDeviceToHost));
    check(cudaMemcpy(to.ids.data.data(), ids.at(), ids.size(), cudaMemcpyDeviceToHost));
  }
  [[nodiscard]] bool same_results(const CallTensors& host) const {
    std::vector<std::int32_t> found(host.ids.data.size());
    check(cudaMemcpy(found.data(), ids.at(), ids.size(), cudaMemcpyDeviceToHost));
    return out.download() == host.out.bytes() && lse.download() == host.lse.bytes() &&
           found == host.ids.data;
  }

  std::int64_t tokens;
  int kv_heads, query_heads, head_dim;
  std::int64_t num_ids;
  DeviceBytes key, value, query, out, lse, ids;

 private:
  static void copy(const DeviceBytes& to, const DeviceBytes& from, cudaStream_t stream) {
    check(cudaMemcpyAsync(to.at(), from.at(), from.size(), cudaMemcpyDeviceToDevice, stream));
  }
};

/// A captured graph, ready to be launched.
class Graph {
 public:
  /// Captures what `enqueue` enqueues on the stream, in the mode that forbids the most.
  template <typename Enqueue>
  Graph(const OwnStream& stream, Enqueue&& enqueue) {
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
    try {
      enqueue();
    } catch (...) {
      (void)cudaStreamEndCapture(stream.get(), &graph_);
      if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
      throw;
    }
    check(cudaStreamEndCapture(stream.get(), &graph_));
    check(cudaGraphInstantiate(&exec_, graph_, 0));
  }
  Graph(const Graph&) = delete;  // owns the graph
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    (void)cudaGraphExecDestroy(exec_);
    (void)cudaGraphDestroy(graph_);
  }

  void launch(const OwnStream& stream) const { check(cudaGraphLaunch(exec_, stream.get())); }
  [[nodiscard]] std::size_t num_nodes() const {
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &count));
    return count;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace kvtier::testing
