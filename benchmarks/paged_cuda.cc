#include "kvtier/paged.h"

#include "benchmarks/benchmarks.h"
#include "benchmarks/steps_cuda.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace kvtier::bench {
namespace {

constexpr std::int64_t kChunk = 32768;
constexpr int kBlockTokens = 16;

/// Integers on the device.
transfer::Buffer upload(Run& run, const std::vector<std::int32_t>& values) {
  transfer::Buffer buffer = run.device().allocate(transfer::Space::kDevice, values.size() * 4);
  const transfer::CopyRun copy{buffer.data(), values.data(), values.size() * 4};
  run.queue().copy({&copy, 1});
  run.queue().synchronize();
  return buffer;
}

TensorView ints(const transfer::Buffer& buffer, std::initializer_list<std::int64_t> shape,
                std::int64_t first = 0) {
  return {buffer.as<std::int32_t>() + first, DType::kInt32, shape, MemorySpace::kDevice};
}

}  // namespace

void bench_paged_step(Run& run, const StepCase& step) {
  const int layers = num_layers(step);
  const std::int64_t blocks = (step.tokens + kBlockTokens - 1) / kBlockTokens;
  PagedConfig config;
  config.backend = Backend::kCuda;
  config.model = {.layers = layers,
                  .query_heads = step.query_heads,
                  .kv_heads = step.kv_heads,
                  .head_dim = step.head_dim};
  config.retrieval = step.retrieval;
  config.num_blocks = blocks * step.batch;
  config.block_tokens = kBlockTokens;
  config.max_tokens = step.tokens;
  config.max_batch_rows = step.batch;
  PagedSketches sketches(config);

  // Blocks of all sequences in a random order, as those of an engine that has run for a while.
  std::vector<std::int32_t> tables(static_cast<std::size_t>(config.num_blocks));
  std::iota(tables.begin(), tables.end(), 0);
  std::shuffle(tables.begin(), tables.end(), std::mt19937(1));
  std::vector<std::int32_t> slots, last;
  for (int b = 0; b < step.batch; ++b) {
    for (std::int64_t t = 0; t < step.tokens; ++t) {
      const auto block = static_cast<std::size_t>(b * blocks + t / kBlockTokens);
      slots.push_back(tables[block] * kBlockTokens + static_cast<std::int32_t>(t % kBlockTokens));
    }
    last.push_back(slots.back());
  }
  const std::vector<std::int32_t> lengths(static_cast<std::size_t>(step.batch),
                                          static_cast<std::int32_t>(step.tokens));
  const transfer::Buffer table = upload(run, tables), slot = upload(run, slots);
  const transfer::Buffer newest = upload(run, last), length = upload(run, lengths);

  const StreamRef stream = StreamRef::of(run.stream());
  const std::int64_t kv_row = step.kv_heads * step.head_dim;
  const std::int64_t row = step.query_heads * step.head_dim;
  const std::int64_t count = step.batch * step.tokens;
  const DeviceTensor keys(std::min(kChunk, count) * kv_row, 11);
  const DeviceTensor values(std::min(kChunk, count) * kv_row, 12);
  for (int layer = 0; layer < layers; ++layer) {
    for (std::int64_t t = 0; t < count; t += kChunk) {
      const std::int64_t n = std::min(kChunk, count - t);
      fill_normal(run.stream(), keys.data(), keys.count(),
                  static_cast<std::uint64_t>(100 + layer * count + t), 1.0F);
      sketches.store(layer, view(keys.data(), n, step.kv_heads, step.head_dim),
                     view(values.data(), n, step.kv_heads, step.head_dim), ints(slot, {n}, t),
                     stream);
    }
  }
  const std::int64_t half = config.num_blocks * kBlockTokens * kv_row;
  const DeviceTensor cache(layers * 2 * half, 13);
  const DeviceTensor queries(layers * step.batch * row, 77, 2.0F);
  const DeviceTensor new_kv(layers * step.batch * kv_row, 78);
  const DeviceTensor out(step.batch * row, 79);
  const PagedBatch batch{.blocks = ints(table, {step.batch, blocks}),
                         .lengths = ints(length, {step.batch}),
                         .max_length = step.tokens};
  const auto half_of = [&](int layer, int which) {
    return TensorView(cache.data() + (layer * 2 + which) * half, DType::kBFloat16,
                      {config.num_blocks, kBlockTokens, step.kv_heads, step.head_dim},
                      MemorySpace::kDevice);
  };
  const auto all_layers = [&] {
    for (int layer = 0; layer < layers; ++layer) {
      const TensorView kv = view(new_kv.data() + layer * step.batch * kv_row, step.batch,
                                 step.kv_heads, step.head_dim);
      sketches.store(layer, kv, kv, ints(newest, {step.batch}), stream);
      sketches.attend(layer, batch,
                      view(queries.data() + layer * step.batch * row, step.batch, step.query_heads,
                           step.head_dim),
                      {.keys = half_of(layer, 0), .values = half_of(layer, 1)},
                      {.out = {out.data(),
                               DType::kBFloat16,
                               {step.batch, step.query_heads, step.head_dim},
                               MemorySpace::kDevice},
                       .lse = {}},
                      stream);
    }
  };
  all_layers();
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  const int passes = graph_passes(layers);
  const Times times = time_graph(run.stream(), layers, run.replays(), all_layers, passes);
  sketches.check();
  json parameters = step_parameters(step, layers);
  parameters["block_tokens"] = kBlockTokens;
  run.add("paged_step", parameters, times, {{"graph_steps", layers * passes}});
}

}  // namespace kvtier::bench
