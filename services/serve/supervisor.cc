#include "services/serve/supervisor.h"

#include "kvtier/error.h"

#include "services/console/console.h"
#include "services/console/log.h"
#include "services/wire/descriptor.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

[[noreturn]] void fail(const char* what) {
  throw Error(ErrorCode::kUnavailable,
              std::string("worker: expected ") + what + ", found " + std::strerror(errno));
}

/// The worker there is.
struct Worker {
  pid_t pid = -1;        ///< -1: none.
  Descriptor signals{};  ///< Commands to it, a byte each.
  Clock::time_point since{};
};

class Supervisor {
 public:
  Supervisor(const SupervisorOptions& options, Log& log) : options_(options), log_(log) {
    sigemptyset(&signals_);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) sigaddset(&signals_, signal);
    sigprocmask(SIG_BLOCK, &signals_, &before_);
  }
  ~Supervisor() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  Supervisor(const Supervisor&) = delete;  // restores the mask once
  Supervisor& operator=(const Supervisor&) = delete;

  Supervised run() {
    for (Clock::time_point start_at = Clock::now();;) {
      if (worker_.pid < 0 && Clock::now() >= start_at) {
        try {
          if (const std::optional<Supervised> worker = start()) return *worker;
        } catch (const Error& error) {
          if (started_ == 0) throw;
          start_at = Clock::now() + postpone(error.what());
        }
      }
      switch (await_signal(start_at)) {
        case SIGTERM:
        case SIGINT:
          if (worker_.pid < 0) return {.exit_code = 0};
          if (ending_) return {.exit_code = kill_worker()};
          ending_ = true;
          options_.on_end();
          forward(SIGTERM);
          break;
        case SIGHUP:
          forward(SIGHUP);
          break;
        default:
          break;
      }
      int status = 0;
      if (worker_.pid < 0 || ::waitpid(worker_.pid, &status, WNOHANG) != worker_.pid) continue;
      const auto lived = std::chrono::duration_cast<Milliseconds>(Clock::now() - worker_.since);
      worker_ = {};
      if (!is_fault(status)) return {.exit_code = exit_code_of(status)};
      start_at = Clock::now() + replace_after(status, lived);
    }
  }

 private:
  /// Returns in the worker; empty in the supervisor.
  std::optional<Supervised> start() {
    int pipe[2] = {-1, -1};
    if (::pipe2(pipe, O_CLOEXEC) != 0) fail("a pipe");
    Descriptor read(pipe[0]), write(pipe[1]);
    const pid_t supervisor = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) fail("a process");
    if (pid > 0) {
      worker_ = {.pid = pid, .signals = std::move(write), .since = Clock::now()};
      ++started_;
      return std::nullopt;
    }
    write.reset();
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != supervisor) ::_exit(kExitForced);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP}) std::signal(signal, SIG_IGN);
    return Supervised{.exit_code = {}, .signals = read.release(), .restarts = started_};
  }

  /// Returns the signal that has come, or 0 when a worker is to be started.
  int await_signal(Clock::time_point start_at) const {
    if (worker_.pid >= 0) return ::sigwaitinfo(&signals_, nullptr);
    const auto left = std::max(Clock::duration(0), start_at - Clock::now());
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    timespec timeout{};
    timeout.tv_sec = seconds.count();
    timeout.tv_nsec = std::chrono::nanoseconds(left - seconds).count();
    return std::max(0, ::sigtimedwait(&signals_, nullptr, &timeout));
  }

  void forward(int signal) const {
    const auto byte = static_cast<unsigned char>(signal);
    // One that ends meanwhile needs none: SIGPIPE is ignored.
    (void)!::write(worker_.signals.get(), &byte, 1);
  }

  int kill_worker() {
    ::kill(worker_.pid, SIGKILL);
    (void)::waitpid(worker_.pid, nullptr, 0);
    return kExitForced;
  }

  [[nodiscard]] bool is_fault(int status) const {
    if (ending_) return false;
    if (WIFSIGNALED(status)) return true;
    const int code = WEXITSTATUS(status);
    return code == kExitDeviceLost || (started_ > 1 && (code == kExitError || code == kExitUsage));
  }
  static int exit_code_of(int status) {
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

  Milliseconds replace_after(int status, Milliseconds lived) {
    const Milliseconds delay = delay_.after(lived);
    const std::string how = WIFSIGNALED(status)
                                ? "signal " + std::to_string(WTERMSIG(status))
                                : "exit code " + std::to_string(WEXITSTATUS(status));
    const std::string when =
        delay.count() == 0 ? "at once" : "in " + std::to_string(delay.count() / 1000) + " s";
    const std::string message =
        "the worker has ended by " + how + "; its sessions are lost, another starts " + when;
    log_.write({.level = LogLevel::kError, .event = "worker_lost", .message = message});
    return delay;
  }

  Milliseconds postpone(const std::string& why) {
    const Milliseconds delay = std::max(delay_.after(Milliseconds(0)), RestartDelay::kFirst);
    log_.write({.level = LogLevel::kError, .event = "worker_lost", .message = why});
    return delay;
  }

  const SupervisorOptions& options_;
  Log& log_;
  sigset_t signals_{}, before_{};
  Worker worker_;
  RestartDelay delay_;
  int started_ = 0;
  bool ending_ = false;
};

}  // namespace

Milliseconds RestartDelay::after(Milliseconds lived) noexcept {
  if (lived >= kCalm) faults_ = 0;
  constexpr int kMostDoublings = 6;  // from the first to the longest
  const int doublings = std::min(faults_++, kMostDoublings + 1);
  return doublings == 0 ? Milliseconds(0) : std::min(kLongest, kFirst * (1 << (doublings - 1)));
}

Supervised supervise(const SupervisorOptions& options, Log& log) {
  return Supervisor(options, log).run();
}

}  // namespace kvtier::services
