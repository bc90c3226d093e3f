#include "llama/bench.h"

#include "include/types/failure.h"
#include "include/types/host_memory.h"
#include "llama/decoder.h"
#include "llama/kv_store.h"
#include "llama/report.h"
#include "services/console/text.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

namespace kvtier::llama {
namespace {

using services::format;

constexpr std::int64_t kChunk = 1024;  // tokens appended at once
constexpr int kWarmupSteps = 2;

struct Shape {
  std::string name;
  std::int64_t vocabulary, hidden, inner;
  int layers, query_heads, kv_heads, head_dim;
  int experts = 0, active_experts = 0;
  std::int64_t window = 0;
};

/// As in the published configurations.
const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all{
      {"llama-3.1-8b", 128256, 4096, 14336, 32, 32, 8, 128},
      {"llama-3.1-70b", 128256, 8192, 28672, 80, 64, 8, 128},
      {"llama-3.2-1b", 128256, 2048, 8192, 16, 32, 8, 64},
      {"qwen3-8b", 151936, 4096, 12288, 36, 32, 8, 128},
      {"qwen3-30b-a3b", 151936, 2048, 768, 48, 32, 4, 128, 128, 8},
      {"gpt-oss-20b", 201088, 2880, 2880, 24, 64, 8, 64, 32, 4, 128},
      {"needle-llama", 1040, 512, 1024, 4, 8, 2, 128}};
  return all;
}

double gibibytes(double bytes) { return bytes / static_cast<double>(GiB); }

/// Weights in fp32, and the KV of the longest context with a quarter more for what reads it.
double needed_bytes(const ModelConfig& model, std::int64_t tokens) {
  const std::int64_t heads = 2 * (model.query_heads + model.kv_heads);
  const std::int64_t layer =
      model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size);
  const std::int64_t weights = 2 * model.vocab_size * model.hidden_size + model.layers * layer;
  const std::int64_t kv = tokens * model.layers * model.kv_heads * model.head_dim * 4;
  return 4.0 * static_cast<double>(weights) + 1.25 * static_cast<double>(kv);
}

void check_memory(const ModelConfig& model, const BenchOptions& options) {
  const double wanted = needed_bytes(model, *std::ranges::max_element(options.contexts));
  const std::optional<std::size_t> bytes = available_host_bytes();
  if (!bytes || static_cast<double>(*bytes) >= wanted) return;
  throw Error(
      ErrorCode::kResourceExhausted,
      format("bench --shape %s on the CPU: expected %.1f GiB of available memory for weights in "
             "fp32 and the KV, found %.1f GiB; a smaller --shape, --layers or --context needs less",
             options.shape.c_str(), gibibytes(wanted), gibibytes(static_cast<double>(*bytes))));
}

/// Random numbers, cheaply: windows of a table.
class Noise {
 public:
  Noise() {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    for (float& x : table_) x = normal(random);
  }
  [[nodiscard]] float next() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return table_[(state_ >> 33U) % table_.size()];
  }

 private:
  std::vector<float> table_ = std::vector<float>(65536);
  std::uint64_t state_ = 1;
};

class RandomWeights {
 public:
  explicit RandomWeights(Compute& compute) : compute_(compute) {}

  [[nodiscard]] Weights make(const ModelConfig& model) {
    const std::int64_t q_columns = std::int64_t{model.query_heads} * model.head_dim;
    const std::int64_t kv_columns = std::int64_t{model.kv_heads} * model.head_dim;
    const std::int64_t hidden = model.hidden_size, inner = model.intermediate_size;
    Weights weights;
    weights.embedding = matrix(model.vocab_size, hidden);
    weights.head = matrix(model.vocab_size, hidden);
    weights.final_norm = ones(hidden);
    for (int i = 0; i < model.layers; ++i) {
      LayerWeights& layer = weights.layers.emplace_back();
      layer.attention_norm = ones(hidden);
      layer.q.weight = matrix(q_columns, hidden);
      layer.k.weight = matrix(kv_columns, hidden);
      layer.v.weight = matrix(kv_columns, hidden);
      layer.o.weight = matrix(hidden, q_columns);
      layer.mlp_norm = ones(hidden);
      layer.gate.weight = matrix(inner, hidden);
      layer.up.weight = matrix(inner, hidden);
      layer.down.weight = matrix(hidden, inner);
    }
    return weights;
  }

 private:
  [[nodiscard]] Buffer upload(const std::vector<float>& values) {
    Buffer buffer = compute_.allocate(values.size() * sizeof(float));
    compute_.upload(buffer.floats(), values.data(), values.size() * sizeof(float));
    return buffer;
  }
  [[nodiscard]] Matrix matrix(std::int64_t rows, std::int64_t columns) {
    std::vector<float> values(static_cast<std::size_t>(rows * columns));
    for (float& x : values) x = 0.02F * noise_.next();
    return {upload(values), rows, columns};
  }
  [[nodiscard]] Vector ones(std::int64_t size) {
    return upload(std::vector<float>(static_cast<std::size_t>(size), 1.0F));
  }

  Compute& compute_;
  Noise noise_;
};

/// Appends `tokens` random keys and values to every layer.
void fill(KvSession& session, const ModelConfig& model, std::int64_t tokens) {
  Noise noise;
  const std::int64_t row = std::int64_t{model.kv_heads} * model.head_dim;
  std::vector<float> keys(static_cast<std::size_t>(kChunk * row)), values(keys.size());
  for (int layer = 0; layer < model.layers; ++layer) {
    for (std::int64_t first = 0; first < tokens; first += kChunk) {
      for (float& x : keys) x = noise.next();
      for (float& x : values) x = noise.next();
      const std::int64_t count = std::min(kChunk, tokens - first);
      const auto view = [&](const std::vector<float>& rows) {
        return TensorView(rows.data(), DType::kFloat32, {count, model.kv_heads, model.head_dim});
      };
      session.append(layer, view(keys), view(values), {});
    }
  }
}

BenchRow time_steps(Decoder& decoder, KvSession& session, const AttendOptions& attend, int steps) {
  std::vector<double> times;
  for (int i = 0; i < kWarmupSteps + steps; ++i) {
    const std::array<std::int32_t, 1> token = {i % 16};
    const auto start = std::chrono::steady_clock::now();
    static_cast<void>(decoder.decode(session, token, attend));
    const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - start;
    if (i >= kWarmupSteps) times.push_back(us.count());
  }
  std::ranges::sort(times);
  const auto rank = static_cast<std::size_t>(std::ceil(0.99 * static_cast<double>(times.size())));
  BenchRow row;
  row.us = times[times.size() / 2];
  row.us_min = times.front();
  row.us_max = times.back();
  row.us_p99 = times[rank - 1];
  row.tokens_per_second =
      1e6 * static_cast<double>(times.size()) / std::accumulate(times.begin(), times.end(), 0.0);
  return row;
}

Method sparse_method(const BenchOptions& options) {
  std::vector<std::string> left_out;
  const std::vector<Method> methods = make_methods(options.retrieval, left_out);
  if (methods.size() != 1 || methods.front().dense) {
    throw_invalid("bench",
                  "one estimator, weighting, selection, rule, code, number of bits, error target "
                  "and a sparsity of at least 1",
                  join(methods.size(), " methods or a dense one"));
  }
  return methods.front();
}

void check(const BenchOptions& options) {
  if (options.contexts.empty()) {
    throw_invalid("--context", "numbers of tokens", "none");
  }
  check_writable(options.json, "--json");
  if (options.stages && options.json.empty()) {
    throw_invalid("--stages", "--json with it", "none");
  }
}

/// Throws for what only a GPU measures.
void check_cpu(const BenchShape& shape, const BenchOptions& options) {
  const auto require = [](bool holds, const std::string& expected, const std::string& found) {
    if (!holds)
      throw_error(ErrorCode::kInvalidArgument, expected, " with --backend cpu, found ", found);
  };
  const auto numbers = [](const std::vector<int>& values) {
    std::string text;
    for (const int value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
    return text;
  };
  require(shape.experts == 0 && shape.window == 0,
          "--shape: expected one without experts and sliding windows", options.shape);
  require(options.tensor_parallel == 1, "--tensor-parallel: expected 1",
          std::to_string(options.tensor_parallel));
  require(options.batches == std::vector<int>{1}, "--batch: expected 1", numbers(options.batches));
  require(options.row_cache_rows.empty(), "--row-cache-rows: expected none",
          numbers(options.row_cache_rows));
  require(options.top_ks.empty(), "--k: expected none (--sparsity)", numbers(options.top_ks));
  require(!options.stages, "--stages: expected no stages", "stages");
  const BenchOptions usual;
  require(options.placements == usual.placements ||
              options.placements == std::vector{KvPlacement::kHost},
          "--placement: expected host", "device");
  require(options.host_allocation == usual.host_allocation, "--host-allocation: expected auto",
          options.host_allocation == HostAllocation::kManaged ? "managed" : "registered");
  require(options.locality == usual.locality || options.locality == "none",
          "--locality: expected none", options.locality);
  require(options.cuda_libs.empty(), "--cuda-libs: expected no folder",
          options.cuda_libs.empty() ? "" : options.cuda_libs.front());
}

std::string show_gigabytes(std::size_t bytes) {
  return bytes > 0 ? format("%.1f", static_cast<double>(bytes) * 1e-9) : "-";
}

void print(std::ostream& out, const BenchOptions& options, const ModelConfig& model, bool gpu,
           const std::vector<BenchRow>& rows) {
  const auto write = [&](const char* pattern, auto... values) {
    out << format(pattern, values...);
  };
  write("%s, random weights, %d layers, backend %s: a token, %d times\n\n", options.shape.c_str(),
        model.layers, gpu ? "cuda" : "cpu", options.steps);
  write("%10s %5s  %-44s %9s %9s %10s %7s %7s %8s\n", "context", "batch", "attention", "ms",
        "ms, p99", "tokens/s", "found", "GPU GB", "of dense");
  for (const BenchRow& row : rows) {
    write("%10lld %5d  %-44s", static_cast<long long>(row.context), row.batch,
          row.attention.c_str());
    if (!row.error.empty()) {
      out << ' ' << row.error << '\n';
      continue;
    }
    write(" %9.3f %9.3f %10.1f", row.us * 1e-3, row.us_p99 * 1e-3, row.tokens_per_second);
    write(" %7s %7s", row.found ? format("%.3f", *row.found).c_str() : "-",
          show_gigabytes(row.gpu_bytes).c_str());
    if (row.over_dense > 0.0) write(" %7.2fx", row.over_dense);
    out << '\n';
  }
}

}  // namespace

const std::vector<std::string>& bench_shapes() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Shape& shape : shapes()) all.push_back(shape.name);
    return all;
  }();
  return names;
}

BenchShape bench_shape(const BenchOptions& options) {
  const auto found = std::ranges::find(shapes(), options.shape, &Shape::name);
  if (found == shapes().end()) {
    std::string names;
    for (const std::string& known : bench_shapes()) names += (names.empty() ? "" : ", ") + known;
    throw_error(ErrorCode::kNotFound, "--shape: expected one of ", names, ", found ",
                options.shape);
  }
  const int ranks = options.tensor_parallel;
  if (ranks < 1 || found->kv_heads % ranks != 0 || found->inner % ranks != 0 ||
      found->vocabulary % ranks != 0) {
    throw_invalid("--tensor-parallel",
                  join("a divisor of ", found->kv_heads,
                       " KV heads, of the inner columns and of the vocabulary"),
                  ranks);
  }
  BenchShape shape{.model = {},
                   .experts = found->experts,
                   .active_experts = found->active_experts,
                   .window = found->window};
  shape.model.vocab_size = found->vocabulary / ranks;
  shape.model.hidden_size = found->hidden;
  shape.model.intermediate_size = found->inner / ranks;
  shape.model.layers = options.layers > 0 ? options.layers : found->layers;
  shape.model.query_heads = found->query_heads / ranks;
  shape.model.kv_heads = found->kv_heads / ranks;
  shape.model.head_dim = found->head_dim;
  return shape;
}

std::vector<BenchRow> bench_on_cpu(const ModelConfig& model, const BenchOptions& options,
                                   const Method& sparse) {
  check_memory(model, options);
  std::unique_ptr<Compute> compute = make_cpu_compute(options.threads);
  Weights weights = RandomWeights(*compute).make(model);
  Decoder decoder(model, std::move(weights), std::move(compute));
  RuntimeOptions runtime;
  runtime.backend = Backend::kCpu;
  runtime.page_format = options.page_format;
  std::vector<Method> methods{sparse};
  if (options.dense) methods.insert(methods.begin(), {.dense = true, .retrieval = {}});
  const std::string name = size_text(sparse) + ", KV in host memory";

  std::vector<BenchRow> rows;
  for (const std::int64_t context : options.contexts) {
    const std::int64_t tokens = context + kWarmupSteps + options.steps;
    const auto store = make_kv_store(engine_config(model, runtime, methods, tokens), "");
    const std::unique_ptr<KvSession> session = store->open(tokens);
    fill(*session, model, context);
    for (Method& method : methods) {
      BenchRow row =
          time_steps(decoder, *session, attend_options(method, context, options.retrieval.window),
                     options.steps);
      session->truncate(context);
      row.context = context;
      row.attention = method.dense ? "dense" : name;
      if (!method.dense && options.dense) row.over_dense = rows.back().us / row.us;
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

void run_bench(std::ostream& out, const BenchOptions& options) {
  check(options);
  const Method sparse = sparse_method(options);
  const BenchShape shape = bench_shape(options);
  const bool gpu =
      options.backend == Backend::kCuda || (options.backend == Backend::kAuto && has_gpu_bench());
  if (!gpu) check_cpu(shape, options);
  if (gpu && options.threads != 0) {
    throw_invalid("--threads", "none with --backend cuda", options.threads);
  }
  const std::vector<BenchRow> rows =
      gpu ? bench_on_gpu(shape, options, sparse) : bench_on_cpu(shape.model, options, sparse);
  print(out, options, shape.model, gpu, rows);
  if (!gpu && !options.json.empty()) write_json(options.json, options.command, shape.model, rows);
}

}  // namespace kvtier::llama
