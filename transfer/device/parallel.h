#pragma once

#include <cstdint>
#include <functional>

namespace kvtier::transfer {

/// Calls `body(begin, end)` over disjoint ranges that cover [0, count), at least `grain` long (the
/// last may be shorter), on several threads; returns when all are done. Ranges may start in any
/// order. Exceptions of a body are rethrown, one of them when several throw. Nested calls are
/// allowed. `body` is not copied.
void parallel_for(std::int64_t count, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& body);

/// Calls `body(i)` for each i of [0, count), `grain` of them at a time, as `parallel_for`.
template <typename Body>
void parallel_for_each(std::int64_t count, std::int64_t grain, const Body& body) {
  parallel_for(count, grain, [&body](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(i);
  });
}

/// Returns the threads that `parallel_for` uses, the caller's included.
[[nodiscard]] int parallel_threads();

}  // namespace kvtier::transfer
