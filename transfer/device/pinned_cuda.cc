#include "transfer/device/pinned_cuda.h"

#include "transfer/device/cuda_check.h"
#include "transfer/device/driver_cuda.h"
#include "transfer/device/pinned_pages.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::transfer::cuda {
namespace {

constexpr std::size_t kHugePage = 2 * MiB;
/// Virtual memory is created in pieces, so that progress can be reported.
constexpr std::size_t kPiece = 1 * GiB;

std::string words(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
}

class Registrar final : public Pinner {
 public:
  [[nodiscard]] bool pin(std::byte* data, std::size_t bytes, std::string& why_not) override {
    const cudaError_t status =
        cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (status == cudaSuccess) return true;
    static_cast<void>(cudaGetLastError());
    why_not = words(status);
    return false;
  }
  void unpin(std::byte* data) noexcept override {
    const OutsideCapture guard;
    check_in_destructor(cudaHostUnregister(data));
  }
};

/// Lives as long as the process: buffers are freed through it.
Pinner& registrar() {
  static Registrar instance;
  return instance;
}

void free_host(void* /*context*/, std::byte* data, std::size_t /*bytes*/) noexcept {
  const OutsideCapture guard;
  check_in_destructor(cudaFreeHost(data));
}

Buffer driver_memory(std::size_t bytes, const PinOptions& options, PinRefusal& refusal) {
  void* data = nullptr;
  const cudaError_t status =
      bytes > physical_bytes()
          ? cudaErrorMemoryAllocation
          : cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    refusal = {.why = words(status), .no_memory = status == cudaErrorMemoryAllocation};
    return {};
  }
  Buffer memory(static_cast<std::byte*>(data), bytes, free_host, nullptr);
  if (options.progress) options.progress(bytes, bytes);
  return memory;
}

void free_managed(void* /*context*/, std::byte* data, std::size_t /*bytes*/) noexcept {
  const OutsideCapture guard;
  check_in_destructor(cudaFree(data));
}

/// Pages that the host's threads touch first are of 2 MiB where they can be, and stay where they
/// are: the device reads and writes them through its own mapping.
Buffer managed_memory(int device, int node, std::size_t bytes, const PinOptions& options,
                      PinRefusal& refusal) {
  int concurrent = 0;
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  KVTIER_CUDA_CHECK(
      cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, device));
  KVTIER_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (concurrent == 0) {
    refusal = {.why = "the device cannot read it while the host does"};
    return {};
  }
  if (bytes > physical_bytes()) {
    refusal = {.why = "not all of it to be had", .no_memory = true};
    return {};
  }
  if (!options.only && bytes > total_bytes) {
    refusal = {.why =
                   "more than the " + std::to_string(total_bytes) + " bytes that the device has"};
    return {};
  }
  void* data = nullptr;
  const cudaError_t status = cudaMallocManaged(&data, bytes, cudaMemAttachGlobal);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    refusal = {.why = words(status)};
    return {};
  }
  Buffer memory(static_cast<std::byte*>(data), bytes, free_managed, nullptr);
  cudaMemLocation host{};
  host.type = node >= 0 ? cudaMemLocationTypeHostNuma : cudaMemLocationTypeHost;
  host.id = std::max(0, node);
  cudaMemLocation reader{};
  reader.type = cudaMemLocationTypeDevice;
  reader.id = device;
  KVTIER_CUDA_CHECK(cudaMemAdvise(data, bytes, cudaMemAdviseSetPreferredLocation, host));
  KVTIER_CUDA_CHECK(cudaMemAdvise(data, bytes, cudaMemAdviseSetAccessedBy, reader));
  touch_pages(memory.data(), bytes, options.threads, [&](std::size_t touched) {
    if (options.progress) options.progress(touched, bytes);
  });
  return memory;
}

/// Looked up once, so that freeing looks up nothing.
struct Driver {
#define KVTIER_DRIVER_FUNCTION(name) \
  decltype(::name)* name = driver_function<decltype(::name)>(#name)
  KVTIER_DRIVER_FUNCTION(cuGetErrorName);
  KVTIER_DRIVER_FUNCTION(cuMemAddressReserve);
  KVTIER_DRIVER_FUNCTION(cuMemAddressFree);
  KVTIER_DRIVER_FUNCTION(cuMemCreate);
  KVTIER_DRIVER_FUNCTION(cuMemRelease);
  KVTIER_DRIVER_FUNCTION(cuMemMap);
  KVTIER_DRIVER_FUNCTION(cuMemUnmap);
  KVTIER_DRIVER_FUNCTION(cuMemSetAccess);
#undef KVTIER_DRIVER_FUNCTION
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

/// A range of addresses and the pieces mapped so far, taken apart unless it is released.
class MappedRange {
 public:
  explicit MappedRange(std::size_t bytes) : bytes_(bytes) {
    status_ = driver().cuMemAddressReserve(&base_, bytes, kHugePage, 0, 0);
    if (status_ != CUDA_SUCCESS) base_ = 0;
  }
  MappedRange(CUdeviceptr base, std::size_t bytes) : base_(base), bytes_(bytes), mapped_(bytes) {}
  MappedRange(const MappedRange&) = delete;  // owns the range
  MappedRange& operator=(const MappedRange&) = delete;
  ~MappedRange() {
    if (base_ == 0) return;
    if (mapped_ != 0) static_cast<void>(driver().cuMemUnmap(base_, mapped_));
    static_cast<void>(driver().cuMemAddressFree(base_, bytes_));
  }

  /// Creates and maps the next piece.
  CUresult map_next(const CUmemAllocationProp& prop) {
    if (status_ != CUDA_SUCCESS) return status_;
    const std::size_t part = std::min(kPiece, bytes_ - mapped_);
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = driver().cuMemCreate(&handle, part, &prop, 0);
    if (result != CUDA_SUCCESS) return result;
    result = driver().cuMemMap(base_ + mapped_, part, 0, handle, 0);
    static_cast<void>(driver().cuMemRelease(handle));  // the mapping keeps it
    if (result == CUDA_SUCCESS) mapped_ += part;
    return result;
  }
  CUresult allow(std::span<const CUmemAccessDesc> who) {
    return driver().cuMemSetAccess(base_, bytes_, who.data(), who.size());
  }
  [[nodiscard]] std::size_t mapped() const { return mapped_; }
  [[nodiscard]] std::byte* release() {
    return reinterpret_cast<std::byte*>(std::exchange(base_, 0));
  }

 private:
  CUdeviceptr base_ = 0;
  std::size_t bytes_;
  std::size_t mapped_ = 0;
  CUresult status_ = CUDA_SUCCESS;
};

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

void free_range(void* /*context*/, std::byte* data, std::size_t bytes) noexcept {
  const OutsideCapture guard;
  const MappedRange range(reinterpret_cast<CUdeviceptr>(data), whole_pages(bytes));
}

Buffer node_memory(int device, int node, std::size_t bytes, const PinOptions& options,
                   PinRefusal& refusal) {
  if (bytes > physical_bytes()) {
    refusal = {.why = "not all of it to be had", .no_memory = true};
    return {};
  }
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
  prop.location.id = std::max(0, node);
  const auto refused = [&](CUresult result) {
    const char* name = nullptr;
    static_cast<void>(driver().cuGetErrorName(result, &name));
    refusal = {.why = name != nullptr ? name : "unknown error",
               .no_memory = result == CUDA_ERROR_OUT_OF_MEMORY};
    return Buffer();
  };
  const std::size_t mapped = whole_pages(bytes);
  MappedRange range(mapped);
  while (range.mapped() < mapped) {
    const CUresult result = range.map_next(prop);
    if (result != CUDA_SUCCESS) return refused(result);
    if (options.progress) options.progress(std::min(range.mapped(), bytes), bytes);
  }
  std::array<CUmemAccessDesc, 2> who{};
  who[0].location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  who[1].location = prop.location;
  for (CUmemAccessDesc& one : who) one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult result = range.allow(who);
  if (result != CUDA_SUCCESS) return refused(result);
  return {range.release(), bytes, free_range, nullptr};
}

}  // namespace

Buffer allocate_pinned(int device, std::size_t bytes, const PinOptions& options) {
  int node = -1;
  KVTIER_CUDA_CHECK(cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, device));
  const auto registered = [&](PageKind kind) {
    return [&, kind](PinRefusal& refusal) {
      return pinned_pages(registrar(), kind, node, bytes, options, refusal);
    };
  };
  const PinMethod managed{"managed memory", [&](PinRefusal& refusal) {
                            return managed_memory(device, node, bytes, options, refusal);
                          }};
  const PinMethod transparent{"registered pages", registered(PageKind::kTransparent)};
  const PinMethod reserved{"reserved huge pages", registered(PageKind::kReserved)};
  const PinMethod by_driver{"the driver's memory", [&](PinRefusal& refusal) {
                              return driver_memory(bytes, options, refusal);
                            }};
  const PinMethod of_node{"memory of the NUMA node", [&](PinRefusal& refusal) {
                            return node_memory(device, node, bytes, options, refusal);
                          }};
  std::vector<PinMethod> order;
  switch (options.allocation) {
    case HostAllocation::kAuto:
    case HostAllocation::kManaged:
      order = {managed, transparent, by_driver};
      break;
    case HostAllocation::kRegistered:
      order = {transparent, by_driver};
      break;
    case HostAllocation::kHugePages:
      order = {reserved, transparent, by_driver};
      break;
    case HostAllocation::kDriver:
      order = {by_driver, transparent};
      break;
    case HostAllocation::kNumaNode:
      order = {of_node, transparent, by_driver};
      break;
  }
  if (options.only) order.resize(1);
  return first_pinned(order, bytes, options.log);
}

}  // namespace kvtier::transfer::cuda
