#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <filesystem>

namespace kvtier::bench {

struct TierSettings {
  std::filesystem::path
      folder;             ///< On the disk that is measured; a folder in it is made and removed.
  std::size_t bytes = 0;  ///< Of pages, in all.
  int rounds = 5;
};

/// The file tier's reads beside fio's of the same files with the same settings, and the pages that
/// calls of an engine bring back from its disk cache.
[[nodiscard]] nlohmann::json file_rows(const TierSettings& settings);
/// Steps of decoding over a disk cache, with page prefetch and without.
[[nodiscard]] nlohmann::json page_prefetch_rows(const TierSettings& settings);
/// What the checksum of a page costs when it is copied from host memory to host memory.
[[nodiscard]] nlohmann::json checksum_rows(const TierSettings& settings);

}  // namespace kvtier::bench
