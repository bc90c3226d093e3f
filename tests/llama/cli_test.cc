#include "kvtier/version.h"

#include "formats/safetensors.h"
#include "llama/eval.h"
#include "llama/tasks.h"
#include "tests/llama/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <sys/wait.h>
#include <utility>
#include <vector>

namespace kvtier::llama {
namespace {

using ::testing::HasSubstr;
using testing::TemporaryFolder;

/// Runs the program; standard output and error go to files in a folder of its own.
class CliTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(KVTIER_LLAMA_BINARY) ||
        !std::filesystem::exists(KVTIER_DATA_DIR)) {
      GTEST_SKIP() << "no build or source tree on this machine";
    }
  }

  int run(const std::string& arguments) {
    const std::string command = std::string(KVTIER_LLAMA_BINARY) + " " + arguments + " > " +
                                (folder_.path() / "out").string() + " 2> " +
                                (folder_.path() / "err").string();
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string out() const { return folder_.read("out"); }
  std::string err() const { return folder_.read("err"); }

  const std::string model_ = std::string("--model ") + KVTIER_DATA_DIR + "/needle-llama/model ";
  const std::string file_ = std::string(KVTIER_DATA_DIR) + "/needle-llama/tasks/dev.safetensors";
  const std::string tasks_ = "--tasks " + file_ + " ";
  TemporaryFolder folder_;
};

TEST_F(CliTest, SaysItsVersionAndRefusesOtherCommandLines) {
  EXPECT_EQ(run("--version"), 0);
  EXPECT_EQ(out(), "kvtier-llama " KVTIER_VERSION "\n");
  for (const char* arguments : {"", "bogus", "eval --bogus", "generate"}) {
    EXPECT_EQ(run(arguments), 2) << arguments;
    EXPECT_NE(err(), "") << arguments;
  }
}

TEST_F(CliTest, AnswersNeedlesThroughKvtier) {
  const std::string json = (folder_.path() / "out.json").string();
  const std::string logits = (folder_.path() / "logits").string();

  ASSERT_EQ(run("eval " + model_ + tasks_ + "--cases n4096.d100 --backend cpu --sparsity 0,33 " +
                "--threads 2 --preset default --json " + json + " --logits " + logits),
            0)
      << err();

  const auto cases = nlohmann::json::parse(folder_.read("out.json"))["cases"];
  ASSERT_EQ(cases.size(), 3U);
  EXPECT_TRUE(cases[1]["sparsity"].is_null());
  EXPECT_EQ(cases[1]["error_target"], 0.03);
  EXPECT_EQ(cases[2]["sparsity"], 33.0);
  EXPECT_EQ(nlohmann::json::parse(folder_.read("out.json"))["threads"], 2);
  const double stated = metadata_number(TaskFile(file_).at("n4096.d100").metadata, "dense_exact");
  EXPECT_GE(cases[0]["exact"].get<double>(), stated - 1.0 / 32 - 1e-9);
  EXPECT_EQ(cases[0]["rows_attended"].get<double>(), 4096 + 131);
  EXPECT_GE(cases[1]["exact"].get<double>(), stated - 2.0 / 32 - 1e-9);
  EXPECT_LT(cases[1]["kl_answers"].get<double>(), 0.05);
  EXPECT_LT(cases[2]["kl_answers"].get<double>(), 0.05);
  EXPECT_THAT(out(), HasSubstr("norm_aware, logit"));
  EXPECT_THAT(out(), HasSubstr(" e=0.03 "));
  EXPECT_EQ(err(), "");

  const TaskFile tasks(file_);
  const TaskCase task = tasks.at("n4096.d100");
  const formats::SafeTensors written = formats::SafeTensors::open(logits);
  const auto read = [&](const std::string& name) {
    const formats::Tensor& tensor = written.at(name, DType::kFloat32, {task.tail(), 1040});
    return std::vector<float>(tensor.as<float>(), tensor.as<float>() + tensor.elements());
  };
  const std::vector<float> dense = read("n4096.d100.0.0");
  const Scores scores = score_logits(task, task.sequence(0), read("n4096.d100.0.1"), dense);
  EXPECT_EQ(written.tensors().size(), 3U);
  EXPECT_EQ(scores.exact, cases[1]["exact"].get<double>());
  EXPECT_NEAR(scores.kl, cases[1]["kl"].get<double>(), 1e-12);
}

TEST_F(CliTest, AnswersWithAsManyTokensAsTheErrorNeeds) {
  ASSERT_EQ(run("eval " + model_ + tasks_ + "--cases n4096.d100 --backend cpu --error-target 0.1"),
            0)
      << err();
  EXPECT_THAT(out(), HasSubstr(" e=0.1 "));
  for (const char* size : {" 10x ", " 33x ", " 100x "}) {
    EXPECT_THAT(out(), ::testing::Not(HasSubstr(size)));
  }
}

TEST_F(CliTest, FailsWhereStandardOutputCannotBeWritten) {
  const std::string errors = (folder_.path() / "err").string();
  for (const std::string& arguments :
       {std::string("--version"), "generate " + model_ + "--prompt-ids 1 --max-tokens 1"}) {
    const std::string command =
        std::string(KVTIER_LLAMA_BINARY) + " " + arguments + " > /dev/full 2> " + errors;
    const int status = std::system(command.c_str());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << arguments;
    EXPECT_EQ(err(), "error: UNAVAILABLE: standard output: cannot be written\n");
  }
}

TEST_F(CliTest, ContinuesAPrompt) {
  ASSERT_EQ(run("generate " + model_ + "--prompt-ids 1,20,30,40 --max-tokens 3 --backend cpu"), 0)
      << err();

  EXPECT_THAT(out(), ::testing::MatchesRegex("[0-9]+(,[0-9]+)*\n"));
}

TEST_F(CliTest, WarnsOnceOfMorePositionsThanTheModelHas) {
  const std::filesystem::path from = std::string(KVTIER_DATA_DIR) + "/needle-llama/model";
  const std::filesystem::path to = folder_.path() / "model";
  std::filesystem::create_directory(to);
  for (const auto& file : std::filesystem::directory_iterator(from)) {
    if (file.path().filename() == "config.json") continue;
    std::filesystem::create_symlink(std::filesystem::absolute(file), to / file.path().filename());
  }
  auto config = nlohmann::json::parse(std::ifstream(from / "config.json"));
  config["max_position_embeddings"] = 4;
  std::ofstream(to / "config.json") << config;
  const std::string generate = "generate --model " + to.string() + " --backend cpu --prompt-ids 1,";

  ASSERT_EQ(run(generate + "20 --max-tokens 2"), 0) << err();
  EXPECT_EQ(err(), "");
  ASSERT_EQ(run(generate + "20 --max-tokens 3"), 0) << err();
  EXPECT_EQ(err(),
            "warning: expected at most 4 tokens, the model's max_position_embeddings, found 5: "
            "later ones may be wrong\n");
  ASSERT_EQ(run("record --model " + to.string() + " --backend cpu " + tasks_ +
                "--case n4096.d100 --steps 1 --out " + (folder_.path() / "trace").string()),
            0)
      << err();
  EXPECT_THAT(err(), HasSubstr("max_position_embeddings, found 4"));
}

TEST_F(CliTest, TakesTokensWithASuffixInAnyCase) {
  ASSERT_EQ(run("generate " + model_ + "--prompt-ids 1,20 --max-tokens 2 --sink 1K --window 1kb " +
                "--candidates 1ki --coarse-bits 1 --backend cpu"),
            0)
      << err();
  EXPECT_EQ(run("bench --random-weights --shape needle-llama --backend cpu --batch 2 "
                "--context 2K,4k --k 1k --row-cache-rows 1K"),
            2);
  EXPECT_THAT(err(), HasSubstr("INVALID_ARGUMENT: --batch"));
}

TEST_F(CliTest, TimesAModelWithRandomWeights) {
  const std::string json = (folder_.path() / "bench.json").string();

  ASSERT_EQ(run("bench --shape needle-llama --random-weights --layers 2 --context 2K,4k " +
                std::string("--steps 3 --backend cpu --sparsity 20 --json ") + json),
            0)
      << err();

  EXPECT_THAT(out(), HasSubstr("needle-llama, random weights, 2 layers, backend cpu"));
  EXPECT_THAT(out(), HasSubstr("20x, KV in host memory"));
  EXPECT_EQ(err(), "");
  const auto rows = nlohmann::json::parse(folder_.read("bench.json"))["rows"];
  ASSERT_EQ(rows.size(), 4U);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["what"], "model");
    EXPECT_EQ(rows[i]["tokens"], i < 2 ? 2048 : 4096);
    EXPECT_EQ(rows[i]["layers"], 2);
    EXPECT_EQ(rows[i]["attention"], i % 2 == 0 ? "dense" : "20x, KV in host memory");
    const double us = rows[i]["us"];
    EXPECT_GE(us, rows[i]["us_min"].get<double>());
    EXPECT_LE(us, rows[i]["us_max"].get<double>());
    EXPECT_GE(rows[i]["us_p99"].get<double>(), us);
    EXPECT_LE(rows[i]["us_p99"], rows[i]["us_max"]);
    EXPECT_LE(rows[i]["tokens_per_second"].get<double>(), 1e6 / rows[i]["us_min"].get<double>());
    EXPECT_GE(rows[i]["tokens_per_second"].get<double>(), 1e6 / rows[i]["us_max"].get<double>());
    EXPECT_EQ(rows[i]["batch"], 1);
    EXPECT_EQ(rows[i].contains("over_dense"), i % 2 == 1);
  }
  EXPECT_DOUBLE_EQ(rows[3]["over_dense"],
                   rows[2]["us"].get<double>() / rows[3]["us"].get<double>());
}

TEST_F(CliTest, TimesSparseTokensAlone) {
  ASSERT_EQ(run("bench --shape needle-llama --random-weights --layers 1 --context 2048 --steps 3 "
                "--backend cpu --kv-dtype int8 --no-dense --placement host --locality none"),
            0)
      << err();

  EXPECT_THAT(out(), HasSubstr("33x, KV in host memory"));
  EXPECT_THAT(out(), ::testing::Not(HasSubstr("dense  ")));
}

TEST_F(CliTest, TimesAsManyTokensAsAnErrorTargetNeeds) {
  const std::string bench =
      "bench --shape needle-llama --random-weights --layers 1 --context 2048 --steps 3 "
      "--backend cpu --no-dense --error-target 0.3";
  ASSERT_EQ(run(bench), 0) << err();
  EXPECT_THAT(out(), HasSubstr("e=0.3, KV in host memory"));
  ASSERT_EQ(run(bench + " --sparsity 20"), 0) << err();
  EXPECT_THAT(out(), HasSubstr("20x, KV in host memory")) << "at most so many";
}

TEST_F(CliTest, RefusesABenchBeforeItMeasures) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--context 4096", "error: expected --random-weights, found none"},
      {"--random-weights --shape gpt-2", "error: --shape: expected one of llama-3.1-8b, "},
      {"--random-weights --context 0", "error: --context: expected 1024 to 16777216, found 0"},
      {"--random-weights --context 4096,many", "--context"},
      {"--random-weights --layers 0", "--layers"},
      {"--random-weights --steps 0", "--steps"},
      {"--random-weights --sparsity 0.5", "--sparsity"},
      {"--random-weights --k 64 --sparsity 20", "error: expected --sparsity or --k, found both"},
      {"--random-weights --kv-dtype int4", "--kv-dtype"},
      {"--random-weights --placement disk",
       "--placement: expected one of device, host, found disk"},
      {"--random-weights --locality text", "--locality"},
      {"--random-weights --row-cache-rows -1", "--row-cache-rows"},
      {"--random-weights --batch 65", "--batch"},
      {"--random-weights --backend cpu --batch 1,8",
       "INVALID_ARGUMENT: --batch: expected 1 with --backend cpu, found 1,8"},
      {"--random-weights --backend cpu --row-cache-rows 4096",
       "INVALID_ARGUMENT: --row-cache-rows: expected none with --backend cpu, found 4096"},
      {"--random-weights --backend cpu --k 64",
       "INVALID_ARGUMENT: --k: expected none (--sparsity) with --backend cpu, found 64"},
      {"--random-weights --backend cpu --placement device",
       "INVALID_ARGUMENT: --placement: expected host with --backend cpu, found device"},
      {"--random-weights --backend cpu --host-allocation managed",
       "INVALID_ARGUMENT: --host-allocation: expected auto with --backend cpu, found managed"},
      {"--random-weights --backend cpu --locality needle-llama",
       "INVALID_ARGUMENT: --locality: expected none with --backend cpu, found needle-llama"},
      {"--random-weights --backend cpu --cuda-libs /opt",
       "INVALID_ARGUMENT: --cuda-libs: expected no folder with --backend cpu, found /opt"},
      {"--random-weights --backend cuda --threads 2",
       "INVALID_ARGUMENT: --threads: expected none with --backend cuda, found 2"},
      {"--random-weights --backend cuda --stages",
       "INVALID_ARGUMENT: --stages: expected --json with it, found none"},
      {"--random-weights --backend cpu --shape gpt-oss-20b",
       "INVALID_ARGUMENT: --shape: expected one without experts and sliding windows with "
       "--backend cpu, found gpt-oss-20b"},
      {"--random-weights --backend cpu --tensor-parallel 3",
       "INVALID_ARGUMENT: --tensor-parallel: expected a divisor of 8 KV heads"},
      {"--random-weights --estimator guess --backend cpu",
       "error: --estimator: expected one of soft_collision, hard_collision, norm_aware, found "
       "guess"},
      {"--random-weights --bits 2000 --backend cpu", "INVALID_ARGUMENT"},
      {"--random-weights --backend cpu --error-target 0.1,0.2",
       "INVALID_ARGUMENT: bench: expected one estimator, weighting, selection, rule, code, number "
       "of bits, error target and a sparsity of at least 1, found 2 methods"},
      {"--random-weights --backend cpu --layers 1024 --context 16777216",
       "RESOURCE_EXHAUSTED: bench --shape llama-3.1-8b on the CPU: expected "},
      {"--random-weights --backend cpu --json /no/such/folder/a.json",
       "UNAVAILABLE: --json: /no/such/folder/a.json: cannot be written: No such file"}};
  for (const auto& [arguments, message] : cases) {
    const bool fails = message.starts_with("RESOURCE") || message.starts_with("UNAVAILABLE");
    EXPECT_EQ(run("bench " + arguments), fails ? 1 : 2) << arguments;
    EXPECT_THAT(err(), HasSubstr(message));
    EXPECT_EQ(out(), "") << arguments;
  }
}

TEST_F(CliTest, RefusesAGpuBenchItCannotRun) {
  const int status =
      run("bench --shape needle-llama --random-weights --context 2048 --backend cuda "
          "--cuda-libs /no/such");
  if (status == 0) GTEST_SKIP() << "a GPU is here, and the libraries are";
  EXPECT_EQ(status, err().find("NOT_FOUND") == std::string::npos ? 1 : 2);
  EXPECT_THAT(err(), ::testing::AnyOf(
                         HasSubstr("UNIMPLEMENTED: bench --backend cuda: expected a build with"),
                         HasSubstr("NOT_FOUND: cuBLAS: expected libcublas.so.13"),
                         HasSubstr("UNIMPLEMENTED: no usable GPU")));
}

TEST_F(CliTest, ExplainsUsageErrors) {
  const std::string eval = "eval " + model_ + tasks_ + "--cases n4096.d100 ";
  const std::string generate = "generate " + model_ + "--prompt-ids 1 ";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"bogus", "expected one of eval, generate, record, bench, found bogus"},
      {"eval " + model_, "expected --tasks, found none"},
      {eval + "--bogus 3", "expected what kvtier-llama eval --help lists, found --bogus 3"},
      {eval + "--json", "--json: expected a value, found none"},
      {eval + "--backend tpu", "--backend: expected one of auto, cpu, cuda, found tpu"},
      {eval + "--rule top_k,luck", "--rule: expected one of top_k, priority, found luck"},
      {eval + "--tau 3", "expected --estimator soft_collision with --tau, found norm_aware"},
      {generate + "--estimator soft_collision --bits 128",
       "expected --estimator norm_aware with --bits, found soft_collision"},
      {eval + "--tau warm", "--tau: expected a number, found warm"},
      {eval + "--preset socket --tau 3", "expected --tau or --preset, found both"},
      {generate + "--max-tokens 0", "--max-tokens: expected 1 to 16777216, found 0"},
      {generate + "--max-tokens 32Q", "--max-tokens: expected a size such as 64K, found 32Q"},
      {generate + "--window -1", "--window: expected a size such as 64K, found -1"},
      {generate + "--sink 16G", "--sink: expected 0 to 16777216, found 17179869184"},
      {generate + "--kv unix:/x --disk-cache /d", "expected --disk-cache or --kv, found both"},
      {generate + "--kv unix:/x --host-mib 64", "expected --host-mib or --kv, found both"},
      {generate + "--kv unix:/x --backend cpu", "expected --backend or --kv, found both"},
      {generate + "--candidates 4", "expected --coarse-bits with --candidates, found none"},
      {generate + "--host-mib 17592186044416",
       "--host-mib: expected 0 to 16777216, found 17592186044416"},
      {generate + "--device-mib -1", "--device-mib: expected 0 to 16777216, found -1"},
      {"record " + model_ + tasks_ + "--case n4096.d100 --out x --layer -2",
       "--layer: expected a number of at least 0, found -2"},
      {generate + "--threads -1", "--threads: expected a number of at least 0, found -1"},
      {generate + "--threads two", "--threads: expected a number of at least 0, found two"}};
  for (const auto& [arguments, message] : cases) {
    EXPECT_EQ(run(arguments), 2) << arguments;
    EXPECT_EQ(err(), "error: " + message + "\n");
    EXPECT_EQ(out(), "");
  }
  EXPECT_EQ(run(""), 2);
  EXPECT_THAT(err(), ::testing::StartsWith("error: expected a subcommand, found none\n"));
}

TEST_F(CliTest, RefusesCudaArithmeticItCannotHave) {
  EXPECT_EQ(run("generate " + model_ + "--prompt-ids 1 --cuda-libs /no/such"), 2);
  EXPECT_THAT(err(), HasSubstr("--cuda-libs: expected --matmul cuda with it, found cpu"));
  EXPECT_EQ(run("generate " + model_ + "--prompt-ids 1 --matmul cuda --backend cpu"), 2);
  EXPECT_THAT(err(), HasSubstr("--matmul: expected cpu with --backend cpu"));
  EXPECT_EQ(run("generate " + model_ + "--prompt-ids 1 --matmul cuda --threads 2"), 2);
  EXPECT_THAT(err(), HasSubstr("--threads: expected none with --matmul cuda, found 2"));
  EXPECT_NE(run("generate " + model_ + "--prompt-ids 1 --matmul cuda --cuda-libs /no/such"), 0);
  EXPECT_THAT(err(), ::testing::AnyOf(HasSubstr("UNIMPLEMENTED: --matmul cuda"),
                                      HasSubstr("NOT_FOUND: cuBLAS: expected libcublas.so.13")));
}

TEST_F(CliTest, RefusesOutputsItCannotWriteBeforeTheWork) {
  const std::string folder = folder_.path().string();
  const std::string inputs = "--model /no/such/model --tasks /no/such/file ";  // looked at later
  for (const std::string& place : {std::string("/no/such/folder/a"), folder}) {
    for (const char* option : {"--json", "--logits"}) {
      EXPECT_EQ(run("eval " + inputs + "--cases n4096.d100 " + option + " " + place), 1);
      EXPECT_THAT(err(), HasSubstr("UNAVAILABLE: " + std::string(option) + ": " + place +
                                   ": cannot be written: "));
    }
    EXPECT_EQ(run("record " + inputs + "--case n4096.d100 --out " + place), 1);
    EXPECT_THAT(err(), HasSubstr("UNAVAILABLE: --out: " + place + ": cannot be written: "));
  }
  EXPECT_EQ(run("eval " + inputs + "--cases n4096.d100 --json -"), 2);
  EXPECT_THAT(err(), HasSubstr("INVALID_ARGUMENT: --json: expected a file, found - (./- for"));
  EXPECT_EQ(run("bench --random-weights --backend cpu --json -"), 2);
  EXPECT_THAT(err(), HasSubstr("INVALID_ARGUMENT: --json: expected a file, found - (./- for"));
  const std::string file = folder + "/a.json";
  EXPECT_EQ(run("eval " + inputs + "--cases n4096.d100 --json " + file + " --logits " + file), 2);
  EXPECT_THAT(err(),
              HasSubstr("--logits: expected another file than that of --json, found " + file));
  EXPECT_EQ(run("eval " + inputs + "--cases n4096.d100 --json " + file), 2);
  EXPECT_THAT(err(), HasSubstr("NOT_FOUND"));
  EXPECT_FALSE(std::filesystem::exists(file));
  EXPECT_FALSE(std::filesystem::exists(file + ".tmp"));
}

TEST_F(CliTest, ExplainsErrorsOfInputsWithTheirCode) {
  EXPECT_EQ(run("eval --model /no/such/model " + tasks_ + "--cases n4096.d100"), 2);
  EXPECT_THAT(err(), HasSubstr("error: NOT_FOUND: --model: expected a directory"));
  EXPECT_EQ(run("eval " + model_ + "--tasks /no/such/file --cases n4096.d100"), 2);
  EXPECT_THAT(err(), HasSubstr("NOT_FOUND"));
  EXPECT_EQ(run("eval " + model_ + tasks_ + "--cases n1.d1"), 2);
  EXPECT_THAT(err(), HasSubstr("case: expected one of"));
  EXPECT_EQ(run("generate " + model_ + "--prompt-ids 1 --bits 128,256"), 2);
  EXPECT_THAT(err(), HasSubstr("expected one of each, found 2 methods"));
  EXPECT_EQ(run("generate " + model_ + "--prompt-ids @/"), 2);
  EXPECT_THAT(err(), HasSubstr("NOT_FOUND: --prompt-ids: expected a readable file, found /\n"));
  EXPECT_EQ(run("generate " + model_ + "--prompt-ids 1,2000"), 2);
  EXPECT_THAT(err(), HasSubstr("--prompt-ids: expected ids of 0 to 1039, found 2000"));
  EXPECT_EQ(run("generate " + model_ + "--prompt-ids 1 --bits 100"), 2);
  EXPECT_THAT(err(), HasSubstr("retrieval settings:\n  --bits: expected "));
  EXPECT_EQ(out(), "");
}

}  // namespace
}  // namespace kvtier::llama
