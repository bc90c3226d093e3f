#include "services/tools/stress/interrupt.h"

#include <atomic>

namespace kvtier::services {
namespace {

std::atomic<bool> flag = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a handler may touch nothing else

void raise_flag(int /*signal*/) { flag = true; }

}  // namespace

InterruptFlag::InterruptFlag() {
  flag = false;
  struct sigaction action {};
  action.sa_handler = raise_flag;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &interrupt_);
  sigaction(SIGTERM, &action, &terminate_);
}

InterruptFlag::~InterruptFlag() {
  sigaction(SIGINT, &interrupt_, nullptr);
  sigaction(SIGTERM, &terminate_, nullptr);
}

bool InterruptFlag::raised() noexcept { return flag; }

}  // namespace kvtier::services
