// Time of one attention layer's decode step (append, sketch, score, select, fetch, attend), as CUDA
// graph replays. Every layer of the engine is in the graph, so that successive layers read
// different memory.

#include "kvtier/engine.h"

#include <CLI/CLI.hpp>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using nlohmann::json;

void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
  }
}
#define CHECK_CUDA(call) check(call, #call)

__device__ std::uint32_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDULL;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53ULL;
  return static_cast<std::uint32_t>(x >> 32);
}

// Standard normal values, by Box-Muller.
__global__ void fill_normal(__nv_bfloat16* out, std::int64_t count, std::uint64_t seed,
                            float scale) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += stride) {
    const float u =
        (static_cast<float>(mix(seed + 2 * static_cast<std::uint64_t>(i))) + 0.5F) * 2.3283064e-10F;
    const float v =
        static_cast<float>(mix(seed + 2 * static_cast<std::uint64_t>(i) + 1)) * 2.3283064e-10F;
    out[i] = __float2bfloat16(scale * sqrtf(-2.0F * logf(u)) * cospif(2.0F * v));
  }
}

__global__ void read_all(const uint4* data, std::int64_t count, uint4* sink) {
  uint4 sum{};
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = data[i], b = data[i + stride], c = data[i + 2 * stride],
                d = data[i + 3 * stride];
    sum.x ^= a.x ^ b.y ^ c.z ^ d.w;
    sum.y ^= a.y ^ b.z ^ c.w ^ d.x;
  }
  if (sum.x == 0x12345678U && sum.y == 0x9ABCDEF0U) *sink = sum;
}

struct DeviceTensor {
  __nv_bfloat16* data = nullptr;
  std::int64_t count = 0;

  DeviceTensor(std::int64_t count_in, std::uint64_t seed, float scale) : count(count_in) {
    CHECK_CUDA(cudaMalloc(&data, static_cast<std::size_t>(count) * sizeof(__nv_bfloat16)));
    fill_normal<<<1024, 256>>>(data, count, seed, scale);
    CHECK_CUDA(cudaGetLastError());
  }
  ~DeviceTensor() { cudaFree(data); }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
};

struct Timer {
  cudaEvent_t start{}, stop{};
  Timer() {
    CHECK_CUDA(cudaEventCreate(&start));
    CHECK_CUDA(cudaEventCreate(&stop));
  }
  ~Timer() {
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
  }
  template <typename F>
  double microseconds(cudaStream_t stream, F&& work) {
    CHECK_CUDA(cudaEventRecord(start, stream));
    work();
    CHECK_CUDA(cudaEventRecord(stop, stream));
    CHECK_CUDA(cudaEventSynchronize(stop));
    float ms = 0.0F;
    CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
    return 1e3 * static_cast<double>(ms);
  }
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// GB/s of a read-only stream over 4 GiB.
double read_bandwidth(cudaStream_t stream) {
  constexpr std::int64_t kBytes = std::int64_t{4} << 30;
  DeviceTensor memory(kBytes / 2, 1, 1.0F);
  Timer timer;
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) {
    times.push_back(timer.microseconds(stream, [&] {
      read_all<<<132 * 8, 512, 0, stream>>>(reinterpret_cast<const uint4*>(memory.data),
                                            kBytes / 16, reinterpret_cast<uint4*>(memory.data));
    }));
  }
  return static_cast<double>(kBytes) / median(times) * 1e-3;
}

struct Shape {
  std::int64_t tokens = 131072;
  int batch = 1;
  int query_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int layers = 4;
};

kvtier::TensorView view(const __nv_bfloat16* data, std::int64_t tokens, int heads, int head_dim) {
  return {data, kvtier::DType::kBFloat16, {tokens, heads, head_dim}, kvtier::MemorySpace::kDevice};
}

// Median microseconds of one layer's step.
json time_step(const Shape& shape, const kvtier::RetrievalConfig& retrieval,
               kvtier::KvPlacement placement, bool dense, int replays) {
  kvtier::Config config;
  config.backend = kvtier::Backend::kCuda;
  config.model = {.layers = shape.layers,
                  .query_heads = shape.query_heads,
                  .kv_heads = shape.kv_heads,
                  .head_dim = shape.head_dim,
                  .kv_dtype = kvtier::DType::kBFloat16};
  if (dense)
    config.model.layer_options.assign(static_cast<std::size_t>(shape.layers),
                                      {.mode = kvtier::LayerMode::kDense});
  config.retrieval = retrieval;
  const std::int64_t capacity = shape.tokens + 1024;
  config.memory.max_session_tokens = capacity;
  config.memory.max_batch_rows = shape.batch;
  config.memory.placement = placement;
  const auto kv_bytes = static_cast<std::size_t>(capacity) *
                        static_cast<std::size_t>(shape.batch * shape.layers) *
                        static_cast<std::size_t>(shape.kv_heads * shape.head_dim * 4);
  std::size_t free_bytes = 0, total_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  config.memory.host_bytes = kv_bytes + (std::size_t{64} << 20);
  config.memory.device_bytes = std::min(free_bytes - (std::size_t{6} << 30),
                                        (placement == kvtier::KvPlacement::kDevice ? kv_bytes : 0) +
                                            kv_bytes / 3 + (std::size_t{12} << 30));
  kvtier::Engine engine(config);

  std::vector<kvtier::Session> sessions;
  constexpr std::int64_t kChunk = 32768;
  {
    DeviceTensor keys(kChunk * shape.kv_heads * shape.head_dim, 11, 1.0F);
    DeviceTensor values(kChunk * shape.kv_heads * shape.head_dim, 12, 1.0F);
    for (int b = 0; b < shape.batch; ++b) {
      sessions.push_back(engine.open());
      for (int layer = 0; layer < shape.layers; ++layer) {
        for (std::int64_t t = 0; t < shape.tokens; t += kChunk) {
          const std::int64_t n = std::min(kChunk, shape.tokens - t);
          fill_normal<<<1024, 256>>>(keys.data, keys.count,
                                     static_cast<std::uint64_t>((b * 64 + layer) * 1000003LL + t),
                                     1.0F);
          CHECK_CUDA(cudaDeviceSynchronize());
          sessions.back().append(layer, view(keys.data, n, shape.kv_heads, shape.head_dim),
                                 view(values.data, n, shape.kv_heads, shape.head_dim));
        }
      }
    }
  }
  const std::int64_t row = shape.query_heads * shape.head_dim;
  const std::int64_t kv_row = shape.kv_heads * shape.head_dim;
  DeviceTensor queries(shape.layers * shape.batch * row, 77, 2.0F);
  DeviceTensor new_kv(shape.layers * shape.batch * kv_row, 78, 1.0F);
  DeviceTensor out(shape.batch * row, 79, 0.0F);
  cudaStream_t stream{};
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const kvtier::StreamRef ref = kvtier::StreamRef::of(stream);
  for (kvtier::Session& session : sessions) session.reserve(512, ref);
  const auto step = [&] {
    for (int layer = 0; layer < shape.layers; ++layer) {
      std::vector<kvtier::BatchItem> items;
      for (int b = 0; b < shape.batch; ++b) {
        const std::int64_t at = layer * shape.batch + b;
        items.push_back(
            {.session = &sessions[static_cast<std::size_t>(b)],
             .inputs = {.query =
                            view(queries.data + at * row, 1, shape.query_heads, shape.head_dim),
                        .key = view(new_kv.data + at * kv_row, 1, shape.kv_heads, shape.head_dim),
                        .value =
                            view(new_kv.data + at * kv_row, 1, shape.kv_heads, shape.head_dim)},
             .outputs = {.out = {out.data + b * row,
                                 kvtier::DType::kBFloat16,
                                 {1, shape.query_heads, shape.head_dim},
                                 kvtier::MemorySpace::kDevice}}});
      }
      engine.decode(layer, items, ref);
    }
  };
  step();
  CHECK_CUDA(cudaStreamSynchronize(stream));
  cudaGraph_t graph{};
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  step();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec{};
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<double> times;
  Timer timer;
  const kvtier::Stats before = engine.stats();
  for (int i = 0; i < replays; ++i) {
    const double us =
        timer.microseconds(stream, [&] { CHECK_CUDA(cudaGraphLaunch(exec, stream)); });
    if (i >= 3) times.push_back(us / shape.layers);
  }
  const kvtier::Stats after = engine.stats();
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  sessions.clear();
  CHECK_CUDA(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  const auto moved = after.cumulative - before.cumulative;
  const double steps = static_cast<double>(replays) * shape.layers;
  return {{"us", times[times.size() / 2]},
          {"us_min", times.front()},
          {"us_max", times.back()},
          {"rows_attended", static_cast<double>(moved.rows_attended) / steps},
          {"bytes_sketch", static_cast<double>(moved.bytes_sketch_read) / steps},
          {"bytes_host", static_cast<double>(moved.bytes_host_to_device) / steps}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Time of one attention layer's decode step by CUDA graph replays, as JSON"};
  Shape shape;
  kvtier::RetrievalConfig retrieval;
  std::string estimator = "norm_aware";
  std::string selection = "per_kv_head";
  std::string placement = "device";
  std::string file;
  bool dense = false;
  int replays = 23;
  const CLI::Range counts(1, 1 << 30);
  app.add_option("--tokens", shape.tokens, "context length")->check(counts);
  app.add_option("--batch", shape.batch, "sequences")->check(CLI::Range(1, 64));
  app.add_option("--query-heads", shape.query_heads)->check(counts);
  app.add_option("--kv-heads", shape.kv_heads)->check(counts);
  app.add_option("--head-dim", shape.head_dim)->check(counts);
  app.add_option("--layers", shape.layers, "layers in the graph, each with its own memory")
      ->check(counts);
  const std::map<std::string, kvtier::Estimator> estimators = {
      {"soft_collision", kvtier::Estimator::kSoftCollision},
      {"hard_collision", kvtier::Estimator::kHardCollision},
      {"norm_aware", kvtier::Estimator::kNormAware}};
  app.add_option("--estimator", estimator)->check(CLI::IsMember(estimators));
  app.add_option("--selection", selection)->check(CLI::IsMember({"per_kv_head", "per_query_head"}));
  app.add_option("--placement", placement, "where the KV is")
      ->check(CLI::IsMember({"device", "host"}));
  app.add_option("--bits", retrieval.num_planes, "planes of norm_aware");
  app.add_option("--query-bits", retrieval.query_bits);
  app.add_option("--k", retrieval.top_k, "rows per head, unless --sparsity is given");
  app.add_option("--sparsity", retrieval.sparsity, "context length over rows per head");
  app.add_option("--replays", replays, "the first three are not counted")
      ->check(CLI::Range(4, 100000));
  app.add_flag("--dense", dense, "attend to everything instead");
  app.add_option("--json", file, "writes the result to a file too");
  CLI11_PARSE(app, argc, argv);
  try {
    retrieval.estimator = estimators.at(estimator);
    retrieval.selection = selection == "per_query_head" ? kvtier::Selection::kPerQueryHead
                                                        : kvtier::Selection::kPerKvHead;
    json result =
        time_step(shape, retrieval,
                  placement == "host" ? kvtier::KvPlacement::kHost : kvtier::KvPlacement::kDevice,
                  dense, replays);
    result["read_gbps"] = read_bandwidth(nullptr);
    result["tokens"] = shape.tokens;
    result["estimator"] = dense ? "dense" : estimator;
    result["selection"] = selection;
    result["bits"] = retrieval.num_planes;
    result["k"] = retrieval.top_k;
    result["sparsity"] = retrieval.sparsity;
    result["batch"] = shape.batch;
    result["placement"] = placement;
    std::cout << result.dump() << "\n";
    if (!file.empty()) {
      std::ofstream out(file);
      out << result.dump(1) << "\n";
      out.flush();
      if (!out) throw std::runtime_error(file + ": expected a writable file, found none");
    }
  } catch (const std::exception& error) {
    std::cerr << "decode_step: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
