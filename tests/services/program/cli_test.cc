#include "services/program/cli.h"

#include "tests/services/evaluation/trace_fixture.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <set>
#include <sstream>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class CliTest : public FolderTest {
 protected:
  CliResult replay_small(std::vector<std::string> options, bool terminal = false) {
    write_trace(file("trace.safetensors"), make_layer({}, 1));
    options.insert(options.begin(),
                   {"replay", file("trace.safetensors").string(), "--backend", "cpu"});
    return run_kvtier(std::move(options), terminal);
  }
};

TEST_F(CliTest, PrintsItsVersion) {
  const CliResult result = run_kvtier({"--version"});

  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, StartsWith("kvtier 0."));
  EXPECT_EQ(result.err, "");
}

TEST_F(CliTest, PrintsHelp) {
  const CliResult program = run_kvtier({"--help"});
  EXPECT_EQ(program.code, 0);
  EXPECT_THAT(program.out, HasSubstr("replay"));
  const CliResult result = run_kvtier({"replay", "--help"});
  EXPECT_EQ(result.code, 0);
  for (const char* option : {"--backend",     "--estimator",  "--value-weighting",
                             "--selection",   "--plane-kind", "--planes-per-table",
                             "--tables",      "--bits",       "--query-bits",
                             "--tau",         "--sparsity",   "--k",
                             "--sink",        "--window",     "--seed",
                             "--steps",       "--first-step", "--json",
                             "--record-ids",  "--rule",       "--code",
                             "--coarse-bits", "--candidates", "--error-target",
                             "--preset"}) {
    EXPECT_THAT(result.out, HasSubstr(option));
  }
}

TEST_F(CliTest, PrintsManualPages) {
  const CliResult program = run_kvtier({"man"});
  EXPECT_EQ(program.code, 0);
  EXPECT_THAT(program.out, StartsWith(".TH KVTIER 1 \"\" \"kvtier 0."));
  EXPECT_THAT(program.out, HasSubstr(".BR kvtier\\-replay (1)\n"));

  const CliResult command = run_kvtier({"man", "replay"});  // no second command
  EXPECT_EQ(command.code, 0);
  EXPECT_THAT(command.out, HasSubstr("\n\\fB\\-\\-estimator\\fR "));
  EXPECT_THAT(command.out, HasSubstr("[\\fIOPTION\\fR]... \\fITRACE\\fR\n"));
  EXPECT_THAT(command.out, HasSubstr("\nOne of: soft_collision, "));

  EXPECT_THAT(run_kvtier({"man", "plan"}).out,
              HasSubstr("\n\\fB\\-\\-gpu\\fR \\fISIZE\\fR [\\fIOPTION\\fR]...\n"));

  EXPECT_THAT(command.out, HasSubstr(".SH EXIT STATUS\n0: success. 1: an error, "));
  EXPECT_THAT(command.out, HasSubstr("or a value or a file that is refused"));
  EXPECT_THAT(command.out, HasSubstr(" 75: draining hung. 130: interrupted"));

  const CliResult unknown = run_kvtier({"man", "replya"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("expected one of replay, serve, "));
  EXPECT_THAT(unknown.err, HasSubstr(", found replya"));

  EXPECT_THAT(program.out, HasSubstr(".SH NAME\nkvtier \\- long\\-context KV cache"));
  EXPECT_THAT(run_kvtier({"man", "man"}).out, HasSubstr("... [\\fICOMMAND\\fR]\n"));
  EXPECT_THAT(run_kvtier({"man", "plan"}).out, HasSubstr("\n.br\nRange: 0 to 1.\n"));
}

TEST_F(CliTest, PrintsCompletionsForShells) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const CliResult result = run_kvtier({"completion", shell});
    EXPECT_EQ(result.code, 0);
    for (const char* word : {"replay", "completion", "soft_collision", "error-target"}) {
      EXPECT_THAT(result.out, HasSubstr(word)) << shell;
    }
  }
  const CliResult unknown = run_kvtier({"completion", "tcsh"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("tcsh"));
  EXPECT_EQ(unknown.out, "");
}

TEST_F(CliTest, CompletesCommandsOfManAndOptionsOfTheProgram) {
  const std::string bash = run_kvtier({"completion", "bash"}).out;
  EXPECT_THAT(bash, HasSubstr("\n    serve:--log-level) values=\"debug info "));
  const std::size_t man = bash.find("    man) words=\"");
  ASSERT_NE(man, std::string::npos);
  EXPECT_THAT(bash.substr(man, bash.find('\n', man) - man), HasSubstr(" replay serve "));
  const auto line = [](const std::string& text, const std::string& begin) {
    const std::size_t at = text.find(begin);
    return at == std::string::npos ? std::string() : text.substr(at, text.find('\n', at) - at);
  };
  EXPECT_THAT(line(run_kvtier({"completion", "fish"}).out,
                   "complete -c kvtier -n '__fish_seen_subcommand_from serve' -l log-level"),
              HasSubstr("debug info warning"));
  const std::string zsh = run_kvtier({"completion", "zsh"}).out;
  EXPECT_THAT(zsh.substr(zsh.find("    serve) _arguments")), HasSubstr("--log-level="));
}

TEST_F(CliTest, OutputThatCannotBeWrittenIsAnError) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"man"},
        {"completion", "bash"},
        {"--version"},
        {"plan", "--preset", "qwen3-8b", "--gpu", "80G", "--tokens", "8K"}}) {
    std::ostream out(nullptr);
    std::ostringstream err;
    EXPECT_EQ(run_cli(arguments, {.out = out, .err = err}), 1) << arguments[0];
    EXPECT_EQ(err.str(), "error: UNAVAILABLE: standard output: cannot be written\n");
  }
}

TEST_F(CliTest, RefusesEmptyValues) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"replay", ""},
        {"replay", "t", "--record-ids", ""},
        {"stress", "--json", ""},
        {"calibrate", "--output", ""},
        {"plan", "--preset", "qwen3-8b", "--gpu", "80G", "--calibration", ""}}) {
    const CliResult result = run_kvtier(arguments);
    EXPECT_EQ(result.code, 2) << arguments[0];
    EXPECT_THAT(result.err, HasSubstr(": expected a value, found an empty one\n"));
    EXPECT_EQ(result.out, "");
  }
}

TEST_F(CliTest, RejectsCommandLinesItDoesNotUnderstand) {
  const std::string trace = recorded_trace().string();
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{}, "expected a subcommand"},
      {{"replya"}, "replya"},
      {{"--loud"}, "--loud"},
      {{"replay"}, "error: expected TRACE, found none\n"},
      {{"replay", trace, "--sparsty", "3"}, "--sparsty"},
      {{"replay", trace, "another"}, "another"},
      {{"replay", trace, "--estimator", "softest"}, "softest"},
      {{"replay", trace, "--value-weighting", "linear,heavy"}, "heavy"},
      {{"replay", trace, "--selection", "all"},
       "error: --selection: expected one of per_kv_head, per_query_head, per_sequence, found "
       "all\n"},
      {{"replay", trace, "--plane-kind", "paper"}, "paper"},
      {{"replay", trace, "--rule", "chance"}, "chance"},
      {{"replay", trace, "--code", "ternary"}, "ternary"},
      {{"replay", trace, "--preset", "quest"}, "quest"},
      {{"replay", trace, "--preset", "socket", "--rule", "priority"},
       "error: expected --rule or --preset, found both\n"},
      {{"replay", trace, "--backend", "gpu"}, "gpu"},
      {{"stress", "--layers", "3000000000"},
       "error: --layers: expected a number of 32 bits, found 3000000000\n"},
      {{"stress", "--compare-dense=maybe"},
       "error: --compare-dense: expected true or false, found maybe\n"},
      {{"replay", trace, "--tau"}, "error: --tau: expected a value, found none\n"},
      {{"plan", "--gpu", "8G", "--gpu", "9G"}, "error: --gpu: expected one value, found 2\n"},
      {{"replay", trace, "--tau", "warm"}, "error: --tau: expected a number, found warm\n"},
      {{"replay", trace, "--k", "3.5"}, "3.5"},
      {{"replay", trace, "--k", "8", "--sparsity", "3"}, "found both"},
      {{"replay", trace, "--candidates", "4"},
       "error: expected --coarse-bits with --candidates, found none\n"},
      {{"replay", trace, "--estimator", "norm_aware,hard_collision", "--tau", "0.5"},
       "error: expected --estimator soft_collision with --tau, found hard_collision, norm_aware\n"},
      {{"replay", trace, "--preset", "socket", "--query-bits", "8"},
       "error: expected --estimator norm_aware with --query-bits, found soft_collision\n"},
      {{"replay", trace, "--estimator", "norm_aware", "--tables", "4"},
       "error: expected --estimator soft_collision or hard_collision with --tables, found "
       "norm_aware\n"},
      {{"stress", "--estimator", "soft_collision", "--bits", "128"},
       "error: expected --estimator norm_aware with --bits, found soft_collision\n"},
      {{"stress", "--drift", "smollm2", "--overlap", "0.8"},
       "error: expected --overlap or --drift, found both\n"},
      {{"top", "--json", "--interval", "1"}, "error: expected --interval or --json, found both\n"},
      {{"--log-level", "all", "replay", trace},
       "error: --log-level: expected one of debug, info, warning, error, off, found all\n"}};
  for (const auto& [arguments, message] : cases) {
    const CliResult result = run_kvtier(arguments);
    EXPECT_EQ(result.code, 2) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.out, "");
  }
}

TEST_F(CliTest, SaysWhatItExpectsInPlaceOfWhatItDoesNotKnow) {
  const std::string commands =
      "error: expected one of replay, serve, top, stress, calibrate, plan, completion, man, found ";
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"serv"}, commands + "serv\n"},
      {{"help"}, commands + "help\n"},
      {{"serv", "--backend", "cpu"}, commands + "serv --backend cpu\n"},
      {{"--loud"}, "error: expected what kvtier --help lists, found --loud\n"},
      {{"stress", "--token", "4K"},
       "error: expected what kvtier stress --help lists, found --token 4K\n"},
      {{"man", "serve", "stress"}, "error: expected what kvtier man --help lists, found stress\n"}};
  for (const auto& [arguments, message] : cases) {
    const CliResult result = run_kvtier(arguments);
    EXPECT_EQ(result.code, 2) << message;
    EXPECT_EQ(result.err, message);
    EXPECT_EQ(result.out, "");
  }
}

TEST_F(CliTest, TakesOptionsOfTheProgramBehindACommand) {
  write_trace(file("trace.safetensors"), make_layer({}, 1));
  const std::string trace = file("trace.safetensors").string();
  const CliResult result = run_kvtier(
      {"replay", "--log-level", "info", "--backend", "cpu", trace, "--log-format", "json"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("engine ready on CPU"));
  EXPECT_THAT(result.err, StartsWith("{"));
  for (const char* command : {"replay", "plan"}) {
    EXPECT_THAT(run_kvtier({command, "--version"}).out, StartsWith("kvtier 0."));
  }
}

TEST_F(CliTest, SaysWhatNumbersItExpects) {
  const std::string trace = recorded_trace().string();
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"stress", "--tokens", "-5"}, "--tokens: expected a size such as 64K, found -5"},
      {{"stress", "--tokens", "-5K"}, "--tokens: expected a size such as 64K, found -5K"},
      {{"stress", "--tokens", "80 apples"}, "expected a size such as 64K, found 80 apples"},
      {{"stress", "--host-budget", "99999999P"}, "expected a size such as 64K, found 99999999P"},
      {{"stress", "--k", "2K"}, "--k: expected a whole number, found 2K"},
      {{"stress", "--k", "010"}, "--k: expected a whole number, found 010"},
      {{"stress", "--tokens", "010K"}, "--tokens: expected a size such as 64K, found 010K"},
      {{"stress", "--seed", "-5"}, "--seed: expected a whole number of 0 or more, found -5"},
      {{"stress", "--seed", "18446744073709551616"},
       "--seed: expected a whole number of 0 or more of 64 bits, found 18446744073709551616"},
      {{"stress", "--host-budget", "8E"}, "--host-budget: expected a size such as 64K, found 8E"},
      {{"stress", "--layers", ""}, "--layers: expected a value, found an empty one"},
      {{"replay", trace, "--k", "8,9K"}, "--k: expected a whole number, found 9K"},
      {{"replay", trace, "--tau", "warm"}, "--tau: expected a number, found warm"},
      {{"plan", "--preset", "qwen3-8b", "--gpu", "1G", "--hits", "nan"},
       "--hits: expected 0 to 1, found nan"},
      {{"plan", "--preset", "qwen3-8b", "--gpu", "1G", "--hits", "0.5"},
       "expected --calibration with --hits, found none"},
      {{"calibrate", "--region", "much"}, "--region: expected a size such as 64K, found much"},
      {{"calibrate", "--region", "8"},
       "error: --region: expected a size such as 80G, of at least 1M, found 8\n"},
      {{"stress", "--device-budget", "80"}, "such as 80G, of at least 1M, found 80"},
      {{"plan", "--preset", "qwen3-8b", "--gpu", "80"}, "such as 80G, of at least 1M, found 80"}};
  for (const auto& [arguments, message] : cases) {
    const CliResult result = run_kvtier(arguments);
    EXPECT_EQ(result.code, 2) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.out, "");
  }
}

TEST_F(CliTest, PrintsErrorsWithTheirCode) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--estimator", "norm_aware", "--value-weighting", "linear"},
       "error: INVALID_ARGUMENT: replay options:\n  norm_aware: --value-weighting: expected logit "
       "or none with norm-aware, found linear\n"},
      {{"--sparsity", "0"},
       "error: INVALID_ARGUMENT: replay options:\n  --sparsity: expected at least 1"},
      {{"--bits", "4096"},
       "error: INVALID_ARGUMENT: replay options:\n  norm_aware: --bits: expected"},
      {{"--rule", "priority"},
       "error: INVALID_ARGUMENT: replay options:\n  soft_collision: --rule: expected top_k"},
      {{"--estimator", "norm_aware", "--code", "scalar", "--bits", "100"},
       "error: INVALID_ARGUMENT: replay options:\n  norm_aware: --bits: "},
      {{"--rule", "top_k", "--error-target", "0.1"},
       "error: INVALID_ARGUMENT: replay options:\n  soft_collision: --error-target: expected 0 "
       "without the priority rule"},
      {{"--steps", "6"},
       "error: INVALID_ARGUMENT: --steps: expected 0..5 (the steps of the trace), found 6"},
      {{"--window", "-1"},
       "error: INVALID_ARGUMENT: replay options:\n  soft_collision: --window: expected 0..2^30"},
      {{"--json", (folder_ / "missing" / "a.json").string()}, "error: UNAVAILABLE: "}};
  for (const auto& [options, message] : cases) {
    const CliResult result = replay_small(options);
    EXPECT_EQ(result.code, message.find("INVALID_ARGUMENT") == std::string::npos ? 1 : 2);
    EXPECT_THAT(result.err, StartsWith(message));
    EXPECT_EQ(result.out, "");
  }
}

TEST_F(CliTest, PrintsErrorsOfTraceFiles) {
  const CliResult none = run_kvtier({"replay", file("none").string()});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, StartsWith("error: NOT_FOUND: "));
  std::ofstream(file("short")) << "abc";
  const CliResult torn = run_kvtier({"replay", file("short").string()});
  EXPECT_EQ(torn.code, 1);
  EXPECT_THAT(torn.err, StartsWith("error: DATA_LOSS: "));
  std::ofstream(file("text")) << "# A text, and no trace.\n";
  EXPECT_THAT(run_kvtier({"replay", file("text").string()}).err,
              HasSubstr("expected a safetensors file, with a header of at most 16 bytes"));
  TraceValues tensors = make_layer({}, 1);
  tensors.erase("o");
  write_trace(file("trace.safetensors"), tensors);
  const CliResult result = run_kvtier({"replay", file("trace.safetensors").string()});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, StartsWith("error: NOT_FOUND: "));
  tensors = make_layer({.head_dim = 80}, 1);
  write_trace(file("trace.safetensors"), tensors);
  EXPECT_THAT(run_kvtier({"replay", file("trace.safetensors").string()}).err,
              HasSubstr("head_dim"));
}

TEST_F(CliTest, ChecksThePlacesOfFilesBeforeItOpensTheTrace) {
  for (const char* option : {"--json", "--record-ids"}) {
    const CliResult result =
        run_kvtier({"replay", file("none").string(), option, (folder_ / "missing" / "a").string()});
    EXPECT_THAT(result.err, StartsWith("error: UNAVAILABLE: ")) << option;
  }
}

TEST_F(CliTest, KeepsIdsAndReportApart) {
  const std::string place = file("a").string();
  const CliResult result =
      run_kvtier({"replay", file("none").string(), "--json", place, "--record-ids", place});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("--record-ids: expected another file than that of --json"));
  EXPECT_TRUE(listing().empty());
}

TEST_F(CliTest, RecordsTheIdsOfOneSelectorOnly) {
  const CliResult result = replay_small({"--record-ids", file("ids.safetensors").string()});

  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("--record-ids: expected one selector"));
  EXPECT_FALSE(std::filesystem::exists(file("ids.safetensors")));
}

TEST_F(CliTest, LeavesNoJsonAfterAnError) {
  std::ofstream(file("report.json")) << "former";
  EXPECT_EQ(replay_small({"--steps", "6", "--json", file("report.json").string()}).code, 2);

  EXPECT_EQ(read_text(file("report.json")), "former");
  EXPECT_EQ(listing(), (std::vector<std::string>{"report.json", "trace.safetensors"}));
}

TEST_F(CliTest, TakesListsBetweenOtherArguments) {
  write_trace(file("trace.safetensors"), make_layer({}, 1));
  const CliResult result =
      run_kvtier({"replay", "--estimator", "norm_aware", "--estimator", "hard_collision", "--k",
                  "8,16", "--backend", "cpu", file("trace.safetensors").string()});

  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("norm_aware"));
  EXPECT_THAT(result.out, HasSubstr("hard_collision"));
  EXPECT_THAT(result.out, Not(HasSubstr("soft_collision")));
  EXPECT_THAT(result.out, HasSubstr("k=16"));
}

TEST_F(CliTest, ReplaysRulesCodesAndBits) {
  const CliResult result =
      run_kvtier({"replay", recorded_trace().string(), "--backend", "cpu", "--steps", "4",
                  "--estimator", "norm_aware", "--rule", "top_k,priority", "--code", "sign,scalar",
                  "--bits", "128,256", "--sparsity", "10", "--json", file("report.json").string()});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("256 scalar"));
  const nlohmann::json report = nlohmann::json::parse(read_text(file("report.json")));
  ASSERT_EQ(report["rows"].size(), 1U + 8U);
  std::map<std::string, double> error;
  for (const nlohmann::json& row : report["rows"]) {
    if (row["estimator"] == "exact") continue;
    error[row["rule"].get<std::string>() + " " + row["code"].get<std::string>() + " " +
          std::to_string(row["bits"].get<int>())] = row["mean"]["output_error"].get<double>();
  }
  ASSERT_EQ(error.size(), 8U);
  for (const char* rule : {"top_k", "priority"}) {
    const std::string name = rule;
    EXPECT_LT(error[name + " scalar 256"], error[name + " sign 256"]);
    EXPECT_LT(error[name + " sign 256"], error[name + " sign 128"]);
  }
  EXPECT_LT(error["priority scalar 256"], error["top_k scalar 256"]);
}

TEST_F(CliTest, ReplaysEachEstimatorByItsOwnRuleAndCode) {
  const CliResult result = replay_small({"--k", "8", "--json", file("report.json").string()});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json rows = nlohmann::json::parse(read_text(file("report.json")))["rows"];
  ASSERT_EQ(rows.size(), 4U);
  for (std::size_t i = 1; i < 4; ++i) {
    const bool norm_aware = rows[i]["estimator"] == "norm_aware";
    EXPECT_EQ(rows[i]["rule"], norm_aware ? "priority" : "top_k");
    EXPECT_EQ(rows[i]["code"], norm_aware ? "scalar" : "sign");
    if (!norm_aware) continue;
    EXPECT_EQ(rows[i]["bits"], 256);
  }
}

TEST_F(CliTest, TwoPhasesReadLessAndStayNear) {
  const CliResult result =
      run_kvtier({"replay", recorded_trace().string(), "--backend", "cpu", "--steps", "4",
                  "--estimator", "norm_aware", "--bits", "512", "--coarse-bits", "2",
                  "--candidates", "4", "--sparsity", "33", "--json", file("two.json").string()});
  ASSERT_EQ(result.code, 0) << result.err;
  ASSERT_EQ(run_kvtier({"replay", recorded_trace().string(), "--backend", "cpu", "--steps", "4",
                        "--estimator", "norm_aware", "--bits", "512", "--sparsity", "33", "--json",
                        file("one.json").string()})
                .code,
            0);
  const nlohmann::json two = nlohmann::json::parse(read_text(file("two.json")))["rows"][1];
  const nlohmann::json one = nlohmann::json::parse(read_text(file("one.json")))["rows"][1];
  EXPECT_EQ(two["coarse_bits"], 2);
  EXPECT_EQ(two["candidates"], 4);
  EXPECT_FALSE(one.contains("coarse_bits"));
  EXPECT_LT(two["mean"]["bytes_sketch_read"].get<double>(),
            0.75 * one["mean"]["bytes_sketch_read"].get<double>());
  EXPECT_LT(two["mean"]["output_error"].get<double>(),
            1.5 * one["mean"]["output_error"].get<double>());
}

TEST_F(CliTest, AnErrorTargetTakesFewer) {
  const CliResult result = run_kvtier(
      {"replay", recorded_trace().string(), "--backend", "cpu", "--steps", "4", "--estimator",
       "norm_aware", "--rule", "top_k,priority", "--code", "scalar", "--error-target", "0.2",
       "--sparsity", "10", "--json", file("report.json").string()});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json rows = nlohmann::json::parse(read_text(file("report.json")))["rows"];
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_FALSE(rows[1].contains("error_target"));
  EXPECT_EQ(rows[2]["error_target"], 0.2);
  EXPECT_LT(rows[2]["mean"]["attended_rows"], rows[1]["mean"]["attended_rows"]);
}

TEST_F(CliTest, TakesSeveralErrorTargets) {
  const CliResult result = replay_small({"--estimator", "norm_aware", "--error-target", "0.2,0.05",
                                         "--k", "0,8", "--json", file("report.json").string()});
  ASSERT_EQ(result.code, 0) << result.err;
  std::multiset<std::pair<int, double>> rows;
  const nlohmann::json report = nlohmann::json::parse(read_text(file("report.json")));
  for (const nlohmann::json& row : report["rows"]) {
    if (row["estimator"] == "norm_aware") rows.emplace(row["k"], row["error_target"]);
  }
  EXPECT_EQ(rows,
            (std::multiset<std::pair<int, double>>{{0, 0.05}, {0, 0.2}, {8, 0.05}, {8, 0.2}}));
  for (const char* size : {"  e=0.2  ", "  e=0.05  ", "  e=0.2 k=8  ", "  e=0.05 k=8  "}) {
    EXPECT_THAT(result.out, HasSubstr(size));
  }
  EXPECT_EQ(replay_small({"--error-target", "0.2,x"}).code, 2);
}

TEST_F(CliTest, HasThePresetOfThePaper) {
  const CliResult result =
      replay_small({"--preset", "socket", "--k", "8", "--json", file("report.json").string()});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json rows = nlohmann::json::parse(read_text(file("report.json")))["rows"];
  ASSERT_EQ(rows.size(), 2U);
  const nlohmann::json& row = rows[1];
  EXPECT_EQ(row["estimator"], "soft_collision");
  EXPECT_EQ(row["value_weighting"], "linear");
  EXPECT_EQ(row["selection"], "per_query_head");
  EXPECT_EQ(row["plane_kind"], "gaussian");
  EXPECT_EQ(row["rule"], "top_k");
  EXPECT_EQ(row["code"], "sign");
  EXPECT_EQ(row["planes_per_table"], 10);
  EXPECT_EQ(row["tables"], 60);
}

TEST_F(CliTest, HasThePresetOfTheLibrary) {
  const auto rows = [this](std::vector<std::string> options) {
    options.insert(options.end(), {"--json", file("report.json").string()});
    const CliResult result = replay_small(std::move(options));
    EXPECT_EQ(result.code, 0) << result.err;
    nlohmann::json list = nlohmann::json::parse(read_text(file("report.json")))["rows"];
    for (nlohmann::json& row : list) {
      row.erase("layers");
      for (const char* time : {"score_seconds", "fetch_seconds", "attend_seconds"}) {
        row["mean"].erase(time);
      }
    }
    return list;
  };
  const nlohmann::json preset = rows({"--preset", "default"});
  ASSERT_EQ(preset.size(), 2U);
  EXPECT_EQ(preset[1]["estimator"], "norm_aware");
  EXPECT_EQ(preset[1]["rule"], "priority");
  EXPECT_EQ(preset[1]["code"], "scalar");
  EXPECT_EQ(preset[1]["error_target"], 0.03);
  EXPECT_EQ(preset, rows({"--estimator", "norm_aware", "--k", "0"}));
  EXPECT_EQ(rows({"--preset", "default", "--sparsity", "10"}),
            rows({"--estimator", "norm_aware", "--sparsity", "10"}));
  EXPECT_EQ(rows({"--preset", "default", "--k", "8"}),
            rows({"--estimator", "norm_aware", "--k", "8"}));
}

TEST_F(CliTest, ShowsProgressOnATerminalOnly) {
  EXPECT_EQ(replay_small({"--k", "16"}).err, "");
  EXPECT_THAT(replay_small({"--k", "16"}, true).err, HasSubstr("[####"));
}

TEST_F(CliTest, LogsWhatTheLibrarySaysWhenAsked) {
  write_trace(file("trace.safetensors"), make_layer({}, 1));
  const CliResult result = run_kvtier(
      {"--log-level", "info", "replay", "--backend", "cpu", file("trace.safetensors").string()});

  EXPECT_THAT(result.err, HasSubstr("info: engine ready on CPU"));
}

TEST_F(CliTest, ReplaysTheRecordedTrace) {
  const std::filesystem::path json_file = file("report.json");
  const CliResult result = run_kvtier({"replay",      recorded_trace().string(),
                                       "--backend",   "cpu",
                                       "--steps",     "4",
                                       "--selection", "per_query_head,per_kv_head",
                                       "--rule",      "top_k",
                                       "--code",      "sign",
                                       "--sink",      "128",
                                       "--window",    "128",
                                       "--sparsity",  "10,33",
                                       "--json",      json_file.string()});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json report = nlohmann::json::parse(read_text(json_file));

  EXPECT_EQ(report["backend"], "cpu");
  EXPECT_EQ(report["steps_replayed"], 4);
  EXPECT_EQ(report["trace"]["context_tokens"], 3072);
  EXPECT_EQ(report["trace"]["layers"], nlohmann::json::array({"2"}));
  // The recorded output is rounded to bf16: at most 2^-8 of each element.
  EXPECT_LT(report["dense"]["mean"]["max_relative_error"].get<double>(), 0x1p-8);
  ASSERT_EQ(report["rows"].size(), 4U + 12U);
  std::map<std::string, double> mass;
  for (const nlohmann::json& row : report["rows"]) {
    const nlohmann::json& mean = row["mean"];
    EXPECT_EQ(mean["attention_mass"], row["layers"]["2"]["attention_mass"]);
    for (const char* share : {"attention_mass", "precision", "jaccard", "ndcg"}) {
      EXPECT_GT(mean[share].get<double>(), 0.0) << share;
      EXPECT_LE(mean[share].get<double>(), 1.0 + 1e-12) << share;
    }
    EXPECT_LE(mean["jaccard"], mean["precision"]);
    const double sparsity = row["sparsity"].get<double>();
    EXPECT_LT(mean["effective_sparsity"].get<double>(), sparsity);
    EXPECT_NEAR(mean["attended_rows"].get<double>(), 256 + 3090 / sparsity, 3.0);
    EXPECT_GT(mean["bytes_host_to_device"].get<double>(), 0.0);
    if (row["selection"] == "per_query_head" && sparsity == 33.0) {
      mass[row["estimator"].get<std::string>()] = mean["attention_mass"].get<double>();
    }
  }
  EXPECT_GT(mass["exact"], mass["norm_aware"]);
  EXPECT_GT(mass["norm_aware"], mass["soft_collision"]);
  EXPECT_GT(mass["soft_collision"], mass["hard_collision"]);
}

TEST_F(CliTest, WritesNullForMetricsThatNothingMeasured) {
  const CliResult result =
      replay_small({"--window", "400", "--k", "4", "--json", file("report.json").string()});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json report = nlohmann::json::parse(read_text(file("report.json")));

  EXPECT_TRUE(report["rows"][0]["mean"]["precision"].is_null());
  EXPECT_EQ(report["rows"][0]["mean"]["attention_mass"], 1.0);
}

}  // namespace
}  // namespace kvtier::services
