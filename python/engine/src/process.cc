#include "process.h"

#include "kvtier/error.h"

#include <pthread.h>
#include <string>

namespace kvtier_engine {

namespace {

/// Forks between the process that loaded the module and this one. Written in a child before it has
/// other threads.
int forks = 0;

}  // namespace

Process::Process() : forks_(forks) {
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
}

bool Process::is_forked() const noexcept { return forks_ != forks; }

void Process::check(std::string_view name) const {
  if (!is_forked()) return;
  throw kvtier::Error(
      kvtier::ErrorCode::kFailedPrecondition,
      std::string(name) + ": expected the process that made it, found a fork of that process");
}

}  // namespace kvtier_engine
