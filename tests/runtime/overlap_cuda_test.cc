#include "runtime/graph_fixture_cuda.h"
#include "transfer/device/kernel_overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

/// Kernels that start before the ones ahead of them have ended, and engines beyond those that may
/// run kernels whose blocks wait for one another.
namespace kvtier::testing {
namespace {

struct OverlapCase {
  std::string name;
  std::int64_t tokens;
  int query_heads, kv_heads, head_dim;
  RetrievalConfig retrieval;
  KvPlacement placement = KvPlacement::kHost;
  double recall = 0.0;
  LayerMode mode = LayerMode::kSparse;
  int queries = 1;  // of a step, per sequence
  int sequences = 1;
};

std::ostream& operator<<(std::ostream& out, const OverlapCase& c) { return out << c.name; }

RetrievalConfig with(RetrievalConfig retrieval, int top_k) {
  retrieval.top_k = top_k;
  return retrieval;
}

RetrievalConfig norm_aware(SketchCode code, SelectionRule rule,
                           Selection selection = Selection::kPerKvHead) {
  RetrievalConfig retrieval = with(RetrievalConfig{}, 128);
  retrieval.code = code;
  retrieval.rule = rule;
  retrieval.selection = selection;
  return retrieval;
}

std::vector<OverlapCase> overlap_cases() {
  const RetrievalConfig usual = norm_aware(SketchCode::kScalar, SelectionRule::kPriority);
  RetrievalConfig eight_bits = usual;
  eight_bits.query_bits = 8;
  RetrievalConfig target = with(usual, 512);
  target.error_target = 0.1F;
  RetrievalConfig soft = with(RetrievalConfig::socket(), 128);
  RetrievalConfig soft_together = soft;
  soft_together.selection = Selection::kPerKvHead;
  return {
      {"OnChip", 6000, 16, 4, 128, usual},
      {"OnChipOnDevice", 6000, 16, 4, 128, usual, KvPlacement::kDevice},
      {"Signs", 6000, 16, 4, 128, norm_aware(SketchCode::kSign, SelectionRule::kTopK)},
      {"Stream", 6000, 16, 1, 64, usual},
      {"ErrorTarget", 6000, 8, 2, 128, target},
      {"PerQueryHead", 6000, 8, 2, 128,
       norm_aware(SketchCode::kScalar, SelectionRule::kPriority, Selection::kPerQueryHead)},
      {"SoftCollision", 6000, 8, 2, 128, soft},
      {"SoftCollisionPerKvHead", 6000, 8, 2, 128, soft_together},
      {"SoftCollisionStream", 6000, 16, 2, 128, soft_together},
      {"SoftCollisionStreamOnDevice", 6000, 16, 2, 128, soft_together, KvPlacement::kDevice},
      {"Recall", 6000, 8, 2, 128, norm_aware(SketchCode::kSign, SelectionRule::kTopK),
       KvPlacement::kHost, 0.9},
      {"Short", 700, 8, 2, 64, with(usual, 64)},
      // The first step has a tile of 16 rows more than the prompt.
      {"Dense", 6000, 16, 4, 128, usual, KvPlacement::kDevice, 0.0, LayerMode::kDense},
      {"DenseWideGroup", 2048, 16, 1, 128, usual, KvPlacement::kDevice, 0.0, LayerMode::kDense},
      {"DenseShort", 16, 8, 2, 64, usual, KvPlacement::kDevice, 0.0, LayerMode::kDense},
      {"Window", 6000, 16, 4, 128, usual, KvPlacement::kDevice, 0.0, LayerMode::kSlidingWindow},
      // More than 32 (query, KV head): a block of attention has parts of several.
      {"Batch", 3000, 6, 3, 64, with(usual, 512), KvPlacement::kHost, 0.0, LayerMode::kSparse, 16},
      {"DenseBatch", 2000, 6, 3, 64, usual, KvPlacement::kDevice, 0.0, LayerMode::kDense, 16},
      {"Sequences", 3000, 8, 2, 128, usual, KvPlacement::kHost, 0.0, LayerMode::kSparse, 1, 5},
      // Served in halves.
      {"SequencesStream", 3000, 8, 2, 128, eight_bits, KvPlacement::kHost, 0.0, LayerMode::kSparse,
       1, 5},
  };
}

Config config_of(const OverlapCase& c) {
  Config config = small_config(Backend::kCuda);
  config.model.query_heads = c.query_heads;
  config.model.kv_heads = c.kv_heads;
  config.model.head_dim = c.head_dim;
  config.model.layers = 2;
  config.memory.device_bytes = 256 * MiB;
  config.memory.host_bytes = 64 * MiB;
  config.memory.max_session_tokens = 8192;
  config.memory.placement = c.placement;
  config.memory.row_cache_bytes.reset();
  config.memory.row_cache_rows = 1024;
  config.memory.max_batch_rows = std::max(config.memory.max_batch_rows, c.queries);
  if (c.mode != LayerMode::kSparse) {
    config.model.layer_options.assign(
        2, {.mode = c.mode, .window_tokens = c.mode == LayerMode::kSlidingWindow ? 1000 : 0});
  }
  config.retrieval = c.retrieval;
  return config;
}

class OverlapTest : public ::testing::TestWithParam<OverlapCase> {
 protected:
  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
  }
  void TearDown() override { transfer::set_kernel_overlap(true); }

  using Calls = std::vector<std::unique_ptr<DeviceCall>>;

  /// Results of steps of two layers, all of which are enqueued before any has ended. A step has a
  /// call per sequence.
  static Calls steps(Engine& engine, const OverlapCase& c) {
    constexpr int kSteps = 12;
    const ModelConfig& model = engine.config().model;
    const OwnStream stream;
    Calls calls;
    std::vector<Session> sessions;
    for (int i = 0; i < c.sequences; ++i) {
      sessions.push_back(engine.open());
      for (int layer = 0; layer < 2; ++layer) {
        append_random(sessions.back(), model, layer, c.tokens + 100 * i,
                      static_cast<std::uint64_t>(7 + i));
      }
      sessions.back().reserve(kSteps * c.queries, stream.ref());
    }
    for (int i = 0; i < kSteps * c.sequences; ++i) {
      const auto seed = static_cast<std::uint64_t>(100 + i);
      calls.push_back(std::make_unique<DeviceCall>(CallTensors(model, c.queries, seed)));
    }
    stream.synchronize();
    AttendOptions options;
    if (c.recall > 0.0) options.recall_target = RecallTarget{.recall = c.recall, .min_top_k = 8};
    for (int step = 0; step < kSteps; ++step) {
      std::vector<BatchItem> items;
      for (std::size_t i = 0; i < sessions.size(); ++i) {
        const DeviceCall& call = *calls[static_cast<std::size_t>(step) * sessions.size() + i];
        items.push_back({&sessions[i], call.inputs(), call.outputs(), options});
        // Ids are wanted by calls alone.
        if (sessions.size() > 1) items.back().outputs.selected = {};
      }
      engine.decode(step % 2, items, stream.ref());
    }
    stream.synchronize();
    return calls;
  }
};

TEST_P(OverlapTest, ChangesNoResult) {
  Engine engine(config_of(GetParam()));
  const Calls with_overlap = steps(engine, GetParam());
  transfer::set_kernel_overlap(false);
  const Calls without = steps(engine, GetParam());
  for (std::size_t i = 0; i < without.size(); ++i) {
    EXPECT_EQ(with_overlap[i]->out.download(), without[i]->out.download()) << "call " << i;
    EXPECT_EQ(with_overlap[i]->lse.download(), without[i]->lse.download()) << "call " << i;
    EXPECT_EQ(with_overlap[i]->ids.download(), without[i]->ids.download()) << "call " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, OverlapTest, ::testing::ValuesIn(overlap_cases()),
                         [](const auto& path) { return path.param.name; });

}  // namespace
}  // namespace kvtier::testing
