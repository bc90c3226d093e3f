#pragma once

namespace kvtier::services::testing {

/// Runs a kernel that traps on the current device: every later call of CUDA in this process fails.
void break_device();

}  // namespace kvtier::services::testing
