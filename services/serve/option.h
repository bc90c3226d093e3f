#pragma once

#include <CLI/CLI.hpp>

namespace kvtier::services {

/// Lets the environment give an option: "--max-models" is KVTIER_MAX_MODELS.
CLI::Option* with_environment(CLI::Option* option);

/// Refuses text of no characters, or with white space or control characters.
[[nodiscard]] CLI::Validator word();

}  // namespace kvtier::services
