#include "benchmarks/quality/origin.h"

#include "services/evaluation/threads.h"

#include <array>
#include <cmath>
#include <ctime>
#include <fstream>

namespace kvtier::quality {

std::string command_line(const char* program, int argc, char** argv) {
  std::string line = program;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool quoted = argument.find(' ') != std::string::npos;
    line += quoted ? " '" + argument + "'" : " " + argument;
  }
  return line;
}

std::string this_machine() {
  std::ifstream file("/proc/cpuinfo");
  std::string name = "unknown CPU";
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    name = line.substr(line.find(':') + 2);
    break;
  }
  return name + ", " + std::to_string(services::num_threads()) + " threads";
}

nlohmann::json origin(const std::string& hardware, const std::string& command) {
  const std::time_t now = std::time(nullptr);
  std::array<char, 16> date{};
  std::strftime(date.data(), date.size(), "%Y-%m-%d", std::gmtime(&now));
  return {{"date", date.data()}, {"hardware", hardware}, {"command", command}, {"backend", "cpu"}};
}

}  // namespace kvtier::quality
