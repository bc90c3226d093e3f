#pragma once

#include "services/server/server.h"
#include "tests/services/core/core_fixture.h"
#include "tests/support/eventually.h"

#include <filesystem>
#include <memory>
#include <stdlib.h>
#include <string>

namespace kvtier::services::testing {

/// A real server in this process, on Unix sockets in a folder of its own.
class ServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  [[nodiscard]] std::string socket() const { return "unix:" + (folder_ / "kvtier.sock").string(); }
  [[nodiscard]] std::string admin_socket() const {
    return "unix:" + (folder_ / "admin.sock").string();
  }
  [[nodiscard]] ServerOptions options() const {
    ServerOptions options;
    options.core = small_options();
    options.data.attachments.token_life = kvtier::testing::kPatience;
    options.data.limits.attach_time = kvtier::testing::kPatience;
    options.listen = {parse_endpoint(socket())};
    options.admin = {parse_endpoint(admin_socket())};
    options.threads = 2;
    return options;
  }
  void start(ServerOptions options) { server_ = std::make_unique<Server>(std::move(options)); }
  void start() { start(options()); }
  /// Whether the last call gives back what it has counted: its task is destroyed after its reply.
  [[nodiscard]] bool gives_all_bytes_back() const {
    return kvtier::testing::eventually([&] { return server_->core().inflight_bytes() == 0; });
  }

  std::filesystem::path folder_;
  std::unique_ptr<Server> server_;
};

}  // namespace kvtier::services::testing
