#include "services/core/group_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

namespace kvtier::services {
namespace {

namespace fs = std::filesystem;

/// Names of what a version calls the same.
struct Names {
  const char *limit, *used, *cached;
};
constexpr Names kVersion2{"memory.max", "memory.current", "inactive_file"};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
/// Version 1 says with a number near 2^63 that there is no limit.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;
/// Of the limit; below, all of what is used may count.
constexpr double kNearShare = 0.5;

/// The number in a file, or behind `key` in it; nothing for "max", and where there is none.
std::optional<std::uint64_t> number_in(const fs::path& file, const std::string& key = "") {
  std::ifstream in(file);
  std::string word;
  while (!key.empty() && word != key && in >> word) {
  }
  std::uint64_t number = 0;
  if (!(in >> number)) return std::nullopt;
  return number;
}

std::optional<GroupMemory> memory_of(const fs::path& group, const Names& names) {
  const std::optional<std::uint64_t> limit = number_in(group / names.limit);
  const std::optional<std::uint64_t> used = number_in(group / names.used);
  if (!limit || !used || *limit >= kNoLimit) return std::nullopt;
  GroupMemory memory{.used = *used, .limit = *limit};
  // Not asked for in vain: the kernel sums it up over all processors.
  if (static_cast<double>(memory.used) > kNearShare * static_cast<double>(memory.limit)) {
    memory.used -=
        std::min(memory.used, number_in(group / "memory.stat", names.cached).value_or(0));
  }
  return memory;
}

/// Appends the groups from `path` up to the root that have a limit. A container sees its own group
/// as the root, and may have a path that leads nowhere there.
void append_around(const fs::path& root, fs::path path, const Names& names,
                   std::vector<GroupMemory>& found) {
  for (path = path.relative_path();; path = path.parent_path()) {
    if (const auto memory = memory_of(root / path, names)) found.push_back(*memory);
    if (path.empty()) return;
  }
}

}  // namespace

std::vector<GroupMemory> read_group_memory(const GroupFiles& files) {
  std::ifstream in(files.membership);
  std::vector<GroupMemory> found;
  for (std::string line; std::getline(in, line);) {  // number:controllers:path
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const fs::path path = line.substr(second + 1);
    if (controllers == ",,") {
      append_around(files.root, path, kVersion2, found);
    } else if (controllers.find(",memory,") != std::string::npos) {
      append_around(files.root / "memory", path, kVersion1, found);
    }
  }
  return found;
}

bool MemoryRoom::has(MemoryUse use, std::uint64_t bytes) {
  if (!read_) return true;
  Refusal& refusal = refusals_[static_cast<std::size_t>(use)];
  const TimePoint now = now_();
  {
    const std::lock_guard lock(mutex_);
    if (now < refusal.end && bytes >= refusal.bytes) return false;
  }
  const double share = use == MemoryUse::kPages ? kPagesShare : kSessionsShare;
  const std::vector<GroupMemory> groups = read_();
  const bool fits = std::all_of(groups.begin(), groups.end(), [&](const GroupMemory& memory) {
    return static_cast<double>(memory.used) + static_cast<double>(bytes) <=
           share * static_cast<double>(memory.limit);
  });
  if (fits) return true;
  const std::lock_guard lock(mutex_);
  refusal = {.end = now + kRefusalTime, .bytes = bytes};
  return false;
}

}  // namespace kvtier::services
