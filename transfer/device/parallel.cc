#include "transfer/device/parallel.h"

#include <algorithm>

#if defined(KVTIER_PLAIN_THREADS)
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>
#else
#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#endif

namespace kvtier::transfer {
namespace {

using Body = std::function<void(std::int64_t, std::int64_t)>;

struct Chunks {
  std::int64_t count;
  std::int64_t grain;

  [[nodiscard]] std::int64_t size() const { return count / grain + (count % grain != 0 ? 1 : 0); }
  /// Calls `body` over chunks [first, last).
  void call(const Body& body, std::int64_t first, std::int64_t last) const {
    const std::int64_t begin = first * grain;
    body(begin, last == size() ? count : last * grain);
  }
};

#if defined(KVTIER_PLAIN_THREADS)

thread_local bool inside_parallel_for = false;

void for_chunks(const Chunks& chunks, const Body& body) {
  if (inside_parallel_for) return chunks.call(body, 0, chunks.size());

  std::atomic<std::int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto drain = [&] {
    inside_parallel_for = true;
    try {
      for (std::int64_t i = next++; i < chunks.size(); i = next++) chunks.call(body, i, i + 1);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next = chunks.size();
    }
    inside_parallel_for = false;
  };
  {
    std::vector<std::thread> threads;
    const std::int64_t helpers = std::min<std::int64_t>(parallel_threads(), chunks.size()) - 1;
    for (std::int64_t i = 0; i < helpers; ++i) threads.emplace_back(drain);
    drain();
    for (std::thread& thread : threads) thread.join();
  }
  if (error) std::rethrow_exception(error);
}

#else

void for_chunks(const Chunks& chunks, const Body& body) {
  // Isolated, so that a thread waiting inside a nested call takes no unrelated range.
  tbb::this_task_arena::isolate([&] {
    tbb::parallel_for(tbb::blocked_range<std::int64_t>(0, chunks.size(), 1),
                      [&](const tbb::blocked_range<std::int64_t>& range) {
                        chunks.call(body, range.begin(), range.end());
                      });
  });
}

#endif

}  // namespace

void parallel_for(std::int64_t count, std::int64_t grain, const Body& body) {
  if (count <= 0) return;
  const Chunks chunks{count, std::max<std::int64_t>(grain, 1)};
  if (chunks.size() == 1) return body(0, count);
  for_chunks(chunks, body);
}

int parallel_threads() {
#if defined(KVTIER_PLAIN_THREADS)
  // Two at least: a race needs two threads, whatever the machine.
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 2, 8);
#else
  return tbb::this_task_arena::max_concurrency();
#endif
}

}  // namespace kvtier::transfer
