#include "services/metrics/process_stats.h"

#include <dirent.h>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <sys/resource.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

/// Fields of /proc/self/stat from the third, the state, on; the second may contain anything.
std::vector<std::string> stat_fields() {
  std::ifstream in("/proc/self/stat");
  const std::string text(std::istreambuf_iterator<char>(in), {});
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream rest(text.substr(name_end + 1));
  return {std::istream_iterator<std::string>(rest), {}};
}

/// Seconds since 1970 at which the machine started; 0 when it is not known.
double boot_time() {
  std::ifstream in("/proc/stat");
  std::string key;
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    double seconds = 0;
    if (fields >> key && key == "btime" && fields >> seconds) return seconds;
  }
  return 0;
}

double open_descriptors() {
  DIR* folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  double count = -3;  // ".", ".." and the folder itself
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

}  // namespace

void add_process_stats(Families& families) {
  // Counted from the state, field 3 of proc(5).
  constexpr std::size_t kUserTime = 11, kSystemTime = 12, kThreads = 17, kStartTime = 19,
                        kVirtualBytes = 20, kResidentPages = 21;
  static const double boot = boot_time();
  const std::vector<std::string> fields = stat_fields();
  const auto number = [&fields](std::size_t index) {
    return index < fields.size() ? std::stod(fields[index]) : 0.0;
  };
  const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
  families.counter("process_cpu_seconds_total", "Processor time, user and system.",
                   (number(kUserTime) + number(kSystemTime)) / ticks);
  families.gauge("process_start_time_seconds", "When the process started, since 1970.",
                 boot + number(kStartTime) / ticks);
  families.gauge("process_resident_memory_bytes", "Memory that is resident.",
                 number(kResidentPages) * static_cast<double>(::sysconf(_SC_PAGESIZE)));
  families.gauge("process_virtual_memory_bytes", "Memory that is mapped.", number(kVirtualBytes));
  families.gauge("process_threads", "Threads.", number(kThreads));
  families.gauge("process_open_fds", "Open file descriptors.", open_descriptors());
  rlimit limit{};
  (void)::getrlimit(RLIMIT_NOFILE, &limit);
  families.gauge("process_max_fds", "File descriptors there may be.",
                 static_cast<double>(limit.rlim_cur));
}

}  // namespace kvtier::services
