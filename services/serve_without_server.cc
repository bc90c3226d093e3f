#include "kvtier/error.h"

#include "services/serve.h"

#include <CLI/CLI.hpp>

namespace kvtier::services {

void add_serve(CLI::App& program, ServeCommand& /*command*/) {
  program.add_subcommand("serve", "Not in this build")->allow_extras();
}

void run_serve(const ServeCommand& /*command*/, const Console& /*console*/,
               const std::function<void(LogLevel, std::string_view)>& /*log*/) {
  throw Error(ErrorCode::kUnimplemented,
              "serve: expected a build with KVTIER_BUILD_SERVER=ON, found one without");
}

}  // namespace kvtier::services
