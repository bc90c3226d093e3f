#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace kvtier::bench {

/// How bytes are read: by what the file tier says of itself.
struct FioSettings {
  std::vector<std::filesystem::path> files;
  std::size_t block_bytes = 0;
  std::size_t total_bytes = 0;  ///< Read in all, in blocks at random places.
  std::size_t depth = 1;
  bool uring = true;  ///< With registered buffers; else one thread for each of `depth`.
  bool direct = true;
};

/// Runs fio and returns bytes per second. Throws `std::runtime_error` with what it said.
[[nodiscard]] double fio_read(const FioSettings& settings);
[[nodiscard]] std::string fio_version();

}  // namespace kvtier::bench
