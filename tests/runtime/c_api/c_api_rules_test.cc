#include "kvtier/kvtier.h"

#include <gmock/gmock.h>

#include <cstring>

namespace {

using ::testing::HasSubstr;

TEST(CApi, HasThePresetOfThePaper) {
  kvtier_retrieval_config config;
  kvtier_retrieval_config_init_socket(&config);
  EXPECT_EQ(config.struct_size, sizeof(config));
  EXPECT_EQ(config.estimator, KVTIER_SOFT_COLLISION);
  EXPECT_EQ(config.value_weighting, KVTIER_WEIGHTING_LINEAR);
  EXPECT_EQ(config.selection, KVTIER_PER_QUERY_HEAD);
  EXPECT_EQ(config.plane_kind, KVTIER_PLANES_GAUSSIAN);
  EXPECT_EQ(config.rule, KVTIER_TOP_K);
  EXPECT_EQ(config.code, KVTIER_SIGN);
  EXPECT_EQ(config.planes_per_table, 10);
  EXPECT_EQ(config.tables, 60);
  EXPECT_EQ(config.tau, 0.4F);
  EXPECT_EQ(config.error_target, 0.0);
}

/// Creates an engine of a configuration that `spoil` makes invalid.
template <typename Spoil>
void expect_refused(const Spoil& spoil, const char* message) {
  kvtier_config config;
  kvtier_config_init(&config);
  config.backend = KVTIER_BACKEND_CPU;
  spoil(config);
  kvtier_engine* none = nullptr;
  EXPECT_EQ(kvtier_engine_create(&config, &none), KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
  EXPECT_THAT(kvtier_last_error(), HasSubstr(message));
}

// Arrays have as many entries as are allowed at most.
TEST(CApi, ReadsNoEntriesOfANumberThatIsRefused) {
  const kvtier_layer_config layer = {};
  expect_refused(
      [&](kvtier_config& c) {
        c.layer_options = &layer;
        c.layers = 1 << 30;
      },
      "model.layers: expected 1..4096, found 1073741824");
  const kvtier_sketch_config sketch = {KVTIER_PLANES_ORTHOGONAL, 128, 0, KVTIER_SIGN};
  expect_refused(
      [&](kvtier_config& c) {
        c.extra_sketches = &sketch;
        c.num_extra_sketches = std::size_t{1} << 40;
      },
      "extra_sketches: expected at most 15 entries, found 1099511627776");
}

TEST(CApi, RefusesUnknownEnumeratorsOfRetrieval) {
  const auto set = [](auto& field, int value) { std::memcpy(&field, &value, sizeof(value)); };
  expect_refused([&](kvtier_config& c) { set(c.retrieval.estimator, 3); }, "estimator");
  expect_refused([&](kvtier_config& c) { set(c.retrieval.value_weighting, 5); }, "weighting");
  expect_refused([&](kvtier_config& c) { set(c.retrieval.selection, 3); }, "selection");
  expect_refused([&](kvtier_config& c) { set(c.retrieval.rule, 2); },
                 "rule: expected 0..1, found 2");
  expect_refused([&](kvtier_config& c) { set(c.retrieval.code, 2); },
                 "code: expected 0..1, found 2");
  kvtier_sketch_config sketch = {KVTIER_PLANES_ORTHOGONAL, 128, 0, KVTIER_SCALAR};
  set(sketch.code, 2);
  expect_refused(
      [&](kvtier_config& c) {
        c.extra_sketches = &sketch;
        c.num_extra_sketches = 1;
      },
      "code: expected 0..1, found 2");
  set(sketch.code, KVTIER_SCALAR);
  sketch.num_planes = 100;
  expect_refused(
      [&](kvtier_config& c) {
        c.extra_sketches = &sketch;
        c.num_extra_sketches = 1;
      },
      "found 100");
  expect_refused([](kvtier_config& c) { c.retrieval.estimator = KVTIER_SOFT_COLLISION; },
                 "rule: expected top_k");
  expect_refused(
      [](kvtier_config& c) {
        c.retrieval.rule = KVTIER_TOP_K;
        c.retrieval.error_target = 0.1;
      },
      "error_target: expected 0 without the priority rule");
  expect_refused([](kvtier_config& c) { c.retrieval.coarse_bits = 2; },
                 "coarse_bits: expected fewer than the 2 bits of a coordinate, found 2");
}

}  // namespace
