#pragma once

#include "scoring/estimator.h"

/// The two implementations behind scoring/estimator.h; arguments as there.
namespace kvtier::scoring {

namespace cpu {
void build_query_tables(const ScoreParams& params, const hashing::PlanesView& planes,
                        const float* queries, int num_rows, int query_heads, float* entries,
                        QueryScalars* scalars);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
void build_query_tables(void* stream, const ScoreParams& params, const hashing::PlanesView& planes,
                        const float* queries, int num_rows, int query_heads, float* entries,
                        QueryScalars* scalars);
}  // namespace cuda

}  // namespace kvtier::scoring
