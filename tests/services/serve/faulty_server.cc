// kvtier serve with a worker that loses its device on request: faulty_server ADDRESS FILE
// cpu|cuda|occupied. When an engine is made while FILE is there, FILE goes, and so does the device:
// by a kernel that traps on a GPU, or, occupied, by one that leaves no room for others; the CPU has
// none, and the engine says so.

#include "kvtier/error.h"

#include "services/console/log.h"
#include "services/program/cli.h"
#include "services/serve/serve.h"
#include "services/server/server.h"
#include "tests/services/serve/break_device.h"

#include <iostream>
#include <string>
#include <string_view>
#include <unistd.h>

int main(int argc, char** argv) {
  using namespace kvtier;
  using namespace kvtier::services;
  if (argc != 4) return 2;
  const bool occupies = std::string_view(argv[3]) == "occupied";
  const bool on_gpu = occupies || std::string_view(argv[3]) == "cuda";
  ServeCommand command;
  command.listen = {argv[1]};
  command.backend = on_gpu ? Backend::kCuda : Backend::kCpu;
  command.worker = true;
  if (occupies) command.device_timeout_seconds = 1;
  command.adjust = [=, file = std::string(argv[2])](ServerOptions& options) {
    options.core.models.log = [=](LogLevel /*level*/, std::string_view /*message*/) {
      if (::unlink(file.c_str()) != 0) return;
#if defined(KVTIER_WITH_CUDA)
      if (occupies) return kvtier::services::testing::occupy_device();
      if (on_gpu) return kvtier::services::testing::break_device();
#endif
      throw Error(ErrorCode::kInternal, "CUDA reports an illegal address");
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
