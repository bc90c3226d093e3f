// Answers the questions of needle-llama with every selector of the comparison, as JSON.

#include "benchmarks/quality/answers.h"
#include "benchmarks/quality/origin.h"
#include "formats/atomic_file.h"
#include "llama/compute.h"
#include "services/console/command_line.h"

#include <CLI/CLI.hpp>

#include <iostream>

namespace kvtier::quality {
namespace {

/// A digit for each question, 1 where it is answered wholly right.
std::string flags(const std::vector<bool>& right) {
  std::string digits;
  for (const bool each : right) digits += each ? '1' : '0';
  return digits;
}

int run(int argc, char** argv) {
  CLI::App app("Answers the questions of a task file with every selector, as JSON",
               "kvtier-quality-answers");
  std::string model;
  std::string tasks;
  std::string json_file;
  std::string hardware = this_machine();
  AnswerOptions options;
  app.add_option("--model", model, "Directory of config.json and *.safetensors")->required();
  app.add_option("--tasks", tasks, "Task file (safetensors)")->required();
  app.add_option("--case", options.task, "Case, such as n8192.d100")->required();
  app.add_option("--sequences", options.sequences, "Sequences of the case")->capture_default_str();
  app.add_option("--first-sequence", options.first_sequence, "Sequence to begin with")
      ->capture_default_str();
  app.add_option("--sparsity", options.sparsities, "Select 1/S of the context")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--selectors", options.only, "Names of selectors (default: all)")->delimiter(',');
  app.add_option("--sink", options.sink, "First tokens, always attended")->capture_default_str();
  app.add_option("--window", options.window, "Last tokens of the context, always attended")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of rotations, hashes and samples")
      ->check(services::at_least(0));
  app.add_option("--plane-seeds", options.plane_seeds,
                 "Seeds of norm-aware's planes for rows of their own, beside seed 0")
      ->delimiter(',')
      ->check(services::at_least(1));
  app.add_flag(
      "--other-planes", options.other_planes,
      "Of kvtier's own selectors: soft collision with orthogonal planes, norm-aware with 64 "
      "and 600, in place of the usual ones");
  app.add_flag("--variants", options.variants,
               "Also what shows where a sketch of 128 planes loses: exact scores and signs of a "
               "rotation, with other weights of ln |v| and other corrections");
  app.add_option("--planes", options.planes, "Of norm-aware, only rows with this many planes");
  app.add_option("--hardware", hardware, "Machine, for the report")->capture_default_str();
  app.add_option("--json", json_file, "Write the report to this file")->required();
  if (const auto code =
          services::parse_arguments(app, {argv + 1, argv + argc}, {std::cout, std::cerr})) {
    return *code;
  }
  formats::AtomicFile file(json_file);
  options.progress = [](const std::string& what) { std::cerr << what << std::endl; };
  llama::Decoder decoder = llama::load_decoder(model, llama::make_cpu_compute());
  const llama::TaskFile task_file(tasks);
  const std::vector<AnswerRow> rows = answer(decoder, task_file, options);

  nlohmann::json json = origin(hardware, command_line("kvtier-quality-answers", argc, argv));
  json["case"] = options.task;
  json["context_tokens"] = task_file.at(options.task).context;
  json["sequences"] = options.sequences;
  json["queries"] = options.sequences * task_file.at(options.task).queries();
  json["sink_tokens"] = options.sink;
  json["recent_tokens"] = options.window;
  for (const AnswerRow& row : rows) {
    json["rows"].push_back({{"selector", row.name},
                            {"settings", row.settings},
                            {"selection", row.selection},
                            {"sparsity", row.sparsity},
                            {"bits_per_token", row.bits_per_token},
                            {"rows_attended", number(row.rows_attended)},
                            {"exact", number(row.scores.exact)},
                            {"first_token", number(row.scores.first_token)},
                            {"right", flags(row.scores.right)},
                            {"fwe", number(row.scores.fwe)},
                            {"kl", number(row.scores.kl)},
                            {"kl_answers", number(row.scores.kl_answers)}});
  }
  file.commit(json.dump(1) + "\n");
  return 0;
}

}  // namespace
}  // namespace kvtier::quality

int main(int argc, char** argv) {
  return kvtier::services::with_errors_printed(std::cerr,
                                               [&] { return kvtier::quality::run(argc, argv); });
}
