#pragma once

#include "tests/support/eventually.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <poll.h>
#include <spawn.h>
#include <string>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace kvtier::testing {

/// How long a program may compute before it ends, or says the next word.
inline constexpr std::chrono::seconds kProgramPatience{300};

/// Returns the exit code of a child, or -1 after a signal. Fails the test, and kills a child that
/// does not end.
inline int wait_for_exit(pid_t pid) {
  int status = 0;
  if (!eventually([&] { return ::waitpid(pid, &status, WNOHANG) != 0; }, kProgramPatience)) {
    ADD_FAILURE() << "process " << pid << " does not end";
    ::kill(pid, SIGKILL);
    (void)::waitpid(pid, &status, 0);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// Reads the next byte of a pipe or terminal. Returns false at its end; fails the test when nothing
/// comes.
inline bool read_byte(int fd, char& byte) {
  pollfd waiting{fd, POLLIN, 0};
  const int ready =
      ::poll(&waiting, 1, static_cast<int>(std::chrono::milliseconds(kProgramPatience).count()));
  EXPECT_EQ(ready, 1) << "nothing comes";
  return ready == 1 && ::read(fd, &byte, 1) == 1;
}

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
    while (read_byte(out_, c) && c != '\n') line += c;
    return line;
  }
  /// Returns what is left of standard output at its end.
  std::string read_rest() {
    std::string text;
    for (char c = 0; read_byte(out_, c);) text += c;
    return text;
  }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  void signal(int number) { ::kill(pid_, number); }
  /// Stops the program and returns once all of its threads have stopped.
  void stop() {
    signal(SIGSTOP);
    siginfo_t info{};
    EXPECT_TRUE(eventually([&] {
      return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOHANG) == 0 &&
             info.si_pid == pid_;
    })) << "program "
        << pid_ << " does not stop";
  }
  /// Returns the exit code, or -1 after a signal.
  int wait() { return wait_for_exit(std::exchange(pid_, -1)); }

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
