#include "hashing/planes.h"
#include "scoring/estimator.h"
#include "support/retrieval.h"
#include "transfer/kv/rows_fixture.h"

#include <optional>
#include <utility>

namespace kvtier::scoring {

namespace {

using transfer::HostTensor;
using transfer::KvGeometry;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Shape {
  int query_heads = 8;
  int head_dim = 128;
  int rows = 1;
  DType dtype = DType::kBFloat16;
  std::int64_t head_gap = 0;
  bool after_append = false;
};

// Queries and tables of both ways, on the host.
struct Read {
  std::vector<float> queries;
  std::vector<float> entries;
  std::vector<QueryScalars> scalars;
};

class ReadQueriesTest : public transfer::RowsTest {
 protected:
  hashing::Planes make_planes(int count, int head_dim) {
    return {*device_, {.kind = PlaneKind::kGaussian, .num_planes = count, .seed = 8}, head_dim};
  }

  // The rows of a random tensor, last token first, with flags.
  QueryInput make_input(const Shape& shape, transfer::StepFlags* flags) {
    HostTensor tensor = transfer::random_tensor(random_, shape.dtype, shape.rows, shape.query_heads,
                                                shape.head_dim, shape.head_gap, 0);
    if (poison_) tensor.set(0, shape.query_heads - 1, shape.head_dim - 1, *poison_);
    kept_.push_back(upload(tensor.bytes));
    QueryInput input{.kv = transfer::geometry(1, shape.head_dim, 16, 0, 0),
                     .items = {},
                     .after_append = shape.after_append};
    input.kv.group = shape.query_heads;
    kept_.push_back(upload(std::vector<transfer::SequenceCounters>{{.length = 1000}}));
    const auto* counters = kept_.back().as<transfer::SequenceCounters>();
    for (int row = shape.rows - 1; row >= 0; --row) {
      input.items.push({.query = tensor.view(kept_[kept_.size() - 2].data()),
                        .token = row,
                        .lag = shape.rows - row,
                        .flags = flags,
                        .counters = counters,
                        .layer = 2});
    }
    return input;
  }

  Read read(const ScoreParams& params, const hashing::Planes& planes, const QueryInput& input,
            bool at_once) {
    const auto heads = index(std::int64_t{input.items.count} * input.kv.query_heads());
    const std::size_t size = heads * index(entries_per_head(params));
    const transfer::Buffer queries = allocate<float>(heads * index(input.kv.head_dim));
    const transfer::Buffer entries = allocate<float>(size);
    const transfer::Buffer scalars = allocate<QueryScalars>(heads);
    if (at_once) {
      read_queries(*stream_, params, planes.view(), input, queries.as<float>(), entries.as<float>(),
                   scalars.as<QueryScalars>());
    } else {
      transfer::pack_queries(*stream_, input.kv, input.items, queries.as<float>());
      build_query_tables(*stream_, params, planes.view(), queries.as<float>(), input.items.count,
                         input.kv.query_heads(), entries.as<float>(), scalars.as<QueryScalars>());
    }
    return {download<float>(queries.data(), heads * index(input.kv.head_dim)),
            download<float>(entries.data(), size), download<QueryScalars>(scalars.data(), heads)};
  }

  void expect_as_two_steps(const RetrievalConfig& config, const hashing::Planes& planes,
                           const Shape& shape) {
    const ScoreParams params = score_params(config, shape.head_dim, 0.1F);
    const QueryInput input = make_input(shape, nullptr);
    const Read expected = read(params, planes, input, false);
    const Read found = read(params, planes, input, true);

    EXPECT_EQ(found.queries, expected.queries);
    // The same operations in the same order, so the same bits: a weight or a bucket id next to
    // where it changes must not depend on the way. NaN cannot be among them.
    EXPECT_EQ(found.entries, expected.entries);
    ASSERT_EQ(found.scalars.size(), expected.scalars.size());
    for (std::size_t i = 0; i < found.scalars.size(); ++i) {
      EXPECT_EQ(found.scalars[i].weight_step, expected.scalars[i].weight_step);
      // Sums in double, in another order, rounded to fp32.
      EXPECT_FLOAT_EQ(found.scalars[i].query_norm, expected.scalars[i].query_norm);
      EXPECT_FLOAT_EQ(found.scalars[i].mean_agreement, expected.scalars[i].mean_agreement);
    }
  }

  std::optional<double> poison_;

 private:
  std::vector<transfer::Buffer> kept_;
};
KVTIER_INSTANTIATE_BACKENDS(ReadQueriesTest);

RetrievalConfig norm_aware(int num_planes, int query_bits) {
  RetrievalConfig config = testing::top_k_of_signs(Estimator::kNormAware);
  config.num_planes = num_planes;
  config.query_bits = query_bits;
  return config;
}

RetrievalConfig collision(Estimator estimator, int planes_per_table, int tables) {
  RetrievalConfig config = testing::top_k_of_signs(estimator);
  config.planes_per_table = planes_per_table;
  config.tables = tables;
  return config;
}

TEST_P(ReadQueriesTest, NormAwareEqualsTwoSteps) {
  for (const int head_dim : {64, 96, 128, 256}) {
    const hashing::Planes planes = make_planes(1024, head_dim);
    for (const int count : {64, 129, 256, 1000, 1024}) {
      for (const int query_bits : {0, 4, 8}) {
        SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << ", " << count << " planes, "
                                          << query_bits << " bits");
        expect_as_two_steps(norm_aware(count, query_bits), planes,
                            {.query_heads = 5, .head_dim = head_dim, .rows = 2});
      }
    }
  }
}

TEST_P(ReadQueriesTest, CollisionsEqualTwoSteps) {
  const hashing::Planes planes = make_planes(1024, 128);
  for (const Estimator estimator : {Estimator::kSoftCollision, Estimator::kHardCollision}) {
    for (int p = 1; p <= 12; ++p) {
      for (const int tables : {1, 7, 60, 1024 / p}) {
        if (p * tables > 1024) continue;
        SCOPED_TRACE(::testing::Message() << (estimator == Estimator::kHardCollision) << ", P " << p
                                          << ", L " << tables);
        expect_as_two_steps(collision(estimator, p, tables), planes, {.query_heads = 6});
      }
    }
  }
}

TEST_P(ReadQueriesTest, TakesEveryDtypeAndStride) {
  const hashing::Planes planes = make_planes(256, 96);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const std::int64_t gap : {0, 1, 3, 8}) {
      SCOPED_TRACE(::testing::Message() << dtype_name(dtype) << ", gap " << gap);
      expect_as_two_steps(
          norm_aware(256, 4), planes,
          {.query_heads = 7, .head_dim = 96, .rows = 3, .dtype = dtype, .head_gap = gap});
    }
  }
}

TEST_P(ReadQueriesTest, TakesEveryBatch) {
  const hashing::Planes planes = make_planes(600, 64);
  for (const auto& [heads, rows] : std::vector<std::pair<int, int>>{
           {1, 1}, {1, 64}, {2, 3}, {16, 7}, {32, 1}, {32, 8}, {32, 64}, {96, 5}}) {
    SCOPED_TRACE(::testing::Message() << heads << " heads, " << rows << " rows");
    for (const bool after_append : {false, true}) {
      const Shape shape{
          .query_heads = heads, .head_dim = 64, .rows = rows, .after_append = after_append};
      expect_as_two_steps(norm_aware(256, 4), planes, shape);
      expect_as_two_steps(collision(Estimator::kSoftCollision, 10, 60), planes, shape);
    }
  }
}

TEST_P(ReadQueriesTest, CountsNonfiniteRowsOnceAndNamesTheFirst) {
  const hashing::Planes planes = make_planes(64, 64);
  const ScoreParams params = score_params(norm_aware(64, 4), 64, 0.1F);
  for (const double value :
       {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
    poison_ = value;
    transfer::StepFlags* flags = make_flags();
    const QueryInput input = make_input({.query_heads = 32, .head_dim = 64, .rows = 5}, flags);

    const Read found = read(params, planes, input, true);

    EXPECT_EQ(flags->nonfinite_queries, 1U);
    const auto place = transfer::NonfinitePlace::of(flags->first_nonfinite);
    EXPECT_EQ(place.token, 994);
    EXPECT_EQ(place.layer, 2);
    EXPECT_TRUE(place.in_query);
    EXPECT_EQ(flags->nonfinite_tokens, 0U);
    EXPECT_FALSE(std::isfinite(found.queries.back()));
    const std::vector<float> first(found.entries.begin(), found.entries.begin() + 64);
    EXPECT_GT(*std::max_element(first.begin(), first.end()), 0.0F);
  }
}

TEST_P(ReadQueriesTest, NoRowsIsNoWork) {
  const hashing::Planes planes = make_planes(64, 64);
  const ScoreParams params = score_params(norm_aware(64, 4), 64, 0.1F);
  EXPECT_TRUE(
      read(params, planes, make_input({.head_dim = 64, .rows = 0}, nullptr), true).entries.empty());
}

}  // namespace

}  // namespace kvtier::scoring
