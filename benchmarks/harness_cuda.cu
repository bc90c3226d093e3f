#include "benchmarks/harness_cuda.h"
#include "transfer/device/cuda_check.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <utility>

namespace kvtier::bench {
namespace {

constexpr int kBlocks = 132 * 8;

__device__ std::uint32_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDULL;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53ULL;
  return static_cast<std::uint32_t>(x >> 32);
}

// By Box-Muller.
__global__ void fill_normal_kernel(__nv_bfloat16* out, std::int64_t count, std::uint64_t seed,
                                   float scale) {
  constexpr float kUnit = 2.3283064e-10F;  // 2^-32
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += stride) {
    const std::uint64_t counter = (seed << 40) + 2 * static_cast<std::uint64_t>(i);
    const float u = (static_cast<float>(mix(counter)) + 0.5F) * kUnit;
    const float v = static_cast<float>(mix(counter + 1)) * kUnit;
    out[i] = __float2bfloat16(scale * sqrtf(-2.0F * logf(u)) * cospif(2.0F * v));
  }
}

__global__ void widen_kernel(const __nv_bfloat16* from, std::int64_t count, float* to) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += stride) {
    to[i] = __bfloat162float(from[i]);
  }
}

// Reads all of it; writes only if an impossible sum comes out, which keeps the loads.
__global__ void __launch_bounds__(512)
    read_kernel(const uint4* data, std::int64_t count, uint4* sink) {
  uint4 sum{};
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 loaded[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) loaded[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum.x ^= loaded[j].x;
      sum.y += loaded[j].y;
      sum.z ^= loaded[j].z;
      sum.w += loaded[j].w;
    }
  }
  if (sum.x == 0x12345678U && sum.y == 0x9ABCDEF0U && sum.z == sum.w) *sink = sum;
}

Times summary(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

class Events {
 public:
  Events() {
    KVTIER_CUDA_CHECK(cudaEventCreate(&start_));
    KVTIER_CUDA_CHECK(cudaEventCreate(&stop_));
  }
  ~Events() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  Events(const Events&) = delete;  // owns the events
  Events& operator=(const Events&) = delete;

  double microseconds(cudaStream_t stream, const std::function<void()>& work) {
    KVTIER_CUDA_CHECK(cudaEventRecord(start_, stream));
    work();
    KVTIER_CUDA_CHECK(cudaEventRecord(stop_, stream));
    KVTIER_CUDA_CHECK(cudaEventSynchronize(stop_));
    float ms = 0.0F;
    KVTIER_CUDA_CHECK(cudaEventElapsedTime(&ms, start_, stop_));
    return 1e3 * static_cast<double>(ms);
  }

 private:
  cudaEvent_t start_{}, stop_{};
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

}  // namespace

void fill_normal(cudaStream_t stream, __nv_bfloat16* data, std::int64_t count, std::uint64_t seed,
                 float scale) {
  fill_normal_kernel<<<kBlocks, 256, 0, stream>>>(data, count, seed, scale);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void widen(cudaStream_t stream, const __nv_bfloat16* from, std::int64_t count, float* to) {
  widen_kernel<<<kBlocks, 256, 0, stream>>>(from, count, to);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

DeviceTensor::DeviceTensor(std::int64_t count, std::uint64_t seed, float scale) : count_(count) {
  KVTIER_CUDA_CHECK(cudaMalloc(&data_, static_cast<std::size_t>(count) * sizeof(__nv_bfloat16)));
  fill_normal(nullptr, data_, count, seed, scale);
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

DeviceTensor::~DeviceTensor() { cudaFree(data_); }

double time_once(cudaStream_t stream, const std::function<void()>& work) {
  Events events;
  return events.microseconds(stream, work);
}

Times time_events(cudaStream_t stream, int repeats, const std::function<void()>& work) {
  Events events;
  std::vector<double> values;
  for (int i = 0; i < repeats + 3; ++i) {
    const double us = events.microseconds(stream, work);
    if (i >= 3) values.push_back(us);
  }
  return summary(std::move(values));
}

double Machine::read_gbps() {
  if (read_ == 0.0) {
    constexpr std::int64_t kBytes = std::int64_t{8} << 30;
    const DeviceTensor memory(kBytes / 2, 1);
    auto* data = reinterpret_cast<uint4*>(memory.data());
    const auto read = [&](int blocks) {
      return time_events(nullptr, 7,
                         [&] {
                           read_kernel<<<blocks, 512>>>(data, kBytes / 16, data);
                           KVTIER_CUDA_CHECK(cudaGetLastError());
                         })
          .median;
    };
    read_ = static_cast<double>(kBytes) / std::min(read(132 * 4), read(132 * 16)) * 1e-3;
  }
  return read_;
}

double Machine::copy_gbps(bool to_device) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const DeviceTensor memory(kBytes / 2, 2);
  void* host = nullptr;
  KVTIER_CUDA_CHECK(cudaMallocHost(&host, kBytes));
  const std::unique_ptr<void, void (*)(void*)> owner(host, [](void* data) { cudaFreeHost(data); });
  void* to = to_device ? static_cast<void*>(memory.data()) : host;
  const void* from = to_device ? static_cast<const void*>(host) : memory.data();
  const Times times = time_events(
      nullptr, 5, [&] { KVTIER_CUDA_CHECK(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault)); });
  return static_cast<double>(kBytes) / times.median * 1e-3;
}

double Machine::host_to_device_gbps() {
  if (to_device_ == 0.0) to_device_ = copy_gbps(true);
  return to_device_;
}

double Machine::device_to_host_gbps() {
  if (to_host_ == 0.0) to_host_ = copy_gbps(false);
  return to_host_;
}

json Machine::describe() {
  int driver = 0, runtime = 0;
  KVTIER_CUDA_CHECK(cudaDriverGetVersion(&driver));
  KVTIER_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  std::string driver_release;
  std::ifstream version("/proc/driver/nvidia/version");
  std::getline(version, driver_release);
  return {{"device", std::string(device_->name())},
          {"driver_cuda", driver},
          {"runtime_cuda", runtime},
          {"driver", driver_release},
          {"read_gbps", read_gbps()},
          {"host_to_device_gbps", host_to_device_gbps()},
          {"device_to_host_gbps", device_to_host_gbps()}};
}

Run::Run(std::string file, std::string command, std::vector<std::string> cuda_libs, int replays,
         bool prints)
    : device_(transfer::make_device(Backend::kCuda)),
      machine_(*device_),
      file_(std::move(file)),
      cuda_libs_(std::move(cuda_libs)),
      replays_(replays),
      prints_(prints) {
  KVTIER_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  queue_ = device_->adopt(StreamRef::of(stream_));
  document_ = {
      {"date", today()},
      {"command", std::move(command)},
      {"method",
       "CUDA events around graph replays, divided by the steps of a graph (graph_steps); "
       "median, min and max of the replays after three; inputs rotate over several layers, "
       "or one is too large, so that a step finds none in the L2 cache"},
      {"machine", machine_.describe()},
      {"rows", json::array()}};
}

Run::~Run() {
  queue_.reset();
  cudaStreamDestroy(stream_);
}

void Run::push(json row) {
  if (prints_) std::cout << row.dump() << std::endl;
  document_["rows"].push_back(std::move(row));
  if (file_.empty()) return;
  std::ofstream out(file_);
  json head = document_;
  head.erase("rows");
  const std::string text = head.dump(1);
  out << text.substr(0, text.rfind("\n}")) << ",\n \"rows\": [";
  const char* separator = "\n  ";
  for (const json& one : document_["rows"]) {  // a line each
    out << separator << one.dump();
    separator = ",\n  ";
  }
  out << "\n ]\n}\n";
  out.flush();
  if (!out) throw std::runtime_error(file_ + ": expected a writable file, found none");
}

void Run::add(const std::string& what, json parameters, const Times& times, json measured) {
  parameters["us"] = times.median;
  parameters["us_min"] = times.min;
  parameters["us_max"] = times.max;
  note(what, std::move(parameters), std::move(measured));
}

void Run::add_bytes(const std::string& what, json parameters, const Times& times, double bytes,
                    json measured) {
  const double gbps = bytes / times.median * 1e-3;
  parameters["bytes"] = bytes;
  parameters["gbps"] = gbps;
  parameters["share_of_read"] = gbps / machine_.read_gbps();
  add(what, std::move(parameters), times, std::move(measured));
}

void Run::note(const std::string& what, json parameters, json measured) {
  json row = {{"what", what}};
  row.update(parameters);
  if (!measured.is_null()) row.update(measured);
  push(std::move(row));
}

void Run::attempt(const std::string& what, const json& parameters,
                  const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    failed_ = true;
    note(what, parameters, {{"error", error.what()}});
  }
}

}  // namespace kvtier::bench
