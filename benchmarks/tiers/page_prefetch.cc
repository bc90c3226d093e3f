#include "kvtier/engine.h"

#include "benchmarks/service/measure.h"
#include "benchmarks/tiers/bench_folder.h"
#include "benchmarks/tiers/benchmarks.h"
#include "transfer/tiers/crc32c.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <unistd.h>
#include <vector>

namespace kvtier::bench {
namespace {

constexpr int kLayers = 4;
constexpr int kHeads = 8;
constexpr std::int64_t kHeadDim = 128;
constexpr std::size_t kPageBytes = 256 * KiB;  // 64 tokens
constexpr std::size_t kWorkBytes = 32 * MiB;   // read between two layers, in the model's place

std::vector<float> normal(std::size_t count, std::mt19937_64& random) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

/// Decodes with three tenths of the pages in memory; the queries of a layer turn slowly.
class Decoding {
 public:
  Decoding(const TierSettings& settings, bool page_prefetch)
      : folder_(settings.folder),
        engine_(config(settings, page_prefetch)),
        session_(engine_.open()) {
    const std::int64_t tokens = tokens_of(settings);
    constexpr std::int64_t kPiece = 4096;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (std::int64_t done = 0; done < tokens; done += kPiece) {
        const std::vector<float> rows = normal(kPiece * kHeads * kHeadDim, random_);
        const TensorView view(rows.data(), DType::kFloat32,
                              {std::min(kPiece, tokens - done), kHeads, kHeadDim});
        session_.append(layer, view, view);
      }
      queries_.push_back(normal(kHeads * kHeadDim, random_));
    }
    ::sync();
    step();
    step();
    before_ = engine_.stats().cumulative;
  }

  void step() {
    std::vector<float> out(queries_[0].size());
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float>& query = queries_[static_cast<std::size_t>(layer)];
      const std::vector<float> noise = normal(query.size(), random_);
      for (std::size_t i = 0; i < query.size(); ++i) query[i] = .995F * query[i] + .1F * noise[i];
      const TensorView row(query.data(), DType::kFloat32, {1, kHeads, kHeadDim});
      session_.decode(layer, {.query = row, .key = row, .value = row, .selected = {}},
                      {.out = {out.data(), DType::kFloat32, {1, kHeads, kHeadDim}}});
      sum_ ^= crc32c(work_);
    }
  }
  [[nodiscard]] Stats::Cumulative counted() const { return engine_.stats().cumulative - before_; }

 private:
  static std::int64_t tokens_of(const TierSettings& settings) {
    return static_cast<std::int64_t>(settings.bytes / 4 / kLayers / kPageBytes) * 64;
  }
  [[nodiscard]] Config config(const TierSettings& settings, bool page_prefetch) const {
    Config config;
    config.backend = Backend::kCpu;
    config.model = {
        .layers = kLayers, .query_heads = kHeads, .kv_heads = kHeads, .head_dim = kHeadDim};
    config.memory.max_session_tokens = tokens_of(settings) + 4096;
    config.memory.host_bytes = settings.bytes / 4 * 3 / 10;
    config.memory.device_bytes = 2 * GiB;
    config.memory.disk_cache = (folder_.path() / "cache").string();
    config.memory.disk_cache_bytes = settings.bytes;
    config.memory.page_prefetch = page_prefetch;
    config.retrieval.estimator = Estimator::kNormAware;
    config.retrieval.num_planes = 64;
    config.retrieval.top_k = 16;
    return config;
  }

  BenchFolder folder_;
  std::mt19937_64 random_{7};
  Engine engine_;
  Session session_;
  std::vector<std::vector<float>> queries_;
  std::vector<std::byte> work_ = std::vector<std::byte>(kWorkBytes, std::byte{1});
  std::uint32_t sum_ = 0;
  Stats::Cumulative before_;
};

}  // namespace

nlohmann::json page_prefetch_rows(const TierSettings& settings) {
  constexpr int kSteps = 4;
  Decoding with(settings, true);
  Decoding without(settings, false);
  const auto steps = [](Decoding& decoding) {
    for (int i = 0; i < kSteps; ++i) decoding.step();
  };
  const Comparison both = compare(
      2 * settings.rounds, [&] { steps(with); }, [&] { steps(without); });
  const Stats::Cumulative counted = with.counted();
  if (counted.pages_prefetched == 0) throw std::runtime_error("no page was prefetched");
  const auto share = [](std::uint64_t part, std::uint64_t all) {
    return static_cast<double>(part) / static_cast<double>(std::max<std::uint64_t>(all, 1));
  };
  return nlohmann::json::array(
      {{{"what", "page_prefetch"},
        {"page_bytes", kPageBytes},
        {"step_ms", both.first / kSteps * 1e3},
        {"baseline_step_ms", both.second / kSteps * 1e3},
        {"ratio", both.ratio},
        {"ratio_least", both.least},
        {"ratio_most", both.most},
        {"prefetched", share(counted.pages_prefetched, counted.pages_restored)},
        {"useful", share(counted.pages_prefetched_useful, counted.pages_prefetched)},
        {"wasted", share(counted.pages_prefetched_wasted, counted.pages_prefetched)}}});
}

}  // namespace kvtier::bench
