#pragma once

#include "tests/support/program.h"

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <openssl/crypto.h>
#include <string>
#include <unistd.h>
#include <vector>

namespace kvtier::services::testing {

/// Runs plane_client, whose last argument is optional, and kills it once it has done its work. It
/// is a program of its own: a fork of a process with threads may wait for ever for a lock that one
/// of them had.
inline void run_and_kill_client(const std::string& endpoint, const std::string& token,
                                std::vector<std::string> last = {}) {
  char* const hex = OPENSSL_buf2hexstr(reinterpret_cast<const unsigned char*>(token.data()),
                                       static_cast<long>(token.size()));
  std::vector<std::string> arguments{"plane_client", endpoint, hex};
  OPENSSL_free(hex);
  arguments.insert(arguments.end(), last.begin(), last.end());
  const std::string err =
      ::testing::TempDir() + "plane_client." + std::to_string(::getpid()) + ".err";
  kvtier::testing::Program client(KVTIER_PLANE_CLIENT, arguments, {}, err);
  ASSERT_EQ(client.read_line(), "ready") << std::ifstream(err).rdbuf();
  client.signal(SIGKILL);
  ASSERT_EQ(client.wait(), -1);
  std::filesystem::remove(err);
}

}  // namespace kvtier::services::testing
