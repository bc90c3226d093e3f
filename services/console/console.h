#pragma once

#include <ostream>

namespace kvtier::services {

/// Where a command writes.
struct Console {
  std::ostream& out;
  std::ostream& err;
  bool err_is_terminal = false;  ///< Progress is shown on `err` only then.
};

}  // namespace kvtier::services
