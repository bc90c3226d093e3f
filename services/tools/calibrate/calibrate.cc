#include "services/tools/calibrate/calibrate.h"

#include "formats/atomic_file.h"
#include "include/types/failure.h"
#include "services/console/enum_names.h"
#include "services/console/options.h"
#include "services/console/text.h"

#include <CLI/CLI.hpp>

#include <cstdlib>
#include <iomanip>
#include <system_error>
#include <vector>

namespace kvtier::services {
namespace {

constexpr int kNameWidth = 12;
constexpr int kNumberWidth = 10;

void write_head(std::ostream& out, const CalibrationOptions& options) {
  out << "gathers of 512-byte rows from " << (options.region_bytes >> 20)
      << " MiB, GB/s by rows a gather\n"
      << std::left << std::setw(kNameWidth) << "allocation" << std::right << std::setw(kNumberWidth)
      << "obtained";
  for (const int rows : kCalibrationRows) out << std::setw(kNumberWidth) << rows;
  out << '\n' << std::flush;
}

void write_line(std::ostream& out, const CalibrationEntry& entry) {
  out << std::left << std::setw(kNameWidth) << host_allocation_name(entry.allocation) << std::right;
  if (!entry.refused.empty()) {
    out << "  refused: " << entry.refused << '\n' << std::flush;
    return;
  }
  out << std::setw(kNumberWidth) << format("%.2f s", entry.obtain_seconds);
  for (const double rate : entry.gb_per_s) out << std::setw(kNumberWidth) << format("%.1f", rate);
  out << '\n' << std::flush;
}

/// The folder of a file, made where it is missing. What it has made goes again, unless it is kept.
class OutputFolder {
 public:
  explicit OutputFolder(const std::filesystem::path& file) {
    const std::filesystem::path folder = file.parent_path();
    std::error_code error;
    for (auto at = folder; !at.empty() && !exists(at, error); at = at.parent_path()) {
      made_.push_back(at);
    }
    if (folder.empty() || create_directories(folder, error) || !error) return;
    remove();
    throw_error(ErrorCode::kUnavailable, folder.string(),
                ": expected a folder that can be made, found: ", error.message());
  }
  OutputFolder(const OutputFolder&) = delete;  // removes once
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder() { remove(); }
  void keep() noexcept { made_.clear(); }

 private:
  void remove() const noexcept {
    std::error_code ignored;
    for (const auto& folder : made_) std::filesystem::remove(folder, ignored);  // if it is empty
  }

  std::vector<std::filesystem::path> made_;  ///< The innermost first.
};

}  // namespace

void add_calibrate(CLI::App& program, CalibrateCommand& command) {
  CLI::App& app = *program.add_subcommand(
      "calibrate",
      "Measure how fast this machine's GPU gathers rows from host memory, by how the memory is "
      "obtained, and keep the answer for MemoryConfig::calibration_file");
  add_bytes(app, "--region", command.options.region_bytes,
            "Memory to spread the rows over, such as 8G or 512M (default 8G)")
      ->check(CLI::Validator(
          [](const std::string& text) {
            constexpr std::int64_t kLeast = std::int64_t{64} << 20;
            return std::stoll(text) < kLeast ? "expected a size of at least 64M, found " + text
                                             : "";
          },
          ""));
  add_named_list(app, "--allocation", kHostAllocationNames, command.options.allocations,
                 "Ways to obtain memory (default all)");
  add_named(app, "--backend", kBackendNames, command.options.backend,
            "Where gathers run (default cuda)");
  app.add_option("--pin-threads", command.options.pin_threads,
                 "Threads that touch the memory; 0: all")
      ->capture_default_str();
  app.add_option("--output", command.output,
                 "File to write (default $XDG_CONFIG_HOME/kvtier/calibration, or "
                 "~/.config/kvtier/calibration)");
}

std::filesystem::path default_calibration_path() {
  constexpr const char* kFile = "kvtier/calibration";
  const char* const config = std::getenv("XDG_CONFIG_HOME");
  if (config != nullptr && std::filesystem::path(config).is_absolute()) {
    return std::filesystem::path(config) / kFile;
  }
  const char* const home = std::getenv("HOME");
  if (home != nullptr && *home != '\0') return std::filesystem::path(home) / ".config" / kFile;
  throw Error(ErrorCode::kInvalidArgument,
              "--output: expected a path, for neither XDG_CONFIG_HOME nor HOME is set, found none");
}

void run_calibrate(CalibrateCommand command, const Console& console) {
  const std::filesystem::path path =
      command.output.empty() ? default_calibration_path() : std::filesystem::path(command.output);
  OutputFolder folder(path);
  formats::AtomicFile file(path);
  bool begun = false;
  command.options.progress = [&](const CalibrationEntry& entry) {
    if (!begun) write_head(console.out, command.options);
    begun = true;
    write_line(console.out, entry);
  };
  const Calibration calibration = calibrate(command.options);
  file.commit(to_text(calibration));
  folder.keep();
  console.out << calibration.device << ": " << host_allocation_name(calibration.best)
              << ", written to " << path.string() << '\n';
}

}  // namespace kvtier::services
