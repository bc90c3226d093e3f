#pragma once

#include "scoring/plan/paths_cuda.h"

/// Host side of the selection by a stream of keys (stream/stream_cuda.cuh).
namespace kvtier::scoring::cuda {

/// Returns whether the path serves a request that `filter_serves` is true of.
[[nodiscard]] bool stream_serves(const SelectRequest& request);
/// Returns whether it attends as well, where rows are on the device.
[[nodiscard]] bool stream_fuses_attention(const SelectRequest& request);
/// Fills `args.selection`, from tables that `read_queries` has built. Two launches.
void enqueue_stream_select(cudaStream_t stream, const FilterArgs& args);

/// Blocks of the pass, one for each multiprocessor.
[[nodiscard]] int stream_blocks();
void enqueue_stream_pass(cudaStream_t stream, const FilterArgs& args);
void enqueue_stream_choice(cudaStream_t stream, const FilterArgs& args);

}  // namespace kvtier::scoring::cuda
