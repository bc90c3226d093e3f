#include "benchmarks/benchmarks.h"
#include "benchmarks/layers_cuda.h"
#include "hashing/append.h"
#include "transfer/device/cuda_check.h"

namespace kvtier::bench {

void bench_ingest(Run& run, int batch, std::int64_t tokens, int bits, KvPlacement placement) {
  constexpr std::int64_t kLength = 8192;
  const int num_layers = 8;
  Layers layers(run, {.tokens = kLength,
                      .batch = batch,
                      .layers = num_layers,
                      .num_planes = bits,
                      .pages = true,
                      .page_space = placement == KvPlacement::kHost ? transfer::Space::kPinnedHost
                                                                    : transfer::Space::kDevice,
                      .spare_tokens = tokens * (run.replays() + 8)});
  const transfer::KvGeometry kv = layers.kv();
  const std::int64_t values_of_token = std::int64_t{kv.kv_heads} * kv.head_dim;
  const DeviceTensor keys(batch * tokens * values_of_token, 41);
  const DeviceTensor values(batch * tokens * values_of_token, 42);
  const transfer::Buffer packed = run.device().allocate(
      transfer::Space::kDevice, static_cast<std::size_t>(batch * tokens * values_of_token * 4));
  const transfer::Buffer squares = run.device().allocate(
      transfer::Space::kDevice,
      static_cast<std::size_t>(batch * tokens * kv.kv_heads) * sizeof(transfer::RowSquares));
  const auto append = [&](int layer) {
    hashing::SketchTarget target{
        .planes = layers.planes(), .geometry = layers.sketch(), .blocks = {}};
    for (int item = 0; item < batch; ++item) target.blocks.push(layers.sketch_blocks(layer, item));
    hashing::append_rows(run.queue(), kv, append_batch(layers, layer, batch, keys, values, tokens),
                         {&target, 1}, {packed.data(), squares.as<transfer::RowSquares>()},
                         placement == KvPlacement::kDevice);
  };
  append(0);
  const Times times = time_graph(run.stream(), num_layers, run.replays(), [&] {
    for (int layer = 0; layer < num_layers; ++layer) append(layer);
  });
  json parameters = layers.shape().parameters();
  parameters["new_tokens"] = tokens;
  run.add("ingest", parameters, times);
}

}  // namespace kvtier::bench
