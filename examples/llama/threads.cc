#include "llama/threads.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace kvtier::llama {

void run_parallel(int threads, std::int64_t count, const std::function<void(std::int64_t)>& body) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t i = next++; i < count; i = next++) body(i);
  };
  std::vector<std::jthread> others;
  const std::int64_t extra = std::min<std::int64_t>(threads, count) - 1;
  for (std::int64_t i = 0; i < extra; ++i) others.emplace_back(work);
  work();
}

}  // namespace kvtier::llama
