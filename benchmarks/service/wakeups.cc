#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"
#include "services/wire/descriptor.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <stdexcept>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace kvtier::bench {
namespace {

using services::Descriptor;

constexpr int kExchanges = 500;                                ///< Of one way in one round.
constexpr std::size_t kRequestBytes = 320, kReplyBytes = 192;  // a step's frames, about
constexpr std::chrono::microseconds kSpin{50};

/// Waits until `fd` has something: asks for a while, then sleeps. Returns what `read` does.
template <typename Read>
ssize_t wait_and(Read read, int fd, std::chrono::microseconds spin) {
  const auto end = std::chrono::steady_clock::now() + spin;
  for (;;) {
    const ssize_t found = read();
    if (found >= 0 || errno != EAGAIN) return found;
    if (std::chrono::steady_clock::now() < end) continue;
    pollfd polled{fd, POLLIN, 0};
    (void)::poll(&polled, 1, -1);
  }
}

/// One end of two that exchange messages: over a socket, or in shared memory with an eventfd each.
class End {
 public:
  End(int socket, int ours, int theirs, std::byte* memory)
      : socket_(socket), ours_(ours), theirs_(theirs), memory_(memory) {}

  void say(bool over_socket, std::size_t bytes) {
    if (over_socket) {
      (void)::send(socket_, message_.data(), bytes, MSG_NOSIGNAL);
      return;
    }
    std::memcpy(memory_, message_.data(), bytes);
    (void)::eventfd_write(theirs_, 1);
  }
  /// Returns false at the end of the other.
  bool hear(bool over_socket, std::size_t bytes, std::chrono::microseconds spin) {
    if (over_socket) {
      const auto read = [&] { return ::recv(socket_, message_.data(), bytes, MSG_DONTWAIT); };
      return wait_and(read, socket_, spin) > 0;
    }
    const auto read = [&]() -> ssize_t {
      eventfd_t count = 0;
      return ::eventfd_read(ours_, &count);
    };
    if (wait_and(read, ours_, spin) < 0) return false;
    std::memcpy(message_.data(), memory_, bytes);
    return true;
  }

 private:
  int socket_, ours_, theirs_;
  std::byte* memory_;
  std::array<std::byte, kRequestBytes> message_{};
};

Descriptor make_eventfd() { return Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

}  // namespace

nlohmann::json wakeup_rows(const ServerProcess& /*server*/, const Settings& settings) {
  std::array<int, 2> pair{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0) {
    throw std::runtime_error("expected a pair of sockets");
  }
  Descriptor near(pair[0]), far(pair[1]);
  const Descriptor to_near = make_eventfd(), to_far = make_eventfd();
  void* memory = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("expected memory");
  auto* const shared = static_cast<std::byte*>(memory);
  const std::size_t per_turn = kExchanges;
  const int rounds = 4 * settings.rounds;
  const pid_t child = ::fork();
  if (child == 0) {  // makes system calls alone
    near.reset();
    End end(far.get(), to_far.get(), to_near.get(), shared);
    for (int turn = 0; turn < 4 * rounds; ++turn) {
      const bool over_socket = turn % 2 == 0;
      for (std::size_t i = 0; i < per_turn; ++i) {
        if (!end.hear(over_socket, kRequestBytes, {})) ::_exit(1);
        end.say(over_socket, kReplyBytes);
      }
    }
    ::_exit(0);
  }
  far.reset();
  End end(near.get(), to_near.get(), to_far.get(), shared);
  std::array<std::array<std::vector<double>, 2>, 2> seconds;  // [spins][by eventfd]
  bool ended = false;
  for (int turn = 0; turn < 4 * rounds; ++turn) {
    const bool over_socket = turn % 2 == 0;
    const bool spins = turn / 2 % 2 == 1;
    for (std::size_t i = 0; i < per_turn && !ended; ++i) {
      seconds[spins ? 1 : 0][over_socket ? 0 : 1].push_back(seconds_of([&] {
        end.say(over_socket, kRequestBytes);
        ended = !end.hear(over_socket, kReplyBytes, spins ? kSpin : std::chrono::microseconds{0});
      }));
    }
  }
  near.reset();
  ::waitpid(child, nullptr, 0);
  ::munmap(memory, 4096);
  if (ended) throw std::runtime_error("expected a child that answers");
  nlohmann::json rows = nlohmann::json::array();
  for (const bool spins : {false, true}) {
    const auto& [frames, events] = seconds[spins ? 1 : 0];
    rows.push_back({{"what", "wakeup_by_eventfd_over_frame"},
                    {"client_spins_us", spins ? kSpin.count() : 0},
                    {"exchanges", events.size()},
                    {"p50_us", median(events) * 1e6},
                    {"baseline_p50_us", median(frames) * 1e6},
                    {"times", median(events) / median(frames)}});
  }
  return rows;
}

}  // namespace kvtier::bench
