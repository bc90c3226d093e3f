#include "kvtier/kvtier.h"

#include "runtime/engine_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace kvtier::testing {
namespace {

constexpr kvtier_stream kNoStream = {0, nullptr};

template <typename Void>
kvtier_tensor to_c(const BasicTensorView<Void>& view) {
  kvtier_tensor tensor{};
  tensor.data = const_cast<void*>(static_cast<const void*>(view.data));
  tensor.dtype = static_cast<kvtier_dtype>(view.dtype);
  tensor.space = static_cast<kvtier_space>(view.space);
  tensor.rank = view.rank;
  std::copy(view.shape.begin(), view.shape.end(), tensor.shape);
  std::copy(view.strides.begin(), view.strides.end(), tensor.strides);
  return tensor;
}

kvtier_attend_args to_c(const DecodeInputs& inputs, const AttendOutputs& outputs) {
  kvtier_attend_args args;
  kvtier_attend_args_init(&args);
  args.query = to_c(inputs.query);
  args.key = to_c(inputs.key);
  args.value = to_c(inputs.value);
  args.out = to_c(outputs.out);
  args.lse = to_c(outputs.lse);
  args.selected_out = to_c(outputs.selected);
  return args;
}

/// The same engine and sequence through both APIs.
class CApiEqualityTest : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    if (IsSkipped()) return;
    config_ = config();
    config_.model.layers = 2;
    config_.model.layer_options = {{}, {.mode = LayerMode::kSlidingWindow, .window_tokens = 30}};
    config_.extra_sketches = {{.kind = PlaneKind::kOrthogonal, .num_planes = 128, .seed = 4},
                              {.kind = PlaneKind::kOrthogonal,
                               .num_planes = 128,
                               .seed = 4,
                               .code = SketchCode::kScalar}};
    config_.memory.staging_rows = 128;  // without, the CPU has no row cache
    config_.memory.row_cache_bytes = 4 * MiB;
    config_.memory.row_cache_rows = 512;
    engine_.emplace(config_);
    session_.emplace(engine_->open());

    const kvtier_layer_config layers[] = {{KVTIER_LAYER_DEFAULT, 0, 0.0F, 0.0F},
                                          {KVTIER_LAYER_SLIDING_WINDOW, 30, 0.0F, 0.0F}};
    const kvtier_sketch_config extra[] = {{KVTIER_PLANES_ORTHOGONAL, 128, 4, KVTIER_SIGN},
                                          {KVTIER_PLANES_ORTHOGONAL, 128, 4, KVTIER_SCALAR}};
    kvtier_config c;
    kvtier_config_init(&c);
    c.layers = 2;
    c.query_heads = config_.model.query_heads;
    c.kv_heads = config_.model.kv_heads;
    c.head_dim = config_.model.head_dim;
    c.layer_options = layers;
    c.device_bytes = config_.memory.device_bytes;
    c.host_bytes = config_.memory.host_bytes;
    c.max_session_tokens = config_.memory.max_session_tokens;
    c.max_batch_rows = config_.memory.max_batch_rows;
    c.staging_rows = config_.memory.staging_rows;
    c.row_cache_bytes = *config_.memory.row_cache_bytes;
    c.row_cache_rows = config_.memory.row_cache_rows;
    c.retrieval = to_c(config_.retrieval);
    c.extra_sketches = extra;
    c.num_extra_sketches = 2;
    c.backend = static_cast<kvtier_backend>(GetParam());
    ASSERT_EQ(kvtier_engine_create(&c, &c_engine_), KVTIER_OK) << kvtier_last_error();
    ASSERT_EQ(kvtier_session_open(c_engine_, 0, &c_session_), KVTIER_OK) << kvtier_last_error();
    ASSERT_EQ(kvtier_engine_backend(c_engine_), c.backend);
    for (int layer = 0; layer < 2; ++layer) {
      const CallTensors prompt(config_.model, 500, 8 + static_cast<std::uint64_t>(layer));
      session_->append(layer, prompt.key.view(), prompt.value.view());
      const kvtier_tensor key = to_c(prompt.key.view());
      const kvtier_tensor value = to_c(prompt.value.view());
      ASSERT_EQ(kvtier_session_append(c_session_, layer, &key, &value, kNoStream), KVTIER_OK);
    }
  }
  void TearDown() override {
    kvtier_engine_destroy(c_engine_);
    kvtier_session_close(c_session_);
  }
  static kvtier_retrieval_config to_c(const RetrievalConfig& config) {
    kvtier_retrieval_config c;
    kvtier_retrieval_config_init(&c);
    c.estimator = static_cast<kvtier_estimator>(config.estimator);
    c.value_weighting = static_cast<kvtier_value_weighting>(config.value_weighting);
    c.selection = static_cast<kvtier_selection>(config.selection);
    c.seed = config.seed;
    c.planes_per_table = config.planes_per_table;
    c.tables = config.tables;
    c.num_planes = config.num_planes;
    c.query_bits = config.query_bits;
    c.top_k = config.top_k;
    c.sparsity = config.sparsity;
    c.sink_tokens = config.sink_tokens;
    c.recent_tokens = config.recent_tokens;
    c.rule = static_cast<kvtier_rule>(config.rule);
    c.code = static_cast<kvtier_code>(config.code);
    c.error_target = config.error_target;
    c.coarse_bits = config.coarse_bits;
    c.candidates = config.candidates;
    return c;
  }
  template <typename View>
  static kvtier_tensor to_c(const View& view) {
    return testing::to_c(view);
  }

  Config config_;
  std::optional<Engine> engine_;
  std::optional<Session> session_;
  kvtier_engine* c_engine_ = nullptr;
  kvtier_session* c_session_ = nullptr;
};

TEST_P(CApiEqualityTest, APrefetchFetchesAndCountsAlike) {
  const CallTensors next(config_.model, 1, 40);
  RetrievalConfig more = config_.retrieval;
  more.top_k += 32;
  const kvtier_retrieval_config c_more = to_c(more);
  kvtier_options c_options;
  kvtier_options_init(&c_options);
  c_options.retrieval = &c_more;
  AttendOptions options;
  options.retrieval = &more;
  const kvtier_tensor query = to_c(next.query.view());
  CallTensors a(config_.model, 1, 40), b(config_.model, 1, 40);
  const kvtier_attend_args args = testing::to_c(b.inputs(), b.outputs(true));
  session_->prefetch(0, next.query.view(), {}, options);
  ASSERT_EQ(kvtier_session_prefetch(c_session_, 0, &query, &c_options, kNoStream), KVTIER_OK)
      << kvtier_last_error();
  session_->decode(0, a.inputs(), a.outputs(true));
  ASSERT_EQ(kvtier_session_decode(c_session_, 0, &args, kNoStream), KVTIER_OK);
  EXPECT_TRUE(a.same_results(b));
  // The second layer selects nothing.
  EXPECT_EQ(kvtier_session_prefetch(c_session_, 1, &query, nullptr, kNoStream),
            KVTIER_FAILED_PRECONDITION);
  EXPECT_EQ(kvtier_session_prefetch(c_session_, 0, nullptr, nullptr, kNoStream),
            KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(kvtier_session_prefetch(nullptr, 0, &query, nullptr, kNoStream),
            KVTIER_INVALID_ARGUMENT);
  session_->truncate(0);
  ASSERT_EQ(kvtier_session_truncate(c_session_, 0, kNoStream), KVTIER_OK);

  const Stats::Cumulative sum = engine_->stats().cumulative;
  kvtier_stats stats{};
  stats.struct_size = sizeof(stats);
  ASSERT_EQ(kvtier_engine_stats(c_engine_, &stats), KVTIER_OK);
  EXPECT_GT(sum.rows_prefetched_useful, 0U);
  EXPECT_GT(sum.rows_prefetched_wasted, 0U);
  EXPECT_EQ(stats.rows_prefetched, sum.rows_prefetched);
  EXPECT_EQ(stats.rows_prefetched_useful, sum.rows_prefetched_useful);
  EXPECT_EQ(stats.rows_prefetched_wasted, sum.rows_prefetched_wasted);
  EXPECT_EQ(stats.row_cache_hits, sum.row_cache_hits);
}

TEST_P(CApiEqualityTest, EveryVerbGivesTheSameBits) {
  RetrievalConfig norm_aware = config_.retrieval;
  norm_aware.estimator = Estimator::kNormAware;
  norm_aware.num_planes = 128;
  norm_aware.seed = 4;
  const kvtier_retrieval_config c_norm_aware = to_c(norm_aware);
  kvtier_options c_options;
  kvtier_options_init(&c_options);
  c_options.softmax_scale = 0.2F;
  c_options.logit_softcap = 30.0F;
  c_options.dense_from = 450;
  c_options.retrieval = &c_norm_aware;
  const AttendOptions options{.softmax_scale = 0.2F,
                              .logit_softcap = 30.0F,
                              .mode = {},
                              .dense_from = 450,
                              .retrieval = &norm_aware};
  for (int layer = 0; layer < 2; ++layer) {
    for (const bool with_options : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "layer " << layer << " options " << with_options);
      CallTensors a(config_.model, 3, 20), b(config_.model, 3, 20);
      session_->decode(layer, a.inputs(), a.outputs(true), {},
                       with_options ? options : AttendOptions{});
      kvtier_attend_args args = testing::to_c(b.inputs(), b.outputs(true));
      if (with_options) args.options = &c_options;
      ASSERT_EQ(kvtier_session_decode(c_session_, layer, &args, kNoStream), KVTIER_OK)
          << kvtier_last_error();
      EXPECT_TRUE(a.same_results(b)) << "decode";

      session_->attend(layer, a.attend_inputs(), a.outputs(true), {},
                       with_options ? options : AttendOptions{});
      ASSERT_EQ(kvtier_session_attend(c_session_, layer, &args, kNoStream), KVTIER_OK);
      EXPECT_TRUE(a.same_results(b)) << "attend";

      std::int64_t tokens = 0;
      ASSERT_EQ(kvtier_session_length(c_session_, layer, &tokens), KVTIER_OK);
      EXPECT_EQ(tokens, session_->length(layer));
    }
  }
  CallTensors a(config_.model, 1, 30), b(config_.model, 1, 30);
  HostTensor a_scores(1, 4, 1024, DType::kFloat32), b_scores(1, 4, 1024, DType::kFloat32);
  session_->select(0, a.query.view(), {.ids = a.ids.view(), .scores = a_scores.mutable_view()}, {},
                   options);
  const kvtier_tensor query = to_c(b.query.view());
  const kvtier_tensor ids = to_c(b.ids.view());
  const kvtier_tensor scores = to_c(b_scores.mutable_view());
  ASSERT_EQ(
      kvtier_session_select(c_session_, 0, &query, &ids, &scores, nullptr, &c_options, kNoStream),
      KVTIER_OK)
      << kvtier_last_error();
  EXPECT_EQ(a.ids.data, b.ids.data);
  EXPECT_EQ(a_scores.bytes(), b_scores.bytes());

  session_->truncate(333);
  ASSERT_EQ(kvtier_session_truncate(c_session_, 333, kNoStream), KVTIER_OK);
  session_->reserve(100);
  ASSERT_EQ(kvtier_session_reserve(c_session_, 100, kNoStream), KVTIER_OK);
  session_->decode(0, a.inputs(), a.outputs(true));
  const kvtier_attend_args args = testing::to_c(b.inputs(), b.outputs(true));
  const kvtier_batch_item item = {c_session_, &args};
  ASSERT_EQ(kvtier_engine_decode(c_engine_, 0, &item, 1, kNoStream), KVTIER_OK);
  EXPECT_TRUE(a.same_results(b)) << "after truncate and reserve, as a batch";

  std::vector<Session> forked = session_->fork(2);
  kvtier_session* c_forked[2] = {};
  ASSERT_EQ(kvtier_session_fork(c_session_, 2, c_forked, kNoStream), KVTIER_OK);
  for (std::size_t i = 0; i < 2; ++i) {
    forked[i].decode(0, a.inputs(), a.outputs(true));
    ASSERT_EQ(kvtier_session_decode(c_forked[i], 0, &args, kNoStream), KVTIER_OK);
    EXPECT_TRUE(a.same_results(b)) << "child " << i;
    kvtier_session_close(c_forked[i]);
  }
  // 101 tokens in both layers: one whole page of each.
  session_->truncate(101);
  ASSERT_EQ(kvtier_session_truncate(c_session_, 101, kNoStream), KVTIER_OK);
  const std::vector<std::int32_t> token_ids(101, 7);
  ASSERT_EQ(kvtier_session_publish(c_session_, token_ids.data(), 101, kNoStream), KVTIER_OK);
  session_->publish(token_ids);
  for (const std::string_view secret : {"", "another"}) {
    kvtier_session* c_found = nullptr;
    const kvtier_prefix prefix = {sizeof(prefix), token_ids.data(), 101,
                                  secret.data(),  secret.size(),    secret.data()};
    ASSERT_EQ(kvtier_session_open_prefix(c_engine_, 0, &prefix, &c_found), KVTIER_OK);
    Session found = engine_->open(
        {.token_ids = token_ids, .tenant_secret = secret, .model_fingerprint = secret});
    std::int64_t length = -1;
    ASSERT_EQ(kvtier_session_length(c_found, 0, &length), KVTIER_OK);
    EXPECT_EQ(length, secret.empty() ? 64 : 0);
    EXPECT_EQ(found.length(), length);
    found.decode(0, a.inputs(), a.outputs(true));
    ASSERT_EQ(kvtier_session_decode(c_found, 0, &args, kNoStream), KVTIER_OK);
    EXPECT_TRUE(a.same_results(b)) << "with a prefix of " << length;
    kvtier_session_close(c_found);
  }
  kvtier_session* c_limited = nullptr;
  const kvtier_session_config limited = {sizeof(limited), 0, nullptr, 1, "someone"};
  ASSERT_EQ(kvtier_session_open_config(c_engine_, &limited, &c_limited), KVTIER_OK);
  EXPECT_EQ(kvtier_session_decode(c_limited, 0, &args, kNoStream), KVTIER_RESOURCE_EXHAUSTED);
  kvtier_session_close(c_limited);
  const kvtier_session_config sizeless{};
  for (const kvtier_session_config* config : {&sizeless, &limited}) {
    kvtier_engine* const engine = config == &limited ? nullptr : c_engine_;
    EXPECT_EQ(kvtier_session_open_config(engine, config, &c_limited), KVTIER_INVALID_ARGUMENT);
  }
  EXPECT_EQ(kvtier_session_open_config(c_engine_, nullptr, &c_limited), KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(kvtier_engine_set_quota(c_engine_, "someone", 0), KVTIER_OK);
  EXPECT_EQ(kvtier_engine_set_quota(c_engine_, "", 0), KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(kvtier_engine_set_quota(c_engine_, nullptr, 0), KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(kvtier_engine_set_quota(nullptr, "someone", 0), KVTIER_INVALID_ARGUMENT);
  kvtier_stats stats{};
  stats.struct_size = sizeof(stats);
  ASSERT_EQ(kvtier_engine_stats(c_engine_, &stats), KVTIER_OK);
  EXPECT_EQ(stats.pages_shared, 2U) << "by the session and the store";
  EXPECT_EQ(stats.prefix_tokens, 64U);
  EXPECT_EQ(stats.prefix_tokens_asked, 202U);
  EXPECT_EQ(stats.prefix_tokens_attached, 64U);
  EXPECT_EQ(stats.prefix_tokens_evicted, 0U);
  EXPECT_EQ(stats.sessions, 1U);
}

TEST_P(CApiEqualityTest, RecallTargetsGiveTheSameBits) {
  RetrievalConfig norm_aware = config_.retrieval;
  norm_aware.estimator = Estimator::kNormAware;
  norm_aware.num_planes = 128;
  norm_aware.seed = 4;
  norm_aware.top_k = 400;
  const kvtier_retrieval_config c_norm_aware = to_c(norm_aware);
  kvtier_options c_options;
  kvtier_options_init(&c_options);
  c_options.retrieval = &c_norm_aware;
  c_options.recall_target = 0.8;
  c_options.min_top_k = 3;
  c_options.noise_share = 0.25F;
  const AttendOptions options{
      .retrieval = &norm_aware,
      .recall_target = RecallTarget{.recall = 0.8, .min_top_k = 3, .noise_share = 0.25F}};
  CallTensors a(config_.model, 2, 50), b(config_.model, 2, 50);
  HostTensor a_missed(2, 1, 4, DType::kFloat32), b_missed(2, 1, 4, DType::kFloat32);
  AttendOutputs a_outputs = a.outputs(true);
  AttendOutputs b_outputs = b.outputs(true);
  a_outputs.missed = {a_missed.mutable_view().data, DType::kFloat32, {2, 4}};
  b_outputs.missed = {b_missed.mutable_view().data, DType::kFloat32, {2, 4}};
  session_->attend(0, a.attend_inputs(), a_outputs, {}, options);
  kvtier_attend_args args = testing::to_c(b.inputs(), b_outputs);
  args.missed = to_c(b_outputs.missed);
  args.options = &c_options;
  ASSERT_EQ(kvtier_session_attend(c_session_, 0, &args, kNoStream), KVTIER_OK)
      << kvtier_last_error();
  EXPECT_TRUE(a.same_results(b));
  EXPECT_EQ(a_missed.bytes(), b_missed.bytes());
  EXPECT_NE(a_missed.get(0), 0.0F);
}

TEST_P(CApiEqualityTest, PriorityAndScalarCodesGiveTheSameBits) {
  RetrievalConfig priority = config_.retrieval;
  priority.estimator = Estimator::kNormAware;
  priority.num_planes = 128;
  priority.seed = 4;
  priority.rule = SelectionRule::kPriority;
  priority.code = SketchCode::kScalar;
  priority.selection = Selection::kPerKvHead;
  struct Case {
    int top_k;
    double error_target;
    int coarse;
  };
  for (const auto& [top_k, error, coarse] :
       {Case{40, 0.0, 0}, Case{40, 0.2, 0}, Case{40, 0.0, 1}, Case{0, 0.0, 0}}) {
    const int n = top_k > 0 ? top_k : 600;  // without a number as many as there are
    priority.top_k = top_k;
    priority.error_target = error;
    priority.coarse_bits = coarse;
    priority.candidates = 3;
    const kvtier_retrieval_config c_priority = to_c(priority);
    kvtier_options c_options;
    kvtier_options_init(&c_options);
    c_options.retrieval = &c_priority;
    const AttendOptions options{.retrieval = &priority};
    CallTensors a(config_.model, 2, 60), b(config_.model, 2, 60);
    HostIds a_ids(2, config_.model.kv_heads, n), b_ids(2, config_.model.kv_heads, n);
    HostTensor a_bias(2, config_.model.kv_heads, n, DType::kFloat32);
    HostTensor b_bias(2, config_.model.kv_heads, n, DType::kFloat32);
    session_->select(0, a.query.view(), {.ids = a_ids.view(), .bias = a_bias.mutable_view()}, {},
                     options);
    const kvtier_tensor query = to_c(b.query.view());
    const kvtier_tensor ids = to_c(b_ids.view());
    const kvtier_tensor bias = to_c(b_bias.mutable_view());
    ASSERT_EQ(
        kvtier_session_select(c_session_, 0, &query, &ids, nullptr, &bias, &c_options, kNoStream),
        KVTIER_OK)
        << kvtier_last_error();
    EXPECT_EQ(a_ids.data, b_ids.data);
    EXPECT_EQ(a_bias.bytes(), b_bias.bytes());
    const auto* biases = reinterpret_cast<const float*>(a_bias.bytes().data());
    EXPECT_GT(*std::max_element(biases, biases + 2 * config_.model.kv_heads * n), 0.0F);

    AttendInputs inputs = a.attend_inputs();
    inputs.selected = a_ids.view();
    inputs.bias = a_bias.view();
    session_->attend(0, inputs, a.outputs(), {}, options);
    kvtier_attend_args args = testing::to_c(b.inputs(), b.outputs());
    args.selected = ids;
    args.bias = bias;
    args.options = &c_options;
    ASSERT_EQ(kvtier_session_attend(c_session_, 0, &args, kNoStream), KVTIER_OK)
        << kvtier_last_error();
    EXPECT_TRUE(a.same_results(b)) << "attend";

    DecodeInputs step = a.inputs();
    step.selected = inputs.selected;
    step.bias = inputs.bias;
    session_->decode(0, step, a.outputs(), {}, options);
    ASSERT_EQ(kvtier_session_decode(c_session_, 0, &args, kNoStream), KVTIER_OK)
        << kvtier_last_error();
    EXPECT_TRUE(a.same_results(b)) << "decode";

    b_bias.set(1, -1.0F);
    EXPECT_EQ(kvtier_session_attend(c_session_, 0, &args, kNoStream), KVTIER_INVALID_ARGUMENT);
    EXPECT_STREQ(kvtier_last_error(),
                 "bias[0, 0, 1]: expected a finite number of at least 0, found -1.000000");
  }
}

TEST_P(CApiEqualityTest, MergeGivesTheSameBits) {
  CallTensors a(config_.model, 2, 40), b(config_.model, 2, 41), merged(config_.model, 2, 42);
  CallTensors c_merged(config_.model, 2, 42);
  session_->attend(0, a.attend_inputs(), a.outputs());
  session_->attend(0, b.attend_inputs(), b.outputs());
  const std::vector<PartialResult> parts = {{a.out.view(), a.lse_view()},
                                            {b.out.view(), b.lse_view()}};
  engine_->merge(parts, merged.outputs());

  const kvtier_tensor outs[] = {to_c(a.out.view()), to_c(b.out.view())};
  const kvtier_tensor lses[] = {to_c(a.lse_view()), to_c(b.lse_view())};
  const kvtier_tensor out = to_c(c_merged.outputs().out);
  const kvtier_tensor lse = to_c(c_merged.lse_view());
  ASSERT_EQ(kvtier_engine_merge(c_engine_, outs, lses, 2, &out, &lse, kNoStream), KVTIER_OK)
      << kvtier_last_error();
  EXPECT_TRUE(merged.same_results(c_merged));
}

TEST_P(CApiEqualityTest, FetchGivesTheSameRows) {
  const ModelConfig& model = config_.model;
  const std::vector<std::int32_t> ids = {40, 0, -1, 17, 17, 3};
  const TensorView tokens(ids.data(), DType::kInt32, {model.kv_heads, 3});
  HostTensor keys(model.kv_heads, 3, model.head_dim, model.kv_dtype);
  HostTensor values = keys, c_keys = keys, c_values = keys;
  session_->fetch(0, tokens, {.keys = keys.mutable_view(), .values = values.mutable_view()});

  const kvtier_tensor c_tokens = to_c(tokens), k = to_c(c_keys.mutable_view());
  const kvtier_tensor v = to_c(c_values.mutable_view());
  ASSERT_EQ(kvtier_session_fetch(c_session_, 0, &c_tokens, &k, &v), KVTIER_OK)
      << kvtier_last_error();
  EXPECT_EQ(keys.bytes(), c_keys.bytes());
  EXPECT_EQ(values.bytes(), c_values.bytes());
}

TEST(CApiDefaults, AreThoseOfTheCppApi) {
  kvtier_config c;
  kvtier_config_init(&c);
  const Config d;
  EXPECT_EQ(c.struct_size, sizeof(c));
  EXPECT_EQ(c.retrieval.struct_size, sizeof(c.retrieval));
  EXPECT_EQ(c.layers, d.model.layers);
  EXPECT_EQ(c.head_dim, d.model.head_dim);
  EXPECT_EQ(c.kv_dtype, KVTIER_BF16);
  EXPECT_EQ(c.device_bytes, d.memory.device_bytes);
  EXPECT_EQ(c.host_bytes, d.memory.host_bytes);
  EXPECT_EQ(c.placement, KVTIER_PLACE_HOST);
  EXPECT_EQ(c.page_tokens, d.memory.page_tokens);
  EXPECT_EQ(c.page_format, KVTIER_PAGES_MODEL);
  EXPECT_EQ(c.max_session_tokens, d.memory.max_session_tokens);
  EXPECT_EQ(c.max_batch_rows, d.memory.max_batch_rows);
  EXPECT_EQ(c.staging_rows, d.memory.staging_rows);
  EXPECT_EQ(c.disk_cache, nullptr);
  EXPECT_EQ(c.disk_cache_bytes, 0U);
  EXPECT_EQ(c.tier_deadline_ms, static_cast<std::uint64_t>(d.memory.tier_deadline.count()));
  EXPECT_EQ(c.row_cache_bytes, KVTIER_ROW_CACHE_BYTES_AUTO);
  EXPECT_FALSE(d.memory.row_cache_bytes.has_value());
  EXPECT_EQ(c.row_cache_rows, d.memory.row_cache_rows);
  EXPECT_EQ(c.row_cache_policy, KVTIER_ROW_CACHE_SCORE);
  EXPECT_EQ(c.verify_rows, 0);
  EXPECT_EQ(c.prefetch_rows, 0);
  EXPECT_EQ(c.dense_when_faster, 1);
  EXPECT_EQ(c.retrieval.estimator, KVTIER_NORM_AWARE);
  EXPECT_EQ(c.retrieval.rule, KVTIER_PRIORITY);
  EXPECT_EQ(c.retrieval.code, KVTIER_SCALAR);
  EXPECT_EQ(c.retrieval.coarse_bits, 0);
  EXPECT_EQ(c.retrieval.candidates, d.retrieval.candidates);
  EXPECT_EQ(c.retrieval.value_weighting, KVTIER_WEIGHTING_DEFAULT);
  EXPECT_EQ(c.retrieval.selection, KVTIER_PER_KV_HEAD);
  EXPECT_EQ(c.retrieval.plane_kind, KVTIER_PLANES_DEFAULT);
  EXPECT_EQ(c.retrieval.planes_per_table, d.retrieval.planes_per_table);
  EXPECT_EQ(c.retrieval.tables, d.retrieval.tables);
  EXPECT_EQ(c.retrieval.tau, d.retrieval.tau);
  EXPECT_EQ(c.retrieval.num_planes, d.retrieval.num_planes);
  EXPECT_EQ(c.retrieval.query_bits, d.retrieval.query_bits);
  EXPECT_EQ(c.retrieval.top_k, 0);
  EXPECT_EQ(c.retrieval.error_target, 0.0);
  EXPECT_EQ(c.retrieval.sparsity, d.retrieval.sparsity);
  EXPECT_EQ(c.retrieval.sink_tokens, d.retrieval.sink_tokens);
  EXPECT_EQ(c.retrieval.recent_tokens, d.retrieval.recent_tokens);
  kvtier_options options;
  kvtier_options_init(&options);
  EXPECT_EQ(options.recall_target, 0.0);
  EXPECT_EQ(options.min_top_k, RecallTarget{}.min_top_k);
  EXPECT_EQ(options.noise_share, RecallTarget{}.noise_share);
  EXPECT_EQ(c.backend, KVTIER_BACKEND_AUTO);
  EXPECT_EQ(c.reject_nonfinite, 1);
}

KVTIER_INSTANTIATE_BACKENDS(CApiEqualityTest);

}  // namespace
}  // namespace kvtier::testing
