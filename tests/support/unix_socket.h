#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <string>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvtier::testing {

/// Returns a socket that is connected to `path`. Its calls fail after a minute.
[[nodiscard]] inline int connect_unix(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval limit{.tv_sec = 60, .tv_usec = 0};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    EXPECT_EQ(::setsockopt(fd, SOL_SOCKET, option, &limit, sizeof(limit)), 0);
  }
  EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

/// Returns what comes until the other side ends the connection.
inline std::string read_to_end(int fd) {
  std::string all;
  std::array<char, 4096> part{};
  ssize_t count = 0;
  while ((count = ::recv(fd, part.data(), part.size(), 0)) > 0) {
    all.append(part.data(), static_cast<std::size_t>(count));
  }
  EXPECT_TRUE(count == 0 || errno == ECONNRESET) << "the connection is still open";
  return all;
}

}  // namespace kvtier::testing
