// kvtier serve with a worker that loses its device when told to: faulty_server ADDRESS FILE. The
// next engine that is made while FILE is there is not made, and FILE goes.

#include "kvtier/error.h"

#include "services/cli.h"
#include "services/log.h"
#include "services/serve.h"
#include "services/server/server.h"

#include <iostream>
#include <string>
#include <string_view>
#include <unistd.h>

int main(int argc, char** argv) {
  using namespace kvtier;
  using namespace kvtier::services;
  if (argc != 3) return 2;
  ServeCommand command;
  command.listen = {argv[1]};
  command.backend = Backend::kCpu;
  command.worker = true;
  command.adjust = [file = std::string(argv[2])](ServerOptions& options) {
    options.core.models.log = [file](LogLevel /*level*/, std::string_view /*message*/) {
      if (::unlink(file.c_str()) == 0) {
        throw Error(ErrorCode::kInternal, "CUDA reports an illegal address");
      }
    };
  };
  const Console console{.out = std::cout, .err = std::cerr};
  Log log(std::cerr, "info", LogFormat::kText);
  try {
    return run_serve(command, console, log);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
