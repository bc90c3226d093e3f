#pragma once

#include "services/console/json_report.h"

#include <nlohmann/json.hpp>

#include <string>

namespace kvtier::quality {

/// Returns the command line as one would type it.
[[nodiscard]] std::string command_line(const char* program, int argc, char** argv);

/// Returns the name of the CPU and its threads.
[[nodiscard]] std::string this_machine();

/// Returns what every report says of itself: date, hardware and command.
[[nodiscard]] nlohmann::json origin(const std::string& hardware, const std::string& command);

using services::number;

}  // namespace kvtier::quality
