#pragma once

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <spawn.h>
#include <string>
#include <sys/types.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace kvtier::testing {

/// A program in a process of its own. Killed at the end, when it still runs.
class Program {
 public:
  /// Standard error goes to the file `err`.
  Program(const std::string& path, const std::vector<std::string>& arguments,
          const std::vector<std::string>& environment, const std::filesystem::path& err) {
    int out[2] = {-1, -1};
    EXPECT_EQ(::pipe2(out, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    std::vector<char*> argv = pointers(arguments);
    std::vector<char*> envp = pointers(environment);
    EXPECT_EQ(::posix_spawn(&pid_, path.c_str(), &actions, nullptr, argv.data(), envp.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(out[1]);
    out_ = out[0];
  }
  ~Program() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      (void)wait();
    }
    ::close(out_);
  }
  Program(const Program&) = delete;  // owns a process
  Program& operator=(const Program&) = delete;

  /// Returns the next line of standard output; empty at its end.
  std::string read_line() {
    std::string line;
    char c = 0;
    while (::read(out_, &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  void signal(int number) { ::kill(pid_, number); }
  /// Stops the program and returns once all of its threads have stopped.
  void stop() {
    signal(SIGSTOP);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    siginfo_t info{};
    while (std::chrono::steady_clock::now() < deadline) {
      if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOHANG) == 0 &&
          info.si_pid == pid_) {
        return;
      }
      std::this_thread::yield();
    }
    ADD_FAILURE() << "program " << pid_ << " does not stop";
  }
  /// Returns the exit code, or -1 after a signal.
  int wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  static std::vector<char*> pointers(const std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
    result.push_back(nullptr);
    return result;
  }

  pid_t pid_ = -1;
  int out_ = -1;
};

}  // namespace kvtier::testing
