// Rate at which a GPU gathers scattered 512-byte rows from host memory, by how the memory was
// obtained, how it is read, and where the rows lie. Row sets rotate: no row is read twice before a
// permutation of the whole region (or window) has been walked.

#include "benchmarks/host_gather_kernels.cuh"
#include "benchmarks/host_patterns.h"
#include "benchmarks/host_regions_cuda.h"

#include <CLI/CLI.hpp>
#include <cuda_runtime.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::benchmarks {
namespace {

using nlohmann::json;

constexpr std::size_t kGi = std::size_t{1} << 30;
constexpr int kGroup = 8;  // calls between two events
constexpr int kMaxGroups = 64;

void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
  }
}
#define CHECK_CUDA(call) check(call, #call)

struct Launch {
  int blocks = 132;
  int threads = 256;
  int batch = 16;  // rows that a warp of a ring kernel has in flight, twice
};

struct Kernel {
  std::string_view name;
  std::function<void(const Launch&, const std::byte* const*, int, uint4*)> run;
};

template <typename F>
void run_ring(F* kernel, const Launch& launch, const std::byte* const* rows, int count,
              uint4* out) {
  const auto bytes = static_cast<int>(ring_bytes(launch.threads, launch.batch));
  CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<launch.blocks, launch.threads, bytes>>>(rows, count, launch.batch, out);
}

template <Load kLoad, int kRows>
Kernel load_kernel(std::string_view name) {
  return {name, [](const Launch& launch, const std::byte* const* rows, int count, uint4* out) {
            gather_load<kLoad, kRows><<<launch.blocks, launch.threads>>>(rows, count, out);
          }};
}

template <Ahead kAhead>
Kernel ahead_kernel(std::string_view name) {
  return {name, [](const Launch& launch, const std::byte* const* rows, int count, uint4* out) {
            gather_ahead<kAhead><<<launch.blocks, launch.threads>>>(rows, count, out);
          }};
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = {
      load_kernel<Load::kPlain, 1>("load1"),
      load_kernel<Load::kPlain, 2>("load2"),
      load_kernel<Load::kPlain, 4>("load4"),
      load_kernel<Load::kPlain, 8>("load8"),
      load_kernel<Load::kHint256, 4>("load4_256B"),
      load_kernel<Load::kEvictFirst, 4>("load4_evict_first"),
      load_kernel<Load::kCoherent, 4>("load4_volatile"),
      ahead_kernel<Ahead::kTouch>("touch_ahead"),
      ahead_kernel<Ahead::kPrefetchLine>("prefetch_line"),
      ahead_kernel<Ahead::kPrefetchRow>("prefetch_row"),
      {"bulk", [](const Launch& launch, const std::byte* const* rows, int count,
                  uint4* out) { run_ring(gather_bulk, launch, rows, count, out); }},
      {"async", [](const Launch& launch, const std::byte* const* rows, int count,
                   uint4* out) { run_ring(gather_async, launch, rows, count, out); }},
  };
  return all;
}

template <typename Items>
const auto& named(const Items& items, const std::string& name, const char* what) {
  std::string known;
  for (const auto& item : items) {
    if (item.name == name) return item;
    known += std::string(known.empty() ? "" : ", ") + std::string(item.name);
  }
  throw std::runtime_error(std::string(what) + ": expected one of " + known + ", found " + name);
}

__global__ void fill_rows(std::byte* chunk, std::uint64_t first, std::uint64_t rows) {
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < rows;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    *reinterpret_cast<std::uint64_t*>(chunk + i * kRowBytes) = first + i;
  }
}

__global__ void count_wrong(const std::uint32_t* ids, int count, const uint4* out,
                            unsigned* wrong) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const auto* row = reinterpret_cast<const std::uint64_t*>(out + std::int64_t{i} * kRowVectors);
  if (*row != ids[i]) atomicAdd(wrong, 1U);
}

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) {
    CHECK_CUDA(cudaMalloc(&data_, std::max<std::size_t>(1, count) * sizeof(T)));
  }
  DeviceArray(const DeviceArray&) = delete;  // owns data_
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  void upload(const std::vector<T>& from) {
    CHECK_CUDA(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

class Bench {
 public:
  Bench(int max_rows, int max_calls)
      : ids_(static_cast<std::size_t>(max_rows) * static_cast<std::size_t>(max_calls)),
        rows_(static_cast<std::size_t>(max_rows) * static_cast<std::size_t>(max_calls)),
        out_(static_cast<std::size_t>(max_rows) * kRowVectors),
        wrong_(1) {
    for (cudaEvent_t& event : events_) CHECK_CUDA(cudaEventCreate(&event));
  }
  Bench(const Bench&) = delete;  // owns the events
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  void fill(const Region& region, bool by_cpu) {
    const std::uint64_t per_chunk = region.chunk_bytes / kRowBytes;
    for (std::size_t c = 0; c < region.chunks.size(); ++c) {
      std::byte* const chunk = region.chunks[c];
      if (!by_cpu) {
        fill_rows<<<1024, 256>>>(chunk, c * per_chunk, per_chunk);
        continue;
      }
      constexpr std::uint64_t kPiece = 32768;
      on_all_cores((per_chunk + kPiece - 1) / kPiece, [&](std::size_t piece) {
        const std::uint64_t end = std::min(per_chunk, (piece + 1) * kPiece);
        for (std::uint64_t i = piece * kPiece; i < end; ++i) {
          *reinterpret_cast<std::uint64_t*>(chunk + i * kRowBytes) = c * per_chunk + i;
        }
      });
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    cursor_ = 0;
  }

  json measure(const Region& region, const Pattern& pattern, const Kernel& kernel,
               const Launch& launch, int rows) {
    const std::uint64_t bytes = region.chunks.size() * region.chunk_bytes;
    const int calls = pattern.hold > 1 ? static_cast<int>(bytes / pattern.window * pattern.hold)
                      : rows <= 4096   ? 48
                      : rows <= 16384  ? 32
                                       : 16;
    const std::vector<std::uint32_t> ids = draw(pattern, bytes, calls, rows, cursor_);
    std::vector<const std::byte*> addresses(ids.size());
    const std::uint64_t per_chunk = region.chunk_bytes / kRowBytes;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      addresses[i] = region.chunks[ids[i] / per_chunk] + ids[i] % per_chunk * kRowBytes;
    }
    ids_.upload(ids);
    rows_.upload(addresses);
    CHECK_CUDA(cudaMemset(wrong_.get(), 0, sizeof(unsigned)));
    // A small launch first: code is loaded outside the timing, no more than 64 rows are touched.
    kernel.run(launch, rows_.get(), 64, out_.get());
    const int groups = calls / kGroup;
    for (int c = 0; c < calls; ++c) {
      if (c % kGroup == 0) CHECK_CUDA(cudaEventRecord(events_[c / kGroup]));
      kernel.run(launch, rows_.get() + std::int64_t{c} * rows, rows, out_.get());
    }
    CHECK_CUDA(cudaEventRecord(events_[groups]));
    count_wrong<<<(rows + 255) / 256, 256>>>(ids_.get() + std::int64_t{calls - 1} * rows, rows,
                                             out_.get(), wrong_.get());
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaDeviceSynchronize());
    unsigned wrong = 0;
    CHECK_CUDA(cudaMemcpy(&wrong, wrong_.get(), sizeof wrong, cudaMemcpyDeviceToHost));
    if (wrong != 0) {
      throw std::runtime_error(std::string(kernel.name) + ": expected the rows asked for, found " +
                               std::to_string(wrong) + " others");
    }
    std::vector<double> rates;
    double total_ms = 0.0;
    for (int g = 0; g < groups; ++g) {
      float ms = 0.0F;
      CHECK_CUDA(cudaEventElapsedTime(&ms, events_[g], events_[g + 1]));
      total_ms += ms;
      rates.push_back(kGroup * static_cast<double>(rows) * kRowBytes / ms * 1e-6);
    }
    const auto [low, high] = std::minmax_element(rates.begin(), rates.end());
    const double rate = calls * static_cast<double>(rows) * kRowBytes / total_ms * 1e-6;
    json result = {{"pattern", pattern.name}, {"kernel", kernel.name},
                   {"blocks", launch.blocks}, {"threads", launch.threads},
                   {"batch", launch.batch},   {"rows", rows},
                   {"calls", calls},          {"gb_per_s", rate},
                   {"lowest", *low},          {"highest", *high}};
    if (pattern.hold > 1) result["rates"] = rates;
    const std::vector<std::uint32_t> one(ids.begin(), ids.begin() + rows);
    for (const auto& [name, page] : {std::pair{"pages_4k", std::uint64_t{1} << 12},
                                     std::pair{"pages_64k", std::uint64_t{1} << 16},
                                     std::pair{"pages_2m", std::uint64_t{1} << 21},
                                     std::pair{"pages_1g", std::uint64_t{1} << 30}}) {
      result[name] = distinct_pages(one, page);
    }
    std::printf("  %-24s %-18s %4d x %3d x %2d %6d rows  %6.1f GB/s (%.1f to %.1f)\n",
                pattern.name.c_str(), std::string(kernel.name).c_str(), launch.blocks,
                launch.threads, launch.batch, rows, rate, *low, *high);
    std::fflush(stdout);
    return result;
  }

 private:
  DeviceArray<std::uint32_t> ids_;
  DeviceArray<const std::byte*> rows_;
  DeviceArray<uint4> out_;
  DeviceArray<unsigned> wrong_;
  cudaEvent_t events_[kMaxGroups + 1]{};
  std::uint64_t cursor_ = 0;
};

// Nanoseconds of dependent reads, by their distance: a step up shows how much one translation
// covers.
json latencies(const Region& region) {
  json all = json::array();
  constexpr int kSteps = 1024;
  DeviceArray<long long> clocks(1);
  int khz = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  std::uint64_t begin = 0;
  for (std::uint64_t stride = 512; begin + kSteps * stride <= region.chunk_bytes; stride *= 2) {
    long long taken = 0;
    chase<<<1, 1>>>(region.chunks[0] + begin, stride, kSteps, clocks.get());
    CHECK_CUDA(cudaMemcpy(&taken, clocks.get(), sizeof taken, cudaMemcpyDeviceToHost));
    const double ns = static_cast<double>(taken) / kSteps * 1e6 / khz;
    std::printf("  %9llu bytes apart: %.0f ns\n", static_cast<unsigned long long>(stride), ns);
    all.push_back({{"stride", stride}, {"ns", ns}});
    begin += kSteps * stride;  // no page that an earlier one has visited
  }
  return all;
}

// GB/s of what else moves pages: copies of 64 MiB both ways, and rows written in order.
json copies(const Region& region) {
  constexpr std::size_t kPiece = std::size_t{64} << 20;
  constexpr std::size_t kPieces = 32;
  DeviceArray<uint4> there(kPiece / 16);
  cudaEvent_t begin{};
  cudaEvent_t end{};
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  const auto rate = [&](auto&& move) {
    move(region.chunks[0]);
    CHECK_CUDA(cudaEventRecord(begin));
    for (std::size_t i = 1; i <= kPieces; ++i) move(region.chunks[0] + i * kPiece);
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0.0F;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    return static_cast<double>(kPieces * kPiece) / ms * 1e-6;
  };
  json result;
  result["copy_to_device"] = rate([&](std::byte* host) {
    CHECK_CUDA(cudaMemcpyAsync(there.get(), host, kPiece, cudaMemcpyDefault, nullptr));
  });
  result["copy_to_host"] = rate([&](std::byte* host) {
    CHECK_CUDA(cudaMemcpyAsync(host, there.get(), kPiece, cudaMemcpyDefault, nullptr));
  });
  result["kernel_writes"] = rate([&](std::byte* host) {
    write_rows<<<264, 256>>>(reinterpret_cast<uint4*>(host), kPiece / 16);
  });
  std::printf("  %s\n", result.dump().c_str());
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  return result;
}

struct Options {
  bool latency = false;
  bool copies = false;
  std::vector<std::string> regions{"register_thp"};
  std::uint64_t region_gib = 8;
  std::vector<std::string> patterns{"random"};
  std::vector<std::string> kernels{"load4"};
  std::vector<int> rows{4096, 16384, 65536};
  std::vector<int> blocks{132};
  std::vector<int> threads{256};
  std::vector<int> batches{16};
  std::string output;
};

void measure_all(Bench& bench, const Region& region, const Options& options, json& results) {
  for (const std::string& group : options.patterns) {
    for (const Pattern& pattern : patterns(group)) {
      for (const std::string& name : options.kernels) {
        const Kernel& kernel = named(kernels(), name, "--kernels");
        const bool ring = name == "bulk" || name == "async";
        for (const int blocks : options.blocks) {
          for (const int threads : options.threads) {
            for (const int batch : options.batches) {
              if (!ring && batch != options.batches.front()) continue;
              if (ring && ring_bytes(threads, batch) > 220 * 1024) continue;
              for (const int rows : options.rows) {
                results.push_back(
                    bench.measure(region, pattern, kernel, {blocks, threads, batch}, rows));
              }
            }
          }
        }
      }
    }
  }
}

int run(const Options& options) {
  cudaDeviceProp properties{};
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  json report = {{"device", properties.name},
                 {"region_bytes", options.region_gib * kGi},
                 {"row_bytes", kRowBytes},
                 {"regions", json::array()}};
  Bench bench(*std::max_element(options.rows.begin(), options.rows.end()),
              std::max(48, static_cast<int>(options.region_gib) / 2 * kGroup));
  for (const std::string& name : options.regions) {
    const Method& method = named(methods(), name, "--regions");
    json entry = {{"region", name}, {"what", method.what}};
    std::printf("%s: %s\n", name.c_str(), method.what.c_str());
    try {
      Region region;
      const auto start = std::chrono::steady_clock::now();
      method.obtain(region, options.region_gib * kGi);
      region.obtain_seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      entry["obtain_seconds"] = region.obtain_seconds;
      if (region.huge_share >= 0.0) entry["huge_share"] = region.huge_share;
      std::printf("  obtained in %.1f s, huge pages %.2f\n", region.obtain_seconds,
                  region.huge_share);
      std::fflush(stdout);
      bench.fill(region, name != "device");
      if (options.latency) entry["latency"] = latencies(region);
      measure_all(bench, region, options, entry["results"]);
      if (options.copies) {
        entry["copies"] = copies(region);
        bench.fill(region, name != "device");
        measure_all(bench, region, options, entry["results_after_copies"]);
      }
    } catch (const std::exception& error) {
      entry["refused"] = error.what();
      std::printf("  refused: %s\n", error.what());
    }
    report["regions"].push_back(std::move(entry));
    if (!options.output.empty()) std::ofstream(options.output) << report.dump(1) << '\n';
  }
  return 0;
}

}  // namespace
}  // namespace kvtier::benchmarks

int main(int argc, char** argv) {
  CLI::App app("rate of gathering scattered 512-byte rows from host memory");
  kvtier::benchmarks::Options options;
  app.add_option("--regions", options.regions, "how the memory is obtained")->delimiter(',');
  app.add_option("--region-gib", options.region_gib)
      ->check(CLI::Range(1, 2 * kvtier::benchmarks::kMaxGroups));
  app.add_flag("--latency", options.latency, "also time dependent reads");
  app.add_flag("--copies", options.copies, "also time copies, and gathers again after them");
  app.add_option("--patterns", options.patterns,
                 "random, same, sorted, layers, runs, clusters, windows, places")
      ->delimiter(',');
  app.add_option("--kernels", options.kernels)->delimiter(',');
  app.add_option("--rows", options.rows, "rows of a call")
      ->delimiter(',')
      ->check(CLI::Range(128, 1 << 20));
  app.add_option("--blocks", options.blocks)->delimiter(',')->check(CLI::Range(1, 4096));
  app.add_option("--threads", options.threads)->delimiter(',')->check(CLI::Range(32, 512));
  app.add_option("--batches", options.batches, "rows of a warp's ring")
      ->delimiter(',')
      ->check(CLI::IsMember({1, 2, 4, 8, 16, 32}));
  app.add_option("--output", options.output, "JSON");
  CLI11_PARSE(app, argc, argv);
  try {
    return kvtier::benchmarks::run(options);
  } catch (const std::exception& error) {
    std::cerr << "host_gather: " << error.what() << '\n';
    return 1;
  }
}
