#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

/// What the machine has left.
namespace kvtier {

/// Returns the host memory that can be had without swapping: the kernel's estimate, or less where
/// a control group limits it. Files are looked up below `root`.
[[nodiscard]] inline std::optional<std::size_t> available_host_bytes(
    const std::filesystem::path& root = "/") {
  // The number that a file holds, or that follows `key` in it.
  const auto read_number = [](const std::filesystem::path& path,
                              const std::string& key = "") -> std::optional<std::size_t> {
    std::ifstream file(path);
    std::string word;
    while (!key.empty() && file >> word) {
      if (word == key) break;
    }
    std::size_t number = 0;
    if (file >> number) return number;
    return {};
  };
  const std::optional<std::size_t> kibibytes =
      read_number(root / "proc" / "meminfo", "MemAvailable:");
  std::optional<std::size_t> available;
  if (kibibytes) available = *kibibytes * 1024;
  const std::filesystem::path group = root / "sys" / "fs" / "cgroup";
  const auto limit = read_number(group / "memory.max");  // "max" is no number
  const auto used = read_number(group / "memory.current");
  if (!limit || !used) return available;
  const std::size_t cached = read_number(group / "memory.stat", "inactive_file").value_or(0);
  const std::size_t taken = *used - std::min(*used, cached);
  const std::size_t left = *limit - std::min(*limit, taken);
  return std::min(left, available.value_or(left));
}

}  // namespace kvtier
