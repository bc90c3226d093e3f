#include "kvtier/error.h"

#include "llama/decoder.h"
#include "llama/eval.h"
#include "llama/generate.h"
#include "llama/kv_store.h"
#include "llama/tasks.h"
#include "tests/llama/reference_model.h"
#include "tests/llama/temporary_folder.h"
#include "tests/llama/tiny_tasks.h"
#include "tests/llama/twins.h"
#include "tests/support/open_segments.h"
#include "tests/transfer/tiers/remote_servers.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace kvtier::llama {
namespace {

using testing::RemoteServerProcess;
using testing::TemporaryFolder;
using testing::Twins;

/// Where the pages of a session are; sketches stay in memory.
struct Mix {
  const char* name;
  const char* budget;  ///< Of host memory; the other pages are on the disk.
  bool copies;         ///< memcached has copies of these.
  bool wiped;          ///< The disk forgets what it has after the prompt.
};
constexpr Mix kMixes[] = {{"Half", "50%", false, false},
                          {"Quarter", "25%", false, false},
                          {"HalfWithCopies", "50%", true, false},
                          {"QuarterWithCopiesAfterAWipedDisk", "25%", true, true}};

/// Writes zeros over all pages in a disk cache. Returns over how many files.
int wipe(const std::filesystem::path& cache) {
  int wiped = 0;
  for (const std::filesystem::path& path : kvtier::testing::open_segments(cache)) {
    constexpr std::size_t kHeader = 4096;
    const std::vector<char> zeros(std::filesystem::file_size(path) - kHeader);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(kHeader);
    file.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
    if (file.good()) ++wiped;
  }
  return wiped;
}

/// A random decoder whose pages are large, so that few tokens are many of the budget's.
testing::ReferenceModel write_model(const TemporaryFolder& folder) {
  testing::ReferenceModel model;
  model.heads = model.kv_heads = 8;
  model.head_dim = 128;
  model.randomize(5);
  model.write(folder.path());
  return model;
}

class LlamaSpill : public ::testing::TestWithParam<Mix> {
 protected:
  void SetUp() override {
    if (!GetParam().copies) return;
    if (!KVTIER_WITH_REMOTE_TIERS) GTEST_SKIP() << "built without remote tiers";
    server_.emplace(testing::Engine::kMemcached, folder_.path() / "memcached");
  }
  [[nodiscard]] RuntimeOptions resident() const {
    RuntimeOptions options;
    options.backend = Backend::kCpu;
    return options;
  }
  [[nodiscard]] RuntimeOptions mixed() const {
    RuntimeOptions options = resident();
    options.host_budget = GetParam().budget;
    options.disk_cache = cache().string();
    if (server_) options.remote.memcached = {server_->endpoint()};
    return options;
  }
  [[nodiscard]] std::filesystem::path cache() const { return folder_.path() / "cache"; }

  TemporaryFolder folder_;
  std::optional<RemoteServerProcess> server_;
};

TEST_P(LlamaSpill, NeedleLlamaAttendsAsIfEverythingWereInMemory) {
  const std::string data = KVTIER_DATA_DIR;
  if (!std::filesystem::exists(data)) GTEST_SKIP() << "no source tree on this machine";
  constexpr std::size_t kContext = 400;
  constexpr std::size_t kTail = 32;
  Decoder decoder = load_decoder(data + "/needle-llama/model", make_cpu_compute());
  const TaskFile tasks(data + "/needle-llama/tasks/dev.safetensors");
  const std::span<const std::int32_t> all = tasks.at("n4096.d100").sequence(0);
  RetrievalOptions retrieval;
  retrieval.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  retrieval.selections = {Selection::kPerKvHead, Selection::kPerQueryHead};
  retrieval.sparsities = {0.0, 33.0};
  std::vector<std::string> left_out;
  std::vector<Method> methods = make_methods(retrieval, left_out);
  const auto store_of = [&](const RuntimeOptions& of) {
    return make_kv_store(engine_config(decoder.config(), of, methods, kContext + kTail), "");
  };
  const std::unique_ptr<KvStore> in_memory = store_of(resident());
  const std::unique_ptr<KvStore> in_tiers = store_of(mixed());
  const std::unique_ptr<KvSession> a = in_memory->open(kContext + kTail);
  const std::unique_ptr<KvSession> b = in_tiers->open(kContext + kTail);
  Twins twins(*a, *b);

  decoder.prefill(twins, all.first(kContext));
  EXPECT_GT(in_tiers->stats().snapshot.pages_in_tiers, 0U);
  if (GetParam().wiped) {
    ASSERT_GT(wipe(cache()), 0);
  }
  for (Method& method : methods) {
    SCOPED_TRACE(method.dense ? "dense"
                              : estimator_name(method.retrieval.estimator) + " " +
                                    selection_name(method.retrieval.selection));
    const AttendOptions attend = attend_options(method, kContext, 64);
    (void)decoder.decode(twins, all.last(kTail), attend);
    twins.truncate(kContext);
  }

  EXPECT_EQ(methods.size(), 5U);
  EXPECT_EQ(twins.num_compared, 5 * decoder.config().layers);
  const Stats stats = in_tiers->stats();
  EXPECT_GT(stats.cumulative.cold_steps, 0U);
  EXPECT_EQ(stats.cumulative.pages_repaired > 0, GetParam().wiped);
  EXPECT_EQ(stats.cumulative.pages_lost, 0U);
  EXPECT_EQ(stats.cumulative.pages_restored, stats.cumulative.tier_hits);
  EXPECT_LE(2 * stats.snapshot.host_page_bytes, in_memory->stats().snapshot.host_page_bytes);
}

TEST_P(LlamaSpill, TheDemoGeneratesTheSameTokens) {
  const testing::ReferenceModel model = write_model(folder_);
  Decoder decoder = load_decoder(folder_.path(), make_cpu_compute());
  GenerateOptions options;
  options.prompt = testing::random_tokens(380, model.vocab, 7);
  options.max_tokens = 12;
  options.method.sparsity = 20.0;
  options.method.retrieval.estimator = Estimator::kNormAware;
  options.method.retrieval.sink_tokens = 4;
  options.method.retrieval.recent_tokens = 8;
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
    options.method.retrieval.selection = selection;
    options.runtime = resident();
    const std::vector<std::int32_t> expected = generate(decoder, options);
    options.runtime = mixed();
    int tokens = 0;
    const auto wipe_after_one = [&](std::int32_t) {
      if (!GetParam().wiped || ++tokens > 1) return;
      EXPECT_GT(wipe(cache()), 0);
    };
    EXPECT_EQ(generate(decoder, options, wipe_after_one), expected) << selection_name(selection);
  }
}

TEST_P(LlamaSpill, TheEvaluationFindsTheSame) {
  const testing::ReferenceModel model = write_model(folder_);
  const std::filesystem::path tasks = folder_.path() / "tasks.safetensors";
  testing::write_tiny_tasks(tasks, model.vocab);
  EvalOptions options;
  options.cases = {"tiny"};
  options.sequences = 2;
  options.keep_logits = true;
  options.retrieval.selections = {Selection::kPerKvHead, Selection::kPerQueryHead};
  options.retrieval.sparsities = {0.0, 10.0};
  options.retrieval.sink = 4;
  options.retrieval.window = 8;
  Decoder decoder = load_decoder(folder_.path(), make_cpu_compute());
  options.runtime = resident();
  const EvalResult expected = evaluate(decoder, TaskFile(tasks), options);
  options.runtime = mixed();
  if (GetParam().wiped) {
    options.progress = [this](const std::string& what, double) {
      if (what.find("dense tail") == std::string::npos) return;
      EXPECT_GT(wipe(cache()), 0);
    };
  }
  const EvalResult found = evaluate(decoder, TaskFile(tasks), options);

  ASSERT_EQ(found.rows.size(), 3U);
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    const EvalRow& a = found.rows[i];
    const EvalRow& b = expected.rows[i];
    EXPECT_EQ(std::tie(a.exact, a.first_token, a.fwe, a.kl, a.kl_answers, a.rows_attended),
              std::tie(b.exact, b.first_token, b.fwe, b.kl, b.kl_answers, b.rows_attended));
    EXPECT_GT(a.pages_restored, 0.0);
  }
  ASSERT_EQ(found.logits.size(), 6U);
  for (std::size_t i = 0; i < found.logits.size(); ++i) {
    EXPECT_EQ(found.logits[i].logits, expected.logits[i].logits) << "row " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Mixes, LlamaSpill, ::testing::ValuesIn(kMixes),
                         [](const auto& mix) { return std::string(mix.param.name); });

TEST(LlamaSpillWithoutCopies, AWipedDiskIsDataLoss) {
  const TemporaryFolder folder;
  const testing::ReferenceModel model = write_model(folder);
  Decoder decoder = load_decoder(folder.path(), make_cpu_compute());
  GenerateOptions options;
  options.prompt = testing::random_tokens(380, model.vocab, 7);
  options.max_tokens = 12;
  options.method.dense = true;
  options.runtime.backend = Backend::kCpu;
  options.runtime.host_budget = "25%";
  options.runtime.disk_cache = (folder.path() / "cache").string();
  try {
    (void)generate(decoder, options,
                   [&](std::int32_t) { EXPECT_GT(wipe(options.runtime.disk_cache), 0); });
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDataLoss) << error.what();
  }
}

}  // namespace
}  // namespace kvtier::llama
