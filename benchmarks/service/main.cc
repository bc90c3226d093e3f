#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/run_report.h"
#include "services/console/command_line.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <exception>
#include <iostream>

namespace kvtier::bench {
namespace {

int run(int argc, char** argv) {
  CLI::App app("Compares the paths of kvtier serve with what they are to be held against",
               "kvtier-service-bench");
  Settings settings;
  std::string output;
  std::size_t mib = 256;
  std::vector<std::string> wanted;
  app.add_option("--rounds", settings.rounds, "Of each comparison")
      ->check(services::between(1, 1000));
  app.add_option("--pages-mib", mib, "Pages stored")->check(services::between(64, 1 << 16));
  app.add_option("--model", settings.model, "Folder of needle-llama's model");
  app.add_option("--tokens", settings.tokens, "Context of the decoder's steps")
      ->check(services::between(1024, 16000));
  app.add_option("--only", wanted, "Comparisons (default: all)")
      ->delimiter(',')
      ->check(services::one_of(
          {"wakeups", "isolation", "pages", "redis", "streams", "calls", "overload", "decode"}));
  app.add_option("--out", output, "File for the report (default: standard output)");
  if (const auto code =
          services::parse_arguments(app, {argv + 1, argv + argc}, {std::cout, std::cerr})) {
    return *code;
  }

  RunReport report("kvtier-service-bench", argc, argv);
  // First of all: it forks.
  const ServerProcess server(mib << 20);
  using Rows = nlohmann::json (*)(const ServerProcess&, const Settings&);
  const std::vector<std::pair<std::string, Rows>> groups{
      {"wakeups", &wakeup_rows}, {"isolation", &isolation_rows}, {"pages", &page_rows},
      {"streams", &stream_rows}, {"calls", &call_rows},          {"overload", &overload_rows},
      {"decode", &decode_rows},  {"redis", &redis_rows}};
  for (const auto& [name, rows] : groups) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) continue;
    try {
      report.add(rows(server, settings));
    } catch (const std::exception& error) {
      report.add(nlohmann::json::array({{{"what", name}, {"error", error.what()}}}));
    }
  }
  report.write(output);
  return 0;
}

}  // namespace
}  // namespace kvtier::bench

int main(int argc, char** argv) {
  return kvtier::services::with_errors_printed(std::cerr,
                                               [&] { return kvtier::bench::run(argc, argv); });
}
