#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace kvtier::testing {

/// Paths of /proc by which the segment files that a process has open below `folder` can be read
/// and written, although no folder names them any more.
inline std::vector<std::filesystem::path> open_segments(const std::filesystem::path& folder,
                                                        const std::string& process = "self") {
  namespace fs = std::filesystem;
  std::error_code missing;
  const std::string prefix = fs::weakly_canonical(folder, missing).string() + "/";
  const std::string suffix = ".segment (deleted)";
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator("/proc/" + process + "/fd")) {
    const std::string name = fs::read_symlink(entry.path(), missing).string();
    if (!missing && name.starts_with(prefix) && name.ends_with(suffix)) {
      found.push_back(entry.path());
    }
  }
  return found;
}

/// Returns how many segment files the folder, and those in it, still name.
inline std::ptrdiff_t named_segments(const std::filesystem::path& folder) {
  const std::filesystem::recursive_directory_iterator files(folder);
  return std::count_if(begin(files), end(files),
                       [](const auto& file) { return file.path().extension() == ".segment"; });
}

}  // namespace kvtier::testing
