// The library in one page: keep the KV of a sequence in kvtier, and decode with attention over the
// few tokens that matter. Compares the result with attention over all of them.

#include "kvtier/engine.h"
#include "kvtier/error.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

int main() try {
  constexpr int kTokens = 4096, kHeads = 8, kKvHeads = 2, kDim = 128;

  kvtier::Config config;
  config.model.query_heads = kHeads;
  config.model.kv_heads = kKvHeads;
  config.model.head_dim = kDim;
  config.memory.host_bytes = 16 * kvtier::MiB;
  config.memory.max_session_tokens = kTokens + 1;
  config.retrieval.top_k = 128;
  kvtier::Engine engine(config);
  kvtier::Session session = engine.open();

  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto random = [&](int count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    std::generate(values.begin(), values.end(), [&] { return normal(generator); });
    return values;
  };
  const std::vector<float> keys = random(kTokens * kKvHeads * kDim);
  const std::vector<float> values = random(kTokens * kKvHeads * kDim);
  const kvtier::DType fp32 = kvtier::DType::kFloat32;
  session.append(0, {keys.data(), fp32, {kTokens, kKvHeads, kDim}},
                 {values.data(), fp32, {kTokens, kKvHeads, kDim}});

  // A decode step: the query looks like the key of token 1000, with some noise.
  std::vector<float> query = random(kHeads * kDim);
  for (std::size_t i = 0; i < query.size(); ++i) {
    const std::size_t kv_head = i / kDim / (kHeads / kKvHeads);
    query[i] = 0.3F * query[i] + 1.2F * keys[(1000 * kKvHeads + kv_head) * kDim + i % kDim];
  }
  const std::vector<float> key = random(kKvHeads * kDim), value = random(kKvHeads * kDim);
  std::vector<float> sparse(kHeads * kDim), dense(kHeads * kDim);
  const kvtier::TensorView query_view(query.data(), fp32, {1, kHeads, kDim});
  session.decode(0,
                 {.query = query_view,
                  .key = {key.data(), fp32, {1, kKvHeads, kDim}},
                  .value = {value.data(), fp32, {1, kKvHeads, kDim}},
                  .selected = {}},
                 {.out = {sparse.data(), fp32, {1, kHeads, kDim}}, .lse = {}, .selected = {}});
  kvtier::AttendOptions all;
  all.mode = kvtier::LayerMode::kDense;
  session.attend(0, {.query = query_view, .selected = {}},
                 {.out = {dense.data(), fp32, {1, kHeads, kDim}}, .lse = {}, .selected = {}}, {},
                 all);

  double error = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    error += std::pow(sparse[i] - dense[i], 2);
    norm += std::pow(dense[i], 2);
  }
  const kvtier::Stats stats = engine.stats();
  const kvtier::RetrievalConfig& r = config.retrieval;
  std::printf("%lld tokens, %d attended: relative error of the output %.4f\n",
              static_cast<long long>(session.length()), r.sink_tokens + r.recent_tokens + r.top_k,
              std::sqrt(error / norm));
  std::printf("keys and values on the host: %zu KiB, sketches on the device: %zu KiB\n",
              stats.snapshot.host_page_bytes_used / kvtier::KiB,
              stats.snapshot.sketch_bytes_used / kvtier::KiB);
  return std::sqrt(error / norm) < 0.05 ? 0 : 1;
} catch (const kvtier::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
