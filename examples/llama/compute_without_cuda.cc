#include "kvtier/error.h"

#include "llama/compute.h"

namespace kvtier::llama {

std::unique_ptr<Compute> make_cuda_compute(const std::string& /*cublas_directory*/) {
  throw Error(ErrorCode::kUnimplemented,
              "--matmul cuda: expected a build with KVTIER_CUDA, found one without");
}

}  // namespace kvtier::llama
