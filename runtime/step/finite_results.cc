#include "runtime/step/finite_results.h"

#include "kvtier/error.h"

#include "runtime/step/row_integrity.h"
#include "transfer/kv/rows.h"

#include <string>

namespace kvtier::runtime {
namespace {

bool readable(const EngineState& engine, const MutableTensorView& out) {
  if (out.empty()) return false;
  return out.space == MemorySpace::kHost || engine.device->backend() == Backend::kCpu;
}

/// Returns whether tokens [begin, begin + count) of `out` are finite.
bool finite(const EngineState& engine, const MutableTensorView& out, std::int64_t begin,
            std::int64_t count) {
  const std::int64_t offset = begin * out.strides[0];
  const auto* data = static_cast<const std::byte*>(out.data) +
                     offset * static_cast<std::int64_t>(dtype_bytes(out.dtype));
  return transfer::all_finite({data, out.dtype, out.strides[0], out.strides[1]}, count,
                              engine.kv.query_heads, engine.kv.head_dim);
}

}  // namespace

void attend_finite(SubmissionScope& scope, EngineState& engine, int layer,
                   std::span<const AttendPart> parts, bool after_append) {
  attend_verified(scope, engine, layer, parts, after_append);
  if (!engine.config.reject_nonfinite || !scope.synchronous() || scope.capturing()) return;
  engine.submission.wait(scope.stream());
  for (const AttendPart& part : parts) {
    const MutableTensorView& out = part.outputs.out;
    if (!readable(engine, out) || finite(engine, out, 0, out.shape[0])) continue;
    std::int64_t first = 0;
    while (finite(engine, out, first, 1)) ++first;
    const std::int64_t after = out.shape[0] + part.options.tokens_after - first;
    const std::int64_t token = part.session->layer(layer).length - after;
    throw Error(ErrorCode::kInvalidArgument,
                "layer " + std::to_string(layer) + ": expected finite results, found NaN or " +
                    "infinity in out of token " + std::to_string(token) +
                    ", since sums of products of these tensors are beyond fp32");
  }
}

}  // namespace kvtier::runtime
