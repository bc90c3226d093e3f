#pragma once

#include "services/console/console.h"

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace kvtier::services {

/// One option or positional argument of a command, as completions and manual pages need it.
struct OptionText {
  std::vector<std::string> flags;   ///< "-h", "--help"; empty: positional.
  std::string name;                 ///< Of a positional argument.
  std::string description;          ///< One line.
  std::string type;                 ///< "INT", "TEXT"; empty: takes no value.
  std::vector<std::string> values;  ///< All that it takes, when that is a list.
  std::string range;                ///< Of a number, "1 to 9", or empty.
  std::string environment;          ///< Variable that sets it, or empty.
  std::string default_value;        ///< As `--help` has it, or empty.
  bool required = false;
};

/// A program, or one of its subcommands.
struct CommandText {
  std::string name;
  std::string description;
  std::vector<OptionText> options;
  std::vector<CommandText> commands;
};

/// Reads the command line that `app` accepts, with all subcommands.
[[nodiscard]] CommandText command_text(const CLI::App& app);

/// Returns the manual page (section 1, in roff) of a program, or of its subcommand `command` when
/// that is not empty; throws `kNotFound` for one that it has not. `version`: "kvtier 0.1.0".
[[nodiscard]] std::string man_page(const CommandText& program, const std::string& command,
                                   const std::string& version);

/// Returns a script that completes the subcommands and options of a program, and the values of
/// those that take one of a list. Other values complete as file names.
[[nodiscard]] std::string bash_completion(const CommandText& program);
[[nodiscard]] std::string zsh_completion(const CommandText& program);
[[nodiscard]] std::string fish_completion(const CommandText& program);

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
