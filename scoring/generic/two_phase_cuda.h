#pragma once

#include "scoring/plan/selector_cuda.h"

namespace kvtier::scoring::cuda {

/// `select` of a request with `coarse_bits`, on the generic path.
void enqueue_two_phases(cudaStream_t stream, const SelectRequest& request,
                        const SelectorWorkspace& workspace);

}  // namespace kvtier::scoring::cuda
