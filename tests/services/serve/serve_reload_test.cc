#include "tests/services/base/certificates.h"
#include "tests/services/serve/serve_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/unix_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <string>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

using kvtier::testing::eventually;

TEST_F(ServeTest, HangupReadsTheTenantsAgainAndEndsNoServer) {
  const std::string digest(64, 'a');
  const auto tenants = [&](const std::string& name) {
    return write("tenants.json", R"({"tenants": [{"name": ")" + name + R"(", "token_sha256": ")" +
                                     digest + "\"}]}");
  };
  const auto server = serve({"--tenants", tenants("alpha")}, {}, {"--log-level=info"});
  ASSERT_THAT(server->read_line(), HasSubstr("listening on ")) << err();
  const auto hang_up_until = [&](const std::string& said) {
    server->signal(SIGHUP);
    ASSERT_TRUE(eventually([&] { return err().find(said) != std::string::npos; })) << err();
  };
  (void)tenants("beta");
  hang_up_until("the former ones stay: tenants: expected tenants of the start, found beta");
  (void)tenants("alpha");
  hang_up_until("calls from now on see the new tenants");
  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
}

TEST_F(ServeTest, TellsTheServiceManagerWhenItServes) {
  const std::string path = (folder_ / "notify.sock").string();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const timeval limit{.tv_sec = kvtier::testing::kProgramPatience.count(), .tv_usec = 0};
  ASSERT_EQ(::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
  const auto server = serve({"--data-listen", "none"}, {"NOTIFY_SOCKET=" + path});
  std::array<char, 64> said{};
  const ssize_t size = ::recv(fd, said.data(), said.size(), 0);
  EXPECT_EQ(std::string(said.data(), size < 0 ? 0 : static_cast<std::size_t>(size)), "READY=1");
  ::close(fd);
  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
}

TEST_F(ServeTest, WarnsOfSecretsThatOthersMayRead) {
  namespace fs = std::filesystem;
  const testing::Authority authority(folder_, "ca");
  const testing::Certificate own = authority.issue("localhost");
  const std::string page_key = write("page.key", "sixteen bytes or more");
  for (const bool open : {true, false}) {
    for (const std::string& key : {own.key, page_key}) {
      fs::permissions(key, open ? fs::perms(0644) : fs::perms(0640));
    }
    const auto server =
        serve({"--listen", "tcp:127.0.0.1:0", "--tls-cert", own.certificate, "--tls-key", own.key,
               "--tls-client-ca", authority.certificate(), "--page-folder",
               (folder_ / "pages").string(), "--page-key-file", page_key});
    ASSERT_THAT(server->read_line(), HasSubstr("listening on tcp:127.0.0.1:")) << err();
    for (const char* option : {"tls-key", "page-key-file"}) {
      const std::string warning = option + std::string(": expected a file that others cannot read");
      EXPECT_EQ(err().find(warning) != std::string::npos, open) << err();
    }
    server->signal(SIGTERM);
    EXPECT_EQ(server->wait(), 0) << err();
  }
}

TEST_F(ServeTest, PeersWriteNoLinesInItsLog) {
  const std::string path = (folder_ / "x.sock").string();
  const auto server = serve({"--listen", "unix:" + path, "--data-listen", "none"});
  ASSERT_EQ(server->read_line(), "listening on unix:" + path) << err();
  const std::string forged = "\n{\"level\":\"error\",\"event\":\"forged\"}\n\x1b[31m";
  std::string headers = std::string("\x00\x07:status", 9);  // a literal, not indexed
  headers += static_cast<char>(forged.size()) + forged;
  std::string bytes =
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string(3, '\0') + std::string("\x04\0\0\0\0\0", 6);
  bytes += std::string(2, '\0') + static_cast<char>(headers.size()) +
           std::string("\x01\x05\0\0\0\x01", 6) + headers;
  for (int i = 0; i < 50; ++i) {
    const int fd = kvtier::testing::connect_unix(path);
    ASSERT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    ::shutdown(fd, SHUT_WR);
    (void)kvtier::testing::read_to_end(fd);
    ::close(fd);
  }
  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
  const std::string log = err();
  EXPECT_EQ(log.find("\n{"), std::string::npos) << log;
  EXPECT_EQ(log.find('\x1b'), std::string::npos) << log;
  EXPECT_LT(std::ranges::count(log, '\n'), 40) << log;
}

}  // namespace
}  // namespace kvtier::services
