#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"
#include "benchmarks/service/page_reader.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <spawn.h>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace kvtier::bench {
namespace {

constexpr std::size_t kPipeline = 32;

/// A redis-server that keeps nothing on disk, on a Unix socket, and a client that does no more than
/// it must.
class Redis {
 public:
  explicit Redis(const std::filesystem::path& folder) : path_(folder / "redis.sock") {
    const std::string socket = path_.string();
    const std::string directory = folder.string();
    const char* arguments[] = {"redis-server",
                               "--port",
                               "0",
                               "--unixsocket",
                               socket.c_str(),
                               "--save",
                               "",
                               "--appendonly",
                               "no",
                               "--daemonize",
                               "no",
                               "--dir",
                               directory.c_str(),
                               "--loglevel",
                               "warning",
                               nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    const int error = ::posix_spawnp(&child_, "redis-server", &actions, nullptr,
                                     const_cast<char**>(arguments), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) throw std::runtime_error("redis-server: expected it to be installed");
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socket.copy(address.sun_path, sizeof(address.sun_path) - 1);
    for (int attempt = 0; attempt < 500; ++attempt) {
      fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return;
      ::close(fd_);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    throw std::runtime_error("redis-server: expected it to listen");
  }
  ~Redis() {
    ::close(fd_);
    ::kill(child_, SIGTERM);
    ::waitpid(child_, nullptr, 0);
  }
  Redis(const Redis&) = delete;  // owns a process
  Redis& operator=(const Redis&) = delete;

  void set(std::size_t key, std::span<const std::byte> value) {
    const std::string name = std::to_string(key);
    std::string command = "*3\r\n$3\r\nSET\r\n$" + std::to_string(name.size()) + "\r\n" + name +
                          "\r\n$" + std::to_string(value.size()) + "\r\n";
    command.append(reinterpret_cast<const char*>(value.data()), value.size());
    send_all(command + "\r\n");
    if (read_line() != "+OK") throw std::runtime_error("redis-server: expected OK");
  }

  /// GETs in pipelines of 32, the values received where they are to be.
  void read(PageReader& reader) {
    const auto& order = reader.order();
    for (std::size_t first = 0; first < order.size(); first += kPipeline) {
      const std::size_t end = std::min(order.size(), first + kPipeline);
      std::string commands;
      for (std::size_t i = first; i < end; ++i) {
        const std::string name = std::to_string(order[i]);
        commands += "*2\r\n$3\r\nGET\r\n$" + std::to_string(name.size()) + "\r\n" + name + "\r\n";
      }
      send_all(commands);
      for (std::size_t i = first; i < end; ++i) {
        const std::span<std::byte> to = reader.destination(i);
        if (read_line() != "$" + std::to_string(to.size())) {
          throw std::runtime_error("redis-server: expected the value");
        }
        read_to(to);
        if (!read_line().empty()) throw std::runtime_error("redis-server: expected a line's end");
      }
    }
  }

 private:
  void send_all(const std::string& text) {
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t bytes = ::send(fd_, text.data() + at, text.size() - at, MSG_NOSIGNAL);
      if (bytes <= 0) throw std::runtime_error("redis-server: gone");
      at += static_cast<std::size_t>(bytes);
    }
  }
  void refill() {
    const ssize_t bytes = ::recv(fd_, buffer_, sizeof(buffer_), 0);
    if (bytes <= 0) throw std::runtime_error("redis-server: gone");
    begin_ = 0;
    end_ = static_cast<std::size_t>(bytes);
  }
  std::string read_line() {
    std::string line;
    for (;;) {
      if (begin_ == end_) refill();
      const char c = buffer_[begin_++];
      if (c == '\n') return line;
      if (c != '\r') line += c;
    }
  }
  void read_to(std::span<std::byte> to) {
    const std::size_t ready = std::min(to.size(), end_ - begin_);
    std::memcpy(to.data(), buffer_ + begin_, ready);
    begin_ += ready;
    to = to.subspan(ready);
    while (!to.empty()) {
      const ssize_t bytes = ::recv(fd_, to.data(), to.size(), 0);
      if (bytes <= 0) throw std::runtime_error("redis-server: gone");
      to = to.subspan(static_cast<std::size_t>(bytes));
    }
  }

  std::filesystem::path path_;
  pid_t child_ = -1;
  int fd_ = -1;
  char buffer_[4096];  // small, so that values are received where they are to be
  std::size_t begin_ = 0, end_ = 0;
};

}  // namespace

nlohmann::json redis_rows(const ServerProcess& server, const Settings& settings) {
  nlohmann::json rows = nlohmann::json::array();
  const auto channel = attach(server);
  Redis redis(server.folder());
  for (const PageSet* pages : {&server.small(), &server.large()}) {
    std::vector<std::byte> page(pages->page_bytes);
    for (std::size_t i = 0; i < pages->handles.size(); ++i) {
      fill_page(i, page.data(), page.size());
      redis.set(i, page);
    }
    PageReader reader(*channel, *pages, (std::size_t{256} << 20) / pages->page_bytes, 2);
    const Comparison comparison = compare(
        settings.rounds, [&] { redis.read(reader); }, [&] { reader.read_shared(); });
    if (!reader.last_batch_is_right()) throw std::runtime_error("a page has other bytes");
    redis.read(reader);
    if (!reader.last_batch_is_right()) throw std::runtime_error("redis-server: other bytes");
    rows.push_back({{"what", "shared_memory_over_redis"},
                    {"page_bytes", pages->page_bytes},
                    {"gbps", static_cast<double>(reader.bytes()) / comparison.second / 1e9},
                    {"baseline_gbps", static_cast<double>(reader.bytes()) / comparison.first / 1e9},
                    {"times", comparison.ratio},
                    {"times_least", comparison.least},
                    {"times_most", comparison.most}});
  }
  return rows;
}

}  // namespace kvtier::bench
