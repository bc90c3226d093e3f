#include "services/program/cli.h"

#include "kvtier/error.h"

#include "services/console/command_line.h"
#include "services/console/log.h"
#include "services/console/options.h"
#include "services/serve/serve.h"
#include "services/tools/calibrate/calibrate.h"
#include "services/tools/manual/manual.h"
#include "services/tools/plan/plan.h"
#include "services/tools/replay/replay.h"
#include "services/tools/stress/stress.h"
#include "services/tools/top/top.h"

#include <CLI/CLI.hpp>

#include <utility>

namespace kvtier::services {
namespace {

constexpr const char* kVersion = "kvtier " KVTIER_VERSION;

/// Returns `code` once all output is written. Throws `kUnavailable` where it cannot be.
int written(int code, const Console& console) {
  if (console.out.flush()) return code;
  throw Error(ErrorCode::kUnavailable, "standard output: cannot be written");
}

int run_program(std::vector<std::string> arguments, const Console& console) {
  CLI::App app("kvtier: long-context KV cache off the GPU", "kvtier");
  app.set_version_flag("--version", kVersion);
  app.fallthrough();  // `serve --log-level debug`: commands inherit it
  std::string log_level = "warning";
  app.add_option("--log-level", log_level, "Messages of the library on stderr")
      ->check(one_of({"debug", "info", "warning", "error", "off"}))
      ->capture_default_str();
  std::string log_format = "text";
  app.add_option("--log-format", log_format, "Of these messages: text, or a JSON object a line")
      ->check(one_of({"text", "json"}))
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
  if (const auto code = parse_command_line(app, std::move(arguments), console)) {
    return written(*code, console);
  }
  Log log(console.err, log_level, log_format == "json" ? LogFormat::kJson : LogFormat::kText);
  replay_command.options.log = log.library();
  // Its addresses on standard output are no result: it serves without a reader of them.
  if (app.got_subcommand("serve")) return run_serve(serve_command, console, log);
  int code = 0;
  if (app.got_subcommand("stress")) code = run_stress(stress_command, console, log.library());
  if (app.got_subcommand("completion")) run_completion(app, manual_command, console);
  if (app.got_subcommand("man")) run_man(app, manual_command, kVersion, console);
  if (app.got_subcommand("calibrate")) run_calibrate(std::move(calibrate_command), console);
  if (app.got_subcommand("plan")) code = run_plan(plan_command, console);
  if (app.got_subcommand("top")) run_top(top_command, console);
  if (app.got_subcommand("replay")) run_replay(replay_command, console);
  return written(code, console);
}

}  // namespace

int run_cli(std::vector<std::string> arguments, const Console& console) {
  return with_errors_printed(console.err,
                             [&] { return run_program(std::move(arguments), console); });
}

}  // namespace kvtier::services
