#pragma once

#include "kvtier/engine.h"

#include "benchmarks/benchmarks.h"

#include <cuda_bf16.h>

#include <cstdint>
#include <vector>

namespace kvtier::bench {

/// Layers of the graph of a step: those given, or enough that the L2 cache keeps nothing of them.
[[nodiscard]] int num_layers(const StepCase& step);
/// An engine for the steps of a case, with room for its tokens, and for those that replays append.
[[nodiscard]] Config engine_config(const StepCase& step, int layers);

/// Fills every layer of new sessions, as many as the case has, with standard normal keys and
/// values. They are on the device when it returns.
[[nodiscard]] std::vector<Session> open_sessions(Run& run, Engine& engine, const StepCase& step,
                                                 int layers);

/// What a row of results says of the case.
[[nodiscard]] json step_parameters(const StepCase& step, int layers);

/// bf16 `[tokens, heads, head_dim]` in device memory.
[[nodiscard]] TensorView view(const __nv_bfloat16* data, std::int64_t tokens, int heads,
                              int head_dim);

}  // namespace kvtier::bench
