#pragma once

#include "kvtier/client.h"

#include "tests/support/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace kvtier::services {

using kvtier::testing::Program;
using ::testing::HasSubstr;

/// Runs the program `kvtier serve`, with a folder of its own.
class ServeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(KVTIER_BINARY)) GTEST_SKIP() << "no build on this machine";
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  std::unique_ptr<Program> serve(std::vector<std::string> arguments,
                                 std::vector<std::string> environment = {},
                                 std::vector<std::string> before = {}) {
    before.insert(before.begin(), "kvtier");
    before.emplace_back("serve");
    arguments.insert(arguments.begin(), before.begin(), before.end());
    environment.push_back("XDG_RUNTIME_DIR=" + folder_.string());
    return std::make_unique<Program>(KVTIER_BINARY, arguments, environment, folder_ / "err");
  }
  std::string err() const {
    std::ostringstream text;
    text << std::ifstream(folder_ / "err").rdbuf();
    return text.str();
  }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }
  static RemoteSession open(Client& client) {
    RemoteSessionConfig config;
    config.model = {.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64};
    config.capacity_tokens = 256;
    return client.open(config);
  }

  std::filesystem::path folder_;
};

}  // namespace kvtier::services
