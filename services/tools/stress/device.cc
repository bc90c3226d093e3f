#include "services/tools/stress/device.h"

#include "include/types/failure.h"

#include <new>
#include <utility>
#include <vector>

namespace kvtier::services {
namespace {

class CpuTensorDevice final : public TensorDevice {
 public:
  [[nodiscard]] Mirror allocate(std::size_t bytes) override {
    std::unique_ptr<std::byte[]> memory(new (std::nothrow) std::byte[bytes]);
    if (!memory) {
      throw_error(ErrorCode::kResourceExhausted, "host memory: wanted ", bytes,
                  " bytes, found less");
    }
    memory_.push_back(std::move(memory));
    std::byte* const data = memory_.back().get();
    return {.host = data, .device = data, .bytes = bytes};
  }
  void upload(const Mirror& /*mirror*/, std::size_t /*bytes*/) override {}
  void download(const Mirror& /*mirror*/, std::size_t /*bytes*/) override {}
  void synchronize() override {}
  [[nodiscard]] StreamRef stream() const override { return {}; }
  [[nodiscard]] MemorySpace space() const override { return MemorySpace::kHost; }
  void set_step(std::function<void()> step) override { step_ = std::move(step); }
  void run_step() override { step_(); }
  [[nodiscard]] bool replays() const override { return false; }
  [[nodiscard]] std::optional<std::size_t> free_bytes() const override { return {}; }

 private:
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::function<void()> step_;
};

}  // namespace

std::unique_ptr<TensorDevice> make_tensor_device(Backend backend) {
#ifdef KVTIER_WITH_CUDA
  if (backend == Backend::kCuda) return make_cuda_tensor_device();
#endif
  static_cast<void>(backend);
  return std::make_unique<CpuTensorDevice>();
}

}  // namespace kvtier::services
