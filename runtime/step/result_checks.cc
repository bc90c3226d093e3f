#include "runtime/step/result_checks.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "runtime/sequence/row_cache.h"
#include "transfer/kv/row_checks.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <string>

namespace kvtier::runtime {
namespace {

/// Lets copies in a tier take the place of a layer's changed pages. Returns how many have none.
std::size_t repair(transfer::Stream& stream, EngineState& engine, LayerState& layer) {
  forget_cached_rows(stream, engine.pools, layer, 0);
  const std::int64_t unit = engine.kv.page_tokens;
  std::size_t num_lost = 0;
  for (std::int64_t i = 0; i < ceil_div(layer.length, unit); ++i) {
    const std::byte* page = layer.pages.address(i);
    if (page == nullptr) continue;  // in a tier
    const std::int64_t end = std::min((i + 1) * unit, layer.length);
    if (transfer::num_changed_rows(engine.kv, page, i * unit, end) == 0) continue;
    if (!engine.pools.pages->discard(layer.pages.page(i))) ++num_lost;
  }
  return num_lost;
}

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
                              engine.kv.query_heads(), engine.kv.head_dim);
}

/// Attends again, after repairs, until every row was whole.
void verify_rows_read(SubmissionScope& scope, EngineState& engine, int layer,
                      std::span<const AttendPart> parts) {
  for (const bool last : {false, true}) {
    engine.submission.wait(scope.stream());
    bool whole = true;
    for (const AttendPart& part : parts) {
      whole = verify_after_read(scope.stream(), *part.session, last) && whole;
    }
    if (whole) return;
    (void)attend(scope, engine, layer, parts);  // its queries count once
  }
}

/// Throws when an `out` that the host can read has NaN or infinity.
void check_finite(SubmissionScope& scope, EngineState& engine, int layer,
                  std::span<const AttendPart> parts) {
  engine.submission.wait(scope.stream());
  for (const AttendPart& part : parts) {
    const MutableTensorView& out = part.outputs.out;
    if (!readable(engine, out) || finite(engine, out, 0, out.shape[0])) continue;
    std::int64_t first = 0;
    while (finite(engine, out, first, 1)) ++first;
    const std::int64_t after = out.shape[0] + part.options.tokens_after - first;
    const std::int64_t token = part.session->layer(layer).length - after;
    throw_error(ErrorCode::kInvalidArgument, "layer ", layer,
                ": expected finite results, found NaN or ", "infinity in out of token ", token,
                ", since sums of products of these tensors are beyond fp32");
  }
}

}  // namespace

bool verify_after_read(transfer::Stream& stream, SessionState& session, bool last) {
  const std::uint64_t corrupt = session.take_corrupt();
  if (corrupt == 0) return true;
  EngineState& engine = session.engine();
  engine.log(LogLevel::kError, "rows in host memory: expected as they were written, found " +
                                   std::to_string(corrupt) + " changed");
  std::size_t num_lost = 0;
  for (int i = 0; i < session.num_layers(); ++i) {
    num_lost += repair(stream, engine, session.layer(i));
  }
  if (num_lost == 0 && !last) return false;
  throw_error(ErrorCode::kDataLoss, "rows in host memory: expected as they were written, found ",
              corrupt, " changed, and no other copy of ", num_lost, " pages");
}

void check_results(SubmissionScope& scope, EngineState& engine, int layer,
                   std::span<const AttendPart> parts) {
  if (!scope.synchronous() || scope.capturing()) return;
  if (engine.kv.row_checks) verify_rows_read(scope, engine, layer, parts);
  if (engine.config.reject_nonfinite) check_finite(scope, engine, layer, parts);
}

}  // namespace kvtier::runtime
