#pragma once

#include "runtime/engine/engine_state.h"

#include <chrono>

namespace kvtier::runtime {

/// Adds host-clock time of a stage to `total`, waiting for the stage, when stages are timed.
class StageTimer {
 public:
  StageTimer(SubmissionScope& scope, const EngineState& engine, double& total)
      : scope_(scope), active_(engine.config.time_stages && scope.synchronous()), total_(total) {
    if (active_) start_ = std::chrono::steady_clock::now();
  }
  void stop() {
    if (!active_) return;
    scope_.stream().synchronize();
    total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  SubmissionScope& scope_;
  bool active_;
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kvtier::runtime
