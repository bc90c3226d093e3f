#pragma once

#include <ostream>

namespace kvtier::services {

/// How a program ends after an error, and after a command line or a value that it refuses.
inline constexpr int kExitError = 1;
inline constexpr int kExitUsage = 2;

/// Where a command writes.
struct Console {
  std::ostream& out;
  std::ostream& err;
  bool err_is_terminal = false;  ///< Progress is shown on `err` only then.
};

}  // namespace kvtier::services
