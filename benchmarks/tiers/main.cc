#include "benchmarks/service/run_report.h"
#include "benchmarks/tiers/benchmarks.h"
#include "benchmarks/tiers/fio.h"
#include "services/console/command_line.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtier::bench {
namespace {

constexpr std::pair<std::string_view, void (*)(const TierSettings&, RunReport&)> kParts[] = {
    {"checksum", [](const TierSettings& s, RunReport& to) { to.add(checksum_rows(s)); }},
    {"file",
     [](const TierSettings& s, RunReport& to) {
       to.set("fio", fio_version());
       to.add(file_rows(s));
     }},
    {"oversubscription", add_oversubscription}};

int run(int argc, char** argv) {
  CLI::App app("Restores of pages beside fio's reads of the same disk, and what checksums cost",
               "kvtier-tier-bench");
  TierSettings settings;
  std::size_t mib = 1024;
  std::string output;
  std::vector<std::string> only;
  app.add_option("--folder", settings.folder, "On the disk that is measured")->required();
  app.add_option("--pages-mib", mib, "Pages stored, MiB")
      ->check(services::between(256, 1 << 20))
      ->capture_default_str();
  app.add_option("--rounds", settings.rounds, "Of each comparison")
      ->check(services::between(1, 1000))
      ->capture_default_str();
  app.add_option("--only", only, "Parts to measure (default all)")
      ->delimiter(',')
      ->check(services::one_of({"checksum", "file", "oversubscription"}));
  app.add_option("--out", output, "File for the report (default: standard output)");
  if (const auto code =
          services::parse_arguments(app, {argv + 1, argv + argc}, {std::cout, std::cerr})) {
    return *code;
  }
  settings.bytes = mib << 20U;

  RunReport report("kvtier-tier-bench", argc, argv);
  for (const auto& [name, add] : kParts) {
    if (only.empty() || std::ranges::count(only, name) > 0) add(settings, report);
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
