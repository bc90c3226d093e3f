#pragma once

#include "kvtier/config.h"
#include "kvtier/export.h"

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

/// Measures how fast this machine's GPU gathers scattered rows from host memory, by how the memory
/// was obtained, and keeps the answer in a text file for `MemoryConfig::calibration_file`.
namespace kvtier {

/// Rows of 512 bytes that one gather of a calibration reads.
inline constexpr std::array<int, 3> kCalibrationRows{4096, 16384, 65536};

/// One way to obtain memory, measured or refused.
struct CalibrationEntry {
  HostAllocation allocation = HostAllocation::kRegistered;
  double obtain_seconds = 0.0;  ///< To obtain, touch and pin the region.
  /// Of gathers of `kCalibrationRows` rows that no earlier gather of the same size has read.
  std::array<double, kCalibrationRows.size()> gb_per_s{};
  std::string refused{};  ///< Why there is no measurement; empty when there is one.

  friend bool operator==(const CalibrationEntry&, const CalibrationEntry&) = default;
};

struct Calibration {
  std::string device{};  ///< As the library names it.
  std::size_t region_bytes = 0;
  HostAllocation best = HostAllocation::kRegistered;
  std::vector<CalibrationEntry> entries{};

  friend bool operator==(const Calibration&, const Calibration&) = default;
};

struct CalibrationOptions {
  Backend backend = Backend::kCuda;
  /// At least 64 MiB. Rates fall with the size of the region on machines where address translation
  /// is the limit: a size like the page pool's tells most.
  std::size_t region_bytes = 8 * GiB;
  /// To measure; empty: all, but `kManaged` only when the GPU has as much memory.
  std::vector<HostAllocation> allocations{};
  int pin_threads = 0;  ///< As in `MemoryConfig`.
  /// Called with each entry as it is known.
  std::function<void(const CalibrationEntry&)> progress{};
};

/// Measures each allocation in turn; the region is freed in between. Throws `kInvalidArgument` for
/// options that make no sense, `kUnimplemented` where the backend is not there,
/// `kResourceExhausted` when every allocation was refused.
///
/// ```cpp
/// const kvtier::Calibration found = kvtier::calibrate({.region_bytes = 4 * kvtier::GiB});
/// std::ofstream("calibration.txt") << kvtier::to_text(found);
/// ```
[[nodiscard]] KVTIER_EXPORT Calibration calibrate(const CalibrationOptions& options);

/// The name of an allocation in options and files: "auto", "managed", "registered", "driver".
[[nodiscard]] KVTIER_EXPORT std::string_view host_allocation_name(
    HostAllocation allocation) noexcept;

/// The text of a calibration file: lines `key: value`, `#` begins a comment.
[[nodiscard]] KVTIER_EXPORT std::string to_text(const Calibration& calibration);
/// Reads such a text; `name` stands for it in messages. Throws `kInvalidArgument` with the line,
/// expected and found.
[[nodiscard]] KVTIER_EXPORT Calibration parse_calibration(std::string_view text,
                                                          std::string_view name);
/// Reads such a file. Throws `kNotFound` when it cannot be read, and what `parse_calibration` does.
[[nodiscard]] KVTIER_EXPORT Calibration read_calibration(const std::string& path);

}  // namespace kvtier
