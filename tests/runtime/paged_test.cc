#include "runtime/paged_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

/// Sparse decode over pages of the caller. Scores at slots are compared with the oracle by the
/// selector's tests.
namespace kvtier::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Selection kShared[] = {Selection::kPerSequence, Selection::kPerKvHead};

HostTensor queries_of(const ModelConfig& model, std::int64_t rows, std::uint64_t seed) {
  return HostTensor::random(rows, model.query_heads, model.head_dim, DType::kFloat32, seed, 2.0F);
}

KVTIER_INSTANTIATE_BACKENDS(PagedTest);

TEST_P(PagedTest, AttendsToWhatItListsInEveryLayoutOfACache) {
  for (const Selection selection : kShared) {
    for (const SelectionRule rule : {SelectionRule::kPriority, SelectionRule::kTopK}) {
      for (const CacheLayout layout :
           {CacheLayout::kApart, CacheLayout::kTogether, CacheLayout::kHeadsFirst}) {
        for (const int block_tokens : {16, 64}) {
          SCOPED_TRACE(::testing::Message()
                       << static_cast<int>(selection) << ", rule " << static_cast<int>(rule)
                       << ", layout " << static_cast<int>(layout));
          const PagedConfig config =
              paged_config(paged_retrieval(rule, selection), 3, 2, block_tokens);
          PagedSketches sketches(config);
          // More sequences than a launch takes; some have no eligible token.
          const PagedSequences sequences(config, {700, 0, 1, 32, 33, 1500, 130}, 3);
          store_all(sketches, 1, sequences);
          const PagedLayer cache = cache_of(config, sequences, layout);
          const PagedBatch batch = batch_of(sequences);
          const HostTensor query = queries_of(config.model, 7, 9);

          const auto lists = select(sketches, 1, batch, query);
          const Attended found = attend(sketches, 1, batch, query, cache);

          for (std::size_t s = 0; s < sequences.lengths.size(); ++s) {
            const oracle::Visible visible = oracle::visible_tokens(
                {.sink = config.retrieval.sink_tokens, .recent = config.retrieval.recent_tokens},
                sequences.lengths[s], 0);
            const auto chosen = std::min<std::size_t>(40, visible.eligible.size());
            for (const Listed& list : lists[s]) {
              ASSERT_EQ(list.ids.size(), visible.static_tokens.size() + chosen);
              ASSERT_TRUE(std::includes(list.ids.begin(), list.ids.end(),
                                        visible.static_tokens.begin(),
                                        visible.static_tokens.end()));
            }
          }
          expect_attention(config, sequences, query, &lists, found);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(PagedTest, ListsWhatASessionSelects) {
  for (const Selection selection : kShared) {
    for (const SketchCode code : {SketchCode::kScalar, SketchCode::kSign}) {
      const RetrievalConfig retrieval = paged_retrieval(SelectionRule::kPriority, selection, code);
      const PagedConfig config = paged_config(retrieval, 2);
      PagedSketches sketches(config);
      const PagedSequences sequences(config, {900, 333}, 5);
      store_all(sketches, 0, sequences);
      const HostTensor query = queries_of(config.model, 2, 9);
      const auto lists = select(sketches, 0, batch_of(sequences), query);

      Config of_engine = small_config(GetParam());
      of_engine.model = config.model;
      of_engine.retrieval = retrieval;
      Engine engine(of_engine);
      for (std::size_t s = 0; s < 2; ++s) {
        Session session = engine.open();
        session.append(0, sequences.keys[s].view(), sequences.values[s].view());
        const int sets = config.model.num_sets(selection);
        HostIds ids(1, sets, 60);
        std::vector<float> biases(ids.data.size());
        session.select(0, query.view(static_cast<std::int64_t>(s), 1),
                       {.ids = ids.view(),
                        .scores = {},
                        .bias = {biases.data(), DType::kFloat32, {1, sets, 60}}});
        for (int set = 0; set < sets; ++set) {
          const Listed& list = lists[s][static_cast<std::size_t>(set)];
          const std::vector<std::int64_t> expected = ids.ids(0, set);
          std::size_t same = 0;
          for (std::size_t i = 0; i < expected.size(); ++i) {
            const auto at = std::find(list.ids.begin(), list.ids.end(), expected[i]);
            if (at == list.ids.end()) continue;
            ++same;
            const double bias = static_cast<double>(biases[static_cast<std::size_t>(set) * 60 + i]);
            EXPECT_NEAR(list.biases[static_cast<std::size_t>(at - list.ids.begin())], bias, 0.05);
          }
          // Appends of a GPU may round a projection otherwise, which changes a bit of few tokens.
          EXPECT_GE(same, GetParam() == Backend::kCpu ? 40U : 38U);
          EXPECT_EQ(expected.size(), 40U);
        }
      }
    }
  }
}

TEST_P(PagedTest, WithRoomForAllEqualsDenseAttention) {
  for (const Selection selection : kShared) {
    for (const SelectionRule rule : {SelectionRule::kPriority, SelectionRule::kTopK}) {
      RetrievalConfig retrieval = paged_retrieval(rule, selection);
      retrieval.top_k = 4000;
      const PagedConfig config = paged_config(retrieval, 4);
      PagedSketches sketches(config);
      const PagedSequences sequences(config, {500, 47, 1001}, 4);
      store_all(sketches, 0, sequences);
      const HostTensor query = queries_of(config.model, 3, 8);
      expect_attention(
          config, sequences, query, nullptr,
          attend(sketches, 0, batch_of(sequences), query, cache_of(config, sequences)));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(PagedTest, SlotsAreUsedAgainAndLayersAreApart) {
  const PagedConfig config =
      paged_config(paged_retrieval(SelectionRule::kTopK, Selection::kPerSequence));
  PagedSketches used(config), fresh(config);
  const PagedSequences before(config, {1400, 600}, 11), after(config, {300, 1200}, 12);
  const PagedSequences other(config, {300, 1200}, 13);
  store_all(used, 0, before);
  store_all(used, 0, after);
  store_all(used, 1, other);
  store_all(fresh, 0, after);
  const HostTensor query = queries_of(config.model, 2, 8);
  const PagedBatch batch = batch_of(after);
  const auto found = select(used, 0, batch, query), expected = select(fresh, 0, batch, query);
  for (std::size_t s = 0; s < 2; ++s) EXPECT_EQ(found[s][0].ids, expected[s][0].ids);
}

TEST_P(PagedTest, SlotsOutsideTheCacheArePassedOver) {
  const PagedConfig config =
      paged_config(paged_retrieval(SelectionRule::kTopK, Selection::kPerSequence));
  PagedSketches sketches(config), twin(config);
  const PagedSequences sequences(config, {600}, 5);
  store_all(sketches, 0, sequences);
  store_all(twin, 0, sequences);
  const HostTensor junk = HostTensor::random(5, 2, 64, DType::kBFloat16, 77, 50.0F);
  const auto end = static_cast<std::int32_t>(config.num_blocks * config.block_tokens);
  sketches.store(0, place(junk), place(junk), place({-1, end, -7, end + 999, -1}));
  const HostTensor query = queries_of(config.model, 1, 8);
  const PagedBatch batch = batch_of(sequences);
  EXPECT_EQ(select(sketches, 0, batch, query)[0][0].ids, select(twin, 0, batch, query)[0][0].ids);
}

TEST_P(PagedTest, ACallHasMoreTokensThanTheCacheHasSlots) {
  PagedConfig config = paged_config(paged_retrieval(SelectionRule::kTopK, Selection::kPerSequence));
  config.num_blocks = 10;
  constexpr std::int64_t kPadding = 140, kTokens = 130, kWidth = 2 * 64;
  PagedSketches sketches(config), twin(config);
  const PagedSequences sequences(config, {kTokens}, 5);
  store_all(twin, 0, sequences);
  const auto behind_padding = [&](const HostTensor& rows) {
    HostTensor padded(kPadding + kTokens, 2, 64, DType::kBFloat16);
    for (std::size_t i = 0; i < kTokens * kWidth; ++i) {
      padded.set(kPadding * kWidth + i, rows.values()[i]);
    }
    return padded;
  };
  std::vector<std::int32_t> slots(kPadding, -1);
  for (std::int64_t t = 0; t < kTokens; ++t) slots.push_back(sequences.slot(config, 0, t));
  sketches.store(0, place(behind_padding(sequences.keys[0])),
                 place(behind_padding(sequences.values[0])), place(slots));
  const HostTensor query = queries_of(config.model, 1, 8);
  const PagedBatch batch = batch_of(sequences);
  EXPECT_EQ(select(sketches, 0, batch, query)[0][0].ids, select(twin, 0, batch, query)[0][0].ids);
}

TEST_P(PagedTest, ABoundBelowTheLargestLengthGivesTheSame) {
  const PagedConfig config =
      paged_config(paged_retrieval(SelectionRule::kPriority, Selection::kPerSequence));
  PagedSketches sketches(config);
  const PagedSequences sequences(config, {600, 90}, 5);
  store_all(sketches, 0, sequences);
  const PagedLayer cache = cache_of(config, sequences);
  const HostTensor query = queries_of(config.model, 2, 8);
  const Attended wide = attend(sketches, 0, batch_of(sequences), query, cache);
  const Attended narrow = attend(sketches, 0, batch_of(sequences, 600), query, cache);
  for (std::size_t i = 0; i < wide.out.size(); ++i) ASSERT_NEAR(wide.out[i], narrow.out[i], 1e-4);
}

TEST_P(PagedTest, IdsAndLengthsThatCannotBeAreErrors) {
  const PagedConfig config =
      paged_config(paged_retrieval(SelectionRule::kTopK, Selection::kPerSequence));
  PagedSketches sketches(config);
  PagedSequences sequences(config, {600, 90}, 5);
  store_all(sketches, 0, sequences);
  const HostTensor query = queries_of(config.model, 2, 8);
  const PagedLayer cache = cache_of(config, sequences);
  const auto message = [&](const PagedBatch& batch) {
    const auto error = error_of([&] { (void)attend(sketches, 0, batch, query, cache); });
    return error ? std::string(error->what()) : std::string("none");
  };
  PagedSequences bad = sequences;
  bad.tables[3] = static_cast<std::int32_t>(config.num_blocks);
  bad.tables[5] = -2;
  EXPECT_THAT(message(batch_of(bad)),
              AllOf(HasSubstr("blocks: expected ids in 0..311"), HasSubstr("found 2 others")));
  bad = sequences;
  bad.lengths = {-1, 90};
  EXPECT_THAT(message(batch_of(bad)), HasSubstr("lengths: expected 0 up to max_length, found 1"));
  bad.lengths = {600, 90};
  EXPECT_THAT(message(batch_of(bad, 599)), HasSubstr("lengths"));
  EXPECT_EQ(message(batch_of(sequences)), "none") << "what was found is forgotten";
  EXPECT_NO_THROW(sketches.check());
}

TEST_P(PagedTest, RefusesArgumentsThatDoNotFit) {
  const PagedConfig config =
      paged_config(paged_retrieval(SelectionRule::kTopK, Selection::kPerSequence));
  PagedSketches sketches(config);
  const PagedSequences sequences(config, {600, 90}, 5);
  const PagedBatch batch = batch_of(sequences);
  const PagedLayer cache = cache_of(config, sequences);
  const HostTensor host_query = queries_of(config.model, 2, 8);
  const TensorView query = place(host_query);
  const TensorView keys = place(sequences.keys[1]), slots = place(std::vector<std::int32_t>(90, 1));
  const PagedAttendOutputs outputs{.out = output<float>(DType::kFloat32, {2, 4, 64}),
                                   .lse = output<float>(DType::kFloat32, {2, 4})};
  const MutableTensorView ids = output<std::int32_t>(DType::kInt32, {2, 1, 80});
  const auto refused = [&](const std::string& what, const std::function<void()>& call) {
    const auto error = error_of(call);
    ASSERT_TRUE(error.has_value()) << what;
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument) << what;
    EXPECT_THAT(error->what(), AllOf(HasSubstr(what), HasSubstr("expected"), HasSubstr("found")));
  };
  const auto attends = [&](const PagedBatch& of, const TensorView& q, const PagedLayer& layer,
                           const PagedAttendOutputs& to) {
    return [&sketches, of, q, layer, to] { sketches.attend(0, of, q, layer, to); };
  };
  refused("layer: expected 0..1", [&] { sketches.store(2, keys, keys, slots); });
  refused("keys", [&] { sketches.store(0, query, keys, slots); });
  refused("values", [&] { sketches.store(0, keys, place(sequences.keys[0]), slots); });
  refused("slots: expected int32 [90]", [&] { sketches.store(0, keys, keys, place({1, 2})); });
  TensorView spoilt = slots;
  spoilt.dtype = DType::kFloat32;
  refused("slots", [&] { sketches.store(0, keys, keys, spoilt); });

  PagedBatch other = batch;
  other.blocks.shape[1] = 5;
  refused("blocks: expected 94 ids or more", attends(other, query, cache, outputs));
  other = batch;
  other.max_length = 1501;
  refused("max_length: expected 0..1500", attends(other, query, cache, outputs));
  other = batch;
  other.lengths.shape[0] = 1;
  refused("lengths: expected int32 [2]", attends(other, query, cache, outputs));
  spoilt = query;
  spoilt.shape[1] = 3;
  refused("query: expected fp32, fp16 or bf16 [n, 4, 64]", attends(batch, spoilt, cache, outputs));
  PagedLayer layer = cache;
  layer.keys.shape[0] -= 1;
  refused("cache.keys: expected bf16 [312, 16, 2, 64]", attends(batch, query, layer, outputs));
  layer = cache;
  layer.values.dtype = DType::kFloat16;
  refused("cache.values", attends(batch, query, layer, outputs));
  layer = cache;
  layer.values.strides[1] = 130;
  refused("cache.values: expected strides that are multiples of 8",
          attends(batch, query, layer, outputs));
  layer = cache;
  layer.keys.data = static_cast<const std::byte*>(layer.keys.data) + 2;
  refused("cache.keys: expected an address", attends(batch, query, layer, outputs));
  PagedAttendOutputs to = outputs;
  to.out.shape[0] = 1;
  refused("out", attends(batch, query, cache, to));
  to = outputs;
  to.lse.dtype = DType::kBFloat16;
  refused("lse", attends(batch, query, cache, to));
  MutableTensorView few = ids;
  few.shape[2] = 71;
  refused("ids: expected 72 or more", [&] { sketches.select(0, batch, query, {.ids = few}); });
  few = ids;
  few.shape[1] = 2;
  refused("ids: expected int32 [2, 1, n]", [&] { sketches.select(0, batch, query, {.ids = few}); });
  MutableTensorView bias = ids;
  bias.dtype = DType::kFloat32;
  refused("bias: expected none without the priority rule",
          [&] { sketches.select(0, batch, query, {.ids = ids, .bias = bias}); });
  if (GetParam() == Backend::kCpu) {
    refused("stream: expected none on the CPU",
            [&] { sketches.store(0, keys, keys, slots, StreamRef::of(nullptr)); });
    return;
  }
  refused("query: expected device memory", attends(batch, host_query.view(), cache, outputs));
}

TEST(PagedConfigTest, NamesWhatIsWrong) {
  PagedConfig good;
  good.model = {.query_heads = 4, .kv_heads = 2, .head_dim = 64};
  good.num_blocks = 10;
  good.max_tokens = 100;
  EXPECT_THAT(good.validate(), ::testing::IsEmpty());
  const auto problem = [&](const std::function<void(PagedConfig&)>& spoil) {
    PagedConfig config = good;
    spoil(config);
    std::string all;
    for (const std::string& each : config.validate()) all += each + "\n";
    return all;
  };
  const auto expect = [&](const std::string& text, const std::function<void(PagedConfig&)>& spoil) {
    EXPECT_THAT(problem(spoil), HasSubstr(text));
  };
  expect("block_tokens: expected a power of two from 16 to 1024, found 48",
         [](PagedConfig& c) { c.block_tokens = 48; });
  expect("block_tokens: expected", [](PagedConfig& c) { c.block_tokens = 8; });
  expect("num_blocks: expected at least 1", [](PagedConfig& c) { c.num_blocks = 0; });
  expect("num_blocks: expected at least 1, and fewer than 2^31 slots",
         [](PagedConfig& c) { c.num_blocks = std::int64_t{1} << 28; });
  expect("max_tokens: expected 1..2147483647, found 0", [](PagedConfig& c) { c.max_tokens = 0; });
  expect("max_batch_rows: expected", [](PagedConfig& c) { c.max_batch_rows = 65; });
  expect("retrieval.selection: expected per_sequence or per_kv_head",
         [](PagedConfig& c) { c.retrieval.selection = Selection::kPerQueryHead; });
  expect("retrieval.estimator: expected norm_aware",
         [](PagedConfig& c) { c.retrieval = RetrievalConfig::of(Estimator::kSoftCollision); });
  expect("retrieval.query_bits: expected 4 or 8",
         [](PagedConfig& c) { c.retrieval.query_bits = 0; });
  expect("retrieval.error_target: expected 0",
         [](PagedConfig& c) { c.retrieval.error_target = 0.05; });
  expect("retrieval.coarse_bits: expected 0", [](PagedConfig& c) { c.retrieval.coarse_bits = 1; });
  expect("model.layer_options: expected sparse layers alone",
         [](PagedConfig& c) { c.model.layer_options = {{.mode = LayerMode::kDense}}; });
  expect("model.head_dim: expected", [](PagedConfig& c) { c.model.head_dim = 80; });

  good.backend = Backend::kCpu;
  EXPECT_EQ(PagedSketches(good).config().retrieval.top_k, 2048) << "where no number is given";
  good.retrieval.sparsity = 20.0;
  EXPECT_EQ(PagedSketches(good).config().retrieval.top_k, 0);
}

}  // namespace
}  // namespace kvtier::testing
