#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <utility>
#include <vector>

namespace kvtier::services {

/// Memory of a control group.
struct GroupMemory {
  /// From half of the limit on without cached files that are not in use, which it gives back.
  std::uint64_t used = 0;
  std::uint64_t limit = 0;
};

/// Where the kernel tells of control groups.
struct GroupFiles {
  std::filesystem::path membership = "/proc/self/cgroup";
  std::filesystem::path root = "/sys/fs/cgroup";
};

/// Returns the memory of the control group of this process and of those around it, innermost first,
/// without those that have no limit. Of version 2 and of version 1.
[[nodiscard]] std::vector<GroupMemory> read_group_memory(const GroupFiles& files = {});

/// What wants memory. The first give way first: pages of the page cache make room for each other, a
/// session that is not opened is opened elsewhere.
enum class MemoryUse : std::uint8_t { kPages, kSessions };

/// Keeps a server from taking memory that one of its control groups does not have, for which the
/// kernel would end it. Thread-safe if `read` is.
class MemoryRoom {
 public:
  using Read = std::function<std::vector<GroupMemory>()>;
  /// Shares of each limit up to which memory is taken.
  static constexpr double kPagesShare = 0.90, kSessionsShare = 0.95;

  /// Without `read` there is always room.
  explicit MemoryRoom(Read read = nullptr) : read_(std::move(read)) {}

  /// Returns whether `bytes` more may be taken.
  [[nodiscard]] bool has(MemoryUse use, std::uint64_t bytes) const;

 private:
  const Read read_;
};

}  // namespace kvtier::services
