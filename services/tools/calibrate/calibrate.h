#pragma once

#include "kvtier/calibration.h"

#include "services/console/console.h"

#include <filesystem>
#include <string>

namespace CLI {
class App;
}

namespace kvtier::services {

/// The subcommand `calibrate`.
struct CalibrateCommand {
  CalibrationOptions options;
  std::string output;  ///< Empty: `default_calibration_path()`.
};

/// Adds the subcommand and its options to a program.
void add_calibrate(CLI::App& program, CalibrateCommand& command);

/// Returns kvtier/calibration under $XDG_CONFIG_HOME when that is an absolute path, else under
/// $HOME/.config. Throws `kInvalidArgument` where neither is set.
[[nodiscard]] std::filesystem::path default_calibration_path();

/// Measures, prints the table, and writes the file, whose folder is made when it is not there. The
/// file is opened first, so that no measurement is made for a place that cannot be written.
void run_calibrate(CalibrateCommand command, const Console& console);

}  // namespace kvtier::services
