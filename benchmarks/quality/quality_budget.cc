// Compares the adaptive budget with a fixed k on recorded traces and by the answers of
// needle-llama, as JSON.

#include "kvtier/error.h"

#include "benchmarks/quality/budget.h"
#include "benchmarks/quality/origin.h"
#include "formats/atomic_file.h"
#include "llama/compute.h"
#include "services/console/command_line.h"
#include "services/console/enum_names.h"

#include <CLI/CLI.hpp>

#include <array>
#include <iostream>
#include <string_view>
#include <utility>

namespace kvtier::quality {
namespace {

constexpr std::array<std::pair<std::string_view, Selection>, 2> kSelections{
    {{"per_kv_head", Selection::kPerKvHead}, {"per_query_head", Selection::kPerQueryHead}}};

struct Arguments {
  std::vector<std::string> traces, names;
  std::string calibration, calibration_name;
  std::string model, tasks, task, json;
  std::string made_by;
  std::int64_t sequences = 1;
  std::vector<double> sparsities = {10, 33, 100};
  std::vector<float> noise_shares = {0.0F, 0.25F, 0.5F, 0.75F, 1.0F};
  std::string hardware = this_machine();
  BudgetOptions options;
};

nlohmann::json to_json(const std::vector<BudgetRow>& rows) {
  nlohmann::json all = nlohmann::json::array();
  for (const BudgetRow& row : rows) {
    all.push_back({{"recall", row.recall},
                   {"sparsity", row.sparsity},
                   {"noise_share", row.noise_share},
                   {"mean_k", number(row.mean_k)},
                   {"missed", number(row.missed)},
                   {"missed_p95", number(row.missed_p95)},
                   {"output_error", number(row.output_error)},
                   {"error_mean", number(row.error_mean)},
                   {"error_p50", number(row.error_p50)},
                   {"error_p95", number(row.error_p95)}});
  }
  return all;
}

nlohmann::json to_json(const std::vector<BudgetAnswer>& answers) {
  nlohmann::json all = nlohmann::json::array();
  for (const BudgetAnswer& answer : answers) {
    all.push_back({{"recall", answer.recall},
                   {"mean_k", number(answer.mean_k)},
                   {"exact", number(answer.scores.exact)},
                   {"first_token", number(answer.scores.first_token)},
                   {"fwe", number(answer.scores.fwe)},
                   {"kl", number(answer.scores.kl)},
                   {"kl_answers", number(answer.scores.kl_answers)}});
  }
  return all;
}

nlohmann::json trace_json(const services::Trace& trace, const std::string& name) {
  return {{"name", name},
          {"layers", trace.layers().size()},
          {"context_tokens", trace.context()},
          {"recorded_steps", trace.steps()}};
}

nlohmann::json answers_json(const Arguments& a) {
  llama::Decoder decoder = llama::load_decoder(a.model, llama::make_cpu_compute());
  const llama::TaskFile file(a.tasks);
  const llama::TaskCase task = file.at(a.task);
  return {{"case", a.task},
          {"context_tokens", task.context},
          {"sequences", a.sequences},
          {"queries", a.sequences * task.queries()},
          {"rows", to_json(answer_within_budget(decoder, task, a.sequences, a.options))}};
}

int run(int argc, char** argv) {
  CLI::App app("Compares the adaptive budget with a fixed k, as JSON", "kvtier-quality-budget");
  Arguments a;
  app.add_option("--trace", a.traces, "Traces of `kvtier-llama record`, not used to calibrate");
  app.add_option("--name", a.names, "Their names in the report, in order");
  app.add_option("--calibrate", a.calibration, "Trace on which noise shares are compared");
  app.add_option("--calibration-name", a.calibration_name, "Its name in the report");
  app.add_option("--made-by", a.made_by, "Command that made the traces, for the report");
  app.add_option("--noise-share", a.noise_shares, "Noise shares to compare")->delimiter(',');
  app.add_option("--sparsity", a.sparsities, "Visible over selected tokens, for the comparison")
      ->delimiter(',');
  app.add_option("--recall", a.options.recalls, "Targets")->delimiter(',')->capture_default_str();
  app.add_option("--min-k", a.options.min_top_k, "Fewest tokens that a target selects")
      ->check(services::at_least(1))
      ->capture_default_str();
  app.add_option("--bits", a.options.planes, "Sign bits per key")->capture_default_str();
  services::add_named(app, "--selection", kSelections, a.options.selection,
                      "Who shares a selection");
  app.add_option("--steps", a.options.steps, "Evaluated steps (default 0: every second one)");
  app.add_option("--sink", a.options.sink, "First tokens, always attended")->capture_default_str();
  app.add_option("--window", a.options.window, "Last tokens, always attended")
      ->capture_default_str();
  app.add_option("--model", a.model, "Directory of config.json and *.safetensors, for answers");
  app.add_option("--tasks", a.tasks, "Task file (safetensors)");
  app.add_option("--case", a.task, "Case, such as n8192.d100");
  app.add_option("--sequences", a.sequences, "Sequences of the case")->capture_default_str();
  app.add_option("--hardware", a.hardware, "Machine, for the report")->capture_default_str();
  app.add_option("--json", a.json, "Write the report to this file")->required();
  if (const auto code =
          services::parse_arguments(app, {argv + 1, argv + argc}, {std::cout, std::cerr})) {
    return *code;
  }
  if (a.names.size() != a.traces.size()) {
    throw Error(ErrorCode::kInvalidArgument, "--name: expected one per trace, " +
                                                 std::to_string(a.traces.size()) + ", found " +
                                                 std::to_string(a.names.size()));
  }
  formats::AtomicFile file(a.json);
  nlohmann::json json = origin(a.hardware, command_line("kvtier-quality-budget", argc, argv));
  json["made_by"] = a.made_by;
  json["planes"] = a.options.planes;
  json["min_top_k"] = a.options.min_top_k;
  json["selection"] = services::name_of(kSelections, a.options.selection);
  json["sink_tokens"] = a.options.sink;
  json["recent_tokens"] = a.options.window;
  if (!a.calibration.empty()) {
    const services::Trace trace = services::Trace::open(a.calibration);
    json["calibration"] = trace_json(trace, a.calibration_name);
    json["calibration"]["rows"] =
        to_json(calibrate_budget(trace, a.options, a.sparsities, a.noise_shares));
  }
  json["traces"] = nlohmann::json::array();
  for (std::size_t i = 0; i < a.traces.size(); ++i) {
    const services::Trace trace = services::Trace::open(a.traces[i]);
    nlohmann::json entry = trace_json(trace, a.names[i]);
    entry["rows"] = to_json(evaluate_budget(trace, a.options));
    json["traces"].push_back(std::move(entry));
  }
  if (!a.model.empty()) json["answers"] = answers_json(a);
  file.commit(json.dump(1) + "\n");
  return 0;
}

}  // namespace
}  // namespace kvtier::quality

int main(int argc, char** argv) {
  return kvtier::services::with_errors_printed(std::cerr,
                                               [&] { return kvtier::quality::run(argc, argv); });
}
