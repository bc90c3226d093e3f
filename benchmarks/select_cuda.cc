#include "benchmarks/benchmarks.h"
#include "benchmarks/layers_cuda.h"
#include "scoring/estimator.h"
#include "scoring/selector.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>

namespace kvtier::bench {

void bench_tables(Run& run, int batch, const RetrievalConfig& retrieval) {
  constexpr int kLayers = 8;
  const Layers layers(run, {.tokens = 1024,
                            .batch = batch,
                            .layers = kLayers,
                            .num_planes = retrieval.sketch(LayerShape{}.head_dim).num_planes,
                            .kind = retrieval.planes()});
  const scoring::ScoreParams params = layers.select_request(0, retrieval).params;
  const int heads = layers.shape().query_heads;
  const std::size_t entries = static_cast<std::size_t>(batch * heads) *
                              static_cast<std::size_t>(scoring::entries_per_head(params));
  const transfer::Buffer tables =
      run.device().allocate(transfer::Space::kDevice, entries * sizeof(float));
  const transfer::Buffer scalars =
      run.device().allocate(transfer::Space::kDevice, static_cast<std::size_t>(batch * heads) *
                                                          sizeof(scoring::QueryScalars));
  const auto build = [&](int layer) {
    scoring::build_query_tables(run.queue(), params, layers.planes(), layers.queries(layer), batch,
                                heads, tables.as<float>(), scalars.as<scoring::QueryScalars>());
  };
  build(0);
  const Times times = time_graph(
      run.stream(), kLayers, run.replays(),
      [&] {
        for (int layer = 0; layer < kLayers; ++layer) build(layer);
      },
      graph_passes(kLayers));
  json parameters = retrieval_parameters(retrieval);
  parameters["batch"] = batch;
  run.add("tables", parameters, times);
}

void bench_select(Run& run, std::int64_t tokens, int batch, const RetrievalConfig& retrieval) {
  const int bits = retrieval.sketch(LayerShape{}.head_dim).num_planes;
  const hashing::SketchGeometry geometry{.kv_heads = 8, .num_planes = bits};
  const std::int64_t pairs = tokens * batch * geometry.kv_heads;
  // Norm-aware scores with both norms, the others with the value's alone.
  const std::int64_t norms = retrieval.estimator == Estimator::kNormAware ? 4 : 2;
  const double bytes =
      static_cast<double>(pairs * (std::int64_t{geometry.chunks()} * hashing::kChunkBytes + norms));
  const int num_layers = std::clamp(static_cast<int>(150e6 / bytes) + 1, 1, 16);
  const Layers layers(run, {.tokens = tokens,
                            .batch = batch,
                            .layers = num_layers,
                            .num_planes = bits,
                            .kind = retrieval.planes()});
  const std::int64_t k =
      retrieval.sparsity > 0
          ? static_cast<std::int64_t>(static_cast<double>(tokens) / retrieval.sparsity)
          : retrieval.top_k;
  const bool per_head = retrieval.selection == Selection::kPerQueryHead;
  scoring::Selector selector(
      run.device(), {.num_queries = batch,
                     .query_heads = layers.shape().query_heads,
                     .kv_heads = layers.shape().kv_heads,
                     .max_tokens = tokens,
                     .max_selected = std::min(tokens, k * (per_head ? layers.kv().group : 1)),
                     .row_bytes = layers.kv().row_bytes()});
  const auto select = [&](int layer) {
    (void)selector.select(run.queue(), layers.select_request(layer, retrieval));
  };
  select(0);
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  const Times times = time_graph(
      run.stream(), num_layers, run.replays(),
      [&] {
        for (int layer = 0; layer < num_layers; ++layer) select(layer);
      },
      graph_passes(num_layers));
  // One layer alone fits the L2 cache unless the context is long; then each kernel is timed too.
  json measured;
  if (num_layers == 1) {
    const Graph graph(run.stream(), [&] { select(0); });
    json stages = json::array();
    double longest = 0.0;
    for (const Graph::Stage& stage :
         graph.stages(run.stream(), 9, [&] { graph.launch(run.stream()); })) {
      stages.push_back({{"kernel", stage.kernel}, {"us", stage.us}});
      longest = std::max(longest, stage.us);
    }
    measured = {{"stages", stages},
                {"pass_us", longest},
                {"pass_gbps", bytes / longest * 1e-3},
                {"pass_share_of_read", bytes / longest * 1e-3 / run.machine().read_gbps()}};
  }
  json parameters = layers.shape().parameters();
  parameters.update(retrieval_parameters(retrieval));
  run.add_bytes("select", parameters, times, bytes, measured);
}

}  // namespace kvtier::bench
