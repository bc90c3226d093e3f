#include "kvtier/admin.h"
#include "kvtier/client.h"
#include "kvtier/v1/transfer.pb.h"

#include "tests/services/base/certificates.h"
#include "tests/services/serve/serve_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/unix_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace kvtier::services {
namespace {

using kvtier::testing::eventually;

TEST_F(ServeTest, WithoutOptionsServesOnTheDefaultSocketUntilSigterm) {
  const auto server = serve({});
  const std::string address = "unix:" + (folder_ / "kvtier" / "kvtier.sock").string();
  ASSERT_EQ(server->read_line(), "listening on " + address) << err();
  {
    Client client({.server = address});
    const RemoteSession session = open(client);
    EXPECT_EQ(session.length(), 0);
  }
  EXPECT_TRUE(std::filesystem::exists(folder_ / "kvtier" / "admin.sock"));

  server->signal(SIGTERM);

  EXPECT_EQ(server->wait(), 0) << err();
  EXPECT_FALSE(std::filesystem::exists(folder_ / "kvtier" / "kvtier.sock"));
}

TEST_F(ServeTest, WarnsOfMoreHostMemoryThanThereIs) {
  const auto server = serve({"--backend", "cpu", "--host-memory-mib", "16777216"});
  ASSERT_THAT(server->read_line(), HasSubstr("listening on")) << err();
  EXPECT_THAT(err(), HasSubstr("warning: host-memory-mib: expected at most the "));
  EXPECT_THAT(err(), HasSubstr(" available, found 16777216; sessions may be refused"));
}

TEST_F(ServeTest, NamesTheOptionOfAnAddressThatItCannotUse) {
  const std::string missing = (folder_ / "none").string();
  const std::vector<std::tuple<std::vector<std::string>, int, std::string>> cases = {
      {{"--listen", "/x"}, 2, "listen: expected unix:PATH or tcp:HOST:PORT, found \"/x\""},
      {{"--admin-listen", "/x"}, 2, "admin-listen: expected unix:PATH"},
      {{"--data-listen", "/x"}, 2, "data-listen: expected unix:PATH"},
      {{"--metrics", "127.0.0.1:1"}, 2, "metrics: expected unix:PATH"},
      {{"--listen", "unix:" + missing + "/x.sock"},
       1,
       "x.sock.data: expected the folder " + missing + ", found none"}};
  for (const auto& [arguments, code, message] : cases) {
    const auto server = serve(arguments);
    EXPECT_EQ(server->wait(), code) << message;
    EXPECT_THAT(err(), HasSubstr(message));
  }
}

TEST_F(ServeTest, HasAnAdminSocketBesideItsFirstUnixSocket) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  const auto server = serve({"--listen", address});
  ASSERT_EQ(server->read_line(), "listening on " + address) << err();
  EXPECT_EQ(server->read_line(), "admin on " + address + ".admin");
  EXPECT_EQ(AdminClient({.server = address + ".admin"}).stats().service.sessions_created, 0U);
}

TEST_F(ServeTest, SecondServerIsRefusedAndADeadOnesSocketReplaced) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  const auto first = serve({"--listen", address});
  ASSERT_EQ(first->read_line(), "listening on " + address) << err();

  const auto second = serve({"--listen", address});
  EXPECT_EQ(second->read_line(), "");
  EXPECT_EQ(second->wait(), 1);
  EXPECT_THAT(err(), HasSubstr("FAILED_PRECONDITION"));
  EXPECT_THAT(err(), HasSubstr("another server listens there"));

  first->signal(SIGKILL);
  (void)first->wait();
  ASSERT_TRUE(std::filesystem::exists(folder_ / "x.sock"));
  const auto third = serve({"--listen", address});
  EXPECT_EQ(third->read_line(), "listening on " + address) << err();
}

TEST_F(ServeTest, KilledEndsAReadOverSeveralConnections) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  const auto server = serve({"--listen", address});
  ASSERT_EQ(server->read_line(), "listening on " + address) << err();
  Client client({.server = address, .attempts = 1, .data_plane = false, .page_streams = 2});
  constexpr std::size_t kBytes = 1 << 20;
  constexpr std::size_t kPages = 32;
  const std::vector<std::byte> bytes(kBytes, std::byte{7});
  RemotePages pages = client.open_pages({.model = "m", .page_bytes = kBytes});
  const std::string handle = pages.put(std::vector<RemotePages::Put>{{"h", 0, bytes}})[0].handle;
  std::vector<std::byte> read(kPages * kBytes);
  std::vector<RemotePages::Get> gets;
  for (std::size_t i = 0; i < kPages; ++i) {
    gets.push_back({handle, std::span(read).subspan(i * kBytes, kBytes)});
  }
  std::atomic<int> reads{0};
  auto end = std::async(std::launch::async, [&] {
    for (;;) {
      try {
        for (const RemotePages::Result& result : pages.get(gets)) {
          if (!result.ok()) return result.code;
        }
        if (std::ranges::count(read, std::byte{7}) != std::ssize(read)) return ErrorCode::kDataLoss;
      } catch (const ClientError& error) {
        return error.code();
      }
      ++reads;
      std::ranges::fill(read, std::byte{0});
    }
  });
  EXPECT_TRUE(eventually([&] {
    return reads >= 3 || end.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }));
  server->signal(SIGKILL);
  EXPECT_EQ(end.get(), ErrorCode::kUnavailable);
}

TEST_F(ServeTest, KilledWithItsMemoryMappedLeavesClientsUnharmed) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  const auto first = serve({"--listen", address});
  ASSERT_EQ(first->read_line(), "listening on " + address) << err();
  Client client({.server = address, .attempts = 1});
  constexpr std::size_t kBytes = 64 << 10;
  const std::vector<std::byte> bytes(kBytes, std::byte{7});
  RemotePages pages = client.open_pages({.model = "m", .page_bytes = kBytes});
  RemoteSession session = open(client);
  const std::string handle = pages.put(std::vector<RemotePages::Put>{{"h", 0, bytes}})[0].handle;
  std::vector<std::byte> read(kBytes);
  const std::vector<RemotePages::Get> gets{{handle, read}};
  ASSERT_TRUE(pages.get(gets)[0].ok());
  ASSERT_EQ(read, bytes);
  const auto reason_of = [](const auto& call) {
    try {
      call();
    } catch (const ClientError& error) {
      return std::string(error_code_name(error.code()));
    }
    return std::string("OK");
  };
  const auto get = [&] {
    const RemotePages::Result result = pages.get(gets)[0];
    if (!result.ok()) throw ClientError(result.code, result.reason, result.reason);
  };

  first->signal(SIGKILL);
  (void)first->wait();
  EXPECT_EQ(reason_of(get), "UNAVAILABLE");
  EXPECT_EQ(reason_of([&] { session.refresh(); }), "UNAVAILABLE");

  const auto second = serve({"--listen", address});
  ASSERT_EQ(second->read_line(), "listening on " + address) << err();
  Client again({.server = address});
  RemotePages anew = again.open_pages({.model = "m", .page_bytes = kBytes});
  EXPECT_EQ(anew.get(gets)[0].reason, "SERVER_EPOCH");
  const int layer = 0;
  const std::string hash = "h";
  EXPECT_TRUE(anew.lookup({&hash, 1}, {&layer, 1}).empty());
  ASSERT_TRUE(anew.put(std::vector<RemotePages::Put>{{"h", 0, bytes}})[0].ok());
}

TEST_F(ServeTest, HangupReadsTheCertificatesAgain) {
  const testing::Authority authority(folder_, "ca");
  const testing::Certificate own = authority.issue("localhost");
  const auto server = serve({"--listen", "tcp:127.0.0.1:0", "--tls-cert", own.certificate,
                             "--tls-key", own.key, "--tls-client-ca", authority.certificate()},
                            {}, {"--log-level=info"});
  ASSERT_THAT(server->read_line(), HasSubstr("listening on tcp:127.0.0.1:")) << err();
  const auto hang_up_until = [&](const std::string& said) {
    server->signal(SIGHUP);
    ASSERT_TRUE(eventually([&] { return err().find(said) != std::string::npos; })) << err();
  };

  std::filesystem::rename(own.key, own.key + ".away");
  hang_up_until("the former ones stay: tls-key: expected a readable file");
  std::filesystem::rename(own.key + ".away", own.key);
  hang_up_until("new connections see the new certificate");

  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
}

TEST_F(ServeTest, FlagGoesBeforeEnvironmentBeforeFile) {
  const auto address = [this](const std::string& name) {
    return "unix:" + (folder_ / name).string();
  };
  const std::string file =
      write("serve.toml", "listen = \"" + address("file") + "\"\nmax-sessions = 1\n");
  {
    const auto server = serve({"--config", file});
    ASSERT_EQ(server->read_line(), "listening on " + address("file")) << err();
    Client client({.server = address("file"), .attempts = 1});
    const RemoteSession session = open(client);
    try {
      (void)open(client);
      FAIL() << "a second session";
    } catch (const ClientError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    }
  }
  {
    const auto server = serve({}, {"KVTIER_CONFIG=" + file, "KVTIER_LISTEN=" + address("env")});
    EXPECT_EQ(server->read_line(), "listening on " + address("env")) << err();
  }
  const auto server = serve({"--listen", address("flag")},
                            {"KVTIER_CONFIG=" + file, "KVTIER_LISTEN=" + address("env")});
  EXPECT_EQ(server->read_line(), "listening on " + address("flag")) << err();
}

TEST_F(ServeTest, OptionsThatAreNoneAreRefused) {
  const std::string tenants = write("tenants.json", "{\"tenants\": [{\"name\": \"../x\"}]}");
  const std::string calibration =
      write("measured",
            "kvtier calibration 1\ndevice: a GPU\nregion_bytes: 8589934592\n"
            "host_allocation: registered\nmeasured: registered 0.1 1 2 3\n");
  struct Case {
    std::vector<std::string> arguments;
    int code;
    std::string message;
  };
  for (const Case& c : std::vector<Case> {
         {{"--config", write("a.toml", "lsiten = \"x\"\n")}, 2, "found lsiten"},
             {{"--config", write("b.toml", "[section]\nlisten = \"x\"\n")}, 2, "section.listen"},
             {{"--config", write("c.toml", "max-sessions = 0\n")}, 2, "max-sessions"},
             {{"--config", "/no/such/file"},
              2,
              "error: --config: expected a readable file, found /no"},
             {{"--listen", "unix:/x", "unix:/y"}, 2, "unix:/y"},
             {{"--listen", "tcp:0.0.0.0:0"}, 2, "expected TLS"},
             {{"--listen", "tcp:0.0.0.0:0", "--insecure-tcp"}, 2, "expected TLS"},
             {{"--listen", "tcp:127.0.0.1:0"}, 2, "expected TLS"},
             {{"--listen", "http://x"}, 2, "unix:PATH or tcp:HOST:PORT"},
             {{"--listen", "unix:relative"}, 2, "ABSOLUTE"},
             {{"--listen", "unix:/x", "--admin-listen", "unix:/x"},
              2,
              "admin-listen, metrics: expected different addresses, found unix:/x twice"},
             {{"--listen", "unix:/x", "--listen", "unix:/x"}, 2, "found unix:/x twice"},
             {{"--listen", "unix:/x.data", "--listen", "unix:/x"}, 2, "found unix:/x.data twice"},
             {{"--tls-cert", "/x", "--listen", "tcp:127.0.0.1:0"}, 2, "together"},
             {{"--tenants", "/no/such/file"}, 2, "readable file"},
             {{"--tenants", tenants}, 2, "a-z"}, {{"--backend", "tpu"}, 2, "--backend"},
             {{"--redis", "unix:/x"}, 2, "expected a disk-cache"},
             {{"--config", write("d.toml", "verify-rows = \"soon\"\n")}, 2, "verify-rows"},
             {{"--row-cache-policy", "fifo"}, 2, "--row-cache-policy"},
             {{"--config", folder_.string()}, 2, "found the folder"},
             {{"--tenants", folder_.string()}, 2, "found the folder"},
             {{"--config", write("f.toml", "\nverify-rows = 7\n")}, 2, "f.toml:2: verify-rows"},
             {{"--config", write("g.toml", "max-models = \"x\"\n")}, 2, "g.toml:1: "},
             {{"--memcached", "a b:1"}, 2, "white space"},
             {{"--disk-cache", ""}, 2, "--disk-cache: expected a value, found an empty one"},
             {{"--disk-cache", "/dev/null"}, 1, "expected a folder, found another file"},
             {{"--disk-cache", "/proc/cache"},
              1,
              "expected a folder, found none that can be made: No such file or directory"},
             {{"--calibration", "/no/such/file"}, 2, "expected a file, found /no/such/file"},
             {{"--calibration", folder_.string()}, 2, "expected a file, found " + folder_.string()},
             {{"--calibration", write("calibration", "garbage\n")},
              2,
              "line 1: expected kvtier calibration 1, found \"garbage\""},
             {{"--disk-capacity-mib", "64"},
              2,
              "expected --disk-cache with --disk-capacity-mib, found none"},
             {{"--config", write("h.toml", "page-folder-mib = 64\n")},
              2,
              "expected --page-folder with --page-folder-mib, found none"},
             {{"--insecure-tcp", "--metrics", "tcp:127.0.0.1:0"},
              2,
              "insecure-tcp: expected tcp:HOST:PORT in listen or data-listen, found none"},
             {{"--tls-cert", "/c", "--tls-key", "/k", "--tls-client-ca", "/a"},
              2,
              "tls-cert, tls-key, tls-client-ca: expected tcp:HOST:PORT in listen or data-listen, "
              "found none"},
             {{"--page-folder", "/p", "--page-key-file", "/k", "--page-arena-mib", "0"},
              2,
              "page-folder, page-remote: expected page-arena-mib above 0, found 0"},
             {{"--config", write("i.toml", "\nno option\n")}, 2, "i.toml:2: expected KEY = VALUE"},
             {{"--remote-ttl-seconds", "5"},
              2,
              "expected --memcached or --redis with --remote-ttl-seconds, found none"},
             {{"--row-cache-mib", "0", "--row-cache-rows", "4"},
              2,
              "expected --row-cache-mib above 0 with --row-cache-rows, found none"},
             {{"--row-cache-rows", "0", "--row-cache-policy", "lru"},
              2,
              "expected --row-cache-mib and --row-cache-rows above 0 with --row-cache-policy, "
              "found none"},
             {{"--page-arena-mib", "0", "--page-memory-mib", "64"},
              2,
              "expected --page-arena-mib above 0 with --page-memory-mib, found none"},
             {{"--page-remote", "--redis", "unix:/r", "--remote-key-file", "/k"},
              2,
              "expected --disk-cache with --remote-key-file, found none"},
             {{"--insecure-tcp", "--tls-cert", "/c", "--listen", "tcp:127.0.0.1:0"},
              2,
              "error: expected --insecure-tcp or --tls-cert, found both"},
             {{"--data-listen", "none", "--max-device-regions", "4"},
              2,
              "expected unix:PATH in --data-listen with --max-device-regions, found none"},
             {{"--listen", "tcp:127.0.0.1:0", "--insecure-tcp", "--max-device-regions", "4"},
              2,
              "expected unix:PATH in --data-listen with --max-device-regions, found none"},
             {{"--backend", "cpu", "--calibration", calibration}, 2, "calibration: expected none "},
             {{"--page-arena-mib", "10"}, 2, "page-arena-mib: expected a multiple of 4, found 10"},
             {{"--page-arena-mib", "16384"},
              2,
              "expected at least page-arena-mib, 16384, found 8192"},
#if defined(KVTIER_WITH_REMOTE_TIERS)
             {{"--redis-master", "m"}, 2, "expected a server or sentinels"},
             {{"--remote-key-file", "/k"}, 2, "expected some with a key file, found none"},
#endif
             {{"--prefetch-rows", "--row-cache-mib", "0"},
              2,
              "row-cache-mib and row-cache-rows above 0"},
             {{"--row-cache-rows", "-2"}, 2, "row-cache-rows"},
#if !defined(KVTIER_WITH_CUDA)
             {{"--backend", "cuda"}, 1, "expected a build with CUDA"},
#endif
             {{"--config", write("e.toml", "row-cache-policy = \"s3_fifo\"\n")},
              2,
              "row-cache-policy"},
             {{"--remote-ttl-seconds", "0"}, 2, "--remote-ttl-seconds"},
             {{"--lease-seconds", "-1"}, 2, "--lease-seconds"}, {
           {"--drain-seconds", "nan"}, 2, "expected 0 to 3600, found nan"
         }
       }) {
    const auto server = serve(c.arguments);
    EXPECT_EQ(server->read_line(), "") << c.message;
    EXPECT_EQ(server->wait(), c.code) << c.message << ": " << err();
    EXPECT_THAT(err(), HasSubstr(c.message));
  }
}

TEST_F(ServeTest, EmptyValuesAreRefused) {
  constexpr const char* kEmpty = "expected a value, found an empty one";
  for (const std::string option :
       {"config", "listen", "admin-listen", "data-listen", "metrics", "tenants", "tls-cert",
        "tls-client-crl", "redis-user", "remote-key-file", "page-key-file", "calibration"}) {
    const auto by_flag = serve({"--" + option, ""});
    EXPECT_EQ(by_flag->wait(), 2) << option;
    EXPECT_THAT(err(), HasSubstr("--" + option + ": " + kEmpty));

    std::string variable = "KVTIER_";
    for (const char c : option) variable += c == '-' ? '_' : static_cast<char>(std::toupper(c));
    const auto by_variable = serve({}, {variable + "="});
    EXPECT_EQ(by_variable->wait(), 2) << option;
    EXPECT_THAT(err(), HasSubstr(variable + ": " + kEmpty));
  }
  for (const char* value : {"\"\"", "''", "", "# no value"}) {
    const std::string file = write("serve.toml", std::string("tenants = ") + value + "\n");
    const auto by_file = serve({"--config", file});
    EXPECT_EQ(by_file->wait(), 2) << value;
    EXPECT_THAT(err(), HasSubstr("serve.toml:1: ")) << value;
    EXPECT_THAT(err(), HasSubstr("tenants: expected a value, found ")) << value;
  }
}

TEST_F(ServeTest, FilesThatAreNoTomlAreRefused) {
  const std::string listen = "listen = \"unix:/x\"\n";
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {"\"", ":1: expected KEY = VALUE, found \""},
           {"[", ":1: expected KEY = VALUE, found ["},
           {listen + "\n" + listen, ":3: listen: expected it once, found it twice"},
           {"listen = unix:/x\n", ":1: listen: expected text in quotes, a number, true or false"},
           {"listen = \"unix:/x\n", ":1: listen: expected a quote at the end"},
           {"listen = \"unix:/x\" \"y\"\n", ":1: listen: expected one value"},
           {"listen = \"unix:/x#y\"\n", ":1: listen: expected text without #"},
           {"listen = [\"unix:/x\",\n", ":1: listen: expected ] behind a list"}}) {
    const auto server = serve({"--config", write("serve.toml", text)});
    EXPECT_EQ(server->wait(), 2) << text;
    EXPECT_THAT(err(), HasSubstr("serve.toml" + message)) << text;
  }
}

TEST_F(ServeTest, NamesWhatIsWrongWithAddressesAndTenants) {
  const std::string tenants = write("tenants.json", "{\n  \"tenants\": [}\n");
  for (const auto& [arguments, message] :
       std::vector<std::pair<std::vector<std::string>, std::string>> {
         {{"--tenants", tenants},
          tenants + ": tenants: expected JSON, found an error in line 2, column 15"},
#if defined(KVTIER_WITH_REMOTE_TIERS)
             {{"--disk-cache", (folder_ / "cache").string(), "--redis", "localhost"},
              "INVALID_ARGUMENT: redis: expected an endpoint host:port"},
#endif
         {
           {"--listen", "tcp:0.0.0.0:7443", "--insecure-tcp"},
               "found --insecure-tcp with another address"
         }
       }) {
    const auto server = serve(arguments);
    EXPECT_EQ(server->wait(), 2) << message;
    EXPECT_THAT(err(), HasSubstr(message));
  }
}

TEST_F(ServeTest, WarnsOfMorePagesThanTheDiskHasRoomFor) {
  const auto server =
      serve({"--disk-cache", (folder_ / "cache").string(), "--disk-capacity-mib", "268435456"});
  ASSERT_THAT(server->read_line(), HasSubstr("listening on")) << err();
  EXPECT_THAT(err(), HasSubstr("warning: disk-capacity-mib: expected at most the "));
  EXPECT_THAT(err(), HasSubstr(", found 268435456; sessions may be refused"));
}

/// Connections that say nothing, closed at the end.
class Flood {
 public:
  explicit Flood(const std::string& path) : path_(path) {}
  ~Flood() {
    for (const int fd : sockets_) ::close(fd);
  }
  Flood(const Flood&) = delete;  // owns sockets
  Flood& operator=(const Flood&) = delete;

  void connect(int count) {
    for (int i = 0; i < count; ++i) sockets_.push_back(kvtier::testing::connect_unix(path_));
  }
  /// Returns once the server has closed the last of them.
  void await_refusal() { (void)kvtier::testing::read_to_end(sockets_.back()); }

 private:
  std::string path_;
  std::vector<int> sockets_;
};

TEST_F(ServeTest, FloodOfConnectionsTakesNoDescriptorThatOthersNeed) {
  const std::string path = (folder_ / "x.sock").string();
  Program server(
      "/bin/sh",
      {"sh", "-c",
       "ulimit -n 128; exec " KVTIER_BINARY " serve --backend cpu --listen unix:" + path},
      {}, folder_ / "err");
  ASSERT_EQ(server.read_line(), "listening on unix:" + path) << err();
  Client client({.server = "unix:" + path});
  RemoteSession session = open(client);
  {
    Flood flood(path);
    flood.connect(300);
    flood.await_refusal();
    session.refresh();  // served amid the flood
  }
  // Until the server has seen the ends of those, it may refuse more.
  Client another({.server = "unix:" + path, .attempts = 60});
  EXPECT_EQ(open(another).length(), 0);
}

TEST_F(ServeTest, SigtermUnderLoadEndsWellEveryTime) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  for (int round = 0; round < 10; ++round) {
    const auto server = serve({"--listen", address, "--backend", "cpu"});
    ASSERT_EQ(server->read_line(), "listening on " + address) << err();
    std::promise<void> busy;
    std::thread load([&] {
      Client client({.server = address, .attempts = 1});
      try {
        RemoteSession session = open(client);
        for (int i = 0;; ++i) {
          session.refresh();
          if (i == 10) busy.set_value();
        }
      } catch (const ClientError& error) {
        EXPECT_TRUE(error.code() == ErrorCode::kUnavailable ||
                    error.code() == ErrorCode::kCancelled)
            << error.what();
      }
    });
    kvtier::testing::await(busy);
    server->signal(SIGTERM);
    EXPECT_EQ(server->wait(), 0) << err();
    load.join();
  }
}

/// A client of HTTP/2 that asks for a page and reads no more of it than its beginning.
class StalledReader {
 public:
  StalledReader(const std::string& path, const std::string& lease, const std::string& handle)
      : socket_(kvtier::testing::connect_unix(path)) {
    v1::ReadPagesRequest request;
    request.set_lease(lease);
    request.add_handles(handle);
    const std::string message = request.SerializeAsString();
    send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, "") +
         frame(1, 4, 1,
               field(":method", "POST") + field(":scheme", "http") +
                   field(":path", "/kvtier.v1.TransferService/ReadPages") +
                   field(":authority", "x") + field("content-type", "application/grpc") +
                   field("te", "trailers")) +
         frame(0, 1, 1, std::string(4, '\0') + static_cast<char>(message.size()) + message));
  }
  ~StalledReader() { ::close(socket_); }
  StalledReader(const StalledReader&) = delete;  // owns a socket
  StalledReader& operator=(const StalledReader&) = delete;

  /// Returns once the server has sent some of the page.
  void await_data() {
    for (;;) {
      const std::string head = receive(9);
      if (head.size() < 9) return ADD_FAILURE() << "no page";
      std::size_t size = 0;
      for (const char byte : head.substr(0, 3))
        size = size << 8U | static_cast<unsigned char>(byte);
      (void)receive(size);
      if (head[3] == 0) return;
    }
  }

 private:
  static std::string frame(char type, char flags, char stream, const std::string& payload) {
    std::string bytes;
    for (int shift = 16; shift >= 0; shift -= 8) {
      bytes += static_cast<char>(payload.size() >> shift);
    }
    return bytes + type + flags + std::string(3, '\0') + stream + payload;
  }
  static std::string field(const std::string& name, const std::string& value) {
    return std::string("\0", 1) + static_cast<char>(name.size()) + name +
           static_cast<char>(value.size()) + value;
  }
  void send(const std::string& bytes) const {
    EXPECT_EQ(::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  [[nodiscard]] std::string receive(std::size_t size) const {
    std::string bytes(size, '\0');
    const ssize_t count = ::recv(socket_, bytes.data(), size, MSG_WAITALL);
    bytes.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
    return bytes;
  }

  const int socket_;
};

TEST_F(ServeTest, SecondSignalEndsADrainThatWaits) {
  const std::string path = (folder_ / "x.sock").string();
  const auto server =
      serve({"--listen", "unix:" + path, "--drain-seconds", "3600"}, {}, {"--log-level=info"});
  ASSERT_EQ(server->read_line(), "listening on unix:" + path) << err();
  Client client({.server = "unix:" + path, .data_plane = false});
  RemotePages pages = client.open_pages({.model = "m", .page_bytes = 1 << 20});
  const std::vector<std::byte> bytes(1 << 20);
  const std::string handle = pages.put(std::vector<RemotePages::Put>{{"h", 0, bytes}})[0].handle;
  StalledReader reader(path, pages.name(), handle);
  reader.await_data();

  server->signal(SIGTERM);
  ASSERT_TRUE(eventually([&] { return err().find("draining") != std::string::npos; })) << err();
  server->signal(SIGINT);

  EXPECT_EQ(server->wait(), 130) << err();
}

TEST_F(ServeTest, MetricsAddressThatIsNotOfThisMachineIsRefused) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  const auto server = serve({"--listen", address, "--metrics", "tcp:0.0.0.0:0"});
  EXPECT_EQ(server->read_line(), "");
  EXPECT_EQ(server->wait(), 2);
  EXPECT_THAT(err(), HasSubstr("metrics: expected a loopback address"));
}

TEST_F(ServeTest, LogOfJsonIsOneObjectALine) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  Program server(KVTIER_BINARY,
                 {"kvtier", "--log-format", "json", "--log-level", "info", "serve", "--backend",
                  "cpu", "--listen", address, "--host-memory-mib", "1"},
                 {}, folder_ / "err");
  for (const std::string& said : {"listening on " + address, "admin on " + address + ".admin"}) {
    const std::string line = server.read_line();
    EXPECT_TRUE(line.starts_with("{\"time\":\"20")) << line;
    EXPECT_TRUE(line.ends_with("\"message\":\"" + said + "\"}")) << line;
  }
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
  std::istringstream lines(err());
  std::vector<std::string> events;
  for (std::string line; std::getline(lines, line);) {
    EXPECT_TRUE(line.starts_with("{\"time\":\"20") && line.ends_with("\"}")) << line;
    const std::size_t at = line.find("\"event\":\"") + 9;
    events.push_back(line.substr(at, line.find('"', at) - at));
  }
  EXPECT_THAT(events, ::testing::ElementsAre("serving", "draining", "ended"));
}

TEST_F(ServeTest, TokensTellTenantsApart) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  const std::string tenants =
      write("tenants.json",
            // sha256 of "secret"
            "{\"tenants\": [{\"name\": \"one\", \"max_sessions\": 1, \"token_sha256\": "
            "\"2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\"}]}");
  const auto server = serve({"--listen", address, "--tenants", tenants}, {}, {"--log-level=debug"});
  ASSERT_EQ(server->read_line(), "listening on " + address) << err();
  Client known({.server = address, .token = "secret", .attempts = 1});
  Client unknown({.server = address, .token = "Secret", .attempts = 1});

  const RemoteSession session = open(known);

  for (const auto& [client, reason] : std::vector<std::pair<Client*, std::string>>{
           {&known, "QUOTA_EXCEEDED"}, {&unknown, "UNAUTHENTICATED"}}) {
    try {
      (void)open(*client);
      ADD_FAILURE() << "opened, without " << reason;
    } catch (const ClientError& error) {
      EXPECT_EQ(error.reason(), reason);
    }
  }
  ASSERT_TRUE(eventually([&] { return err().find("QUOTA_EXCEEDED") != std::string::npos; }))
      << err();
  for (const std::string& secret : {std::string("ecret"), session.name()}) {
    EXPECT_THAT(err(), ::testing::Not(HasSubstr(secret)));
  }
}

TEST_F(ServeTest, LogThatCannotBeWrittenStopsNothing) {
  const std::string address = "unix:" + (folder_ / "x.sock").string();
  Program server(KVTIER_BINARY, {"kvtier", "--log-level", "debug", "serve", "--listen", address},
                 {}, "/dev/full");
  ASSERT_EQ(server.read_line(), "listening on " + address);
  {
    Client client({.server = address});
    for (int i = 0; i < 100; ++i) (void)open(client);  // each of them a line
  }
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

}  // namespace
}  // namespace kvtier::services
