#pragma once

#include "scoring/plan/paths_cuda.h"

/// Host side of the selection by a stream of keys (stream/stream_cuda.cuh).
namespace kvtier::scoring::cuda {

/// Returns whether the path serves a shape, where blocks may wait for one another.
[[nodiscard]] bool stream_serves(const SelectShape& shape);
/// The same with a recall target, or where the missed mass is wanted.
[[nodiscard]] bool stream_serves_recall(const SelectShape& shape);
void plan_stream(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan);
/// Fills `args.selection` of the queries `args.part`. Two launches.
void enqueue_stream(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan);

/// The same of soft collisions, by a pass of its own (stream/collision_pass_cuda.cu).
[[nodiscard]] bool stream_serves_collisions(const SelectShape& shape);
void enqueue_collision_pass(cudaStream_t stream, const FilterArgs& args);

/// Blocks of the pass, one for each multiprocessor.
[[nodiscard]] int stream_blocks();
/// `blocks`: of the pass of norm-aware scores.
void enqueue_stream_pass(cudaStream_t stream, const FilterArgs& args, int blocks);
/// `second`: parameters of the second of two phases, or null.
void enqueue_stream_choice(cudaStream_t stream, const FilterArgs& args, const ScoreParams* second,
                           const SelectionPlan& plan);

}  // namespace kvtier::scoring::cuda
