#include "services/program/cli.h"

#include "kvtier/error.h"

#include "services/console/enum_names.h"
#include "services/console/json_report.h"
#include "services/console/log.h"
#include "services/console/named_option.h"
#include "services/evaluation/selection_trace.h"
#include "services/evaluation/trace.h"
#include "services/serve/serve.h"
#include "services/tools/calibrate/calibrate.h"
#include "services/tools/manual/completion.h"
#include "services/tools/manual/man_page.h"
#include "services/tools/plan/plan.h"
#include "services/tools/replay/replay.h"
#include "services/tools/replay/replay_report.h"
#include "services/tools/stress/command.h"
#include "services/tools/top/top.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <string_view>

namespace kvtier::services {
namespace {

constexpr const char* kVersion = "kvtier " KVTIER_VERSION;
constexpr int kExitError = 1;
constexpr int kExitUsage = 2;

template <typename Names, typename Enum>
CLI::Option* add_named_list(CLI::App& app, const std::string& flag, const Names& names,
                            std::vector<Enum>& to, const std::string& description) {
  return app
      .add_option_function<std::vector<std::string>>(
          flag,
          [&names, &to](const std::vector<std::string>& texts) {
            to.clear();
            for (const std::string& text : texts) {
              for (const auto& [name, value] : names) {
                if (name == text) to.push_back(value);
              }
            }
          },
          description)
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(names_in(names)));
}

struct ReplayCommand {
  std::string trace;
  std::string json;
  std::string record_ids;
  ReplayOptions options;
};

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
  app.add_option_function<std::string>(
         "--plane-kind",
         [&grid](const std::string& text) {
           grid.plane_kind = text == "gaussian" ? PlaneKind::kGaussian : PlaneKind::kOrthogonal;
         },
         "Kind of hyperplanes (default: gaussian for collisions, orthogonal for norm_aware)")
      ->check(CLI::IsMember(names_in(kPlaneKindNames)));
  app.add_option("--planes-per-table", grid.planes_per_table,
                 "P of the collision estimators (default 10, hard_collision 2)");
  app.add_option("--tables", grid.tables,
                 "L of the collision estimators (default 60, hard_collision 300)");
  add_named_list(
      app, "--rule", kRuleNames, grid.rules,
      "Which tokens are taken by their scores (default: priority with norm_aware, else top_k)");
  add_named_list(app, "--code", kCodeNames, grid.codes,
                 "How bits are made from a key (default: scalar with norm_aware, else sign)");
  app.add_option("--bits", grid.bits,
                 "Bits of a key of norm_aware (default 256, or the next multiple of head_dim)")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--error-target", grid.error_target,
                 "Of priority: the standard error of the softmax denominator that is aimed at; 0: "
                 "none")
      ->capture_default_str();
  app.add_option("--coarse-bits", grid.coarse_bits,
                 "Of priority over a scalar code: bits of a coordinate that are read of every "
                 "token; 0: all")
      ->capture_default_str();
  app.add_option("--candidates", grid.candidates,
                 "With --coarse-bits: tokens over k whose whole code is read")
      ->capture_default_str();
  CLI::Option* preset = app.add_option_function<std::string>(
                               "--preset", [&grid](const std::string&) { grid.set_socket(); },
                               "socket: the method of the SOCKET paper")
                            ->check(CLI::IsMember({"socket"}));
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
  app.add_option("--k", grid.top_ks, "Select k tokens, instead of --sparsity")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->excludes(sparsity);
  app.add_option("--sink", grid.sink, "First tokens, always attended")->capture_default_str();
  app.add_option("--window", grid.window, "Last tokens, always attended")->capture_default_str();
  app.add_option("--seed", grid.seed, "Seed of the hyperplanes")->capture_default_str();
  app.add_option("--steps", command.options.steps,
                 "Steps to replay, evenly spread over the trace; 0: all")
      ->capture_default_str();
  app.add_option("--first-step", command.options.first_step, "First step that is replayed")
      ->capture_default_str();
  app.add_option("--json", command.json,
                 "Write the report, with every layer, to this file; -: standard output");
  app.add_option(
      "--record-ids", command.record_ids,
      "Write the tokens that each step selects to this safetensors file, for one selector");
}

void add_calibrate(CLI::App& program, CalibrateCommand& command) {
  CLI::App& app = *program.add_subcommand(
      "calibrate",
      "Measure how fast this machine's GPU gathers rows from host memory, by how the memory is "
      "obtained, and keep the answer for MemoryConfig::calibration_file");
  app.add_option("--region", command.options.region_bytes,
                 "Memory to spread the rows over, such as 8G or 512M (default 8G)")
      ->transform(CLI::AsSizeValue(false));
  add_named_list(app, "--allocation", kHostAllocationNames, command.options.allocations,
                 "Ways to obtain memory (default all)");
  add_named(app, "--backend", kBackendNames, command.options.backend,
            "Where gathers run (default cuda)");
  app.add_option("--pin-threads", command.options.pin_threads,
                 "Threads that touch the memory; 0: all")
      ->capture_default_str();
  app.add_option("--output", command.output,
                 "File to write (default $XDG_CONFIG_HOME/kvtier/calibration, or "
                 "~/.config/kvtier/calibration)");
}

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

void run_replay(ReplayCommand& command, const Console& console) {
  JsonReport json(command.json, console);
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
    const std::size_t selectors = command.options.grid.expand().size();
    if (selectors != 1) {
      throw Error(ErrorCode::kInvalidArgument,
                  "--record-ids: expected one selector, such as --estimator norm_aware --sparsity "
                  "33, found " +
                      std::to_string(selectors));
    }
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

struct ManualCommand {
  std::string shell;
  std::string command;
};

void add_manual(CLI::App& program, ManualCommand& command) {
  program.add_subcommand("completion", "Print a script that completes this program's command line")
      ->add_option("SHELL", command.shell, "Shell that runs the script")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  program.add_subcommand("man", "Print the manual page of this program or of one of its commands")
      ->add_option("COMMAND", command.command, "Command (default: the program)");
}

std::string completion(const CommandText& program, const std::string& shell) {
  if (shell == "zsh") return zsh_completion(program);
  return shell == "fish" ? fish_completion(program) : bash_completion(program);
}

int run_program(std::vector<std::string> arguments, const Console& console) {
  CLI::App app("kvtier: long-context KV cache off the GPU", "kvtier");
  app.set_version_flag("--version", kVersion);
  app.require_subcommand(0, 1);  // `man serve`: serve is no second command
  std::string log_level = "warning";
  app.add_option("--log-level", log_level, "Messages of the library on stderr")
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}))
      ->capture_default_str();
  std::string log_format = "text";
  app.add_option("--log-format", log_format, "Of these messages: text, or a JSON object a line")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  ReplayCommand replay_command;
  add_replay(app, replay_command);
  ServeCommand serve_command;
  add_serve(app, serve_command);
  TopCommand top_command;
  add_top(app, top_command);
  StressCommand stress_command;
  add_stress(app, stress_command);
  CalibrateCommand calibrate_command;
  add_calibrate(app, calibrate_command);
  PlanCommand plan_command;
  add_plan(app, plan_command);
  ManualCommand manual_command;
  add_manual(app, manual_command);
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes the last one first
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return app.exit(error, console.out, console.err) == 0 ? 0 : kExitUsage;
  }
  if (app.get_subcommands().empty()) {
    console.err << "error: expected a subcommand, found none\n\n" << app.help();
    return kExitUsage;
  }
  if (app.got_subcommand("completion")) {
    console.out << completion(command_text(app), manual_command.shell);
    return 0;
  }
  if (app.got_subcommand("man")) {
    console.out << man_page(command_text(app), manual_command.command, kVersion);
    return 0;
  }
  if (app.got_subcommand("calibrate")) {
    run_calibrate(std::move(calibrate_command), console);
    return 0;
  }
  if (app.got_subcommand("plan")) {
    run_plan(plan_command, console);
    return 0;
  }
  if (app.got_subcommand("top")) {
    run_top(top_command, console);
    return 0;
  }
  Log log(console.err, log_level, log_format == "json" ? LogFormat::kJson : LogFormat::kText);
  if (app.got_subcommand("stress")) return run_stress(stress_command, console, log.library());
  if (app.got_subcommand("serve")) {
    return run_serve(serve_command, console, log);
  }
  replay_command.options.log = log.library();
  run_replay(replay_command, console);
  return 0;
}

}  // namespace

int run_cli(std::vector<std::string> arguments, const Console& console) {
  try {
    return run_program(std::move(arguments), console);
  } catch (const Error& error) {
    console.err << "error: " << error_code_name(error.code()) << ": " << error.what() << '\n';
  } catch (const std::exception& error) {
    console.err << "error: " << error_code_name(ErrorCode::kInternal) << ": " << error.what()
                << '\n';
  }
  return kExitError;
}

}  // namespace kvtier::services
