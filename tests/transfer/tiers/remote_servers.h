#pragma once

#include "tests/support/eventually.h"
#include "tests/support/program.h"

#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <netinet/in.h>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace kvtier::testing {

enum class Engine { kMemcached, kRedis };

inline sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  return address;
}

/// Returns a TCP port that no process listens on. The system gives none of these to connections,
/// and other processes begin elsewhere: it stays free until a server takes it.
inline int free_port() {
  for (int port = 20'000 + ::getpid() % 10'000;; ++port) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    const bool free = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    ::close(fd);
    if (free) return port;
  }
}

/// Speaks a server's protocol by hand: shares nothing with the tier.
class RawClient {
 public:
  RawClient(Engine engine, const std::string& path) : engine_(engine) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_un address = unix_address(path);
    connected_ = ::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  ~RawClient() { ::close(fd_); }
  RawClient(const RawClient&) = delete;  // owns a socket
  RawClient& operator=(const RawClient&) = delete;

  [[nodiscard]] bool connected() const { return connected_; }

  /// Sends a command and returns the first line of the answer.
  std::string command(const std::string& text) {
    const std::string line = text + "\r\n";
    EXPECT_EQ(::send(fd_, line.data(), line.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(line.size()));
    return read_line();
  }
  void set(const std::string& name, const std::string& value) {
    const std::string size = std::to_string(value.size());
    if (engine_ == Engine::kMemcached) {
      EXPECT_EQ(command("set " + name + " 0 0 " + size + "\r\n" + value), "STORED");
    } else {
      EXPECT_EQ(command("*3\r\n$3\r\nSET\r\n$" + std::to_string(name.size()) + "\r\n" + name +
                        "\r\n$" + size + "\r\n" + value),
                "+OK");
    }
  }
  /// Returns the value, empty when there is none.
  std::string get(const std::string& name) {
    const bool memcached = engine_ == Engine::kMemcached;
    const std::string header = command((memcached ? "get " : "GET ") + name);
    if (header == "END" || header == "$-1") return {};
    const std::size_t size = std::stoul(header.substr(memcached ? header.rfind(' ') + 1 : 1));
    std::string value;
    while (value.size() < size) value += read_byte();
    (void)read_line();
    if (memcached) {
      EXPECT_EQ(read_line(), "END");
    }
    return value;
  }
  void remove(const std::string& name) {
    (void)command((engine_ == Engine::kMemcached ? "delete " : "DEL ") + name);
  }
  void flush() { (void)command(engine_ == Engine::kMemcached ? "flush_all" : "FLUSHALL"); }

 private:
  char read_byte() {
    if (next_ == buffer_.size()) {
      buffer_.resize(std::size_t{64} << 10);
      const ssize_t got = ::recv(fd_, buffer_.data(), buffer_.size(), 0);
      if (got <= 0) throw std::runtime_error("the server has gone");
      buffer_.resize(static_cast<std::size_t>(got));
      next_ = 0;
    }
    return buffer_[next_++];
  }
  std::string read_line() {
    std::string line;
    while (!line.ends_with("\r\n")) line += read_byte();
    line.resize(line.size() - 2);
    return line;
  }

  Engine engine_;
  int fd_ = -1;
  bool connected_ = false;
  std::string buffer_;
  std::size_t next_ = 0;
};

/// A memcached or redis-server in a process of its own, on a Unix socket.
class RemoteServerProcess {
 public:
  RemoteServerProcess(Engine engine, std::filesystem::path socket,
                      std::vector<std::string> options = {})
      : engine_(engine), socket_(std::move(socket)), options_(std::move(options)) {
    start();
  }

  void start() {
    std::filesystem::remove(socket_);
    std::vector<std::string> arguments;
    if (engine_ == Engine::kMemcached) {
      arguments = {"memcached", "-s", socket_, "-u", "root", "-t", "1", "-m", "64"};
    } else {
      arguments = {"redis-server",        "--unixsocket", socket_,   "--save", "", "--dir",
                   socket_.parent_path(), "--loglevel",   "warning", "--port", "0"};
    }
    arguments.insert(arguments.end(), options_.begin(), options_.end());
    program_ = std::make_unique<Program>("/usr/bin/" + arguments.front(), arguments,
                                         std::vector<std::string>{}, socket_.string() + ".err");
    const bool ready = eventually([&] {
      RawClient client(engine_, socket_);
      return client.connected() &&
             (engine_ == Engine::kMemcached || !client.command("PING").empty());
    });
    ASSERT_TRUE(ready) << "no " << arguments.front() << " (apt packages memcached, redis-server)";
  }
  /// As the machine would: no goodbye.
  void kill() { program_.reset(); }
  void pause() { program_->stop(); }
  void go_on() { program_->signal(SIGCONT); }

  [[nodiscard]] std::string endpoint() const { return "unix:" + socket_.string(); }
  [[nodiscard]] RawClient raw() const { return RawClient(engine_, socket_); }

 private:
  Engine engine_;
  std::filesystem::path socket_;
  std::vector<std::string> options_;
  std::unique_ptr<Program> program_;
};

/// Takes connections on a Unix socket, and says the same to each as soon as it has asked something.
class ScriptedServer {
 public:
  ScriptedServer(const std::string& path, std::string answer)
      : endpoint_("unix:" + path), answer_(std::move(answer)) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_un address = unix_address(path);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(fd_, 8), 0);
    thread_ = std::thread([this] { serve(); });
  }
  ~ScriptedServer() {
    ::shutdown(fd_, SHUT_RDWR);
    thread_.join();
    ::close(fd_);
  }
  ScriptedServer(const ScriptedServer&) = delete;  // its thread has its address
  ScriptedServer& operator=(const ScriptedServer&) = delete;

  [[nodiscard]] const std::string& endpoint() const { return endpoint_; }

 private:
  void serve() {
    std::vector<int> open;
    for (int fd = 0; (fd = ::accept(fd_, nullptr, nullptr)) >= 0;) {
      char asked[4096];
      if (::recv(fd, asked, sizeof asked, 0) > 0) {
        (void)::send(fd, answer_.data(), answer_.size(), MSG_NOSIGNAL);
      }
      open.push_back(fd);
    }
    for (const int fd : open) ::close(fd);
  }

  std::string endpoint_, answer_;
  int fd_ = -1;
  std::thread thread_;
};

}  // namespace kvtier::testing
