#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <utility>

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

/// Returns the memory of the control group of this process, or of the one around it that has the
/// least room; nothing where none has a limit. Of version 2, else of version 1.
[[nodiscard]] std::optional<GroupMemory> read_group_memory(const GroupFiles& files = {});

/// What wants memory. The first give way first: pages of the page cache make room for each other, a
/// session that is not opened is opened elsewhere.
enum class MemoryUse : std::uint8_t { kPages, kSessions };

/// Keeps a server from taking memory that its control group does not have, for which the kernel
/// would end it. Thread-safe if `read` is.
class MemoryRoom {
 public:
  using Read = std::function<std::optional<GroupMemory>()>;
  /// Shares of the limit up to which memory is taken.
  static constexpr double kPagesShare = 0.90, kSessionsShare = 0.95;

  /// Without `read` there is always room.
  explicit MemoryRoom(Read read = nullptr) : read_(std::move(read)) {}

  /// Returns whether `bytes` more may be taken.
  [[nodiscard]] bool has(MemoryUse use, std::uint64_t bytes) const;

 private:
  const Read read_;
};

}  // namespace kvtier::services
