#include "kvtier/engine.h"
#include "kvtier/error.h"
#include "kvtier/memory.h"

#include "benchmarks/benchmarks.h"
#include "benchmarks/context_cuda.h"
#include "benchmarks/decoder_cuda.h"
#include "benchmarks/model_rows_cuda.h"
#include "include/types/host_memory.h"
#include "services/tools/stress/memory.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace kvtier::bench {
namespace {

using services::show_bytes;

constexpr int kStageTokens = 256;

/// Everything but attention.
double bench_rest(Run& run, const ModelCase& shape, const RandomDecoder& model, int batch) {
  const TokenGraph graph(run, [&] {
    model.decode(
        batch, 0, [](int) { return RandomDecoder::Caches{}; }, [](int) {});
  });
  static_cast<void>(graph.replay(0, kWarmupTokens));
  ModelTime time{.batch = batch, .gpu_bytes = GpuMemory().used()};
  summarize(graph.replay(0, run.replays()), time);
  const double bytes = model.weight_bytes_read(batch);
  add_model_row(run, shape, "none", time,
                {{"weight_bytes", model.weight_bytes()},
                 {"weight_bytes_read", bytes},
                 {"gbps", bytes / time.times.median * 1e-3}});
  return time.times.median;
}

/// One engine of a context: where its KV is, and the rows per KV head that stay on the GPU.
struct Variant {
  KvPlacement placement = KvPlacement::kDevice;
  std::optional<int> row_cache_rows;
};

std::int64_t spare_tokens(const Run& run, const ModelCase& shape) {
  return kWarmupTokens + run.replays() + 8 + (shape.stages ? 2 * kStageTokens : 0);
}

Config engine_config(const ModelCase& shape, const CaseOfModel& at, std::int64_t spare,
                     const Variant& variant) {
  Config config;
  config.backend = Backend::kCuda;
  config.dense_when_faster = false;  // what is measured as sparse is
  config.model = {.layers = shape.layers,
                  .query_heads = shape.query_heads,
                  .kv_heads = shape.kv_heads,
                  .head_dim = shape.head_dim};
  for (int layer = 0; layer < shape.layers && shape.window > 0; ++layer) {
    LayerConfig& options = config.model.layer_options.emplace_back();
    if (!slides(shape, layer)) continue;
    options.mode = LayerMode::kSlidingWindow;
    options.window_tokens = shape.window;
  }
  config.retrieval = shape.retrieval;
  if (!shape.top_ks.empty()) {
    config.retrieval.sparsity = 0.0;
    config.retrieval.top_k = *std::ranges::max_element(shape.top_ks);
  }
  config.memory.page_format = shape.page_format;
  config.memory.max_session_tokens = at.tokens + spare;
  config.memory.max_batch_rows = at.batch;
  config.memory.placement = variant.placement;

  config.memory.host_allocation = shape.host_allocation;
  if (variant.row_cache_rows) config.memory.row_cache_rows = *variant.row_cache_rows;
  const std::int64_t length = at.tokens + spare;
  const std::size_t pages =
      session_memory(config, length).pages * static_cast<std::size_t>(at.batch);
  const bool on_host = variant.placement == KvPlacement::kHost;
  config.memory.host_bytes = pages;
  config.memory.device_bytes = device_bytes_for(config, config.backend, length, at.batch);
  const std::optional<std::size_t> host = available_host_bytes();
  if (on_host && host && *host < pages) {
    throw Error(ErrorCode::kResourceExhausted,
                "KV in host memory: expected at least " + show_bytes(static_cast<double>(pages)) +
                    " available, found " + show_bytes(static_cast<double>(*host)));
  }
  return config;
}

/// Tokens by kvtier: an engine with a context in each of its sessions.
class SparseTokens {
 public:
  SparseTokens(Run& run, const ModelCase& shape, const RandomDecoder& model, const CaseOfModel& at,
               const Variant& variant)
      : run_(run),
        shape_(shape),
        model_(model),
        at_(at),
        variant_(variant),
        engine_(engine_config(shape, at, spare_tokens(run, shape), variant)),
        context_(run,
                 {.layers = shape.layers,
                  .batch = at.batch,
                  .query_heads = shape.query_heads,
                  .kv_heads = shape.kv_heads,
                  .head_dim = shape.head_dim,
                  .tokens = at.tokens},
                 shape.drift) {
    for (int i = 0; i < at.batch; ++i) {
      sessions_.push_back(engine_.open());
      context_.fill(sessions_.back(), i);
    }
  }

  [[nodiscard]] ModelTime measure(const RetrievalConfig& retrieval) {
    const StreamRef stream = StreamRef::of(run_.stream());
    for (Session& session : sessions_) {
      session.truncate(at_.tokens, stream);
      session.reserve(spare_tokens(run_, shape_), stream);
    }
    options_.retrieval = &retrieval;
    context_.make_queries(kWarmupTokens + run_.replays() + 1);
    context_.load_queries(0);
    enqueue();  // so that kernels are loaded before the capture
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run_.stream()));
    const TokenGraph graph(
        run_, [this] { enqueue(); }, [this](int i) { context_.load_queries(i); });
    static_cast<void>(graph.replay(1, kWarmupTokens));
    const Stats::Cumulative before = engine_.stats().cumulative;
    ModelTime time{.tokens = at_.tokens, .batch = at_.batch, .attention = label(retrieval)};
    time.gpu_bytes = GpuMemory().used();
    summarize(graph.replay(1 + kWarmupTokens, run_.replays()), time);
    const Stats::Cumulative moved = engine_.stats().cumulative - before;
    const auto looked_for = static_cast<double>(moved.row_cache_hits + moved.row_cache_misses);
    if (looked_for > 0) time.found = static_cast<double>(moved.row_cache_hits) / looked_for;
    record(retrieval, time, moved, shape_.stages ? stages(graph) : json());
    for (Session& session : sessions_) {
      for (int layer = 0; layer < shape_.layers; ++layer) {
        session.advance(layer, kWarmupTokens + run_.replays());
      }
    }
    return time;
  }

 private:
  [[nodiscard]] TensorView view(const __nv_bfloat16* data, int item, int heads) const {
    return {data + std::int64_t{item} * heads * shape_.head_dim,
            DType::kBFloat16,
            {1, heads, shape_.head_dim},
            MemorySpace::kDevice};
  }

  void attend(int layer) {
    const __nv_bfloat16* drifting = context_.queries(layer);
    const __nv_bfloat16* query = drifting != nullptr ? drifting : model_.query();
    std::vector<BatchItem> items;
    for (int i = 0; i < at_.batch; ++i) {
      const std::int64_t out = std::int64_t{i} * shape_.query_heads * shape_.head_dim;
      items.push_back({.session = &sessions_[static_cast<std::size_t>(i)],
                       .inputs = {.query = view(query, i, shape_.query_heads),
                                  .key = view(model_.key(), i, shape_.kv_heads),
                                  .value = view(model_.value(), i, shape_.kv_heads)},
                       .outputs = {.out = {model_.context() + out,
                                           DType::kBFloat16,
                                           {1, shape_.query_heads, shape_.head_dim},
                                           MemorySpace::kDevice}},
                       .options = options_});
    }
    engine_.decode(layer, items, StreamRef::of(run_.stream()));
  }

  void enqueue() {
    model_.decode(
        at_.batch, at_.tokens, [](int) { return RandomDecoder::Caches{}; },
        [this](int layer) { attend(layer); });
  }

  /// Time of each kernel of one layer that selects, after whole tokens whose queries it follows.
  [[nodiscard]] json stages(const TokenGraph& token) {
    context_.make_queries(kStageTokens + 1);
    int step = 0;
    const auto before = [&] {
      context_.load_queries(step);
      token.launch();
      step = std::min(step + 1, kStageTokens);
      context_.load_queries(step);
    };
    const Graph layer(run_.stream(), [this] { attend(shape_.window > 0 ? 1 : 0); });
    json stages = json::array();
    for (const Graph::Stage& stage : layer.stages(run_.stream(), 9, before)) {
      stages.push_back({{"kernel", stage.kernel}, {"us", stage.us}});
    }
    return stages;
  }

  [[nodiscard]] std::string label(const RetrievalConfig& retrieval) const {
    std::array<char, 64> chosen{};
    if (retrieval.sparsity > 0) {
      std::snprintf(chosen.data(), chosen.size(), "%gx, ", retrieval.sparsity);
    } else if (retrieval.top_k == 0) {
      std::snprintf(chosen.data(), chosen.size(), "e=%g, ", retrieval.error_in_force());
    } else {
      std::snprintf(chosen.data(), chosen.size(), "k %d, ", retrieval.top_k);
    }
    if (variant_.placement == KvPlacement::kDevice)
      return chosen.data() + std::string("KV on the device");
    std::string text = chosen.data() + std::string("KV in host memory");
    return text + ", " + std::to_string(engine_.stats().snapshot.row_cache_rows) + " rows cached";
  }

  void record(const RetrievalConfig& retrieval, const ModelTime& time,
              const Stats::Cumulative& moved, const json& stages) const {
    const Stats::Snapshot memory = engine_.stats().snapshot;
    const double tokens = run_.replays();
    json measured = retrieval_parameters(retrieval, shape_.head_dim);
    measured["placement"] = name_of(variant_.placement);
    measured["kv_dtype"] = shape_.page_format == PageFormat::kInt8 ? "int8" : "bf16";
    measured["context_kv"] = "appended, not computed by a prefill";
    measured["locality"] = context_.describe();
    measured["weight_bytes"] = model_.weight_bytes();
    measured["device_bytes"] = memory.device_bytes;
    measured["host_bytes"] = memory.host_page_bytes_used;
    measured["bytes_host"] = static_cast<double>(moved.bytes_host_to_device) / tokens;
    measured["rows_attended"] = static_cast<double>(moved.rows_attended) / tokens;
    if (variant_.placement == KvPlacement::kHost) {
      measured["row_cache_rows"] = memory.row_cache_rows;
      measured["row_cache_bytes"] = memory.row_cache_bytes;
    }
    if (time.found) measured["found"] = *time.found;
    if (!stages.is_null()) measured["stages"] = stages;
    add_model_row(run_, shape_, "kvtier, pages on the " + name_of(variant_.placement), time,
                  measured);
  }

  Run& run_;
  const ModelCase& shape_;
  const RandomDecoder& model_;
  CaseOfModel at_;
  Variant variant_;
  Engine engine_;
  Context context_;
  std::vector<Session> sessions_;
  AttendOptions options_;
};

/// The retrieval of each row of an engine.
std::vector<RetrievalConfig> retrievals(const ModelCase& shape) {
  if (shape.top_ks.empty()) return {shape.retrieval};
  std::vector<RetrievalConfig> all;
  for (const int k : shape.top_ks) {
    all.push_back(shape.retrieval);
    all.back().sparsity = 0.0;
    all.back().top_k = k;
  }
  return all;
}

std::vector<Variant> variants(const ModelCase& shape) {
  std::vector<Variant> all;
  for (const KvPlacement placement : shape.placements) {
    if (placement == KvPlacement::kDevice || shape.row_cache_rows.empty()) {
      all.push_back({placement, {}});
      continue;
    }
    for (const int rows : shape.row_cache_rows) all.push_back({placement, rows});
  }
  return all;
}

/// Runs `work`; where memory does not suffice, the row says so.
void where_it_fits(Run& run, const ModelCase& shape, ModelTime row, std::vector<ModelTime>& rows,
                   const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    row.error = error.what();
    run.note("model", model_parameters(shape, {row.tokens, row.batch}, row.attention),
             {{"error", row.error}});
    rows.push_back(std::move(row));
  }
}

}  // namespace

std::vector<ModelTime> bench_model(Run& run, const ModelCase& shape) {
  const RandomDecoder model(run, shape, *std::ranges::max_element(shape.batches));
  const std::vector<RetrievalConfig> selections = retrievals(shape);
  std::vector<ModelTime> rows;
  for (const int batch : shape.batches) {
    const double rest = bench_rest(run, shape, model, batch);
    for (const std::int64_t tokens : shape.contexts) {
      const CaseOfModel at{tokens, batch};
      double dense = 0.0;
      ModelTime named{.tokens = tokens, .batch = batch, .attention = "dense"};
      named.dense = true;
      if (shape.dense) {
        where_it_fits(run, shape, named, rows, [&] {
          rows.push_back(bench_dense_model(run, shape, model, at));
          dense = rows.back().times.median;
        });
      }
      for (const Variant& variant : variants(shape)) {
        named.attention = "kvtier, pages on the " + name_of(variant.placement);
        named.dense = false;
        where_it_fits(run, shape, named, rows, [&] {
          SparseTokens sparse(run, shape, model, at, variant);
          for (const RetrievalConfig& retrieval : selections) {
            ModelTime time = sparse.measure(retrieval);
            if (dense > 0.0) {
              time.over_dense = dense / time.times.median;
              run.note("model_ratio", model_parameters(shape, at, time.attention),
                       {{"over_dense", time.over_dense},
                        {"attention_over_dense", (dense - rest) / (time.times.median - rest)}});
            }
            rows.push_back(std::move(time));
          }
        });
      }
    }
  }
  return rows;
}

}  // namespace kvtier::bench
