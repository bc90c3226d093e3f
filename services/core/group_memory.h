#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace kvtier::services {

/// Memory of a control group.
struct GroupMemory {
  /// From half of the limit on without cached files that are not in use, which it gives back.
  std::uint64_t used = 0;
  std::uint64_t limit = 0;
};

/// Where the kernel publishes control groups.
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
/// kernel would end it. A refusal stands for `kRefusalTime`: while there is no room, callers that
/// hold locks ask for every page. Thread-safe if `read` and `now` are.
class MemoryRoom {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Read = std::function<std::vector<GroupMemory>()>;
  using Now = std::function<TimePoint()>;
  /// Shares of each limit up to which memory is taken.
  static constexpr double kPagesShare = 0.90, kSessionsShare = 0.95;
  static constexpr std::chrono::milliseconds kRefusalTime{100};

  /// Without `read` there is always room.
  explicit MemoryRoom(Read read = nullptr, Now now = &std::chrono::steady_clock::now)
      : read_(std::move(read)), now_(std::move(now)) {}

  /// Returns whether `bytes` more may be taken.
  [[nodiscard]] bool has(MemoryUse use, std::uint64_t bytes);

 private:
  struct Refusal {
    TimePoint end{};
    std::uint64_t bytes = 0;  ///< As many, or more, are refused until then.
  };

  const Read read_;
  const Now now_;
  std::mutex mutex_;                   ///< Guards all below.
  std::array<Refusal, 2> refusals_{};  ///< By use.
};

}  // namespace kvtier::services
