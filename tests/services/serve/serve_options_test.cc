#include "kvtier/error.h"

#include "services/console/log.h"
#include "services/serve/serve.h"
#include "services/server/server.h"

#include <CLI/CLI.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace kvtier::services {
namespace {

/// What `kvtier serve` makes of its options, short of serving.
class ServeOptionsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    ::setenv("XDG_RUNTIME_DIR", folder_.c_str(), 1);
  }
  void TearDown() override {
    ::unsetenv("XDG_RUNTIME_DIR");
    std::filesystem::remove_all(folder_);
  }

  MemoryConfig memory(const std::vector<std::string>& arguments) {
    CLI::App program;
    ServeCommand command;
    add_serve(program, command);
    std::vector<std::string> all(arguments.rbegin(), arguments.rend());  // as CLI11 takes them
    all.insert(all.end(), {"cpu", "--backend", "serve"});
    program.parse(all);
    std::optional<MemoryConfig> made;
    command.adjust = [&made](ServerOptions& options) {
      made = options.core.models.memory;
      throw Error(ErrorCode::kUnavailable, "no server is wanted");
    };
    std::ostringstream out;
    Log log(out, "error", LogFormat::kText);
    EXPECT_THROW((void)run_serve(command, {.out = out, .err = out}, log), Error);
    return made.value_or(MemoryConfig{});
  }

  std::filesystem::path folder_;
};

TEST_F(ServeOptionsTest, TakesThePolicyOfTheLibraryWhereNoneIsNamed) {
  const MemoryConfig made = memory({});

  EXPECT_EQ(made.row_cache_policy, MemoryConfig{}.row_cache_policy);
}

TEST_F(ServeOptionsTest, TakesPoliciesByTheirNames) {
  for (const auto& [name, policy] : {std::pair("clock", RowCachePolicy::kClock),
                                     {"lru", RowCachePolicy::kLru},
                                     {"score", RowCachePolicy::kScore}}) {
    EXPECT_EQ(memory({"--row-cache-policy", name}).row_cache_policy, policy) << name;
  }
}

TEST_F(ServeOptionsTest, RefusesAFileWithAnOptionThatHasNoValue) {
  const std::string file = (folder_ / "serve.toml").string();
  for (const std::string option : {"insecure-tcp", "max-models", "row-cache-policy"}) {
    for (const char* value : {"[[", "[]"}) {
      std::ofstream(file) << option << " = " << value << '\n';
      try {
        (void)memory({"--config", file});
        ADD_FAILURE() << option << " = " << value;
      } catch (const CLI::ValidationError& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr(option)) << value;
      }
    }
  }
}

TEST_F(ServeOptionsTest, TakesTheSizeOfAFolderThatTheFileNames) {
  const std::string file = (folder_ / "serve.toml").string();
  std::ofstream(file) << "disk-cache = \"" << (folder_ / "cache").string() << "\"\n";

  const MemoryConfig made = memory({"--disk-capacity-mib", "64", "--config", file});

  EXPECT_EQ(made.disk_cache_bytes, 64 * MiB);
}

TEST_F(ServeOptionsTest, TakesPoliciesFromTheEnvironmentAndFromTheFile) {
  const std::string file = (folder_ / "serve.toml").string();
  std::ofstream(file) << "row-cache-policy = \"lru\"\n";
  EXPECT_EQ(memory({"--config", file}).row_cache_policy, RowCachePolicy::kLru);
  ::setenv("KVTIER_ROW_CACHE_POLICY", "clock", 1);

  const MemoryConfig made = memory({"--config", file});

  ::unsetenv("KVTIER_ROW_CACHE_POLICY");
  EXPECT_EQ(made.row_cache_policy, RowCachePolicy::kClock);
}

}  // namespace
}  // namespace kvtier::services
