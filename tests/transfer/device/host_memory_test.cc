#include "include/types/host_memory.h"

#include "tests/services/evaluation/trace_fixture.h"

#include <filesystem>
#include <fstream>
#include <string>

namespace kvtier::services {
namespace {

class HostMemoryTest : public FolderTest {
 protected:
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(file(path).parent_path());
    std::ofstream(file(path)) << text;
  }
};

TEST_F(HostMemoryTest, IsWhatTheKernelEstimates) {
  EXPECT_FALSE(available_host_bytes(folder_).has_value());
  write("proc/meminfo", "MemTotal:  900 kB\nMemFree: 10 kB\nMemAvailable:    500 kB\n");

  EXPECT_EQ(available_host_bytes(folder_), 500U * 1024);
}

TEST_F(HostMemoryTest, IsLimitedByTheControlGroup) {
  write("proc/meminfo", "MemAvailable:    500 kB\n");
  write("sys/fs/cgroup/memory.current", "300000\n");
  write("sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(available_host_bytes(folder_), 500U * 1024);

  write("sys/fs/cgroup/memory.max", "400000\n");
  EXPECT_EQ(available_host_bytes(folder_), 100000U);
  write("sys/fs/cgroup/memory.stat", "anon 9\ninactive_file 50000\nslab 3\n");
  EXPECT_EQ(available_host_bytes(folder_), 150000U);
  write("sys/fs/cgroup/memory.max", "200000\n");
  EXPECT_EQ(available_host_bytes(folder_), 0U);
}

}  // namespace
}  // namespace kvtier::services
