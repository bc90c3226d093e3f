#include "runtime/priority_fixture.h"
#include "runtime/spill_fixture.h"

#include <utility>
#include <vector>

/// Priority selection where rows are not all in host memory, or are cached.
namespace kvtier::testing {
namespace {

/// The estimators, a set per KV head and per query head, with a size and with an error target.
std::vector<RetrievalConfig> all_rules() {
  std::vector<RetrievalConfig> rules;
  for (RetrievalConfig retrieval : priority_methods()) {
    for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
      for (const double error_target : {0.0, 0.1}) {
        if (retrieval.coarse_bits > 0 && error_target > 0.0) continue;
        retrieval.selection = selection;
        retrieval.error_target = error_target;
        rules.push_back(retrieval);
      }
    }
  }
  return rules;
}

class PrioritySpillTest : public SpillTest {};
KVTIER_INSTANTIATE_BACKENDS(PrioritySpillTest);

TEST_P(PrioritySpillTest, StepsOverMorePagesThanFramesGiveTheSame) {
  std::size_t at = 0;
  for (const RetrievalConfig& retrieval : all_rules()) {
    SCOPED_TRACE(name_of(retrieval) + ", error target " + std::to_string(retrieval.error_target));
    Config small = with_frames(14);
    Config large = twin();
    // Formats and staging in turn: windows copy biases in each.
    const bool int8 = at % 3 == 1;
    const int staging = at % 2 == 0 ? -1 : 16;
    ++at;
    for (Config* config : {&small, &large}) {
      config->retrieval = retrieval;
      config->retrieval.top_k = 100;
      config->memory.page_format = int8 ? PageFormat::kInt8 : PageFormat::kModel;
      config->memory.staging_rows = staging;
    }
    Engine engine(small);
    Engine reference(large);
    const ModelConfig& model = engine.config().model;
    Session a = engine.open(), b = reference.open();
    append_to_all(a, model, 500, 7);
    append_to_all(b, model, 500, 7);
    expect_same_decode(a, b, model, 1, 50, {}, true, GetParam());
    expect_same_decode(a, b, model, 3, 80, {}, false, GetParam());
    const Stats::Cumulative mine = engine.stats().cumulative;
    const Stats::Cumulative theirs = reference.stats().cumulative;
    EXPECT_GT(mine.cold_steps, 0U);
    EXPECT_EQ(mine.rows_selected, theirs.rows_selected);
    EXPECT_EQ(mine.rows_attended, theirs.rows_attended);
  }
}

TEST_P(PrioritySpillTest, GivenIdsAndBiasesOfTokensInATierCountTheSame) {
  Engine engine(with_frames(14));
  Engine reference(twin());
  const ModelConfig& model = engine.config().model;
  Session a = engine.open(), b = reference.open();
  append_random(a, model, 0, 700, 7);
  append_random(b, model, 0, 700, 7);
  for (const int heads : {model.kv_heads, model.query_heads}) {
    Picked given(1, heads, 200);
    for (std::size_t i = 0; i < given.ids.data.size(); ++i) {
      given.ids.data[i] = static_cast<std::int32_t>(10 + i % 200 * 3 + i / 200);
      given.biases[i] = 0.01F * static_cast<float>(i % 331);
    }
    CallTensors mine(model, 1, 3), theirs(model, 1, 3);
    for (const auto& [session, call] : {std::pair{&a, &mine}, std::pair{&b, &theirs}}) {
      session->attend(
          0, {.query = call->query.view(), .selected = given.ids_view(), .bias = given.bias_view()},
          call->outputs());
    }
    EXPECT_TRUE(as_resident(GetParam(), mine, theirs)) << heads << " heads";
  }
  EXPECT_GT(engine.stats().cumulative.cold_steps, 0U);
}

// The rows of always-attended tokens cannot be weighed together, so that the target's most tokens
// are taken, whose error is no larger.
TEST_P(PrioritySpillTest, AnErrorBesideMoreDenseTokensThanFramesTakesTheMostOfIt) {
  for (RetrievalConfig retrieval : all_rules()) {
    if (retrieval.error_target == 0.0) continue;
    SCOPED_TRACE(name_of(retrieval));
    retrieval.top_k = 0;
    Config small = with_frames(14);
    Config large = twin();
    small.retrieval = large.retrieval = retrieval;
    large.retrieval.top_k = static_cast<int>(retrieval.most_selected(1000));
    large.retrieval.error_target = 0.0;
    Engine engine(small), reference(large);
    const ModelConfig& model = engine.config().model;
    Session a = engine.open(), b = reference.open();
    append_to_all(a, model, 700, 7);
    append_to_all(b, model, 700, 7);
    const AttendOptions options{.dense_from = 300};
    expect_same_decode(a, b, model, 2, 50, options, true, GetParam());
    const HostTensor query = HostTensor::random(1, model.query_heads, 64, DType::kFloat32, 9);
    Picked mine(1, model.num_sets(retrieval.selection), 200), theirs = mine;
    a.select(0, query.view(), mine.outputs(), {}, options);
    b.select(0, query.view(), theirs.outputs(), {}, options);
    EXPECT_EQ(mine, theirs);

    // What is missed cannot be said without them.
    CallTensors call(model, 1, 60);
    std::vector<float> missed(static_cast<std::size_t>(model.query_heads));
    AttendOutputs outputs = call.outputs();
    outputs.missed = {missed.data(), DType::kFloat32, {1, model.query_heads}};
    if (retrieval.estimator != Estimator::kNormAware) continue;
    expect_error(error_of([&] { a.attend(0, call.attend_inputs(), outputs, {}, options); }),
                 ErrorCode::kResourceExhausted);
  }
}

// Ids that the caller has chosen need no rows to be weighed before.
TEST_P(PrioritySpillTest, GivenIdsBesideMoreDenseTokensThanFramesCountTheSame) {
  Config small = with_frames(14);
  Config large = twin();
  for (Config* config : {&small, &large}) {
    config->retrieval = priority_estimators()[1];
    config->retrieval.error_target = 0.1;
  }
  Engine engine(small), reference(large);
  const ModelConfig& model = engine.config().model;
  Session a = engine.open(), b = reference.open();
  append_random(a, model, 0, 700, 7);
  append_random(b, model, 0, 700, 7);
  Picked given(1, model.kv_heads, 20);
  for (std::size_t i = 0; i < given.ids.data.size(); ++i) {
    given.ids.data[i] = static_cast<std::int32_t>(20 + i % 20 * 3);
    given.biases[i] = 0.1F * static_cast<float>(i);
  }
  CallTensors mine(model, 1, 3), theirs(model, 1, 3);
  for (const auto& [session, call] : {std::pair{&a, &mine}, std::pair{&b, &theirs}}) {
    session->attend(
        0, {.query = call->query.view(), .selected = given.ids_view(), .bias = given.bias_view()},
        call->outputs(), {}, {.dense_from = 100});
  }
  EXPECT_TRUE(as_resident(GetParam(), mine, theirs));
}

class PriorityRowCacheTest : public EngineTest {};
KVTIER_INSTANTIATE_BACKENDS(PriorityRowCacheTest);

TEST_P(PriorityRowCacheTest, ARowCacheGivesTheSame) {
  for (const RetrievalConfig& retrieval : all_rules()) {
    SCOPED_TRACE(name_of(retrieval) + ", error target " + std::to_string(retrieval.error_target));
    Config config = this->config();
    config.retrieval = retrieval;
    config.memory.staging_rows = 512;
    Engine without(config);
    config.memory.row_cache_rows = 96;
    config.memory.row_cache_bytes = MiB;
    Engine with(config);
    Session cached = with.open(), plain = without.open();
    append_random(cached, config.model, 0, 600, 1);
    append_random(plain, config.model, 0, 600, 1);
    for (std::uint64_t seed = 8; seed < 20; ++seed) {
      CallTensors a(config.model, 1, seed), b(config.model, 1, seed);
      a.query = b.query = HostTensor::random(1, config.model.query_heads, config.model.head_dim,
                                             DType::kBFloat16, seed / 6);
      cached.decode(0, a.inputs(), a.outputs(true));
      plain.decode(0, b.inputs(), b.outputs(true));
      ASSERT_TRUE(as_resident(GetParam(), a, b)) << "seed " << seed;
    }
    const Stats::Cumulative found = with.stats().cumulative;
    EXPECT_GT(found.row_cache_hits, 0U);
    EXPECT_EQ(found.rows_selected, without.stats().cumulative.rows_selected);
  }
}

}  // namespace
}  // namespace kvtier::testing
