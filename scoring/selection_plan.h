#pragma once

#include "scoring/selector.h"
#include "transfer/device/device.h"

namespace kvtier::scoring {

/// Tells whether it is known how many tokens `Selector::select` will select of each row, before it
/// has: `transfer::num_to_select`. On CUDA the last kernel of such a selection lets the next one
/// start only after its own wait (transfer/device/launch_cuda.cuh): that one may read all but the
/// selection and the queries before it waits for it.
[[nodiscard]] bool k_known_on_host(const transfer::Stream& stream, const SelectRequest& request);

/// Tells whether `Selector::select` can read the caller's queries of such a request itself: then it
/// may be given them as `SelectRequest::input`, and needs no tables.
[[nodiscard]] bool fuses_query_projection(const transfer::Stream& stream,
                                          const SelectRequest& request);

/// Tells whether `Selector::select` can attend as well, where it is told `SelectRequest::attend`:
/// the rows must then lie where `row_address` says, in device memory.
[[nodiscard]] bool fuses_attention(const transfer::Stream& stream, const SelectRequest& request);

namespace cuda {
[[nodiscard]] bool k_known_on_host(const SelectRequest& request);
[[nodiscard]] bool fuses_query_projection(const SelectRequest& request);
[[nodiscard]] bool fuses_attention(const SelectRequest& request);
}  // namespace cuda

}  // namespace kvtier::scoring
