#include "benchmarks/tiers/benchmarks.h"
#include "benchmarks/tiers/fio.h"

#include <CLI/CLI.hpp>

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

int run(int argc, char** argv) {
  CLI::App app("Restores of pages beside fio's reads of the same disk, and what checksums cost");
  TierSettings settings;
  std::size_t mib = 1024;
  std::string output;
  app.add_option("--folder", settings.folder, "On the disk that is measured")->required();
  app.add_option("--pages-mib", mib, "Pages stored, MiB")
      ->check(CLI::Range(256, 1 << 20))
      ->capture_default_str();
  app.add_option("--rounds", settings.rounds, "Of each comparison")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--out", output, "File for the report (default: standard output)");
  CLI11_PARSE(app, argc, argv);
  settings.bytes = mib << 20U;

  std::string command = "kvtier-tier-bench";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  nlohmann::json report{
      {"date", today()},
      {"command", command},
      {"hardware",
       processor() + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores"},
      {"fio", fio_version()},
      {"load_at_start", load()},
      {"rows", nlohmann::json::array()}};
  for (const auto rows : {&checksum_rows, &file_rows}) {
    for (const auto& row : rows(settings)) {
      std::cerr << row.dump() << std::endl;
      report["rows"].push_back(row);
    }
  }
  report["load_at_end"] = load();
  if (output.empty()) {
    std::cout << report.dump(1) << '\n';
  } else {
    std::ofstream(output) << report.dump(1) << '\n';
  }
  return 0;
}

}  // namespace
}  // namespace kvtier::bench

int main(int argc, char** argv) {
  try {
    return kvtier::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "kvtier-tier-bench: " << error.what() << '\n';
    return 1;
  }
}
