#pragma once

#include "kvtier/calibration.h"

#include "transfer/device/device.h"

namespace kvtier::runtime {

/// `kvtier::calibrate` on a device of the caller's.
[[nodiscard]] Calibration calibrate(transfer::Device& device, const CalibrationOptions& options);

/// Returns the allocation to prefer: of those that come within a twentieth of the best rate at
/// 16,384 rows, the one that was obtained soonest. At least one entry is measured.
[[nodiscard]] HostAllocation best_allocation(const std::vector<CalibrationEntry>& entries);

}  // namespace kvtier::runtime
