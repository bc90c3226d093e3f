#pragma once

#include "services/tools/manual/command_line.h"

#include <string>

namespace kvtier::services {

/// Returns the manual page (section 1, in roff) of a program, or of its subcommand `command` when
/// that is not empty; throws `kNotFound` for one that it has not. `version`: "kvtier 0.1.0".
[[nodiscard]] std::string man_page(const CommandText& program, const std::string& command,
                                   const std::string& version);

}  // namespace kvtier::services
