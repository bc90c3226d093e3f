#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvtier::bench {

/// How calls ended.
struct Outcomes {
  std::vector<double> admitted, rejected;  ///< Seconds of each call, from when it was due.
  std::size_t in_time = 0;                 ///< Of the admitted, before new calls ended.
  std::string failure;                     ///< Of a call that ended in any other way.
  double client_cpu_seconds = 0;           ///< What making them took.
};

/// Calls of one method, made with as little work as can be: requests are frames of HTTP/2 that are
/// there already, and of a reply only its end is looked at. A client of gRPC spends as much on a
/// call as a server does that refuses it, which is a share of the machine that belongs to neither
/// side of a comparison where the two share cores.
class RawLoad {
 public:
  /// `requests` are messages, sent in turn, over connections to a Unix socket in turn. Throws
  /// `std::runtime_error` when they cannot be had, here and below when one ends.
  RawLoad(const std::string& socket, int connections, const std::string& method,
          const std::vector<std::string>& requests);
  ~RawLoad();
  RawLoad(const RawLoad&) = delete;  // owns sockets
  RawLoad& operator=(const RawLoad&) = delete;

  /// As many calls as are completed with `outstanding` at a time.
  [[nodiscard]] Outcomes closed(int outstanding, std::chrono::nanoseconds time);
  /// Calls at a fixed rate, whatever becomes of those before. Those of a millisecond are made at
  /// once, and replies are looked at then: woken for each, the client would take a core's tenth.
  [[nodiscard]] Outcomes open(double per_second, std::chrono::nanoseconds time);

 private:
  class Connection;
  using Clock = std::chrono::steady_clock;

  /// Makes calls until `end`, and ends when all are answered. `due` receives how many were made and
  /// how they ended, and says when the next is due; `max()`: not before another has ended. Sleeps
  /// for `pause` after each look at the connections.
  template <typename Due>
  Outcomes run(Clock::time_point end, std::chrono::nanoseconds pause, Due due);

  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<std::string> bodies_;  ///< DATA frames but for their stream.
  std::size_t next_ = 0;
};

}  // namespace kvtier::bench
