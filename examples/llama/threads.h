#pragma once

#include <cstdint>
#include <functional>

namespace kvtier::llama {

/// Runs `body(i)` for i in [0, count), each once, on up to `threads` threads, the caller among
/// them; returns when all have run. `body` must not throw. Threads live for the call only, so none
/// compete with kvtier's own between calls.
void run_parallel(int threads, std::int64_t count, const std::function<void(std::int64_t)>& body);

}  // namespace kvtier::llama
