#pragma once

#include <string_view>

namespace kvtier_engine {

/// The process that made an object. A fork of it has none of the library's threads, so that a call,
/// or the end of an engine, would wait for ever there.
class Process {
 public:
  Process();
  [[nodiscard]] bool is_forked() const noexcept;
  /// Throws `kFailedPrecondition` in a fork; `name`: of the object.
  void check(std::string_view name) const;

 private:
  int forks_;
};

}  // namespace kvtier_engine
