#pragma once

#include "kvtier/error.h"

#include <exception>
#include <iostream>

namespace kvtier::quality {

/// What `main` of a program here does: returns the exit code of `run`, or 1 after an error, printed
/// as "error: CODE: message".
inline int run_program(int (*run)(int argc, char** argv), int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    std::cerr << "error: " << error_code_name(error.code()) << ": " << error.what() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
  }
  return 1;
}

}  // namespace kvtier::quality
