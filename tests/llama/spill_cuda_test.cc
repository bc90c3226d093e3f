#include "kvtier/error.h"

#include "llama/decoder.h"
#include "llama/kv_store.h"
#include "llama/runtime_options.h"
#include "llama/tasks.h"
#include "tests/llama/temporary_folder.h"
#include "tests/llama/twins.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace kvtier::llama {
namespace {

constexpr std::size_t kContext = 4096;
constexpr int kGenerated = 24;

class LlamaSpillCuda : public ::testing::Test {
 protected:
  [[nodiscard]] static RuntimeOptions resident() {
    RuntimeOptions options;
    options.backend = Backend::kCuda;
    return options;
  }
  /// An engine, or none where there is no GPU.
  [[nodiscard]] static std::unique_ptr<KvStore> store_of(const Config& config) {
    try {
      return make_kv_store(config, "");
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnimplemented) throw;
      return nullptr;
    }
  }
  testing::TemporaryFolder folder_;
};

TEST_F(LlamaSpillCuda, NeedleLlamaWritesTheSameTokensWithRowsAndPagesInEveryTier) {
  const std::string data = KVTIER_DATA_DIR;
  if (!std::filesystem::exists(data)) GTEST_SKIP() << "no source tree on this machine";
  Decoder decoder = load_decoder(data + "/needle-llama/model", make_cpu_compute());
  const TaskFile tasks(data + "/needle-llama/tasks/dev.safetensors");
  const std::span<const std::int32_t> all = tasks.at("n4096.d100").sequence(0);
  ASSERT_GE(all.size(), kContext);
  RetrievalOptions retrieval;
  retrieval.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  retrieval.selections = {Selection::kPerKvHead, Selection::kPerQueryHead};
  retrieval.sparsities = {0.0, 33.0};
  std::vector<std::string> left_out;
  std::vector<Method> methods = make_methods(retrieval, left_out);
  constexpr std::int64_t kTokens = kContext + kGenerated + 1;
  const Config all_resident = engine_config(decoder.config(), resident(), methods, kTokens);
  RuntimeOptions mixed = resident();
  mixed.host_budget = "50%";
  mixed.disk_cache = (folder_.path() / "cache").string();
  Config tiers = engine_config(decoder.config(), mixed, methods, kTokens);
  tiers.memory.row_cache_bytes = all_resident.memory.host_bytes / 20;
  tiers.memory.row_cache_rows = 128;
  const std::unique_ptr<KvStore> in_memory = store_of(all_resident);
  if (in_memory == nullptr) GTEST_SKIP() << "no GPU";
  const std::unique_ptr<KvStore> in_tiers = store_of(tiers);
  const std::unique_ptr<KvSession> a = in_memory->open(kTokens);
  const std::unique_ptr<KvSession> b = in_tiers->open(kTokens);
  // A GPU attends to cached rows before others: sums are taken in another order.
  testing::Twins twins(*a, *b, 2e-5F);

  decoder.prefill(twins, all.first(kContext));
  EXPECT_GT(in_tiers->stats().snapshot.pages_in_tiers, 0U);
  for (Method& method : methods) {
    const AttendOptions attend = attend_options(method, kContext, 64);
    std::int32_t token = all[kContext - 1];
    for (int i = 0; i < kGenerated; ++i) {
      const std::vector<float> logits = decoder.decode(twins, {&token, 1}, attend);
      token = static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) -
                                        logits.begin());
      if (HasFatalFailure()) return;
    }
    twins.truncate(kContext);
  }

  EXPECT_EQ(methods.size(), 5U);
  EXPECT_EQ(twins.num_compared, 5 * kGenerated * decoder.config().layers);
  const Stats stats = in_tiers->stats();
  EXPECT_GT(stats.cumulative.cold_steps, 0U);
  EXPECT_GT(stats.cumulative.row_cache_hits, 0U);
  EXPECT_GT(stats.cumulative.pages_restored, 0U);
  EXPECT_EQ(stats.cumulative.pages_lost, 0U);
  EXPECT_LE(20 * stats.snapshot.row_cache_bytes, in_memory->stats().snapshot.host_page_bytes);
  EXPECT_LE(2 * stats.snapshot.host_page_bytes, in_memory->stats().snapshot.host_page_bytes);
}

}  // namespace
}  // namespace kvtier::llama
