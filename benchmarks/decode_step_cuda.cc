#include "benchmarks/benchmarks.h"
#include "benchmarks/steps_cuda.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <vector>

namespace kvtier::bench {
namespace {

constexpr std::int64_t kChunk = 32768;
constexpr double kRotatedBytes = 160e6;

/// Bytes that one layer's step must read.
double bytes_read(const StepCase& step) {
  const double pairs =
      static_cast<double>(step.tokens) * static_cast<double>(step.batch * step.kv_heads);
  if (step.dense) return pairs * 4 * step.head_dim;
  const RetrievalConfig& r = step.retrieval;
  const double rows = static_cast<double>(step.batch * step.kv_heads) *
                      (r.sparsity > 0 ? static_cast<double>(step.tokens) / r.sparsity : r.top_k);
  return pairs * (static_cast<double>((r.sketch(step.head_dim).num_planes + 127) / 128 * 16) + 4) +
         rows * 4 * step.head_dim;
}

}  // namespace

int num_layers(const StepCase& step) {
  if (step.layers > 0) return step.layers;
  return std::clamp(static_cast<int>(kRotatedBytes / bytes_read(step)) + 1, 1, 32);
}

Config engine_config(const StepCase& step, int layers) {
  Config config;
  config.backend = Backend::kCuda;
  config.dense_when_faster = false;  // what is measured as sparse is
  config.model = {.layers = layers,
                  .query_heads = step.query_heads,
                  .kv_heads = step.kv_heads,
                  .head_dim = step.head_dim,
                  .kv_dtype = DType::kBFloat16};
  if (step.dense) {
    config.model.layer_options.assign(static_cast<std::size_t>(layers),
                                      {.mode = LayerMode::kDense});
  }
  config.retrieval = step.retrieval;
  const std::int64_t capacity = step.tokens + step.replayed_tokens + 24;
  config.memory.max_session_tokens = capacity;
  config.memory.max_batch_rows = step.batch;
  config.memory.placement = step.placement;
  config.memory.page_format = step.page_format;
  config.memory.verify_rows = step.verify_rows;
  // Replays have the same queries: with a row cache nothing would be fetched.
  config.memory.row_cache_bytes = 0;
  const auto kv_bytes = static_cast<std::size_t>(capacity) *
                        static_cast<std::size_t>(step.batch * layers) *
                        static_cast<std::size_t>(step.kv_heads * step.head_dim * 4);
  std::size_t free_bytes = 0, total_bytes = 0;
  KVTIER_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  config.memory.host_bytes = kv_bytes + 64 * MiB;
  config.memory.device_bytes =
      std::min(free_bytes - 6 * GiB,
               (step.placement == KvPlacement::kDevice ? kv_bytes : 0) + kv_bytes / 3 + 12 * GiB);
  return config;
}

TensorView view(const __nv_bfloat16* data, std::int64_t tokens, int heads, int head_dim) {
  return {data, DType::kBFloat16, {tokens, heads, head_dim}, MemorySpace::kDevice};
}

std::vector<Session> open_sessions(Run& run, Engine& engine, const StepCase& step, int layers) {
  const std::int64_t values_in_chunk =
      std::min(kChunk, step.tokens) * step.kv_heads * step.head_dim;
  const DeviceTensor keys(values_in_chunk, 11);
  const DeviceTensor values(values_in_chunk, 12);
  const StreamRef stream = StreamRef::of(run.stream());
  std::vector<Session> sessions;
  std::uint64_t seed = 100;
  for (int b = 0; b < step.batch; ++b) {
    sessions.push_back(engine.open());
    for (int layer = 0; layer < layers; ++layer) {
      for (std::int64_t t = 0; t < step.tokens; t += kChunk) {
        const std::int64_t n = std::min(kChunk, step.tokens - t);
        fill_normal(run.stream(), keys.data(), keys.count(), seed++, 1.0F);
        sessions.back().append(layer, view(keys.data(), n, step.kv_heads, step.head_dim),
                               view(values.data(), n, step.kv_heads, step.head_dim), stream);
      }
    }
    sessions.back().reserve(step.replayed_tokens, stream);
  }
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  return sessions;
}

json step_parameters(const StepCase& step, int layers) {
  json values = {{"tokens", step.tokens},
                 {"batch", step.batch},
                 {"query_heads", step.query_heads},
                 {"kv_heads", step.kv_heads},
                 {"head_dim", step.head_dim},
                 {"placement", name_of(step.placement)},
                 {"layers", layers}};
  if (step.dense) {
    values["estimator"] = "dense";
  } else {
    values.update(retrieval_parameters(step.retrieval, step.head_dim));
    if (step.recall > 0) values["recall"] = step.recall;
  }
  if (step.page_format == PageFormat::kInt8) values["kv_dtype"] = "int8";
  if (step.verify_rows) values["verify_rows"] = true;
  return values;
}

void bench_decode_step(Run& run, const StepCase& given) {
  StepCase step = given;
  const int layers = num_layers(step);
  const int passes = graph_passes(layers);
  // A token for each visit of a layer, the first and those of `Graph::stages` included.
  step.replayed_tokens = 1 + passes * (run.replays() + 3) + (step.stages ? 1000 : 0);
  Engine engine(engine_config(step, layers));
  std::vector<Session> sessions = open_sessions(run, engine, step, layers);
  const std::int64_t row = step.query_heads * step.head_dim;
  const std::int64_t kv_row = step.kv_heads * step.head_dim;
  const DeviceTensor queries(layers * step.batch * row, 77, 2.0F);
  const DeviceTensor new_kv(layers * step.batch * kv_row, 78);
  const DeviceTensor out(step.batch * row, 79);
  const StreamRef stream = StreamRef::of(run.stream());
  AttendOptions options;
  if (step.recall > 0) options.recall_target = RecallTarget{.recall = step.recall};
  const auto one_layer = [&](int layer) {
    std::vector<BatchItem> items;
    for (int b = 0; b < step.batch; ++b) {
      const std::int64_t at = std::int64_t{layer} * step.batch + b;
      const TensorView kv = view(new_kv.data() + at * kv_row, 1, step.kv_heads, step.head_dim);
      items.push_back(
          {.session = &sessions[static_cast<std::size_t>(b)],
           .inputs = {.query = view(queries.data() + at * row, 1, step.query_heads, step.head_dim),
                      .key = kv,
                      .value = kv},
           .outputs = {.out = {out.data() + b * row,
                               DType::kBFloat16,
                               {1, step.query_heads, step.head_dim},
                               MemorySpace::kDevice}},
           .options = options});
    }
    engine.decode(layer, items, stream);
  };
  const auto all_layers = [&] {
    for (int layer = 0; layer < layers; ++layer) one_layer(layer);
  };
  all_layers();
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  const Stats before = engine.stats();
  const Times times = time_graph(run.stream(), layers, run.replays(), all_layers, passes);
  const auto moved = engine.stats().cumulative - before.cumulative;
  const double steps = static_cast<double>(run.replays() + 3) * layers * passes;
  json measured = {
      {"graph_steps", layers * passes},
      {"rows_attended", static_cast<double>(moved.rows_attended) / steps},
      {"bytes_sketch", static_cast<double>(moved.bytes_sketch_read) / steps},
      {"bytes_host", static_cast<double>(moved.bytes_host_to_device) / steps},
  };
  if (step.stages) {
    const Graph graph(run.stream(), [&] { one_layer(0); });
    const Graph every_layer(run.stream(), all_layers);
    json stages = json::array();
    for (const Graph::Stage& stage :
         graph.stages(run.stream(), 15, [&] { every_layer.launch(run.stream()); })) {
      stages.push_back({{"kernel", stage.kernel}, {"us", stage.us}});
    }
    measured["stages"] = stages;
  }
  run.add("decode_step", step_parameters(step, layers), times, measured);
}

}  // namespace kvtier::bench
