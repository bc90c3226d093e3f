#include "kvtier/engine.h"

#include "benchmarks/benchmarks.h"
#include "benchmarks/cublas_cuda.h"
#include "benchmarks/cudnn_attention_cuda.h"
#include "benchmarks/model_kernels_cuda.h"
#include "transfer/cuda_check.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>

namespace kvtier::bench {
namespace {

constexpr std::int64_t kChunk = 16384;
constexpr float kWeightScale = 0.02F;

struct Layer {
  std::unique_ptr<DeviceTensor> qkv, out, gate_up, down;
};

/// A decoder with random bf16 weights, for one token at a time.
class Model {
 public:
  Model(Run& run, const ModelCase& shape)
      : run_(run),
        shape_(shape),
        blas_(run.cuda_libs(), run.stream()),
        head_(shape.vocabulary * shape.hidden, 1, kWeightScale),
        hidden_(shape.hidden, 2),
        normed_(shape.hidden, 3),
        qkv_(qkv_columns(), 4),
        context_(q_columns(), 5),
        gate_up_(2 * shape.inner, 6),
        gated_(shape.inner, 7),
        logits_(shape.vocabulary, 8) {
    std::uint64_t seed = 10;
    const auto weight = [&](std::int64_t rows, std::int64_t columns) {
      weight_bytes_ += 2.0 * static_cast<double>(rows * columns);
      return std::make_unique<DeviceTensor>(rows * columns, seed++, kWeightScale);
    };
    weight_bytes_ = 2.0 * static_cast<double>(head_.count());
    for (int i = 0; i < shape.layers; ++i) {
      layers_.push_back({.qkv = weight(qkv_columns(), shape.hidden),
                         .out = weight(shape.hidden, q_columns()),
                         .gate_up = weight(2 * shape.inner, shape.hidden),
                         .down = weight(shape.hidden, shape.inner)});
    }
  }

  [[nodiscard]] double weight_bytes() const { return weight_bytes_; }
  [[nodiscard]] const __nv_bfloat16* query() const { return qkv_.data(); }
  [[nodiscard]] const __nv_bfloat16* key() const { return query() + q_columns(); }
  [[nodiscard]] const __nv_bfloat16* value() const { return key() + kv_columns(); }
  [[nodiscard]] __nv_bfloat16* context() const { return context_.data(); }

  struct Caches {
    __nv_bfloat16* keys = nullptr;
    __nv_bfloat16* values = nullptr;
  };
  /// Enqueues one token, from its hidden state to its logits. `attend(layer)` turns query, key and
  /// value into `context`; `caches(layer)` says where a dense path wants key and value, which sees
  /// `tokens` tokens, this one the last.
  void decode(std::int64_t tokens, const std::function<Caches(int)>& caches,
              const std::function<void(int)>& attend) const {
    const std::int64_t h = shape_.hidden;
    cudaStream_t stream = run_.stream();
    for (int i = 0; i < shape_.layers; ++i) {
      const Layer& layer = layers_[static_cast<std::size_t>(i)];
      rms_norm(stream, hidden_.data(), 1, h, normed_.data());
      blas_.multiply(normed_.data(), layer.qkv->data(), 1, qkv_columns(), h, qkv_.data());
      const Caches to = caches(i);
      rotate_and_store(stream, {.qkv = qkv_.data(),
                                .query_heads = shape_.query_heads,
                                .kv_heads = shape_.kv_heads,
                                .head_dim = shape_.head_dim,
                                .position = tokens - 1,
                                .keys = to.keys,
                                .values = to.values,
                                .tokens = tokens});
      attend(i);
      blas_.multiply(context(), layer.out->data(), 1, h, q_columns(), hidden_.data(), 1.0F);
      rms_norm(stream, hidden_.data(), 1, h, normed_.data());
      blas_.multiply(normed_.data(), layer.gate_up->data(), 1, 2 * shape_.inner, h,
                     gate_up_.data());
      gated(stream, gate_up_.data(), 1, shape_.inner, gated_.data());
      blas_.multiply(gated_.data(), layer.down->data(), 1, h, shape_.inner, hidden_.data(), 1.0F);
    }
    rms_norm(stream, hidden_.data(), 1, h, normed_.data());
    blas_.multiply(normed_.data(), head_.data(), 1, shape_.vocabulary, h, logits_.data());
  }

 private:
  [[nodiscard]] std::int64_t q_columns() const {
    return std::int64_t{shape_.query_heads} * shape_.head_dim;
  }
  [[nodiscard]] std::int64_t kv_columns() const {
    return std::int64_t{shape_.kv_heads} * shape_.head_dim;
  }
  [[nodiscard]] std::int64_t qkv_columns() const { return q_columns() + 2 * kv_columns(); }

  Run& run_;
  const ModelCase& shape_;
  CublasLibrary blas_;
  DeviceTensor head_, hidden_, normed_, qkv_, context_, gate_up_, gated_, logits_;
  std::vector<Layer> layers_;
  double weight_bytes_ = 0.0;
};

json parameters(const ModelCase& shape, std::int64_t tokens, const std::string& attention) {
  return {{"tokens", tokens},
          {"layers", shape.layers},
          {"hidden", shape.hidden},
          {"inner", shape.inner},
          {"query_heads", shape.query_heads},
          {"kv_heads", shape.kv_heads},
          {"head_dim", shape.head_dim},
          {"vocabulary", shape.vocabulary},
          {"attention", attention}};
}

void add(Run& run, const ModelCase& shape, std::int64_t tokens, const std::string& attention,
         const Times& times, json measured) {
  measured["tokens_per_second"] = 1e6 / times.median;
  run.add("model", parameters(shape, tokens, attention), times, measured);
}

/// Everything but attention.
double bench_rest(Run& run, const ModelCase& shape, const Model& model) {
  const Times times = time_graph(run.stream(), 1, run.replays(), [&] {
    model.decode(
        1, [](int) { return Model::Caches{}; }, [](int) {});
  });
  add(run, shape, 0, "none", times,
      {{"weight_bytes", model.weight_bytes()},
       {"gbps", model.weight_bytes() / times.median * 1e-3}});
  return times.median;
}

ModelTime bench_dense(Run& run, const ModelCase& shape, const Model& model, std::int64_t tokens) {
  const auto library = CudnnLibrary::load(run.cuda_libs());
  const CudnnAttention attention(library, {.tokens = tokens,
                                           .batch = 1,
                                           .query_heads = shape.query_heads,
                                           .kv_heads = shape.kv_heads,
                                           .head_dim = shape.head_dim});
  const std::int64_t cache = tokens * shape.kv_heads * shape.head_dim;
  const DeviceTensor keys(cache * shape.layers, 31), values(cache * shape.layers, 32);
  std::optional<Times> best;
  int best_plan = 0;
  for (int plan = 0; plan < attention.num_plans(); ++plan) {
    const auto caches = [&](int layer) {
      return Model::Caches{keys.data() + layer * cache, values.data() + layer * cache};
    };
    const auto attend = [&](int layer) {
      attention.run(run.stream(), plan, model.query(), caches(layer).keys, caches(layer).values,
                    model.context());
    };
    attend(0);  // what a library does at its first call is not for a graph
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
    const Times times =
        time_graph(run.stream(), 1, run.replays(), [&] { model.decode(tokens, caches, attend); });
    if (best && best->median <= times.median) continue;
    best = times;
    best_plan = plan;
  }
  add(run, shape, tokens, "cudnn", *best,
      {{"kv_bytes", 4.0 * static_cast<double>(cache * shape.layers)},
       {"plan", best_plan},
       {"library", library->name()}});
  return {tokens, "dense, " + library->name(), *best, true};
}

Config engine_config(const ModelCase& shape, std::int64_t tokens, std::int64_t spare,
                     KvPlacement placement) {
  Config config;
  config.backend = Backend::kCuda;
  config.model = {.layers = shape.layers,
                  .query_heads = shape.query_heads,
                  .kv_heads = shape.kv_heads,
                  .head_dim = shape.head_dim};
  config.retrieval = shape.retrieval;
  config.memory.max_session_tokens = tokens + spare;
  config.memory.max_batch_rows = 1;
  config.memory.placement = placement;
  const auto kv_bytes = static_cast<std::size_t>(tokens + spare) *
                        static_cast<std::size_t>(shape.layers * shape.kv_heads) *
                        static_cast<std::size_t>(4 * shape.head_dim);
  config.memory.host_bytes = kv_bytes + 64 * MiB;
  config.memory.device_bytes =
      (placement == KvPlacement::kDevice ? kv_bytes : 0) + kv_bytes / 4 + 4 * GiB;
  return config;
}

ModelTime bench_sparse(Run& run, const ModelCase& shape, const Model& model, std::int64_t tokens,
                       KvPlacement placement) {
  const std::int64_t spare = run.replays() + 64;
  Engine engine(engine_config(shape, tokens, spare, placement));
  Session session = engine.open();
  const StreamRef stream = StreamRef::of(run.stream());
  const auto view = [&](const __nv_bfloat16* data, std::int64_t count, int heads) {
    return TensorView{data, DType::kBFloat16, {count, heads, shape.head_dim}, MemorySpace::kDevice};
  };
  {
    const std::int64_t chunk = std::min(kChunk, tokens - 1) * shape.kv_heads * shape.head_dim;
    const DeviceTensor keys(chunk, 41), values(chunk, 42);
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (std::int64_t t = 0; t < tokens - 1; t += kChunk) {
        const std::int64_t n = std::min(kChunk, tokens - 1 - t);
        fill_normal(run.stream(), keys.data(), chunk,
                    static_cast<std::uint64_t>(1000 + layer * 100000 + t / kChunk), 1.0F);
        session.append(layer, view(keys.data(), n, shape.kv_heads),
                       view(values.data(), n, shape.kv_heads), stream);
      }
    }
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  }
  session.reserve(spare, stream);
  const MutableTensorView out{model.context(),
                              DType::kBFloat16,
                              {1, shape.query_heads, shape.head_dim},
                              MemorySpace::kDevice};
  const Times times = time_graph(run.stream(), 1, run.replays(), [&] {
    model.decode(
        tokens, [](int) { return Model::Caches{}; },
        [&](int layer) {
          session.decode(layer,
                         {.query = view(model.query(), 1, shape.query_heads),
                          .key = view(model.key(), 1, shape.kv_heads),
                          .value = view(model.value(), 1, shape.kv_heads)},
                         {.out = out}, stream);
        });
  });
  json measured = retrieval_parameters(shape.retrieval, shape.head_dim);
  measured["placement"] = name_of(placement);
  measured["device_bytes"] = engine.stats().snapshot.device_bytes;
  add(run, shape, tokens, "kvtier, pages on the " + name_of(placement), times, measured);
  return {tokens, placement == KvPlacement::kHost ? "KV in host memory" : "KV on the device", times,
          false};
}

/// The rows of one context, the dense one first.
std::vector<ModelTime> measure_context(Run& run, const ModelCase& shape, const Model& model,
                                       double rest, std::int64_t tokens) {
  std::vector<ModelTime> rows = {bench_dense(run, shape, model, tokens)};
  const double dense = rows.front().times.median;
  for (const KvPlacement placement : {KvPlacement::kDevice, KvPlacement::kHost}) {
    rows.push_back(bench_sparse(run, shape, model, tokens, placement));
    const double sparse = rows.back().times.median;
    run.note("model_ratio", parameters(shape, tokens, "kvtier, pages on the " + name_of(placement)),
             {{"over_dense", dense / sparse},
              {"attention_over_dense", (dense - rest) / (sparse - rest)}});
  }
  return rows;
}

}  // namespace

void bench_model(Run& run, const ModelCase& shape) {
  const Model model(run, shape);
  const double rest = bench_rest(run, shape, model);
  for (const std::int64_t tokens : shape.contexts) {
    run.attempt("model", parameters(shape, tokens, "all"),
                [&] { static_cast<void>(measure_context(run, shape, model, rest, tokens)); });
  }
}

std::vector<ModelTime> measure_model(Run& run, const ModelCase& shape) {
  const Model model(run, shape);
  const double rest = bench_rest(run, shape, model);
  std::vector<ModelTime> rows;
  for (const std::int64_t tokens : shape.contexts) {
    std::ranges::move(measure_context(run, shape, model, rest, tokens), std::back_inserter(rows));
  }
  return rows;
}

}  // namespace kvtier::bench
