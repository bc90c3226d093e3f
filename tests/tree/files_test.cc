#include "kvtier/version.h"

#include "tests/tree/source_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace kvtier::testing {
namespace {

namespace fs = std::filesystem;

/// A folder that disappears with the test.
class TemporaryTree {
 public:
  TemporaryTree() {
    std::string pattern = (fs::temp_directory_path() / "kvtier-tree-XXXXXX").string();
    root_ = ::mkdtemp(pattern.data());
  }
  TemporaryTree(const TemporaryTree&) = delete;  // one owner of the folder
  TemporaryTree& operator=(const TemporaryTree&) = delete;
  ~TemporaryTree() { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  [[nodiscard]] const fs::path& root() const { return root_; }

 private:
  fs::path root_;
};

TEST(SourceTree, ReadsTheWantedExtensionsAndSkipsHiddenAndGeneratedFolders) {
  const TemporaryTree tree;
  tree.write("scoring/b.cc", "one\ntwo\n");
  tree.write("scoring/a.h", "one\n");
  tree.write("scoring/notes.md", "one\n");
  tree.write("scoring/.hidden/c.cc", "one\n");
  tree.write("scoring/build/d.cc", "one\n");

  const auto files = read_tree(tree.root(), {"scoring", "absent"}, {".h", ".cc"});

  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[0].path, "scoring/a.h");
  EXPECT_EQ(files[1].path, "scoring/b.cc");
  EXPECT_THAT(files[1].lines, ::testing::ElementsAre("one", "two"));
}

TEST(Files, EveryHeaderIsGuardedByPragmaOnce) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  const auto headers = read_tree(source_root(), source_folders(), {".h", ".cuh"});

  EXPECT_GT(headers.size(), 40U);
  for (const SourceFile& file : headers) {
    if (file.path == "include/kvtier/kvtier.h") continue;  // C, guarded by a macro
    EXPECT_THAT(file.lines, ::testing::Contains("#pragma once")) << file.path;
  }
}

bool reads_the_clock_of_the_wall(const std::string& line) {
  const char* const names[] = {"system_clock",  "high_resolution_clock", "CLOCK_REALTIME",
                               "gettimeofday(", "time(nullptr)",         "time.time(",
                               "datetime"};
  return std::ranges::any_of(
      names, [&line](const char* name) { return line.find(name) != std::string::npos; });
}

TEST(Files, ReadTheClockOfTheWallToShowItAndForNothingElse) {
  EXPECT_TRUE(reads_the_clock_of_the_wall("  const auto end = std::chrono::system_clock::now();"));
  EXPECT_FALSE(reads_the_clock_of_the_wall("  const auto end = std::chrono::steady_clock::now();"));
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  const std::set<std::string> shown{"examples/llama/report.cc", "services/console/log.cc",
                                    "services/console/log.h", "services/metrics/status.cc",
                                    "services/tools/top/top_frame.cc"};
  std::vector<std::string> folders = source_folders();
  std::erase(folders, "tests");
  std::erase(folders, "benchmarks");
  folders.emplace_back("python/kvtier");
  std::vector<std::string> extensions = source_extensions();
  extensions.emplace_back(".py");
  std::set<std::string> found;
  for (const SourceFile& file : read_tree(source_root(), folders, extensions)) {
    if (std::ranges::any_of(file.lines, reads_the_clock_of_the_wall)) found.insert(file.path);
  }
  EXPECT_EQ(found, shown);
}

TEST(Files, VersionIsTheSameInHeaderAndBuild) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  const auto lines = read_source(source_root(), "CMakeLists.txt").lines;

  EXPECT_THAT(lines, ::testing::Contains(::testing::HasSubstr("VERSION " KVTIER_VERSION " ")));
}

}  // namespace
}  // namespace kvtier::testing
