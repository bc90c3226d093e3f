#include "tests/services/evaluation/trace_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/program.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <cstdlib>

namespace kvtier::services {
namespace {

using kvtier::testing::eventually;
using kvtier::testing::Program;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const std::vector<std::string> kSmall = {
    "stress", "--tokens",  "4K", "--layers",      "2", "--k",    "256", "--kv-heads",
    "2",      "--steps",   "3",  "--query-heads", "4", "--seed", "9",   "--head-dim",
    "64",     "--backend", "cpu"};

class StressCommandTest : public FolderTest {
 protected:
  static CliResult run(const std::vector<std::string>& more, bool terminal = false) {
    std::vector<std::string> arguments = kSmall;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_kvtier(std::move(arguments), terminal);
  }
};

TEST_F(StressCommandTest, ListsItsOptions) {
  const CliResult result = run_kvtier({"stress", "--help"});

  EXPECT_EQ(result.code, 0);
  for (const char* option : {"--preset",        "--tokens",         "--layers",       "--kv-heads",
                             "--query-heads",   "--head-dim",       "--batch",        "--k",
                             "--device-budget", "--host-budget",    "--estimator",    "--bits",
                             "--steps",         "--seed",           "--backend",      "--json",
                             "--compare-dense", "--row-cache-rows", "--overlap",      "--kv-dtype",
                             "--rule",          "--code",           "--error-target", "--drift",
                             "--coarse-bits",   "--candidates"}) {
    EXPECT_THAT(result.out, HasSubstr(option));
  }
}

TEST_F(StressCommandTest, WritesJsonToStandardOutput) {
  const CliResult result = run({"--json", "-"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["options"]["tokens"], 4096);
  EXPECT_NE(result.err.find("tokens"), std::string::npos) << "the text";
  EXPECT_FALSE(std::filesystem::exists("-"));
}

TEST_F(StressCommandTest, WritesTheReportAsTextAndJson) {
  const CliResult result = run({"--json", file("a.json").string(), "--compare-dense"});
  ASSERT_EQ(result.code, 0) << result.err;

  for (const char* line : {"shape    4096 tokens, 2 layer(s)", "tokens per second", "needles  ",
                           "overlap  ", "links    ", "memory   host pages", "dense    "}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
  const nlohmann::json json = nlohmann::json::parse(read_text(file("a.json")));
  EXPECT_EQ(json["options"]["tokens"], 4096);
  EXPECT_EQ(json["options"]["k"], 256);
  EXPECT_EQ(json["options"]["bits"], 256);
  EXPECT_EQ(json["options"]["rule"], "priority");
  EXPECT_EQ(json["options"]["code"], "scalar");
  EXPECT_EQ(json["drift"]["model"], "smollm2");
  EXPECT_EQ(json["options"]["error_target"], 0.0);
  EXPECT_TRUE(json["options"]["preset"].is_null());
  EXPECT_EQ(json["backend"], "cpu");
  EXPECT_EQ(json["interrupted"], false);
  EXPECT_EQ(json["steps_measured"], 3);
  EXPECT_EQ(json["needles"], 3 * 2 * 2);
  EXPECT_GE(json["needle_recall"], 0.0);
  EXPECT_LE(json["needle_recall"], 1.0);
  EXPECT_GT(json["tokens_per_second"], 0.0);
  EXPECT_GT(json["device_bytes"], json["sketch_bytes"]);
  EXPECT_EQ(json["host_bytes"], json["host_bytes_used"]);
  EXPECT_EQ(json["host_bytes"], 65 * 64 * 2 * 256 * 2);
  EXPECT_EQ(json["options"]["kv_dtype"], "model");
  double before = 0.0;
  for (const char* time : {"min", "p50", "p90", "p99", "max"}) {
    EXPECT_GE(json["step_seconds"][time], before) << time;
    before = json["step_seconds"][time];
  }
  EXPECT_EQ(json["row_cache"]["rows"], 0);
  EXPECT_TRUE(json["row_cache"]["share"].is_null());
  EXPECT_EQ(json["row_cache"]["bytes"], 0);
  EXPECT_TRUE(json["hit_ratios"].empty());
  EXPECT_GT(json["links"]["host_to_device_bytes_per_second"], 0.0);
  EXPECT_GT(json["dense"]["layer_seconds"]["p50"], 0.0);
  EXPECT_GT(json["dense"]["output_error"], 0.0);
}

TEST_F(StressCommandTest, ReportsTheRealHitRatioAndImposedOnes) {
  const CliResult result = run({"--json", file("a.json").string(), "--row-cache-rows", "1024"});
  ASSERT_EQ(result.code, 0) << result.err;

  for (const char* line : {"cache    0.", "hits     real     0.",
                           "hits       0 %    0.000 found: ", "hits      80 %    0."}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
  const nlohmann::json json = nlohmann::json::parse(read_text(file("a.json")));
  EXPECT_EQ(json["row_cache"]["rows"], 1024);
  EXPECT_GT(json["row_cache"]["bytes"], 0);
  const nlohmann::json& rows = json["hit_ratios"];
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_TRUE(rows[0]["imposed"].is_null());
  EXPECT_EQ(rows[0]["found"], json["row_cache"]["share"]);
  EXPECT_EQ(rows[0]["tokens_per_second"], json["tokens_per_second"]);
  EXPECT_EQ(rows[1]["imposed"], 0.0);
  EXPECT_EQ(rows[2]["imposed"], 0.8);
  for (const nlohmann::json& row : rows) {
    EXPECT_GT(row["tokens_per_second"], 0.0);
    EXPECT_GT(row["step_seconds"]["p99"], 0.0);
  }
}

TEST_F(StressCommandTest, KeepsRowsInInt8) {
  const CliResult result = run({"--json", file("a.json").string(), "--kv-dtype", "int8"});
  ASSERT_EQ(result.code, 0) << result.err;

  const nlohmann::json json = nlohmann::json::parse(read_text(file("a.json")));
  EXPECT_EQ(json["options"]["kv_dtype"], "int8");
  EXPECT_EQ(json["host_bytes"], 65 * 64 * 2 * (128 + 8) * 2);
  EXPECT_EQ(json["host_bytes"], json["host_bytes_used"]);
}

TEST_F(StressCommandTest, FreesInOrderAndSaysSo) {
  const std::string err = run({}).err;

  EXPECT_LT(err.find("freeing sessions"), err.find("freeing host pages and device memory"));
  EXPECT_NE(err.find("freeing host pages and device memory"), std::string::npos);
}

TEST_F(StressCommandTest, ShowsABarOnATerminalAndLinesElsewhere) {
  const std::string bar = run({}, true).err;
  EXPECT_THAT(bar, HasSubstr("\ringest [####"));
  EXPECT_THAT(bar, HasSubstr("] 100 %"));
  const std::string lines = run({}).err;
  EXPECT_THAT(lines, Not(HasSubstr("\r")));
  EXPECT_THAT(lines, HasSubstr("ingest: 100 %"));
  EXPECT_THAT(lines, HasSubstr("\ndecode: step 3 of 3"));
}

TEST_F(StressCommandTest, RejectsCommandLinesItDoesNotUnderstand) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--tokens", "1.5M"}, "--tokens: expected a size such as 64K, found 1.5M"},
      {{"--tokens", "1KK"}, "--tokens"},
      {{"--tokens", "-1K"}, "--tokens"},
      {{"--host-budget", "-1"}, "--host-budget"},
      {{"--host-budget", "16777216T"}, "--host-budget"},
      {{"--tokens", "-1"}, "--tokens"},
      {{"--host-budget", "lots"}, "--host-budget"},
      {{"--preset", "gpt-2"}, "llama-3.1-8b"},
      {{"--estimator", "best"}, "norm_aware"},
      {{"--rule", "chance"}, "priority"},
      {{"--code", "ternary"}, "scalar"},
      {{"--steps", "many"}, "--steps"},
      {{"--seed", "-1"}, "--seed"},
      {{"--backend", "gpu"}, "gpu"}};
  for (const auto& [options, message] : cases) {
    std::vector<std::string> arguments = {"stress"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const CliResult result = run_kvtier(arguments);
    EXPECT_EQ(result.code, 2) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.out, "");
  }
}

TEST_F(StressCommandTest, RefusesBadOptionsBeforeWorkStarts) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--steps", "0"}, "error: INVALID_ARGUMENT: options:\n  --steps: expected 1.."},
      {{"--tokens", "1023"}, "error: INVALID_ARGUMENT: options:\n  --tokens: expected 1024.."},
      {{"--tokens", "8589934591G"}, "error: INVALID_ARGUMENT: options:\n  --tokens"},
      {{"--k", "0"}, "error: INVALID_ARGUMENT: options:\n  --k: expected 1..65536"},
      {{"--head-dim", "80"}, "error: INVALID_ARGUMENT: options:\n  --head-dim: expected 64"},
      {{"--bits", "32"}, "error: INVALID_ARGUMENT: options:\n  --bits: expected"},
      {{"--code", "scalar", "--bits", "192"}, "error: INVALID_ARGUMENT: options:\n  "},
      {{"--rule", "top_k", "--error-target", "0.1"},
       "error: INVALID_ARGUMENT: options:\n  --error-target: expected 0"},
      {{"--host-budget", "64M"}, "error: RESOURCE_EXHAUSTED: host budget: expected at least "},
      {{"--device-budget", "1M"}, "error: RESOURCE_EXHAUSTED: device budget: expected at least "},
      {{"--tokens", "512M", "--preset", "llama-3.1-70b"}, "error: RESOURCE_EXHAUSTED: "},
      {{"--json", (folder_ / "missing" / "a.json").string()}, "error: UNAVAILABLE: "},
      {{"--json", folder_.string()}, "error: UNAVAILABLE: "}};
  for (const auto& [options, message] : cases) {
    std::vector<std::string> arguments = {"stress", "--backend", "cpu"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const CliResult result = run_kvtier(arguments);
    EXPECT_EQ(result.code, message.find("INVALID_ARGUMENT") == std::string::npos ? 1 : 2)
        << message;
    EXPECT_THAT(result.err, StartsWith(message));
    EXPECT_EQ(result.out, "");
  }
  EXPECT_TRUE(listing().empty());
}

TEST_F(StressCommandTest, SaysThatThereIsNoGpu) {
  std::vector<std::string> arguments = kSmall;
  arguments.back() = "cuda";
  const CliResult result = run_kvtier(std::move(arguments));
  if (result.code == 0) GTEST_SKIP() << "a GPU is here";
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("error: UNIMPLEMENTED: "));
}

/// A run that would go on for minutes.
std::vector<std::string> long_run(const std::string& json) {
  return {"kvtier",        "stress", "--tokens", "4K", "--kv-heads", "1",
          "--query-heads", "1",      "--k",      "64", "--head-dim", "64",
          "--steps",       "200000", "--json",   json, "--backend",  "cpu"};
}

/// Runs the program as a process of its own.
class StressProcessTest : public StressCommandTest {
 protected:
  void TearDown() override {
    std::filesystem::remove(err_path());
    StressCommandTest::TearDown();
  }
  /// Starts a long run, signals it once a line of its errors begins with `line`, and returns what
  /// it leaves.
  CliResult run_until(const std::string& line, int signal) {
    const char* program = std::getenv("KVTIER_PROGRAM");
    EXPECT_NE(program, nullptr);
    if (program == nullptr) return {};
    Program child(program, long_run(file("a.json").string()), {}, err_path());
    EXPECT_TRUE(eventually(
        [&] { return ("\n" + read_text(err_path())).find("\n" + line) != std::string::npos; }));
    child.signal(signal);
    CliResult result;
    result.out = child.read_rest();
    result.code = child.wait();
    result.err = read_text(err_path());
    return result;
  }

 private:
  [[nodiscard]] std::filesystem::path err_path() const { return folder_.string() + ".err"; }
};

TEST_F(StressProcessTest, WritesWhatWasMeasuredAfterAnInterruption) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const CliResult result = run_until("decode: step 1 of 200000", signal);

    EXPECT_EQ(result.code, 130);
    EXPECT_THAT(result.out, StartsWith("interrupted: what was measured until then\n"));
    EXPECT_THAT(result.out, HasSubstr("tokens per second"));
    EXPECT_THAT(result.err, HasSubstr("freeing host pages and device memory"));
    const nlohmann::json json = nlohmann::json::parse(read_text(file("a.json")));
    EXPECT_EQ(json["interrupted"], true);
    EXPECT_GE(json["steps_measured"], 1);
    EXPECT_LT(json["steps_measured"], 200000);
    EXPECT_EQ(listing(), std::vector<std::string>{"a.json"});
  }
}

TEST_F(StressProcessTest, StopsDuringIngest) {
  const CliResult result = run_until("ingest: ", SIGINT);

  EXPECT_EQ(result.code, 130);
  EXPECT_THAT(result.out, StartsWith("interrupted: "));
}

}  // namespace
}  // namespace kvtier::services
