#pragma once

#include "services/console/console.h"
#include "services/tools/stress/options.h"

#include <functional>
#include <string>
#include <string_view>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace kvtier::services {

/// The subcommand `stress`.
struct StressCommand {
  std::string json;
  StressOptions options;
};

/// Adds --preset, which every command has that takes a shape.
CLI::Option* add_preset(CLI::App& app, StressOptions& options);

/// Adds the subcommand and its options to a program.
void add_stress(CLI::App& program, StressCommand& command);

/// Runs it. Returns the exit code: 0, or 130 after SIGINT or SIGTERM, when what was measured until
/// then has been written. Throws what `StressRun` and `AtomicFile` throw.
[[nodiscard]] int run_stress(const StressCommand& command, const Console& console,
                             const std::function<void(LogLevel, std::string_view)>& log);

}  // namespace kvtier::services
