#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace kvtier::testing {

/// A figure of /proc/self/status in KiB, such as RssAnon and VmHWM; 0 without it.
inline std::int64_t status_kib(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string key; file >> key;) {
    std::int64_t value = 0;
    if (key == name + ":" && file >> value) return value;
    file.clear();
    file.ignore(1 << 12, '\n');
  }
  return 0;
}

/// From now on VmHWM is the most since now. Returns whether the kernel does that.
inline bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << 5 << std::flush;
  return file.good();
}

}  // namespace kvtier::testing
