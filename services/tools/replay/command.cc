#include "formats/atomic_file.h"
#include "include/types/failure.h"
#include "services/console/enum_names.h"
#include "services/console/json_report.h"
#include "services/console/options.h"
#include "services/evaluation/selection_trace.h"
#include "services/evaluation/trace.h"
#include "services/tools/replay/replay.h"

#include <CLI/CLI.hpp>

#include <cmath>

namespace kvtier::services {
namespace {

/// Draws a bar that overwrites itself; the last call ends the line.
class ProgressBar {
 public:
  explicit ProgressBar(std::ostream& err) : err_(err) {}
  void show(double share) {
    constexpr int kWidth = 40;
    const int filled = static_cast<int>(std::lround(share * kWidth));
    if (filled == shown_) return;
    shown_ = filled;
    err_ << "\rreplay [" << std::string(static_cast<std::size_t>(filled), '#')
         << std::string(static_cast<std::size_t>(kWidth - filled), ' ') << "]"
         << (filled == kWidth ? "\n" : "") << std::flush;
  }

 private:
  std::ostream& err_;
  int shown_ = -1;
};

}  // namespace

void add_replay(CLI::App& program, ReplayCommand& command) {
  CLI::App& app = *program.add_subcommand(
      "replay",
      "Replay a recorded trace through the selectors and compare them with dense attention");
  ReplayGrid& grid = command.options.grid;
  app.add_option("TRACE", command.trace,
                 "Safetensors file with k, v [kv_heads, tokens, head_dim] and q, o [query_heads, "
                 "steps, head_dim], or layers.N.k and so on")
      ->required();
  add_named(app, "--backend", kBackendNames, command.options.backend,
            "Where kernels run (default auto)");
  add_named(app, "--kv-dtype", kPageFormatNames, command.options.page_format,
            "Rows in pages: model, as the trace has them, or int8 (default model)");
  add_named_list(app, "--estimator", kEstimatorNames, grid.estimators,
                 "Estimators to compare (default all)");
  add_named_list(app, "--value-weighting", kWeightingNames, grid.weightings,
                 "Value weightings; each must go with each estimator (default: the estimator's)");
  add_named_list(app, "--selection", kSelectionNames, grid.selections,
                 "Who shares a selection (default per_kv_head)");
  add_named(app, "--plane-kind", kPlaneKindNames, grid.plane_kind,
            "Kind of hyperplanes (default: gaussian for collisions, orthogonal for norm_aware)");
  app.add_option("--planes-per-table", grid.planes_per_table,
                 "P of the collision estimators (default 10, hard_collision 2)");
  app.add_option("--tables", grid.tables,
                 "L of the collision estimators (default 60, hard_collision 300)");
  add_named_list(app, "--rule", kRuleNames, grid.rules, kRuleText);
  add_named_list(app, "--code", kCodeNames, grid.codes, kCodeText);
  app.add_option("--bits", grid.bits, kBitsText)->delimiter(',')->allow_extra_args(false);
  add_priority(app, grid.error_targets, grid.coarse_bits, grid.candidates);
  app.get_option("--error-target")->allow_extra_args(false);
  CLI::Option* preset = app.add_option_function<std::string>(
                               "--preset",
                               [&grid, &app](const std::string& name) {
                                 if (name == "socket") return grid.set_socket();
                                 grid.estimators = {RetrievalConfig{}.estimator};
                                 if (app.count("--sparsity") == 0) grid.top_ks = {0};
                               },
                               "socket: the method of the SOCKET paper; default: that of this "
                               "library, with its error target where no size is given")
                            ->check(one_of({"default", "socket"}));
  for (const char* own : {"--estimator", "--value-weighting", "--selection", "--plane-kind",
                          "--planes-per-table", "--tables", "--rule", "--code"}) {
    preset->excludes(app.get_option(own));
  }
  app.add_option("--query-bits", grid.query_bits, "Query weights of norm_aware: 0 (float), 4 or 8")
      ->capture_default_str();
  preset->excludes(
      app.add_option("--tau", grid.tau, "Temperature of soft_collision")->capture_default_str());
  CLI::Option* sparsity = app.add_option("--sparsity", grid.sparsities,
                                         "Select 1/S of the visible tokens (default 10,33,100)")
                              ->delimiter(',')
                              ->allow_extra_args(false);
  app.add_option("--k", grid.top_ks,
                 "Select k tokens, instead of --sparsity; 0: as many as the error target takes")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->excludes(sparsity);
  app.add_option("--sink", grid.sink, "First tokens, always attended")->capture_default_str();
  app.add_option("--window", grid.window, "Last tokens, always attended")->capture_default_str();
  app.add_option("--seed", grid.seed, "Seed of the hyperplanes")->capture_default_str();
  app.add_option("--steps", command.options.steps,
                 "Steps to replay, evenly spread over the trace; 0: all")
      ->capture_default_str();
  app.add_option("--first-step", command.options.first_step,
                 "First step that is replayed, where --steps leaves some out")
      ->capture_default_str();
  app.add_option("--json", command.json,
                 "Write the report, with every layer, to this file; -: standard output");
  app.add_option(
      "--record-ids", command.record_ids,
      "Write the tokens that each step selects to this safetensors file, for one selector");
  app.final_callback([&app, &grid] {
    check_estimator_options(app, grid.estimators);
    grid.error_alone = app.count("--sparsity") + app.count("--k") == 0;
  });
}

void run_replay(ReplayCommand& command, const Console& console) {
  JsonReport json(command.json, console);
  if (!command.record_ids.empty() && command.record_ids == command.json) {
    throw_invalid("--record-ids", "another file than that of --json", command.record_ids);
  }
  // Throws before the work for a place that cannot be written.
  if (!command.record_ids.empty()) (void)formats::AtomicFile(command.record_ids);
  const Trace trace = Trace::open(command.trace);
  ProgressBar bar(console.err);
  if (console.err_is_terminal) {
    command.options.progress = [&bar](double share) { bar.show(share); };
  }
  SelectionTrace ids{.query_heads = trace.query_heads(),
                     .kv_heads = trace.kv_heads(),
                     .context = trace.context(),
                     .layers = static_cast<std::int64_t>(trace.layers().size()),
                     .steps = 0,
                     .lists = {}};
  if (!command.record_ids.empty()) {
    command.options.selected = [&ids](std::span<const std::int32_t> list) {
      ids.lists.emplace_back(list.begin(), list.end());
    };
  }
  const ReplayReport report = replay(trace, command.options);
  ids.steps = report.steps;
  if (!command.record_ids.empty()) ids.write(command.record_ids);
  write_table(json.text(), trace, report);
  if (json.is_wanted()) json.commit(to_json(trace, command.options, report));
}

}  // namespace kvtier::services
