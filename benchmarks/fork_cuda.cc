#include "kvtier/engine.h"

#include "benchmarks/benchmarks.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <chrono>
#include <malloc.h>
#include <vector>

namespace kvtier::bench {
namespace {

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

Times times_of(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {.median = samples[samples.size() / 2], .min = samples.front(), .max = samples.back()};
}

std::size_t heap_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

Config config_for(const ForkCase& fork) {
  Config config;
  config.backend = Backend::kCuda;
  config.model = {.layers = fork.layers,
                  .query_heads = fork.kv_heads,
                  .kv_heads = fork.kv_heads,
                  .head_dim = 128,
                  .kv_dtype = DType::kBFloat16,
                  .layer_options = {}};
  const std::size_t tokens = static_cast<std::size_t>(fork.tokens + 2048);
  const std::size_t rows = tokens * static_cast<std::size_t>(fork.layers * fork.kv_heads);
  // A page for each child and layer too.
  config.memory.host_bytes =
      (rows + static_cast<std::size_t>(fork.children * fork.layers * fork.kv_heads) * 128) * 512;
  config.memory.device_bytes = rows * 72 + 8 * GiB;
  config.memory.max_session_tokens = static_cast<std::int64_t>(tokens);
  return config;
}

}  // namespace

void bench_fork(Run& run, const ForkCase& fork) {
  constexpr std::int64_t kChunk = 65536;
  Engine engine(config_for(fork));
  Session parent = engine.open();
  const DeviceTensor rows(kChunk * fork.kv_heads * 128, 51);
  // One short of a page's end, so that every first append has a page to copy.
  for (std::int64_t left = fork.tokens - 1; left > 0; left -= kChunk) {
    const TensorView tensor(rows.data(), DType::kBFloat16,
                            {std::min(left, kChunk), fork.kv_heads, 128}, MemorySpace::kDevice);
    for (int layer = 0; layer < fork.layers; ++layer) parent.append(layer, tensor, tensor);
  }

  std::vector<double> fork_us, use_us;
  std::size_t device_bytes = 0, heap = 0;
  for (int repeat = 0; repeat < run.replays(); ++repeat) {
    const std::size_t device_before = engine.stats().snapshot.device_bytes, before = heap_bytes();
    const auto start = std::chrono::steady_clock::now();
    std::vector<Session> children = parent.fork(fork.children);
    fork_us.push_back(since(start));
    device_bytes = engine.stats().snapshot.device_bytes - device_before;
    heap = heap_bytes() - before;
    for (Session& child : children) {
      const auto first_use = std::chrono::steady_clock::now();
      child.reserve(1);
      use_us.push_back(since(first_use));
    }
  }
  const Stats::Snapshot now = engine.stats().snapshot;
  const double held = static_cast<double>(now.host_page_bytes_used + now.sketch_bytes_used);
  const json parameters = {{"tokens", fork.tokens},
                           {"layers", fork.layers},
                           {"kv_heads", fork.kv_heads},
                           {"children", fork.children}};
  run.add("fork", parameters, times_of(fork_us),
          {{"device_bytes", device_bytes},
           {"heap_bytes", heap},
           {"share_of_parent", static_cast<double>(device_bytes + heap) / held}});
  run.add("fork_first_use", parameters, times_of(use_us));
}

}  // namespace kvtier::bench
