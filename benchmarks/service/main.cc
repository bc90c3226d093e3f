#include "benchmarks/service/benchmarks.h"

#include <CLI/CLI.hpp>

#include <array>
#include <ctime>
#include <fstream>
#include <functional>
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
  CLI::App app("Compares the paths of kvtier serve with what they are to be held against");
  Settings settings;
  std::string output;
  std::size_t mib = 256;
  std::vector<std::string> wanted;
  app.add_option("--rounds", settings.rounds, "Of each comparison")->check(CLI::Range(1, 1000));
  app.add_option("--pages-mib", mib, "Pages stored")->check(CLI::Range(64, 1 << 16));
  app.add_option("--model", settings.model, "Folder of needle-llama's model");
  app.add_option("--tokens", settings.tokens, "Context of the decoder's steps")
      ->check(CLI::Range(1024, 16000));
  app.add_option("--only", wanted,
                 "wakeups, pages, redis, streams, calls, overload, decode (default: all)")
      ->delimiter(',');
  app.add_option("--out", output, "File for the report (default: standard output)");
  CLI11_PARSE(app, argc, argv);

  std::string command = "kvtier-service-bench";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  nlohmann::json report{
      {"date", today()},
      {"command", command},
      {"hardware",
       processor() + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores"},
      {"load_at_start", load()},
      {"rows", nlohmann::json::array()}};
  // First of all: it forks.
  const ServerProcess server(mib << 20);
  using Rows = nlohmann::json (*)(const ServerProcess&, const Settings&);
  const std::vector<std::pair<std::string, Rows>> groups{
      {"wakeups", &wakeup_rows}, {"pages", &page_rows},        {"streams", &stream_rows},
      {"calls", &call_rows},     {"overload", &overload_rows}, {"decode", &decode_rows},
      {"redis", &redis_rows}};
  for (const auto& [name, rows] : groups) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) continue;
    try {
      for (const auto& row : rows(server, settings)) {
        std::cerr << row.dump() << std::endl;
        report["rows"].push_back(row);
      }
    } catch (const std::exception& error) {
      std::cerr << name << ": " << error.what() << std::endl;
      report["rows"].push_back({{"what", name}, {"error", error.what()}});
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

int main(int argc, char** argv) { return kvtier::bench::run(argc, argv); }
