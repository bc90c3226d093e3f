#include "services/server/grpc_threads.h"

#include <gtest/gtest.h>

#include <sched.h>
#include <thread>

namespace kvtier::services {
namespace {

int policy_of_new_thread() {
  int policy = -1;
  std::thread([&policy] { policy = ::sched_getscheduler(0); }).join();
  return policy;
}

TEST(CalmThreads, StartsThreadsThatPreemptNobody) {
  const CalmThreads calm;

  EXPECT_EQ(policy_of_new_thread(), SCHED_BATCH);
}

TEST(CalmThreads, GivesTheThreadItsPolicyBack) {
  { const CalmThreads calm; }

  EXPECT_EQ(::sched_getscheduler(0), SCHED_OTHER);
  EXPECT_EQ(policy_of_new_thread(), SCHED_OTHER);
}

TEST(CalmThreads, LeavesAnotherPolicyAsItIs) {
  int before = -1, within = -1, after = -1;
  std::thread([&] {
    const sched_param none{};
    ::sched_setscheduler(0, SCHED_IDLE, &none);
    before = ::sched_getscheduler(0);
    {
      const CalmThreads calm;
      within = ::sched_getscheduler(0);
    }
    after = ::sched_getscheduler(0);
  }).join();

  EXPECT_EQ(before, SCHED_IDLE);
  EXPECT_EQ(within, SCHED_IDLE);
  EXPECT_EQ(after, SCHED_IDLE);
}

}  // namespace
}  // namespace kvtier::services
