#include "benchmarks/service/run_report.h"
#include "benchmarks/tiers/benchmarks.h"
#include "benchmarks/tiers/fio.h"

#include <CLI/CLI.hpp>

#include <exception>
#include <iostream>

namespace kvtier::bench {
namespace {

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

  RunReport report("kvtier-tier-bench", argc, argv);
  report.set("fio", fio_version());
  for (const auto rows : {&checksum_rows, &file_rows, &page_prefetch_rows})
    report.add(rows(settings));
  report.write(output);
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
