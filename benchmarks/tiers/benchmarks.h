#pragma once

#include "kvtier/config.h"

#include "benchmarks/service/run_report.h"

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
/// Adds tokens/s of sessions that are more than the host budget holds, over those of the same
/// sessions all in memory.
void add_oversubscription(const TierSettings& settings, RunReport& report);
/// What the checksum of a page costs when it is copied from host memory to host memory.
[[nodiscard]] nlohmann::json checksum_rows(const TierSettings& settings);

}  // namespace kvtier::bench
