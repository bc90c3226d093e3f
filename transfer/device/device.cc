#include "transfer/device/device.h"

#include "kvtier/error.h"

#include "transfer/device/device_cpu.h"
#include "transfer/device/device_cuda.h"
#include "transfer/device/with_cuda.h"

#include <string>

namespace kvtier::transfer {

bool has_cuda_half() { return kWithCuda; }

std::unique_ptr<Device> make_device(Backend wanted,
                                    const std::function<void(LogLevel, std::string_view)>& log) {
  if (wanted == Backend::kCpu) return cpu::make_cpu_device();

  std::string why_not = "CUDA backend not compiled in";
  if constexpr (kWithCuda) {
    if (std::unique_ptr<Device> device = cuda::make_cuda_device(why_not)) return device;
    why_not = "no usable GPU: " + why_not;
  }
  if (wanted == Backend::kCuda) throw Error(ErrorCode::kUnimplemented, why_not);
  if (log) log(kWithCuda ? LogLevel::kWarning : LogLevel::kDebug, why_not + "; using the CPU");
  return cpu::make_cpu_device();
}

}  // namespace kvtier::transfer
