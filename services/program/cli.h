#pragma once

#include "services/console/console.h"

#include <string>
#include <vector>

namespace kvtier::services {

/// Runs the program `kvtier` with `arguments` (without the program's name). Returns its exit code:
/// 0, 1 after a `kvtier::Error`, printed as "error: CODE: message", 2 for a command line that is
/// not understood and for values and files that are refused (`with_errors_printed`), 130 after an
/// interruption. Keeps no state between calls.
[[nodiscard]] int run_cli(std::vector<std::string> arguments, const Console& console);

}  // namespace kvtier::services
