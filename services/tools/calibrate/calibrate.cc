#include "services/tools/calibrate/calibrate.h"

#include "kvtier/error.h"

#include "services/console/atomic_file.h"

#include <cstdlib>
#include <iomanip>
#include <sstream>
#include <system_error>

namespace kvtier::services {
namespace {

constexpr int kNameWidth = 12;
constexpr int kNumberWidth = 10;

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

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
  out << std::setw(kNumberWidth) << fixed(entry.obtain_seconds, 2) + " s";
  for (const double rate : entry.gb_per_s) out << std::setw(kNumberWidth) << fixed(rate, 1);
  out << '\n' << std::flush;
}

/// Makes the folder of a file.
void make_folder(const std::filesystem::path& file) {
  if (!file.has_parent_path()) return;
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  if (error) {
    throw Error(ErrorCode::kUnavailable,
                file.parent_path().string() +
                    ": expected a folder that can be made, found: " + error.message());
  }
}

}  // namespace

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
  make_folder(path);
  AtomicFile file(path);
  bool begun = false;
  command.options.progress = [&](const CalibrationEntry& entry) {
    if (!begun) write_head(console.out, command.options);
    begun = true;
    write_line(console.out, entry);
  };
  const Calibration calibration = calibrate(command.options);
  file.commit(to_text(calibration));
  console.out << calibration.device << ": " << host_allocation_name(calibration.best)
              << ", written to " << path.string() << '\n';
}

}  // namespace kvtier::services
