#pragma once

#include "transfer/row_cache/row_cache.h"

/// The two implementations behind transfer/row_cache/row_cache.h; arguments as there.
namespace kvtier::transfer {

namespace cpu {  // `num_sets`: of all KV heads
void forget_cached_rows(const RowCacheForget& forget, std::int64_t num_sets);
void gather_cached_rows(const KvGeometry& geometry, const RowCacheGather& gather);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
void forget_cached_rows(void* stream, const RowCacheForget& forget, std::int64_t num_sets);
void gather_cached_rows(void* stream, const KvGeometry& geometry, const RowCacheGather& gather);
}  // namespace cuda

}  // namespace kvtier::transfer
