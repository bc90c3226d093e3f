// Compares token selectors on recorded traces: attention mass, precision, Jaccard, NDCG and output
// error at several sparsities, and the correlation of their scores with q.k, as JSON.

#include "benchmarks/quality/evaluate.h"
#include "benchmarks/quality/origin.h"
#include "formats/atomic_file.h"
#include "services/console/command_line.h"
#include "services/evaluation/trace.h"

#include <CLI/CLI.hpp>

#include <cmath>
#include <iostream>
#include <string>
#include <unistd.h>

namespace kvtier::quality {
namespace {

/// What a report says of its trace and of itself.
struct Names {
  std::string name;
  std::string made_by;
  std::string command;
  std::string hardware;
};

nlohmann::json to_json(const services::Trace& trace, const Names& names,
                       const EvaluationOptions& options, const Evaluation& evaluation) {
  nlohmann::json layers = nlohmann::json::array();
  for (const services::TraceLayer& layer : trace.layers()) layers.push_back(layer.name);
  nlohmann::json json = origin(names.hardware, names.command);
  json["trace"] = {{"name", names.name},
                   {"made_by", names.made_by},
                   {"file", trace.path().filename().string()},
                   {"layers", layers},
                   {"context_tokens", trace.context()},
                   {"recorded_steps", trace.steps()},
                   {"query_heads", trace.query_heads()},
                   {"kv_heads", trace.kv_heads()},
                   {"head_dim", trace.head_dim()}};
  json.update({{"selection", "per_query_head"},
               {"steps", evaluation.steps},
               {"sink_tokens", options.sink},
               {"recent_tokens", options.window},
               {"seed", options.seed}});
  for (const EvaluationRow& row : evaluation.rows) {
    json["rows"].push_back({{"selector", row.name},
                            {"settings", row.settings},
                            {"source", row.source},
                            {"sparsity", row.sparsity},
                            {"bits_per_token", row.bits_per_token},
                            {"attention_mass", number(row.mean.attention_mass)},
                            {"layer_attention_mass", row.layer_mass},
                            {"precision", number(row.mean.precision)},
                            {"jaccard", number(row.mean.jaccard)},
                            {"ndcg", number(row.mean.ndcg)},
                            {"output_error", number(row.mean.output_error)},
                            {"attended_rows", number(row.mean.attended_rows)},
                            {"effective_sparsity", number(row.mean.effective_sparsity)}});
  }
  for (const ScoreQuality& score : evaluation.scores) {
    json["scores"].push_back({{"selector", score.name},
                              {"settings", score.settings},
                              {"bits_per_token", score.bits_per_token},
                              {"correlation", number(score.correlation)},
                              {"spread", number(score.spread)}});
  }
  return json;
}

int run(int argc, char** argv) {
  CLI::App app("Compares token selectors on a recorded trace, as JSON", "kvtier-quality");
  std::string file;
  Names names{.name = "",
              .made_by = "",
              .command = command_line("kvtier-quality", argc, argv),
              .hardware = this_machine()};
  std::string json_file;
  EvaluationOptions options;
  app.add_option("TRACE", file, "Trace of `kvtier-llama record`, or one as `kvtier replay` takes")
      ->required();
  app.add_option("--name", names.name, "Name of the trace in the report (default: the file's)");
  app.add_option("--made-by", names.made_by, "Command that made the trace, for the report");
  app.add_option("--hardware", names.hardware, "Machine, for the report")->capture_default_str();
  app.add_option("--sparsity", options.sparsities, "Select 1/S of the visible tokens")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Evaluated steps (default 0: every second one)");
  app.add_option("--sink", options.sink, "First tokens, always attended")
      ->check(services::at_least(0))
      ->capture_default_str();
  app.add_option("--window", options.window, "Last tokens, always attended")
      ->check(services::at_least(0))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of rotations, hashes and samples")
      ->check(services::at_least(0));
  app.add_option("--json", json_file, "Write the report to this file")->required();
  if (const auto code =
          services::parse_arguments(app, {argv + 1, argv + argc}, {std::cout, std::cerr})) {
    return *code;
  }
  formats::AtomicFile json(json_file);
  const services::Trace trace = services::Trace::open(file);
  if (::isatty(2) == 1) {
    options.progress = [](double share) {
      std::cerr << "\rquality " << std::lround(100.0 * share) << " %" << (share >= 1.0 ? "\n" : "")
                << std::flush;
    };
  }
  const Evaluation evaluation = evaluate(trace, options);
  if (names.name.empty()) names.name = trace.path().stem().string();
  json.commit(to_json(trace, names, options, evaluation).dump(1) + "\n");
  return 0;
}

}  // namespace
}  // namespace kvtier::quality

int main(int argc, char** argv) {
  return kvtier::services::with_errors_printed(std::cerr,
                                               [&] { return kvtier::quality::run(argc, argv); });
}
