#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace kvtier::services {

/// One option or positional argument of a command, as completions and manual pages need it.
struct OptionText {
  std::vector<std::string> flags;   ///< "-h", "--help"; empty: positional.
  std::string name;                 ///< Of a positional argument.
  std::string description;          ///< One line.
  std::string type;                 ///< "INT", "TEXT"; empty: takes no value.
  std::vector<std::string> values;  ///< All that it takes, when that is a list.
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

}  // namespace kvtier::services
