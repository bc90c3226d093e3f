#include "services/program/cli.h"

#include <iostream>
#include <string>
#include <unistd.h>
#include <vector>

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return kvtier::services::run_cli(
      arguments, {.out = std::cout, .err = std::cerr, .err_is_terminal = ::isatty(2) == 1});
}
