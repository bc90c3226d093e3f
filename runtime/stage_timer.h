#pragma once

#include "runtime/engine_state.h"

#include <chrono>

namespace kvtier::runtime {

/// Adds host-clock time of a stage to `total`, waiting for the stage, when stages are timed.
class StageTimer {
 public:
  StageTimer(EngineState::Turn& turn, const EngineState& engine, double& total)
      : turn_(turn), active_(engine.config.time_stages && turn.synchronous()), total_(total) {
    if (active_) start_ = std::chrono::steady_clock::now();
  }
  void stop() {
    if (!active_) return;
    turn_.stream().synchronize();
    total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  EngineState::Turn& turn_;
  bool active_;
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kvtier::runtime
