#include "kvtier/error.h"

#include "llama/bench.h"

namespace kvtier::llama {

bool has_gpu_bench() { return false; }

std::vector<BenchRow> bench_on_gpu(const BenchShape& /*shape*/, const BenchOptions& /*options*/,
                                   const Method& /*sparse*/) {
  throw Error(
      ErrorCode::kUnimplemented,
      "bench --backend cuda: expected a build with KVTIER_CUDA and KVTIER_BUILD_BENCHMARKS, "
      "found one without");
}

}  // namespace kvtier::llama
