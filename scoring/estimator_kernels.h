#pragma once

#include "scoring/estimator.h"

/// The two implementations behind scoring/estimator.h; arguments as there.
namespace kvtier::scoring {

namespace cpu {
void build_query_tables(const ScoreParams& params, const hashing::PlanesView& planes,
                        const float* queries, int num_queries, int query_heads, float* entries,
                        QueryScalars* scalars);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
void build_query_tables(void* stream, const ScoreParams& params, const hashing::PlanesView& planes,
                        const float* queries, int num_queries, int query_heads, float* entries,
                        QueryScalars* scalars);

/// Returns whether the device has what `read_queries` needs, clusters of blocks, and it is faster.
[[nodiscard]] bool reads_queries_at_once(const ScoreParams& params, const QueryInput& input);
void read_queries(void* stream, const ScoreParams& params, const hashing::PlanesView& planes,
                  const QueryInput& input, float* queries, float* entries, QueryScalars* scalars);
}  // namespace cuda

}  // namespace kvtier::scoring
