#include "kvtier/error.h"

#include "services/tools/top/top.h"

#include <CLI/CLI.hpp>

namespace kvtier::services {

void add_top(CLI::App& program, TopCommand& /*command*/) {
  program.add_subcommand("top", "Not in this build")->allow_extras();
}

void run_top(const TopCommand& /*command*/, const Console& /*console*/) {
  throw Error(ErrorCode::kUnimplemented,
              "top: expected a build with KVTIER_BUILD_SERVER=ON, found one without");
}

}  // namespace kvtier::services
