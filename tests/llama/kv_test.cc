#include "llama/decoder.h"
#include "llama/eval.h"
#include "llama/kv_store.h"
#include "llama/tasks.h"
#include "tests/llama/temporary_folder.h"
#include "tests/support/backend_fixture.h"
#include "tests/support/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <sstream>

// What kvtier-llama loads for --kv, linked.
extern "C" kvtier::llama::KvStore* kvtier_llama_make_remote_store(const kvtier::Config& config,
                                                                  const std::string& server);

namespace kvtier::llama {
namespace {

using kvtier::testing::Program;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

/// `kvtier serve` in a process of its own, and needle-llama in this one; the engines of both are of
/// one backend, the model's matrices on the CPU.
class KvTest : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (const auto why = kvtier::testing::why_unusable(GetParam())) GTEST_SKIP() << *why;
    if (!std::filesystem::exists(KVTIER_BINARY) || !std::filesystem::exists(KVTIER_DATA_DIR)) {
      GTEST_SKIP() << "no build or source tree on this machine";
    }
    address_ = "unix:" + (folder_.path() / "kv.sock").string();
    server_ = std::make_unique<Program>(
        KVTIER_BINARY,
        std::vector<std::string>{"kvtier", "serve", "--listen", address_, "--backend", backend_},
        std::vector<std::string>{}, folder_.path() / "server_err");
    ASSERT_EQ(server_->read_line(), "listening on " + address_) << folder_.read("server_err");
  }

  /// Runs kvtier-llama and returns its standard output.
  std::string run_llama(const std::vector<std::string>& arguments) {
    std::vector<std::string> all{"kvtier-llama"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    Program program(KVTIER_LLAMA_BINARY, all, {}, folder_.path() / "err");
    std::string out;
    for (std::string line = program.read_line(); !line.empty(); line = program.read_line()) {
      out += line + "\n";
    }
    code_ = program.wait();
    return out;
  }

  const std::string backend_ = backend_name(GetParam());
  TemporaryFolder folder_;
  std::string address_;
  std::unique_ptr<Program> server_;
  int code_ = -1;
  const std::string model_ = std::string(KVTIER_DATA_DIR) + "/needle-llama/model";
  const std::string tasks_ = std::string(KVTIER_DATA_DIR) + "/needle-llama/tasks/dev.safetensors";
};

TEST_P(KvTest, LogitsOverAServerAreThoseOfAnEmbeddedEngine) {
  constexpr std::size_t kContext = 1500;
  constexpr std::size_t kTail = 131;
  Decoder decoder = load_decoder(model_, make_cpu_compute());
  const TaskFile tasks(tasks_);
  const TaskCase task = tasks.at("n4096.d100");
  const std::span<const std::int32_t> all = task.sequence(0);
  RetrievalOptions retrieval;
  retrieval.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  retrieval.sparsities = {0.0, 20.0};
  std::vector<std::string> left_out;
  std::vector<Method> methods = make_methods(retrieval, left_out);
  RuntimeOptions runtime;
  runtime.backend = GetParam();
  const Config config = engine_config(decoder.config(), runtime, methods, kContext + kTail);
  const std::unique_ptr<KvStore> embedded = make_kv_store(config, "");
  const std::unique_ptr<KvStore> remote(kvtier_llama_make_remote_store(config, address_));
  const std::unique_ptr<KvSession> here = embedded->open(kContext + kTail);
  const std::unique_ptr<KvSession> there = remote->open(kContext + kTail);
  for (KvSession* session : {here.get(), there.get()}) {
    decoder.prefill(*session, all.first(kContext));
  }
  // The end of the sequence: questions and answers, which the selectors have to find tokens for.
  const std::span<const std::int32_t> tail = all.last(kTail);

  for (Method& method : methods) {
    const AttendOptions attend = attend_options(method, kContext, 64);
    const std::vector<float> expected = decoder.decode(*here, tail, attend);
    const std::vector<float> found = decoder.decode(*there, tail, attend);
    here->truncate(kContext);
    there->truncate(kContext);

    ASSERT_EQ(found.size(), expected.size());
    const std::size_t vocab = expected.size() / kTail;
    for (std::size_t i = 0; i < kTail; ++i) {
      const auto row = [&](const std::vector<float>& logits) {
        return std::span<const float>(logits).subspan(i * vocab, vocab);
      };
      const auto best = [](std::span<const float> logits) {
        return std::max_element(logits.begin(), logits.end()) - logits.begin();
      };
      ASSERT_EQ(best(row(found)), best(row(expected))) << i;
      ASSERT_LE(divergence(row(expected), row(found)), 1e-3) << i;
    }
  }
}

TEST_P(KvTest, GeneratesTheSameTokensInAProcessOfItsOwn) {
  const TaskFile tasks(tasks_);
  const TaskCase task = tasks.at("n4096.d100");
  std::ostringstream ids;
  for (const std::int32_t id : task.sequence(0).first(800)) ids << id << ' ';
  std::ofstream(folder_.path() / "prompt") << ids.str();
  const std::vector<std::string> arguments{"generate",
                                           "--model",
                                           model_,
                                           "--prompt-ids",
                                           "@" + (folder_.path() / "prompt").string(),
                                           "--max-tokens",
                                           "12",
                                           "--sparsity",
                                           "10",
                                           "--estimator",
                                           "norm_aware"};
  std::vector<std::string> embedded = arguments;
  embedded.insert(embedded.end(), {"--backend", backend_});
  const std::string expected = run_llama(embedded);
  ASSERT_EQ(code_, 0) << folder_.read("err");
  std::vector<std::string> with_server = arguments;
  with_server.insert(with_server.end(), {"--kv", address_});

  const std::string found = run_llama(with_server);

  ASSERT_EQ(code_, 0) << folder_.read("err");
  EXPECT_EQ(found, expected);
}

TEST_P(KvTest, EvaluatesOverAServer) {
  const std::vector<std::string> common{"eval", "--model",     model_,       "--tasks",
                                        tasks_, "--cases",     "n4096.d100", "--sparsity",
                                        "0,33", "--estimator", "norm_aware", "--json"};
  std::vector<nlohmann::json> cases;
  for (const bool remote : {false, true}) {
    std::vector<std::string> arguments = common;
    arguments.push_back((folder_.path() / "out.json").string());
    arguments.push_back(remote ? "--kv" : "--backend");
    arguments.push_back(remote ? address_ : backend_);
    (void)run_llama(arguments);
    ASSERT_EQ(code_, 0) << folder_.read("err");
    cases.push_back(nlohmann::json::parse(folder_.read("out.json"))["cases"]);
  }
  ASSERT_EQ(cases[1].size(), cases[0].size());
  for (std::size_t i = 0; i < cases[0].size(); ++i) {
    for (const char* mark : {"exact", "first_token", "fwe"}) {
      EXPECT_EQ(cases[1][i][mark], cases[0][i][mark]) << mark;
    }
    EXPECT_NEAR(cases[1][i]["kl"].get<double>(), cases[0][i]["kl"].get<double>(), 1e-3);
    EXPECT_EQ(cases[1][i]["backend"], address_);
    EXPECT_FALSE(cases[1][i].contains("rows_attended"));  // the server's to count
  }
}

TEST_P(KvTest, SaysWhenThereIsNoServer) {
  const std::string nowhere = "unix:" + (folder_.path() / "none.sock").string();
  (void)run_llama({"generate", "--model", model_, "--prompt-ids", "1,2", "--kv", nowhere});
  EXPECT_EQ(code_, 1);
  EXPECT_THAT(folder_.read("err"), HasSubstr("UNAVAILABLE"));
  (void)run_llama({"generate", "--model", model_, "--prompt-ids", "1,2", "--kv", "nowhere"});
  EXPECT_EQ(code_, 2);
  EXPECT_THAT(folder_.read("err"), HasSubstr("expected unix:PATH or tcp:HOST:PORT"));
  (void)run_llama(
      {"generate", "--model", model_, "--prompt-ids", "1,2", "--kv", address_, "--matmul", "cuda"});
  EXPECT_EQ(code_, 2);
  EXPECT_THAT(folder_.read("err"), HasSubstr("expected cpu with --kv"));
}

KVTIER_INSTANTIATE_BACKENDS(KvTest);

}  // namespace
}  // namespace kvtier::llama
