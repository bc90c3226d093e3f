#include "kvtier/error.h"

#include "services/serve/serve.h"

#include <CLI/CLI.hpp>

namespace kvtier::services {

void add_serve(CLI::App& program, ServeCommand& /*command*/) {
  program.add_subcommand("serve", "Not in this build")->allow_extras();
}

int run_serve(const ServeCommand& /*command*/, const Console& /*console*/, Log& /*log*/) {
  throw Error(ErrorCode::kUnimplemented,
              "serve: expected a build with KVTIER_BUILD_SERVER=ON, found one without");
}

}  // namespace kvtier::services
