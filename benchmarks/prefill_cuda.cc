#include "kvtier/engine.h"

#include "benchmarks/benchmarks.h"
#include "benchmarks/gemm_rate_cuda.h"
#include "benchmarks/layers_cuda.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>

namespace kvtier::bench {

void bench_prefill(Run& run, std::int64_t tokens, int bits) {
  constexpr int kLayers = 2;
  Layers layers(run, {.tokens = 0, .layers = kLayers, .num_planes = bits, .spare_tokens = tokens});
  const transfer::KvGeometry kv = layers.kv();
  const std::int64_t pairs = tokens * kv.kv_heads;
  // Packed as an append packs, which leaves the squares that norms are taken from.
  const DeviceTensor keys(pairs * kv.head_dim, 61);
  const DeviceTensor packed(pairs * 2 * kv.head_dim, 64);
  const transfer::Buffer squares = run.device().allocate(
      transfer::Space::kDevice, static_cast<std::size_t>(pairs) * sizeof(transfer::RowSquares));
  transfer::pack_rows(run.queue(), kv, append_batch(layers, 0, 1, keys, keys, tokens),
                      reinterpret_cast<std::byte*>(packed.data()),
                      squares.as<transfer::RowSquares>());
  const Times times = time_graph(run.stream(), kLayers, run.replays(), [&] {
    for (int layer = 0; layer < kLayers; ++layer) {
      hashing::SketchBatch batch;
      batch.push({.blocks = layers.sketch_blocks(layer, 0),
                  .counters = layers.sequence(layer, 0).counters,
                  .tokens = static_cast<std::int32_t>(tokens)});
      hashing::sketch_keys(run.queue(), layers.planes(), kv, layers.sketch(), batch,
                           reinterpret_cast<const std::byte*>(packed.data()),
                           squares.as<transfer::RowSquares>());
    }
  });
  const double key_bytes = static_cast<double>(pairs) * kv.head_dim * 2;
  const double bytes =
      key_bytes + static_cast<double>(pairs * (layers.sketch().token_bytes() +
                                               std::int64_t{sizeof(transfer::RowSquares)}));
  const double flop = 2.0 * static_cast<double>(pairs) * kv.head_dim * bits;
  const double product_rate = bf16_product_rate(run);
  const double read_us = key_bytes / run.machine().read_gbps() * 1e-3;
  const double product_us = flop / product_rate * 1e6;
  json parameters = layers.shape().parameters();
  parameters["tokens"] = tokens;
  run.add_bytes("prefill_sketch", parameters, times, bytes,
                {{"read_keys_us", read_us},
                 {"product_us", product_us},
                 {"product_tflops", product_rate * 1e-12},
                 {"over_floor", times.median / std::max(read_us, product_us)}});
}

void bench_prefill_append(Run& run, std::int64_t tokens) {
  constexpr std::int64_t kChunk = 32768;
  constexpr int kLayers = 4;
  const auto measure = [&](KvPlacement placement, int bits) {
    Config config;
    config.backend = Backend::kCuda;
    config.model = {.layers = kLayers, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
    config.retrieval.code = SketchCode::kSign;
    config.retrieval.num_planes = bits;
    config.memory.placement = placement;
    config.memory.max_session_tokens = tokens;
    config.memory.host_bytes = static_cast<std::size_t>(tokens) * 8 * 512 * kLayers + 64 * MiB;
    config.memory.device_bytes =
        (placement == KvPlacement::kDevice ? config.memory.host_bytes : 0) + 8 * GiB;
    Engine engine(config);
    const DeviceTensor keys(std::min(kChunk, tokens) * 8 * 128, 62);
    const DeviceTensor values(std::min(kChunk, tokens) * 8 * 128, 63);
    const auto view = [](const DeviceTensor& tensor, std::int64_t n) {
      return TensorView{tensor.data(), DType::kBFloat16, {n, 8, 128}, MemorySpace::kDevice};
    };
    std::vector<double> all;
    Session session = engine.open();
    for (int repeat = 0; repeat < 5; ++repeat) {
      session.truncate(0, StreamRef::of(run.stream()));
      session.reserve(tokens, StreamRef::of(run.stream()));
      KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
      const double us = time_once(run.stream(), [&] {
        for (int layer = 0; layer < kLayers; ++layer) {
          for (std::int64_t t = 0; t < tokens; t += kChunk) {
            const std::int64_t n = std::min(kChunk, tokens - t);
            session.append(layer, view(keys, n), view(values, n), StreamRef::of(run.stream()));
          }
        }
      });
      if (repeat > 0) all.push_back(us / kLayers);
    }
    std::sort(all.begin(), all.end());
    return Times{all[all.size() / 2], all.front(), all.back()};
  };
  const double bytes = static_cast<double>(tokens) * 8 * 512;
  for (const auto placement : {KvPlacement::kHost, KvPlacement::kDevice}) {
    const Times times = measure(placement, 256);
    json measured = {{"bytes", bytes}, {"gbps", bytes / times.median * 1e-3}};
    if (placement == KvPlacement::kHost) {
      measured["share_of_link"] = bytes / times.median * 1e-3 / run.machine().device_to_host_gbps();
    }
    run.add("prefill_append",
            {{"tokens", tokens}, {"bits", 256}, {"placement", name_of(placement)}}, times,
            measured);
  }
}

}  // namespace kvtier::bench
