#pragma once

#include "scoring/block/block_cuda.cuh"
#include "scoring/plan/paths_cuda.h"
#include "scoring/score_math.h"

#include <cuda_fp16.h>

#include <cstdint>

/// The kernels of all paths but the generic one copy asynchronously, and some work in clusters. For
/// older architectures they are compiled empty; `plan_selection` keeps them from being launched
/// there.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define KVTIER_HAS_CLUSTERS 1
#else
#pragma nv_diag_suppress 177  // what the empty kernels do not call
#endif

/// Device functions that these paths share.
namespace kvtier::scoring::cuda {

inline constexpr float kLog2E = 1.4426950408889634F;

/// Value of a token that scores lowest. Its share is 0.
inline constexpr float kLowestValue = -3.0e38F;

/// 2^x, 0 below 2^-126.
__device__ inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// `params`: of the selection. `early`: before a wait, when L1 may hold a former length.
__device__ inline QueryPlan plan_of_query(const FilterArgs& args, const ScoreParams& params,
                                          int query_index, bool early = false) {
  const SelectRequest& request = args.request;
  const transfer::QueryToken& query = request.query_batch[query_index];
  const std::int64_t& length = request.sequences[query.sequence].counters->length;
  const transfer::AttendedSpans spans =
      transfer::attended_spans(request.rule, early ? __ldcg(&length) : length, query);
  return {.begin = spans.sink_end,
          .end = spans.eligible_end,
          .k = transfer::num_to_select(params.top_k, params.sparsity, spans),
          .blocks = request.sketches[query.sequence]};
}

}  // namespace kvtier::scoring::cuda
