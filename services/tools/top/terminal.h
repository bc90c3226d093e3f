#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace kvtier::services {

/// The whole of a terminal, on standard input and output, until this ends: no echo, a screen of its
/// own, no cursor. One at a time.
class Terminal {
 public:
  /// Throws `kFailedPrecondition` unless both are a terminal.
  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;  // restores the terminal once
  Terminal& operator=(const Terminal&) = delete;

  [[nodiscard]] std::size_t columns() const;
  [[nodiscard]] std::size_t rows() const;
  void show(const std::vector<std::string>& lines) const;

  enum class Event { kTime, kResize, kQuit };
  /// Waits until `time` has passed, the size has changed, or the user has pressed q or Ctrl-C or
  /// ended the program from outside.
  [[nodiscard]] Event wait(std::chrono::milliseconds time) const;
};

}  // namespace kvtier::services
