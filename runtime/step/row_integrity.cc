#include "runtime/step/row_integrity.h"

#include "kvtier/error.h"

#include "runtime/sequence/row_cache.h"
#include "transfer/kv/row_checks.h"

#include <algorithm>
#include <string>

namespace kvtier::runtime {
namespace {

/// Tells whether the stored rows of a page are those that were written.
bool is_whole(const transfer::KvGeometry& kv, const std::byte* page, std::int64_t begin,
              std::int64_t end) {
  for (int head = 0; head < kv.kv_heads; ++head) {
    for (std::int64_t token = begin; token < end; ++token) {
      if (!transfer::row_is_whole(kv, page, head, token)) return false;
    }
  }
  return true;
}

/// Lets copies in a tier take the place of a layer's changed pages. Returns how many have none.
std::size_t repair(transfer::Stream& stream, EngineState& engine, LayerState& layer) {
  give_back_row_cache(stream, engine.pools, layer);
  const std::int64_t unit = engine.kv.page_tokens;
  std::size_t num_lost = 0;
  for (std::int64_t i = 0; i < ceil_div(layer.length, unit); ++i) {
    const std::byte* page = layer.pages.address(i);
    if (page == nullptr) continue;  // in a tier
    if (is_whole(engine.kv, page, i * unit, std::min((i + 1) * unit, layer.length))) continue;
    if (!engine.pools.pages->discard(layer.pages.page(i))) ++num_lost;
  }
  return num_lost;
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
  throw Error(ErrorCode::kDataLoss, "rows in host memory: expected as they were written, found " +
                                        std::to_string(corrupt) +
                                        " changed, and no other copy of " +
                                        std::to_string(num_lost) + " pages");
}

void attend_verified(SubmissionScope& scope, EngineState& engine, int layer,
                     std::span<const AttendPart> parts, bool after_append) {
  attend(scope, engine, layer, parts, after_append);
  if (!engine.kv.row_checks || !scope.synchronous() || scope.capturing()) return;
  for (const bool last : {false, true}) {
    engine.submission.wait(scope.stream());
    bool whole = true;
    for (const AttendPart& part : parts) {
      whole = verify_after_read(scope.stream(), *part.session, last) && whole;
    }
    if (whole) return;
    attend(scope, engine, layer, parts);
  }
}

}  // namespace kvtier::runtime
