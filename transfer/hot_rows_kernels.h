#pragma once

#include "transfer/hot_rows.h"

/// The two implementations behind transfer/hot_rows.h; arguments as there.
namespace kvtier::transfer {

namespace cpu {  // `num_sets`: of all KV heads
void forget_hot_rows(const HotForget& forget, std::int64_t num_sets);
void gather_hot_rows(const KvGeometry& geometry, const HotGather& gather);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
void forget_hot_rows(void* stream, const HotForget& forget, std::int64_t num_sets);
void gather_hot_rows(void* stream, const KvGeometry& geometry, const HotGather& gather);
}  // namespace cuda

}  // namespace kvtier::transfer
