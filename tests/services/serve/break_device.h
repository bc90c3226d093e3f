#pragma once

namespace kvtier::services::testing {

/// Runs a kernel that traps on the current device: every later call of CUDA in this process fails.
void break_device();

/// Fills the current device with a kernel that runs for 20 s, and does not wait for it.
void occupy_device();

}  // namespace kvtier::services::testing
