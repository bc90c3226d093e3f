#include "benchmarks/host_regions_cuda.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>
#include <thread>

namespace kvtier::benchmarks {
namespace {

constexpr std::size_t kMi = std::size_t{1} << 20;
constexpr std::size_t kGi = std::size_t{1} << 30;

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")");
}
#define CHECK_CUDA(call) check(call, #call)

/// A function of the driver, so that the program starts where there is none.
template <typename F>
F* driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &function, 12080, cudaEnableDefault, &found), name);
  if (function == nullptr) throw std::runtime_error(std::string(name) + ": not in this driver");
  return reinterpret_cast<F*>(function);
}

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver<decltype(cuGetErrorName)>("cuGetErrorName")(result, &text);
  throw std::runtime_error(std::string(call) + ": " + (text != nullptr ? text : "unknown error"));
}

void touch(std::byte* data, std::size_t bytes) {
  constexpr std::size_t kPiece = 16 * kMi;
  on_all_cores((bytes + kPiece - 1) / kPiece, [=](std::size_t piece) {
    const std::size_t end = std::min(bytes, (piece + 1) * kPiece);
    for (std::size_t i = piece * kPiece; i < end; i += 4096) {
      *static_cast<volatile std::byte*>(data + i) = std::byte{0};
    }
  });
}

/// Share of the mapping at `data` that is in transparent huge pages or hugetlb pages.
double huge_share(const std::byte* data) {
  std::ifstream smaps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(data);
  std::string line;
  bool inside = false;
  double size = 0.0, huge = 0.0;
  while (std::getline(smaps, line)) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      if (inside) break;
      inside = begin <= wanted && wanted < end;
      continue;
    }
    if (!inside) continue;
    std::istringstream field(line);
    std::string key;
    double kib = 0.0;
    field >> key >> kib;
    if (key == "Rss:") size += kib;
    if (key == "AnonHugePages:") huge += kib;
    if (key == "Private_Hugetlb:" || key == "Shared_Hugetlb:") {
      size += kib;
      huge += kib;
    }
  }
  return size > 0.0 ? huge / size : -1.0;
}

std::byte* map(Region& region, std::size_t bytes, int flags) {
  const std::size_t slack = (flags & MAP_HUGETLB) != 0 ? 0 : kGi;
  void* const base = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (base == MAP_FAILED) throw std::runtime_error("mmap: refused");
  region.undo.emplace_back([=] { munmap(base, bytes + slack); });
  const auto address = (reinterpret_cast<std::uintptr_t>(base) + slack) / kGi * kGi;
  return slack == 0 ? static_cast<std::byte*>(base) : reinterpret_cast<std::byte*>(address);
}

void pin(Region& region, std::byte* data, std::size_t bytes, std::size_t piece, unsigned flags) {
  for (std::size_t i = 0; i < bytes; i += piece) {
    CHECK_CUDA(cudaHostRegister(data + i, std::min(piece, bytes - i), flags));
    region.undo.emplace_back([p = data + i] { cudaHostUnregister(p); });
  }
}

void whole(Region& region, std::byte* data, std::size_t bytes) {
  region.chunks = {data};
  region.chunk_bytes = bytes;
}

Method host_alloc(std::string name, std::size_t chunk, unsigned flags, std::string what) {
  return {std::move(name), std::move(what), [=](Region& region, std::size_t bytes) {
            region.chunk_bytes = chunk == 0 ? bytes : chunk;
            for (std::size_t i = 0; i < bytes; i += region.chunk_bytes) {
              void* data = nullptr;
              CHECK_CUDA(cudaHostAlloc(&data, region.chunk_bytes, flags));
              region.undo.emplace_back([=] { cudaFreeHost(data); });
              region.chunks.push_back(static_cast<std::byte*>(data));
            }
          }};
}

Method registered(std::string name, int advice, std::size_t piece, unsigned flags,
                  std::string what) {
  return {std::move(name), std::move(what), [=](Region& region, std::size_t bytes) {
            std::byte* const data = map(region, bytes, 0);
            if (madvise(data, bytes, advice) != 0) throw std::runtime_error("madvise: refused");
            touch(data, bytes);
            region.huge_share = huge_share(data);
            pin(region, data, bytes, piece == 0 ? bytes : piece, flags);
            whole(region, data, bytes);
          }};
}

/// Asks for `count` huge pages of a size for the time of the region.
void reserve_huge_pages(Region& region, std::size_t page, std::size_t count) {
  const std::string path =
      "/sys/kernel/mm/hugepages/hugepages-" + std::to_string(page / 1024) + "kB/nr_hugepages";
  const auto write = [path](std::size_t n) { std::ofstream(path) << n; };
  write(count);
  region.undo.emplace_back([=] { write(0); });
  std::size_t got = 0;
  std::ifstream(path) >> got;
  if (got < count) {
    throw std::runtime_error("nr_hugepages: asked for " + std::to_string(count) + " of " +
                             std::to_string(page / kMi) + " MiB, found " + std::to_string(got));
  }
}

Method hugetlb(std::string name, std::size_t page, int log2, std::string what) {
  return {std::move(name), std::move(what), [=](Region& region, std::size_t bytes) {
            reserve_huge_pages(region, page, bytes / page);
            std::byte* const data = map(region, bytes, MAP_HUGETLB | (log2 << MAP_HUGE_SHIFT));
            touch(data, bytes);
            region.huge_share = huge_share(data);
            pin(region, data, bytes, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
            whole(region, data, bytes);
          }};
}

CUmemAllocationProp host_numa() {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
  prop.location.id = 0;
  return prop;
}

Method virtual_memory(std::string name, std::size_t piece, std::string what) {
  return {std::move(name), std::move(what), [=](Region& region, std::size_t bytes) {
            const CUmemAllocationProp prop = host_numa();
            std::size_t granularity = 0;
            check_driver(
                driver<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity")(
                    &granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                "cuMemGetAllocationGranularity");
            CUdeviceptr base = 0;
            check_driver(driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(&base, bytes,
                                                                                      kGi, 0, 0),
                         "cuMemAddressReserve");
            region.undo.emplace_back(
                [=] { driver<decltype(cuMemAddressFree)>("cuMemAddressFree")(base, bytes); });
            for (std::size_t i = 0; i < bytes; i += piece) {
              CUmemGenericAllocationHandle handle = 0;
              check_driver(driver<decltype(cuMemCreate)>("cuMemCreate")(&handle, piece, &prop, 0),
                           "cuMemCreate");
              const CUresult mapped =
                  driver<decltype(cuMemMap)>("cuMemMap")(base + i, piece, 0, handle, 0);
              driver<decltype(cuMemRelease)>("cuMemRelease")(handle);
              check_driver(mapped, "cuMemMap");
              region.undo.emplace_back(
                  [=] { driver<decltype(cuMemUnmap)>("cuMemUnmap")(base + i, piece); });
            }
            CUmemAccessDesc access[2] = {};
            access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
            access[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            access[1].location = prop.location;
            access[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            check_driver(driver<decltype(cuMemSetAccess)>("cuMemSetAccess")(base, bytes, access, 2),
                         "cuMemSetAccess");
            whole(region, reinterpret_cast<std::byte*>(base), bytes);
            region.huge_share = huge_share(region.chunks[0]);
          }};
}

Method pool(std::string name, cudaMemLocationType type, std::string what) {
  return {std::move(name), std::move(what), [=](Region& region, std::size_t bytes) {
            cudaMemPoolProps props{};
            props.allocType = cudaMemAllocationTypePinned;
            props.location.type = type;
            props.location.id = 0;
            cudaMemPool_t handle = nullptr;
            CHECK_CUDA(cudaMemPoolCreate(&handle, &props));
            region.undo.emplace_back([=] { cudaMemPoolDestroy(handle); });
            cudaMemAccessDesc access{};
            access.location.type = cudaMemLocationTypeDevice;
            access.flags = cudaMemAccessFlagsProtReadWrite;
            CHECK_CUDA(cudaMemPoolSetAccess(handle, &access, 1));
            void* data = nullptr;
            CHECK_CUDA(cudaMallocFromPoolAsync(&data, bytes, handle, nullptr));
            region.undo.emplace_back([=] {
              cudaFreeAsync(data, nullptr);
              cudaStreamSynchronize(nullptr);
            });
            CHECK_CUDA(cudaStreamSynchronize(nullptr));
            whole(region, static_cast<std::byte*>(data), bytes);
            region.huge_share = huge_share(region.chunks[0]);
          }};
}

/// Managed memory that lives on the host and that the device reads through a mapping. Stays within
/// the free device memory: asking for more managed memory than that can stall a GPU.
void obtain_managed(Region& region, std::size_t bytes, bool prefetch, bool read_mostly) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (bytes > free_bytes / 2) {
    throw std::runtime_error("managed memory: expected at most half of the free device memory, " +
                             std::to_string(free_bytes / 2) + " bytes, found " +
                             std::to_string(bytes));
  }
  void* data = nullptr;
  CHECK_CUDA(cudaMallocManaged(&data, bytes, cudaMemAttachGlobal));
  region.undo.emplace_back([=] { cudaFree(data); });
  cudaMemLocation host{};
  host.type = cudaMemLocationTypeHost;
  cudaMemLocation device{};
  device.type = cudaMemLocationTypeDevice;
  CHECK_CUDA(cudaMemAdvise(data, bytes, cudaMemAdviseSetPreferredLocation, host));
  CHECK_CUDA(cudaMemAdvise(data, bytes, cudaMemAdviseSetAccessedBy, device));
  if (prefetch) {
    CHECK_CUDA(cudaMemPrefetchAsync(data, bytes, host, 0, nullptr));
    CHECK_CUDA(cudaStreamSynchronize(nullptr));
  } else {
    touch(static_cast<std::byte*>(data), bytes);
  }
  if (read_mostly) CHECK_CUDA(cudaMemAdvise(data, bytes, cudaMemAdviseSetReadMostly, host));
  whole(region, static_cast<std::byte*>(data), bytes);
  region.huge_share = huge_share(region.chunks[0]);
}

Method managed(std::string name, bool prefetch, bool read_mostly, std::string what) {
  return {std::move(name), "managed memory, preferred on the host, " + what,
          [=](Region& region, std::size_t bytes) {
            obtain_managed(region, bytes, prefetch, read_mostly);
          }};
}

std::vector<Method> make_methods() {
  constexpr unsigned kBoth = cudaHostRegisterPortable | cudaHostRegisterMapped;
  std::vector<Method> all = {
      host_alloc("host_alloc", 0, cudaHostAllocPortable | cudaHostAllocMapped,
                 "cudaHostAlloc, one allocation"),
      host_alloc("host_alloc_1g", kGi, cudaHostAllocPortable | cudaHostAllocMapped,
                 "cudaHostAlloc, 1 GiB each"),
      host_alloc("host_alloc_2m", 2 * kMi, cudaHostAllocPortable | cudaHostAllocMapped,
                 "cudaHostAlloc, 2 MiB each"),
      host_alloc("host_alloc_wc", kGi, cudaHostAllocPortable | cudaHostAllocWriteCombined,
                 "cudaHostAlloc, write combined, 1 GiB each"),
      registered("register_4k", MADV_NOHUGEPAGE, 512 * kMi, kBoth,
                 "mmap, small pages, cudaHostRegister of 512 MiB each"),
      registered("register_thp", MADV_HUGEPAGE, 512 * kMi, kBoth,
                 "mmap, MADV_HUGEPAGE, cudaHostRegister of 512 MiB each"),
      registered("register_thp_one", MADV_HUGEPAGE, 0, kBoth,
                 "mmap, MADV_HUGEPAGE, one cudaHostRegister"),
      registered("register_thp_2m", MADV_HUGEPAGE, 2 * kMi, kBoth,
                 "mmap, MADV_HUGEPAGE, cudaHostRegister of 2 MiB each"),
      registered("register_thp_default", MADV_HUGEPAGE, 512 * kMi, cudaHostRegisterDefault,
                 "as register_thp, flags: default"),
      registered("register_thp_readonly", MADV_HUGEPAGE, 512 * kMi,
                 kBoth | cudaHostRegisterReadOnly, "as register_thp, flags: + read only"),
      registered("register_thp_io", MADV_HUGEPAGE, 512 * kMi, kBoth | cudaHostRegisterIoMemory,
                 "as register_thp, flags: + I/O memory"),
      hugetlb("hugetlb_2m", 2 * kMi, 21, "mmap, MAP_HUGETLB 2 MiB, one cudaHostRegister"),
      hugetlb("hugetlb_1g", kGi, 30, "mmap, MAP_HUGETLB 1 GiB, one cudaHostRegister"),
      virtual_memory("vmm_1g", kGi, "cuMemCreate on the host's NUMA node 0, 1 GiB each"),
      virtual_memory("vmm_2m", 2 * kMi, "cuMemCreate on the host's NUMA node 0, 2 MiB each"),
      pool("pool_numa", cudaMemLocationTypeHostNuma, "memory pool on the host's NUMA node 0"),
      pool("pool_host", cudaMemLocationTypeHost, "memory pool on the host"),
  };
  all.push_back(managed("managed_touch", false, false, "touched by the CPU"));
  all.push_back(managed("managed_prefetch", true, false, "prefetched to the host"));
  all.push_back(managed("managed_read_mostly", true, true, "prefetched, then read mostly"));
  all.push_back({"device", "cudaMalloc: the same gather out of device memory",
                 [](Region& region, std::size_t bytes) {
                   void* data = nullptr;
                   CHECK_CUDA(cudaMalloc(&data, bytes));
                   region.undo.emplace_back([=] { cudaFree(data); });
                   whole(region, static_cast<std::byte*>(data), bytes);
                 }});
  return all;
}

}  // namespace

const std::vector<Method>& methods() {
  static const std::vector<Method> all = make_methods();
  return all;
}

void on_all_cores(std::size_t count, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1U, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < count; i = next++) work(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kvtier::benchmarks
