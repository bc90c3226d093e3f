#include "hashing/sketch.h"
#include "selector_fixture.h"

#include <cmath>
#include <limits>

namespace kvtier::scoring {

namespace {

constexpr int kHeadDim = 128;
constexpr std::int64_t kTokens = 2000;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// From packed rows to ids through the product alone; compared with exact inner products.
class PipelineTest : public SelectorTest {
 protected:
  // Sketches `rows` (bf16 `[tokens, 2 * head_dim]`, one KV head) and selects for `query`.
  std::vector<std::int64_t> select(const std::vector<std::uint16_t>& rows,
                                   const std::vector<float>& query, const RetrievalConfig& config,
                                   PlaneKind kind, int num_planes) {
    const hashing::Planes planes(*device_, {.kind = kind, .num_planes = num_planes}, kHeadDim);
    const hashing::SketchGeometry geometry{1, num_planes};
    const transfer::KvGeometry kv{.kv_heads = 1, .head_dim = kHeadDim, .page_tokens = 64};
    const std::int64_t tokens = std::ssize(rows) / (2 * kHeadDim);
    const std::int64_t blocks = (tokens + hashing::kBlockTokens - 1) / hashing::kBlockTokens;
    const transfer::Buffer memory = allocate<std::byte>(index(blocks * geometry.block_bytes()));
    std::vector<std::byte*> table;
    for (std::int64_t block = 0; block < blocks; ++block) {
      table.push_back(memory.data() + block * geometry.block_bytes());
    }
    const transfer::Buffer device_table = upload(table);
    transfer::SequenceCounters counters{.length = 0, .capacity = tokens};
    const transfer::Buffer device_counters =
        upload(std::span<const transfer::SequenceCounters>(&counters, 1));
    const transfer::Buffer packed = upload(rows);
    hashing::SketchBatch batch;
    batch.push({.blocks = device_table.as<std::byte*>(),
                .counters = device_counters.as<transfer::SequenceCounters>(),
                .tokens = static_cast<std::int32_t>(tokens),
                .packed_offset = 0});
    hashing::sketch_keys(*stream_, planes.view(), kv, geometry, batch, packed.data());
    counters.length = tokens;
    const transfer::CopyRun run{device_counters.data(), &counters, sizeof(counters)};
    stream_->copy({&run, 1});

    const transfer::Buffer queries = upload(query);
    SelectRequest request;
    request.params = score_params(config, kHeadDim, 1.0F / std::sqrt(float{kHeadDim}));
    request.rule.sink_tokens = config.sink_tokens;
    request.rule.recent_tokens = config.recent_tokens;
    request.kv = kv;
    request.sketch = geometry;
    request.planes = planes.view();
    request.sequences.push({.counters = device_counters.as<transfer::SequenceCounters>()});
    request.sketches.push(device_table.as<std::byte*>());
    request.query_batch.push({.dense_from = std::numeric_limits<std::int64_t>::max()});
    request.queries = queries.as<const float>();
    request.max_length = tokens;
    Selector selector(*device_, {.max_tokens = tokens, .max_selected = config.top_k});
    const transfer::SelectionView view = selector.select(*stream_, request);
    const auto count = download<std::int32_t>(view.counts, 1)[0];
    const auto ids = download<std::int32_t>(view.ids, index(count));
    return {ids.begin(), ids.end()};
  }
};

struct Context {
  std::vector<std::uint16_t> rows;
  std::vector<float> query;
  std::vector<double> logits;
};

Context random_context(std::uint64_t seed) {
  Random random(seed);
  Context context;
  context.query = random_queries(seed + 100, kHeadDim, 1.5);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    // Some keys lean towards the query, so that there is something to find.
    const double lean = t % 40 == 7 ? 0.5 : 0.0;
    double logit = 0.0;
    double squares = 0.0;
    for (int x = 0; x < kHeadDim; ++x) {
      const double q = static_cast<double>(context.query[index(x)]);
      const std::uint16_t key = oracle::to_bf16(random.normal() + lean * q);
      logit += oracle::from_bf16(key) * q;
      context.rows.push_back(key);
    }
    for (int x = 0; x < kHeadDim; ++x) {
      const std::uint16_t value = oracle::to_bf16(random.normal());
      squares += oracle::from_bf16(value) * oracle::from_bf16(value);
      context.rows.push_back(value);
    }
    context.logits.push_back(logit / std::sqrt(kHeadDim) + std::log(std::sqrt(squares)));
  }
  return context;
}

TEST_P(PipelineTest, EveryEstimatorFindsTheKeysThatLeanTowardsTheQuery) {
  struct Case {
    Estimator estimator;
    int planes_per_table;
    int tables;
    double recall;
  };
  // 48 of the eligible keys lean, by eight standard deviations of the others' logits. The counts of
  // hard collision are small, so noise costs it more.
  for (const Case& test :
       {Case{Estimator::kSoftCollision, 10, 60, 0.95}, Case{Estimator::kHardCollision, 2, 300, 0.9},
        Case{Estimator::kNormAware, 1, 1, 0.95}}) {
    for (const std::uint64_t seed : {1U, 2U}) {
      const Context context = random_context(seed);
      const bool norm_aware = test.estimator == Estimator::kNormAware;
      RetrievalConfig config = testing::top_k_of_signs();
      config.estimator = test.estimator;
      config.planes_per_table = test.planes_per_table;
      config.tables = test.tables;
      config.top_k = 100;
      config.sink_tokens = 40;
      config.recent_tokens = 40;

      const auto ids = select(context.rows, context.query, config,
                              norm_aware ? PlaneKind::kOrthogonal : PlaneKind::kGaussian,
                              norm_aware ? 256 : 600);

      ASSERT_EQ(ids.size(), 100U);
      double found = 0.0;
      for (const std::int64_t id : ids) found += id % 40 == 7 ? 1.0 : 0.0;
      EXPECT_GE(found / 48.0, test.recall)
          << "estimator " << static_cast<int>(test.estimator) << ", seed " << seed;
    }
  }
}

TEST_P(PipelineTest, MoreNormAwarePlanesRankNearerToTheExactLogits) {
  double previous = 0.0;
  for (const int num_planes : {64, 256, 1024}) {
    double overlap = 0.0;
    for (const std::uint64_t seed : {3U, 4U, 5U}) {
      const Context context = random_context(seed);
      RetrievalConfig config = testing::top_k_of_signs();
      config.estimator = Estimator::kNormAware;
      config.num_planes = num_planes;
      config.query_bits = 8;
      config.top_k = 200;
      config.sink_tokens = 0;
      config.recent_tokens = 1;
      const auto ids =
          select(context.rows, context.query, config, PlaneKind::kOrthogonal, num_planes);
      const std::vector<double> eligible(context.logits.begin(), context.logits.end() - 1);
      const auto exact = oracle::top_k(eligible, 200);
      std::vector<std::int64_t> common;
      std::set_intersection(ids.begin(), ids.end(), exact.begin(), exact.end(),
                            std::back_inserter(common));
      overlap += static_cast<double>(common.size()) / 600.0;
    }
    EXPECT_GT(overlap, previous + 0.02) << num_planes << " planes";
    previous = overlap;
  }
  EXPECT_GT(previous, 0.75);
}

TEST_P(PipelineTest, AQueryThatIsNotFiniteStillSelectsValidTokens) {
  const Context context = random_context(6);
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3e38F}) {
    for (const Estimator estimator :
         {Estimator::kSoftCollision, Estimator::kHardCollision, Estimator::kNormAware}) {
      std::vector<float> query = context.query;
      query[3] = poison;
      RetrievalConfig config = testing::top_k_of_signs();
      config.estimator = estimator;
      config.top_k = 100;

      const auto ids = select(context.rows, query, config, PlaneKind::kGaussian, 600);

      ASSERT_EQ(ids.size(), 100U);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        EXPECT_GE(ids[i], i == 0 ? 128 : ids[i - 1] + 1);
        EXPECT_LT(ids[i], kTokens - 128);
      }
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(PipelineTest);

}  // namespace

}  // namespace kvtier::scoring
