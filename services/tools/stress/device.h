#pragma once

#include "kvtier/config.h"
#include "kvtier/tensor.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

namespace kvtier::services {

/// Memory that is on the host and, where there is a GPU, again on it. On the CPU both pointers are
/// the same.
struct Mirror {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  std::size_t bytes = 0;
};

/// Where an engine in a program would have its tensors: in host memory with the CPU backend; on the
/// GPU, behind a stream, with the CUDA backend.
class TensorDevice {
 public:
  TensorDevice() = default;
  TensorDevice(const TensorDevice&) = delete;  // owns memory that mirrors point to
  TensorDevice& operator=(const TensorDevice&) = delete;
  virtual ~TensorDevice() = default;

  /// Allocates a mirror, which lives as long as the device. Throws `kResourceExhausted`.
  [[nodiscard]] virtual Mirror allocate(std::size_t bytes) = 0;
  /// Enqueues copies of the first `bytes` bytes.
  virtual void upload(const Mirror& mirror, std::size_t bytes) = 0;
  virtual void download(const Mirror& mirror, std::size_t bytes) = 0;
  virtual void synchronize() = 0;
  /// Returns the stream of calls that take tensors of this device; none on the CPU.
  [[nodiscard]] virtual StreamRef stream() const = 0;
  [[nodiscard]] virtual MemorySpace space() const = 0;

  /// Takes the calls of one step. On the GPU they are captured in a graph: each `run` then replays
  /// it, and the sessions must be advanced (`Session::advance`).
  virtual void set_step(std::function<void()> step) = 0;
  /// Enqueues one step.
  virtual void run_step() = 0;
  [[nodiscard]] virtual bool replays() const = 0;

  [[nodiscard]] virtual std::optional<std::size_t> free_bytes() const = 0;
};

/// Makes the device of an engine's backend, `kCpu` or `kCuda`.
[[nodiscard]] std::unique_ptr<TensorDevice> make_tensor_device(Backend backend);

/// The GPU's half of `make_tensor_device`; only in builds with CUDA.
[[nodiscard]] std::unique_ptr<TensorDevice> make_cuda_tensor_device();

}  // namespace kvtier::services
