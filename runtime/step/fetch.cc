#include "runtime/step/result_checks.h"
#include "runtime/step/step.h"
#include "runtime/step/tiered_attention.h"
#include "transfer/kv/row_checks.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace kvtier::runtime {
namespace {

/// Rows gathered at a time: large enough for a launch to be worth it, small enough for a cache.
constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;
constexpr std::int32_t kNone = -1;

/// Tokens [first, first + count) of KV heads [head, head + heads).
struct Part {
  std::int64_t first = 0, count = 0, head = 0, heads = 0;
};

/// The gather of a part.
class Piece {
 public:
  Piece(const transfer::KvGeometry& kv, std::int64_t max_count)
      : kv_(kv),
        ids_(static_cast<std::size_t>(kv.kv_heads * max_count)),
        counts_(static_cast<std::size_t>(kv.kv_heads)),
        rows_(static_cast<std::size_t>(kv.kv_heads * max_count * kv.row_bytes())) {}

  void gather(SubmissionScope& scope, EngineState& engine, const transfer::SequenceView& sequence,
              transfer::StepFlags* flags, const TensorView& tokens, const Part& part) {
    part_ = part;
    const std::int64_t count = part.count;
    std::fill(counts_.begin(), counts_.end(), 0);
    for (std::int64_t head = part.head; head < part.head + part.heads; ++head) {
      // Rows of no token are gathered like the others, and dropped.
      const std::int32_t* from = ids_of(tokens, head);
      std::transform(from, from + count, ids_.begin() + head * count,
                     [](std::int32_t id) { return std::max(id, 0); });
      counts_[static_cast<std::size_t>(head)] = static_cast<std::int32_t>(count);
    }

    HostStaging& staging = engine.workspace.staging;
    const std::int64_t heads = kv_.kv_heads;
    const HostStaging::Slice ids =
        staging.input(scope.stream(), {ids_.data(), DType::kInt32, {1, heads, count}}, 0, 1);
    const HostStaging::Slice counts =
        staging.input(scope.stream(), {counts_.data(), DType::kInt32, {1, heads, 1}}, 0, 1);
    const HostStaging::Slice rows = staging.output(
        {rows_.data(), kv_.dtype, {heads, count, std::int64_t{2} * kv_.head_dim}}, 0, heads);
    transfer::SequenceBatch sequences;
    sequences.push(sequence);
    transfer::QueryBatch query;
    query.push({.dense_from = std::numeric_limits<std::int64_t>::max()});
    transfer::SelectionView selection;
    selection.ids = static_cast<std::int32_t*>(ids.data);
    selection.counts = static_cast<std::int32_t*>(counts.data);
    selection.capacity = selection.staged_capacity = count;
    selection.staged = static_cast<std::byte*>(rows.data);
    if (kv_.row_checks) {
      transfer::RowReading reading{.sequences = sequences,
                                   .flags = {},
                                   .query_batch = query,
                                   .selection = selection,
                                   .rule = {},
                                   .frames = engine.pools.frame_checks};
      reading.flags.push(flags);
      transfer::gather_whole_rows(scope.stream(), kv_, reading, nullptr);
    } else {
      const bool pages_on_device = engine.config.memory.placement == KvPlacement::kDevice;
      transfer::gather_rows(scope.stream(), kv_, sequences, query, selection, pages_on_device,
                            nullptr);
    }
    staging.finish(scope.stream());
    scope.stream().synchronize();  // the staging of the CPU backend does not wait
  }

  /// Writes what was gathered.
  void write(const TensorView& tokens, const FetchOutputs& outputs) const {
    const std::byte* row = rows_.data() + part_.head * part_.count * kv_.row_bytes();
    const auto bytes = static_cast<std::size_t>(kv_.row_bytes() / 2);
    for (std::int64_t head = part_.head; head < part_.head + part_.heads; ++head) {
      const std::int32_t* ids = ids_of(tokens, head);
      for (std::int64_t i = 0; i < part_.count; ++i, row += kv_.row_bytes()) {
        std::byte* key = address(outputs.keys, head, part_.first + i);
        std::byte* value = address(outputs.values, head, part_.first + i);
        if (ids[i] == kNone) {
          std::memset(key, 0, bytes);
          std::memset(value, 0, bytes);
        } else {
          std::memcpy(key, row, bytes);
          std::memcpy(value, row + bytes, bytes);
        }
      }
    }
  }

 private:
  [[nodiscard]] const std::int32_t* ids_of(const TensorView& tokens, std::int64_t head) const {
    return static_cast<const std::int32_t*>(tokens.data) + head * tokens.strides[0] + part_.first;
  }
  static std::byte* address(const MutableTensorView& tensor, std::int64_t head, std::int64_t i) {
    const std::int64_t element = head * tensor.strides[0] + i * tensor.strides[1];
    return static_cast<std::byte*>(tensor.data) +
           element * static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  }

  const transfer::KvGeometry& kv_;
  Part part_;
  std::vector<std::int32_t> ids_;     ///< `[kv_heads, count]`
  std::vector<std::int32_t> counts_;  ///< `[kv_heads]`
  std::vector<std::byte> rows_;       ///< `[kv_heads, count, row]`
};

/// Restores the pages of a part, or of as many of its tokens as can be had at once, of as many KV
/// heads where that is one. Returns what it is then. Throws `kResourceExhausted` when that is none.
Part ensure_some_resident(SubmissionScope& scope, EngineState& engine, LayerState& layer,
                          const TensorView& tokens, Part part) {
  std::vector<std::int32_t> ids;
  for (;;) {
    ids.clear();
    for (std::int64_t head = part.head; head < part.head + part.heads; ++head) {
      const auto* from =
          static_cast<const std::int32_t*>(tokens.data) + head * tokens.strides[0] + part.first;
      for (std::int64_t i = 0; i < part.count; ++i) ids.push_back(std::max(from[i], 0));
    }
    if (ensure_tokens_resident(scope.stream(), engine, layer, ids)) return part;
    if (ids.size() == 1) fail_too_many(engine, 1);
    part.count > 1 ? part.count /= 2 : part.heads /= 2;
  }
}

}  // namespace

void fetch(SubmissionScope& scope, SessionState& session, int layer, const TensorView& tokens,
           const FetchOutputs& outputs) {
  EngineState& engine = session.engine();
  const std::int64_t n = tokens.shape[1];
  const std::int64_t token_bytes = engine.kv.row_bytes() * engine.kv.kv_heads;
  const std::int64_t most = std::min(n, std::max<std::int64_t>(kPieceBytes / token_bytes, 1));
  Piece piece(engine.kv, most);
  const std::int64_t heads = engine.kv.kv_heads;
  int tries = 0;
  for (std::int64_t first = 0, head = 0; first < n;) {
    Part part{
        .first = first, .count = std::min(most, n - first), .head = head, .heads = heads - head};
    if (head > 0) part.count = 1;  // those before are of one token
    if (engine.pools.pages->has_tiers()) {
      part = ensure_some_resident(scope, engine, session.layer(layer), tokens, part);
    }
    piece.gather(scope, engine, session.layer(layer).view, session.flags(), tokens, part);
    if (!verify_after_read(scope.stream(), session, tries > 0)) {
      ++tries;
      continue;
    }
    tries = 0;
    piece.write(tokens, outputs);
    head = part.head + part.heads;
    if (head < heads) continue;
    head = 0;
    first += part.count;
  }
}

}  // namespace kvtier::runtime
