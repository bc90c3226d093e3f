#pragma once

#include "services/console/console.h"

#include <string>

namespace CLI {
class App;
}

namespace kvtier::services {

/// The subcommands `completion` and `man`.
struct ManualCommand {
  std::string shell;
  std::string command;
};

/// Adds the subcommands to a program.
void add_manual(CLI::App& program, ManualCommand& command);

/// Writes the script that was asked for.
void run_completion(const CLI::App& program, const ManualCommand& command, const Console& console);

/// Writes the page that was asked for. Throws as `man_page`.
void run_man(const CLI::App& program, const ManualCommand& command, const std::string& version,
             const Console& console);

}  // namespace kvtier::services
