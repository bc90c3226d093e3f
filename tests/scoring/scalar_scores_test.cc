#include "selector_fixture.h"

namespace kvtier::scoring {
namespace {

class ScalarScoresTest : public SelectorTest {
 protected:
  std::unique_ptr<hashing::Planes> make_rotation(int head_dim, int bits) {
    return std::make_unique<hashing::Planes>(*device_,
                                             SketchConfig{.kind = PlaneKind::kOrthogonal,
                                                          .num_planes = bits * head_dim,
                                                          .seed = 11,
                                                          .code = SketchCode::kScalar},
                                             head_dim);
  }
};
KVTIER_INSTANTIATE_BACKENDS(ScalarScoresTest);

TEST_P(ScalarScoresTest, AreTheOraclesForEveryShapeAndWeight) {
  std::uint64_t seed = 0;
  for (const auto& [head_dim, bits] : std::vector<std::pair<int, int>>{
           {64, 1}, {64, 4}, {64, 8}, {96, 1}, {96, 3}, {128, 2}, {128, 4}, {256, 1}, {256, 4}}) {
    const auto planes = make_rotation(head_dim, bits);
    const std::vector<std::uint8_t> signs = random_signs(3 + seed, bits * head_dim);
    const TokenSet set = random_tokens(++seed, 2, 200, signs);
    for (const int query_bits : {0, 4, 8}) {
      for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
        SCOPED_TRACE(::testing::Message()
                     << "head_dim " << head_dim << ", bits " << bits << ", query_bits "
                     << query_bits << ", selection " << static_cast<int>(selection));
        Problem problem{.planes = planes.get(),
                        .kv_heads = 2,
                        .group = static_cast<int>(seed % 3) == 0 ? 1 : 4,
                        .sequences = {&set}};
        problem.query_tokens = {{.sequence = 0, .lag = 2, .dense_from = kNoDense},
                                {.sequence = 0, .lag = 0, .dense_from = kNoDense}};
        problem.config.estimator = Estimator::kNormAware;
        problem.config.code = SketchCode::kScalar;
        problem.config.selection = selection;
        problem.config.num_planes = bits * head_dim;
        problem.config.query_bits = query_bits;
        problem.config.sink_tokens = 10;
        problem.config.recent_tokens = 20;
        problem.config.top_k = 50;
        problem.queries = random_queries(
            seed, static_cast<std::size_t>(2 * problem.query_heads() * head_dim), 1.0);
        expect_oracle(problem, run(problem));
      }
    }
  }
}

}  // namespace
}  // namespace kvtier::scoring
