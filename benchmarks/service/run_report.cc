#include "benchmarks/service/run_report.h"

#include "formats/atomic_file.h"

#include <array>
#include <ctime>
#include <fstream>
#include <iostream>
#include <thread>

namespace kvtier::bench {
namespace {

std::string processor() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::array<char, 16> date{};
  std::strftime(date.data(), date.size(), "%Y-%m-%d", std::gmtime(&now));
  return date.data();
}

double load() {
  double average = 0;
  std::ifstream("/proc/loadavg") >> average;
  return average;
}

}  // namespace

RunReport::RunReport(const std::string& program, int argc, char** argv) {
  std::string command = program;
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  report_ = {{"date", today()},
             {"command", command},
             {"hardware",
              processor() + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores"},
             {"load_at_start", load()},
             {"rows", nlohmann::json::array()}};
}

void RunReport::add(const nlohmann::json& rows) {
  for (const auto& row : rows) {
    std::cerr << row.dump() << std::endl;
    report_["rows"].push_back(row);
  }
}

void RunReport::write(const std::string& path) {
  report_["load_at_end"] = load();
  if (path.empty()) {
    std::cout << report_.dump(1) << '\n';
    return;
  }
  formats::AtomicFile(path).commit(report_.dump(1) + "\n");
}

}  // namespace kvtier::bench
