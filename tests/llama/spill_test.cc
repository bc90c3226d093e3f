#include "llama/decoder.h"
#include "llama/eval.h"
#include "llama/kv_store.h"
#include "llama/tasks.h"
#include "tests/llama/temporary_folder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace kvtier::llama {
namespace {

using testing::TemporaryFolder;

/// needle-llama with half of its pages on the disk, beside one with all of them in memory.
TEST(LlamaSpill, HalfOfThePagesOnTheDiskGivesTheSameLogits) {
  const std::string data = KVTIER_DATA_DIR;
  if (!std::filesystem::exists(data)) GTEST_SKIP() << "no source tree on this machine";
  constexpr std::size_t kContext = 500;
  constexpr std::size_t kTail = 48;
  Decoder decoder = load_decoder(data + "/needle-llama/model", make_cpu_compute());
  const TaskFile tasks(data + "/needle-llama/tasks/dev.safetensors");
  const std::span<const std::int32_t> all = tasks.at("n4096.d100").sequence(0);
  RetrievalOptions retrieval;
  retrieval.estimators = {"soft_collision", "norm_aware"};
  retrieval.sparsities = {0.0, 33.0};
  std::vector<std::string> left_out;
  std::vector<Method> methods = make_methods(retrieval, left_out);
  RuntimeOptions runtime;
  runtime.backend = Backend::kCpu;
  const auto store_of = [&](const RuntimeOptions& of) {
    return make_kv_store(engine_config(decoder.config(), of, methods, kContext + kTail), "");
  };
  const std::unique_ptr<KvStore> resident = store_of(runtime);
  const TemporaryFolder folder;
  runtime.host_budget = "50%";
  runtime.disk_cache = (folder.path() / "cache").string();
  const std::unique_ptr<KvStore> spilled = store_of(runtime);

  const std::unique_ptr<KvSession> a = resident->open(kContext + kTail);
  const std::unique_ptr<KvSession> b = spilled->open(kContext + kTail);
  decoder.prefill(*a, all.first(kContext));
  decoder.prefill(*b, all.first(kContext));
  EXPECT_GT(spilled->stats().snapshot.pages_away, 0U);
  for (Method& method : methods) {
    const AttendOptions attend = attend_options(method, kContext, 64);
    const std::vector<float> expected = decoder.decode(*a, all.last(kTail), attend);
    const std::vector<float> found = decoder.decode(*b, all.last(kTail), attend);
    a->truncate(kContext);
    b->truncate(kContext);
    ASSERT_EQ(found, expected) << (method.dense ? "dense" : "sparse");
  }
  const Stats stats = spilled->stats();
  EXPECT_GT(stats.cumulative.cold_steps, 0U);
  EXPECT_LE(2 * stats.snapshot.host_page_bytes, resident->stats().snapshot.host_page_bytes);
  EXPECT_EQ(stats.cumulative.pages_restored, stats.cumulative.tier_hits);
}

}  // namespace
}  // namespace kvtier::llama
