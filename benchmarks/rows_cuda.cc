#include "attention/flash_decode.h"
#include "benchmarks/benchmarks.h"
#include "benchmarks/layers_cuda.h"
#include "transfer/device/cuda_check.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace kvtier::bench {
namespace {

/// Selections of random rows, ascending, a different set for each of `sets`.
class RandomSelections {
 public:
  RandomSelections(Run& run, const Layers& layers, int sets, std::int64_t rows_per_head,
                   bool staging)
      : rows_(rows_per_head) {
    const int heads = layers.shape().kv_heads * layers.shape().batch;
    const std::size_t per_set = static_cast<std::size_t>(heads * rows_per_head);
    std::vector<std::int32_t> ids;
    std::mt19937_64 random(71);
    std::uniform_int_distribution<std::int32_t> token(
        128, static_cast<std::int32_t>(layers.shape().tokens - 129));
    for (int list = 0; list < sets * heads; ++list) {
      const auto begin = static_cast<std::ptrdiff_t>(ids.size());
      for (std::int64_t i = 0; i < rows_per_head; ++i) ids.push_back(token(random));
      std::sort(ids.begin() + begin, ids.end());
    }
    ids_ = upload(run, ids);
    masks_ = upload(run, std::vector<std::uint16_t>(
                             per_set, static_cast<std::uint16_t>((1 << layers.kv().group) - 1)));
    counts_ = upload(run, std::vector<std::int32_t>(static_cast<std::size_t>(heads),
                                                    static_cast<std::int32_t>(rows_per_head)));
    if (staging) {
      staged_ = run.device().allocate(transfer::Space::kDevice,
                                      per_set * static_cast<std::size_t>(layers.kv().row_bytes()));
    }
    per_set_ = static_cast<std::int64_t>(per_set);
  }

  [[nodiscard]] transfer::SelectionView view(int set) const {
    return {.ids = ids_.as<std::int32_t>() + set * per_set_,
            .head_mask = masks_.as<std::uint16_t>(),
            .counts = counts_.as<std::int32_t>(),
            .capacity = rows_,
            .staged = staged_.data(),
            .staged_capacity = staged_.data() == nullptr ? 0 : rows_};
  }

 private:
  template <typename T>
  static transfer::Buffer upload(Run& run, const std::vector<T>& values) {
    transfer::Buffer buffer =
        run.device().allocate(transfer::Space::kDevice, values.size() * sizeof(T));
    KVTIER_CUDA_CHECK(
        cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
    return buffer;
  }

  std::int64_t rows_;
  std::int64_t per_set_ = 0;
  transfer::Buffer ids_, masks_, counts_, staged_;
};

}  // namespace

void bench_gather(Run& run, const std::vector<std::int64_t>& rows_per_head, KvPlacement placement,
                  std::int64_t region_gib, PageFormat format) {
  constexpr std::int64_t kTokens = 1 << 20;
  constexpr int kSets = 32;
  const bool int8 = format == PageFormat::kInt8;
  const std::int64_t layer_gib = int8 ? 2 : 4;
  const bool host = placement == KvPlacement::kHost;
  const int num_layers = static_cast<int>(std::max<std::int64_t>(region_gib / layer_gib, 1));
  const Layers layers(run,
                      {.tokens = kTokens,
                       .layers = num_layers,
                       .pages = true,
                       .page_space = host ? transfer::Space::kPinnedHost : transfer::Space::kDevice,
                       .page_format = format});
  for (const std::int64_t rows : rows_per_head) {
    const RandomSelections selections(run, layers, kSets, rows, true);
    const auto gather = [&](int set) {
      transfer::gather_rows(run.queue(), layers.kv(), layers.sequences(set % num_layers),
                            layers.query_batch(), selections.view(set), !host, layers.flags());
    };
    gather(0);
    const Times times = time_graph(run.stream(), kSets, std::min(run.replays(), 12), [&] {
      for (int set = 0; set < kSets; ++set) gather(set);
    });
    const double row_bytes = static_cast<double>(layers.kv().page_bytes()) /
                             (layers.kv().kv_heads * Layers::kPageTokens);
    const double bytes = static_cast<double>(rows * layers.shape().kv_heads) * row_bytes;
    json measured;
    if (host) {
      measured["share_of_link"] = bytes / times.median * 1e-3 / run.machine().host_to_device_gbps();
    }
    json parameters = {{"rows", rows * layers.shape().kv_heads},
                       {"placement", name_of(placement)},
                       {"region_gib", layer_gib * num_layers},
                       {"row_sets", kSets}};
    if (int8) parameters["kv_dtype"] = "int8";
    run.add_bytes("gather", parameters, times, bytes, measured);
  }
}

void bench_flash_decode(Run& run, std::int64_t tokens, std::int64_t rows_per_head) {
  const double row_bytes = 512.0 * 8;
  const auto wanted = static_cast<double>(rows_per_head) * row_bytes;
  const int num_layers = std::clamp(static_cast<int>(200e6 / wanted) + 1, 1, 16);
  const Layers layers(run, {.tokens = tokens, .layers = num_layers, .pages = true});
  attention::FlashDecode flash(run.device(),
                               {.num_queries = 1, .query_heads = 32, .head_dim = 128});
  const DeviceTensor out(32 * 128, 72);
  attention::OutputBatch outputs;
  outputs.push({.out = out.data(), .dtype = DType::kBFloat16, .head_stride = 128});
  const auto request = [&](int layer, LayerMode mode) {
    return attention::AttendRequest{.kv = layers.kv(),
                                    .rule = {.mode = mode,
                                             .sink_tokens = 128,
                                             .recent_tokens = 128,
                                             .window_tokens = rows_per_head},
                                    .sequences = layers.sequences(layer),
                                    .query_batch = layers.query_batch(),
                                    .queries = layers.queries(layer),
                                    .softmax_scale = 1.0F / std::sqrt(128.0F),
                                    .max_length = tokens,
                                    .flags = layers.flags(),
                                    .pages_on_device = true,
                                    .places = {}};
  };
  const json parameters = {{"tokens", tokens}, {"rows", rows_per_head * 8}};
  {
    const RandomSelections selections(run, layers, num_layers, rows_per_head, false);
    const Times times = time_graph(
        run.stream(), num_layers, run.replays(),
        [&] {
          for (int layer = 0; layer < num_layers; ++layer) {
            flash.attend(run.queue(), request(layer, LayerMode::kSparse), selections.view(layer),
                         rows_per_head, outputs);
          }
        },
        graph_passes(num_layers));
    json random = parameters;
    random["order"] = "random rows, with sinks and recent tokens";
    run.add_bytes("flash_decode", random, times, wanted + 256 * row_bytes);
  }
  {
    const Times times = time_graph(
        run.stream(), num_layers, run.replays(),
        [&] {
          for (int layer = 0; layer < num_layers; ++layer) {
            flash.attend(run.queue(), request(layer, LayerMode::kSlidingWindow), {}, 0, outputs);
          }
        },
        graph_passes(num_layers));
    json contiguous = parameters;
    contiguous["order"] = "the last tokens";
    run.add_bytes("flash_decode", contiguous, times, wanted);
  }
}

}  // namespace kvtier::bench
