#pragma once

#include "services/tools/manual/command_line.h"

#include <string>

namespace kvtier::services {

/// Returns a script that completes the subcommands and options of a program, and the values of
/// those that take one of a list. Other values complete as file names.
[[nodiscard]] std::string bash_completion(const CommandText& program);
[[nodiscard]] std::string zsh_completion(const CommandText& program);
[[nodiscard]] std::string fish_completion(const CommandText& program);

}  // namespace kvtier::services
