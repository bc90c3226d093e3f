#include "kvtier/engine.h"

#include "benchmarks/benchmarks.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <iterator>

namespace kvtier::bench {
namespace {

/// Ids per (query, KV head), ascending.
using Sets = std::vector<std::vector<std::int32_t>>;

Sets select(Session& session, const DeviceTensor& queries, int num_queries,
            const RetrievalConfig& retrieval, bool with_scores) {
  const int heads = 8;
  Sets sets;
  for (int query = 0; query < num_queries; ++query) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(heads * retrieval.top_k));
    std::vector<float> scores(ids.size());
    SelectOutputs outputs{.ids = {ids.data(), DType::kInt32, {1, heads, retrieval.top_k}}};
    if (with_scores) {
      outputs.scores = {scores.data(), DType::kFloat32, {1, heads, retrieval.top_k}};
    }
    session.select(0,
                   {queries.data() + std::int64_t{query} * 32 * 128,
                    DType::kBFloat16,
                    {1, 32, 128},
                    MemorySpace::kDevice},
                   outputs, {}, {.retrieval = &retrieval});
    for (int head = 0; head < heads; ++head) {
      const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(head) * retrieval.top_k;
      sets.emplace_back(begin, begin + retrieval.top_k);
    }
  }
  return sets;
}

json shared(const Sets& a, const Sets& b) {
  double sum = 0.0, least = 1.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::vector<std::int32_t> both;
    std::set_intersection(a[i].begin(), a[i].end(), b[i].begin(), b[i].end(),
                          std::back_inserter(both));
    const double share = static_cast<double>(both.size()) / static_cast<double>(a[i].size());
    sum += share;
    least = std::min(least, share);
  }
  return {{"mean", sum / static_cast<double>(a.size())}, {"least", least}};
}

}  // namespace

void bench_overlap(Run& run, std::int64_t tokens, const RetrievalConfig& fast,
                   const RetrievalConfig& exact) {
  constexpr std::int64_t kChunk = 32768;
  constexpr int kQueries = 8;
  Config config;
  config.backend = Backend::kCuda;
  config.dense_when_faster = false;  // what is measured as sparse is
  config.model = {.layers = 1, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
  config.retrieval = fast;
  config.memory.placement = KvPlacement::kDevice;
  config.memory.max_session_tokens = tokens;
  config.memory.max_batch_rows = 1;
  config.memory.host_bytes = static_cast<std::size_t>(tokens) * 8 * 512 + 64 * MiB;
  config.memory.device_bytes = 2 * config.memory.host_bytes + 8 * GiB;
  Engine engine(config);
  Session session = engine.open();
  const std::int64_t values_in_chunk = std::min(kChunk, tokens) * 8 * 128;
  const DeviceTensor keys(values_in_chunk, 81), values(values_in_chunk, 82);
  const StreamRef stream = StreamRef::of(run.stream());
  for (std::int64_t t = 0; t < tokens; t += kChunk) {
    const std::int64_t n = std::min(kChunk, tokens - t);
    fill_normal(run.stream(), keys.data(), keys.count(), static_cast<std::uint64_t>(200 + t), 1.0F);
    const auto view = [n](const DeviceTensor& tensor) {
      return TensorView{tensor.data(), DType::kBFloat16, {n, 8, 128}, MemorySpace::kDevice};
    };
    session.append(0, view(keys), view(values), stream);
  }
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
  const DeviceTensor queries(kQueries * 32 * 128, 83, 2.0F);
  const Sets filtered = select(session, queries, kQueries, fast, false);
  const Sets scored = select(session, queries, kQueries, fast, true);
  const Sets reference = select(session, queries, kQueries, exact, true);
  json parameters = retrieval_parameters(fast);
  parameters["tokens"] = tokens;
  run.note("overlap", parameters,
           {{"sets", filtered.size()},
            {"fast_with_scored", shared(filtered, scored)},
            {"fast_with_exact", shared(filtered, reference)}});
}

}  // namespace kvtier::bench
