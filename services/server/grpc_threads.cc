#include "services/server/grpc_threads.h"

#include <absl/synchronization/mutex.h>
#include <sched.h>

namespace kvtier::services {
namespace {

bool set_policy(int policy) noexcept {
  const sched_param none{};
  return ::sched_setscheduler(0, policy, &none) == 0;
}

}  // namespace

CalmThreads::CalmThreads() noexcept
    : changed_(::sched_getscheduler(0) == SCHED_OTHER && set_policy(SCHED_BATCH)) {}

CalmThreads::~CalmThreads() {
  if (changed_) set_policy(SCHED_OTHER);
}

void stop_deadlock_search() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

}  // namespace kvtier::services
