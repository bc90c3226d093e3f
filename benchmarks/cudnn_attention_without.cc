#include "kvtier/error.h"

#include "benchmarks/cudnn_attention_cuda.h"

namespace kvtier::bench {

struct CudnnFunctions {};
struct CudnnAttention::Plans {};

namespace {

constexpr const char* kMissing =
    "cuDNN: expected a build with its headers (cudnn.h beside the CUDA toolkit's or on the include "
    "path), found none";

}  // namespace

std::shared_ptr<const CudnnLibrary> CudnnLibrary::load(const std::vector<std::string>&) {
  throw Error(ErrorCode::kUnimplemented, kMissing);
}
CudnnLibrary::~CudnnLibrary() = default;

CudnnAttention::CudnnAttention(std::shared_ptr<const CudnnLibrary>, const Shape&) {
  throw Error(ErrorCode::kUnimplemented, kMissing);
}
CudnnAttention::~CudnnAttention() = default;
int CudnnAttention::num_plans() const noexcept { return 0; }
void CudnnAttention::run(void*, int, const void*, const void*, const void*, void*) const {}

}  // namespace kvtier::bench
